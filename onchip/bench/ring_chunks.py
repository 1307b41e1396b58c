"""`onchip bench ring --only chunks`: a long sequence cut for several ranks, on one GPU.

All rounds of all ranks in a loop on one thread, against one call: nothing travels, so that what is
measured is what cutting and merging cost. "kernels": the same rounds without merging.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

import onchip
from onchip.bench.harness import Bar, Case, Row, Session
from onchip.bench.measure import alternate
from onchip.parallel.rounds import (
    Backward,
    Call,
    Round,
    Rule,
    attend,
    gradients,
    schedule,
    total_of,
)
from onchip.parallel.sharding import zigzag

SIZE, OVERHEAD = 8, 8.0
TOKENS, QUICK_TOKENS = 65_536, 4096
HEADS, HEAD_DIM = 16, 128
TURNS, QUICK_TURNS = 15, 3
BARS = (
    Bar(
        f"{SIZE} chunks of {TOKENS:,} tokens on one GPU, over one call",
        lambda row: row["bench"] == "chunks",
        at_most=OVERHEAD,
        optional=True,
    ),
)
CALL = Call()
attention = cast(Callable[..., Tensor], onchip.attention)  # it may return more, if asked to


def run(session: Session) -> None:
    if not torch.cuda.is_available():
        raise ValueError("chunks are cut on one GPU, and there is none")
    session.where["device"] = torch.cuda.get_device_name()
    tokens, turns = (QUICK_TOKENS, QUICK_TURNS) if session.quick else (TOKENS, TURNS)
    cut = Cut.of(tokens, torch.device("cuda"))
    ways = (("forward", False), ("forward and backward", True))
    session.run([(title, partial(chunks_row, cut, turns, way)) for title, way in ways])


class Share(NamedTuple):
    """What one rank holds, and its rounds: (whose keys, how they are seen)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    rounds: list[tuple[int, Round]]


class Cut(NamedTuple):
    """One causal sequence: whole, and in the shares of a zigzag layout."""

    whole: tuple[Tensor, ...]
    shares: list[Share]

    @staticmethod
    def of(tokens: int, device: torch.device, heads: int = HEADS, dim: int = HEAD_DIM) -> "Cut":
        generator = torch.Generator(device).manual_seed(0)
        draw = lambda: torch.randn(1, tokens, heads, dim, generator=generator, device=device)
        whole = tuple(draw().bfloat16() for _ in range(4))
        layout, rule = zigzag(SIZE), Rule(tokens, causal=True, planes=(1, heads))
        shares = []
        for r in range(SIZE):
            rounds = enumerate(schedule(layout, rule, r, device).rounds)
            seen = [((r - i) % SIZE, at) for i, at in rounds if at is not None]
            q, k, v, dout = (layout.shard(t, r).contiguous() for t in whole)
            shares.append(Share(q, k, v, dout, seen))
        return Cut(whole, shares)

    def each(self) -> Iterator[tuple[Share, Share, Round]]:
        """Every round: the share of the queries, that of the keys, and what is seen."""
        for share in self.shares:
            for source, at in share.rounds:
                yield share, self.shares[source], at


def one_call(cut: Cut, backward: bool) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_(backward) for t in cut.whole[:3])
    out = attention(q, k, v, causal=True)
    return [out, *torch.autograd.grad(out, (q, k, v), cut.whole[3])] if backward else [out]


@torch.no_grad()
def in_rounds(cut: Cut, backward: bool) -> list[list[Tensor]]:
    """What the ring computes, without the ring: (out, dq, dk, dv), each of all ranks."""
    states = [_attended(cut, share) for share in cut.shares]
    outs = [out.to(torch.bfloat16) for out, _ in states]
    if not backward:
        return [outs]
    wide = lambda t: torch.zeros_like(t, dtype=torch.float32)
    sums = [[wide(share[i]) for share in cut.shares] for i in range(3)]
    for r, share in enumerate(cut.shares):
        saved = outs[r], states[r][1], share.dout, None
        for source, at in share.rounds:
            _add_gradients(cut, (r, source, at), saved, sums)
    return [outs, *([t.to(torch.bfloat16) for t in each] for each in sums)]


def _attended(cut: Cut, share: Share) -> tuple[Tensor, Tensor]:
    total = total_of(share.q, share.v.shape[-1])
    for source, at in share.rounds:
        total.fold(CALL, at, share.q, cut.shares[source].k, cut.shares[source].v)
    return total.result()


def _add_gradients(cut: Cut, where: tuple[int, int, Round], saved: tuple, sums: list) -> None:
    rank, source, at = where
    keys, queries = cut.shares[source], Backward(CALL, cut.shares[rank].q, saved, sums[0][rank])
    queries.add(at, keys.k, keys.v, (sums[1][source], sums[2][source]))
    queries.settled()


@torch.no_grad()
def kernels(cut: Cut, backward: bool) -> None:
    """The rounds, nothing merged."""
    for share, keys, at in cut.each():
        _, lse = attend(CALL, at, share.q, keys.k, keys.v)
        if backward:
            lse = lse.new_zeros(*lse.shape[:2], share.q.shape[1])
            saved = share.dout, lse, share.dout, None  # any numbers take as long
            gradients(CALL, at, share.q, keys.k, keys.v, saved)


def chunks_row(cut: Cut, turns: int, backward: bool) -> Row:
    """`value`: by how many per cent all rounds take longer than one call. Contenders take turns,
    with no pause in which the GPU would cool.
    """
    jobs = {"one call": one_call, "rounds": in_rounds, "kernels": kernels}
    ways = {name: partial(job, cut, backward) for name, job in jobs.items()}
    best = alternate(ways, cut.whole[0].device, turns)
    over = lambda name: 100 * (best[name] / best["one call"] - 1)
    ms = {name: 1e3 * seconds for name, seconds in best.items()}
    _, tokens, heads, dim = cut.whole[0].shape
    case = Case("chunks", "causal", torch.bfloat16, dim, tokens, 1, heads, backward)
    return case.row(
        "rounds", over("rounds"), "%", devices=SIZE, kernels_alone=over("kernels"), ms=ms
    )
