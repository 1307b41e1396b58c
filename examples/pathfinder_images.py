"""Pathfinder images: two dots among dashed curves. Does one curve join them?

    python examples/pathfinder_images.py --size 32 --picture pathfinder.svg

Our own generator of the task of Linsley et al. (2018), which the Long Range Arena made a sequence
of pixels of (Tay et al. 2021). Two long curves are in every image, and shorter ones beside them. If
the answer is yes, the dots are both ends of one long curve, else an end of each. No curve comes
near another, so that what the image shows is what the label says: closing the gaps between dashes
joins the dots if and only if it is 1.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DASH, GAP = 4.0, 2.0  # pixels
MARGIN = 5  # pixels between curves: what two dots leave of it exceeds a gap
CANDIDATES = 32  # places that a curve may try
SPACING = 0.5  # pixels from one point of a curve to the next: no pixel is jumped over


class Scene(NamedTuple):
    """images (batch, size, size) of zeros and ones, labels (batch,) of zeros and ones, where the
    dots are: (batch, 2, 2), row and column, and which pixels of an image belong to a curve with a
    dot (marked, shaped like images).
    """

    images: Tensor
    labels: Tensor
    dots: Tensor
    marked: Tensor


def draw(count: int, size: int, seed: int, device: torch.device | str = "cpu") -> Scene:
    """`count` images, a function of its arguments."""
    generator = torch.Generator(device).manual_seed(seed)
    scenes, found = [], 0
    while found < count:
        scenes.append(attempt(max(2 * (count - found), 16), size, generator))
        found += len(scenes[-1].labels)
    return Scene(*(torch.cat(parts)[:count] for parts in zip(*scenes, strict=True)))


def attempt(count: int, size: int, generator: torch.Generator) -> Scene:
    """Those of `count` scenes whose curves all found a place. Which those are does not depend on
    the labels: they stay even.
    """
    device, length = generator.device, 0.6 * size
    curves: list[Tensor] = []
    taken = torch.zeros(count, size * size, device=device)
    whole = torch.ones(count, dtype=torch.bool, device=device)
    for each in (length, length, *[length / 2] * (size // 16 - 1)):
        tried, fits = candidates(count, size, each, generator)
        met = taken.gather(1, pixels(tried, size).flatten(1)).view(tried.shape[:-1])
        fits &= met.sum(-1) == 0
        curves.append(tried[torch.arange(count, device=device), fits.int().argmax(1)])
        taken = taken.maximum(surroundings(curves[-1], size, MARGIN))
        whole &= fits.any(1)
    labels = torch.rand(count, generator=generator, device=device) < 0.5
    dots = dots_of(curves[0], curves[1], labels)
    images = render(curves, dots, size, generator)
    other = surroundings(curves[1], size, 1) * ~labels[:, None]
    marked = images * other.maximum(surroundings(curves[0], size, 1)).view(images.shape)
    return Scene(images[whole], labels[whole].long(), dots[whole], marked[whole])


def surroundings(curve: Tensor, size: int, reach: int) -> Tensor:
    """Ones (batch, size * size) within `reach` pixels of a curve."""
    lit = torch.zeros(len(curve), size * size, device=curve.device)
    lit.scatter_(1, pixels(curve, size), 1.0)
    image = lit.view(-1, 1, size, size)
    return F.max_pool2d(image, 2 * reach + 1, stride=1, padding=reach).flatten(1)


def candidates(
    count: int, size: int, length: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Curves of one length at random places, (count, CANDIDATES, points, 2), and whether they fit
    into the image. A curve's direction swings along three sines, too little to come back to itself.
    """
    uniform = lambda *shape: torch.rand(shape, generator=generator, device=generator.device)
    t = torch.arange(math.ceil(length / SPACING), device=generator.device) * SPACING / length
    waves = torch.tensor([1.0, 2.0, 3.0], device=generator.device)[:, None]
    swings = (2 * uniform(count, CANDIDATES, 3, 1) - 1) / waves
    phases = uniform(count, CANDIDATES, 3, 1)
    heading = (swings * torch.sin(2 * math.pi * (waves * t + phases))).sum(-2)
    heading = heading + 2 * math.pi * uniform(count, CANDIDATES, 1)
    points = SPACING * torch.stack([heading.cos(), heading.sin()], -1).cumsum(-2)
    low, high = points.amin(-2), points.amax(-2)
    room = size - 3 - (high - low)  # a pixel is left at every border, for dots
    points = points + (1 + room.clamp(min=0) * uniform(count, CANDIDATES, 2) - low)[..., None, :]
    return points, (room >= 0).all(-1)


def dots_of(one: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    """Both ends of `one`, or an end of it and an end of `other`: those that are as far apart as its
    own, as nearly as can be, so that the distance of the dots does not tell.
    """
    ends, others = one[:, [0, -1]], other[:, [0, -1]]
    span = (ends[:, 0] - ends[:, 1]).norm(dim=-1)
    apart = (ends[:, :, None] - others[:, None]).norm(dim=-1).flatten(1)
    pair = (apart - span[:, None]).abs().argmin(1)
    rows = torch.arange(len(one), device=one.device)
    split = torch.stack([ends[rows, pair // 2], others[rows, pair % 2]], 1)
    return torch.where(labels[:, None, None], ends, split)


def render(curves: list[Tensor], dots: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Dashes one pixel wide, dots three."""
    count = len(dots)
    lit = torch.zeros(count, size * size + 1, device=dots.device)  # the last pixel is no pixel
    for curve in curves:
        along = SPACING * torch.arange(curve.shape[1], device=curve.device)
        phase = torch.rand(count, 1, generator=generator, device=curve.device) * (DASH + GAP)
        gap = (along + phase) % (DASH + GAP) >= DASH
        lit.scatter_(1, pixels(curve, size).masked_fill(gap, size * size), 1.0)
    steps = torch.arange(-1.0, 2.0, device=dots.device)
    square = torch.cartesian_prod(steps, steps)
    lit.scatter_(1, pixels((dots.round()[:, :, None] + square).flatten(1, 2), size), 1.0)
    return lit[:, :-1].view(count, size, size)


def pixels(points: Tensor, size: int) -> Tensor:
    row, column = points.round().long().clamp(0, size - 1).unbind(-1)
    return row * size + column


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("pathfinder.svg"))
    args = parser.parse_args()
    scene = draw(8, args.size, args.seed)
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    for axes, image, label in zip(figure.subplots(2, 4).flat, *scene[:2], strict=True):
        axes.imshow(image, cmap="gray", interpolation="nearest")
        axes.set_title("joined" if label else "not joined", fontsize=9)
        axes.set_axis_off()
    figure.savefig(args.picture)


if __name__ == "__main__":
    main()
