"""GRPO on a CPU, in one process over one copy of the weights: a built-in model learns to write
words that begin with "s".

    python examples/grpo.py --plot ratios.svg     # with the reproducible mode, then without
    python examples/grpo.py --model tiny --lr 1e-4 --batches 4      # twenty times the weights

A batch (group relative policy optimisation, Shao et al., arXiv 2402.03300):

    llm.generate     some continuations of each prompt, with their log probabilities
    reward           the share of words that begin with "s"; the advantage of a continuation is its
                     reward, relative to those of the same prompt
    llm.train()      the pages are given back; two updates by the clipped ratio of probabilities
    llm.serve()      the next batch is sampled with the new weights

Before the first update of a batch the model is the one that sampled, so the importance ratio of
every token is 1. With reproducible=True it is exactly 1.0. By default a forward over whole
sequences has other bits than decoding, and the ratios say so.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onchip import LLM, SamplingParams
from onchip.models import Decoder

PROMPTS = ("And the LORD said unto ", "In the beginning ", "Blessed are the ", "And he went ")
CLIP = 0.2
NAMES = {True: "reproducible=True", False: "the default"}


@dataclass(frozen=True)
class Settings:
    model: str = "tiny-draft"
    samples: int = 8  # of each prompt
    new_tokens: int = 32
    batches: int = 12
    updates: int = 2  # of each batch
    lr: float = 1e-3
    seed: int = 0


class Sampled(NamedTuple):
    """A continuation: all tokens, how many of them are the prompt's, the log probabilities of the
    others as the engine returned them, and its text.
    """

    tokens: list[int]
    prompt: int
    logprobs: list[float]
    text: str


class Batch(NamedTuple):
    """reward: the mean. deviations: the largest |ratio - 1| of each update."""

    reward: float
    deviations: list[float]


def reward_of(text: str) -> float:
    words = text.lower().split()
    return sum(word.startswith("s") for word in words) / max(1, len(words))


def sample(llm: LLM, settings: Settings, batch: int) -> Iterator[Sampled]:
    """The continuations of a batch, those of a prompt one after another."""
    first = settings.seed + batch * len(PROMPTS)
    options = {"n": settings.samples, "max_tokens": settings.new_tokens, "logprobs": 0}
    params = [SamplingParams(seed=first + i, ignore_eos=True, **options) for i in range(4)]
    for output in llm.generate(list(PROMPTS), params, use_tqdm=False):
        prompt = list(output.prompt_token_ids)
        for choice in output.outputs:
            rows = zip(choice.token_ids, choice.logprobs, strict=True)
            logprobs = [row[token].logprob for token, row in rows]
            yield Sampled(prompt + list(choice.token_ids), len(prompt), logprobs, choice.text)


def score(model: Decoder, sampled: list[Sampled]) -> Tensor:
    """The log probabilities of all sampled tokens, one after another, by one forward."""
    lengths = [len(one.tokens) for one in sampled]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = torch.tensor([token for one in sampled for token in one.tokens])
    logits = model.logits(model.full(tokens, cu_seqlens, max(lengths)))
    predicted = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    starts = zip(cu_seqlens.tolist(), sampled, strict=False)
    spans = [(start + one.prompt - 1, start + len(one.tokens) - 1) for start, one in starts]
    return torch.cat([predicted[start:stop] for start, stop in spans])


def advantages_of(rewards: Tensor) -> Tensor:
    """(prompts, samples): relative to the other continuations of the prompt."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def update(
    model: Decoder, optimizer: torch.optim.Optimizer, sampled: list[Sampled], advantages: Tensor
) -> float:
    """One step of the optimiser; the largest |ratio - 1| before it."""
    before = torch.tensor([p for one in sampled for p in one.logprobs])
    ratio = (score(model, sampled) - before).exp()
    weight = advantages.repeat_interleave(torch.tensor([len(one.logprobs) for one in sampled]))
    gain = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
    (-gain.mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float((ratio.detach() - 1).abs().max())


def run(settings: Settings, reproducible: bool, say=print) -> list[Batch]:
    history = []
    options = {"max_model_len": 128, "num_pages": 600, "swap_space": 0, "dtype": "float32"}
    with LLM(settings.model, device="cpu", reproducible=reproducible, **options) as llm:
        optimizer = torch.optim.AdamW(llm.train().parameters(), settings.lr)
        llm.serve()
        for batch in range(settings.batches):
            began = time.perf_counter()
            sampled = list(sample(llm, settings, batch))
            rewards = torch.tensor([reward_of(one.text) for one in sampled])
            advantages = advantages_of(rewards.view(len(PROMPTS), -1)).flatten()
            model = llm.train()
            steps = range(settings.updates)
            deviations = [update(model, optimizer, sampled, advantages) for _ in steps]
            llm.serve()
            history.append(Batch(float(rewards.mean()), deviations))
            say(
                f"{NAMES[reproducible]}, batch {batch + 1}: reward {history[-1].reward:.3f},"
                f" |ratio - 1| at most {', then '.join(f'{d:.1e}' for d in deviations)}"
                f" ({time.perf_counter() - began:.1f} s)"
            )
    return history


def draw(histories: dict[bool, list[Batch]], file: Path) -> None:
    """The largest |ratio - 1| of each batch, at the first update and at the last."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, (mode, history) in zip(both, histories.items(), strict=True):
        numbers = range(1, len(history) + 1)
        axes.plot(numbers, [b.deviations[0] for b in history], "o-", label="first update")
        axes.plot(numbers, [b.deviations[-1] for b in history], "s--", label="last update")
        axes.set_yscale("symlog", linthresh=1e-8)
        axes.set(title=NAMES[mode], xlabel="batch", ylabel="largest |ratio - 1|")
        axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny-draft", choices=("tiny", "tiny-draft"))
    parser.add_argument("--lr", type=float, default=Settings.lr, help="1e-4 for tiny")
    parser.add_argument("--batches", type=int, default=Settings.batches)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="an SVG or PNG file")
    args = parser.parse_args()
    settings = Settings(args.model, batches=args.batches, lr=args.lr, seed=args.seed)
    histories = {mode: run(settings, mode) for mode in (True, False)}
    if args.plot is not None:
        draw(histories, args.plot)


if __name__ == "__main__":
    main()
