"""Keys that lie in pages: the question such a call poses, checked at the door, and the way out for
kernels that read no pages: gather them into packed sequences.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from onchip import eightbit, masks
from onchip.arguments import as_int
from onchip.kernels.protocol import Result, Stats, accumulator_dtype, empty_result
from onchip.problem import (
    Options,
    Problem,
    Tensors,
    UnsupportedError,
    check_agreement,
    check_extras,
    check_layout,
    check_offsets_tensor,
    check_options,
    check_places_and_shapes,
    check_query_dtype,
    check_tensor,
    is_autocast,
    values_are_checked,
)

Forward = Callable[[Problem, Tensors], Result]


def describe(x: Tensors, options: Options, max_seqlen_q: int | None = None) -> Problem:
    """The Problem that a paged call poses; ValueError in one sentence if it poses none. Packed
    queries come with max_seqlen_q.
    """
    batch, seqlen_q = _check_queries(x, max_seqlen_q)
    _check_pages(x, batch)
    _check_dtypes(x)
    check_options(options, x.q)
    scale, page_size = options.softmax_scale, x.k.shape[1]
    problem = Problem(
        batch,
        seqlen_q,
        x.page_table.shape[1] * page_size,
        x.q.shape[-2],
        x.k.shape[-2],
        x.q.shape[-1],
        x.v.shape[-1],
        x.q.dtype,
        options.out_dtype or x.q.dtype,
        x.q.shape[-1] ** -0.5 if scale is None else float(scale),
        bool(options.causal),
        tuple(options.window_size),
        float(options.softcap),
        packed=x.cu_seqlens_q is not None,
        has_alibi=x.alibi_slopes is not None,
        has_sinks=x.sinks is not None,
        return_stats=bool(options.return_stats),
        deterministic=bool(options.deterministic),
        page_size=page_size,
        has_tree_mask=x.tree_mask is not None,
        return_lse=bool(options.return_lse),
        page_dtype=None if x.k_scales is None else x.k.dtype,
        beside=options.beside,
    )
    check_extras(problem, x)
    _check_tree(problem, x)
    _check_grad(x)
    return problem


def check_shapes(problem: Problem, x: Tensors) -> None:
    """The checks of `describe` that look at tensors alone, for a problem that was described."""
    batch, _ = _check_queries(x, problem.seqlen_q if problem.packed else None)
    _check_pages(x, batch)
    _check_dtypes(x)
    check_extras(problem, x)
    _check_tree(problem, x)


def lowered(q: Tensor, k_pages: Tensor) -> Tensor:
    """q as torch.autocast hands it to a paged call: in the dtype of the pages. To cast the pages
    instead would copy the whole pool, call after call. Over pages of 8 bits, in autocast's own
    dtype. fp64 is left alone.
    """
    if not (isinstance(q, Tensor) and isinstance(k_pages, Tensor)):
        return q
    exact = torch.float64 in (q.dtype, k_pages.dtype)
    if exact or not is_autocast(q):
        return q
    is_kv8 = k_pages.dtype in eightbit.MAX_VALUES
    return q.to(torch.get_autocast_dtype(q.device.type) if is_kv8 else k_pages.dtype)


def _check_queries(x: Tensors, max_seqlen_q: int | None) -> tuple[int, int]:
    """(batch, the longest seqlen_q)."""
    packed = x.cu_seqlens_q is not None
    is_tensor = isinstance(x.q, Tensor)
    fits = is_tensor and x.q.dim() == (3 if packed else 4) and packed == (max_seqlen_q is not None)
    if not fits:
        got = f"shape {tuple(x.q.shape)}" if is_tensor else f"no torch.Tensor: {type(x.q).__name__}"
        raise ValueError(
            "q must be (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with"
            f" cu_seqlens_q and max_seqlen_q, got {got}"
        )
    if max_seqlen_q is None:
        check_layout("q", x.q, 4, "(batch, seqlen_q, heads, head_dim)")
        return x.q.shape[0], x.q.shape[1]
    check_layout("q", x.q, 3, "(total_q, heads, head_dim)")
    check_offsets_tensor("cu_seqlens_q", x.cu_seqlens_q, x.q)
    return x.cu_seqlens_q.shape[0] - 1, as_int("max_seqlen_q", max_seqlen_q)


def _check_pages(x: Tensors, batch: int) -> None:
    for name, t in (("k_pages", x.k), ("v_pages", x.v)):
        check_layout(name, t, 4, "(num_pages, page_size, kv_heads, dim)", may_overlap=True)
    if not x.k.shape[1]:
        raise ValueError(f"k_pages of shape {tuple(x.k.shape)} has pages without slots")
    for name, t, rank in (("page_table", x.page_table, 2), ("cache_seqlens", x.cache_seqlens, 1)):
        check_tensor(name, t)
        if t.dtype != torch.int32 or t.dim() != rank or t.shape[0] != batch:
            got = f"{t.dtype} {tuple(t.shape)}"
            raise ValueError(f"{name} must be int32 of rank {rank} with batch {batch}, got {got}")
        if t.device != x.q.device:
            raise ValueError(f"{name} is on {t.device}, q is on {x.q.device}")


def _check_dtypes(x: Tensors) -> None:
    """Pages in the dtype of q, or of 8 bits with scales."""
    scales = {"k_scales": x.k_scales, "v_scales": x.v_scales}
    is_kv8 = [t.dtype in eightbit.MAX_VALUES for t in (x.k, x.v)]
    if not any(is_kv8) and all(t is None for t in scales.values()):
        return check_agreement(*x[:3])
    if not all(is_kv8) or x.k.dtype != x.v.dtype:
        formats = " or ".join(map(str, eightbit.MAX_VALUES))
        raise ValueError(
            f"k_scales and v_scales belong to pages that are both {formats}, got k_pages"
            f" {x.k.dtype} and v_pages {x.v.dtype}"
        )
    check_query_dtype(x.q)
    check_places_and_shapes(*x[:3])
    for name, t in scales.items():
        _check_scales(name, t, x.k)


def _check_scales(name: str, scales: object, pages: Tensor) -> None:
    shape = tuple(pages.shape[:3])
    if not isinstance(scales, Tensor):
        got = type(scales).__name__
        raise ValueError(f"pages of {pages.dtype} need {name}, float32 {shape}, got {got}")
    if scales.dtype != torch.float32 or tuple(scales.shape) != shape:
        raise ValueError(
            f"{name} must be float32 (num_pages, page_size, num_kv_heads) = {shape}, got"
            f" {scales.dtype} {tuple(scales.shape)}"
        )
    if scales.device != pages.device:
        raise ValueError(f"{name} is on {scales.device}, its pages are on {pages.device}")


def _check_tree(problem: Problem, x: Tensors) -> None:
    tree = x.tree_mask
    if tree is None:
        return
    shape = (problem.batch, problem.seqlen_q, problem.seqlen_q)
    if not isinstance(tree, Tensor) or tree.dtype != torch.bool or tuple(tree.shape) != shape:
        is_tensor = isinstance(tree, Tensor)
        got = f"{tree.dtype} {tuple(tree.shape)}" if is_tensor else type(tree).__name__
        raise ValueError(f"tree_mask must be bool (batch, seqlen_q, seqlen_q) = {shape}, got {got}")
    if tree.device != x.q.device:
        raise ValueError(f"tree_mask is on {tree.device}, q is on {x.q.device}")


def _check_grad(x: Tensors) -> None:
    named = {"q": x.q, "k_pages": x.k, "v_pages": x.v, "sinks": x.sinks}
    wanted = [name for name, t in named.items() if t is not None and t.requires_grad]
    if wanted and torch.is_grad_enabled():
        raise UnsupportedError(
            f"paged_attention has no gradient, and {wanted[0]} requires one: call it under"
            f" torch.no_grad(), or pass {wanted[0]}.detach()"
        )


def check_values(problem: Problem, x: Tensors) -> None:
    """Lengths must fit the page table, and what they reach of it must be pages that exist."""
    if not problem.page_size or not values_are_checked(x.q):
        return
    room, num_pages = problem.seqlen_k, x.k.shape[0]
    table, seqlens = _tables(x)
    if _within(seqlens, 0, room) and _within(table, 0, num_pages - 1):
        return  # nothing is wrong, not even in what nobody reads
    for b, length in enumerate(seqlens.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"cache_seqlens[{b}]={length} must lie between 0 and {room} slots")
    used = -(-seqlens // problem.page_size)
    columns = torch.arange(table.shape[1], device=x.q.device)
    first = _first_visible(problem, x) // problem.page_size
    read = (columns < used[:, None]) & (columns >= first[:, None])
    bad = read & ((table < 0) | (table >= num_pages))
    if bad.any():
        b, column = bad.nonzero()[0].tolist()
        page = int(table[b, column])
        raise ValueError(f"page_table[{b}, {column}]={page} leaves [0, num_pages={num_pages})")


def _within(t: Tensor, low: int, high: int) -> bool:
    if not t.numel():
        return True
    least, most = t.aminmax()
    return low <= int(least) and int(most) <= high


def _tables(x: Tensors) -> tuple[Tensor, Tensor]:
    """page_table and cache_seqlens, which every paged call has."""
    return cast(tuple[Tensor, Tensor], (x.page_table, x.cache_seqlens))


def _first_visible(problem: Problem, x: Tensors) -> Tensor:
    """(batch): the first key that a window leaves to any query; pages before it may be gone."""
    left, (_, seqlens) = problem.window_size[0], _tables(x)
    if left is None:
        return torch.zeros_like(seqlens)
    seqlens_q = x.cu_seqlens_q.diff() if problem.packed else problem.seqlen_q
    return (seqlens - seqlens_q - left).clamp(min=0)


class Part(NamedTuple):
    """Some sequences of a packed call as a call of their own, and which rows of q are theirs."""

    problem: Problem
    x: Tensors
    rows: Tensor


LEAST_DECODES = 4  # fewer are not worth a call of their own


def parts(problem: Problem, x: Tensors) -> list[Part]:
    """A mixed batch on the CPU, cut into the sequences with one query and the others: what is fast
    for the ones is slow for the others there. Otherwise nothing is cut: no parts.
    """
    packed_pages = problem.page_size and problem.packed and problem.seqlen_q > 1
    whole = problem.deterministic or problem.has_tree_mask or problem.return_stats
    if not packed_pages or whole or x.q.device.type != "cpu":
        return []
    seqlens_q = x.cu_seqlens_q.diff()
    one = seqlens_q == 1
    if int(one.sum()) < LEAST_DECODES:
        return []
    owners = torch.repeat_interleave(one, seqlens_q)
    decodes, others = _part(problem, x, one, owners), _part(problem, x, ~one, ~owners)
    dense = decodes.x._replace(q=decodes.x.q[:, None], cu_seqlens_q=None)
    alone = decodes.problem._replace(seqlen_q=1, packed=False)
    return [Part(alone, dense, decodes.rows), others]


def _part(problem: Problem, x: Tensors, chosen: Tensor, owned: Tensor) -> Part:
    """The sequences of a bool (batch,), whose rows are those of a bool (total_q,)."""
    at, rows = chosen.nonzero()[:, 0], owned.nonzero()[:, 0]
    table, seqlens = _tables(x)
    cu = torch.cat([seqlens.new_zeros(1), x.cu_seqlens_q.diff()[at]]).cumsum(0, dtype=torch.int32)
    slopes = x.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[at]
    y = x._replace(q=x.q[rows], cu_seqlens_q=cu, alibi_slopes=slopes)
    y = y._replace(page_table=table[at], cache_seqlens=seqlens[at])
    return Part(problem._replace(batch=len(at)), y, rows)


def joined(problem: Problem, x: Tensors, found: list[tuple[Part, Result]]) -> Result:
    """The Result of a call from those of its parts."""
    out, lse = empty_result(problem, x)
    for part, result in found:
        packed = part.problem.packed
        out[part.rows] = result.out if packed else result.out.flatten(0, 1)
        lse[:, part.rows] = result.lse if packed else result.lse.movedim(0, 1).flatten(1)
    return Result(out, lse)


class _Gathered(NamedTuple):
    """The packed call that equals a paged one."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def through_gather(forward: Forward, problem: Problem, x: Tensors) -> Result:
    """What the forward of a kernel that reads no pages makes of a paged problem: the keys are
    gathered into packed sequences first, those of 8 bits with fp32 queries: their values times
    their scales fit no 16 bits. Waits for the device to know the lengths.
    """
    if problem.page_dtype is not None:
        problem = problem._replace(dtype=accumulator_dtype(problem.dtype))
        x = x._replace(q=x.q.to(problem.dtype))
    seen = _gather(problem, x)
    longest = max(_tables(x)[1].tolist(), default=0)
    flat = problem._replace(page_size=0, seqlen_k=longest, packed=True, page_dtype=None)
    y = x._replace(**seen._asdict(), page_table=None, cache_seqlens=None)
    y = y._replace(k_scales=None, v_scales=None)
    plain = x.tree_mask is None or not problem.batch
    result = forward(flat, y) if plain else _by_sequence(forward, flat, y)
    return result if problem.packed else _unpacked(result, x.q)


