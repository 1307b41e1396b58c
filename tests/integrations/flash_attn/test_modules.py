"""flash_attn's losses, norms and modules: correct and differentiable."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onchip
from onchip import UnsupportedError
from onchip.integrations.flash_attn import biased, losses, mha, mlp, norms, rotary


def assert_same(got, want, atol=1e-6):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_torchs(reduction, smoothing):
    logits = torch.randn(9, 17, requires_grad=True)
    labels = torch.randint(17, (9,)).index_fill_(0, torch.tensor([2, 5]), -100)
    module = losses.CrossEntropyLoss(
        reduction=reduction, label_smoothing=smoothing, logit_scale=0.5
    )
    options = {"reduction": reduction, "label_smoothing": smoothing}
    pairs = module(logits, labels), F.cross_entropy(logits * 0.5, labels, **options)
    assert_same(*([t] for t in pairs))
    got, want = (torch.autograd.grad(t.square().sum(), logits) for t in pairs)
    assert_same(got, want)


def test_z_loss_is_added_and_returned():
    logits, labels = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 6, -100, 2, 3])
    module = losses.CrossEntropyLoss(lse_square_scale=0.1, return_z_loss=True)
    loss, z_loss = module(logits, labels)
    z = 0.1 * logits.logsumexp(-1).square()[labels != -100].mean()
    assert_same([loss, z_loss], [F.cross_entropy(logits, labels) + z, z.detach()])
    assert not z_loss.requires_grad
    with pytest.raises(NotImplementedError, match="reduction='max' must be"):
        losses.CrossEntropyLoss(reduction="max")
    with pytest.raises(UnsupportedError, match="on several ranks is not supported"):
        losses.cross_entropy_loss(logits, labels, process_group=SimpleNamespace(size=lambda: 2))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_are_torchs_of_the_sum(kind):
    x, residual, x1 = (torch.randn(2, 5, 16, requires_grad=True) for _ in range(3))
    weight, bias = torch.randn(16, requires_grad=True), torch.randn(16)
    norm = norms.layer_norm_fn if kind == "layer" else norms.rms_norm_fn

    def want(total, weight, bias):
        if kind == "layer":
            return F.layer_norm(total, (16,), weight, bias, 1e-6)
        return F.rms_norm(total, (16,), weight, 1e-6) + (0 if bias is None else bias)

    assert_same([norm(x, weight, bias)], [want(x, weight, bias)])
    total = x + x1 + residual
    got = norm(x, weight, bias, residual, x1, weight + 1, None, prenorm=True)
    expected = [want(total, weight, bias), want(total, weight + 1, None), total]
    assert_same(got, expected)
    inputs = x, residual, x1, weight
    grads = [torch.autograd.grad(sum(t.square().sum() for t in y), inputs) for y in (got, expected)]
    assert_same(*grads, atol=2e-5)
    assert_same([norm(x, weight, bias, zero_centered_weight=True)], [want(x, weight + 1, bias)])
    scale = torch.rand(2, 5)
    assert_same([norm(x, weight, bias, rowscale=scale)], [want(x * scale[..., None], weight, bias)])


def test_norms_round_once_and_keep_the_residual_wide():
    x, weight = torch.randn(4, 32).bfloat16(), torch.ones(32)
    out, total = norms.rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert out.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(out, F.rms_norm(x.float(), (32,), eps=1e-6).bfloat16())
    assert norms.rms_norm_fn(x, weight, None, x.float(), prenorm=True)[1].dtype == torch.float32
    with pytest.raises(UnsupportedError, match="out= and residual_out= are not supported"):
        norms.layer_norm_fn(x, weight, None, out=x)


def test_dropout_before_a_norm_returns_its_mask():
    torch.manual_seed(1)
    x, residual, scale = torch.randn(64, 16), torch.randn(64, 16), torch.rand(16)
    weight, bias = torch.randn(16), torch.randn(16)
    out, total, mask = norms.dropout_add_layer_norm(
        x,
        residual,
        weight,
        bias,
        0.25,
        1e-5,
        layerscale=scale,
        prenorm=True,
        return_dropout_mask=True,
    )
    want = residual + x * mask / 0.75 * scale
    assert_same([total, out], [want, F.layer_norm(want, (16,), weight, bias)], atol=1e-5)
    assert 0.2 < 1 - mask.float().mean() < 0.3
    module = norms.DropoutAddRMSNorm(16, prenorm=True, p=0.5).eval()
    out, total = module(x, residual)
    assert_same([out, total], [F.rms_norm(total, (16,), eps=1e-5), x + residual])
    assert list(norms.DropoutAddLayerNorm(16).state_dict()) == ["weight", "bias"]
    for one in (norms.RMSNorm(16), norms.PlainRMSNorm(16)):
        assert_same([one(x)], [F.rms_norm(x, (16,), eps=1e-5)])


def test_mlps():
    x = torch.randn(3, 8)
    gated = mlp.GatedMlp(8, 16, activation=F.silu, multiple_of=32)
    y, gate = gated.fc1(x).chunk(2, -1)
    assert gated.fc2.in_features == 32
    assert_same([gated(x)], [gated.fc2(mlp.swiglu(gate, y))])
    fused = mlp.FusedMLP(8, activation="sqrelu", return_residual=True)
    out, same = fused(x)
    assert same is x
    assert_same([out], [fused.fc2(F.relu(fused.fc1(x)).square())])
    assert mlp.FusedDense(8, 4)(x).shape == (3, 4)
    with pytest.raises(ValueError, match="activation='tanh' must be one of"):
        mlp.FusedMLP(8, activation="tanh")


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_mha_equals_projections_around_attention(kv_heads, flash):
    module = mha.MHA(32, 4, kv_heads, causal=True, rotary_emb_dim=8, use_flash_attn=flash)
    x = torch.randn(2, 9, 32, requires_grad=True)
    q, k, v = module.Wqkv(x).unflatten(-1, (-1, 8)).split((4, kv_heads, kv_heads), 2)
    angle = torch.outer(torch.arange(9.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
    q, k = (rotary.apply_rotary_emb_torch(t, angle.cos(), angle.sin()) for t in (q, k))
    want = module.out_proj(onchip.attention(q, k, v, causal=True).flatten(-2))
    pairs = module(x), want
    assert_same(*([t] for t in pairs), atol=1e-5)
    assert_same(*(torch.autograd.grad(t.square().sum(), x) for t in pairs), atol=1e-4)
    assert list(module.state_dict()) == [
        f"{name}.{part}" for name in ("Wqkv", "out_proj") for part in ("weight", "bias")
    ]


def test_mha_generates_token_by_token():
    """From a cache, with the same results as all tokens at once."""
    module = mha.MHA(
        32, 4, 2, causal=True, rotary_emb_dim=8, use_flash_attn=True, layer_idx=3
    ).eval()
    x = torch.randn(2, 9, 32)
    params = SimpleNamespace(
        max_seqlen=16, max_batch_size=2, batch_size_offset=0, seqlen_offset=0,
        lengths_per_sample=None, key_value_memory_dict={},
    )  # fmt: skip
    outs = []
    with torch.no_grad():
        for token in x.split((4, 1, 3, 1), 1):
            outs.append(module(token, inference_params=params))
            params.seqlen_offset += token.shape[1]
        want = module(x)
    assert params.key_value_memory_dict[3].shape == (2, 16, 2, 2, 8)
    assert_same([torch.cat(outs, 1)], [want], atol=1e-5)


def test_padding_masks_hide_keys():
    """Self-attention aligns causal to the last key, cross-attention to the last one kept."""
    qkv = torch.randn(2, 7, 3, 4, 8)
    kept = torch.arange(7) < torch.tensor([[5], [7]])
    q, k, v = qkv.unbind(2)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    want = onchip.attention(q, k, v, mask=kept[:, None, None].expand(2, 1, 7, 7) & causal)
    assert_same([mha.SelfAttention(causal=True)(qkv, key_padding_mask=kept)], [want])
    queries = q[:, :3]
    got = mha.CrossAttention(causal=True)(queries, qkv[:, :, 1:], key_padding_mask=kept)
    for b, keys in enumerate((5, 7)):
        one = onchip.attention(
            queries[b : b + 1], k[b : b + 1, :keys], v[b : b + 1, :keys], causal=True
        )
        assert_same([got[b : b + 1]], [one])
    module = mha.MHA(32, 4, causal=True)
    x = torch.randn(2, 7, 32)
    alone = module(x[:1, :5])
    assert_same([module(x, key_padding_mask=kept)[:1, :5]], [alone], atol=1e-5)


def test_mha_of_packed_sequences_and_of_other_keys():
    module = mha.MHA(32, 4, use_flash_attn=True, use_alibi=True, return_residual=True)
    x, cu = torch.randn(9, 32), torch.tensor([0, 4, 9], dtype=torch.int32)
    out, same = module(x, cu_seqlens=cu, max_seqlen=5)
    assert same is x
    assert_same([out[4:]], [module(x[None, 4:])[0][0]], atol=1e-5)
    cross = mha.MHA(32, 4, cross_attn=True, checkpointing=True)
    y = torch.randn(2, 6, 32, requires_grad=True)
    out = cross(y, x_kv=torch.randn(2, 11, 32), mixer_subset=slice(0, 1))
    out.sum().backward()
    assert out.shape == (2, 1, 32) and y.grad is not None
    refused = [
        ({"dwconv": True}, UnsupportedError, "dwconv=True"),
        ({"use_alibi": True}, ValueError, "need use_flash_attn=True"),
    ]
    for options, error, sentence in refused:
        with pytest.raises(error, match=sentence):
            mha.MHA(32, 4, **options)


def test_alibi_slopes_of_any_number_of_heads():
    assert mha.get_alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert mha.get_alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def test_rotary_functions_agree():
    """apply_rotary(conjugate=True) is the inverse; the torch function has a table row a token."""
    x, angle = torch.randn(2, 6, 3, 16), torch.rand(6, 4)
    cos, sin = angle.cos(), angle.sin()
    for interleaved in (False, True):
        want = rotary.apply_rotary_emb(x, cos, sin, interleaved)
        assert_same([rotary.apply_rotary_emb_torch(x, cos, sin, interleaved)], [want])
        rotated = rotary.apply_rotary(x, cos, sin, interleaved=interleaved)
        back = rotary.apply_rotary(rotated, cos, sin, interleaved=interleaved, conjugate=True)
        assert_same([rotated, back], [want, x])
    assert rotary.apply_rotary_emb_torch(x.bfloat16(), cos, sin).dtype == torch.float32
    with pytest.raises(ValueError, match="cos has 9 columns, x has head_dim=16"):
        rotary.apply_rotary_emb_torch(x, torch.ones(6, 9), torch.ones(6, 9))


def test_bias_of_the_triton_function():
    q, k, v = torch.randn(3, 2, 9, 4, 16, requires_grad=True)
    bias = torch.randn(2, 4, 9, 9)
    want = onchip.attention(q, k, v, bias=bias, causal=True)
    assert_same([biased.flash_attn_func(q, k, v, bias, True)], [want])
    assert_same([biased.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), bias, True)], [want])
    qkv = torch.stack([q, k, v], 2)
    assert_same([biased.flash_attn_qkvpacked_func(qkv, bias, True)], [want])
    with pytest.raises(UnsupportedError, match="9 queries over 5 keys are not supported"):
        biased.flash_attn_func(q, k[:, :5], v[:, :5], None, True)


def test_modules_take_a_dtype():
    assert mha.MHA(32, 4, dtype=torch.float64).out_proj.weight.dtype == torch.float64
    assert isinstance(mha.MHA(32, 4).inner_attn, nn.Module)
