"""The requests of a serving benchmark, and the measurements of a run."""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from onchip.cli.bench.harness import RowRefused
from onchip.engine import Engine, Request, SamplingParams
from onchip.models import ModelConfig, num_parameters

TEMPERATURE = 0.6
WARM_UP_TOKENS = 32
DRAWS = 64  # width of the classes of steps, in sampled tokens
PlannedRequest = tuple[list[int], int]  # the token ids of a prompt, and the number of output tokens


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once."""

    requests: tuple[PlannedRequest, ...]

    @classmethod
    def uniform(
        cls, count: int = 256, low: int = 100, high: int = 1024, seed: int = 0, vocab: int = 10_001
    ) -> "Workload":
        """Lengths of prompts and outputs from low to high, drawn in the order in which nano-vllm's
        bench.py draws: the defaults are its 142,827 tokens in and 133,966 out.
        """
        draw = random.Random(seed).randint
        prompts = [[draw(0, vocab - 1) for _ in range(draw(low, high))] for _ in range(count)]
        return cls(tuple((prompt, draw(low, high)) for prompt in prompts))

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(count for _, count in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + count for prompt, count in self.requests)

    @property
    def steps(self) -> int:
        """The fewest that can be: all run at once."""
        return max(count for _, count in self.requests)

    @property
    def tokens_read(self) -> int:
        """Keys that all draws together read: a draw reads prompt and output so far."""
        return sum(n * len(prompt) + n * (n - 1) // 2 for prompt, n in self.requests)

    def peak_pages(self, page_size: int) -> int:
        """The most pages that are held at a time if all run at once."""
        pages = lambda tokens: -(-tokens // page_size)
        held = lambda t: sum(pages(len(p) + t) for p, count in self.requests if t < count)
        return max(held(t) for t in range(self.steps))

    def cut(self, count: int, most: int) -> "Workload":
        """The first requests alone, with at most so many tokens of output each."""
        return Workload(tuple((prompt, min(n, most)) for prompt, n in self.requests[:count]))

    def batches(self, size: int) -> list["Workload"]:
        starts = range(0, len(self.requests), size)
        return [replace(self, requests=self.requests[at : at + size]) for at in starts]


class Roofline(NamedTuple):
    """The least time in which memory can be read that every draw depends on."""

    weight_bytes: int
    token_bytes: int  # keys and values of one token, all layers
    bytes_per_s: float

    @classmethod
    def of(
        cls, config: ModelConfig, itemsize: int, bytes_per_s: float, tokens: int | None = None
    ) -> "Roofline":
        """Of embeddings that are not the head as well, a step reads a few rows. tokens: of a step,
        which may leave experts without one; None: all are read.
        """
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
        unread = 0 if config.tied else config.vocab_size * config.hidden_size
        if tokens is not None:
            unread += round(idle_experts(config, tokens))
        return cls((num_parameters(config) - unread) * itemsize, token_bytes, bytes_per_s)

    def seconds(self, workload: Workload) -> float:
        read = workload.steps * self.weight_bytes + workload.tokens_read * self.token_bytes
        return read / self.bytes_per_s

    def formula(self, workload: Workload) -> str:
        seconds = self.seconds(workload)
        return (
            f"byte roofline = ({workload.steps:,} steps x {self.weight_bytes:,} bytes of weights +"
            f" {workload.tokens_read:,} keys read x {self.token_bytes:,} bytes) /"
            f" {self.bytes_per_s / 1e12:.3g} TB/s = {seconds:.3g} s ="
            f" {workload.num_output_tokens / seconds:,.0f} tokens/s; prefill is not in it"
        )


def idle_experts(config: ModelConfig, tokens: int) -> float:
    """The weights of experts without a token in the mean, if every choice is equally likely."""
    idle = 0.0
    for experts in filter(None, (layer.experts for layer in config.layers)):
        weights = 3 * config.hidden_size * experts.intermediate_size * experts.num_experts
        idle += weights * (1 - experts.per_token / experts.num_experts) ** tokens
    return idle


class Mark(NamedTuple):
    """The engine after a step: when, tokens of each request, pages that are held."""

    at_s: float
    counts: list[int]
    pages: int


@dataclass(frozen=True)
class Ran:
    """A workload that was served; times in seconds, from the arrival of all of it."""

    workload: Workload
    marks: list[Mark]
    host_s: float | None  # of all steps: not spent waiting for the device; None: not known
    swapped: int  # requests that were preempted, by what became of their pages
    recomputed: int

    @property
    def seconds(self) -> float:
        return self.marks[-1].at_s

    @property
    def tokens_per_s(self) -> float:
        return self.workload.num_output_tokens / self.seconds

    @property
    def columns(self) -> dict[str, Any]:
        first, between = self._latencies()
        starts = [0.0, *(mark.at_s for mark in self.marks)]
        steps = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        host = None if self.host_s is None else self.host_s / self.seconds
        return {
            "seconds": self.seconds,
            "requests": len(self.workload.requests),
            "prompt_tokens": self.workload.num_prompt_tokens,
            "output_tokens": self.workload.num_output_tokens,
            "first_token_ms": quantiles(first),
            "between_tokens_ms": quantiles(between),
            "steps": len(steps),
            "step_ms": {"mean": 1e3 * self.seconds / len(steps), "max": 1e3 * max(steps)},
            "step_ms_by_draws": self._by_draws(steps),
            "host_share": host,
            "swapped": self.swapped,
            "recomputed": self.recomputed,
            "peak_pages": max(mark.pages for mark in self.marks),
        }

    def _by_draws(self, steps: Sequence[float]) -> dict[str, float]:
        """The median of steps that sampled so many tokens, with or without prompt tokens."""
        totals = [0, *(sum(mark.counts) for mark in self.marks)]
        spent: dict[int, list[float]] = {}
        for before, after, step_s in zip(totals, totals[1:], steps, strict=False):
            if after > before:
                spent.setdefault(-(-(after - before) // DRAWS), []).append(1e3 * step_s)
        return {f"{DRAWS * (i - 1) + 1}-{DRAWS * i}": median(spent[i]) for i in sorted(spent)}

    def _latencies(self) -> tuple[list[float], list[float]]:
        """Of every request until its first token, and of every other token since the one before."""
        last, first, between = [0.0] * len(self.workload.requests), [], []
        before = [0] * len(last)
        for mark in self.marks:
            for i, (old, new) in enumerate(zip(before, mark.counts, strict=True)):
                if new > old:
                    (between if old else first).append(mark.at_s - last[i])
                    last[i] = mark.at_s
            before = mark.counts
        return first, between


def serve(engine: Engine, groups: Iterable[Workload]) -> Ran:
    """All requests, one group after another. RowRefused if any of them fails."""
    groups = list(groups)
    whole = Workload(tuple(request for group in groups for request in group.requests))
    marks: list[Mark] = []
    requests: list[Request] = []
    before, start = engine.stats(), time.perf_counter()
    for group in groups:
        requests += _add_all(engine, group)
        _step(engine, requests, len(whole.requests), marks, start)
    after = engine.stats()
    _check(requests, whole)
    host_s = marks[-1].at_s - (after.waited_s - before.waited_s)
    return Ran(
        whole,
        marks,
        host_s if engine.cache.device.type == "cuda" else None,
        after.preempted_by_swap - before.preempted_by_swap,
        after.preempted_by_recompute - before.preempted_by_recompute,
    )


def warm_up(engine: Engine, workload: Workload) -> None:
    """Kernels are compiled for such steps: the same lengths of other tokens, so that nothing is
    cached, and outputs just long enough for all requests to run together.
    """
    vocab = engine.model.config.vocab_size
    other = [
        ([(token + 1) % vocab for token in prompt], min(count, WARM_UP_TOKENS))
        for prompt, count in workload.requests
    ]
    serve(engine, [Workload(tuple(other))])


def _add_all(engine: Engine, workload: Workload) -> list[Request]:
    added = []
    for prompt, count in workload.requests:
        params = SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count)
        answer = engine.add(prompt, params, stream=False)
        if not isinstance(answer, Request):
            raise RowRefused(f"a request was refused: {answer.reason}")
        added.append(answer)
    return added


def _step(
    engine: Engine, requests: list[Request], total: int, marks: list[Mark], start: float
) -> None:
    """Until all is done. What is noted costs microseconds, while the device computes."""
    samples = [request.samples[0] for request in requests]
    later = [0] * (total - len(samples))
    pool = engine.cache.pool
    while engine.has_work:
        engine.step()
        counts = [len(sample.token_ids) for sample in samples]
        held = pool.capacity - pool.num_free
        marks.append(Mark(time.perf_counter() - start, counts + later, held))


def _check(requests: Sequence[Request], workload: Workload) -> None:
    for request, (_, count) in zip(requests, workload.requests, strict=True):
        got = len(request.samples[0].token_ids)
        if request.error or got != count:
            raise RowRefused(f"{request.request_id}: {got} of {count} tokens; {request.error=}")


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the most, in milliseconds."""
    ranked = sorted(seconds)
    at = lambda share: 1e3 * ranked[min(len(ranked) - 1, int(share * len(ranked)))]
    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)} if ranked else {}
