"""MultiheadAttention equals torch's, and works as any module does."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import onchip
from onchip import masks
from onchip.nn import MultiheadAttention, StaticKVCache
from onchip.testing import oracle

F64 = {"dtype": torch.float64}


def pair(**options):
    torch.manual_seed(2)
    theirs = nn.MultiheadAttention(24, 4, **{"batch_first": True} | options, **F64)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    return theirs, MultiheadAttention.from_torch(theirs)


def visible_masks(seqlen_q, seqlen_k):
    """Masks of torch: bool ones hide. Every query sees key 0: torch gives NaN otherwise."""
    by_head = torch.rand(8, seqlen_q, seqlen_k) > 0.6
    padding = torch.rand(2, seqlen_k) > 0.6
    by_head[..., 0], padding[..., 0] = False, False
    scores = torch.randn(seqlen_q, seqlen_k, **F64)
    return {
        "none": {},
        "attn_mask": {"attn_mask": by_head[0]},
        "by head": {"attn_mask": by_head},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": by_head, "key_padding_mask": padding},
        "added": {"attn_mask": scores, "key_padding_mask": scores[:2]},
        "added by head": {"attn_mask": torch.randn(8, seqlen_q, seqlen_k, **F64)},
        "-inf": {"attn_mask": torch.zeros_like(scores).masked_fill(by_head[1], -torch.inf)},
        "mixed": {"attn_mask": scores, "key_padding_mask": padding},
    }


@pytest.mark.parametrize("name", visible_masks(9, 9))
def test_equal_to_torch(name):
    """Outputs, weights and gradients."""
    theirs, ours = pair()
    x = torch.randn(2, 9, 24, requires_grad=True, **F64)
    options = visible_masks(9, 9)[name]
    expected, weights = theirs(x, x, x, average_attn_weights=False, **options)
    out, none = ours(x, x, x, **options)
    assert none is None
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(t, x, dout)[0] for t in (out, expected)))
    got = ours(x, x, x, need_weights=True, average_attn_weights=False, **options)[1]
    torch.testing.assert_close(got, weights)
    torch.testing.assert_close(ours(x, need_weights=True, **options)[1], weights.mean(1))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_layouts_of_the_input(batch_first, batched):
    theirs, ours = pair(batch_first=batch_first, kdim=12, vdim=20)
    assert ours.batch_first == batch_first
    sizes = ((9, 24), (7, 12), (7, 20))
    shape = lambda n, dim: (n, dim) if not batched else (2, n, dim) if batch_first else (n, 2, dim)
    x = [torch.randn(shape(*size), **F64) for size in sizes]
    (expected, weights), got = theirs(*x), ours(*x, need_weights=True)
    torch.testing.assert_close(got, (expected, weights))


def test_is_causal_needs_no_mask():
    theirs, ours = pair()
    x = torch.randn(2, 9, 24, **F64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, **F64)
    expected, _ = theirs(x, x, x, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(ours(x, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(x, attn_mask=mask, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(x, mask=masks.causal())[0], expected)


def test_rows_and_masks_together():
    """mask and key_padding_mask combine; a query that sees no key gives the output of zeros."""
    _, ours = pair()
    x, padding = torch.randn(2, 9, 24, **F64), torch.zeros(2, 9, dtype=torch.bool)
    padding[1] = True
    out, _ = ours(x, mask=masks.causal(), key_padding_mask=padding)
    torch.testing.assert_close(out[0], ours(x[:1], is_causal=True)[0][0])
    torch.testing.assert_close(out[1], ours.out_proj.bias.expand(9, -1))


def test_options_reach_the_kernel():
    options = {"window_size": (3, 0), "softcap": 5.0, "softmax_scale": 0.3}
    module = MultiheadAttention(24, 4, num_kv_heads=2, sinks=True, **options, **F64)
    nn.init.normal_(module.sinks)
    x = torch.randn(2, 9, 24, **F64)
    heads = lambda linear: linear(x).unflatten(-1, (-1, 6))
    qkv = map(heads, (module.q_proj, module.k_proj, module.v_proj))
    out = oracle(*qkv, sinks=module.sinks, **options)[0]
    torch.testing.assert_close(module(x)[0], module.out_proj(out.flatten(-2)))


def test_dropout_is_for_training():
    module = MultiheadAttention(32, 2, dropout=0.5)
    x = torch.randn(1, 9, 32)
    assert not torch.equal(module(x)[0], module(x)[0])
    with pytest.raises(onchip.UnsupportedError, match="need_weights is not served with dropout"):
        module(x, need_weights=True)
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    _, ours = pair()
    x = torch.randn(2, 111, 24, **F64)
    expected, got = ours(x)[0], copy.deepcopy(ours).to(dtype)(x.to(dtype))[0]
    assert got.dtype == dtype
    error = (got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 8 * torch.finfo(dtype).eps


def test_autocast_and_meta():
    module = MultiheadAttention(32, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(torch.randn(1, 9, 32))[0]
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and module.q_proj.weight.grad.dtype == torch.float32
    module = MultiheadAttention(32, 2, rotary=1e4, qk_norm=1e-6, sinks=True, device="meta")
    assert module(torch.empty(1, 9, 32, device="meta"))[0].shape == (1, 9, 32)
    module = module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert module(torch.randn(1, 9, 32))[0].isfinite().all()


def test_a_compiled_module_is_one_graph():
    module = MultiheadAttention(24, 4, num_kv_heads=2, rotary=1e4, causal=True, sinks=True, **F64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 24, **F64)
    expected = module(x)[0]
    out = compiled(x)[0]
    torch.testing.assert_close(out, expected)
    inputs = list(module.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), inputs) for t in (out, expected)))


@pytest.mark.slow
@torch.no_grad()
def test_compiled_steps_over_a_cache():
    """One graph for all steps: lengths are tensors."""
    module = MultiheadAttention(24, 4, num_kv_heads=2, rotary=1e4, causal=True, **F64)
    x, cache = torch.randn(2, 9, 24, **F64), StaticKVCache(16)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    parts = [compiled(part, cache=cache)[0] for part in x.split((5, 1, 1, 1, 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x)[0])


@pytest.mark.parametrize(
    "sizes, options, error, sentence",
    [
        ((24, 5), {}, ValueError, "embed_dim=24 must be a multiple of num_heads=5, or give head"),
        ((24, 4), {"num_kv_heads": 3}, ValueError, "num_heads=4 must be a multiple of num_kv_h"),
        ((24, 4), {"add_zero_attn": True}, onchip.UnsupportedError, "use sinks=True"),
        ((24, 4), {"window": 3}, TypeError, "window"),
        ((24, 4), {"return_lse": True}, TypeError, "return_lse"),
    ],
)
def test_wrong_settings_are_sentences(sizes, options, error, sentence):
    with pytest.raises(error, match=sentence):
        MultiheadAttention(*sizes, **options)


def test_wrong_calls_are_sentences():
    module, x = MultiheadAttention(24, 4, rotary=1e4), torch.randn(2, 9, 24)
    with pytest.raises(onchip.UnsupportedError, match="rotary positions are for self-attention"):
        module(x, x.clone())
    with pytest.raises(ValueError, match="attn_mask must be .*, got \\(8, 9\\)"):
        module(x, attn_mask=torch.ones(8, 9))
    with pytest.raises(ValueError, match="key_padding_mask must be .*, got \\(2, 8\\)"):
        module(x, key_padding_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match="attn_mask.dtype=torch.int64 must be torch.bool"):
        module(x, attn_mask=torch.ones(9, 9, dtype=torch.int64))


def test_the_name_is_loaded_at_its_first_use():
    code = "import onchip, sys; assert 'torch' not in sys.modules; assert 'nn' in dir(onchip)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert onchip.nn.MultiheadAttention is MultiheadAttention
