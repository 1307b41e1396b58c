"""Tiny transformers of diffusers compute the same with the backend "onchip" as with torch's SDPA:
outputs and gradients, in fp64.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

from functools import partial

import pytest
import torch

import onchip
from onchip import masks
from onchip.integrations import diffusers as backend
from onchip.integrations import sdpa

diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch as dispatch  # noqa: E402

pytestmark = pytest.mark.programs


@pytest.fixture(autouse=True)
def registered():
    backend.register()
    diffusers.utils.logging.set_verbosity_error()
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)


@pytest.fixture(params=["by dispatch", "tiled"])
def calls(request, monkeypatch):
    """The calls of onchip, also by a kernel that is not torch's own."""
    made = []
    kernel = {} if request.param == "by dispatch" else {"kernel": request.param}

    def attention(*args, **options):
        made.append(options)
        return onchip.attention(*args, **kernel, **options)

    monkeypatch.setattr(backend, "attention", attention)
    return made


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": draw(2, 140, 4), "encoder_hidden_states": draw(2, 7, 32),
        "pooled_projections": draw(2, 32), "timestep": torch.tensor([1.0, 0.5]).double(),
        "img_ids": torch.randint(9, (140, 3)), "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip
    return model, inputs


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": draw(1, 4, 3, 8, 10), "encoder_hidden_states": draw(1, 9, 16),
        "timestep": torch.tensor([3]),
    }  # fmt: skip
    return model, inputs


def hunyuan():
    """With a mask over the tokens of the text."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": draw(2, 4, 3, 5, 6), "timestep": torch.tensor([3, 9]),
        "encoder_hidden_states": draw(2, 12, 16), "pooled_projections": draw(2, 8),
        "encoder_attention_mask": torch.arange(12) < torch.tensor([[5], [12]]),
        "guidance": torch.tensor([6.0, 6.0]).double(),
    }  # fmt: skip
    return model, inputs


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    inputs = {
        "hidden_states": draw(1, 4, 8, 8), "encoder_hidden_states": draw(1, 9, 32),
        "pooled_projections": draw(1, 64), "timestep": torch.tensor([5]),
    }  # fmt: skip
    return model, inputs


def run(model, inputs):
    """The output and the gradients of all parameters and of the input."""
    model.zero_grad()
    x = inputs["hidden_states"].clone().requires_grad_()
    (out,) = model(**inputs | {"hidden_states": x}, return_dict=False)
    out.square().mean().backward()
    return [
        out.detach(),
        x.grad,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("make", [flux, wan, hunyuan])
def test_a_transformer_computes_the_same(make, calls):
    torch.manual_seed(0)
    model, inputs = make()
    model = model.double().train(False)
    expected = run(model, inputs)
    model.set_attention_backend("onchip")
    reason = backend.why(model)  # the refiner of the text in HunyuanVideo calls SDPA
    assert reason is None if make is not hunyuan else reason.startswith("AttnProcessor2_0 do not")
    assert not calls
    for found, reference in zip(run(model, inputs), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-12)
    assert len(calls) >= 2


def test_a_model_with_attention_of_its_own_says_so_and_runs_under_sdpa():
    torch.manual_seed(0)
    model, inputs = sd3()
    model = model.double().train(False)
    assert "JointAttnProcessor2_0 do not call diffusers' dispatcher" in str(backend.why(model))
    expected = run(model, inputs)
    with sdpa.active():
        found = run(model, inputs)
        assert sum(sdpa.counts().served.values()) >= 2
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)


OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "padding": {"attn_mask": torch.arange(33) < torch.tensor([[20], [33]])},
    "bool mask": {"attn_mask": draw(2, 1, 33, 33) > 0},
    "bool mask of heads": {"attn_mask": draw(1, 4, 33, 33) > 0},
    "added": {"attn_mask": draw(33, 33)},
    "added to keys": {"attn_mask": draw(2, 4, 1, 33)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_options_of_the_dispatcher(name, kv_heads, calls):
    q, k, v = draw(2, 33, 4, 16), draw(2, 33, kv_heads, 16), draw(2, 33, kv_heads, 16).flip(1)
    attend = partial(
        dispatch.dispatch_attention_fn, q, k, v, enable_gqa=kv_heads < 4, **OPTIONS[name]
    )
    torch.testing.assert_close(attend(backend="onchip"), attend(backend="native"))


@pytest.mark.parametrize("lengths", [(20, 33), (33, 20)])
def test_causal_is_aligned_top_left(lengths):
    q, k = draw(1, lengths[0], 2, 16), draw(1, lengths[1], 2, 16)
    results = [
        dispatch.dispatch_attention_fn(q, k, k, is_causal=True, backend=name)
        for name in ("onchip", "native")
    ]
    torch.testing.assert_close(*results)


def test_a_mask_of_onchip_is_the_mask_of_a_call():
    q = draw(1, 60, 2, 16)
    mask = masks.neighborhood((3, 4, 5), 3)
    with dispatch.attention_backend("onchip"):
        found = dispatch.dispatch_attention_fn(q, q, q, attn_mask=mask)
    torch.testing.assert_close(found, onchip.attention(q, q, q, mask=mask))


def test_what_is_not_served_is_refused():
    q = draw(1, 8, 4, 16)
    attend = partial(dispatch.dispatch_attention_fn, q, backend="onchip")
    with pytest.raises(ValueError, match="give enable_gqa=True"):
        attend(q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match="exclude each other"):
        attend(q, q, is_causal=True, attn_mask=torch.ones(8, 8))
    with pytest.raises(onchip.UnsupportedError, match="context parallelism"):
        attend(q, q, parallel_config=object())


def test_lse_is_returned():
    q = draw(1, 8, 2, 16)
    out, lse = backend.attend(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (1, 2, 8)
