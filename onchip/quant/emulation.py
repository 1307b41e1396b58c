"""The executable reference of recipes, by which kernels are judged.

`attend` visits tiles in the order of the Hopper kernel, keys from last to first, so that p is cast
relative to the same running maximum. Operands are multiplied by their scales first, which changes a
sum only by fp32's rounding. Sums are in fp32, or in the tensor cores' short accumulator if the
recipe says so.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.philox import Corner
from onchip.core.problem import Options, Problem, Tensors, Window
from onchip.core.state import State, finalize, fold_tiles
from onchip.core.validation import check_offsets_tensor, check_tensor, describe
from onchip.core.values import check_values
from onchip.masks.visibility import Visibility
from onchip.quant.accumulator import add_product
from onchip.quant.block_operands import KeyBlocks, quantise_channels, quantise_keys
from onchip.quant.formats import NumberFormat, cast, wide
from onchip.quant.microscaling import TINY, BlockFormat, Microscaled, round_blocks
from onchip.quant.recipes import Recipe
from onchip.quant.rotation import rotate
from onchip.quant.rounding import draw_tokens, draw_weights
from onchip.quant.schemes import Quantised, Scheme, quantise
from onchip.quant.smoothing import lse_shift, smooth_keys, smooth_queries

MAX_HEAD_DIM = 256  # wider rows were not measured: scales and rotations cover them as a whole
Operand = Quantised | Microscaled | KeyBlocks | Tensor


class SmoothedQueries(NamedTuple):
    """What is added to the scores if the mean of its tile was subtracted from each query: mean.k,
    with the mean shaped like q, and the keys before they were quantised.
    """

    mean: Tensor
    k: Tensor


class RecipeOperands(NamedTuple):
    """q, k, v as a recipe quantises them, and the means that were subtracted from the keys and the
    queries. An operand that is not quantised is a plain tensor in fp32 (fp64 for fp64).
    """

    q: Operand
    k: Operand
    v: Operand
    mean: Tensor | None
    smoothed: SmoothedQueries | None


def prepare(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> RecipeOperands:
    """The operands that the kernel of a recipe reads: smoothed, then rotated, then quantised."""
    q, k, v, mean, smoothed = wide(q), wide(k), wide(v), None, None
    if recipe.smooth:
        k, mean = smooth_keys(k, cu_seqlens_k)
    if recipe.rotate:
        q, k = rotate(q, recipe.seed), rotate(k, recipe.seed)
    if recipe.smooth_q:
        q, q_mean = smooth_queries(q, recipe.tile_m, cu_seqlens_q)
        smoothed = SmoothedQueries(q_mean, k)
    if recipe.v is None:
        v = v.to(recipe.pv_dtype).to(v.dtype)
    return RecipeOperands(
        _quantise(recipe, "q", q, cu_seqlens_q),
        _quantise(recipe, "k", k, cu_seqlens_k),
        _quantise(recipe, "v", v, cu_seqlens_k),
        mean,
        smoothed,
    )


def _quantise(recipe: Recipe, name: str, x: Tensor, cu_seqlens: Tensor | None) -> Operand:
    fmt, seed = getattr(recipe, name), recipe.rounding_seed
    if fmt is None:
        return x
    if isinstance(fmt, Scheme):
        return quantise(x, fmt, cu_seqlens)
    dice = None if seed is None else draw_tokens(x, name, seed, cu_seqlens)
    quantise_along = quantise_keys if name == "v" else quantise_channels
    return quantise_along(x, fmt, cu_seqlens, dice)


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
    if problem.widest > MAX_HEAD_DIM:
        dims = f"head_dim={problem.head_dim} and head_dim_v={problem.head_dim_v}"
        raise ValueError(f"{dims} must be at most {MAX_HEAD_DIM} for quantised operands")
    operands = prepare(recipe, q, k, v, cu_seqlens_q, cu_seqlens_k)
    out = wide(q).new_zeros(*q.shape[:-1], v.shape[-1])
    lse = out.new_full(out.shape[:-1], -inf).transpose(-1, -2).contiguous()
    whole = [_batched(_plain(t).to(out.dtype)) for t in (*operands[:3], *(operands.smoothed or ()))]
    for sequence, (rows, keys) in enumerate(_cuts(x)):
        parts = [t[:, at] for t, at in zip(whole, (rows, keys, keys, rows, keys), strict=False)]
        results = _batched(out)[:, rows], (lse if lse.dim() == 3 else lse[None])[..., rows]
        _attend_sequence(recipe, problem, sequence, parts, results)
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


def _plain(x: Operand) -> Tensor:
    return x if isinstance(x, Tensor) else x.dequantise()


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
    recipe: Recipe,
    problem: Problem,
    sequence: int,
    parts: list[Tensor],
    results: tuple[Tensor, Tensor],
) -> None:
    """Fill out (b, seqlen_q, heads, dim) and lse (b, heads, seqlen_q) of one sequence or dense
    batch, the first entry of which is `sequence`.
    """
    q, k, v, *smoothed = parts
    visibility = Visibility(q.shape[1], k.shape[1], problem.causal, problem.window_size)
    by_group = lambda x: x.unflatten(2, (k.shape[2], problem.group_size)).permute(0, 2, 3, 1, 4)
    by_head = lambda x: x.transpose(1, 2).unsqueeze(2)  # (b, kv_heads, 1, seqlen_k, dim)
    operands = SequenceOperands(
        sequence, by_group(q) * problem.softmax_scale, by_head(k), by_head(v)
    )
    if smoothed:
        mean, exact = by_group(smoothed[0]) * problem.softmax_scale, by_head(smoothed[1])
        operands = operands._replace(smoothed=SmoothedQueries(mean, exact))
    for q0 in range(0, visibility.seqlen_q, recipe.tile_m):
        q1 = min(q0 + recipe.tile_m, visibility.seqlen_q)
        out, lse = finalize(_fold_row_tile(recipe, visibility, operands, q0, q1))
        results[0][:, q0:q1] = out.flatten(1, 2).transpose(1, 2)
        results[1][..., q0:q1] = lse.flatten(1, 2)


class SequenceOperands(NamedTuple):
    """One sequence or dense batch, dequantised: q, times softmax_scale, as (b, kv_heads, group,
    seqlen_q, dim), k and v as (b, kv_heads, 1, seqlen_k, dim). sequence: the index of its first
    entry.
    """

    sequence: int
    q: Tensor
    k: Tensor
    v: Tensor
    smoothed: SmoothedQueries | None = None


def _fold_row_tile(
    recipe: Recipe, visibility: Visibility, x: SequenceOperands, q0: int, q1: int
) -> State:
    """The state of one tile of queries over all keys that it sees. l sums p before the cast, as the
    kernel does in registers.
    """

    def score(tile: tuple[int, int]) -> Tensor:
        keys = slice(*tile)
        s = _scores(recipe, x.q[..., q0:q1, :], x.k[..., keys, :])
        if x.smoothed is not None:
            s = s + x.smoothed.mean[..., q0:q1, :] @ x.smoothed.k[..., keys, :].mT
        visible = visibility.tile(q0, q1, *tile, s.device)
        return s if visible is None else s.masked_fill(~visible, -inf)

    def add_values(acc: Tensor, p: Tensor, tile: tuple[int, int]) -> Tensor:
        v = x.v[..., slice(*tile), :]
        if isinstance(recipe.p, BlockFormat):
            corner = Corner(x.sequence, 0, q0, tile[0])
            return acc + _round_weights(recipe, recipe.p, p, corner) @ v
        return _add_values(recipe, acc, p, v)

    tiles = _key_tiles(recipe, visibility, q0, q1)
    state, _ = fold_tiles(x.q[..., q0:q1, :], x.v.shape[-1], tiles, score, add_values)
    return state._replace(acc=state.acc / recipe.weight_scale)


def _round_weights(recipe: Recipe, fmt: BlockFormat, p: Tensor, corner: Corner) -> Tensor:
    """p (b, kv_heads, group, queries, keys) times its scale, in blocks of keys; without the scale
    again if each row has its own.
    """
    dice = None
    if recipe.rounding_seed is not None:
        shape = (len(p), p.shape[1] * p.shape[2], *p.shape[3:])
        dice = draw_weights(shape, corner, recipe.rounding_seed, p.device).view(p.shape)
    if recipe.p_scale is not None:
        return round_blocks(p * recipe.weight_scale, fmt, dice).to(p.dtype)
    row = (p.amax(-1, keepdim=True) / fmt.max).clamp(min=TINY)
    return round_blocks(p / row, fmt, dice).to(p.dtype) * row


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
    short = _is_fp8(recipe.q) and _is_fp8(recipe.k)
    zero = q.new_zeros(*q.shape[:-1], k.shape[-2])
    return add_product(zero, q, k.mT, recipe.accumulator if short else None)


def _add_values(recipe: Recipe, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """acc + p v, with p as the second product reads it: times p_scale if it is cast."""
    if recipe.p is None:
        return acc + p.to(recipe.pv_dtype).to(p.dtype) @ v
    p = cast(p * recipe.weight_scale, recipe.p).to(p.dtype)
    short = _is_fp8(recipe.v) and _is_fp8(recipe.p)
    return add_product(acc, p, v, recipe.accumulator if short else None)


def _is_fp8(operand: Scheme | BlockFormat | NumberFormat | None) -> bool:
    fmt = operand.format if isinstance(operand, Scheme) else operand
    if not isinstance(fmt, NumberFormat):
        return False
    return fmt.dtype.is_floating_point and fmt.dtype.itemsize == 1
