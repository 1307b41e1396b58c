"""The operations between the matrix products of a decoder layer, in Triton.

    norm_kernel    x (+ y) -> sum, RMSNorm(sum)               one program per row
    place_kernel   qkv row: q | k | v                         one program per TILE_H heads
                     q: norm, RoPE -> queries
                     k: norm, RoPE -> its slot of the pages  [quantised + scale]
                     v:            -> its slot of the pages  [quantised + scale]
    gate_kernel    activation(gate) * up, or clamped SwiGLU   one program per TILE elements of a row

Computed in fp32. Values are rounded where the unfused code would store a tensor: the residual sum,
the normed q and k, also before 8-bit pages quantise them. Each kernel may be launched while its
predecessor ends (PDL), and waits for it before its first load.

Worked shape: batch 1, 300 tokens, 16 query and 8 kv heads, TILE_H = 4: place_kernel runs 300 * (4 +
2 + 2) programs. Not an attention kernel: no teaching version; onchip/models/pointwise.py has the
definitions in torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.backend import scale_strides
from onchip.core.device import device_info
from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import TRITON_GATE, TRITON_NORM, TRITON_PLACE, TritonConfig
from onchip.kernels.triton.kv8 import compute_scale, quantise
from onchip.kernels.triton.launch import dependent_options
from onchip.kernels.triton.tile import round_to

Turn = tuple[Tensor, Tensor]


@triton.jit
def norm_kernel(
    x_ptr, y_ptr, weight_ptr, sum_ptr, out_ptr, stride_x, stride_y, eps, offset,
    WIDTH: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: sum = x + y (if y is given), out = sum / rms(sum) * (offset + weight)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    inside = cols < WIDTH
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    if y_ptr is not None:
        y = tl.load(y_ptr + row * stride_y + cols, mask=inside, other=0.0).to(tl.float32)
        total = round_to(x + y, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + cols, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    out = round_to(x * factor * (offset + weight), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + cols, out, mask=inside)


@triton.jit(do_not_specialize=("num_slots",))
def place_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, slots_ptr, q_ptr, k_pages_ptr,
    v_pages_ptr, k_scales_ptr, v_scales_ptr,
    stride_qkv, stride_kp, stride_kps, stride_kph, stride_vp, stride_vps, stride_vph,
    stride_ksp, stride_kss, stride_ksh, stride_vsp, stride_vss, stride_vsh,
    eps, offset, num_slots, page_size, num_heads, num_kv_heads,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAD_HALF: tl.constexpr, PAD_REST: tl.constexpr,
    TILE_H: tl.constexpr, PDL: tl.constexpr, QUERIES: tl.constexpr = True,
):  # fmt: skip
    """TILE_H heads of one token: heads of q go to the queries, heads of k and v to the token's
    slot. A row of qkv holds the heads of q, then k, then v; no tile has heads of two of them.
    Without QUERIES heads of q are left alone.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles_q = tl.cdiv(num_heads, TILE_H) if QUERIES else 0
    tiles_kv = tl.cdiv(num_kv_heads, TILE_H)
    tiles = tiles_q + 2 * tiles_kv
    token, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    qkv_ptr += token * stride_qkv
    if HALF > 0:
        cos_ptr += token * HALF
        sin_ptr += token * HALF
    if tile < tiles_q:
        h = tile * TILE_H
        _copy_heads(
            qkv_ptr + h * HEAD_DIM, q_ptr + (token * num_heads + h) * HEAD_DIM, HEAD_DIM, None, 0,
            num_heads - h, cos_ptr, sin_ptr, q_weight_ptr, eps, offset,
            HEAD_DIM, HALF, PAD_HALF, PAD_REST, TILE_H,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            page, place = slot // page_size, slot % page_size
            if tile < tiles_q + tiles_kv:
                h = (tile - tiles_q) * TILE_H
                if k_scales_ptr is not None:
                    k_scales_ptr += page * stride_ksp + place * stride_kss + h * stride_ksh
                _copy_heads(
                    qkv_ptr + (num_heads + h) * HEAD_DIM,
                    k_pages_ptr + page * stride_kp + place * stride_kps + h * stride_kph,
                    stride_kph, k_scales_ptr, stride_ksh, num_kv_heads - h, cos_ptr, sin_ptr,
                    k_weight_ptr, eps, offset,
                    HEAD_DIM, HALF, PAD_HALF, PAD_REST, TILE_H,
                )  # fmt: skip
            else:
                h = (tile - tiles_q - tiles_kv) * TILE_H
                if v_scales_ptr is not None:
                    v_scales_ptr += page * stride_vsp + place * stride_vss + h * stride_vsh
                _copy_heads(
                    qkv_ptr + (num_heads + num_kv_heads + h) * HEAD_DIM,
                    v_pages_ptr + page * stride_vp + place * stride_vps + h * stride_vph,
                    stride_vph, v_scales_ptr, stride_vsh, num_kv_heads - h, None, None,
                    None, eps, offset,
                    HEAD_DIM, HALF, PAD_HALF, PAD_REST, TILE_H,
                )  # fmt: skip


@triton.jit
def _copy_heads(
    source, target, stride, scales, stride_scales, num_heads, cos_ptr, sin_ptr, weight_ptr, eps,
    offset,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAD_HALF: tl.constexpr, PAD_REST: tl.constexpr,
    TILE_H: tl.constexpr,
):  # fmt: skip
    """Copy heads of one token, HEAD_DIM apart, to heads `stride` apart: normed if there is a
    weight, elements i and i + HALF rotated (RoPE) if there is a cosine, elements from 2 HALF on not
    rotated; quantised if there are scales.
    """
    DTYPE: tl.constexpr = source.dtype.element_ty
    heads, dims, rests = tl.arange(0, TILE_H), tl.arange(0, PAD_HALF), tl.arange(0, PAD_REST)
    rows, cols, ends = heads[:, None], dims[None, :], 2 * HALF + rests[None, :]
    is_rotated = (rows < num_heads) & (cols < HALF)
    is_copied = (rows < num_heads) & (ends < HEAD_DIM)
    a = tl.load(source + rows * HEAD_DIM + cols, mask=is_rotated, other=0.0)
    b = tl.load(source + rows * HEAD_DIM + HALF + cols, mask=is_rotated, other=0.0)
    c = tl.load(source + rows * HEAD_DIM + ends, mask=is_copied, other=0.0)
    if weight_ptr is not None:
        x, y, z = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        squares = tl.sum(x * x + y * y, 1) + tl.sum(z * z, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        at = weight_ptr + cols
        a = _apply_weight(x * factor, at, cols < HALF, offset, DTYPE)
        b = _apply_weight(y * factor, at + HALF, cols < HALF, offset, DTYPE)
        c = _apply_weight(z * factor, weight_ptr + ends, ends < HEAD_DIM, offset, DTYPE)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + dims, mask=dims < HALF, other=0.0)[None, :]
        sin = tl.load(sin_ptr + dims, mask=dims < HALF, other=0.0)[None, :]
        x, y = a.to(tl.float32), b.to(tl.float32)
        a, b = round_to(x * cos - y * sin, DTYPE), round_to(y * cos + x * sin, DTYPE)
    if scales is not None:
        x, y, z = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        largest = tl.maximum(largest, tl.max(tl.abs(z), 1))
        nothing = tl.sum(x * 0.0 + y * 0.0, 1) + tl.sum(z * 0.0, 1)
        FORM: tl.constexpr = target.dtype.element_ty
        scale = compute_scale(largest, nothing, FORM)
        tl.store(scales + heads.to(tl.int64) * stride_scales, scale, mask=heads < num_heads)
        column = scale[:, None]
        a, b, c = (
            quantise(x, column, FORM), quantise(y, column, FORM), quantise(z, column, FORM),
        )  # fmt: skip
    target += rows.to(tl.int64) * stride
    tl.store(target + cols, a, mask=is_rotated)
    tl.store(target + HALF + cols, b, mask=is_rotated)
    tl.store(target + ends, c, mask=is_copied)


@triton.jit
def _apply_weight(x, weight_ptr, inside, offset, DTYPE: tl.constexpr):
    weight = tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)
    return round_to(x * (offset + weight), DTYPE)


