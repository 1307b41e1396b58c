"""Tensor parallelism: every rank has a part of the heads and of the MLP, and two sums per layer
make them whole.

A part is an ordinary decoder: `models.load(folder, rank=..., world_size=...)` cuts q, k, v, gate
and up by rows, out and down by columns, so that each rank's output is one term of a sum. Fused
projections are cut piece by piece, which the even chunks of a DTensor would not do; what is left to
torch's `parallelize_module` are the sums.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from onchip.models import Decoder


class SumOutput(ParallelStyle):
    """The output of a module is summed over the ranks of a mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def add(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if out.requires_grad:
                raise ValueError("the ranks of a decoder share no gradient: use torch.no_grad()")
            dist.all_reduce(out, group=group)
            return out

        module.register_forward_hook(add)
        return module


PLAN = {"layers.*.attention.out": SumOutput(), "layers.*.mlp.down": SumOutput()}


class Job:
    """The ranks of a job. Communication that was begun for it ends with it."""

    def __init__(self, mesh: DeviceMesh, began: bool):
        self.mesh, self._began = mesh, began

    def smallest(self, number: int) -> int:
        """Of the numbers that the ranks bring."""
        numbers = torch.tensor([number], device=self.mesh.device_type)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.mesh.get_group())
        return int(numbers)

    def leave(self) -> None:
        if self._began and dist.is_initialized():
            dist.destroy_process_group()


def join(world_size: int, device: torch.device) -> Job:
    """The job that torchrun started this process in, one rank for each part."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise ValueError(
            f"{world_size} parts need {world_size} processes, and this is one of {started}: start"
            f" the program with torchrun --nproc-per-node {world_size}"
        )
    began = not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Job(init_device_mesh(device.type, (world_size,)), began)


def connect(part: Decoder, mesh: DeviceMesh) -> Decoder:
    """The whole model of one part per rank of a mesh of one dimension, in place. From now on all
    ranks make the same calls. Each has a cache for its own heads (`part.cache_spec()`). Inference
    only.
    """
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions: give the one of tensor parallelism")
    rank, world_size = mesh.get_local_rank(), mesh.size()
    if (part.part.rank, part.part.world_size) != (rank, world_size):
        raise ValueError(f"the decoder is {part.part}, this is rank {rank} of {world_size}")
    parallelize_module(part, mesh, PLAN)
    return part
