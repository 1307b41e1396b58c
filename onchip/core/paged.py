"""Paged calls: their validation, the split of mixed batches on the CPU, and the fallback for
kernels that do not read pages, which gathers the pages into packed sequences first.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from onchip import masks
from onchip.core.arguments import as_int
from onchip.core.backend import Result, Stats, accumulator_dtype, empty_result
from onchip.core.problem import (
    DIFFERENTIABLE,
    Options,
    Problem,
    Tensors,
    UnsupportedError,
    keys_hold_values,
)
from onchip.core.torch_mode import is_autocast
from onchip.core.validation import (
    check_agreement,
    check_devices_and_shapes,
    check_extras,
    check_layout,
    check_offsets_tensor,
    check_query_dtype,
    check_tensor,
    resolve_options,
)
from onchip.core.values import values_are_checked
from onchip.quant import kv8

Forward = Callable[[Problem, Tensors], Result]


def describe(x: Tensors, options: Options, max_seqlen_q: int | None = None) -> Problem:
    """Validate a paged call and return its Problem. An invalid call raises ValueError with one
    sentence. max_seqlen_q: of packed queries.
    """
    batch, seqlen_q = _check_queries(x, max_seqlen_q)
    _check_pages(x, batch)
    _check_dtypes(x)
    if options.precision == "auto":
        raise ValueError(
            "precision='auto' depends on the number of keys, which a paged call has on the device:"
            " name a precision, or None"
        )
    problem = Problem.of(x, resolve_options(options, x.q), (seqlen_q,))
    check_extras(problem, x)
    _check_tree(problem, x)
    _check_grad(x)
    return problem


def find_values(
    k_pages: Tensor,
    v_pages: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    latent: int | None,
) -> tuple[Tensor, Tensor | None]:
    """v_pages and v_scales as given or, with `latent`, the first `latent` columns of the keys, a
    view, and the scales of the keys.
    """
    if latent is None:
        if v_pages is None:
            raise ValueError(
                "v_pages is None: give v_pages, or latent=n if the values are the first n columns"
                " of k_pages"
            )
        return v_pages, v_scales
    if v_pages is not None or v_scales is not None:
        name = "v_scales" if v_pages is None else "v_pages"
        raise ValueError(f"{latent=} means that the keys hold the values: {name} must be None")
    check_layout("k_pages", k_pages, 4, "(num_pages, page_size, kv_heads, dim)", may_overlap=True)
    if not 1 <= as_int("latent", latent) <= k_pages.shape[3]:
        raise ValueError(f"{latent=} must be between 1 and head_dim={k_pages.shape[3]}")
    return k_pages[..., :latent], k_scales


def check_shapes(problem: Problem, x: Tensors) -> None:
    """Validate the shapes of a call that was described with other tensors."""
    batch, _ = _check_queries(x, problem.seqlen_q if problem.packed else None)
    _check_pages(x, batch)
    _check_dtypes(x)
    check_extras(problem, x)
    _check_tree(problem, x)


def autocast_queries(q: Tensor, k_pages: Tensor) -> Tensor:
    """q under torch.autocast: in the dtype of the pages, because casting the pages would copy the
    whole pool in every call. Over pages of 8 bits: in autocast's dtype. fp64 stays fp64.
    """
    if not (isinstance(q, Tensor) and isinstance(k_pages, Tensor)):
        return q
    is_double = torch.float64 in (q.dtype, k_pages.dtype)
    if is_double or not is_autocast(q):
        return q
    is_kv8 = k_pages.dtype in kv8.MAX_VALUES
    return q.to(torch.get_autocast_dtype(q.device.type) if is_kv8 else k_pages.dtype)


def _check_queries(x: Tensors, max_seqlen_q: int | None) -> tuple[int, int]:
    """Check q and cu_seqlens_q; return (batch, max_seqlen_q)."""
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
    """Check that pages have q's dtype, or 8 bits and scales."""
    scales = {"k_scales": x.k_scales, "v_scales": x.v_scales}
    is_kv8 = [t.dtype in kv8.MAX_VALUES for t in (x.k, x.v)]
    if not any(is_kv8) and all(t is None for t in scales.values()):
        return check_agreement(*x[:3])
    if not all(is_kv8) or x.k.dtype != x.v.dtype:
        formats = " or ".join(map(str, kv8.MAX_VALUES))
        raise ValueError(
            f"k_scales and v_scales belong to pages that are both {formats}, got k_pages"
            f" {x.k.dtype} and v_pages {x.v.dtype}"
        )
    check_query_dtype(x.q)
    check_devices_and_shapes(*x[:3])
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
    tensors = [(name, getattr(x, name)) for name in DIFFERENTIABLE]
    names = [name for name, t in tensors if t is not None and t.requires_grad]
    if names and torch.is_grad_enabled():
        name = {"k": "k_pages", "v": "v_pages"}.get(names[0], names[0])
        raise UnsupportedError(
            f"paged_attention has no gradient, and {name} requires one: call it under"
            f" torch.no_grad(), or pass {name}.detach()"
        )