@triton.jit
def gate_kernel(
    x_ptr, out_ptr, stride_x, inner, num_tiles, limit, alpha,
    ACTIVATION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TILE elements of a row: activation(x[i]) * x[inner + i]. limit, alpha: of clamped_swiglu."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    cols = tile * TILE + tl.arange(0, TILE)
    inside = cols < inner
    gate = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + inner + cols, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        y = clamped_swiglu_fp32(gate, up, limit, alpha)
    else:
        y = activate_fp32(gate, ACTIVATION) * up
    tl.store(out_ptr + row * inner + cols, round_to(y, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def clamped_swiglu_fp32(gate, up, limit, alpha):
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))


@triton.jit
def activate_fp32(x, NAME: tl.constexpr):
    if NAME == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":  # (1 + tanh(t)) / 2 = 1 / (1 + exp(-2 t))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y


_gate_kernel = CachedLauncher(gate_kernel)
_norm_kernel = CachedLauncher(norm_kernel)
_place_kernel = CachedLauncher(place_kernel)


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y)), one dtype and shape (..., width); without y (x, rms_norm(x))."""
    width = x.shape[-1]
    a, b = as_rows(x), None if y is None else as_rows(y)
    total = x if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        pad = triton.next_power_of_2(width)
        with on_device(x):
            _norm_kernel[(a.shape[0],)](
                a, b, weight, None if y is None else total, out,
                a.stride(0), 0 if b is None else b.stride(0), float(eps), float(offset),
                width, pad, **_options(_warps(TRITON_NORM, pad), x),
            )  # fmt: skip
    return total, out


def place(
    qkv: Tensor,
    num_heads: int,
    turn: Turn | None,
    weights: tuple[Tensor, Tensor] | None,
    eps_offset: tuple[float, float],
    pages: tuple[Tensor, ...],
    slot_mapping: Tensor,
    queries: bool = True,
) -> Tensor | None:
    """q (tokens, num_heads, head_dim) of qkv (tokens, (num_heads + 2 num_kv_heads) head_dim),
    normed and rotated. k, treated in the same way, and v are written to the slots of their tokens
    in (k_pages, v_pages) or, quantised, in (k_pages, v_pages, k_scales, v_scales).

    turn: (cos, sin), fp32 (tokens, ..., half); elements i and i + half of a head form a pair,
    elements from 2 half on are not rotated. weights: of the norms of q and k, with eps and the
    offset added to a weight. slot_mapping: int (tokens,); a slot out of range, like -1, writes
    nothing. Two tokens must not share a slot. queries: False writes keys and values alone.
    """
    k_pages, v_pages, *scales = pages
    k_scales, v_scales = scales or (None, None)
    num_pages, page_size, num_kv_heads, head_dim = k_pages.shape
    q = None
    if queries:
        q = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    cos, sin = (None, None) if turn is None else (t.contiguous() for t in turn)
    half = 0 if cos is None else cos.shape[-1]
    tile, pad = TRITON_PLACE.tile_m, triton.next_power_of_2
    tiles = queries * triton.cdiv(num_heads, tile) + 2 * triton.cdiv(num_kv_heads, tile)
    if qkv.numel():
        with on_device(qkv):
            _place_kernel[(qkv.shape[0] * tiles,)](
                qkv, cos, sin, *(weights or (None, None)), slot_mapping.contiguous(),
                q if queries else qkv, k_pages, v_pages, k_scales, v_scales,
                qkv.stride(0), *k_pages.stride()[:3], *v_pages.stride()[:3],
                *scale_strides(k_scales), *scale_strides(v_scales),
                *map(float, eps_offset), num_pages * page_size, page_size, num_heads, num_kv_heads,
                head_dim, half, pad(max(half, 1)), pad(max(head_dim - 2 * half, 1)), tile,
                **_options(TRITON_PLACE, qkv), QUERIES=queries,
            )  # fmt: skip
    return q


def split_heads(
    qkv: Tensor,
    heads: tuple[int, int],
    turn: Turn | None,
    weights: tuple[Tensor, Tensor] | None,
    eps_offset: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each (..., heads, head_dim), of qkv (..., width): `place` with a page for each
    token. heads: of q and of k. turn: (cos, sin), broadcast over the tokens.
    """
    rows, (num_heads, num_kv_heads) = as_rows(qkv), heads
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    shape = len(rows), 1, num_kv_heads, head_dim
    pages = [torch.empty(shape, dtype=qkv.dtype, device=qkv.device) for _ in "kv"]
    if turn is not None:  # the kernel reads a row of cos and sin for each token
        cos, sin = (t.expand(*qkv.shape[:-1], 1, t.shape[-1]) for t in turn)
        turn = cos, sin
    slots = torch.arange(len(rows), dtype=torch.int32, device=qkv.device)
    q = place(rows, num_heads, turn, weights, eps_offset, tuple(pages), slots)
    q, k, v = (t.view(*qkv.shape[:-1], *t.shape[-2:]) for t in (q, *pages))
    return q, k, v


