"""`fused_decode`: the option reaches every product of a step, and outputs do not depend on it."""

import pytest
import torch

from onchip.engine import LLM, SamplingParams
from onchip.models import products

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def enabled(monkeypatch):
    """Whether products were fused, for each product of a decoder."""
    enabled = []
    monkeypatch.setattr(
        products, "find_kernel", lambda x, weight: enabled.append(products._is_fused.get())
    )
    return enabled


@pytest.mark.parametrize("option", [{}, {"fused_decode": False}, {"fused_decode": True}], ids=str)
def test_the_option_reaches_the_products_of_steps(enabled, option):
    with LLM("tiny", max_model_len=64, num_pages=20, **option) as llm:
        num_layers = llm.engine.model.config.num_layers
        llm.generate([[1, 2, 3], [4]], GREEDY)
        assert not products._is_fused.get()  # outside of steps
    assert set(enabled) == {option.get("fused_decode", True)}
    assert len(enabled) >= 6 * 4 * num_layers


def test_two_engines_of_one_model_differ(tiny, enabled):
    with tiny.engine() as one, tiny.engine(fused_decode=False) as other:
        one.add([1, 2], GREEDY)
        other.add([1, 2], GREEDY)
        one.step()
        count = len(enabled)
        other.step()
        assert all(enabled[:count]) and count and not any(enabled[count:])
        while one.has_work or other.has_work:
            one.step()
            other.step()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["graphs", "eager", "few_pages", "int8"])
def test_outputs_on_a_gpu_do_not_depend_on_it(tiny, monkeypatch, way):
    """Greedy and sampled tokens in fp32."""
    from onchip.kernels.llm import products as kernels

    options = {
        "graphs": {},
        "eager": {"graphs": False},
        "few_pages": {"num_pages": 40, "host_pages": 200},
        "int8": {"kv_dtype": "int8"},
    }[way]
    launches, launch = [], kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *args: launches.append(1) or launch(*args))
    outputs = []
    for fused_decode in (False, True):
        with tiny.engine("cuda", fused_decode=fused_decode, **options) as one:
            one.warm_up()
            tiny.ask(one)
            outputs.append(tiny.visible(tiny.drain(one)[0]))
        assert bool(launches) == fused_decode
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chains_of_launches_in_a_graph(num_rows, dtype):
    """Each launch starts while its predecessor ends, reads its result, and is replayed often: the
    hidden states of 6 layers of products are those of a stream that waits after each.
    """
    shape = {"dtype": dtype, "device": "cuda"}
    width, inner = 1024, 3072
    up = [torch.randn(2 * inner, width, **shape) / 32 for _ in range(6)]
    down = [torch.randn(width, inner, **shape) / 55 for _ in range(6)]
    norm, x = torch.ones(width, **shape), torch.randn(num_rows, width, **shape)
    rms = products.RMSNorm(norm, 1e-6)

    def run(wait):
        total, y = x, x
        for wide, narrow in zip(up, down, strict=True):
            total, gated = products.norm_product(total, y, rms, wide, None, "silu")
            wait()
            y = products.product(gated, narrow)
            wait()
        return total + y

    with products.fuse_products():
        expected = run(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(lambda: None)
        for _ in range(50):
            out.zero_()
            graph.replay()
            assert torch.equal(out, expected)
