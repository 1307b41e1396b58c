"""Attention with quantised operands: recipes, and their executable reference, by which kernels are
judged.

`attend` visits tiles in the order of the Hopper kernel, keys from last to first, so that p is cast
relative to the same running maximum. Operands are multiplied by their scales first, which changes a
sum only by fp32's rounding. Sums are in fp32, or in the tensor cores' short accumulator if the
recipe says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import Options, Problem, Tensors, Window
from onchip.core.state import State, finalize, fold_tiles
from onchip.core.validation import check_offsets_tensor, check_tensor, describe
from onchip.core.values import check_values
from onchip.masks.visibility import Visibility
from onchip.quant import formats
from onchip.quant.accumulator import Accumulator, add_product
from onchip.quant.formats import E4M3, NumberFormat, cast, wide
from onchip.quant.rotation import rotate
from onchip.quant.schemes import Quantised, Scheme, quantise
from onchip.quant.smoothing import lse_shift, smooth_keys


@dataclass(frozen=True)
class Recipe:
    """How the operands of both products are quantised.

    q, k, v: their schemes; None leaves q and k unchanged, and rounds v to pv_dtype.
    p: the format of the weights, exp(score - running maximum) * p_scale; None: pv_dtype, unscaled.
    rotate: multiply q and k by a signed Hadamard matrix of `seed`.
    smooth: subtract from the keys the mean of their sequence, and correct lse.
    tile_m queries loop over tiles of tile_n keys, from the last to the first if `backwards`.
    accumulator: how products of two FP8 operands are added; None: in fp32.
    """

    name: str
    q: Scheme | None
    k: Scheme | None
    v: Scheme | None = None
    p: NumberFormat | None = None
    p_scale: float = 256.0
    pv_dtype: torch.dtype = torch.bfloat16
    rotate: bool = False
    smooth: bool = False
    seed: int = 0
    tile_m: int = 128
    tile_n: int = 128
    backwards: bool = True
    accumulator: Accumulator | None = None

    def __post_init__(self) -> None:
        if self.p is not None and not 0 < self.p_scale <= self.p.max:
            raise ValueError(
                f"p_scale={self.p_scale} must be in (0, {self.p.max}], otherwise p = 1 saturates"
            )
        if self.tile_m < 1 or self.tile_n < 1:
            raise ValueError(f"tile_m={self.tile_m} and tile_n={self.tile_n} must be positive")


class RecipeOperands(NamedTuple):
    """q, k, v as a recipe quantises them, and the keys' mean if it was subtracted. An operand that
    is not quantised is a plain tensor in fp32 (fp64 for fp64).
    """

    q: Quantised | Tensor
    k: Quantised | Tensor
    v: Quantised | Tensor
    mean: Tensor | None


_BLOCK = Scheme(E4M3, "block", 128)
_TOKEN = Scheme(formats.INT8, "token")
_TENSOR = Scheme(E4M3, "tensor")
_HEAD = Scheme(E4M3, "head")

# precision="fp8": the FlashAttention-3 paper's block quantisation and rotation; keys without their
# mean, on which e4m3 would spend its bits if channels are biased; and p scaled so that weights down
# to 2^-17 of a row's largest survive the cast.
FP8 = Recipe("fp8", _BLOCK, _BLOCK, _BLOCK, E4M3, rotate=True, smooth=True)
# int8 per token has 7 bits where e4m3 has 4: scores are 5 to 7 times as exact. It matters if scores
# are large: with one key that scores 8 above the others, FP8 loses 5 %, INT8 1 to 3 %, mostly by p
# and v in e4m3.
INT8 = Recipe("int8", _TOKEN, _TOKEN, _BLOCK, E4M3, rotate=True, smooth=True)
INT8_PV16 = replace(INT8, name="int8_pv16", v=None, p=None)

# Others, for comparison. FA3_PAPER is arXiv 2407.08608, FA3_FP8 the released kernel
# (hopper/flash_fwd_kernel_sm90.h of github.com/Dao-AILab/flash-attention): descales per head, p *
# 2^8 (its Max_offset), no rotation. SAGE1 and SAGE2: arXiv 2410.02367 and 2411.10958, the 8-bit
# variants.
FA3_PAPER = replace(FP8, name="fa3_paper", smooth=False)
FP8_TENSOR = Recipe("fp8_tensor", _TENSOR, _TENSOR, _TENSOR, E4M3, p_scale=1.0)
FA3_FP8 = Recipe("fa3_fp8", _HEAD, _HEAD, _HEAD, E4M3, p_scale=256.0)
SAGE1 = Recipe(
    "sage1",
    Scheme(formats.INT8, "block", 128),
    Scheme(formats.INT8, "block", 64),
    pv_dtype=torch.float16,
    smooth=True,
    backwards=False,
)
SAGE2 = Recipe(
    "sage2",
    _TOKEN,
    _TOKEN,
    Scheme(E4M3, "channel"),
    E4M3,
    p_scale=448.0,
    smooth=True,
    backwards=False,
)
RECIPES = {r.name: r for r in (FP8, INT8, INT8_PV16, FP8_TENSOR, FA3_PAPER, FA3_FP8, SAGE1, SAGE2)}


def prepare(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> RecipeOperands:
    """The operands that the kernel of a recipe reads: smoothed, then rotated, then quantised."""
    q, k, v, mean = wide(q), wide(k), wide(v), None
    if recipe.smooth:
        k, mean = smooth_keys(k, cu_seqlens_k)
    if recipe.rotate:
        q, k = rotate(q, recipe.seed), rotate(k, recipe.seed)
    v = v.to(recipe.pv_dtype).to(v.dtype) if recipe.v is None else v
    return RecipeOperands(
        q if recipe.q is None else quantise(q, recipe.q, cu_seqlens_q),
        k if recipe.k is None else quantise(k, recipe.k, cu_seqlens_k),
        v if recipe.v is None else quantise(v, recipe.v, cu_seqlens_k),
        mean,
    )


@torch.no_grad()
def attend(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention as the recipe computes it; layouts, options and alignment are those
    of `onchip.attention`, packed with both cu_seqlens those of `onchip.varlen_attention`.

    out is laid out like q, lse (batch, heads, seqlen_q) or packed (heads, total); both unrounded in
    fp32 (fp64 for fp64). A row that sees no key gives out = 0, lse = -inf. No gradients.
    """
    x = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k)
    options = Options(softmax_scale=softmax_scale, causal=causal, window_size=window_size)
    problem = _describe(x, options)
    operands = prepare(recipe, q, k, v, cu_seqlens_q, cu_seqlens_k)
    out = wide(q).new_zeros(*q.shape[:-1], v.shape[-1])
    lse = out.new_full(out.shape[:-1], -inf).transpose(-1, -2).contiguous()
    whole = [_batched(_plain(t).to(out.dtype)) for t in operands[:3]]
    for rows, keys in _cuts(x):
        parts = [t[:, at] for t, at in zip(whole, (rows, keys, keys), strict=True)]
        results = _batched(out)[:, rows], (lse if lse.dim() == 3 else lse[None])[..., rows]
        _attend_sequence(recipe, problem, parts, results)
    if operands.mean is not None:
        lse += lse_shift(q, operands.mean, problem.softmax_scale, cu_seqlens_q)
    return out, lse


