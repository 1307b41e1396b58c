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


class Job:
    """The ranks of a job. Communication that was begun for it ends with it."""

    def __init__(self, mesh: DeviceMesh, began: bool = False):
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has {mesh.ndim} dimensions: give the one of tensor parallelism"
            )
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self._mesh: DeviceMesh | None = mesh
        self._began = began

    @property
    def mesh(self) -> DeviceMesh:
        if self._mesh is None:
            raise ValueError("this rank has left its job")
        return self._mesh

    def connect(self, part: Decoder) -> Decoder:
        """The whole model of one part per rank, in place. From now on all ranks make the same
        calls. Each has a cache for its own heads (`part.cache_spec()`). Inference only.
        """
        if (part.shard.rank, part.shard.world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"the decoder is {part.shard}, this is rank {self.rank} of {self.world_size}"
            )
        total = SumOutput(self)
        plan = {"layers.*.attention.out": total, "layers.*.mlp.down": total}
        parallelize_module(part, self.mesh, plan)
        return part

    def smallest(self, number: int) -> int:
        """Of the numbers that the ranks bring."""
        numbers = torch.tensor([number], device=self.mesh.device_type)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.mesh.get_group())
        return int(numbers)

    def leave(self) -> None:
        """A model may outlive its job, and must not keep the group alive: one of gloo's threads
        that still holds a tensor when Python ends would abort the process.
        """
        self._mesh = None
        if self._began and dist.is_initialized():
            dist.destroy_process_group()


class SumOutput(ParallelStyle):
    """The output of a module is summed over the ranks of a job."""

    def __init__(self, job: Job):
        self._job = job

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if out.requires_grad:
                raise ValueError("the ranks of a decoder share no gradient: use torch.no_grad()")
            dist.all_reduce(out, group=self._job.mesh.get_group())
            return out

        module.register_forward_hook(add)
        return module


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
