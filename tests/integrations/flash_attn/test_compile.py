"""torch.compile traces the drop-in as it traces flash_attn."""

import pytest
import torch

from onchip.integrations import flash_attn as fa

CU = torch.tensor([0, 5, 18], dtype=torch.int32)
CALLS = {
    "dense": lambda x: fa.flash_attn_func(*x.unbind(2), causal=True, window_size=(3, -1)),
    "probs": lambda x: fa.flash_attn_func(*x.unbind(2), return_attn_probs=True)[0],
    "packed": lambda x: fa.flash_attn_qkvpacked_func(x, 0.0, None, True),
    "varlen": lambda x: fa.flash_attn_varlen_qkvpacked_func(x.flatten(0, 1), CU, 13, causal=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_whole_graphs(call):
    torch._dynamo.reset()
    x = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    (want,), (got,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (call, compiled))
    torch.testing.assert_close(got, want)


def test_data_dependent_max_seqlens():
    """As transformers passes them: .item() of a tensor, with the setting that it needs."""
    torch._dynamo.reset()
    longest = lambda cu: cu.diff().max().item()
    call = lambda x, cu: fa.flash_attn_varlen_qkvpacked_func(x, cu, longest(cu), causal=True)
    x = torch.randn(18, 3, 4, 16)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = torch.compile(call, backend="aot_eager", fullgraph=True)(x, CU)
    torch.testing.assert_close(got, call(x, CU))


def test_a_step_of_decoding():
    torch._dynamo.reset()
    q, caches = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 32, 4, 16)
    seqlens = torch.tensor([3, 5], dtype=torch.int32)

    def step(q, k_cache, v_cache, seqlens):
        out = fa.flash_attn_with_kvcache(q * 2, k_cache, v_cache, q, q, cache_seqlens=seqlens)
        return out + 1

    want_caches, got_caches = caches.clone(), caches.clone()
    want = step(q, *want_caches, seqlens)
    got = torch.compile(step, backend="aot_eager")(q, *got_caches, seqlens)
    torch.testing.assert_close(got, want)
    assert torch.equal(got_caches, want_caches) and not torch.equal(got_caches, caches)
