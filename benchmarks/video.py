"""`python -m benchmarks video`: masks of videos against compiled FlexAttention with the same mask.

Rows are forward, as in sampling, and forward+backward in one, as in training. "dense" is our own
call without a mask. Column `density` is the share of blocks of 128 x 128 tokens that the mask
visits. The latent of 21 x 30 x 52 is that of 81 frames of 480 x 832 pixels in Wan 2.1, with the
heads of its model of 1.3 B parameters; that of 20 x 32 x 48 is filled by tiles of 128 tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

import onchip
from onchip import masks
from onchip.cli.bench import gpu, patterns, peers
from onchip.cli.bench.backward import GradientCheck, kernel_of
from onchip.cli.bench.forward import available
from onchip.cli.bench.gpu import GpuCandidate, Inputs, OutputCheck, RowSpec
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.cli.bench.patterns import Pattern

NUM_HEADS, HEAD_DIM = 12, 128
Shape = tuple[int, ...]


class VideoMask(NamedTuple):
    """A mask over the tokens of a video; is_sliding: the window counts tiles."""

    shape: Shape
    window: Shape
    tile: Shape | None = None
    is_sliding: bool = False

    @property
    def tokens(self) -> int:
        return prod(self.shape)

    @property
    def name(self) -> str:
        sizes = ["x".join(map(str, x)) for x in (self.shape, self.window, self.tile or ())]
        kind = "sliding tile" if self.is_sliding else "neighborhood"
        return f"{sizes[0]} {kind} {sizes[1]}" + (f", tiles {sizes[2]}" if self.tile else "")

    def build(self, device: torch.device) -> masks.BlockMask:
        if self.is_sliding:
            mask = masks.sliding_tile(self.shape, self.tile or self.shape, self.window)
        else:
            mask = masks.neighborhood(self.shape, self.window, tile=self.tile)
        return mask.build(1, 1, self.tokens, self.tokens, str(device))


def mask_mod(mask: VideoMask) -> Callable[..., Tensor]:
    """The same as a function for FlexAttention, by arithmetic: tiles fill the shape."""
    shape, tile, lengths = mask.shape, mask.tile or mask.shape, mask.shape
    if mask.is_sliding:
        lengths = tuple(n // t for n, t in zip(shape, tile, strict=True))

    def find(index: Tensor) -> list[Tensor]:
        at = _coordinates(index, shape, tile)
        return [x // t for x, t in zip(at, tile, strict=True)] if mask.is_sliding else at

    def is_visible(b: object, h: object, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= 0) & (k >= 0)
        for x, y, n, w in zip(find(q), find(k), lengths, mask.window, strict=True):
            start = (x - w // 2).clamp(0, n - w)
            seen = seen & (y >= start) & (y < start + w)
        return seen

    return is_visible


def _coordinates(index: Tensor, shape: Shape, tile: Shape) -> list[Tensor]:
    """The coordinates of tokens in the order of tiles; a tile of the whole shape: raster order."""
    inner, outer = [], []
    for size in reversed(tile):
        inner.append(index % size)
        index = index // size
    for length, size in zip(reversed(shape), reversed(tile), strict=True):
        outer.append(index % (length // size))
        index = index // (length // size)
    digits = zip(reversed(outer), reversed(inner), tile, strict=True)
    return [o * size + i for o, i, size in digits]


WAN, ALIGNED, QUICK = (21, 30, 52), (20, 32, 48), (4, 8, 16)
VIDEO_MASKS = (
    VideoMask(WAN, (7, 15, 15)),
    VideoMask(WAN, (7, 15, 15), (3, 10, 4)),
    VideoMask(WAN, (3, 3, 5), (3, 10, 4), is_sliding=True),
    VideoMask(ALIGNED, (7, 15, 15), (4, 4, 8)),
    VideoMask(ALIGNED, (3, 3, 3), (4, 8, 8), is_sliding=True),
)
QUICK_MASKS = (
    VideoMask(QUICK, (3, 3, 5), (2, 8, 8)),
    VideoMask(QUICK, (1, 1, 1), (2, 8, 8), is_sliding=True),
)


def _over_flex(rows: list[Row]) -> float:
    return min(row["ratios"]["flex"][0] for row in rows)


def _of_pass(name: str) -> Callable[[Row], bool]:
    return lambda row: row["bench"] == "video" and row["pass"] == name and gpu.counts(row)


THRESHOLDS = tuple(
    Threshold(
        f"{name} over FlexAttention, worst cell", _of_pass(name), at_least=1.2, measure=_over_flex
    )
    for name in ("forward+backward", "forward")
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    for backward in (True, False):
        for mask in QUICK_MASKS if session.quick else VIDEO_MASKS:
            sizes = {"num_heads": NUM_HEADS, "backward": backward}
            case = Case("video", mask.name, torch.bfloat16, HEAD_DIM, mask.tokens, **sizes)
            yield str(case), partial(measure, session, case, mask)


def measure(session: Session, case: Case, mask: VideoMask) -> list[Row]:
    built = mask.build(session.device)
    sets = gpu.draw_sets(case, session.device)
    keys = torch.arange(case.seqlen, device=session.device)
    visible = lambda rows: mask_mod(mask)(None, None, rows[:, None], keys)
    video = Pattern(mask.name, visible, {"mask": built})
    kernel, ours = _ours("onchip", case, video, sets)
    dense = _ours("dense", case, patterns.dense(case.seqlen), sets)[1]
    makers = {"flex": lambda: peers.flex(case.seqlen, mask_mod(mask), session.device)}
    found = available(session, makers, sets, ours.check)
    flex = [_candidate_class(case)(x.name, x.attend, sets, x.check, x.layout) for x in found]
    spec = RowSpec(case.bench, kernel, ours, [*flex, dense])
    rows = gpu.contest(session, case, [spec], gpu.MILLISECONDS, required=("flex",))
    return [row | {"density": built.density()} for row in rows]


def _ours(name: str, case: Case, pattern: Pattern, sets: list[Inputs]) -> tuple[str, GpuCandidate]:
    """The kernel that serves the pattern, and the candidate."""
    make_check = GradientCheck if case.backward else OutputCheck
    check = make_check({"normal": sets[0]}, pattern.visible)
    attend = partial(onchip.attention, **pattern.options)
    plan = onchip.explain(*sets[0][:3], **pattern.options).plan
    kernel = kernel_of(sets[0], pattern.options) if case.backward else plan.kernel
    return kernel, _candidate_class(case)(name, attend, sets, check, ours=True)


def _candidate_class(case: Case) -> type[GpuCandidate]:
    return TrainingCandidate if case.backward else GpuCandidate


@dataclass(frozen=True)
class TrainingCandidate(GpuCandidate):
    """A job is a forward and its backward."""

    def jobs(self, backward: bool) -> list[Callable[[], object]]:
        stored = [tuple(map(self.layout, inputs)) for inputs in self.sets]
        return [partial(self._run_both, inputs) for inputs in stored]

    def _run_both(self, inputs: Inputs) -> Inputs:
        return self.differentiate(inputs)[1]()
