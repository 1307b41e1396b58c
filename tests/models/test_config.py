"""config.json: every field is read, known to be harmless, or refused."""

import json
import math
from copy import deepcopy
from functools import reduce
from itertools import product
from operator import getitem

import pytest
import torch

from onchip.models import ModelConfig, Rotary, num_parameters
from onchip.models.rotary import frequencies


def test_a_config_keeps_its_source(llama):
    config = ModelConfig.from_hf(llama)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.head_dim, config.max_seqlen, config.eos_token_ids) == (12, 512, (130,))
    assert config.layers[0].rotary == Rotary(theta=500.0, dim=12)
    assert json.loads(config.source) == llama


def test_old_and_new_spellings_give_one_config(data):
    """The config as transformers 5 writes it, and the file it was read from."""
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
        ("mixtral", [7, 7, 7]),
        ("gpt_oss", [7, None, 7]),
        ("qwen3_moe", [None, None, None]),
        ("llama", [None, None, None]),
    ],
    indirect=["family"],
)
def test_layers_with_a_window_follow_the_family(data, kinds):
    assert [layer.window for layer in ModelConfig.from_hf(data).layers] == kinds


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not one of llama"),
        ({"model_type": None}, "model_type=None is not one of"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.* may change the mathematics"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"hidden_act": "mish"}, "activation 'mish' is not one of silu"),
        ({"hidden_size": "48"}, "hidden_size='48' must be an integer"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' in config.json of llama must be"),
        ({"mlp_bias": 1}, "mlp_bias=1 in config.json of llama must be true or"),
        ({"rope_scaling": 3}, "rope_scaling=3 in .* must be an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "keys that are cached already"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral' is not one of default"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters has no factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}},
            "beta=1 in rope_parameters is not known",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"eos_token_id": ["</s>"]}, "token id '</s>'"),
        ({"bos_token_id": True}, "token id True"),
    ],
)
def test_unsupported_fields_are_refused(llama, change, sentence):
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
def test_unsupported_fields_of_a_family_are_refused(data, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(data | change)


@pytest.mark.parametrize(
    "family, name",
    [
        ("mistral", "sliding_window"),
        ("mistral", "num_key_value_heads"),
        ("qwen2-sliding", "max_window_layers"),
        ("qwen3", "head_dim"),
        ("mixtral", "sliding_window"),
        ("mixtral", "num_key_value_heads"),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "head_dim"),
        ("qwen2_moe", "norm_topk_prob"),
        ("qwen3_moe", "norm_topk_prob"),
        ("qwen3_moe", "num_experts_per_tok"),
        ("gemma", "head_dim"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma3_text", "sliding_window"),
        ("llama", "rms_norm_eps"),
        ("gpt2", "n_positions"),
    ],
    indirect=["family"],
)
def test_no_default_is_guessed(data, name):
    """For fields where a transformers class has its own default."""
    del data[name]
    with pytest.raises(ValueError, match=f"has no {name}"):
        ModelConfig.from_hf(data)


def test_a_field_may_be_declared_harmless(llama):
    llama["our_own_note"] = "x"
    with pytest.raises(ValueError, match="pass ignore=\\['our_own_note'\\]"):
        ModelConfig.from_hf(llama)
    assert ModelConfig.from_hf(llama, ignore=["our_own_note"]).num_layers == 3


def paths(data):
    """The path to every value, including values of nested objects."""
    for name, value in data.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in paths(value))


def test_random_values_are_refused_or_accepted(data):
    """Any field may hold any value: the result is a ValueError or a config, nothing else."""
    transformers = pytest.importorskip("transformers")
    new = transformers.AutoConfig.for_model(**deepcopy(data)).to_dict()
    nonsense = (-1, 0, 1.5, "x", [], [1], {}, {"a": 1}, True, 10**30, math.nan, math.inf)
    refused = 0
    for spelling, value in product((data, new), nonsense):
        for *outer, last in paths(spelling):
            changed = deepcopy(spelling)
            reduce(getitem, outer, changed)[last] = value
            try:
                ModelConfig.from_hf(changed)
            except ValueError as error:
                refused += len(str(error)) > 20
    assert refused > 150


def test_a_config_that_is_not_an_object_is_refused():
    with pytest.raises(ValueError, match="must hold an object, got list"):
        ModelConfig.from_hf([])


