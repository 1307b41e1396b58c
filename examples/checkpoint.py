"""Checkpoint a training run in one safetensors file: weights, optimizer, other tensors, and the
machine it ran on.

The file is written under a new name and then replaces the old one, so a complete file exists at any
time. Restoring gives exactly the saved bits.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onchip.cli.bench.harness import meta
from onchip.models import safetensors


def save(file: Path, model: nn.Module, optimizer: Optimizer, **others: Tensor) -> None:
    tensors = {f"model.{name}": weight for name, weight in model.named_parameters()}
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in state.items()}
    new = file.with_suffix(".new")
    safetensors.write(new, tensors | others)
    new.replace(file)


def where(device: torch.device) -> dict[str, str | None]:
    """The device's name, torch's version, the commit and the date, as in benchmark results."""
    told = meta()
    facts = {name: told[name] for name in ("device", "torch", "commit", "date")}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    return facts


@torch.no_grad()
def restore(file: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Restore model and optimizer in place; returns the other saved tensors."""
    mapped, entries = safetensors.map_file(file), safetensors.header(file)
    tensors = {name: safetensors.read(entry, mapped).clone() for name, entry in entries.items()}
    for name, weight in model.named_parameters():
        saved = tensors.pop(f"model.{name}", None)
        if saved is None or saved.shape != weight.shape:
            found = "nothing" if saved is None else tuple(saved.shape)
            raise ValueError(f"{file} has {found} for {name} {tuple(weight.shape)}: another model?")
        weight.copy_(saved)
    state: dict[int, dict[str, Tensor]] = {}
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        _, i, key = name.split(".")
        state.setdefault(int(i), {})[key] = tensors.pop(name)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return tensors
