"""Trains a tiny model on two ranks, with SDPA and with ours: a program for torchrun.

    torchrun --nproc-per-node 2 tests/programs/hf_ranks.py {ddp,fsdp2} FOLDER

DDP is transformers' Trainer; FSDP2 is `fully_shard` of torch around every layer. Both on gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.programs import hf
from tests.programs.test_hf_trainer import rows, trained

KIND, HEAD = "llama", "LlamaForCausalLM"


def by_trainer(name, folder):
    return trained(folder, name, KIND, HEAD, ddp_backend="gloo")


def by_fully_shard(name, _):
    """Two steps over the rows of this rank."""
    one = hf.model(name, KIND, HEAD).train()
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in one.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(one, mesh=mesh)
    steps = torch.optim.AdamW(one.parameters(), lr=1e-2)
    share = rows(KIND, HEAD)[dist.get_rank() :: dist.get_world_size()]
    batch = {name: torch.stack([row[name] for row in share]) for name in share[0]}
    logs = []
    for _ in range(2):
        loss = one(**batch, num_items_in_batch=torch.tensor(100)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        steps.step()
        steps.zero_grad()
        logs.append({"loss": loss.item(), "grad_norm": norm.full_tensor().item()})
    return logs


def main():
    way, folder = sys.argv[1:]
    if way == "fsdp2":
        dist.init_process_group("gloo")
    train = {"ddp": by_trainer, "fsdp2": by_fully_shard}[way]
    ours, theirs = (train(name, folder) for name in ("onchip", "sdpa"))
    hf.same_numbers(ours, theirs)
    assert dist.get_world_size() == 2 and dist.get_backend() == "gloo"
    if dist.get_rank() == 0:
        print(f"{way}: {len(ours)} rows of numbers are those of SDPA")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