def _describe(x: Tensors, options: Options) -> Problem:
    """The problem, validated like that of any call; packed lengths are read from the tensors."""
    if x.cu_seqlens_q is None and x.cu_seqlens_k is None:
        return describe(x, options)
    check_tensor("q", x.q)
    check_offsets_tensor("cu_seqlens_q", x.cu_seqlens_q, x.q)
    check_offsets_tensor("cu_seqlens_k", x.cu_seqlens_k, x.q)
    longest = [max(cu.diff().tolist(), default=0) for cu in (x.cu_seqlens_q, x.cu_seqlens_k)]
    problem = describe(x, options, (max(0, longest[0]), max(0, longest[1])))
    check_values(problem, x)
    return problem


def _plain(x: Quantised | Tensor) -> Tensor:
    return x.dequantise() if isinstance(x, Quantised) else x


def _batched(x: Tensor) -> Tensor:
    """Packed tokens as a batch of one."""
    return x if x.dim() == 4 else x[None]


def _cuts(x: Tensors) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of each packed sequence, or of a dense batch as a whole."""
    if x.cu_seqlens_q is None:
        yield slice(None), slice(None)
        return
    bounds = pairwise(x.cu_seqlens_q.tolist()), pairwise(x.cu_seqlens_k.tolist())
    for rows, keys in zip(*bounds, strict=True):
        yield slice(*rows), slice(*keys)


def _attend_sequence(
    recipe: Recipe, problem: Problem, parts: list[Tensor], results: tuple[Tensor, Tensor]
) -> None:
    """Fill out (b, seqlen_q, heads, dim) and lse (b, heads, seqlen_q) of one sequence or dense
    batch.
    """
    q, k, v = parts
    visibility = Visibility(q.shape[1], k.shape[1], problem.causal, problem.window_size)
    q = q.unflatten(2, (k.shape[2], problem.group_size)).permute(0, 2, 3, 1, 4)
    k, v = (t.transpose(1, 2).unsqueeze(2) for t in (k, v))  # (b, kv_heads, 1, seqlen_k, dim)
    for q0 in range(0, visibility.seqlen_q, recipe.tile_m):
        q1 = min(q0 + recipe.tile_m, visibility.seqlen_q)
        q_tile = q[..., q0:q1, :] * problem.softmax_scale
        out, lse = finalize(_fold_row_tile(recipe, visibility, q_tile, k, v, q0))
        results[0][:, q0:q1] = out.flatten(1, 2).transpose(1, 2)
        results[1][..., q0:q1] = lse.flatten(1, 2)


def _fold_row_tile(
    recipe: Recipe, visibility: Visibility, q: Tensor, k: Tensor, v: Tensor, q0: int
) -> State:
    """The state of one tile of queries, scaled by softmax_scale, over all keys that it sees. l sums
    p before the cast, as the kernel does in registers.
    """
    q1 = q0 + q.shape[-2]

    def score(tile: tuple[int, int]) -> Tensor:
        s = _scores(recipe, q, k[..., slice(*tile), :])
        visible = visibility.tile(q0, q1, *tile, q.device)
        return s if visible is None else s.masked_fill(~visible, -inf)

    def add_values(acc: Tensor, p: Tensor, tile: tuple[int, int]) -> Tensor:
        return _add_values(recipe, acc, p, v[..., slice(*tile), :])

    tiles = _key_tiles(recipe, visibility, q0, q1)
    state, _ = fold_tiles(q, v.shape[-1], tiles, score, add_values)
    return state if recipe.p is None else state._replace(acc=state.acc / recipe.p_scale)


def _key_tiles(
    recipe: Recipe, visibility: Visibility, q0: int, q1: int
) -> Iterator[tuple[int, int]]:
    """Tiles, aligned to the first key, with at least one key that some query of [q0, q1) sees."""
    step = recipe.tile_n
    for lo, hi in visibility.spans(q0, q1):
        starts = range(lo // step * step, hi, step)
        for k0 in reversed(starts) if recipe.backwards else starts:
            yield k0, min(k0 + step, visibility.seqlen_k)


def _scores(recipe: Recipe, q: Tensor, k: Tensor) -> Tensor:
    are_quantised = recipe.q is not None and recipe.k is not None
    short = are_quantised and _is_fp8(recipe.q.format) and _is_fp8(recipe.k.format)
    zero = q.new_zeros(*q.shape[:-1], k.shape[-2])
    return add_product(zero, q, k.mT, recipe.accumulator if short else None)


def _add_values(recipe: Recipe, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """acc + p v, with p as the second product reads it: times p_scale if it is cast."""
    if recipe.p is None:
        return acc + p.to(recipe.pv_dtype).to(p.dtype) @ v
    p = cast(p * recipe.p_scale, recipe.p).to(p.dtype)
    short = recipe.v is not None and _is_fp8(recipe.v.format) and _is_fp8(recipe.p)
    return add_product(acc, p, v, recipe.accumulator if short else None)


def _is_fp8(fmt: NumberFormat) -> bool:
    return fmt.dtype.is_floating_point and fmt.dtype.itemsize == 1
