"""The host code of every Hopper launch, on the CPU: its arguments fit the signature of its kernel.

The launcher is replaced by one that binds the arguments to the parameters of the kernel.
"""

import pytest
import torch

from onchip import masks
from onchip.core import paged
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.hopper import (
    launch,
    launch_8bit,
    launch_backward,
    launch_backward_split,
    launch_decode,
)
from onchip.kernels.hopper.tile_plan import plan_tiles
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import hopper_forward_of

MODULES = (launch, launch_8bit, launch_backward, launch_backward_split, launch_decode)
OPTIONS = {  # of a launch, not parameters of the kernel
    *("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl"),
}
PROCESSORS = 132


@pytest.fixture
def launches(monkeypatch):
    """(kernel, grid, arguments by name) of every launch."""
    made = []

    def record(self, grid, *args, **constants):
        parameters = self.kernel.arg_names
        named = {name: x for name, x in constants.items() if name not in OPTIONS}
        assert set(named) <= set(parameters)
        positional = [name for name in parameters if name not in named]
        assert len(args) == len(positional), (positional, len(args))
        made.append(
            (self.kernel.fn.__name__, grid, dict(zip(positional, args, strict=True)) | named)
        )

    monkeypatch.setattr(CachedLauncher, "_launch", record)
    for module in MODULES:
        monkeypatch.setattr(module, "num_sms", lambda device: PROCESSORS)
    return made


def tensors(batch=2, seqlen=300, heads=8, kv_heads=8, dim=128, dtype=torch.bfloat16):
    q = torch.zeros(batch, seqlen, heads, dim, dtype=dtype)
    k, v = (torch.zeros(batch, seqlen, kv_heads, dim, dtype=dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 20)}], ids=str)
def test_forward(launches, dim, options):
    x = Tensors(*tensors(seqlen=2048, heads=16, dim=dim))
    problem = describe(x, Options(**options), ())
    launch.forward(problem, x)
    ((kernel, grid, arguments),) = launches
    config = hopper_forward_of(problem)
    plan = plan_tiles(problem, config)
    assert kernel == "forward_kernel" and grid == (min(plan.num_tiles, PROCESSORS),)
    assert plan.num_tiles == 2 * 16 * -(-2048 // (64 * config.consumers))
    assert arguments["num_tiles"] == plan.num_tiles and arguments["seqlen_q"] == 2048
    assert arguments["HAS_RIGHT"] == (options != {}) and arguments["CONSUMERS"] == config.consumers


@pytest.mark.parametrize("dim", [64, 128])
def test_forward_with_a_mask(launches, dim):
    """head_dim 64: three consumers read strips."""
    q, k, v = tensors(seqlen=2048, dim=dim)
    mask = masks.build(masks.causal() & masks.window(500, 0), 2, 8, 2048, 2048)
    x = Tensors(q, k, v, mask=mask)
    launch.forward(describe(x, Options(), ()), x)
    assert launches[0][2]["HAS_MASK"]


def test_packed_sequences(launches):
    q = torch.zeros(500, 8, 128, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 100, 500], dtype=torch.int32)
    x = Tensors(q, q, q, offsets, offsets)
    launch.forward(describe(x, Options(causal=True), (400, 400)), x)
    arguments = launches[0][2]
    assert arguments["PACKED"] and arguments["total_q"] == 500 and arguments["batch"] == 2


def test_merge_into_a_state(launches):
    x = Tensors(*tensors())
    problem = describe(x, Options(), ())
    out, lse = torch.zeros(2, 300, 8, 128), torch.zeros(2, 8, 300, dtype=torch.float64)
    launch.forward_into(problem, x, out, lse)
    assert launches[0][2]["MERGE"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dim", "kernel"), [(64, "backward_kernel"), (256, "backward_split_kernel")]
)
def test_backward(launches, dim, kernel, deterministic):
    x = Tensors(*tensors(heads=8, kv_heads=2, dim=dim))
    problem = describe(x, Options(causal=True, deterministic=deterministic), ())
    out, lse = torch.zeros_like(x.q), torch.zeros(2, 8, 300)
    launch_backward.backward(problem, x, out, lse, out, None)
    kernel = "backward_kernel" if dim == 64 else "backward_split_kernel"
    assert kernel in [name for name, _, _ in launches]


@pytest.mark.parametrize(("seqlen", "splits_dq"), [(300, True), (1300, False)])
def test_dq_of_few_keys_has_its_own_kernel(launches, few_keys, seqlen, splits_dq):
    x = Tensors(*tensors(seqlen=seqlen, dim=128))
    problem = describe(x, Options(causal=True), ())
    out, lse = torch.zeros_like(x.q), torch.zeros(2, 8, seqlen)
    launch_backward.backward(problem, x, out, lse, out, None)
    names = [name for name, _, _ in launches]
    gradients = [arguments for name, _, arguments in launches if name == "backward_kernel"]
    assert [arguments["DQ"] for arguments in gradients] == [not splits_dq]
    assert ("backward_split_kernel" in names) == splits_dq
    assert ("finish_kernel" in names) == (not splits_dq)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_pv16"])
def test_products_of_8_bits(launches, precision):
    x = Tensors(*tensors(heads=8, kv_heads=2))
    launch_8bit.forward(describe(x, Options(precision=precision, causal=True), ()), x)
    assert "forward_8bit_kernel" in [name for name, _, _ in launches]


@pytest.mark.parametrize("page_size", [0, 16])
def test_decode(launches, page_size):
    q = torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16)
    if page_size:
        k = v = torch.zeros(128, page_size, 2, 128, dtype=torch.bfloat16)
        table = torch.arange(128, dtype=torch.int32).view(2, 64)
        seqlens = torch.full((2,), 1000, dtype=torch.int32)
        x = Tensors(q, k, v, page_table=table, cache_seqlens=seqlens)
        problem = paged.describe(x, Options(causal=True), None)
    else:
        k = v = torch.zeros(2, 1024, 2, 128, dtype=torch.bfloat16)
        x = Tensors(q, k, v)
        problem = describe(x, Options(), ())
    launch_decode.decode(problem, x)
    assert launches[0][0] == "decode_kernel"
