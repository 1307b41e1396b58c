"""The public functions: each poses a Problem, checked at the door, and hands it to the torch op in
`library`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Never, cast

import torch
from torch import Tensor

from onchip import library, masks, paged
from onchip.arguments import as_int, as_ints, check_flag, refuse_unknown
from onchip.dispatch import kernel_module, settled
from onchip.dispatch import plan as dispatch
from onchip.fold import cascade, offload
from onchip.iomodel.prefixes import costs
from onchip.kernels.protocol import Result
from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import Later, LaterRule
from onchip.problem import (
    Options,
    Question,
    Tensors,
    Window,
    ask,
    check_tensor,
    describe,
    device_info,
    is_autocast,
    is_eager,
    is_traced,
    laid_out,
)
from onchip.state import merge_at_rest

UNBOUNDED: Window = (None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    mask: object = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
    precise_delta: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple:
    """softmax(softmax_scale * q k^T, masked) v in one pass over k and v.

    q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, kv_heads, head_dim); v: (batch,
    seqlen_k, kv_heads, head_dim_v). score = softcap * tanh(softmax_scale * q.k / softcap) - slope *
    |i + seqlen_k - seqlen_q - j| + bias, masked by causal AND window AND mask. causal and window
    are aligned bottom-right: the last query sees the last key. A row that sees no key gives out = 0
    and lse = -inf (with a sink: lse = sink). Returns out[, lse][, stats]; lse: (batch, heads,
    seqlen_q), natural log.

    mask: a Mask, BlockMask, FlexAttention BlockMask, mask_mod(b, h, q, k), bool tensor or bounds of
    `masks.spans`; in a graph that is compiled, tensors are built when it runs. bias: (batch|1,
    heads|1, seqlen_q|1, seqlen_k). sinks: (heads). alibi_slopes: (heads) or (batch, heads).
    softmax_scale: 1 / sqrt(head_dim) unless given. dropout_seed: drawn from torch's generator
    unless given. out_dtype=torch.float32 returns the unrounded result of 16-bit inputs.
    precise_delta: the backward starts from the unrounded out, of which it keeps what rounding to 16
    bits took away: as many bytes again as out has.
    precision: "fp8", "int8" or "int8_pv16" narrow what the forward multiplies, as the recipes of
    onchip.quant say; gradients are those of q, k and v as they come. "auto": "fp8" where a GPU has
    a kernel for it and gains by it (8k keys to a query), None elsewhere.
    kernel: a name from `onchip doctor`; that kernel serves or the call is refused.
    """
    if unknown:
        refuse_unknown("attention", unknown, attention.__kwdefaults__)
    options = Options(
        causal,
        window_size,
        softmax_scale,
        softcap,
        dropout_p,
        return_stats,
        deterministic,
        out_dtype,
        precise_delta=precise_delta,
        return_lse=return_lse,
        precision=precision,
    )
    extras = Extras(mask, alibi_slopes, bias, sinks, dropout_seed)
    question, x = pose(q, k, v, options, extras)
    return _answer(library.attend(question, x, kernel), return_lse)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
    precise_delta: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple:
    """attention() over sequences packed one after another: sequence b holds rows cu_seqlens[b] to
    cu_seqlens[b + 1].

    q: (total_q, heads, head_dim); k: (total_k, kv_heads, head_dim); v: (total_k, kv_heads,
    head_dim_v); cu_seqlens: int32 (batch + 1,). causal, window and ALiBi count positions inside
    each sequence, aligned bottom-right. lse: (heads, total_q).
    """
    if unknown:
        refuse_unknown("varlen_attention", unknown, varlen_attention.__kwdefaults__)
    options = Options(
        causal,
        window_size,
        softmax_scale,
        softcap,
        dropout_p,
        return_stats,
        deterministic,
        out_dtype,
        precise_delta=precise_delta,
        return_lse=return_lse,
        precision=precision,
    )
    extras = Extras(alibi_slopes=alibi_slopes, sinks=sinks, dropout_seed=dropout_seed)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    question, x = pose(q, k, v, options, extras, packing)
    return _answer(library.attend(question, x, kernel), return_lse)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window_size: Window = UNBOUNDED,
    tree_mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple:
    """attention() of new queries over keys that lie in pages: decode, chunked prefill,
    verification.

    q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim) with cu_seqlens_q
    and max_seqlen_q. k_pages, v_pages: (num_pages, page_size, kv_heads, dim); page_table: int32
    (batch, max_pages); cache_seqlens: int32 (batch,). k_scales, v_scales: for pages of int8 or
    float8_e4m3fn, fp32 (num_pages, page_size, kv_heads), any strides: a key is its values times its
    scale; q stays as it is. Sequence b reads its first cache_seqlens[b]
    slots, through page_table[b]; the queries are the last positions of that cache (causal by
    default). Pages that a window has left behind are not read: their entries may be anything.

    tree_mask: bool (batch, seqlen_q, seqlen_q), for drafts that branch: new query i sees new token
    j only if tree_mask[b, i, j], besides causal and window; everything before the new tokens stays
    visible. With packed queries its last two sizes are max_seqlen_q. Positions (window, ALiBi) stay
    those of the cache. deterministic: a sequence's result does not depend, to the last bit, on the
    rest of the batch or on page_size. Under autocast q takes the dtype of the pages. No gradient.
    """
    if unknown:
        refuse_unknown("paged_attention", unknown, paged_attention.__kwdefaults__)
    options = Options(
        causal,
        window_size,
        softmax_scale,
        softcap,
        return_stats=return_stats,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        out_dtype=out_dtype,
        return_lse=return_lse,
    )
    x = Tensors(
        paged.lowered(q, k_pages),
        k_pages,
        v_pages,
        cu_seqlens_q,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        tree_mask=tree_mask,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    question = ask(paged.describe, x, options, max_seqlen_q)
    return _answer(library.attend(question, x, kernel), return_lse)


def cascade_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    plan: cascade.CascadePlan | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """paged_attention() in which pages that several sequences begin with are read once for all of
    them, where a model of time (`onchip.iomodel.prefixes`) says that this wins.

    plan: what `onchip.fold.cascade.plan` made of the host's copy of the tables, moved to q's
    device; it holds for every layer, and while sequences grow. Tables on the CPU are planned here,
    for queries that are packed with cu_seqlens_q.
    """
    if unknown:
        refuse_unknown("cascade_attention", unknown, cascade_attention.__kwdefaults__)
    if plan is not None and cu_seqlens_q is not None:
        raise ValueError("the plan holds the lengths of the queries: give plan or cu_seqlens_q")
    check_flag("return_lse", return_lse)
    for name, t in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        check_tensor(name, t)
    q = paged.lowered(q, k_pages)
    if plan is None and (q.dim() == 3) != (cu_seqlens_q is not None):
        raise ValueError(
            "q must be (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with"
            f" cu_seqlens_q, got shape {tuple(q.shape)}"
        )
    if plan is None:
        model = costs(q, k_pages, v_pages)
        queries = {"seqlen_q": q.shape[1]} if q.dim() == 4 else {"cu_seqlens_q": cu_seqlens_q}
        plan = cascade.plan(page_table, cache_seqlens, k_pages.shape[1], model, **queries)
    own = plan.own(page_table, cache_seqlens)
    options = {"causal": causal, "softmax_scale": softmax_scale, "softcap": softcap}
    options |= {"sinks": sinks, "out_dtype": out_dtype, "return_lse": return_lse, "kernel": kernel}
    options |= {"k_scales": k_scales, "v_scales": v_scales}
    ours = kernel in (None, "triton") and device_info(q.device).has_triton
    merge = kernel_module("triton").merge if q.device.type == "cuda" and ours else None
    pages, kernels = (k_pages, v_pages), {"merge": merge, "at_once": _attend_at_once}
    return cascade.run(plan, paged_attention, q, pages, own, **kernels, **options)


class _Posed(NamedTuple):
    question: Question
    x: Tensors
    kernel: str | None  # asked for


def _attend_at_once(own: cascade.AttendCall, level: cascade.AttendCall) -> list[Any] | None:
    """(out, lse) of two paged calls that run at once; None, and nothing done, where they cannot.
    Not where somebody watches: what a compiler does between them nobody knows.
    """
    if not is_eager(own.args[0]) or "cu_seqlens_q" in own.options:
        return None
    posed = [_pose_pages(*call.args, **call.options) for call in (own, level)]
    if not _run_at_once(*posed):
        return None
    return [_answer(library.attend(*one), return_lse=True) for one in posed]


def _pose_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    kernel: str | None,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    **options: Any,
) -> _Posed:
    x = Tensors(
        q,
        k_pages,
        v_pages,
        sinks=sinks,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    asked = Options(deterministic=deterministic, **options)
    return _Posed(ask(paged.describe, x, asked, None), x, kernel)


def _run_at_once(first: _Posed, second: _Posed) -> bool:
    """Whether one kernel serves both, and runs them so."""
    problems = [laid_out(one.question.problem, one.x) for one in (first, second)]
    device = device_info(first.x.q.device)
    kernel, other = (dispatch(problem, device, first.kernel).kernel for problem in problems)
    runs_beside = getattr(kernel_module(kernel), "runs_beside", None)
    return kernel == other and runs_beside is not None and runs_beside(*problems)


def offload_attention(
    q: Tensor,
    source: offload.Offloaded | tuple[Tensor, Tensor],
    *,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    segment_bytes: int | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() over keys and values that stay in host memory or on disk, streamed to q's device
    in segments of at most segment_bytes; two of them are there at a time.

    source: (k, v) on the CPU, pinned or mapped from a file if you can, an `Offloaded` or a `Spill`
    of `onchip.fold`. No gradient.
    """
    if unknown:
        refuse_unknown("offload_attention", unknown, offload_attention.__kwdefaults__)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    if segment_bytes is not None:
        segment_bytes = as_int("segment_bytes", segment_bytes, 1)
    if isinstance(source, tuple | list):
        source = offload.Offloaded(*source)
    options = {"causal": causal, "window_size": window_size, "sinks": sinks}
    options |= {"softmax_scale": softmax_scale, "softcap": softcap, "kernel": kernel}
    options |= {"out_dtype": out_dtype, "segment_bytes": segment_bytes}
    out, lse = offload.run(attention, q, source, **options)
    return (out, lse) if return_lse else out


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], **unknown: Never
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from attention over each: (out, lse) of
    the same queries.

    outs: n tensors (..., seqlen, heads, head_dim_v); lses: n tensors (..., heads, seqlen), fp32.
    out comes back in the dtype of outs[0]. Differentiable in all of them. A row that saw no key
    anywhere stays out = 0, lse = -inf.
    """
    if unknown:
        refuse_unknown("merge_states", unknown, {"outs": None, "lses": None})
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must be as many and at least one, got {len(outs)} and {len(lses)}"
        )
    rows = (
        (*outs[0].shape[:-3], outs[0].shape[-2], outs[0].shape[-3]) if outs[0].dim() >= 3 else None
    )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if rows is None or out.shape != outs[0].shape or lse.shape != rows:
            raise ValueError(
                f"state {i}: out {tuple(out.shape)} and lse {tuple(lse.shape)} must be"
                f" (..., seqlen, heads, head_dim_v) and (..., heads, seqlen), the same for all"
                f" (the first out is {tuple(outs[0].shape)})"
            )
    out, lse = merge_at_rest([o.transpose(-2, -3) for o in outs], lses)
    return out.transpose(-2, -3).to(outs[0].dtype), lse


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    rows: Sequence[int] | Tensor,
    *,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    mask: object = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    **unknown: Never,
) -> Tensor:
    """The probabilities of chosen query rows, (batch, heads, len(rows), seqlen_k), from the lse of
    attention(..., return_lse=True).

    O(len(rows) * seqlen_k) time and memory. Give the options of the call that made lse; sinks are
    in lse already.
    """
    if unknown:
        refuse_unknown("attention_weights", unknown, attention_weights.__kwdefaults__)
    options = Options(causal, window_size, softmax_scale, softcap)
    (problem, _), x = pose(q, k, k, options, Extras(mask, alibi_slopes, bias))
    chosen = as_ints("rows", rows)
    for row in chosen:
        if row >= problem.seqlen_q:
            raise ValueError(f"row {row} is not in [0, seqlen_q={problem.seqlen_q})")
    expected = (problem.batch, problem.num_heads, problem.seqlen_q)
    if tuple(lse.shape) != expected:
        raise ValueError(
            f"lse must have shape (batch, heads, seqlen_q) = {expected}, got {tuple(lse.shape)}"
        )
    return kernel_module("reference").probabilities(problem, x, lse, chosen)


class Extras(NamedTuple):
    """The options of a call that are tensors, or become tensors."""

    mask: object = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_seed: int | Tensor | None = None


class Packing(NamedTuple):
    """What makes a call packed: offsets of the sequences, and the longest of them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def pose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    extras: Extras = Extras(),  # noqa: B008 (immutable)
    packing: Packing | None = None,
) -> tuple[Question, Tensors]:
    """The checked Question of a call and its tensors."""
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    q, k, v = autocast(q, k, v)
    mask, slopes, bias, sinks, seed = extras
    mask = None if mask is None else _block_mask(mask, q, k)
    cu_q, cu_k = (None, None) if packing is None else packing[:2]
    x = Tensors(q, k, v, cu_q, cu_k, slopes, bias, sinks, mask=mask)
    lengths = () if packing is None else packing[2:]
    question = ask(describe, x, options, lengths)
    if question.problem.precision == "auto":
        precision = settled(question.problem, device_info(q.device))
        question = ask(describe, x, options._replace(precision=precision), lengths)
    if question.problem.dropout_p:
        x = x._replace(dropout_seed=seed_tensor(seed, q))
    return question, x


