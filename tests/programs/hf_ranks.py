"""Trains a tiny model on two ranks, with SDPA and with onchip: a program for torchrun.

    torchrun --nproc-per-node 2 tests/programs/hf_ranks.py {ddp,fsdp2} FOLDER

ddp: transformers' Trainer. fsdp2: torch's `fully_shard` around every layer. Both use gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.programs import hf
from tests.programs.test_hf_trainer import rows, train

KIND, HEAD = "llama", "LlamaForCausalLM"


def train_with_trainer(name, folder):
    return train(folder, name, KIND, HEAD, ddp_backend="gloo")


def train_with_fully_shard(name, _):
    """Two steps over this rank's share of the rows."""
    model = hf.model(name, KIND, HEAD).train()
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    share = rows(KIND, HEAD)[dist.get_rank() :: dist.get_world_size()]
    batch = {name: torch.stack([row[name] for row in share]) for name in share[0]}
    logs = []
    for _ in range(2):
        loss = model(**batch, num_items_in_batch=torch.tensor(100)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append({"loss": loss.item(), "grad_norm": norm.full_tensor().item()})
    return logs


def main():
    way, folder = sys.argv[1:]
    if way == "fsdp2":
        dist.init_process_group("gloo")
    run = {"ddp": train_with_trainer, "fsdp2": train_with_fully_shard}[way]
    ours, theirs = (run(name, folder) for name in ("onchip", "sdpa"))
    hf.assert_same_numbers(ours, theirs)
    assert dist.get_world_size() == 2 and dist.get_backend() == "gloo"
    if dist.get_rank() == 0:
        print(f"{way}: {len(ours)} rows of numbers equal SDPA's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
