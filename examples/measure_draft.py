"""How many drafts of the built-in draft model are accepted, on held-out chapters.

    python examples/measure_draft.py                     # all 59 chapters: a CPU, minutes
    python examples/measure_draft.py --model runs/draft/model --chapters 8

The built-in model continues the beginning of each held-out chapter, with and without drafts. The
tokens are the same, which is checked.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from packing import Corpus, read_corpora

from onchip import LLM, SamplingParams
from onchip.engine.speculation.speculator import SpeculationStats
from onchip.models import builtin

TEMPERATURES = (0.0, 0.7, 1.0)


def beginnings(corpus: Corpus, count: int, length: int) -> list[list[int]]:
    """The first tokens of the first chapters."""
    starts = [0, *(corpus.ends[:-1] + 1).tolist()][:count]
    return [corpus.tokens[start : start + length].tolist() for start in starts]


def generate(
    prompts: Sequence[list[int]], params: SamplingParams, config: dict | None
) -> tuple[list[tuple[int, ...]], SpeculationStats | None, float]:
    """The continuations one by one, the drafts of all, and tokens per second."""
    length = len(prompts[0]) + params.max_tokens
    with LLM(max_model_len=length, num_pages=256, speculative_config=config) as llm:
        llm.generate([prompts[0]], SamplingParams(max_tokens=2), use_tqdm=False)  # warm
        before, began, tokens = llm.stats().speculation, time.perf_counter(), []
        for prompt in prompts:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
        rate = sum(map(len, tokens)) / (time.perf_counter() - began)
        assert before is None or not before.num_drafts
        return tokens, llm.stats().speculation, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=builtin.DRAFT, help="the draft model")
    parser.add_argument("--chapters", type=int, default=59)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a continuation")
    parser.add_argument("--drafts", type=int, default=4, help="drafts of a step, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are too small for several threads
    prompts = beginnings(read_corpora()[1], args.chapters, args.prompt)
    config = {"method": "draft", "model": args.model, "num_speculative_tokens": args.drafts}
    for temperature in TEMPERATURES:
        params = SamplingParams(
            temperature=temperature, max_tokens=args.tokens, seed=0, ignore_eos=True
        )
        plain, _, plain_rate = generate(prompts, params, None)
        drafted, stats, rate = generate(prompts, params, config)
        if drafted != plain:
            raise SystemExit("drafts changed the tokens")
        accepted = [n / stats.num_drafts for n in stats.num_accepted_tokens_per_pos]
        print(f"temperature {temperature}: {stats}")
        print(f"  by position: {', '.join(f'{share:.2f}' for share in accepted)}")
        print(f"  {rate:.0f} tokens/s; without drafts {plain_rate:.0f}")


if __name__ == "__main__":
    main()
