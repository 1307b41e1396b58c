"""The operations between the matrix products of a decoder: their definitions in torch, and one
fused launch each if a GPU has Triton.

The fused kernels serve inference. With gradients enabled, under compilers and transforms, and in
fp64 the definitions run. In the reproducible mode the kernels serve calls with gradients, too.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.device import device_info
from onchip.core.problem import Options, Problem, Tensors
from onchip.core.torch_mode import is_eager
from onchip.models.reproducible import forward_by_kernel, in_whole_vectors
from onchip.models.rotary import rotate


class Norms(NamedTuple):
    """The RMSNorms of the heads of q and k: weights (head_dim,), eps, and the offset added to a
    weight.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0


class RMSNorm(NamedTuple):
    """The arguments of `rms_norm` after x: weight (width,), eps, and the offset added to it."""

    weight: Tensor
    eps: float
    offset: float = 0.0


@forward_by_kernel
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dimension, in fp32 and rounded once."""
    if kernel := fused(x, weight):
        return kernel.add_rms_norm(x, None, weight, eps, offset)[1]
    wide = x if x.dtype == torch.float64 else x.float()
    factor = weight.to(wide.dtype)
    factor = offset + factor if offset else factor
    return F.rms_norm(wide, weight.shape, factor, eps).to(x.dtype)


@forward_by_kernel
def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y)): the sum is rounded, then normed."""
    if (kernel := fused(x, weight)) and x.shape == y.shape and x.dtype == y.dtype:
        return kernel.add_rms_norm(x, y, weight, eps, offset)
    total = x + y
    return total, rms_norm(total, weight, eps, offset)


def activate(x: Tensor, name: str) -> Tensor:
    return in_whole_vectors(_ACTIVATE[name], x)


@forward_by_kernel
def gated_activation(x: Tensor, name: str) -> Tensor:
    """activation(gate) * up of a projection (..., 2 inner) that holds both."""
    if kernel := fused(x):
        return kernel.gated_activation(x, name)
    gate, up = x.chunk(2, -1)
    return activate(gate, name) * up


