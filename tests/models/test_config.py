"""config.json: every field is read, known to be harmless, or refused."""

import json

import pytest
import torch

from onchip.models import ModelConfig, Rotary
from onchip.models.rotary import frequencies


def test_a_config_says_what_it_read(llama):
    config = ModelConfig.from_hf(llama)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.head_dim, config.max_seqlen, config.eos_token_ids) == (12, 512, (130,))
    assert config.layers[0].rotary == Rotary(theta=500.0, dim=12)
    assert json.loads(config.source) == llama


def test_old_and_new_spelling_are_one_model(data):
    """What transformers 5 writes of a config, and the file it was read from."""
    transformers = pytest.importorskip("transformers")
    new = transformers.AutoConfig.for_model(**data).to_dict()
    ours, theirs = ModelConfig.from_hf(data), ModelConfig.from_hf(json.loads(json.dumps(new)))
    assert ours.layers == theirs.layers
    assert ours.softmax_scale == theirs.softmax_scale and ours.activation == theirs.activation


@pytest.mark.parametrize(
    "family, kinds",
    [
        ("mistral", [7, 7, 7]),
        ("qwen2-sliding", [None, 7, 7]),
        ("gemma2", [7, None, 7]),
        ("gemma3_text", [7, None, 7]),
        ("llama", [None, None, None]),
    ],
    indirect=["family"],
)
def test_layers_slide_where_the_family_says(data, kinds):
    assert [layer.window for layer in ModelConfig.from_hf(data).layers] == kinds


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not known here; known are llama"),
        ({"model_type": None}, "model_type=None is not known"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.* may change the mathematics"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"hidden_act": "mish"}, "activation 'mish' is not one of silu"),
        ({"hidden_size": "48"}, "hidden_size='48' must be an integer"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' in config.json must be a number"),
        ({"mlp_bias": 1}, "mlp_bias=1 in config.json must be true or false"),
        ({"rope_scaling": 3}, "rope_scaling=3 in config.json must be an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "keys which are cached already"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral' is not one of default"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "no field 'beta'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_what_is_not_served_is_refused(llama, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(llama | change)


@pytest.mark.parametrize(
    "family, change, sentence",
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "only False is"),
        ("gpt2", {"n_head": 5}, "n_embd=48 must be a multiple of n_head=5"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must be 3 of"),
        ("gemma2", {"sliding_window": None}, "but sliding_window is null"),
        ("phi3", {"partial_rotary_factor": 0.75}, "rotary dim=9 must be even"),
    ],
    indirect=["family"],
)
def test_what_a_family_does_not_serve_is_refused(data, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(data | change)


def test_a_field_may_be_declared_harmless(llama):
    llama["our_own_note"] = "x"
    with pytest.raises(ValueError, match="pass ignore=\\['our_own_note'\\]"):
        ModelConfig.from_hf(llama)
    assert ModelConfig.from_hf(llama, ignore=["our_own_note"]).num_layers == 3


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match="must hold an object, got list"):
        ModelConfig.from_hf([])


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(1e4, 64),
        Rotary(1e4, 64, "linear", 4.0),
        Rotary(5e5, 128, "llama3", 8.0, 1.0, 4.0, 8192),
        Rotary(1e6, 128, "yarn", 4.0, 1.0, 32.0, 32768),
        Rotary(1e6, 128, "yarn", 4.0, 1.0, 32.0, 32768, truncate=False),
    ],
    ids=lambda rotary: rotary.kind,
)
def test_frequencies_fall_from_one(rotary):
    """High frequencies stay, low ones are divided by the factor, none overtakes another."""
    found = frequencies(rotary, torch.device("cpu"))
    plain = frequencies(Rotary(rotary.theta, rotary.dim), torch.device("cpu"))
    assert (found.diff() < 0).all() and found.dtype == torch.float32
    assert found[-1] == pytest.approx((plain[-1] / rotary.factor).item(), rel=1e-6)
    if rotary.kind != "linear":
        assert found[0] == 1


@pytest.mark.parametrize(
    "values, sentence",
    [
        ((1e4, 7), "must be even"),
        ((0.5, 8), "must be above 1"),
        ((1e4, 8, "linear", 0.0), "above 0"),
        ((1e4, 8, "llama3", 8.0, 4.0, 4.0, 100), "self.high=4.0 above self.low=4.0"),
        ((1e4, 8, "yarn", 8.0, 1.0, 4.0, 0), "self.original=0"),
    ],
)
def test_rotations_that_make_no_sense_are_refused(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        Rotary(*values)