def _answer(result: Result, return_lse: bool) -> Tensor | tuple:
    out, lse, stats = result
    if stats is None:
        return (out, lse) if return_lse else out
    return (out, lse, stats) if return_lse else (out, stats)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What torch.autocast does for its own attention: q, k, v in the autocast dtype (fp64 is left
    alone).
    """
    if not isinstance(q, Tensor) or not is_autocast(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    lower = lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype != torch.float64 else t
    return lower(q), lower(k), lower(v)


def seed_tensor(seed: int | Tensor | None, q: Tensor) -> Tensor:
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
            raise ValueError(
                f"dropout_seed must be one int64 on {q.device},"
                f" got {seed.dtype} {tuple(seed.shape)} on {seed.device}"
            )
        return seed.reshape(())
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed={seed!r} must be a 64-bit int, an int64 tensor or None")
    return torch.tensor(seed, dtype=torch.int64, device=q.device)


def _block_mask(mask: object, q: Tensor, k: Tensor) -> BlockMask | Later:
    if isinstance(mask, BlockMask):
        return mask
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4):
        raise ValueError("mask needs dense q and k of shape (batch, seqlen, heads, head_dim)")
    grid = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    if isinstance(mask, Tensor) and not is_eager(q):
        return Later(mask, *grid[2:])
    if not is_traced():
        return masks.build(mask, *grid, q.device)
    rule = cast(masks.Mask, masks.as_mask(mask))
    if rule.number is not None:
        return LaterRule.of(rule, grid, q.device)
    return Later(library.built_once(rule.in_graph(*grid, q.device), grid[3]), *grid[2:])
