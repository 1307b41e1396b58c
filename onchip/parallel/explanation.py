"""Explains a call over ranks without running it: the strategy and the reason for it, the bytes that
travel in a round, whether they overlap with kernels, and the efficiency on named links.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import accumulator_dtype
from onchip.core.explain import human_bytes
from onchip.core.problem import Options, Tensors, Window
from onchip.parallel.all_to_all import assign_heads, kv_heads_of
from onchip.parallel.attention import GlobalSequence, check_inputs, make_global_mask
from onchip.parallel.comm import Comm
from onchip.parallel.machines import H200, LINKS, Link
from onchip.parallel.mesh2d import GroupedLayout, Mesh2D, sent_bytes
from onchip.parallel.rounds import GlobalMask, Round, count_hops, count_round_pairs
from onchip.parallel.sharding import Layout
from onchip.parallel.strategy import GroupLike, StrategyChoice, as_ranks, choose_strategy

BACKWARD = 2.5  # times the matmuls of a forward: five instead of two


class PassCost(NamedTuple):
    """The cost of a forward or backward pass. Each of `hops` rounds of a ring sends round_bytes
    while a kernel runs. exposed_bytes travel while no kernel runs: exchanged heads, gathered keys,
    the last hop of gradients. flops: of each round of the busiest rank; mean_flops: of the mean
    rank.
    """

    name: str
    hops: int
    round_bytes: int
    exposed_bytes: int
    flops: tuple[float, ...]
    mean_flops: float
    flops_s: float

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the rank with the most positions."""
        return self.hops * self.round_bytes + self.exposed_bytes

    def hidden_share(self, link: Link) -> float | None:
        """The share of the rounds in which the message takes no longer than the kernel, latency
        aside; None if no round sends.
        """
        message = self.round_bytes / link.bytes_s
        short = sum(message <= flops / self.flops_s for flops in self.flops[: self.hops])
        return short / self.hops if self.hops else None

    def seconds(self, link: Link) -> float:
        """Time of the busiest rank: in each round the longer of kernel and message."""
        message = self.round_bytes / link.bytes_s + link.latency_s
        kernels = [flops / self.flops_s for flops in self.flops]
        overlapped = sum(max(kernel, message) for kernel in kernels[: self.hops])
        return overlapped + sum(kernels[self.hops :]) + self.exposed_bytes / link.bytes_s

    def efficiency(self, link: Link) -> float:
        """Kernel time of the mean rank over the time of the busiest rank."""
        seconds = self.seconds(link)
        return self.mean_flops / self.flops_s / seconds if seconds else 1.0


class ParallelExplanation(NamedTuple):
    """chunk: positions of this rank. min_chunks: positions a rank from which on messages are hidden
    under kernels, by link.
    """

    choice: StrategyChoice
    reason: str
    layout: Layout
    size: int
    seqlen: int
    chunk: int
    balance: float  # pairs of the busiest rank over the mean; a mask is not counted
    rounds: int  # of this rank
    masked_rounds: int  # need a block mask
    idle_rounds: int  # see no key
    rate: str
    passes: tuple[PassCost, PassCost]
    min_chunks: Mapping[str, float]
    links: Mapping[str, Link]

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {a:<11} {b}" for a, b in self._lines())])

    def _title(self) -> str:
        return f"attention of {self.seqlen} positions over {self.size} ranks, {self.chunk} here"

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "strategy", f"{self.choice.strategy}: {self.reason}"
        yield "layout", f"{self.layout}; the busiest rank has {self.balance:.2f} of the mean work"
        count = f"{self.rounds - self.idle_rounds} here, {self.idle_rounds} more see nothing"
        yield "rounds", f"{count}; {self.masked_rounds} need a block mask"
        for each in self.passes:
            yield each.name, _sends(each)
        yield "rate", self.rate
        for name, link in self.links.items():
            yield "", self._on(name, link)

    def _on(self, name: str, link: Link) -> str:
        least = self.min_chunks.get(name)
        text = f"{name}: {', '.join(_describe_pass(each, link) for each in self.passes)}"
        return text if least is None else f"{text}; hidden from {least:,.0f} positions a rank on"


def _sends(each: PassCost) -> str:
    parts = [f"{each.hops} x {human_bytes(each.round_bytes)} overlapped"] if each.hops else []
    parts += [f"{human_bytes(each.exposed_bytes)} exposed"] if each.exposed_bytes else []
    return f"sends {' and '.join(parts) or 'nothing'}; {sum(each.flops):.3g} flops"