def gated_activation(x: Tensor, name: str) -> Tensor:
    """activation(gate) * up, rounded once, of x (..., 2 inner) that holds gate, then up."""
    return _launch_gate(x, name, 0.0, 0.0)


def clamped_swiglu(x: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), rounded once, of the same with gate at most limit
    and up in [-limit, limit].
    """
    return _launch_gate(x, "clamped_swiglu", float(limit), float(alpha))


def _launch_gate(x: Tensor, name: str, limit: float, alpha: float) -> Tensor:
    inner = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], inner), dtype=x.dtype, device=x.device)
    if out.numel():
        rows, tile = as_rows(x), TRITON_GATE.tile_n
        num_tiles = triton.cdiv(inner, tile)
        with on_device(x):
            _gate_kernel[(rows.shape[0] * num_tiles,)](
                rows, out, rows.stride(0), inner, num_tiles, limit, alpha, name, tile,
                **_options(TRITON_GATE, x),
            )  # fmt: skip
    return out


def as_rows(x: Tensor) -> Tensor:
    """(rows, width), the last dimension contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _warps(config: TritonConfig, elements: int) -> TritonConfig:
    """One warp per 32 * config.tile_n elements, at most config.num_warps."""
    warps = max(1, min(config.num_warps, elements // (32 * config.tile_n)))
    return config._replace(num_warps=warps)


def _options(config: TritonConfig, x: Tensor) -> dict:
    return dependent_options(config, device_info(x.device).capability)
