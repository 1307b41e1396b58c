"""`python -m benchmarks ring --only chunks`: a long sequence cut for several ranks, on one GPU.

All rounds of all ranks run on one thread, gradients step by step in ring order, against one call.
No data is sent, so that the difference is the cost of cutting and merging. Ranks take turns on a
few streams: they do not wait for one another, and the next rank can use the processors that the
last tiles of a round leave idle. "kernels": the same rounds without merging.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.parallel.rounds import (
    GlobalMask,
    Round,
    RoundOptions,
    RunningGradients,
    attend,
    differentiate_round,
    make_running_state,
    plan_rounds,
)
from onchip.parallel.sharding import zigzag

SIZE, OVERHEAD = 8, 8.0
TOKENS, QUICK_TOKENS = 65_536, 4096
HEADS, HEAD_DIM = 16, 128
TURNS, QUICK_TURNS = 15, 3
STREAMS = 2
THRESHOLDS = (
    Threshold(
        f"{SIZE} chunks of {TOKENS:,} tokens on one GPU, over one call",
        lambda row: row["bench"] == "chunks",
        at_most=OVERHEAD,
        optional=True,
    ),
)
CALL = RoundOptions()
attention = cast(Callable[..., Tensor], onchip.attention)  # with other options it returns more


def run(session: Session) -> None:
    if not torch.cuda.is_available():
        raise ValueError("chunks are cut on one GPU, and there is none")
    session.where["device"] = torch.cuda.get_device_name()
    tokens, turns = (QUICK_TOKENS, QUICK_TURNS) if session.quick else (TOKENS, TURNS)
    cut = Cut.of(tokens, torch.device("cuda"))
    ways = (("forward", False), ("forward and backward", True))
    session.run([(title, partial(chunks_row, cut, turns, way)) for title, way in ways])


class Share(NamedTuple):
    """The tensors of one rank, and its rounds: (rank that owns the keys, the round's mask)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    rounds: list[tuple[int, Round]]


class RankStreams:
    """Streams that ranks take in turns; on a CPU there are none."""

    def __init__(self, device: torch.device):
        count = STREAMS if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]

    def of(self, rank: int) -> AbstractContextManager:
        """Where a rank computes."""
        return torch.cuda.stream(self._streams[rank % STREAMS]) if self._streams else nullcontext()

    def join(self) -> None:
        """Join all streams, the caller's included: later work on any stream starts after all
        earlier work.
        """
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())


class Cut(NamedTuple):
    """One causal sequence: whole, and in the shares of a zigzag layout."""

    whole: tuple[Tensor, ...]
    shares: list[Share]
    streams: RankStreams

    @staticmethod
    def of(tokens: int, device: torch.device, heads: int = HEADS, dim: int = HEAD_DIM) -> "Cut":
        generator = torch.Generator(device).manual_seed(0)
        draw = lambda: torch.randn(1, tokens, heads, dim, generator=generator, device=device)
        whole = tuple(draw().bfloat16() for _ in range(4))
        layout, global_mask = zigzag(SIZE), GlobalMask(tokens, causal=True, planes=(1, heads))
        shares = []
        for r in range(SIZE):
            rounds = enumerate(plan_rounds(layout, global_mask, r, device).rounds)
            seen = [((r - i) % SIZE, at) for i, at in rounds if at is not None]
            q, k, v, dout = (layout.shard(t, r).contiguous() for t in whole)
            shares.append(Share(q, k, v, dout, seen))
        return Cut(whole, shares, RankStreams(device))

    def steps(self) -> Iterator[list[tuple[int, int, Round]]]:
        """Step by step, every round of it: the rank of the queries, that of the keys, and what is
        seen. No two rounds of a step are of the same keys.
        """
        for step in range(max(len(share.rounds) for share in self.shares)):
            yield [(r, *s.rounds[step]) for r, s in enumerate(self.shares) if step < len(s.rounds)]


def one_call(cut: Cut, backward: bool) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_(backward) for t in cut.whole[:3])
    out = attention(q, k, v, causal=True)
    return [out, *torch.autograd.grad(out, (q, k, v), cut.whole[3])] if backward else [out]


@torch.no_grad()
def in_rounds(cut: Cut, backward: bool) -> list[list[Tensor]]:
    """What the ring computes, without the ring: (out, dq, dk, dv), each of all ranks."""
    cut.streams.join()
    states = [_attended(cut, rank) for rank in range(SIZE)]
    cut.streams.join()
    outs = [out for out, _ in states]
    return [outs, *_gradients(cut, states)] if backward else [outs]


def _attended(cut: Cut, rank: int) -> tuple[Tensor, Tensor]:
    """(out, rounded, and lse) of one rank."""
    share = cut.shares[rank]
    state = make_running_state(share.q, share.v.shape[-1])
    with cut.streams.of(rank):
        for source, at in share.rounds:
            state.fold(CALL, at, share.q, *cut.shares[source][1:3])
        out, lse = state.result()
        return out.to(torch.bfloat16), lse


def _gradients(cut: Cut, states: list[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    """(dq, dk, dv), each of all ranks."""
    wide = lambda t: torch.zeros_like(t, dtype=torch.float32)
    sums = [[wide(share[i]) for share in cut.shares] for i in range(3)]
    of_rank = zip(cut.shares, states, sums[0], strict=True)
    queries = [RunningGradients(CALL, s.q, (*state, s.dout, None), dq) for s, state, dq in of_rank]
    for step in cut.steps():
        cut.streams.join()  # what keys have come to is the next rank's
        for rank, source, at in step:
            with cut.streams.of(rank):
                queries[rank].add(at, *cut.shares[source][1:3], (sums[1][source], sums[2][source]))
    for rank, each in enumerate(queries):
        with cut.streams.of(rank):
            each.finish()
    cut.streams.join()
    return [[t.to(torch.bfloat16) for t in each] for each in sums]


@torch.no_grad()
def kernels(cut: Cut, backward: bool) -> None:
    """The rounds, nothing merged."""
    cut.streams.join()
    for rank, source, at in chain.from_iterable(cut.steps()):
        share, (_, k, v, *_) = cut.shares[rank], cut.shares[source]
        with cut.streams.of(rank):
            _, lse = attend(CALL, at, share.q, k, v)
            if backward:
                lse = lse.new_zeros(*lse.shape[:2], share.q.shape[1])
                saved = share.dout, lse, share.dout, None  # any numbers take as long
                differentiate_round(CALL, at, share.q, k, v, saved)
    cut.streams.join()


def chunks_row(cut: Cut, turns: int, backward: bool) -> Row:
    """`value`: by how many per cent all rounds take longer than one call."""
    jobs = {"one call": one_call, "rounds": in_rounds, "kernels": kernels}
    capture = lambda job: gpu.Capture(partial(job, cut, backward), 1, 0.0)
    captures = {name: capture(job) for name, job in jobs.items()}
    sample = gpu.sampler(cut.whole[0].device)
    measured = gpu.time_captures(captures, captures["one call"], turns, sample)
    over = lambda name: 100 * (measured.against("one call", name).ratio - 1)
    ms = {name: measured.ms(name) for name in captures}
    _, tokens, heads, dim = cut.whole[0].shape
    case = Case("chunks", "causal", torch.bfloat16, dim, tokens, 1, heads, backward)
    columns = {"kernels_alone": over("kernels"), "ms": ms, "control": measured.control}
    return case.row("rounds", over("rounds"), "%", devices=SIZE, **columns)