def clamped_swiglu(x: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of a projection (..., 2 inner) that holds gate, at
    most limit, and up, limited to [-limit, limit]; in fp32 and rounded once.
    """
    if kernel := fused(x):
        return kernel.clamped_swiglu(x, limit, alpha)
    wide = x if x.dtype == torch.float64 else x.float()
    gate, up = wide.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * in_whole_vectors(torch.sigmoid, alpha * gate))).to(x.dtype)


class Projections(NamedTuple):
    """qkv (tokens, (num_heads + 2 num_kv_heads) head_dim) of new tokens: a row holds q, then k,
    then v. turn: (cos, sin), fp32 (tokens, 1, half), or None for no rotation (RoPE). norms: of the
    heads of q and k.
    """

    qkv: Tensor
    num_heads: int
    turn: tuple[Tensor, Tensor] | None
    norms: Norms | None

    def cut(self, rows: slice) -> "Projections":
        """Those of some tokens."""
        turn = None if self.turn is None else (self.turn[0][rows], self.turn[1][rows])
        return self._replace(qkv=self.qkv[rows], turn=turn)


@forward_by_kernel
def split_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps_offset: tuple[float, float],
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each (..., heads, head_dim), of qkv (..., width): q and k normed and rotated, with
    the bits that `place` writes. heads: of q and of k. None: no norm, no rotation.
    """
    num_heads, num_kv_heads = heads
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    turn = None if cos is None or sin is None else (cos, sin)
    if kernel := fused(qkv):
        weights = None if q_weight is None or k_weight is None else (q_weight, k_weight)
        return kernel.split_heads(qkv, heads, turn, weights, eps_offset)
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((num_heads, *[num_kv_heads] * 2), -2)
    q = q if q_weight is None else rms_norm(q, q_weight, *eps_offset)
    k = k if k_weight is None else rms_norm(k, k_weight, *eps_offset)
    return (q, k, v) if turn is None else (rotate(q, *turn), rotate(k, *turn), v)


def place(projections: Projections, pages: tuple[Tensor, ...], slot_mapping: Tensor) -> Tensor:
    """q (tokens, num_heads, head_dim), normed and rotated; k and v of the same tokens, k normed and
    rotated too, are written to their slots. Only if `fused(qkv)`.

    pages: k_pages, v_pages (num_pages,
    page_size, num_kv_heads, head_dim), and for 8-bit pages their scales, fp32 (num_pages,
    page_size, num_kv_heads). slot_mapping: int32 (tokens,); a slot out of range, like -1, writes
    nothing.
    """
    return cast(Tensor, _place(projections, pages, slot_mapping, queries=True))


def place_keys(projections: Projections, pages: tuple[Tensor, ...], slot_mapping: Tensor) -> None:
    """`place` of k and v alone."""
    _place(projections, pages, slot_mapping, queries=False)


def _place(
    projections: Projections, pages: tuple[Tensor, ...], slot_mapping: Tensor, queries: bool
) -> Tensor | None:
    qkv, num_heads, turn, norms = projections
    _check_place(qkv, num_heads, pages, slot_mapping)
    from onchip.kernels.llm import pointwise as kernel

    weights, rest = (norms[:2], norms[2:]) if norms else (None, (0.0, 0.0))
    return kernel.place(qkv, num_heads, turn, weights, rest, pages, slot_mapping, queries)


def attend_8bit(
    projections: Projections,
    pages: tuple[Tensor, ...],
    tables: tuple[Tensor, Tensor],
    options: Options,
) -> Tensor:
    """Attention of the new tokens of one sequence in options.precision "fp8", (tokens, num_heads,
    head_dim_v): their queries are normed, rotated and quantised in one launch. Only if
    `fused(qkv)`, on a Hopper GPU, after `place_keys`.

    tables: page_table (1, num_pages) and cache_seqlens (1,). options: resolved.
    """
    qkv, num_heads, turn, norms = projections
    from onchip.kernels.llm import prefill_8bit as kernel

    head_dim = pages[0].shape[-1]
    q = qkv[None, :, : num_heads * head_dim].unflatten(-1, (num_heads, head_dim))
    k_scales, v_scales = pages[2:] or (None, None)
    x = Tensors(q, *pages[:2], page_table=tables[0], cache_seqlens=tables[1])
    x = x._replace(k_scales=k_scales, v_scales=v_scales)
    problem = Problem.of(x, options, (q.shape[1],))
    weight = (norms.q_weight, norms.eps, norms.offset) if norms else (None, 0.0, 0.0)
    return kernel.attend(problem, x, qkv, turn, weight)[0]


def _check_place(
    qkv: Tensor, num_heads: int, pages: tuple[Tensor, ...], slot_mapping: Tensor
) -> None:
    k_pages, v_pages, *scales = pages
    num_kv_heads, head_dim = k_pages.shape[2:]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape != (slot_mapping.shape[0], width) or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} does not fit pages {tuple(k_pages.shape)} and"
            f" {tuple(v_pages.shape)} with {num_heads=} and {slot_mapping.shape[0]} slots"
        )
    if not scales and (k_pages.dtype != qkv.dtype or v_pages.dtype != qkv.dtype):
        raise ValueError(f"qkv is {qkv.dtype}, pages are {k_pages.dtype} and {v_pages.dtype}")


def fused(*tensors: Tensor) -> ModuleType | None:
    """The module with fused kernels for all of these functions and `place`; None if the definitions
    must run.
    """
    x = tensors[0]
    if x.device.type != "cuda" or torch.is_grad_enabled() or not is_eager(x):
        return None
    same = all(t.dtype == x.dtype and t.device == x.device for t in tensors)
    if not same or x.dtype == torch.float64 or not device_info(x.device).has_triton:
        return None
    from onchip.kernels.llm import pointwise

    return pointwise


_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
