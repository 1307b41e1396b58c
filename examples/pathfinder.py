"""A transformer over single pixels learns Pathfinder, up to Path-X: 128 x 128 = 16,384 tokens.

    python examples/pathfinder.py --sizes 16 --minutes 3                     # a CPU
    python examples/pathfinder.py --width 128 --layers 6 --compile --minutes 15   # a GPU

A curriculum: the same weights go on with larger images, because positions are rotations by row and
column and have no parameters. A stage ends when its held-out accuracy reaches ENOUGH, or when its
share of the time is over. Chance is 50 %. Every stage measures a step with dense attention and with
the block-sparse mask of FlashAttention (`onchip.masks.butterfly`), too. Run it again with the same
--folder and it goes on. With --hint the generator also tells which pixels belong to a curve that
has a dot, which is learnt much sooner; published figures are without.

It needs the packages of the command line: `pip install '.[cli]'`.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checkpoint import restore, save, where
from pathfinder_images import Scene, draw
from rich.progress import Progress, TextColumn
from torch import Tensor, nn

import onchip
from onchip.core.machine import has_fast_matmul
from onchip.models.rotary import rotate

ENOUGH = 0.95
TOKENS = {"cuda": 1 << 18, "cpu": 1 << 12}  # of a batch
JUDGED = 1 << 18  # tokens at a time
HELD_OUT = 1 << 31  # seeds from here on are never trained on; a seed has 32 bits
EVERY, WARMUP, LR = 100, 100, 1e-3
HEAD_DIM = 32


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).chunk(3, dim=-2)
        out = onchip.attention(rotate(q, *turns), rotate(k, *turns), v, mask=mask)
        x = x + self.out(out.flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Pixels(nn.Module):
    """Images (batch, size, size) of zeros and ones to logits (batch,) and, of every pixel, whether
    its curve has a dot (batch, size * size). A token is a pixel.
    """

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 1)
        self.mark = nn.Linear(width, 1)

    def forward(self, images: Tensor, mask: Any = None) -> tuple[Tensor, Tensor]:
        turns = turns_of(images.shape[-1], images.device)
        x = self.embed(images.flatten(1).long())
        for block in self.blocks:
            x = block(x, turns, mask)
        lit = images.flatten(1)[..., None]  # dark pixels have no say in the end
        pooled = self.norm((x * lit).sum(1) / lit.sum(1))
        return self.head(pooled)[:, 0], self.mark(self.norm(x))[..., 0]


def compile_blocks(model: Pixels, **options: Any) -> None:
    """One program for all blocks, but another for each size, mask and mode: torch would stop at
    eight.
    """
    torch._dynamo.config.recompile_limit = 64
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True, **options)


def turns_of(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), fp32 (size * size, 1, HEAD_DIM / 2): half of them turn with the row, half with
    the column, once in 6 pixels to once in 200.
    """
    pairs = HEAD_DIM // 4
    frequencies = 32.0 ** -(torch.arange(pairs, device=device) / (pairs - 1))
    along = torch.arange(size, device=device)[:, None] * frequencies
    rows, columns = along.repeat_interleave(size, 0), along.repeat(size, 1)
    angles = torch.cat([rows, columns], -1)[:, None]
    return angles.cos(), angles.sin()


def sparse_mask(size: int, device: torch.device) -> onchip.masks.BlockMask:
    """Of blocks of 128 pixels: a block sees those whose number differs in one binary digit."""
    return onchip.masks.build(onchip.masks.butterfly(), 1, 1, size * size, size * size, device)


def autocast(kind: str) -> torch.autocast:
    """bf16, but on CPUs that have no instructions for it."""
    fast = kind != "cpu" or has_fast_matmul(torch.bfloat16)
    return torch.autocast(kind, torch.bfloat16, enabled=fast)


def loss_of(model: Pixels, scene: Scene, mask: Any, hint: float = 0.0) -> Tensor:
    """Of the labels, and `hint` times that of the marks of lit pixels."""
    with autocast(scene.images.device.type):
        logits, marks = model(scene.images, mask)
    loss = F.binary_cross_entropy_with_logits(logits.float(), scene.labels.float())
    lit, marked = scene.images.flatten(1), scene.marked.flatten(1)
    each = F.binary_cross_entropy_with_logits(marks.float(), marked, weight=lit, reduction="sum")
    return loss + hint * each / lit.sum()


