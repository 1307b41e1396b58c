"""The validation of a call. `describe` checks everything but the values of tensors, which
values.py checks, and returns the Problem. Code behind it does not validate again.
"""

import math
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from onchip.core.arguments import as_int, check_flag
from onchip.core.problem import (
    DTYPES,
    PRECISIONS,
    Options,
    Problem,
    Tensors,
    UnsupportedError,
    Window,
    check_head_dims,
)
from onchip.core.torch_mode import is_eager

FLAGS = tuple(name for name, kind in Options.__annotations__.items() if kind is bool)


def describe(x: Tensors, options: Options, max_seqlens: Sequence[int] = ()) -> Problem:
    """Validate a dense or packed call and return its Problem. An invalid call raises ValueError
    with one sentence.
    """
    q, k, v = x[:3]
    check_qkv(q, k, v, rank=3 if max_seqlens else 4)
    options = resolve_options(options, q)
    if max_seqlens:
        max_seqlens = check_packing(x, max_seqlens)
    else:
        warn_of_layout(q, k)
    problem = Problem.of(x, options, max_seqlens)
    check_extras(problem, x)
    return problem


def check_qkv(q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    layout = "(batch, seqlen, heads, head_dim)" if rank == 4 else "(total, heads, head_dim)"
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_layout(name, t, rank, layout)
    check_agreement(q, k, v)
    if rank == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k and v have batch {k.shape[0]}")


class LayoutWarning(UserWarning):
    """q, k and v look as if laid out (batch, heads, seqlen, head_dim), as torch's attention
    expects.
    """


HEADS_FIRST = (
    "are q, k and v (batch, heads, seqlen, head_dim), as scaled_dot_product_attention takes them?"
    " attention() takes (batch, seqlen, heads, head_dim): pass q.transpose(1, 2),"
    " k.transpose(1, 2), v.transpose(1, 2), and transpose the result; these are views, not copies"
)
MOST_HEADS = 128  # the most heads of a model; sequences are often longer
_layout_warned = False


def looks_heads_first(q: Tensor, k: Tensor) -> bool:
    """Whether q has more heads than models have, over sequences no longer than that number: then
    heads and sequence are probably swapped.
    """
    if not q.dim() == k.dim() == 4:
        return False
    return q.shape[2] > MOST_HEADS >= max(q.shape[1], k.shape[1]) and q.shape[1] > 1


def warn_of_layout(q: Tensor, k: Tensor) -> None:
    """Give LayoutWarning, once per process. Not under a compiler, where lengths may be SymInts."""
    global _layout_warned
    if _layout_warned or not is_eager(q) or not looks_heads_first(q, k):
        return
    _layout_warned = True
    shape = "batch {}, seqlen {}, heads {}, head_dim {}".format(*q.shape)
    warnings.warn(f"q has {shape}: {HEADS_FIRST}.", LayoutWarning, stacklevel=6)


def check_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.is_nested:
        raise UnsupportedError(
            f"{name} is a nested tensor: pass values() of jagged ones to varlen_attention, with"
            " offsets().int() as cu_seqlens"
        )
    if t.layout != torch.strided:
        raise UnsupportedError(f"{name} has layout {t.layout}: call {name}.to_dense()")


def refuse_distributed(function: str, *tensors: object) -> None:
    """Raise if one of the tensors is a DTensor."""
    if any(hasattr(t, "device_mesh") for t in tensors):
        raise UnsupportedError(
            f"{function} does not take DTensors: call it with to_local() of each of them, the part"
            " of this rank"
        )


def check_layout(
    name: str, t: Tensor, rank: int, layout: str, *, may_overlap: bool = False
) -> None:
    """Check type, rank and strides. may_overlap: elements may share memory. Pages of a strided view
    may, where no page table refers to them.
    """
    check_tensor(name, t)
    if t.dim() != rank:
        raise ValueError(f"{name} must have rank {rank}, {layout}, got shape {tuple(t.shape)}")
    if t.stride(-1) != 1 and t.shape[-1] != 1 and t.numel():
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {t.stride()}:"
            f" call {name}.contiguous()"
        )
    if may_overlap or torch.compiler.is_compiling():  # strides may be SymInts: the op checks them
        return
    if _overlaps(t):
        raise ValueError(
            f"{name} has elements that share memory, with strides {t.stride()} for shape"
            f" {tuple(t.shape)}: call {name}.contiguous()"
        )


