"""Hugging Face's `kernels` loads onchip's folder offline, and transformers runs a model with it."""

import sys
from functools import wraps

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from onchip.integrations import flash_attn, kernels_hub

kernels = pytest.importorskip("kernels")
pytestmark = pytest.mark.programs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Written by the command, with the network out of reach."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    monkeypatch.setattr(sys, "argv", ["kernels_hub", str(tmp_path)])
    kernels_hub.main()
    return tmp_path


@pytest.fixture
def kernel(folder):
    return kernels.get_local_kernel(folder)


def inputs(seqlen, heads, kv_heads, head_dim=32):
    sizes = heads, kv_heads, kv_heads
    return [torch.randn(2, seqlen, n, head_dim, requires_grad=True) for n in sizes]


def gradients(function, tensors):
    out = function(*tensors)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    return out, *torch.autograd.grad(out, tensors, dout)


def sdpa(q, k, v):
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_it_has_flash_attns_functions(kernel):
    assert set(kernel.__all__) == set(kernels_hub.FUNCTIONS)
    assert {"flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"} <= set(
        kernel.__all__
    )
    for name in kernel.__all__:
        assert getattr(kernel, name) is getattr(flash_attn, name)


def test_output_and_gradients_are_those_of_sdpa(kernel):
    tensors = inputs(111, heads=4, kv_heads=2)
    ours = gradients(lambda q, k, v: kernel.flash_attn_func(q, k, v, causal=True), tensors)
    for got, expected in zip(ours, gradients(sdpa, tensors), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_it_is_as_near_to_fp64_as_sdpa(kernel, dtype):
    tensors = inputs(333, heads=4, kv_heads=2, head_dim=64)
    exact = gradients(sdpa, [t.detach().double().requires_grad_() for t in tensors])
    tensors = [t.detach().to("cuda", dtype).requires_grad_() for t in tensors]
    ours = gradients(lambda q, k, v: kernel.flash_attn_func(q, k, v, causal=True), tensors)
    for got, theirs, expected in zip(ours, gradients(sdpa, tensors), exact, strict=True):
        errors = [(t.double().cpu() - expected).norm() / expected.norm() for t in (got, theirs)]
        assert errors[0] <= 1.5 * errors[1]


def test_packed_sequences_are_attended_one_by_one(kernel):
    tensors = [x[0] for x in inputs(163, heads=2, kv_heads=2)]
    cu_seqlens = torch.tensor([0, 63, 163], dtype=torch.int32)

    def packed(q, k, v):
        return kernel.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 100, 100, causal=True)

    def one_by_one(q, k, v):
        parts = zip(*(x.split([63, 100]) for x in (q, k, v)), strict=True)
        return torch.cat([sdpa(*(x[None] for x in part))[0] for part in parts])

    for got, expected in zip(*(gradients(f, tensors) for f in (packed, one_by_one)), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", kernels_hub.BACKENDS)
def test_metadata_of_every_backend_is_valid(folder, backend):
    file = folder / "build" / f"torch-{backend}" / "metadata.json"
    metadata = kernels.Metadata.read_from_file(file)
    assert str(metadata.backend.backend_type).lower() == backend and metadata.id.isidentifier()
    assert (str(metadata.name), metadata.license) == ("onchip-flash-attn", "MIT")


def count_calls(monkeypatch):
    """A list to which every call of flash_attn_func of kernels that are loaded later is added."""
    calls, function = [], flash_attn.flash_attn_func

    @wraps(function)
    def counting(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(flash_attn, "flash_attn_func", counting)
    return calls


def test_a_model_of_transformers_runs_with_it(folder, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("LOCAL_KERNELS", f"local/onchip={folder}")
    calls = count_calls(monkeypatch)
    config = LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    model = LlamaForCausalLM(config)
    tokens = torch.arange(42).view(2, 21)
    logits = []
    for implementation in ("sdpa", "local/onchip"):
        model.set_attn_implementation(implementation)
        logits.append(model(tokens).logits)
    torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-5)
    assert len(calls) == config.num_hidden_layers
