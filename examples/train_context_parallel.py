"""Trains a small decoder on sequences that are spread over ranks: FSDP2 x context parallelism.

    torchrun --nproc-per-node 4 examples/train_context_parallel.py            # 2 x 2 ranks, gloo
    python examples/train_context_parallel.py                                 # the same losses

Rows of a batch are spread over `dp`, positions of a sequence over `cp`; parameters are sharded over
both, as one flattened mesh. Three things differ from training on one device: (1), (2) and (3).
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from onchip import parallel

VOCAB, WORDS = 96, 6
WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 64, 4, 2, 16, 2
LAYOUTS = {
    "contiguous": parallel.contiguous,
    "zigzag": parallel.zigzag,
    "striped": parallel.striped,
}


@dataclass(frozen=True)
class BatchPart:
    """The part of a batch on this rank: rows of its dp rank, positions of its cp rank."""

    mesh: DeviceMesh
    layout: parallel.Layout
    seqlen: int

    def rows(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.mesh["dp"].size())[self.mesh["dp"].get_local_rank()]

    @property
    def rank(self) -> int:
        return self.mesh["cp"].get_local_rank()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (1) attention over all ranks
        return parallel.context_parallel_attention(
            q, k, v, self.mesh["cp"], layout=self.layout, seqlen=self.seqlen, causal=True
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, part: BatchPart) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        x = x + self.out(part.attend(rotate(q, positions), rotate(k, positions), v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)  # also the head
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor, part: BatchPart) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, part)
        return F.linear(self.norm(x), self.embed.weight)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding at positions of the whole sequence. x: (batch, local, heads, DIM)"""
    angles = positions[:, None] * 10_000.0 ** -torch.linspace(0, 1, DIM // 2, dtype=x.dtype)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def text(step: int, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen) tokens, the same on every rank. Each row uses WORDS words of its own: a model
    that attends to the whole row can reach a loss of log(WORDS), without attention log(VOCAB).
    """
    generator = torch.Generator().manual_seed(step)
    words = torch.rand(batch, VOCAB, generator=generator).argsort(1)[:, :WORDS]
    return words.gather(1, torch.randint(WORDS, (batch, seqlen), generator=generator))


def shard_parameters(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard over all ranks. A two-dimensional mesh would replicate along one of its dimensions."""
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.blocks:
        fully_shard(block, mesh=flat)
    fully_shard(model, mesh=flat)


def loss_of(model: Decoder, batch: Tensor, part: BatchPart) -> Tensor:
    """This rank's share of the mean loss over all tokens of the batch that have a next token."""
    rows = part.rows(batch)
    tokens = part.layout.shard(rows, part.rank)  # (2) positions and labels are cut like tokens
    positions = part.layout.position_ids(part.rank, part.seqlen)
    labels = part.layout.labels(rows, part.rank)
    logits = model(tokens, positions, part)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (batch.shape[0] * (part.seqlen - 1))


def train(part: BatchPart, args: argparse.Namespace) -> list[float]:
    """The loss of every step, the same on all ranks."""
    torch.manual_seed(0)
    model = Decoder().to(getattr(torch, args.dtype))
    shard_parameters(model, part.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(args.steps):
        start = time.perf_counter()
        loss = loss_of(model, text(step, args.batch, part.seqlen), part)
        (loss * dist.get_world_size()).backward()  # (3) FSDP averages; shares must be summed
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over_ranks(loss))
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - start
            print(f"step {step:3d}  loss {losses[-1]:.6f}  {seconds:.2f} s", flush=True)
    return losses


def sum_over_ranks(share: Tensor) -> float:
    total = share.detach().clone()
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cp", type=int, help="ranks that share a sequence (half of all)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=509)  # need not divide by anything
    parser.add_argument("--layout", default="zigzag", choices=LAYOUTS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--json", type=Path, help="write the losses here")
    args = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    cp = args.cp or max(size // 2, 1)
    if size % cp or args.batch % (size // cp):
        parser.error(f"{size} ranks cannot be rows of {cp} that share a batch of {args.batch}")
    single_rank = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    dist.init_process_group("gloo", **single_rank)
    mesh = init_device_mesh("cpu", (size // cp, cp), mesh_dim_names=("dp", "cp"))
    losses = train(BatchPart(mesh, LAYOUTS[args.layout](cp), args.seqlen), args)
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(losses))
    dist.barrier()  # no rank leaves while another still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
