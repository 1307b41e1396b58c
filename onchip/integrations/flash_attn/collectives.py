"""flash_attn.utils.distributed: collectives over the first dimension, with gradients."""

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = "dist.ProcessGroup | None"
Pending: TypeAlias = "tuple[Tensor, dist.Work | None]"  # the result, the handle of an async_op


def all_gather_raw(input_: Tensor, process_group: Group, async_op: bool = False) -> Pending:
    """(the inputs of all ranks one after another, the handle if async_op). No gradient."""
    size = dist.get_world_size(process_group)
    out = input_.new_empty(size * input_.shape[0], *input_.shape[1:])
    args = out, input_.contiguous(), process_group, async_op
    return out, dist.all_gather_into_tensor(*args)


def reduce_scatter_raw(input_: Tensor, process_group: Group, async_op: bool = False) -> Pending:
    """(this rank's part of the sum over ranks, the handle if async_op). No gradient."""
    size = dist.get_world_size(process_group)
    if input_.shape[0] % size:
        raise ValueError(f"{input_.shape[0]} rows are not a multiple of {size} ranks")
    out = input_.new_empty(input_.shape[0] // size, *input_.shape[1:])
    summed = dist.ReduceOp.SUM
    handle = dist.reduce_scatter_tensor(out, input_.contiguous(), summed, process_group, async_op)
    return out, handle


def all_reduce_raw(input_: Tensor, process_group: Group, async_op: bool = False) -> Pending:
    """(the sum over ranks, in the memory of a contiguous input, the handle if async_op)."""
    out = input_.contiguous()
    return out, dist.all_reduce(out, dist.ReduceOp.SUM, process_group, async_op)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, process_group):
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        return reduce_scatter_raw(dout, ctx.process_group)[0], None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, process_group):
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_gather_raw(dout, ctx.process_group)[0], None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, process_group):
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dout, None


def all_gather(input_: Tensor, process_group: Group) -> Tensor:
    """all_gather_raw; its gradient is reduce_scatter."""
    return _AllGather.apply(input_, process_group)


def reduce_scatter(input_: Tensor, process_group: Group) -> Tensor:
    """reduce_scatter_raw; its gradient is all_gather."""
    return _ReduceScatter.apply(input_, process_group)


def all_reduce(input_: Tensor, process_group: Group) -> Tensor:
    """all_reduce_raw of a copy; the gradient passes through, as upstream's does."""
    return _AllReduce.apply(input_, process_group)