def check_values(problem: Problem, x: Tensors) -> None:
    """Check that lengths fit the page table, and that the entries they cover are existing pages."""
    if not problem.page_size or not values_are_checked(x.q):
        return
    capacity, num_pages = problem.seqlen_k, x.k.shape[0]
    table, seqlens = _tables(x)
    if _within(seqlens, 0, capacity) and _within(table, 0, num_pages - 1):
        return  # every entry is valid, also the unused ones
    for b, length in enumerate(seqlens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(f"cache_seqlens[{b}]={length} must be between 0 and {capacity} slots")
    used = -(-seqlens // problem.page_size)
    columns = torch.arange(table.shape[1], device=x.q.device)
    first = _first_visible(problem, x) // problem.page_size
    read = (columns < used[:, None]) & (columns >= first[:, None])
    bad = read & ((table < 0) | (table >= num_pages))
    if bad.any():
        b, column = bad.nonzero()[0].tolist()
        page = int(table[b, column])
        raise ValueError(f"page_table[{b}, {column}]={page} is not in [0, num_pages={num_pages})")


def _within(t: Tensor, low: int, high: int) -> bool:
    if not t.numel():
        return True
    least, most = t.aminmax()
    return low <= int(least) and int(most) <= high


def _tables(x: Tensors) -> tuple[Tensor, Tensor]:
    """page_table and cache_seqlens: every paged call has them."""
    return cast(tuple[Tensor, Tensor], (x.page_table, x.cache_seqlens))


def _first_visible(problem: Problem, x: Tensors) -> Tensor:
    """(batch,): the first key that any query sees under the window. Earlier pages may be freed."""
    left, (_, seqlens) = problem.window_size[0], _tables(x)
    if left is None:
        return torch.zeros_like(seqlens)
    seqlens_q = x.cu_seqlens_q.diff() if problem.packed else problem.seqlen_q
    return (seqlens - seqlens_q - left).clamp(min=0)


class SubBatch(NamedTuple):
    """Some sequences of a packed call as a call of their own. rows: their rows in q."""

    problem: Problem
    x: Tensors
    rows: Tensor


MIN_DECODES = 4  # with fewer, a call of their own costs more than it saves


def split_mixed_batch(problem: Problem, x: Tensors) -> list[SubBatch]:
    """Split a mixed batch on the CPU into decodes (sequences with one query) and the other
    sequences, because no CPU kernel is fast for both. Other calls are not split: an empty list.
    """
    is_packed = problem.page_size and problem.packed and problem.seqlen_q > 1
    needs_one_call = (
        problem.deterministic
        or problem.reproducible
        or problem.has_tree_mask
        or problem.return_stats
    )
    if not is_packed or needs_one_call or x.q.device.type != "cpu":
        return []
    seqlens_q = x.cu_seqlens_q.diff()
    is_decode = seqlens_q == 1
    if int(is_decode.sum()) < MIN_DECODES:
        return []
    rows = torch.repeat_interleave(is_decode, seqlens_q)
    decodes, others = _select(problem, x, is_decode, rows), _select(problem, x, ~is_decode, ~rows)
    dense = decodes.x._replace(q=decodes.x.q[:, None], cu_seqlens_q=None)
    dense_problem = decodes.problem._replace(seqlen_q=1, packed=False)
    return [SubBatch(dense_problem, dense, decodes.rows), others]


def _select(problem: Problem, x: Tensors, is_chosen: Tensor, is_row: Tensor) -> SubBatch:
    """The sequences of a bool (batch,). is_row: bool (total_q,), True for their rows of q."""
    at, rows = is_chosen.nonzero()[:, 0], is_row.nonzero()[:, 0]
    table, seqlens = _tables(x)
    cu = torch.cat([seqlens.new_zeros(1), x.cu_seqlens_q.diff()[at]]).cumsum(0, dtype=torch.int32)
    slopes = x.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[at]
    y = x._replace(q=x.q[rows], cu_seqlens_q=cu, alibi_slopes=slopes)
    y = y._replace(page_table=table[at], cache_seqlens=seqlens[at])
    return SubBatch(problem._replace(batch=len(at)), y, rows)


def join_parts(problem: Problem, x: Tensors, results: list[tuple[SubBatch, Result]]) -> Result:
    """The Result of a call from the results of its parts."""
    out, lse = empty_result(problem, x)
    for part, result in results:
        packed = part.problem.packed
        out[part.rows] = result.out if packed else result.out.flatten(0, 1)
        lse[:, part.rows] = result.lse if packed else result.lse.movedim(0, 1).flatten(1)
    return Result(out, lse)


class _GatheredTensors(NamedTuple):
    """Tensors of the packed call that is equivalent to a paged call."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def gather_and_forward(forward: Forward, problem: Problem, x: Tensors) -> Result:
    """Compute a paged call with the forward of a kernel that does not read pages: gather the keys
    into packed sequences first. Pages of 8 bits are computed in fp32, because values times scales
    do not fit in 16 bits. Synchronises with the device to read the lengths.
    """
    if problem.page_dtype is not None:
        problem = problem._replace(dtype=accumulator_dtype(problem.dtype))
        x = x._replace(q=x.q.to(problem.dtype))
    gathered = _gather(problem, x)
    longest = max(_tables(x)[1].tolist(), default=0)
    packed = problem._replace(page_size=0, seqlen_k=longest, packed=True, page_dtype=None)
    y = x._replace(**gathered._asdict(), page_table=None, cache_seqlens=None)
    y = y._replace(k_scales=None, v_scales=None)
    has_tree = x.tree_mask is not None and problem.batch
    result = _forward_by_sequence(forward, packed, y) if has_tree else forward(packed, y)
    return result if problem.packed else _unpack(result, x.q)


def _gather(problem: Problem, x: Tensors) -> _GatheredTensors:
    """Keys before the window become zeros: no query sees them, and their pages may be freed."""
    page_size, (table, seqlens) = problem.page_size, _tables(x)
    position = torch.arange(problem.seqlen_k, device=x.q.device)
    table = table.clamp(0, max(x.k.shape[0] - 1, 0)).long()
    slots = table[:, position // page_size] * page_size + position % page_size
    exists = position < seqlens[:, None]
    hidden = (position < _first_visible(problem, x)[:, None])[exists]
    gather = partial(_gather_rows, slots=slots[exists], hidden=hidden, dtype=problem.dtype)
    k = gather(x.k, x.k_scales)
    v = k[..., : x.v.shape[3]] if keys_hold_values(x) else gather(x.v, x.v_scales)
    cu_k = torch.cat([seqlens.new_zeros(1), seqlens]).cumsum(0, dtype=torch.int32)
    if problem.packed:
        return _GatheredTensors(x.q, k, v, x.cu_seqlens_q, cu_k)
    steps = torch.arange(problem.batch + 1, dtype=torch.int32, device=x.q.device)
    return _GatheredTensors(x.q.flatten(0, 1), k, v, steps * problem.seqlen_q, cu_k)


def _gather_rows(
    pages: Tensor, scales: Tensor | None, slots: Tensor, hidden: Tensor, dtype: torch.dtype
) -> Tensor:
    rows = pages.flatten(0, 1)[slots]
    if scales is not None:
        rows = kv8.dequantise(rows, scales.flatten(0, 1)[slots], dtype)
    return rows.masked_fill_(hidden[:, None, None], 0.0)


def _forward_by_sequence(forward: Forward, problem: Problem, x: Tensors) -> Result:
    """Compute a packed call with a tree mask as one dense call with a mask per sequence."""
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
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=x.q.device)
    new = min(seqlen_q, seqlen_k)
    tree = cast(Tensor, x.tree_mask)
    visible[:, seqlen_k - new :] = tree[b, :seqlen_q, seqlen_q - new : seqlen_q]
    slopes = x.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[b : b + 1]
    mask = masks.build(visible, 1, problem.num_heads, seqlen_q, seqlen_k, x.q.device)
    dense = problem._replace(
        batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, packed=False, has_mask=True
    )
    q, k, v = x.q[None, rows], x.k[None, keys], x.v[None, keys]
    y = x._replace(q=q, k=k, v=v, cu_seqlens_q=None, cu_seqlens_k=None, tree_mask=None)
    return dense, y._replace(alibi_slopes=slopes, mask=mask)


def _unpack(result: Result, q: Tensor) -> Result:
    """(heads, batch * seqlen) -> (batch, heads, seqlen) for lse and statistics."""
    rows = lambda t: t.unflatten(-1, q.shape[:2]).movedim(-3, -2).contiguous()
    stats = None if result.stats is None else Stats(*map(rows, result.stats))
    return Result(result.out.unflatten(0, q.shape[:2]), rows(result.lse), stats)