def _overlaps(t: Tensor) -> bool:
    """Whether different indices may address the same memory, other than along expanded dimensions
    (stride 0). torch's conversions and kernels may read such a tensor wrongly.
    """
    extent = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False


def check_agreement(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check dtypes, devices, heads and head dims of q, k and v, in any layout."""
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        _refuse_dtypes(q, k, v)
    check_devices_and_shapes(q, k, v)


def check_devices_and_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """check_agreement without dtypes: pages of 8 bits have a dtype of their own."""
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must share a device, got {q.device}, {k.device}, {v.device}")
    if q.dtype == torch.float64 and q.device.type not in ("cpu", "meta"):
        raise UnsupportedError(f"float64 is served on the CPU, not on {q.device}: use float32")
    _check_shapes(q, k, v)


def _refuse_dtypes(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_dtype(name, t)
    raise ValueError(f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


def check_query_dtype(q: Tensor) -> None:
    """Check q's dtype alone: pages of 8 bits have a dtype of their own."""
    _check_dtype("q", q)


def _check_dtype(name: str, t: Tensor) -> None:
    if t.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"{name}.dtype={t.dtype} is not one of {names}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    *_, num_heads, head_dim = q.shape  # unpacking a torch.Size is faster than slicing it
    *rows_k, num_kv_heads, head_dim_k = k.shape
    *rows_v, num_heads_v, head_dim_v = v.shape
    if rows_k != rows_v or num_kv_heads != num_heads_v:
        raise ValueError(
            f"k and v must agree except in head_dim, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if head_dim != head_dim_k:
        raise ValueError(f"q has head_dim {head_dim}, k has head_dim {head_dim_k}")
    check_head_dims(head_dim, head_dim_v)
    if num_heads == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        hint = f" ({HEADS_FIRST})" if looks_heads_first(q, k) else ""
        raise ValueError(f"{num_heads=} must be a positive multiple of {num_kv_heads=}{hint}")


def check_packing(x: Tensors, max_seqlens: Sequence[int]) -> tuple[int, int]:
    """Check cu_seqlens and return (max_seqlen_q, max_seqlen_k). check_values checks the values of
    cu_seqlens.
    """
    check_offsets_tensor("cu_seqlens_q", x.cu_seqlens_q, x.q)
    check_offsets_tensor("cu_seqlens_k", x.cu_seqlens_k, x.q)
    if x.cu_seqlens_q.shape != x.cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same length, got"
            f" {x.cu_seqlens_q.shape[0]} and {x.cu_seqlens_k.shape[0]}"
        )
    longest_q, longest_k = max_seqlens
    return as_int("max_seqlen_q", longest_q), as_int("max_seqlen_k", longest_k)


def check_offsets_tensor(name: str, cu: Tensor | None, q: Tensor) -> None:
    is_tensor = isinstance(cu, Tensor)
    if not is_tensor or cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1:
        what = f"{cu.dtype} of shape {tuple(cu.shape)}" if is_tensor else type(cu).__name__
        raise ValueError(f"{name} must be an int32 tensor of shape (batch + 1,), got {what}")
    if cu.device != q.device:
        raise ValueError(f"{name} is on {cu.device}, q is on {q.device}")


def resolve_options(options: Options, q: Tensor) -> Options:
    """Validate options and replace None by the default of a call over q."""
    for name in FLAGS:
        check_flag(name, getattr(options, name))
    scale, softcap, dropout_p = options.softmax_scale, options.softcap, options.dropout_p
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"softmax_scale={scale} must be a finite number")
    if not _is_finite(softcap) or softcap < 0:
        raise ValueError(f"{softcap=} must be a finite number >= 0 (0 switches it off)")
    if not _is_finite(dropout_p) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{dropout_p=} must be in [0, 1)")
    if options.window_size != (None, None):
        check_window(options.window_size)
    if options.precision not in PRECISIONS:
        names = ", ".join(map(repr, PRECISIONS))
        raise ValueError(f"precision={options.precision!r} is not one of {names}")
    if options.out_dtype is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if options.out_dtype not in (q.dtype, wide):
            raise ValueError(f"out_dtype={options.out_dtype} must be {q.dtype} or {wide}")
    out_dtype = options.out_dtype or q.dtype
    return options._replace(
        out_dtype=out_dtype,
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        window_size=tuple(options.window_size),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        precise_delta=options.precise_delta and out_dtype.itemsize == 2,  # else out is not rounded
    )


