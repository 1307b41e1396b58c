"""MeanFlow on a CPU: a transformer that draws circles in one step, trained with `torch.func.jvp`
through attention.

    python examples/meanflow.py                      # two minutes on a CPU
    python examples/meanflow.py --plot circles.svg

A sample is a circle of random size and place, 12 points that are the tokens. A path
z(t) = (1 - t) x + t noise leads from a circle x to noise. Flow matching learns the velocity v of
these paths, which must be followed in many steps. MeanFlow (Geng et al., arXiv 2505.13447) learns
the mean velocity u between two times r and t, with which one step is enough:

    u(z, r, t) = v - (t - r) du/dt        du/dt = the derivative of u along (dz, dr, dt) = (v, 0, 1)

du/dt is one call of torch.func.jvp: a forward pass that carries a tangent, through attention, too.
The loss is the squared distance of the two sides, the right one as a constant: gradients of
parameters go through the result of the jvp.

The energy distance between samples and circles judges both, shape and variety: it is 0 for equal
distributions. One step of flow matching ends near the mean of all circles.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onchip

POINTS, BATCH = 12, 64
WIDTH, HEADS, LAYERS = 48, 3, 2
MEAN_SHARE = 0.5  # of the samples have r < t; the others r = t, which is flow matching
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def circles(count: int, generator: torch.Generator) -> Tensor:
    """Sets of points (count, POINTS, 2) on circles, the first at angle 0."""
    angles = torch.arange(POINTS) * (2 * torch.pi / POINTS)
    centres = 2 * torch.rand(count, 1, 2, generator=generator) - 1
    radii = 0.4 + 0.8 * torch.rand(count, 1, 1, generator=generator)
    return centres + radii * torch.stack((angles.cos(), angles.sin()), -1)


def energy_distance(a: Tensor, b: Tensor) -> float:
    """Of two samples of sets: 2 E|a - b| - E|a - a'| - E|b - b'|, over E|b - b'|."""
    a, b = a.flatten(1), b.flatten(1)
    between, within = torch.cdist(a, b).mean(), torch.pdist(b).mean()
    return float((2 * between - torch.pdist(a).mean() - within) / within)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).chunk(3, dim=-2)
        x = x + self.out(attention(q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class MeanVelocity(nn.Module):
    """u(z, r, t) of sets of points. The times are added to every token."""

    def __init__(self, attention: Attention = onchip.attention):
        super().__init__()
        self.attention = attention
        self.points, self.out = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)
        self.places = nn.Parameter(torch.randn(POINTS, WIDTH))
        self.times = nn.Sequential(nn.Linear(32, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        phases = torch.stack((t, t - r), -1)[..., None] * 2.0 ** torch.arange(-1, 7)
        waves = torch.cat((phases.cos(), phases.sin()), -1).flatten(1)
        x = self.points(z) + self.places + self.times(waves)[:, None]
        for block in self.blocks:
            x = block(x, self.attention)
        return self.out(self.norm(x))


def errors_of(
    model: MeanVelocity, x: Tensor, generator: torch.Generator, mean_share: float
) -> Tensor:
    """The squared distance of the two sides for each sample of a batch, by MeanFlow; with
    mean_share 0 by flow matching.
    """
    noise = torch.randn(x.shape, generator=generator)
    times = torch.randn(2, len(x), generator=generator).sub(0.4).sigmoid()
    t, r = times.amax(0), times.amin(0)
    r = torch.where(torch.rand(len(x), generator=generator) < mean_share, r, t)
    z, v = x + t[:, None, None] * (noise - x), noise - x
    if mean_share:
        u, along = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
        target = (v - (t - r)[:, None, None] * along).detach()
    else:
        u, target = model(z, r, t), v
    return (u - target).square().mean((1, 2))


@torch.no_grad()
def sample(model: MeanVelocity, noise: Tensor, steps: int = 1) -> Tensor:
    """From noise to sets, in equal steps of the mean velocity."""
    z, ends = noise, torch.linspace(1, 0, steps + 1)
    for t, r in zip(ends[:-1], ends[1:], strict=True):
        at = torch.ones(len(z))
        z = z - (t - r) * model(z, r * at, t * at)
    return z


def train(mean_share: float, steps: int, attention: Attention = onchip.attention, say=print):
    """The trained model, of the same seeds for every mean_share and attention."""
    torch.manual_seed(0)
    model, generator = MeanVelocity(attention), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    start = time.perf_counter()
    for step in range(steps):
        errors = errors_of(model, circles(BATCH, generator), generator, mean_share)
        optimizer.zero_grad()
        (errors / (errors.detach() + 1e-2)).mean().backward()  # large errors count less
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 249 or step == steps - 1:
            took = time.perf_counter() - start
            say(f"  step {step + 1:5}: error {errors.mean().item():.3f}, {took:.0f} s")
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw samples (.svg, .png)")
    args = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(1)
    noise, real = torch.randn(512, POINTS, 2, generator=generator), circles(512, generator)
    drawn = {"circles": real, "noise": noise}
    print(f"energy distance of noise to circles: {energy_distance(noise, real):.3f}")
    for name, mean_share in {"flow matching": 0.0, "MeanFlow": MEAN_SHARE}.items():
        print(f"{name}:")
        model = train(mean_share, args.steps)
        for steps in (1, 2, 16):
            drawn[f"{name}, {steps}"] = sets = sample(model, noise, steps)
            print(f"  samples in {steps:2} steps: {energy_distance(sets, real):.3f}")
    if args.plot:
        draw(drawn, args.plot)


def draw(drawn: dict[str, Tensor], file: Path) -> None:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(4, len(drawn), figsize=(2 * len(drawn), 8), layout="constrained")
    for column, (name, sets) in zip(axes.T, drawn.items(), strict=True):
        column[0].set_title(name, fontsize=9)
        for axis, points in zip(column, sets, strict=False):
            axis.scatter(*points.T, s=6)
            axis.set(xlim=(-2.5, 2.5), ylim=(-2.5, 2.5), xticks=[], yticks=[], aspect="equal")
    plt.savefig(file)
    print(f"drawn to {file}")


if __name__ == "__main__":
    main()
