"""Attention of a chunk of a long prompt in 8 bits, from its projections: one launch normalises,
rotates (RoPE) and quantises the queries, which never exist in 16 bits.

    qkv row: q | k | v
      place_kernel     k: norm, RoPE -> its slot of the pages; v -> its slot (pointwise.py)
      sums, means      the mean of all keys in the pages (triton/quantise.py)
      queries_kernel   q: norm, RoPE, Hadamard, e4m3 with a scale per 128 tokens
      rotate, values   all keys and values in the pages, quantised (triton/quantise.py)
      forward_8bit     attention (hopper/forward_8bit.py)

Without this path place_kernel stores q in 16 bits, and rotate_kernel reads it: 4 bytes for each
element of q more than the 3 that are moved here. The mean comes first, because lse needs
q.mean of each row.

q is rounded to the dtype of qkv after the norm and after RoPE, as place_kernel does.

Worked shape: 300 new tokens, 16 query heads of 128: 3 blocks for each head, 48 programs with one
block each. The other kernels are described in the files named above; examples/versions/v3.py
teaches the attention.
"""

import triton
import triton.language as tl
from torch import Tensor

from onchip.core.backend import empty_result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.llm.pointwise import Turn
from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import TRITON_QUERIES
from onchip.kernels.triton import quantise
from onchip.kernels.triton.launch import launch_options
from onchip.kernels.triton.quantise import (
    OperandSizes,
    QuantisedBlocks,
    QuantisedOperands,
    RotationMatrix,
    quantise_block,
    strip_of,
)
from onchip.kernels.triton.tile import dot, round_to
from onchip.quant.recipes import RECIPES

_BLOCK = tl.constexpr(quantise.BLOCK)


@triton.jit(do_not_specialize=("seqlen", "tiles", "strip", "group_size"))
def queries_kernel(
    qkv_ptr, cos_ptr, sin_ptr, weight_ptr, values_ptr, scales_ptr, means_ptr, shift_ptr, matrix_ptr,
    norms_ptr, stride_qkv, seqlen, group_size, tiles, strip, eps, offset, softmax_scale,
    DIM: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`strip` blocks of 128 queries of one head, normed, rotated and quantised, and their shift."""
    head, start = strip_of(tiles, strip)
    dims = tl.arange(0, PAD)
    m = tl.load(matrix_ptr + dims[:, None] * PAD + dims[None, :])
    means_ptr += (head // group_size).to(tl.int64) * PAD
    shift_ptr += head.to(tl.int64) * seqlen
    qkv_ptr += head * DIM
    for block in range(start, tl.minimum(start + strip, tl.cdiv(seqlen, _BLOCK))):
        tokens = block * _BLOCK + tl.arange(0, _BLOCK)
        rows = qkv_ptr + tokens.to(tl.int64)[:, None] * stride_qkv
        x = _load_queries(
            rows, tokens, tokens < seqlen, cos_ptr, sin_ptr, weight_ptr, eps, offset, DIM, PAD, HALF
        )
        quantise_block(
            dot(x, m, None), values_ptr, scales_ptr, means_ptr, shift_ptr, norms_ptr, tokens,
            seqlen, head * tiles + block, softmax_scale, False, False, 1,
        )  # fmt: skip


@triton.jit
def _load_queries(
    rows, tokens, exist, cos_ptr, sin_ptr, weight_ptr, eps, offset,
    DIM: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rows of queries: normed if there is a weight, elements i and i + HALF rotated if there is a
    cosine, elements from 2 HALF on not rotated. Zeros where no token exists.
    """
    dims = tl.arange(0, PAD)
    x = tl.load(rows + dims[None, :], mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
    factor = 1.0
    if weight_ptr is not None:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        x = _apply_weight(x, factor, weight_ptr, dims, offset, DIM)
    if cos_ptr is not None:
        # Elements that are not rotated are their own partners, with the cosine 1 and the sine 0.
        is_rotated, is_first = dims < 2 * HALF, dims < HALF
        partners = tl.where(is_rotated, tl.where(is_first, dims + HALF, dims - HALF), dims)
        inside = exist[:, None] & (partners < DIM)[None, :]
        y = tl.load(rows + partners[None, :], mask=inside, other=0.0)
        if weight_ptr is not None:
            y = _apply_weight(y, factor, weight_ptr, partners, offset, DIM)
        turns = tokens[:, None] * HALF + tl.where(is_first, dims, dims - HALF)[None, :]
        has_turn = exist[:, None] & is_rotated[None, :]
        cos = tl.load(cos_ptr + turns, mask=has_turn, other=1.0)
        sin = tl.load(sin_ptr + turns, mask=has_turn, other=0.0)
        sin = tl.where(is_first[None, :], -sin, sin)
        x = round_to(x.to(tl.float32) * cos + y.to(tl.float32) * sin, x.dtype)
    return x


@triton.jit
def _apply_weight(x, factor, weight_ptr, at, offset, DIM: tl.constexpr):
    weight = tl.load(weight_ptr + at, mask=at < DIM, other=0.0).to(tl.float32)[None, :]
    return round_to(x.to(tl.float32) * factor * (offset + weight), x.dtype)


_queries_kernel = CachedLauncher(queries_kernel)


def quantise_queries(
    qkv: Tensor,
    turn: Turn | None,
    weight: tuple[Tensor | None, float, float],
    sizes: OperandSizes,
    mean: Tensor,
    shift: Tensor,
    rotation: RotationMatrix,
    problem: Problem,
) -> QuantisedBlocks:
    """The queries of qkv (seqlen, ...), whose rows begin with them, in 8 bits. turn: as in `place`.
    weight: of the norm or None, eps, and the offset added to it. shift (heads, seqlen), fp32: see
    quantise.prepare.
    """
    norm, eps, offset = weight
    blocks = sizes.allocate(qkv, len(rotation.norms), RECIPES[problem.precision].q)
    cos, sin = (None, None) if turn is None else (t.contiguous() for t in turn)
    half = 0 if cos is None else cos.shape[-1]
    _queries_kernel[(sizes.programs,)](
        qkv, cos, sin, norm, blocks.values, blocks.scales, mean, shift, *rotation,
        qkv.stride(0), sizes.seqlen, problem.group_size, sizes.tiles, sizes.strip, float(eps),
        float(offset), problem.softmax_scale,
        DIM=problem.head_dim, PAD=len(rotation.norms), HALF=half,
        **launch_options(TRITON_QUERIES[len(rotation.norms)]),
    )  # fmt: skip
    return blocks


def attend(
    problem: Problem,
    x: Tensors,
    qkv: Tensor,
    turn: Turn | None,
    weight: tuple[Tensor | None, float, float],
) -> Tensor:
    """Attention of one sequence over its pages, (1, seqlen, heads, head_dim_v), in
    problem.precision "fp8" on a Hopper GPU. The keys of the new tokens are in the pages. x: as for
    a paged call; its q has the shape (1, seqlen, heads, head_dim) and is not read.
    """
    from onchip.kernels.hopper.launch_8bit import launch_attention

    out, lse = empty_result(problem, x)
    with on_device(qkv):
        rotation = quantise.get_rotation(problem.head_dim, qkv.dtype, qkv.device)
        keys = quantise.prepare_keys(problem, x, rotation)
        length = problem.seqlen_q
        sizes = OperandSizes(length, length, problem.num_heads, None, 1)
        q = quantise_queries(qkv, turn, weight, sizes, keys.mean, lse, rotation, problem)
        launch_attention(problem, x, QuantisedOperands(q, keys.k, keys.v, keys.pairs), out, lse)
    return out