def check_window(window_size: Window) -> None:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{window_size=} must be a pair (left, right), None = unbounded")
    for name, side in zip(("left", "right"), window_size, strict=True):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(f"window_size {name}={side!r} must be None (unbounded) or an int >= 0")


def check_extras(problem: Problem, x: Tensors) -> None:
    """Check alibi_slopes, sinks, bias, tensors of score_mod and mask against the problem."""
    if x.alibi_slopes is not None:
        shapes = ((problem.num_heads,), (problem.batch, problem.num_heads))
        _check_tensor("alibi_slopes", x.alibi_slopes, x.q, shapes)
        if x.alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError("alibi_slopes has no gradient here: pass alibi_slopes.detach()")
    if x.sinks is not None:
        _check_tensor("sinks", x.sinks, x.q, ((problem.num_heads,),))
    if x.bias is not None:
        _check_bias(problem, x)
    for t in (x.captured, x.captured_ints):
        if t is not None and t.device != x.q.device:
            raise ValueError(f"score_mod indexes a tensor on {t.device}, q is on {x.q.device}")
    if x.mask is not None:
        _check_mask(problem, x)


def _check_tensor(name: str, t: Tensor, q: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(t, Tensor) or tuple(t.shape) not in shapes:
        got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {got}")
    _check_kind(name, t, q)


def _check_kind(name: str, t: Tensor, q: Tensor) -> None:
    if t.dtype not in DTYPES:
        raise ValueError(f"{name}.dtype={t.dtype} must be a floating type")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")


def _check_bias(problem: Problem, x: Tensors) -> None:
    if problem.packed:
        raise UnsupportedError("bias needs a dense call: packed sequences have no common scores")
    full = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    shape = tuple(x.bias.shape) if isinstance(x.bias, Tensor) else ()
    fits = len(shape) == 4 and shape[3] == full[3]
    if not fits or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        layout = "(batch|1, heads|1, seqlen_q|1, seqlen_k)"
        raise ValueError(f"bias must be {layout} with sizes {full}, got {shape}")
    _check_kind("bias", x.bias, x.q)


def _check_mask(problem: Problem, x: Tensors) -> None:
    if problem.packed:
        raise UnsupportedError(
            "mask needs a dense call: use attention(mask=masks.document(cu_seqlens) & mask)"
        )
    batch, heads, *lengths = shape = x.mask.shape
    wanted = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    fits = batch in (1, problem.batch) and heads in (1, problem.num_heads)
    if not fits or tuple(lengths) != wanted[2:]:
        raise ValueError(f"mask of shape {shape} does not fit scores of shape {wanted}")
    if x.mask.device != x.q.device:
        raise ValueError(f"mask is on {x.mask.device}, q is on {x.q.device}: use mask.to(q.device)")


def _is_finite(x: Any) -> bool:
    """Compare with infinity: Dynamo does not trace math.isfinite of a SymFloat. Real includes
    numpy's floats.
    """
    if not isinstance(x, (int, float, Real)) or isinstance(x, bool):
        return False
    number: Any = x
    return -math.inf < number < math.inf
