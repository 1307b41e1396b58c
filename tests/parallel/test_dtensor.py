"""DTensors on two ranks equal plain tensors: attention sharded over batch and heads, and the module
under tensor parallelism and FSDP. fp64, gradients too.
"""

import copy

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import onchip
from onchip.nn import MultiheadAttention, StaticKVCache

F64 = {"dtype": torch.float64}


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def close(got, expected):
    torch.testing.assert_close(whole(got), expected, rtol=1e-12, atol=1e-12)


def options(name):
    """The options of a call, by name; those that require gradients get one."""
    mask = torch.rand(4, 1, 13, 13) > 0.3
    return {
        "causal": {"causal": True, "softcap": 5.0},
        "shared bias": {"bias": torch.randn(1, 1, 13, 13, requires_grad=True, **F64)},
        "bias and sinks": {
            "bias": torch.randn(4, 4, 1, 13, requires_grad=True, **F64),
            "sinks": torch.randn(4, requires_grad=True, **F64),
        },
        "mask by entry": {"mask": mask},
        "alibi": {"alibi_slopes": torch.rand(4, 4), "window_size": (3, None)},
    }[name]


def sharded_calls(comm):
    mesh = DeviceMesh.from_group(comm.group, "cpu")
    for name in ("causal", "shared bias", "bias and sinks", "mask by entry", "alibi"):
        for placement, kv_heads in ((Shard(0), 2), (Shard(2), 2), (Shard(2), 1), (Replicate(), 2)):
            torch.manual_seed(5)
            x = [torch.randn(4, 13, n, 8, requires_grad=True, **F64) for n in (4, *[kv_heads] * 2)]
            extra = options(name)
            inputs = [*x, *(t for t in extra.values() if getattr(t, "requires_grad", False))]
            expected = onchip.attention(*x, **extra)
            dout = torch.randn_like(expected)
            grads = torch.autograd.grad(expected, inputs, dout)
            shared = Replicate() if kv_heads == 1 else placement
            spread = [
                distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
                for t, p in zip(x, (placement, shared, shared), strict=True)
            ]
            out = onchip.attention(*spread, **extra)
            assert out.placements == (placement,)
            close(out, expected)
            dout = distribute_tensor(dout, mesh, [placement])
            for got, grad in zip(
                torch.autograd.grad(out, [*spread, *inputs[3:]], dout), grads, strict=True
            ):
                close(got, grad)


def test_sharded_calls_equal_plain_ones(pool):
    pool.run(2, sharded_calls)


def modules(**extra):
    """The same module twice, and an input."""
    torch.manual_seed(7)
    module = MultiheadAttention(
        24, 4, num_kv_heads=2, rotary=1e4, qk_norm=1e-6, causal=True, **extra, **F64
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module, copy.deepcopy(module), torch.randn(2, 11, 24, **F64)


def compare_step(module, parallel, x):
    """Outputs, and gradients of the input and of every parameter."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [m(t)[0] for m, t in zip((module, parallel), inputs, strict=True)]
    close(outs[1], outs[0])
    for out in outs:
        out.square().sum().backward()
    close(inputs[1].grad, inputs[0].grad)
    named = dict(parallel.named_parameters())
    for name, parameter in module.named_parameters():
        close(named[name].grad, parameter.grad)


def tensor_parallel(comm):
    mesh = DeviceMesh.from_group(comm.group, "cpu")
    columns = ColwiseParallel(use_local_output=False)
    plan = {"q_proj": columns, "k_proj": columns, "v_proj": columns, "out_proj": RowwiseParallel()}
    module, parallel, x = modules(sinks=True, softcap=5.0)
    compare_step(module, parallelize_module(parallel, mesh, plan), x)
    local = plan | dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    module, parallel, x = modules()
    parallelize_module(parallel, mesh, local)
    with torch.no_grad():  # a cache of this rank's heads
        cache = StaticKVCache(16)
        parts = [parallel(part, cache=cache)[0] for part in x.split((6, 1, 4), 1)]
        close(torch.cat(parts, 1), module(x)[0])
        assert cache.k.shape[2] == 1


def test_tensor_parallel_modules_equal_one(pool):
    pool.run(2, tensor_parallel)


def fsdp(comm):
    mesh = DeviceMesh.from_group(comm.group, "cpu")
    module, parallel, x = modules(sinks=True)
    fully_shard(parallel, mesh=mesh)
    compare_step(module, parallel, x)


def test_fully_sharded_modules_equal_one(pool):
    pool.run(2, fsdp)