def _gather(problem: Problem, x: Tensors) -> _Gathered:
    """Keys before the window are zeros: their pages may be gone, and no query sees them."""
    page_size, (table, seqlens) = problem.page_size, _tables(x)
    position = torch.arange(problem.seqlen_k, device=x.q.device)
    table = table.clamp(0, max(x.k.shape[0] - 1, 0)).long()
    slots = table[:, position // page_size] * page_size + position % page_size
    exists = position < seqlens[:, None]
    gone = (position < _first_visible(problem, x)[:, None])[exists]
    pages = (x.k, x.k_scales), (x.v, x.v_scales)
    k, v = (_rows_of(*part, slots[exists], gone, problem.dtype) for part in pages)
    cu_k = torch.cat([seqlens.new_zeros(1), seqlens]).cumsum(0, dtype=torch.int32)
    if problem.packed:
        return _Gathered(x.q, k, v, x.cu_seqlens_q, cu_k)
    steps = torch.arange(problem.batch + 1, dtype=torch.int32, device=x.q.device)
    return _Gathered(x.q.flatten(0, 1), k, v, steps * problem.seqlen_q, cu_k)


def _rows_of(
    pages: Tensor, scales: Tensor | None, slots: Tensor, gone: Tensor, dtype: torch.dtype
) -> Tensor:
    rows = pages.flatten(0, 1)[slots]
    if scales is not None:
        rows = eightbit.dequantise(rows, scales.flatten(0, 1)[slots], dtype)
    return rows.masked_fill_(gone[:, None, None], 0.0)


def _by_sequence(forward: Forward, problem: Problem, x: Tensors) -> Result:
    """A packed call with a tree mask: each sequence is a dense one with a mask of its own."""
    results = []
    offsets_q, offsets_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        rows = slice(offsets_q[b], offsets_q[b + 1])
        keys = slice(offsets_k[b], offsets_k[b + 1])
        results.append(forward(*_one_sequence(problem, x, b, rows, keys)))
    join = lambda parts: torch.cat([part[0] for part in parts], -1)
    out, lse = torch.cat([r.out[0] for r in results]), join([r.lse for r in results])
    if not problem.return_stats:
        return Result(out, lse)
    return Result(out, lse, Stats(*map(join, zip(*(r.stats for r in results), strict=True))))


def _one_sequence(
    problem: Problem, x: Tensors, b: int, rows: slice, keys: slice
) -> tuple[Problem, Tensors]:
    seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=x.q.device)
    new = min(seqlen_q, seqlen_k)
    tree = cast(Tensor, x.tree_mask)
    seen[:, seqlen_k - new :] = tree[b, :seqlen_q, seqlen_q - new : seqlen_q]
    slopes = x.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[b : b + 1]
    mask = masks.build(seen, 1, problem.num_heads, seqlen_q, seqlen_k, x.q.device)
    dense = problem._replace(
        batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, packed=False, has_mask=True
    )
    qkv = x.q[None, rows], x.k[None, keys], x.v[None, keys]
    return dense, Tensors(*qkv, alibi_slopes=slopes, sinks=x.sinks, mask=mask)


def _unpacked(result: Result, q: Tensor) -> Result:
    """(heads, batch * seqlen) -> (batch, heads, seqlen) for lse and statistics."""
    rows = lambda t: t.unflatten(-1, q.shape[:2]).movedim(-3, -2).contiguous()
    stats = None if result.stats is None else Stats(*map(rows, result.stats))
    return Result(result.out.unflatten(0, q.shape[:2]), rows(result.lse), stats)