def held_out(size: int, count: int, device: torch.device) -> list[Scene]:
    """At least `count` images of seeds that are never trained on."""
    batch = max(min(JUDGED // size**2, count), 1)
    return [draw(batch, size, HELD_OUT + i, device) for i in range(-(-count // batch))]


@torch.no_grad()
def accuracy(model: Pixels, scenes: list[Scene], mask: Any) -> float:
    right = []
    for images, labels, *_ in scenes:
        with autocast(images.device.type):
            logits, _ = model(images, mask)
        right.append((logits > 0) == labels.bool())
    return torch.cat(right).double().mean().item()


@dataclass
class Run:
    """Weights, optimizer, how many steps each size has had, and the curve: [size, step, seconds,
    loss, held-out accuracy].
    """

    folder: Path
    model: Pixels
    optimizer: torch.optim.Optimizer
    device: torch.device
    sparse: bool = False
    hint: float = 0.0
    curve: list[list[float]] = field(default_factory=list)
    step_ms: dict[int, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.is_file():
            kept = restore(self.checkpoint, self.model, self.optimizer)
            self.curve = kept["curve"].tolist()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def done(self, size: int) -> int:
        return int(max((row[1] for row in self.curve if row[0] == size), default=0))

    def best(self, size: int) -> float:
        return max((row[4] for row in self.curve if row[0] == size), default=0.0)

    def mask(self, size: int, sparse: bool) -> Any:
        return sparse_mask(size, self.device) if sparse else None

    def step(self, scene: Scene, mask: Any, done: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = LR * min(1.0, (done + 1) / WARMUP)
        loss = loss_of(self.model, scene, mask, self.hint)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def keep(self) -> None:
        curve = torch.tensor(self.curve, dtype=torch.float64)
        save(self.checkpoint, self.model, self.optimizer, curve=curve)
        facts = {"attention": "block-sparse" if self.sparse else "dense", "hint": self.hint}
        facts |= {"columns": ["size", "step", "seconds", "loss", "held-out accuracy"]}
        facts |= {"curve": self.curve, "step_ms": self.step_ms} | where(self.device)
        (self.folder / "curve.json").write_text(json.dumps(facts, indent=1))


def batch_of(size: int, device: torch.device) -> int:
    return max(TOKENS[device.type] // size**2, 1)


def step_ms(run: Run, size: int) -> dict[str, float]:
    """Median milliseconds of forward and backward, dense and block-sparse in turns."""
    scene = draw(batch_of(size, run.device), size, HELD_OUT, run.device)
    masks = {"dense": None, "block-sparse": sparse_mask(size, run.device)}
    times: dict[str, list[float]] = {name: [] for name in masks}
    for _ in range(6):
        for name, mask in masks.items():
            began = time.perf_counter()
            loss_of(run.model, scene, mask).backward()
            run.optimizer.zero_grad()
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def train(run: Run, size: int, seconds: float, count: int) -> None:
    """Steps at one size, until the time is over or it is learnt; a checkpoint every EVERY and at
    the end.
    """
    began = time.monotonic()  # times of a step, and what is compiled for them, are in the share
    run.step_ms[size], judged = step_ms(run, size), held_out(size, count, run.device)
    mask, batch = run.mask(size, run.sparse), batch_of(size, run.device)
    step, losses = run.done(size), []
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[said]}")) as bar:
        task = bar.add_task(f"{size} x {size}", total=seconds, said="")
        while (spent := time.monotonic() - began) < seconds and run.best(size) < ENOUGH:
            losses.append(run.step(draw(batch, size, step * 1009 + size, run.device), mask, step))
            step += 1
            bar.update(task, completed=spent, said=f"step {step}")
            if step % EVERY == 0 or time.monotonic() - began >= seconds:
                loss = torch.stack(losses).mean().item()
                found = accuracy(run.model, judged, mask)
                run.curve.append([size, step, time.monotonic() - began, loss, found])
                losses.clear()
                run.keep()
                bar.console.print(f"{size} x {size}, step {step}: {loss:.3f}, {found:.1%} right")
    plot(run.curve, run.folder / "curve.svg")


def plot(curve: list[list[float]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for size in dict.fromkeys(row[0] for row in curve):
        points = [(row[1], 100 * row[4]) for row in curve if row[0] == size]
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=f"{size:.0f} x {size:.0f}")
    axes.axhline(50, color="#999999", linestyle="--", linewidth=0.8, label="chance")
    axes.set(xlabel="step at this size", ylabel="held-out accuracy, %", ylim=(45, 101))
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all sizes together")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sparse", action="store_true", help="train with the block-sparse mask")
    parser.add_argument(
        "--hint", type=float, default=0.0, help="weight of the marks (default: none)"
    )
    parser.add_argument("--compile", action="store_true", help="the blocks, by torch.compile")
    parser.add_argument("--held-out", type=int, default=512, metavar="N", help="images")
    parser.add_argument("--folder", type=Path, default=Path("runs/pathfinder"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = Pixels(args.width, args.layers).to(device)
    if args.compile:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True)
    run = Run(args.folder, model, optimizer, device, args.sparse, args.hint)
    end = time.monotonic() + 60 * args.minutes
    for i, size in enumerate(args.sizes):
        share = (end - time.monotonic()) / (len(args.sizes) - i)
        train(run, size, share, args.held_out)
    for size, each in run.step_ms.items():
        ratio = each["dense"] / each["block-sparse"]
        print(f"{size} x {size}: {each}, dense over block-sparse {ratio:.2f}")


if __name__ == "__main__":
    main()
