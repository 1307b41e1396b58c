"""Masks of images and videos: tokens on a grid of 1, 2 or 3 axes, such as (frames, height, width).

Here query q and key q are the same token: rules count positions from the start, not from the end.
In every rule the `text` tokens after the grid see all keys and are seen by all queries; a
call may leave out their queries.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.arguments import as_int, check_flag

from .blockmask import divide
from .boxes import Axis, Box
from .mods import Mask
from .nodes import Grid, Interval, Node, either
from .order import as_shape, coordinates, per_axis, tile_order

_NOWHERE = -(1 << 40)  # the coordinate of a text token: below all others
Sizes = int | Sequence[int]  # one size for all axes, or one for each


class _Window(NamedTuple):
    """A window along one axis."""

    length: int
    window: int
    dilation: int = 1
    stride: int = 1
    causal: bool = False

    def make_axes(self, x: Tensor) -> list[Axis]:
        """The axes of tokens with the coordinates x: with a dilation, their remainders too."""
        group, number = x % self.dilation, x // self.dilation
        size = (self.length - group + self.dilation - 1) // self.dilation
        axis = Axis(*self._find_neighbours(number, size), number)
        return [axis] if self.dilation == 1 else [axis, Axis(group, group + 1, group)]

    def _find_neighbours(self, number: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Which of `size` tokens each token sees. The window is centred on the leader of
        its stride group, and shifted to lie within the tokens.
        """
        leader = number // self.stride * self.stride
        if self.causal:
            leader = torch.minimum(leader + self.stride - 1, size - 1)
            return (leader - self.window + 1).clamp(min=0), number + 1
        leader = torch.minimum(leader + self.stride // 2, size - 1)
        lo = torch.minimum((leader - self.window // 2).clamp(min=0), size - self.window)
        return lo, lo + self.window


def neighborhood(
    shape: Sequence[int],
    window: Sizes,
    dilation: Sizes = 1,
    causal: bool | Sequence[bool] = False,
    *,
    stride: Sizes = 1,
    tile: Sizes | None = None,
    text: int = 0,
) -> Mask:
    """Neighborhood attention (NATTEN, Hassani et al. 2022), also dilated, causal and strided.

    Query q sees key k iff it does so along every axis. Along an axis without a dilation, x sees the
    `window` coordinates from x - window // 2 on, shifted to lie within the axis where they exceed
    it; if causal, x - window + 1 to x where they exist. With a dilation, each set of
    coordinates that are equal modulo the dilation is an axis of its own. With a stride, `stride`
    neighbouring coordinates share the window of the one in their middle; if causal, of their last.

    tile: the tokens are in `tile_order(shape, tile, dilation)`; None: in raster order.
    """
    lengths = as_shape("neighborhood()", shape)
    sizes = {"window": window, "dilation": dilation, "stride": stride}
    axes = {n: per_axis(f"neighborhood(): {n}", x, lengths, least=1) for n, x in sizes.items()}
    flags = _flags("neighborhood(): causal", causal, lengths)
    windows = tuple(map(_Window, lengths, *axes.values(), flags))
    for axis in windows:
        if axis.window * axis.dilation > axis.length or axis.stride > axis.window:
            raise ValueError(
                f"neighborhood(): window={axis.window} * dilation={axis.dilation} must not exceed"
                f" the length {axis.length} of its axis, nor stride={axis.stride} the window"
            )
    order = None if tile is None else per_axis("neighborhood(): tile", tile, lengths, least=1)
    shown = lengths, axes["window"], axes["dilation"], flags, axes["stride"], order
    return _mask("neighborhood", shown, partial(_neighborhood, windows, order), text)


def _neighborhood(windows: tuple[_Window, ...], tile: tuple[int, ...] | None, grid: Grid) -> Box:
    lengths = tuple(axis.length for axis in windows)
    dilation = tuple(axis.dilation for axis in windows)
    order = tile_order(lengths, tile, dilation).permutation
    return _windows_box(grid, windows, [x[order] for x in coordinates(lengths)])


def sliding_tile(shape: Sequence[int], tile: Sizes, window: Sizes, *, text: int = 0) -> Mask:
    """Sliding tile attention (STA, Zhang et al. 2025): the neighborhood of tiles.

    The tokens are in `tile_order(shape, tile)`. Query q sees key k iff along every axis the tile of
    k is one of the `window` tiles from t - window // 2 on, where t is the tile of q; they are
    shifted to lie within the axis. If a tile has a multiple of 128 tokens and tiles fill the shape,
    no block is PARTIAL.
    """
    lengths = as_shape("sliding_tile()", shape)
    sizes = per_axis("sliding_tile(): tile", tile, lengths, least=1)
    counts = per_axis("sliding_tile(): window", window, lengths, least=1)
    tiles = tuple(-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    if any(count > most for count, most in zip(counts, tiles, strict=True)):
        raise ValueError(f"sliding_tile(): window={counts} must not exceed the {tiles} tiles")
    windows = tuple(map(_Window, tiles, counts))
    resolve = partial(_sliding_tile, lengths, sizes, windows)
    return _mask("sliding_tile", (lengths, sizes, counts), resolve, text)


def _sliding_tile(
    lengths: tuple[int, ...], tile: tuple[int, ...], windows: tuple[_Window, ...], grid: Grid
) -> Box:
    order = tile_order(lengths, tile).permutation
    at = [x[order] // size for x, size in zip(coordinates(lengths), tile, strict=True)]
    return _windows_box(grid, windows, at)


def radial(
    shape: Sequence[int], sink_frames: int = 1, decay: float = 1.0, *, text: int = 0
) -> Mask:
    """Radial attention (Li et al. 2025): the farther a frame, the fewer of its tokens are visible.

    shape is (frames, ...), in raster order, and s is `decay` times the tokens of a frame. With d
    the distance between the frames of q and k, and r = 2^floor(log2(d)), query q sees key k iff
    d <= 1; or the distance between their places within the frame is at most s / r - 1; or s < r,
    they have the same place, and d is a multiple of ceil(r / s); or k is in one of the first
    `sink_frames` frames.
    """
    lengths = as_shape("radial()", shape)
    sink = as_int("radial(): sink_frames", sink_frames)
    if not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise ValueError(f"radial(): decay must be above 0 and at most 1, got {decay!r}")
    sizes = lengths, sink, float(decay)
    return _mask("radial", sizes, partial(_radial, *sizes), text)


def _radial(lengths: tuple[int, ...], sink_frames: int, decay: float, grid: Grid) -> Node:
    frames, tokens = lengths[0], prod(lengths[1:])
    frame, place = divide(torch.arange(frames * tokens), tokens)
    parts = [_sink(sink_frames, tokens, grid), _box(grid, [_band(frame, 1)])]
    for near in [1 << g for g in range(1, (frames - 1).bit_length())]:
        width, step = decay * tokens / near, ceil(near / (decay * tokens))
        axes = [_band(place, max(int(width), 1) - 1)]
        axes += [Axis(frame % step, frame % step + 1, frame % step)] * (width < 1)
        for lo, hi in ((near, 2 * near), (1 - 2 * near, 1 - near)):  # later and earlier frames
            parts.append(_box(grid, [Axis(frame + lo, frame + hi, frame), *axes]))
    return reduce(either, parts)


def spatial_head(shape: Sequence[int], frames: int, sink_frames: int = 1, *, text: int = 0) -> Mask:
    """A spatial head of Sparse VideoGen (Xi et al. 2025): whole frames, near in time.

    shape is (frames, ...), in raster order. Query q sees key k iff their frames are at most
    `frames` apart, or k is in one of the first `sink_frames` frames.
    """
    lengths = as_shape("spatial_head()", shape)
    frames = as_int("spatial_head(): frames", frames)
    sink = as_int("spatial_head(): sink_frames", sink_frames)
    sizes = lengths, frames, sink
    return _mask("spatial_head", sizes, partial(_spatial_head, *sizes), text)


def _spatial_head(lengths: tuple[int, ...], frames: int, sink_frames: int, grid: Grid) -> Node:
    tokens, reach = prod(lengths[1:]), min(frames, lengths[0])
    frame = torch.arange(prod(lengths)) // tokens
    lo, hi = (frame - reach) * tokens, (frame + reach + 1) * tokens
    lo, hi = (F.pad(x, (0, grid.seqlen_q - len(x))) for x in (lo, hi.clamp(max=prod(lengths))))
    return either(Interval(grid, lo, hi), _sink(sink_frames, tokens, grid))


def temporal_head(
    shape: Sequence[int], tokens: int, sink_frames: int = 1, *, text: int = 0
) -> Mask:
    """A temporal head of Sparse VideoGen (Xi et al. 2025): near places of all frames.

    shape is (frames, ...), in raster order. Query q sees key k iff their places within the frame
    are at most `tokens` apart, or k is in one of the first `sink_frames` frames.
    """
    lengths = as_shape("temporal_head()", shape)
    tokens = as_int("temporal_head(): tokens", tokens)
    sink = as_int("temporal_head(): sink_frames", sink_frames)
    sizes = lengths, tokens, sink
    return _mask("temporal_head", sizes, partial(_temporal_head, *sizes), text)


def _temporal_head(lengths: tuple[int, ...], reach: int, sink_frames: int, grid: Grid) -> Node:
    tokens = prod(lengths[1:])
    near = _box(grid, [_band(torch.arange(prod(lengths)) % tokens, min(reach, tokens))])
    return either(near, _sink(sink_frames, tokens, grid))


def _band(x: Tensor, reach: int) -> Axis:
    """Coordinates that are at most `reach` apart."""
    return Axis(x - reach, x + reach + 1, x)


def _sink(sink_frames: int, tokens: int, grid: Grid) -> Interval:
    return Interval(grid, 0, min(sink_frames * tokens, grid.seqlen_k))


def _windows_box(grid: Grid, windows: tuple[_Window, ...], at: list[Tensor]) -> Box:
    """The windows of tokens with the coordinates `at`."""
    axes = [window.make_axes(x) for window, x in zip(windows, at, strict=True)]
    return _box(grid, [axis for found in axes for axis in found])


def _box(grid: Grid, axes: list[Axis]) -> Box:
    """The node of the tokens' axes. No query sees a key of the text, and no query of the text sees
    a key: `_add_text` lets them.
    """
    extend = lambda x, length: F.pad(x, (0, length - len(x)), value=_NOWHERE)
    q, k = grid.seqlen_q, grid.seqlen_k
    return Box(grid, [Axis(extend(lo, q), extend(hi, q), extend(at, k)) for lo, hi, at in axes])


def _flags(name: str, value: Any, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """A flag for every axis, from one for all or a sequence."""
    flags = tuple(value) if isinstance(value, Sequence) else (value,) * len(shape)
    if len(flags) != len(shape):
        raise ValueError(f"{name} must have {len(shape)} flags for shape={shape}, got {value!r}")
    for flag in flags:
        check_flag(name, flag)
    return flags


def _mask(name: str, shown: tuple, resolve: Callable[[Grid], Node], text: int) -> Mask:
    """A mask of a shape. It is printed with its arguments."""
    text = as_int(f"{name}(): text", text)
    template = f"{name}({', '.join(['{}'] * len(shown))}, text={{}})"
    return Mask(template, (*shown, text), partial(_add_text, name, shown[0], text, resolve))


def _add_text(
    name: str, lengths: tuple[int, ...], text: int, resolve: Callable[[Grid], Node], grid: Grid
) -> Node:
    """The node of a mask, after the check of the lengths, with the tokens of a text."""
    tokens = prod(lengths)
    if grid.seqlen_k != tokens + text or grid.seqlen_q not in (tokens, tokens + text):
        raise ValueError(
            f"{name}() of shape {lengths} has {tokens} tokens and text={text}, got"
            f" seqlen_q={grid.seqlen_q} and seqlen_k={grid.seqlen_k}"
        )
    if not text:
        return resolve(grid)
    lo = (torch.arange(grid.seqlen_q) < tokens) * tokens
    return either(resolve(grid), Interval(grid, lo, grid.seqlen_k))