def published(model_type, sizes, **more):
    """A config.json: sizes are layers, width, inner, heads, kv heads, head_dim, vocabulary."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "vocab_size")
    base = {"model_type": model_type, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    return base | dict(zip(names, sizes, strict=True)) | more


GEMMA3 = {"query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6}
GEMMA2 = {"query_pre_attn_scalar": 256, "sliding_window": 4096}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
TIED = {"tie_word_embeddings": True}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN2_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
QWEN2_MOE |= {"norm_topk_prob": False, "shared_expert_intermediate_size": 5632}
GPT_OSS = {"num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150_000}
GPT_OSS |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False}}
QWEN3_MOE |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


@pytest.mark.parametrize(
    "data, count",
    [
        (published("llama", (32, 4096, 11008, 32, 32, 128, 32000)), 6_738_415_616),
        (published("llama", (32, 4096, 14336, 32, 8, 128, 128256)), 8_030_261_248),
        (
            published("mistral", (32, 4096, 14336, 32, 8, 128, 32000), sliding_window=4096),
            7_241_732_096,
        ),
        (published("qwen2", (24, 896, 4864, 14, 2, 64, 151936), **TIED), 494_032_768),
        (published("qwen3", (28, 1024, 3072, 16, 8, 128, 151936), **TIED), 596_049_920),
        (
            published("mixtral", (32, 4096, 14336, 32, 8, 128, 32000), **MIXTRAL),
            46_702_792_704,
        ),
        (
            published("qwen2_moe", (24, 2048, 5632, 16, 16, 128, 151936), **QWEN2_MOE),
            14_315_784_192,
        ),
        (
            published("qwen3_moe", (48, 2048, 6144, 32, 4, 128, 151936), **QWEN3_MOE),
            30_532_122_624,
        ),
        (
            published(
                "gpt_oss", (24, 2880, 2880, 64, 8, 64, 201088), **GPT_OSS, num_local_experts=32
            ),
            20_914_757_184,
        ),
        (
            published(
                "gpt_oss", (36, 2880, 2880, 64, 8, 64, 201088), **GPT_OSS, num_local_experts=128
            ),
            116_829_156_672,
        ),
        (published("gemma", (18, 2048, 16384, 8, 1, 256, 256000)), 2_506_172_416),
        (published("gemma2", (26, 2304, 9216, 8, 4, 256, 256000), **GEMMA2), 2_614_341_888),
        (published("gemma3_text", (26, 1152, 6912, 4, 1, 256, 262144), **GEMMA3), 999_885_952),
        (published("phi3", (32, 3072, 8192, 32, 32, 96, 32064)), 3_821_079_552),
        (GPT2 | {"n_positions": 1024}, 124_439_808),
    ],
    ids=[
        "Llama-2-7B",
        "Llama-3-8B",
        "Mistral-7B-v0.1",
        "Qwen2.5-0.5B",
        "Qwen3-0.6B",
        "Mixtral-8x7B-v0.1",
        "Qwen1.5-MoE-A2.7B",
        "Qwen3-30B-A3B",
        "gpt-oss-20b",
        "gpt-oss-120b",
        "Gemma-2B",
        "Gemma-2-2B",
        "Gemma-3-1B",
        "Phi-3-mini-4k",
        "GPT-2",
    ],
)
def test_published_models_have_the_published_number_of_parameters(data, count):
    """As in their model cards, tied heads counted once."""
    assert num_parameters(ModelConfig.from_hf(data)) == count


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
    """High frequencies are kept, low ones divided by the factor, and their order is the same."""
    scaled = frequencies(rotary, torch.device("cpu"))
    plain = frequencies(Rotary(rotary.theta, rotary.dim), torch.device("cpu"))
    assert (scaled.diff() < 0).all() and scaled.dtype == torch.float32
    assert scaled[-1] == pytest.approx((plain[-1] / rotary.factor).item(), rel=1e-6)
    if rotary.kind != "linear":
        assert scaled[0] == 1


@pytest.mark.parametrize(
    "values, sentence",
    [
        ((1e4, 7), "must be even"),
        ((0.5, 8), "must be above 1"),
        ((1e4, 8, "linear", 0.0), "above 0"),
        ((1e4, 8, "llama3", 8.0, 4.0, 4.0, 100), "high=4.0 above low=4.0"),
        ((1e4, 8, "yarn", 8.0, 1.0, 4.0, 0), "original=0"),
        ((1e4, 8, "yarn", 8.0, 4.0, 3.0, 100), "high=3.0 to be at least low=4.0"),
    ],
)
def test_invalid_rotations_are_refused(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        Rotary(*values)
