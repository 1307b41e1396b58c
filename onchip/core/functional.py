"""The public functions. Each one validates the arguments of a call with new shapes, describes it as
a Problem, and passes it to `torch_op.attend`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Never, Unpack, cast, overload

import torch
from torch import Tensor

from onchip import masks
from onchip.core import paged, torch_op
from onchip.core.arguments import as_int, as_ints, check_flag, refuse_unknown
from onchip.core.backend import Result, Stats
from onchip.core.call_cache import CachedCall, prepare
from onchip.core.device import device_info
from onchip.core.dispatch import plan as dispatch
from onchip.core.dispatch import resolve_precision
from onchip.core.problem import Options, Tensors, Window, resolve_layout
from onchip.core.signatures import (
    AttentionOptions,
    CascadeOptions,
    No,
    OffloadOptions,
    PagedOptions,
    VarlenOptions,
    Yes,
)
from onchip.core.state import merge_out_lse
from onchip.core.torch_mode import is_autocast, is_eager, is_traced
from onchip.core.validation import check_tensor, describe, refuse_distributed
from onchip.cost.prefixes import costs
from onchip.fold import cascade, offload
from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import DeferredMask, DeferredRule
from onchip.score_mods.tracing import ScoreFunction, ScoreMod, trace_for_call

UNBOUNDED: Window = (None, None)
Outputs = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Stats] | tuple[Tensor, Tensor, Stats]


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: No = False, return_stats: No = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, return_stats: No = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: No = False, return_stats: Yes,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Stats]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, return_stats: Yes,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Stats]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, return_stats: No = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_stats: bool = False,
    **options: Unpack[AttentionOptions],
) -> Outputs: ...  # fmt: skip
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
    score_mod: ScoreFunction | ScoreMod | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
    reproducible: bool = False,
    out_dtype: torch.dtype | None = None,
    precise_delta: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Outputs:
    """softmax(softmax_scale * q k^T, masked) v in one pass over k and v.

    q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, kv_heads, head_dim); v: (batch,
    seqlen_k, kv_heads, head_dim_v). score = softcap * tanh(softmax_scale * q.k / softcap) - slope *
    |i + seqlen_k - seqlen_q - j| + bias, then score_mod, masked by causal AND window AND mask.
    causal and window are aligned bottom-right: the last query sees the last key. A row that sees no
    key gives out = 0 and lse = -inf (with a sink: lse = sink). Returns out[, lse][, stats]; lse:
    (batch, heads, seqlen_q), natural log.

    score_mod: a function (score, b, h, q, k) as in FlexAttention, of a score and indices from 0,
    which may index tensors, or the `onchip.score_mods.trace` of one. A function is traced in every
    call. Tensors that it indexes have gradients.

    mask: a Mask, BlockMask, FlexAttention BlockMask, mask_mod(b, h, q, k), bool tensor or bounds of
    `masks.spans`; a compiled graph builds masks from tensors when it runs. bias: (batch|1,
    heads|1, seqlen_q|1, seqlen_k). sinks: (heads). alibi_slopes: (heads) or (batch, heads).
    softmax_scale: default 1 / sqrt(head_dim). dropout_seed: by default drawn from torch's
    generator. out_dtype=torch.float32 returns the unrounded result of 16-bit inputs.
    precise_delta: the backward uses the unrounded out. The rounding error of out is saved for it,
    as many bytes as out itself.
    precision: "fp8", "int8" or "int8_pv16" quantise the operands of the forward by the recipes of
    onchip.quant, "nvfp4", "nvfp4_pv8" and "mxfp4" too, by their reference on the CPU alone;
    gradients are for the unquantised q, k and v. "auto": "fp8" where a GPU has a kernel for it and
    is faster (8k keys per query), else None.
    reproducible: the bits of a row of the forward depend on that row and on the keys up to its own
    alone: not on the batch, on packing, chunks or pages (docs/reproducible.md).
    kernel: a name from `onchip doctor`. That kernel serves the call, or the call is refused.
    """
    if unknown:
        refuse_unknown("attention", unknown, attention.__kwdefaults__)
    options = Options(
        out_dtype=out_dtype,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        return_stats=return_stats,
        deterministic=deterministic,
        reproducible=reproducible,
        return_lse=return_lse,
        precise_delta=precise_delta,
        precision=precision,
    )
    x = Tensors(q, k, v, alibi_slopes=alibi_slopes, bias=bias, sinks=sinks)
    call, x = prepare_attention(
        x, options, mask=mask, score_mod=score_mod, dropout_seed=dropout_seed
    )
    return _select_outputs(torch_op.attend(call, x, kernel), return_lse)


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, return_lse: No = False, return_stats: No = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, return_lse: Yes, return_stats: No = False,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, return_lse: No = False, return_stats: Yes,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Stats]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, return_lse: Yes, return_stats: Yes, **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor, Stats]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, return_lse: bool, return_stats: No = False,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, return_lse: bool = False, return_stats: bool = False,
    **options: Unpack[VarlenOptions],
) -> Outputs: ...  # fmt: skip
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
    score_mod: ScoreFunction | ScoreMod | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
    reproducible: bool = False,
    out_dtype: torch.dtype | None = None,
    precise_delta: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Outputs:
    """attention() over sequences packed one after another: sequence b holds rows cu_seqlens[b] to
    cu_seqlens[b + 1].

    q: (total_q, heads, head_dim); k: (total_k, kv_heads, head_dim); v: (total_k, kv_heads,
    head_dim_v); cu_seqlens: int32 (batch + 1,). causal, window and ALiBi count positions inside
    each sequence, aligned bottom-right. score_mod gets the number of the sequence as b, and q and k
    counted from the first token of the sequence. lse: (heads, total_q).
    """
    if unknown:
        refuse_unknown("varlen_attention", unknown, varlen_attention.__kwdefaults__)
    options = Options(
        out_dtype=out_dtype,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        return_stats=return_stats,
        deterministic=deterministic,
        reproducible=reproducible,
        return_lse=return_lse,
        precise_delta=precise_delta,
        precision=precision,
    )
    x = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes=alibi_slopes, sinks=sinks)
    lengths = max_seqlen_q, max_seqlen_k
    call, x = prepare_attention(x, options, lengths, score_mod=score_mod, dropout_seed=dropout_seed)
    return _select_outputs(torch_op.attend(call, x, kernel), return_lse)


@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: No = False, return_stats: No = False, **options: Unpack[PagedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: Yes, return_stats: No = False, **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: No = False, return_stats: Yes, **options: Unpack[PagedOptions],
) -> tuple[Tensor, Stats]: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: Yes, return_stats: Yes, **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor, Stats]: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: bool, return_stats: No = False, **options: Unpack[PagedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: bool = False, return_stats: bool = False, **options: Unpack[PagedOptions],
) -> Outputs: ...  # fmt: skip
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    latent: int | None = None,
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
    reproducible: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Outputs:
    """attention() of new queries over paged keys: decode, chunked prefill, verification.

    q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim) with cu_seqlens_q
    and max_seqlen_q. k_pages, v_pages: (num_pages, page_size, kv_heads, dim); page_table: int32
    (batch, max_pages); cache_seqlens: int32 (batch,). latent: without v_pages, the values are the
    first `latent` columns of the keys, as in multi-head latent attention. k_scales, v_scales: for
    pages of int8 or float8_e4m3fn, fp32 (num_pages, page_size, kv_heads), any strides: a key is its
    stored values times its scale; q is not quantised. Sequence b reads its first cache_seqlens[b]
    slots, through page_table[b]. The queries are the last positions of that cache (causal by
    default). Entries of pages that lie entirely before the window are not read and may hold any
    value.

    tree_mask: bool (batch, seqlen_q, seqlen_q), for drafts that branch: new query i sees new token
    j only if tree_mask[b, i, j], AND causal AND window. Everything before the new tokens stays
    visible. With packed queries its last two sizes are max_seqlen_q. Positions (window, ALiBi) are
    positions in the cache. deterministic: the bits of a sequence's result do not depend on the rest
    of the batch or on page_size. reproducible: rows have the same bits in `attention` and
    `varlen_attention`, too. precision: "fp8" or "int8" quantise q and, in every call, the keys and
    values in the pages: for long prompts. "auto" is refused, because the number of keys is on the
    device. Under autocast q takes the dtype of the pages. No gradient.
    """
    if unknown:
        refuse_unknown("paged_attention", unknown, paged_attention.__kwdefaults__)
    options = Options(
        out_dtype=out_dtype,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_stats=return_stats,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        reproducible=reproducible,
        return_lse=return_lse,
        precision=precision,
    )
    v_pages, v_scales = paged.find_values(k_pages, v_pages, k_scales, v_scales, latent)
    x = Tensors(
        paged.autocast_queries(q, k_pages),
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
    call = prepare(paged.describe, x, options, max_seqlen_q)
    return _select_outputs(torch_op.attend(call, x, kernel), return_lse)


@overload
def cascade_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: No = False, **options: Unpack[CascadeOptions],
) -> Tensor: ...  # fmt: skip
@overload
def cascade_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: Yes, **options: Unpack[CascadeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def cascade_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, page_table: Tensor, cache_seqlens: Tensor,
    *, return_lse: bool, **options: Unpack[CascadeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def cascade_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    latent: int | None = None,
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
    """paged_attention() that reads the pages of shared prefixes once for all sequences that begin
    with them, where the cost model (`onchip.cost.prefixes`) predicts that this is faster.

    plan: the result of `onchip.fold.cascade.plan` for the host's copy of the tables, moved to q's
    device. One plan is valid for every layer, and while sequences grow. Without a plan, tables on
    the CPU are planned here; packed queries then need cu_seqlens_q.
    """
    if unknown:
        refuse_unknown("cascade_attention", unknown, cascade_attention.__kwdefaults__)
    refuse_distributed("cascade_attention", q, k_pages, v_pages)
    if plan is not None and cu_seqlens_q is not None:
        raise ValueError("the plan holds the lengths of the queries: give plan or cu_seqlens_q")
    check_flag("return_lse", return_lse)
    v_pages, v_scales = paged.find_values(k_pages, v_pages, k_scales, v_scales, latent)
    for name, t in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        check_tensor(name, t)
    q = paged.autocast_queries(q, k_pages)
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
    kernels = {"merge": get_level_merge(q.device, kernel), "at_once": _attend_at_once}
    pages = k_pages, v_pages
    return cascade.run(plan, paged_attention, q, pages, own, **kernels, **options)


def get_level_merge(device: torch.device, kernel: str | None = None) -> Callable[..., Any]:
    """The merge of a cascade's levels: in one launch, or with torch operations where that cannot
    run or another kernel is named.
    """
    if device.type != "cuda" or kernel not in (None, "triton"):
        return cascade.merge_levels
    if not device_info(device).has_triton:
        return cascade.merge_levels
    from onchip.kernels.triton.entry import merge

    return merge


class _PreparedCall(NamedTuple):
    call: CachedCall
    x: Tensors
    kernel: str | None  # the argument `kernel` of the call


def _attend_at_once(own: cascade.AttendCall, level: cascade.AttendCall) -> list[Any] | None:
    """Run two paged calls at once, each on some of the processors; return (out, lse) of each. None,
    with nothing computed, if they cannot. Not under torch.compile or tracing: a compiler may put
    other launches between the two.
    """
    if not is_eager(own.args[0]) or "cu_seqlens_q" in own.options:
        return None
    prepared = [_prepare_pages(*call.args, **call.options) for call in (own, level)]
    if not _can_run_at_once(*prepared):
        return None
    return [_select_outputs(torch_op.attend(*call), return_lse=True) for call in prepared]


def _prepare_pages(
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
) -> _PreparedCall:
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
    scalars = Options(deterministic=deterministic, **options)
    return _PreparedCall(prepare(paged.describe, x, scalars, None), x, kernel)


def _can_run_at_once(first: _PreparedCall, second: _PreparedCall) -> bool:
    """Whether one kernel serves both calls and can run them at once."""
    problems = [resolve_layout(call.call.problem, call.x) for call in (first, second)]
    device = device_info(first.x.q.device)
    backend, other = (dispatch(problem, device, first.kernel).backend for problem in problems)
    return backend is other and backend.can_partition_sms(*problems)


@overload
def offload_attention(
    q: Tensor, source: offload.Offloaded | tuple[Tensor, Tensor], *, return_lse: No = False,
    **options: Unpack[OffloadOptions],
) -> Tensor: ...  # fmt: skip
@overload
def offload_attention(
    q: Tensor, source: offload.Offloaded | tuple[Tensor, Tensor], *, return_lse: Yes,
    **options: Unpack[OffloadOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def offload_attention(
    q: Tensor, source: offload.Offloaded | tuple[Tensor, Tensor], *, return_lse: bool,
    **options: Unpack[OffloadOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
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
    """attention() over keys and values in host memory or on disk. They are streamed to q's device
    in segments of at most segment_bytes; the device holds two segments at a time.

    source: (k, v) on the CPU, preferably pinned or mapped from a file, an `Offloaded` or a `Spill`
    of `onchip.fold`. No gradient.
    """
    if unknown:
        refuse_unknown("offload_attention", unknown, offload_attention.__kwdefaults__)
    refuse_distributed("offload_attention", q)
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
    """Merge (out, lse) of the same queries over disjoint sets of keys into attention over their
    union.

    outs: n tensors (..., seqlen, heads, head_dim_v); lses: n tensors (..., heads, seqlen), fp32.
    The result has the dtype of outs[0]. Differentiable in all inputs. A row without keys in every
    set gives out = 0, lse = -inf.
    """
    if unknown:
        refuse_unknown("merge_states", unknown, {"outs": None, "lses": None})
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must have the same length >= 1, got {len(outs)} and {len(lses)}"
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
    out, lse = merge_out_lse([o.transpose(-2, -3) for o in outs], lses)
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
    score_mod: ScoreFunction | ScoreMod | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    **unknown: Never,
) -> Tensor:
    """The probabilities of the query rows in `rows`, (batch, heads, len(rows), seqlen_k), from the
    lse of attention(..., return_lse=True).

    Takes O(len(rows) * seqlen_k) time and memory. Pass the same options as to attention(), except
    sinks, which lse already contains.
    """
    if unknown:
        refuse_unknown("attention_weights", unknown, attention_weights.__kwdefaults__)
    refuse_distributed("attention_weights", q, k)
    options = Options(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap
    )
    x = Tensors(q, k, k, alibi_slopes=alibi_slopes, bias=bias)
    (problem, _), x = prepare_attention(x, options, mask=mask, score_mod=score_mod)
    row_indices = as_ints("rows", rows)
    for row in row_indices:
        if row >= problem.seqlen_q:
            raise ValueError(f"row {row} is not in [0, seqlen_q={problem.seqlen_q})")
    expected = (problem.batch, problem.num_heads, problem.seqlen_q)
    if tuple(lse.shape) != expected:
        raise ValueError(
            f"lse must have shape (batch, heads, seqlen_q) = {expected}, got {tuple(lse.shape)}"
        )
    from onchip.kernels.cpu.reference import probabilities

    return probabilities(problem, x, lse, row_indices)


def prepare_attention(
    x: Tensors,
    options: Options,
    max_seqlens: tuple[int, ...] = (),
    *,
    mask: object = None,
    score_mod: ScoreFunction | ScoreMod | None = None,
    dropout_seed: int | Tensor | None = None,
) -> tuple[CachedCall, Tensors]:
    """Validate a dense or packed call; return it with its complete tensors. x holds all tensors but
    those of the mask and score_mod, and the seed. max_seqlens: (max_seqlen_q, max_seqlen_k) of a
    packed call.
    """
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    if isinstance(x.q, Tensor) and is_autocast(x.q):
        q, k, v = autocast(*x[:3])
        x = x._replace(q=q, k=k, v=v)
    if mask is not None:
        x = x._replace(mask=_block_mask(mask, x.q, x.k))
    if score_mod is not None:
        traced = trace_for_call(score_mod)
        captured, captured_ints = traced.flatten()
        x = x._replace(captured=captured, captured_ints=captured_ints)
        options = options._replace(score_mod=traced.text)
    call = prepare(describe, x, options, max_seqlens)
    if call.problem.precision == "auto":
        precision = resolve_precision(call.problem, device_info(x.q.device))
        call = prepare(describe, x, options._replace(precision=precision), max_seqlens)
    if call.problem.dropout_p:
        x = x._replace(dropout_seed=seed_tensor(dropout_seed, x.q))
    return call, x


def _select_outputs(result: Result, return_lse: bool) -> Outputs:
    """out[, lse][, stats]."""
    out, lse, stats = result
    if stats is None:
        return (out, lse) if return_lse else out
    return (out, lse, stats) if return_lse else (out, stats)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of torch.autocast, if it is on, as in torch's own attention. fp64
    stays fp64.
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


def _block_mask(mask: object, q: Tensor, k: Tensor) -> BlockMask | DeferredMask:
    if isinstance(mask, BlockMask):
        return mask
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4):
        raise ValueError(
            "mask needs dense q and k of shape (batch, seqlen, heads, head_dim); packed sequences "
            "take attention(q[None], k[None], v[None], mask=masks.document(cu_seqlens) & mask)"
        )
    grid = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    if isinstance(mask, Tensor) and not is_eager(q):
        return DeferredMask(mask, *grid[2:])
    if not is_traced():
        return masks.build(mask, *grid, q.device)
    rule = cast(masks.Mask, masks.as_mask(mask))
    if rule.number is not None:
        return DeferredRule.of(rule, grid, q.device)
    return DeferredMask(torch_op.build_once(rule.in_graph(*grid, q.device), grid[3]), *grid[2:])
