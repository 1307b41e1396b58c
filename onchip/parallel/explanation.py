"""What a call over ranks would do: which strategy and why, what travels in a round, whether that
hides under the kernels, and what part of the devices' time is left for them on named links.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.explain import human_bytes
from onchip.kernels.protocol import accumulator_dtype
from onchip.parallel.all_to_all import deal, kv_heads
from onchip.parallel.attention import Whole, check, rule_of
from onchip.parallel.comm import Comm
from onchip.parallel.machines import H200, LINKS, Link
from onchip.parallel.mesh2d import Groups, Nest, sent_bytes
from onchip.parallel.rounds import Round, Rule, hops, pairs_of_rounds
from onchip.parallel.sharding import Layout
from onchip.parallel.strategy import Chosen, Group, choose, ranks_of
from onchip.problem import Options, Tensors, Window

BACKWARD = 2.5  # times the products of a forward: five instead of two


class Pass(NamedTuple):
    """Forward or backward. Each of `hops` rounds of a ring sends round_bytes beside a kernel;
    bare_bytes are sent beside none: heads that are dealt, keys that are gathered, gradients on
    their last way. flops are those of each round of the busiest rank, mean_flops what a rank
    computes on the average.
    """

    name: str
    hops: int
    round_bytes: int
    bare_bytes: int
    flops: tuple[float, ...]
    mean_flops: float
    flops_s: float

    @property
    def sent_bytes(self) -> int:
        """What a rank sends, if it holds as much as any."""
        return self.hops * self.round_bytes + self.bare_bytes

    def hidden(self, link: Link) -> float | None:
        """The share of the rounds whose message takes no longer than the kernel beside it, latency
        aside; None where none is sent.
        """
        message = self.round_bytes / link.bytes_s
        short = sum(message <= flops / self.flops_s for flops in self.flops[: self.hops])
        return short / self.hops if self.hops else None

    def seconds(self, link: Link) -> float:
        """Of the busiest rank: in each round the longer of kernel and message."""
        message = self.round_bytes / link.bytes_s + link.latency_s
        kernels = [flops / self.flops_s for flops in self.flops]
        beside = sum(max(kernel, message) for kernel in kernels[: self.hops])
        return beside + sum(kernels[self.hops :]) + self.bare_bytes / link.bytes_s

    def efficiency(self, link: Link) -> float:
        """What ranks compute on the average, of the time that the busiest one takes."""
        seconds = self.seconds(link)
        return self.mean_flops / self.flops_s / seconds if seconds else 1.0


class Explanation(NamedTuple):
    """chunk: positions of this rank. least_chunks: from how many on messages hide, by link."""

    chosen: Chosen
    why: str
    layout: Layout
    size: int
    seqlen: int
    chunk: int
    balance: float  # pairs of the busiest rank over the mean; a mask is not counted
    rounds: int  # of this rank
    masked: int  # those that need a block mask
    idle: int  # those in which it sees nothing
    rate: str
    passes: tuple[Pass, Pass]
    least_chunks: Mapping[str, float]
    links: Mapping[str, Link]

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {a:<11} {b}" for a, b in self._lines())])

    def _title(self) -> str:
        return f"attention of {self.seqlen} positions over {self.size} ranks, {self.chunk} here"

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "strategy", f"{self.chosen.strategy}: {self.why}"
        yield "layout", f"{self.layout}; the busiest rank has {self.balance:.2f} of the mean work"
        count = f"{self.rounds - self.idle} here, {self.idle} more see nothing"
        yield "rounds", f"{count}; {self.masked} need a block mask"
        for each in self.passes:
            yield each.name, _sends(each)
        yield "rate", self.rate
        for name, link in self.links.items():
            yield "", self._on(name, link)

    def _on(self, name: str, link: Link) -> str:
        least = self.least_chunks.get(name)
        text = f"{name}: {', '.join(_judged(each, link) for each in self.passes)}"
        return text if least is None else f"{text}; hides from {least:,.0f} positions a rank on"


def _sends(each: Pass) -> str:
    parts = [f"{each.hops} x {human_bytes(each.round_bytes)} beside kernels"] if each.hops else []
    parts += [f"{human_bytes(each.bare_bytes)} beside none"] if each.bare_bytes else []
    return f"sends {' and '.join(parts) or 'nothing'}; {sum(each.flops):.3g} flops"


def _judged(each: Pass, link: Link) -> str:
    share = each.hidden(link)
    words = {None: "", 1.0: ", hides", 0.0: ", shows"}
    hidden = words.get(share, f", {share:.0%} of the rounds hide" if share else "")
    return f"{each.efficiency(link):.0%} {each.name}{hidden}"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
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
) -> Explanation:
    """What context_parallel_attention() would do with these arguments: nothing is sent or computed,
    and q, k and v may be on the meta device.

    flops_s: of the kernels; unless given, what an H200's were measured at. The efficiency is a
    model: in each round the longer of kernel and message, no time for merging or launching.
    """
    ranks = ranks_of(group)
    options = Options(causal, window_size)
    x = Tensors(q, k, v)
    whole = Whole.of(ranks, layout, check(x, options, cu_seqlens), seqlen, cu_seqlens)
    rule = rule_of(whole, x, options, mask)
    turns = hops(whole.layout, rule)
    chosen = choose(strategy, ranks, q.shape[-2], k.shape[-2], turns)
    found = _Turns.of(ranks, chosen, whole.layout, rule)
    rates, text = _rates(flops_s, causal, q.shape[-1], whole.seqlen // ranks.size)
    forward, backward = (_pass(x, rule, chosen, found, rates[b], b) for b in (False, True))
    return Explanation(
        chosen,
        _why(strategy, chosen, ranks, x, turns),
        whole.layout,
        ranks.size,
        whole.seqlen,
        whole.layout.length(ranks.rank, whole.seqlen),
        found.balance,
        len(found.rounds),
        sum(r is not None and r.mask is not None for r in found.rounds),
        sum(r is None for r in found.rounds),
        text,
        (forward, backward),
        _least_chunks(x, rule, forward, links),
        links,
    )


class _Turns(NamedTuple):
    """The ring of a call: of groups that deal heads among them, or of ranks. pairs are those of the
    busiest, round by round and for one head; rounds are this rank's.
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
    def of(cls, ranks: Comm | Nest, chosen: Chosen, layout: Layout, rule: Rule) -> "_Turns":
        inner = chosen.inner_size
        held = layout if inner == 1 else Groups(layout, inner)
        work = [_work(held, rule, r) for r in range(held.size)]
        busiest = max(range(held.size), key=work.__getitem__)
        pairs, mean = pairs_of_rounds(held, rule, busiest), sum(work) / len(work)
        rounds = chosen.schedule(held, rule, ranks.rank // inner, torch.device("cpu")).rounds
        return cls(held.size, max(held.lengths(rule.seqlen)), pairs, mean, rounds)


def _work(layout: Layout, rule: Rule, rank: int) -> int:
    lo, hi = rule.spans(layout.positions(rank, rule.seqlen))
    return int((hi - lo).clamp(min=0).sum())


def _pass(
    x: Tensors, rule: Rule, chosen: Chosen, turns: _Turns, flops_s: float, backward: bool
) -> Pass:
    heads = rule.planes[0] * rule.planes[1] / chosen.inner_size
    per_pair = 2 * (x.q.shape[-1] + x.v.shape[-1]) * heads * (BACKWARD if backward else 1)
    flops = tuple(per_pair * pairs for pairs in turns.pairs)
    messages, message, bare = _sent(x, rule, chosen, turns, backward)
    name = "backward" if backward else "forward"
    rounds = flops if messages else (sum(flops),)
    return Pass(name, messages, message, bare, rounds, per_pair * turns.mean, flops_s)


def _sent(
    x: Tensors, rule: Rule, chosen: Chosen, turns: _Turns, backward: bool
) -> tuple[int, int, int]:
    """Rounds that send, what each of them sends, and what is sent beside no kernel."""
    keys, sums = _key_bytes(x, rule, turns.longest // chosen.inner_size)
    message, messages = keys + sums if backward else keys, len(turns.pairs) - 1
    if chosen.strategy == "allgather":
        return 0, 0, (turns.size - 1) * message
    dealt = _dealt_bytes(x, rule, turns.longest, chosen.inner_size, backward)
    if messages == 0:
        return 0, 0, dealt
    return messages, message, dealt + (sums if backward else 0)  # which come home at last


def _key_bytes(x: Tensors, rule: Rule, tokens: int) -> tuple[int, int]:
    """Of keys and values of so many positions, and of the sums of their gradients."""
    numbers = tokens * rule.planes[0] * x.k.shape[-2] * (x.k.shape[-1] + x.v.shape[-1])
    return numbers * x.k.element_size(), numbers * accumulator_dtype(x.k.dtype).itemsize


def _dealt_bytes(x: Tensors, rule: Rule, tokens: int, inner_size: int, backward: bool) -> int:
    """What a rank of a group that deals heads exchanges: q, k, v, out and lse, or their gradients,
    but for its own share. Key heads go to every rank that has a part of their group, and then their
    gradients are not rounded. `tokens` are those of the group.
    """
    num_heads, num_kv_heads = _heads(x)
    spans = deal(num_heads, num_kv_heads, inner_size)
    shares = (kv_heads(span, num_heads // num_kv_heads) for span in spans)
    copies = sum(hi - lo for lo, hi in shares)
    narrow, wide = x.q.element_size(), accumulator_dtype(x.q.dtype).itemsize
    of_keys = wide if backward and copies > num_kv_heads else narrow
    numbers = x.q.shape[-1] + x.v.shape[-1]
    token = num_heads * (numbers * narrow + wide) + copies * numbers * of_keys
    return rule.planes[0] * tokens // inner_size * token * (inner_size - 1) // inner_size


def _heads(x: Tensors) -> tuple[int, int]:
    return x.q.shape[-2], x.k.shape[-2]


def _rates(
    flops_s: float | None, causal: bool, head_dim: int, keys: int
) -> tuple[tuple[float, float], str]:
    """flop/s forward and backward, and where they come from."""
    if flops_s is not None:
        return (flops_s, flops_s), f"{flops_s / 1e12:.4g} TFLOP/s, as given"
    known = sorted({dim for _, _, dim in H200.kernels})
    dim = next((d for d in known if d >= head_dim), known[-1])
    forward, backward = (H200.kernel(b, causal, dim).rate(keys) for b in (False, True))
    both = f"{forward / 1e12:.4g} TFLOP/s forward, {backward / 1e12:.4g} backward"
    return (forward, backward), f"{both}, measured on an {H200.name} at head_dim {dim}"


def _least_chunks(
    x: Tensors, rule: Rule, forward: Pass, links: Mapping[str, Link]
) -> dict[str, float]:
    """c >= (b / 2) (H_kv / H_q) F / B positions a rank, twice as many for balanced causal ones: the
    condition under which a forward round hides its message. There is none where windows, documents
    or masks leave rounds that differ.
    """
    plain = rule.window_size == (None, None) and rule.documents is None and rule.mask is None
    if not plain or not forward.hops:
        return {}
    num_heads, num_kv_heads = _heads(x)
    factor = x.k.element_size() / 2 * num_kv_heads / num_heads * (2 if rule.causal else 1)
    return {name: factor * forward.flops_s / link.bytes_s for name, link in links.items()}


def _why(strategy: str, chosen: Chosen, ranks: Comm | Nest, x: Tensors, turns: int) -> str:
    if strategy != "auto":
        return "asked for"
    if chosen.inner_size == 1:
        return f"sends least, {turns} times the keys and values of a rank"
    inner = sent_bytes(ranks.size, chosen.inner_size, *_heads(x))
    return f"sends least, {inner:.3g} times the keys and values of a rank (a ring: {turns})"
