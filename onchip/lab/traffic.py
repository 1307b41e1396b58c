"""Exact HBM traffic and operation counts of each algorithm for a Problem, without running it. The
counts equal the ledgers of `onchip.lab.published` byte for byte.

    problem = onchip.cost.make_problem(1024, head_dim=64, num_heads=16, batch=64)
    print(onchip.lab.traffic.v1(problem, Chip(sram=51_200)).hbm_bytes)

Every function takes the options of a ledger, as a Chip; a BlockMask if the problem has one; and, if
it is packed, the (seqlen_q, seqlen_k) of each sequence. FlashAttention-3 moves the same bytes as
v2.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from onchip.core.problem import Problem
from onchip.kernels.tiles import (
    TileConfig,
    paper_product_tiles,
    paper_sram,
    paper_v1_tiles,
    paper_v2_backward_tiles,
    paper_v2_tiles,
)
from onchip.masks import BlockMask, Visibility

from .published.ledger import ByteCounts
from .visits import Visits, count_page_ids, count_row_mask_words, count_visits, even_parts

Mask = BlockMask | None
Lengths = Sequence[tuple[int, int]] | None
WORD_BYTES = 4  # a word of mask bits: 32 keys of a query


class Chip(NamedTuple):
    """sram: elements of the inputs' dtype on the chip, None for 100 KiB, math.inf for everything.
    scratch: the dtype of intermediates in HBM, None for the accumulator's. tiles: (tile_m, tile_n)
    instead of the tiles that follow from sram.
    """

    sram: float | None = None
    scratch: torch.dtype | None = None
    tiles: tuple[int, int] | None = None


DEFAULT = Chip()


@dataclass(frozen=True)
class Traffic(ByteCounts):
    """Bytes by tensor, and operations, as in a ledger: flops of matrix products (a multiply-add is
    two), exps, and other_ops, one for every number that another operation produces or reduces.
    """

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    exps: int = 0
    other_ops: int = 0

    @property
    def intensity(self) -> float:
        """flops of matrix products per byte of HBM traffic."""
        return self.flops / max(1, self.hbm_bytes)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.reads + other.reads,
            self.writes + other.writes,
            self.flops + other.flops,
            self.exps + other.exps,
            self.other_ops + other.other_ops,
        )

    def __mul__(self, n: int) -> "Traffic":
        times = lambda counts: Counter({name: n * count for name, count in counts.items()})
        return Traffic(
            times(self.reads), times(self.writes), n * self.flops, n * self.exps, n * self.other_ops
        )


def standard(
    problem: Problem, chip: Chip = DEFAULT, mask: Mask = None, lengths: Lengths = None
) -> Traffic:
    """Algorithm 0, the forward. With unlimited SRAM: 4 N^2 + 4 N d numbers, and lse."""
    sizes = _Sizes(problem, chip)
    return _over_heads(problem, mask, lengths, lambda rule: _standard_head(sizes, rule))


def standard_backward(
    problem: Problem,
    chip: Chip = DEFAULT,
    mask: Mask = None,
    lengths: Lengths = None,
    dlse: bool = False,
) -> Traffic:
    """Algorithm 3, from the P that the forward stored. With unlimited SRAM: 7 N^2 + 8 N d. dlse:
    whether lse has a gradient, too.
    """
    sizes = _Sizes(problem, chip)
    head = lambda rule: _standard_backward_head(sizes, rule, dlse)
    return _over_heads(problem, mask, lengths, head) + _group_sums(sizes, lengths)


def v1(
    problem: Problem, chip: Chip = DEFAULT, mask: Mask = None, lengths: Lengths = None
) -> Traffic:
    """FlashAttention, Algorithms 1 and 5: the forward."""
    sizes = _Sizes(problem, chip)
    head = lambda rule: _v1_head(sizes, sizes.visits(rule, paper_v1_tiles, skips=False))
    return _over_heads(problem, mask, lengths, head)


def v1_backward(
    problem: Problem,
    chip: Chip = DEFAULT,
    mask: Mask = None,
    lengths: Lengths = None,
    dlse: bool = False,
) -> Traffic:
    """FlashAttention, Algorithm 4, from (O, l, m, seed)."""
    sizes = _Sizes(problem, chip)
    visited = lambda rule: sizes.visits(rule, paper_v1_tiles, skips=False)
    head = lambda rule: _v1_backward_head(sizes, visited(rule), dlse)
    return _over_heads(problem, mask, lengths, head) + _finish_gradients(sizes, lengths)


def v2(
    problem: Problem, chip: Chip = DEFAULT, mask: Mask = None, lengths: Lengths = None
) -> Traffic:
    """FlashAttention-2, Algorithm 1: the forward. v4 has the same bytes and flops."""
    sizes = _Sizes(problem, chip)
    head = lambda rule: _v2_head(sizes, sizes.visits(rule, paper_v2_tiles))
    return _over_heads(problem, mask, lengths, head)


def v2_backward(
    problem: Problem,
    chip: Chip = DEFAULT,
    mask: Mask = None,
    lengths: Lengths = None,
    dlse: bool = False,
) -> Traffic:
    """FlashAttention-2, Algorithm 2, from (O, lse, seed)."""
    sizes = _Sizes(problem, chip)
    visited = lambda rule: sizes.visits(rule, paper_v2_backward_tiles)
    head = lambda rule: _v2_backward_head(sizes, visited(rule), dlse)
    return _over_heads(problem, mask, lengths, head) + _finish_gradients(sizes, lengths)


def split_kv(
    problem: Problem, num_splits: int, chip: Chip = DEFAULT, lengths: Lengths = None
) -> Traffic:
    """v2 over num_splits even_parts of the keys, and the merge of their results."""
    _check("num_splits", num_splits)
    sizes = _Sizes(problem, chip)
    return _over_heads(problem, None, lengths, lambda rule: _split_head(sizes, rule, num_splits))


def paged(
    problem: Problem, page_size: int, cache_seqlens: Sequence[int], chip: Chip = DEFAULT
) -> Traffic:
    """v2 of a batch with paged keys: each visit reads the ids of its pages."""
    _check("page_size", page_size)
    _check_dense(problem)
    if len(cache_seqlens) != problem.batch or min(cache_seqlens, default=0) < 0:
        raise ValueError(
            f"cache_seqlens must be the lengths of {problem.batch} sequences, got {cache_seqlens}"
        )
    sizes = _Sizes(problem, chip)
    tiles, total = sizes.tiles(paper_v2_tiles), Traffic()
    for seqlen_k in cache_seqlens:
        rule = Visibility(problem.seqlen_q, seqlen_k, problem.causal, problem.window_size)
        ids = Traffic(Counter(page_table=4 * count_page_ids(rule, tiles, page_size)))
        total += _v2_head(sizes, sizes.visits(rule, paper_v2_tiles)) + ids
    return total * problem.num_heads


def cascade(problem: Problem, prefix: int, chip: Chip = DEFAULT) -> Traffic:
    """A batch with `prefix` shared keys before the keys of the problem: v2 over the prefix with the
    queries of all sequences as rows, v2 over each sequence's own keys, and the merge.
    """
    _check_dense(problem)
    if prefix < 0:
        raise ValueError(f"{prefix=} must be a number of keys")
    sizes = _Sizes(problem, chip)
    rows = problem.batch * problem.seqlen_q
    shared = _part_head(sizes, Visibility(rows, prefix))
    own = Visibility(problem.seqlen_q, problem.seqlen_k, problem.causal, problem.window_size)
    each = _part_head(sizes, own) + _merge_head(sizes, problem.seqlen_q, 2)
    return (shared + each * problem.batch) * problem.num_heads


def ring(
    problem: Problem, num_ranks: int, chip: Chip = DEFAULT, lengths: Lengths = None
) -> Traffic:
    """v2 over a chunk of keys in each round of each rank, merged into a state; all ranks together.
    `k.sent` and `v.sent` are the bytes on the links.
    """
    _check("num_ranks", num_ranks)
    sizes = _Sizes(problem, chip)
    n_k = _tokens(problem, lengths)[1] * (num_ranks - 1) * problem.num_kv_heads * sizes.x
    wire = {"k": n_k * sizes.d, "v": n_k * sizes.dv}
    sent = Counter({f"{name}.sent": n for name, n in wire.items()})
    received = Counter({f"{name}.received": n for name, n in wire.items()})
    heads = _over_heads(problem, None, lengths, lambda rule: _ring_head(sizes, rule, num_ranks))
    return heads + Traffic(sent, received)


def pack_heads(problem: Problem) -> Problem:
    """The problem with the query heads of a group as rows of one tile, so that keys are loaded once
    for all of them, as decode kernels do. ValueError if the rows of a tile would not see the same
    keys.
    """
    banded = problem.causal or problem.window_size != (None, None)
    _check_dense(problem)
    if banded and problem.seqlen_q > 1:
        raise ValueError(
            f"heads can be packed only if all rows see all keys, got seqlen_q={problem.seqlen_q},"
            f" causal={problem.causal}, window_size={problem.window_size}"
        )
    rows = problem.seqlen_q * problem.group_size
    return problem._replace(seqlen_q=rows, num_heads=problem.num_kv_heads)


def _check(name: str, value: float) -> None:
    if not value >= 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_dense(problem: Problem) -> None:
    if problem.has_mask or problem.packed:
        raise ValueError(
            "only dense calls without a block mask are counted, got"
            f" has_mask={problem.has_mask}, packed={problem.packed}"
        )


class _Sizes:
    """Sizes of a problem: head dims, and bytes per number of inputs, outputs and intermediates."""

    def __init__(self, problem: Problem, chip: Chip):
        _check("Chip.sram", 1 if chip.sram is None else chip.sram)
        _check("Chip.tiles", min(chip.tiles or (1,)))
        wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
        scratch = chip.scratch or wide
        grad = wide if problem.wide_grads else problem.dtype
        self.problem, self.chip = problem, chip
        self.d, self.dv = problem.head_dim, problem.head_dim_v
        self.sram = paper_sram(chip.sram, problem.dtype.itemsize)
        self.x, self.out = problem.dtype.itemsize, problem.out_dtype.itemsize
        self.wide, self.scratch, self.grad = wide.itemsize, scratch.itemsize, grad.itemsize
        self.grouped = problem.group_size > 1
        self.dkv = self.scratch if self.grouped else self.grad
        self.converts_out, self.converts_dq = problem.out_dtype != scratch, grad != scratch

    def tiles(self, of_sram) -> TileConfig:
        if self.chip.tiles is not None:
            return TileConfig(*self.chip.tiles)
        return of_sram(self.sram, self.d, self.dv)

    def visits(self, rule: Visibility, of_sram, skips: bool = True) -> Visits:
        return count_visits(rule, self.tiles(of_sram), skips)


def _standard_head(sizes: _Sizes, rule: Visibility) -> Traffic:
    n_q, n_k, cells = rule.seqlen_q, rule.seqlen_k, rule.seqlen_q * rule.seqlen_k
    e, s = sizes.x, sizes.scratch
    passes = -(-n_k // sizes.sram)
    scores = _product(sizes, (n_q, n_k, sizes.d), {"q": e, "k": e, "s": s})
    values = _product(sizes, (n_q, sizes.dv, n_k), {"p": s, "v": e, "o": sizes.out})
    loads = 1 if passes == 1 else 2
    bits = loads * count_row_mask_words(rule, sizes.sram) * WORD_BYTES
    online = n_q * passes if passes > 1 else 0
    softmax = Traffic(
        Counter({"s": loads * cells * s, "mask": bits}),
        Counter({"p": cells * s, "lse": n_q * sizes.wide}),
        exps=loads * cells + online,
        other_ops=(4 if passes == 1 else 5) * cells + 4 * online + 2 * n_q,
    )
    return scores + Traffic(other_ops=cells) + softmax + values


def _standard_backward_head(sizes: _Sizes, rule: Visibility, dlse: bool) -> Traffic:
    n_q, n_k, cells = rule.seqlen_q, rule.seqlen_k, rule.seqlen_q * rule.seqlen_k
    d, dv, e, s, out = sizes.d, sizes.dv, sizes.x, sizes.scratch, sizes.out
    products = (
        _product(sizes, (n_k, dv, n_q), {"p": s, "do": out, "dv": sizes.dkv})
        + _product(sizes, (n_q, n_k, dv), {"do": out, "v": e, "dp": s})
        + _product(sizes, (n_q, d, n_k), {"ds": s, "k": e, "dq": sizes.grad})
        + _product(sizes, (n_k, d, n_q), {"ds": s, "q": e, "dk": sizes.dkv})
    )
    passes = -(-n_k // max(1, sizes.sram // 2))
    loads = 1 if dlse or passes <= 1 else 2
    softmax = Traffic(
        Counter({"p": loads * cells * s, "dp": loads * cells * s}),
        Counter({"ds": cells * s}),
        other_ops=3 * cells if dlse else 5 * cells + n_q * passes,
    )
    return products + softmax + (_standard_delta(sizes, n_q) if dlse else Traffic())


def _standard_delta(sizes: _Sizes, n_q: int) -> Traffic:
    """What a gradient through lse adds to Algorithm 3: delta is written and read."""
    rows, outs = n_q * sizes.wide, n_q * sizes.dv * sizes.out
    reads = {"o.delta": outs, "do.delta": outs, "dlse": rows, "delta": rows}
    return Traffic(Counter(reads), Counter(delta=rows), other_ops=2 * n_q * sizes.dv + n_q)


def _product(sizes: _Sizes, shape: tuple[int, int, int], names: dict[str, int]) -> Traffic:
    """a (m, k) @ b (k, n) = c in tiles. names: a, b and c with the bytes per number of each."""
    (m, n, k), ((a, of_a), (b, of_b), (c, of_c)) = shape, names.items()
    tiles = paper_product_tiles(sizes.sram, k)
    return Traffic(
        Counter({a: m * k * -(-n // tiles.tile_n) * of_a})
        + Counter({b: k * n * -(-m // tiles.tile_m) * of_b}),
        Counter({c: m * n * of_c}),
        flops=2 * m * n * k,
    )


def _v1_head(sizes: _Sizes, n: Visits) -> Traffic:
    d, dv, wide = sizes.d, sizes.dv, sizes.wide
    state = {"o": n.rows * dv * sizes.scratch, "l": n.rows * wide, "m": n.rows * wide}
    kv = {"k": n.seqlen_k * d * sizes.x, "v": n.seqlen_k * dv * sizes.x}
    reads = state | kv | {"q": n.rows * d * sizes.x, "mask": n.mask_words * WORD_BYTES}
    outs = n.seqlen_q * dv
    writes = state | {"o.init": outs * sizes.scratch}
    writes |= dict.fromkeys(("l.init", "m.init"), n.seqlen_q * wide)
    if sizes.converts_out:
        reads["o.convert"], writes["o.convert"] = outs * sizes.scratch, outs * sizes.out
    return Traffic(
        Counter(reads),
        Counter(writes),
        flops=2 * n.cells * (d + dv),
        exps=n.cells + 2 * n.rows,
        other_ops=4 * n.cells + 6 * n.rows + 4 * n.rows * dv,
    )


def _v1_backward_head(sizes: _Sizes, n: Visits, dlse: bool) -> Traffic:
    d, dv, rows = sizes.d, sizes.dv, n.rows * sizes.wide
    reads = {
        "q": n.rows * d * sizes.x,
        "o": n.rows * dv * sizes.out,
        "do": n.rows * dv * sizes.out,
        "l": rows,
        "m": rows,
        "dlse": rows * dlse,
    }
    init = {
        "dq.init": n.seqlen_q * d * sizes.scratch,
        "dk.init": n.seqlen_k * d * sizes.dkv,
        "dv.init": n.seqlen_k * dv * sizes.dkv,
    }
    own = 2 * n.rows * dv + n.rows * dlse
    return _backward_loop(sizes, n) + Traffic(
        Counter(reads), Counter(init), other_ops=6 * n.cells + own
    )


def _v2_head(sizes: _Sizes, n: Visits) -> Traffic:
    d, dv = sizes.d, sizes.dv
    reads = {
        "q": n.seqlen_q * d * sizes.x,
        "k": n.keys * d * sizes.x,
        "v": n.keys * dv * sizes.x,
        "mask": n.mask_words * WORD_BYTES,
    }
    writes = {"o": n.seqlen_q * dv * sizes.out, "lse": n.seqlen_q * sizes.wide}
    end = n.seqlen_q * (dv + 2)  # the division by l, and lse
    return Traffic(
        Counter(reads),
        Counter(writes),
        flops=2 * n.cells * (d + dv),
        exps=n.cells + n.rows,
        other_ops=4 * n.cells + 4 * n.rows + n.rows * dv + end,
    )


def _v2_backward_head(sizes: _Sizes, n: Visits, dlse: bool) -> Traffic:
    d, dv, outs = sizes.d, sizes.dv, n.seqlen_q * sizes.dv * sizes.out
    delta = Traffic(
        Counter({"o": outs, "do": outs, "dlse": n.seqlen_q * sizes.wide * dlse}),
        Counter({"delta": n.seqlen_q * sizes.wide}),
        other_ops=2 * n.seqlen_q * dv + n.seqlen_q * dlse,
    )
    rows = n.rows * sizes.wide
    reads = {"q": n.rows * d * sizes.x, "do": n.rows * dv * sizes.out, "lse": rows, "delta": rows}
    init = {"dq.init": n.seqlen_q * d * sizes.scratch}
    loop = Traffic(Counter(reads), Counter(init), other_ops=5 * n.cells)
    return delta + loop + _backward_loop(sizes, n)


def _split_head(sizes: _Sizes, rule: Visibility, num_splits: int) -> Traffic:
    rows, total = (0, rule.seqlen_q), Traffic()
    for keys in even_parts(rule.seqlen_k, num_splits):
        total += _part_head(sizes, rule.restrict(rows, keys))
    return total + _merge_head(sizes, rule.seqlen_q, num_splits)


def _ring_head(sizes: _Sizes, rule: Visibility, num_ranks: int) -> Traffic:
    total, chunks = Traffic(), even_parts(rule.seqlen_k, num_ranks)
    for rows in even_parts(rule.seqlen_q, num_ranks):
        n = rows[1] - rows[0]
        rules = [part for keys in chunks if (part := rule.restrict(rows, keys)).spans(0, n)]
        for i, part in enumerate(rules):
            name = "state" if i == 0 else "parts"
            total += _part_head(sizes, part, name)
        total += _ring_merge(sizes, n) * max(0, len(rules) - 1)
        total += _ring_end(sizes, n, bool(rules))
    return total


def _ring_merge(sizes: _Sizes, rows: int) -> Traffic:
    """Merge a part into a state."""
    state = Counter({"o.state": rows * sizes.dv * sizes.wide, "lse.state": rows * sizes.wide})
    parts = Counter({"o.parts": state["o.state"], "lse.parts": state["lse.state"]})
    return replace(_merge_head(sizes, rows, 2), reads=state + parts, writes=state)


def _ring_end(sizes: _Sizes, rows: int, has_keys: bool) -> Traffic:
    outs, lses = rows * sizes.dv, rows * sizes.wide
    if not has_keys:
        return Traffic(writes=Counter({"o.init": outs * sizes.out, "lse.init": lses}))
    return Traffic(
        Counter({"o.state.convert": outs * sizes.wide, "lse.state.convert": lses}),
        Counter({"o.convert": outs * sizes.out, "lse.convert": lses}),
    )


def _part_head(sizes: _Sizes, rule: Visibility, name: str = "parts") -> Traffic:
    """v2 over a segment of keys, which stores (out, lse) unrounded in HBM."""
    traffic = _v2_head(sizes, sizes.visits(rule, paper_v2_tiles))
    writes = {
        f"o.{name}": rule.seqlen_q * sizes.dv * sizes.wide,
        f"lse.{name}": rule.seqlen_q * sizes.wide,
    }
    return replace(traffic, writes=Counter(writes))


def _merge_head(sizes: _Sizes, rows: int, parts: int) -> Traffic:
    dv, wide = sizes.dv, sizes.wide
    return Traffic(
        Counter({"o.parts": parts * rows * dv * wide, "lse.parts": parts * rows * wide}),
        Counter({"o": rows * dv * sizes.out, "lse": rows * wide}),
        exps=2 * parts * rows,
        other_ops=parts * rows * (5 + 3 * dv) + rows * (dv + 2),
    )


def _backward_loop(sizes: _Sizes, n: Visits) -> Traffic:
    """The part of the backward that v1 and v2 share: k and v once, dq read and written in every
    visit, five products.
    """
    d, dv = sizes.d, sizes.dv
    keys = {"k": n.seqlen_k * d * sizes.x, "v": n.seqlen_k * dv * sizes.x}
    dq = {"dq": n.rows * d * sizes.scratch}
    dkv = {"dk": n.seqlen_k * d * sizes.dkv, "dv": n.seqlen_k * dv * sizes.dkv}
    return Traffic(
        Counter(keys | dq | {"mask": n.mask_words * WORD_BYTES}),
        Counter(dq | dkv),
        flops=n.cells * (6 * d + 4 * dv),
        exps=n.cells,
    )


def _finish_gradients(sizes: _Sizes, lengths: Lengths) -> Traffic:
    """dq, which was summed in HBM, in its own dtype, and the sums over groups of heads."""
    traffic = _group_sums(sizes, lengths)
    if not sizes.converts_dq:
        return traffic
    numbers = _tokens(sizes.problem, lengths)[0] * sizes.problem.num_heads * sizes.d
    return traffic + Traffic(
        Counter({"dq.convert": numbers * sizes.scratch}),
        Counter({"dq.convert": numbers * sizes.grad}),
    )


def _group_sums(sizes: _Sizes, lengths: Lengths) -> Traffic:
    """The sums of dk and dv over the query heads of a group."""
    problem, traffic = sizes.problem, Traffic()
    if not sizes.grouped:
        return traffic
    n_k = _tokens(problem, lengths)[1]
    for name, dim in (("dk.heads", sizes.d), ("dv.heads", sizes.dv)):
        parts, sums = (n_k * heads * dim for heads in (problem.num_heads, problem.num_kv_heads))
        reads, writes = Counter({name: parts * sizes.scratch}), Counter({name: sums * sizes.grad})
        traffic += Traffic(reads, writes, other_ops=parts)
    return traffic


def _tokens(problem: Problem, lengths: Lengths) -> tuple[int, int]:
    if lengths is None:
        return problem.batch * problem.seqlen_q, problem.batch * problem.seqlen_k
    return sum(q for q, _ in lengths), sum(k for _, k in lengths)


def _fits(problem: Problem, mask: BlockMask) -> None:
    wanted = problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k
    broadcast = all(n in (1, m) for n, m in zip(mask.shape[:2], wanted[:2], strict=True))
    if not broadcast or tuple(mask.shape[2:]) != wanted[2:]:
        raise ValueError(f"mask of shape {mask.shape} does not fit scores of shape {wanted}")


def _over_heads(problem: Problem, mask: Mask, lengths: Lengths, head) -> Traffic:
    total = Traffic()
    for rule, heads in _rules(problem, mask, lengths):
        total += head(rule) * heads
    return total


def _rules(problem: Problem, mask: Mask, lengths: Lengths) -> Iterator[tuple[Visibility, int]]:
    """Every visibility rule, and the number of (batch, head) pairs with it."""
    if problem.packed != (lengths is not None):
        raise ValueError(f"problem.packed={problem.packed}, but lengths={lengths!r}")
    if problem.has_mask != (mask is not None):
        raise ValueError(f"problem.has_mask={problem.has_mask}, but mask={mask!r}")
    if mask is not None:
        _fits(problem, mask)
    band = problem.causal, problem.window_size
    if lengths is not None:
        for seqlen_q, seqlen_k in lengths:
            yield Visibility(seqlen_q, seqlen_k, *band), problem.num_heads
        return
    batch, heads = (1, 1) if mask is None else mask.shape[:2]
    sharing = problem.batch // batch * (problem.num_heads // heads)
    for b in range(batch):
        for h in range(heads):
            yield Visibility(problem.seqlen_q, problem.seqlen_k, *band, mask, b, h), sharing
