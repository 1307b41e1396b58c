"""The module on a GPU: outputs, gradients and decoding equal those in fp64."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import onchip
from onchip.nn import MultiheadAttention, StaticKVCache

pytestmark = pytest.mark.gpu
OPTIONS = {"causal": True, "num_kv_heads": 2, "rotary": 1e4, "qk_norm": 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients(dtype):
    """As near to fp64 as the same module on the CPU, within a factor of 1.5."""
    torch.manual_seed(3)
    exact = MultiheadAttention(256, 4, **OPTIONS, dtype=torch.float64)
    x, dout = torch.randn(2, 3, 130, 256, dtype=torch.float64)
    errors = {}
    for device, reference in (("cuda", False), ("cpu", False), ("cpu", True)):
        precision = torch.float64 if reference else dtype
        module = copy.deepcopy(exact).to(device, precision)
        out = module(x.to(device, precision))[0]
        grads = torch.autograd.grad(out, list(module.parameters()), dout.to(device, precision))
        errors[device, reference] = [t.cpu().double() for t in (out.detach(), *grads)]
    expected = errors["cpu", True]
    distance = lambda got: [(a - b).norm() / b.norm() for a, b in zip(got, expected, strict=True)]
    for ours, theirs in zip(
        distance(errors["cuda", False]), distance(errors["cpu", False]), strict=True
    ):
        assert ours <= 1.5 * theirs + torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("chunks", [(70, 1, 1, 8), (33, 40)], ids=str)
@torch.no_grad()
def test_steps_equal_the_whole_sequence(chunks):
    torch.manual_seed(1)
    module = MultiheadAttention(256, 4, **OPTIONS, device="cuda")
    x = torch.randn(3, sum(chunks), 256, device="cuda")
    cache = StaticKVCache(sum(chunks))
    parts = [module(part, cache=cache)[0] for part in x.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x)[0], rtol=1e-5, atol=1e-5)
    assert cache.k.is_cuda and cache.length == sum(chunks)


@torch.no_grad()
def test_prompts_of_different_lengths():
    module = MultiheadAttention(256, 4, **OPTIONS, device="cuda")
    x, lengths = torch.randn(2, 12, 256, device="cuda"), torch.tensor([4, 9])
    cache = StaticKVCache(16)
    module(x[:, :9], cache=cache)
    cache.truncate(lengths)  # on the CPU
    out = module(x[torch.arange(2), lengths][:, None], cache=cache)[0]
    for row, length in enumerate(lengths + 1):
        expected = module(x[row : row + 1, :length])[0][:, -1]
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)
    cache.truncate(3)
    assert cache.length == 3 and cache.cache_seqlens.tolist() == [3, 3]


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cuda", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 2])
def test_a_rank_computes_its_shard(mesh, dim):
    """Rank 0 of four: the first quarter of the batch or of the heads, as a call of its own. The
    calls are deterministic: otherwise dq is added in any order.
    """
    shapes = [(4, 200, n, 64) for n in (8, 4, 4)]
    whole = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    first = [t.chunk(4, dim)[0].contiguous() for t in whole]
    spread = [DTensor.from_local(t, mesh, [Shard(dim)]).requires_grad_() for t in first]
    out = onchip.attention(*spread, causal=True, deterministic=True)
    local = [t.to_local().detach().requires_grad_() for t in spread]
    expected = onchip.attention(*local, causal=True, deterministic=True)
    assert torch.equal(out.to_local(), expected)
    out.sum().backward()
    expected.sum().backward()
    for got, t in zip(spread, local, strict=True):
        assert torch.equal(got.grad.to_local(), t.grad)
