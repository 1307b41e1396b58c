"""Tensor parallelism: every rank has a part of the heads and of the MLP, and two all-reduces per
layer sum the outputs of all ranks.

A part is an ordinary decoder. `models.load(folder, rank=..., world_size=...)` cuts q, k, v, gate
and up by rows, out and down by columns, so that each rank's output is one term of a sum. Fused
projections are cut piece by piece; the even chunks of a DTensor would cut across pieces. Therefore
only the sums are left to torch's `parallelize_module`.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from onchip.models import Decoder


class TensorParallelGroup:
    """The ranks that share a model. A process group that was initialised for it ends with it."""

    rank: int
    world_size: int

    def __init__(self, mesh: DeviceMesh, owns_process_group: bool = False):
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has {mesh.ndim} dimensions: give the one of tensor parallelism"
            )
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self._mesh: DeviceMesh | None = mesh
        self._owns_process_group = owns_process_group

    @property
    def mesh(self) -> DeviceMesh:
        if self._mesh is None:
            raise ValueError("this rank has left its group")
        return self._mesh

    def connect(self, part: Decoder) -> Decoder:
        """Add the all-reduces to this rank's part, in place, which makes it the whole model. From
        now on all ranks make the same calls. Each has a cache for its own heads
        (`part.cache_spec()`). Inference only.
        """
        if (part.shard.rank, part.shard.world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"the decoder is {part.shard}, this is rank {self.rank} of {self.world_size}"
            )
        total = SumOutput(self)
        plan = {"layers.*.attention.out": total, "layers.*.mlp.down": total}
        parallelize_module(part, self.mesh, plan)
        return part

    def reduce_min(self, number: int) -> int:
        """The minimum of `number` over all ranks."""
        numbers = torch.tensor([number], device=self.mesh.device_type)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.mesh.get_group())
        return int(numbers)

    def leave(self) -> None:
        """Release the process group. A model may outlive it and must not keep it alive: a gloo
        thread that still holds a tensor when Python ends would abort the process.
        """
        self._mesh = None
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


class SumOutput(ParallelStyle):
    """Sums the output of a module over the ranks of a group."""

    def __init__(self, group: TensorParallelGroup):
        self._group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if out.requires_grad:
                raise ValueError("the ranks of a decoder share no gradient: use torch.no_grad()")
            dist.all_reduce(out, group=self._group.mesh.get_group())
            return out

        module.register_forward_hook(add)
        return module


def join_group(world_size: int, device: torch.device) -> TensorParallelGroup:
    """The group of all processes that torchrun started, one rank for each part."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise ValueError(
            f"{world_size} parts need {world_size} processes, and this is one of {started}: start"
            f" the program with torchrun --nproc-per-node {world_size}"
        )
    owns_process_group = not dist.is_initialized()
    if owns_process_group:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return TensorParallelGroup(init_device_mesh(device.type, (world_size,)), owns_process_group)
