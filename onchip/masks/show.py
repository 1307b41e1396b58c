"""Pictures of a BlockMask: text for a terminal, or an image file."""

import shutil

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.extras import advise

from .blockmask import BlockMask, describe_blocks

_GLYPHS = "·▒█"  # EMPTY, PARTIAL, FULL
_COLORS = ("#f4f1ea", "#e8a33d", "#1f4e79")
_IMAGE_MARKS = 256  # along the longer side of an image: marks of three pixels are visible


def show(mask: BlockMask, b: int, h: int, width: int | None, path: str | None) -> None:
    """Print plane (b, h), or write it to the image file `path` (its suffix is the format)."""
    if path is None:
        print(render(mask, b, h, width))
    else:
        _draw(mask, b, h, path)


def render(mask: BlockMask, b: int = 0, h: int = 0, width: int | None = None) -> str:
    """The text that `show` prints: the blocks in at most `width` columns, a legend, the density.

    With more blocks than columns, one mark represents a square of blocks: EMPTY or FULL if they all
    are, else PARTIAL.
    """
    width = width or shutil.get_terminal_size().columns
    grid = mask.status(b, h)
    side = max(1, -(-2 * max(grid.shape) // width))  # blocks along the side of a mark
    rows = _downsample(grid, side).tolist()
    names = _names(side)
    lines = ["".join(_GLYPHS[status] * 2 for status in row) for row in rows]
    mark = "128 x 128 tokens" if side == 1 else f"{side} x {side} blocks of 128 x 128 tokens"
    legend = "  ".join(f"{glyph * 2} {name}" for glyph, name in zip(_GLYPHS, names, strict=True))
    return "\n".join([*lines, f"{legend}  (one mark: {mark})", _caption(mask, grid)])


def _names(side: int) -> tuple[str, str, str]:
    return ("EMPTY", "PARTIAL" if side == 1 else "PARTIAL or mixed", "FULL")


def _caption(mask: BlockMask, grid: Tensor) -> str:
    partial, full = int((grid == 1).sum()), int((grid == 2).sum())
    lengths = f"{mask.seqlen_q} queries x {mask.seqlen_k} keys"
    return f"{lengths}: {describe_blocks(full, partial, grid.numel())}"


def _downsample(grid: Tensor, side: int) -> Tensor:
    """Squares of side x side blocks: the common status, or PARTIAL. Edges repeat their blocks."""
    if side == 1 or not grid.numel():
        return grid
    pad = (0, -grid.shape[1] % side, 0, -grid.shape[0] % side)
    cells = F.pad(grid.float()[None, None], pad, mode="replicate")
    low, high = -F.max_pool2d(-cells, side), F.max_pool2d(cells, side)
    return torch.where(low == high, low, torch.ones_like(low))[0, 0].to(torch.uint8)


def _draw(mask: BlockMask, b: int, h: int, path: str) -> None:
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            f"drawing a mask to {path!r} needs matplotlib: {advise('cli')}; show() without path"
            " draws in the terminal"
        ) from error
    grid = mask.status(b, h)
    if not grid.numel():
        raise ValueError(f"a mask of shape {mask.shape} has no block to draw")
    side = max(1, -(-max(grid.shape) // _IMAGE_MARKS))
    tall = min(2.0, max(0.25, mask.seqlen_q / mask.seqlen_k))
    figure = Figure(figsize=(6.4, 5.6 * tall + 1.2), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        _downsample(grid, side).tolist(),
        cmap=ListedColormap(_COLORS),
        vmin=0,
        vmax=2,
        interpolation="nearest",
        extent=(0, grid.shape[1] * 128, grid.shape[0] * 128, 0),
    )
    axes.set(xlabel="key", ylabel="query", xlim=(0, mask.seqlen_k), ylim=(mask.seqlen_q, 0))
    axes.set_title(_caption(mask, grid).replace(": ", "\n"), fontsize=9)
    marks = zip(_COLORS, _names(side), strict=True)
    handles = [Patch(facecolor=c, edgecolor="#888888", label=name) for c, name in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
