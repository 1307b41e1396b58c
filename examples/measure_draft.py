"""How many drafts of the built-in draft model are accepted, on held-out chapters.

    python examples/measure_draft.py                     # all 59 chapters: a CPU, a minute
    python examples/measure_draft.py --model runs/draft/model --chapters 8

The built-in model continues the beginnings of chapters that were held out of the training of both.
"""

import argparse
from collections.abc import Sequence

from packing import Corpus, read_corpora

from onchip import LLM, SamplingParams
from onchip.engine.speculation.speculator import SpeculationStats
from onchip.models import builtin

TEMPERATURES = (0.0, 0.7, 1.0)


def beginnings(corpus: Corpus, count: int, length: int) -> list[list[int]]:
    """The first tokens of the first chapters."""
    starts = [0, *(corpus.ends[:-1] + 1).tolist()][:count]
    return [corpus.tokens[start : start + length].tolist() for start in starts]


def count_accepted(
    prompts: Sequence[list[int]], params: SamplingParams, config: dict
) -> SpeculationStats:
    length = len(prompts[0]) + params.max_tokens
    pages = 1 + len(prompts) * -(-(length + config["num_speculative_tokens"]) // 16)
    with LLM(max_model_len=length, num_pages=pages, speculative_config=config) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        return llm.stats().speculation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=builtin.DRAFT, help="the draft model")
    parser.add_argument("--chapters", type=int, default=59)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a continuation")
    parser.add_argument("--drafts", type=int, default=4, help="drafts of a step, at most")
    args = parser.parse_args()
    prompts = beginnings(read_corpora()[1], args.chapters, args.prompt)
    config = {"method": "draft", "model": args.model, "num_speculative_tokens": args.drafts}
    for temperature in TEMPERATURES:
        how = {"temperature": temperature, "max_tokens": args.tokens, "seed": 0}
        stats = count_accepted(prompts, SamplingParams(**how, ignore_eos=True), config)
        accepted = [n / stats.num_drafts for n in stats.num_accepted_tokens_per_pos]
        positions = ", ".join(f"{share:.2f}" for share in accepted)
        print(f"temperature {temperature}: {stats}; by position {positions}")


if __name__ == "__main__":
    main()