def _describe_pass(each: PassCost, link: Link) -> str:
    share = each.hidden_share(link)
    suffixes = {None: "", 1.0: ", hidden", 0.0: ", exposed"}
    suffix = suffixes.get(share, f", {share:.0%} of the rounds hidden" if share else "")
    return f"{each.efficiency(link):.0%} {each.name}{suffix}"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: GroupLike = None,
    *,
    strategy: str = "auto",
    layout: str | Layout = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    mask: object = None,
    flops_s: float | None = None,
    links: Mapping[str, Link] = LINKS,
) -> ParallelExplanation:
    """Explain context_parallel_attention() with these arguments. Nothing is sent or computed, and
    q, k and v may be on the meta device.

    flops_s: rate of the kernels; by default as measured on an H200. The efficiency is a model: a
    round takes the longer of kernel and message, and merges and launches take no time.
    """
    ranks = as_ranks(group)
    options = Options(causal=causal, window_size=window_size)
    x = Tensors(q, k, v)
    sequence = GlobalSequence.of(
        ranks, layout, check_inputs(x, options, cu_seqlens), seqlen, cu_seqlens
    )
    global_mask = make_global_mask(sequence, x, options, mask)
    hops = count_hops(sequence.layout, global_mask)
    choice = choose_strategy(strategy, ranks, q.shape[-2], k.shape[-2], hops)
    ring = _RingWork.of(ranks, choice, sequence.layout, global_mask)
    rates, text = _rates(flops_s, causal, q.shape[-1], sequence.seqlen // ranks.size)
    forward, backward = (_pass(x, global_mask, choice, ring, rates[b], b) for b in (False, True))
    return ParallelExplanation(
        choice,
        _explain_choice(strategy, choice, ranks, x, hops),
        sequence.layout,
        ranks.size,
        sequence.seqlen,
        sequence.layout.length(ranks.rank, sequence.seqlen),
        ring.balance,
        len(ring.rounds),
        sum(r is not None and r.mask is not None for r in ring.rounds),
        sum(r is None for r in ring.rounds),
        text,
        (forward, backward),
        _min_chunks(x, global_mask, forward, links),
        links,
    )


class _RingWork(NamedTuple):
    """The ring of a call, of ranks or of groups that exchange heads. pairs: of each round of the
    busiest rank, for one head. rounds: of this rank.
    """

    size: int
    longest: int
    pairs: list[int]
    mean: float
    rounds: tuple[Round | None, ...]

    @property
    def balance(self) -> float:
        return sum(self.pairs) / self.mean if self.mean else 1.0

    @classmethod
    def of(
        cls, ranks: Comm | Mesh2D, choice: StrategyChoice, layout: Layout, global_mask: GlobalMask
    ) -> "_RingWork":
        inner = choice.inner_size
        grouped = layout if inner == 1 else GroupedLayout(layout, inner)
        work = [_work(grouped, global_mask, r) for r in range(grouped.size)]
        busiest = max(range(grouped.size), key=work.__getitem__)
        pairs, mean = count_round_pairs(grouped, global_mask, busiest), sum(work) / len(work)
        rounds = choice.plan_rounds(
            grouped, global_mask, ranks.rank // inner, torch.device("cpu")
        ).rounds
        return cls(grouped.size, max(grouped.lengths(global_mask.seqlen)), pairs, mean, rounds)


def _work(layout: Layout, global_mask: GlobalMask, rank: int) -> int:
    lo, hi = global_mask.key_ranges(layout.positions(rank, global_mask.seqlen))
    return int((hi - lo).clamp(min=0).sum())


def _pass(
    x: Tensors,
    global_mask: GlobalMask,
    choice: StrategyChoice,
    ring: _RingWork,
    flops_s: float,
    backward: bool,
) -> PassCost:
    heads = global_mask.planes[0] * global_mask.planes[1] / choice.inner_size
    per_pair = 2 * (x.q.shape[-1] + x.v.shape[-1]) * heads * (BACKWARD if backward else 1)
    flops = tuple(per_pair * pairs for pairs in ring.pairs)
    hops, message_bytes, exposed_bytes = _sent(x, global_mask, choice, ring, backward)
    name = "backward" if backward else "forward"
    rounds = flops if hops else (sum(flops),)
    mean_flops = per_pair * ring.mean
    return PassCost(name, hops, message_bytes, exposed_bytes, rounds, mean_flops, flops_s)


def _sent(
    x: Tensors, global_mask: GlobalMask, choice: StrategyChoice, ring: _RingWork, backward: bool
) -> tuple[int, int, int]:
    """(rounds that send, bytes of each, bytes sent while no kernel runs)"""
    keys, sums = _key_bytes(x, global_mask, ring.longest // choice.inner_size)
    message, messages = keys + sums if backward else keys, len(ring.pairs) - 1
    if choice.strategy == "allgather":
        return 0, 0, (ring.size - 1) * message
    exchanged = _all_to_all_bytes(x, global_mask, ring.longest, choice.inner_size, backward)
    if messages == 0:
        return 0, 0, exchanged
    return messages, message, exchanged + (sums if backward else 0)  # on their last hop


def _key_bytes(x: Tensors, global_mask: GlobalMask, tokens: int) -> tuple[int, int]:
    """Bytes of K and V of so many positions, and of dK and dV."""
    numbers = tokens * global_mask.planes[0] * x.k.shape[-2] * (x.k.shape[-1] + x.v.shape[-1])
    return numbers * x.k.element_size(), numbers * accumulator_dtype(x.k.dtype).itemsize


def _all_to_all_bytes(
    x: Tensors, global_mask: GlobalMask, tokens: int, inner_size: int, backward: bool
) -> int:
    """Bytes that a rank sends in the two all-to-alls: q, k, v, out and lse, or their gradients,
    without its own share. A key head is sent to every rank with some of its query heads; then its
    gradients are not rounded. tokens: of the group.
    """
    num_heads, num_kv_heads = _heads(x)
    spans = assign_heads(num_heads, num_kv_heads, inner_size)
    shares = (kv_heads_of(span, num_heads // num_kv_heads) for span in spans)
    copies = sum(hi - lo for lo, hi in shares)
    narrow, wide = x.q.element_size(), accumulator_dtype(x.q.dtype).itemsize
    of_keys = wide if backward and copies > num_kv_heads else narrow
    numbers = x.q.shape[-1] + x.v.shape[-1]
    token = num_heads * (numbers * narrow + wide) + copies * numbers * of_keys
    return global_mask.planes[0] * tokens // inner_size * token * (inner_size - 1) // inner_size


def _heads(x: Tensors) -> tuple[int, int]:
    return x.q.shape[-2], x.k.shape[-2]


def _rates(
    flops_s: float | None, causal: bool, head_dim: int, keys: int
) -> tuple[tuple[float, float], str]:
    """flop/s forward and backward, and their source."""
    if flops_s is not None:
        return (flops_s, flops_s), f"{flops_s / 1e12:.4g} TFLOP/s, as given"
    known = sorted({dim for _, _, dim in H200.kernels})
    dim = next((d for d in known if d >= head_dim), known[-1])
    forward, backward = (H200.kernel(b, causal, dim).rate(keys) for b in (False, True))
    both = f"{forward / 1e12:.4g} TFLOP/s forward, {backward / 1e12:.4g} backward"
    return (forward, backward), f"{both}, measured on an {H200.name} at head_dim {dim}"


def _min_chunks(
    x: Tensors, global_mask: GlobalMask, forward: PassCost, links: Mapping[str, Link]
) -> dict[str, float]:
    """The hide condition of a forward round: c >= (b / 2) (H_kv / H_q) F / B positions a rank,
    twice as many under a balanced causal mask. With windows, documents or masks rounds differ, and
    no single number holds.
    """
    plain = (
        global_mask.window_size == (None, None)
        and global_mask.documents is None
        and global_mask.mask is None
    )
    if not plain or not forward.hops:
        return {}
    num_heads, num_kv_heads = _heads(x)
    factor = x.k.element_size() / 2 * num_kv_heads / num_heads * (2 if global_mask.causal else 1)
    return {name: factor * forward.flops_s / link.bytes_s for name, link in links.items()}


def _explain_choice(
    strategy: str, choice: StrategyChoice, ranks: Comm | Mesh2D, x: Tensors, hops: int
) -> str:
    if strategy != "auto":
        return "requested"
    if choice.inner_size == 1:
        return f"sends least, {hops} times the keys and values of a rank"
    inner = sent_bytes(ranks.size, choice.inner_size, *_heads(x))
    return f"sends least, {inner:.3g} times the keys and values of a rank (a ring: {hops})"
