"""Weights of torch and transformers load by their names, give the same outputs, and are written
back unchanged.
"""

import copy

import pytest
import torch
from torch import nn

import onchip
from onchip.models.rotary import Rotary
from onchip.nn import LAYOUTS, MultiheadAttention

F64 = {"dtype": torch.float64}
SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}
SIZES |= {"max_position_embeddings": 32, "attn_implementation": "sdpa"}


def random_(module):
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double().eval()


def gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = GPT2Config(**SIZES)
    theirs = random_(GPT2Attention(config, layer_idx=0))
    return theirs, theirs, MultiheadAttention(24, 4, causal=True, **F64)


def gpt_neox():
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.34}
    config = GPTNeoXConfig(**SIZES, rope_parameters=rope)
    theirs = random_(neox.GPTNeoXAttention(config, layer_idx=0))
    call = with_positions(theirs, neox.GPTNeoXRotaryEmbedding(config))
    return theirs, call, MultiheadAttention(24, 4, causal=True, rotary=Rotary(1e4, 2), **F64)


def llama():
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    theirs = random_(llama.LlamaAttention(config, layer_idx=0))
    ours = MultiheadAttention(24, 4, bias=False, num_kv_heads=2, causal=True, rotary=1e4, **F64)
    return theirs, with_positions(theirs, llama.LlamaRotaryEmbedding(config)), ours


def phi3():
    from transformers import Phi3Config
    from transformers.models.phi3 import modeling_phi3 as phi3

    config = Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0)
    theirs = random_(phi3.Phi3Attention(config, layer_idx=0))
    ours = MultiheadAttention(24, 4, bias=False, num_kv_heads=2, causal=True, rotary=1e4, **F64)
    return theirs, with_positions(theirs, phi3.Phi3RotaryEmbedding(config)), ours


def qwen3():
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    theirs = random_(qwen3.Qwen3Attention(config, layer_idx=0))
    options = {"bias": False, "num_kv_heads": 2, "head_dim": 16, "qk_norm": config.rms_norm_eps}
    ours = MultiheadAttention(24, 4, causal=True, rotary=1e4, **options, **F64)
    return theirs, with_positions(theirs, qwen3.Qwen3RotaryEmbedding(config)), ours


def with_positions(module, embedding):
    def call(x):
        turn = [t.double() for t in embedding(x, torch.arange(x.shape[1])[None])]
        return module(x, position_embeddings=turn, attention_mask=None)

    return call


def states_equal(got, expected):
    assert list(got) and got.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t, rtol=0, atol=0)


@pytest.mark.parametrize("family", [gpt2, gpt_neox, llama, phi3, qwen3], ids=lambda f: f.__name__)
def test_layers_of_transformers(family):
    theirs, call, ours = family()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 24, **F64)
    # theirs rotates and normalises in fp32
    torch.testing.assert_close(ours(x)[0], call(x)[0], rtol=0, atol=1e-5)
    layout = "llama" if family is qwen3 else family.__name__
    states_equal(ours.state_dict_as(layout), theirs.state_dict())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [{}, {"kdim": 12, "vdim": 20}], ids=["self", "cross"])
def test_torch(dims, bias):
    theirs = random_(nn.MultiheadAttention(24, 4, bias=bias, batch_first=True, **dims))
    ours = MultiheadAttention(24, 4, bias=bias, **dims, **F64)
    ours.load_state_dict(theirs.state_dict())
    query = torch.randn(2, 9, 24, **F64)
    key, value = (torch.randn(2, 7, dims.get(n, 24), **F64) for n in ("kdim", "vdim"))
    torch.testing.assert_close(ours(query, key, value)[0], theirs(query, key, value)[0])
    states_equal(ours.state_dict_as("torch_kdim" if dims else "torch"), theirs.state_dict())


def test_inside_of_a_model():
    """Names have prefixes, and other weights of the model are untouched."""
    theirs = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "norm": nn.LayerNorm(8)})
    ours = nn.ModuleDict({"attn": MultiheadAttention(8, 2), "norm": nn.LayerNorm(8)})
    ours.load_state_dict(theirs.state_dict())
    states_equal(ours["attn"].state_dict_as("torch"), theirs["attn"].state_dict())
    given = theirs.state_dict()
    ours.load_state_dict(given, assign=True)
    assert given.keys() == theirs.state_dict().keys()  # the caller's dict is not changed
    q, k = (ours["attn"].get_parameter(f"{n}_proj.weight") for n in "qk")
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_recognised_and_inverted(layout):
    module = random_(MultiheadAttention(24, 4, out_bias=False, sinks=True))
    again = MultiheadAttention(24, 4, out_bias=False, sinks=True, **F64)
    written = module.state_dict_as(layout)
    is_ours = written.keys() == again.state_dict().keys()
    assert "sinks" in written and is_ours == (layout == "onchip")
    again.load_state_dict(written)
    states_equal(again.state_dict(), module.state_dict())
    other = copy.deepcopy(again)
    other.load_state_dict(written)


def test_buffers_of_older_checkpoints_are_ignored():
    module = MultiheadAttention(24, 4)
    state = module.state_dict_as("gpt2") | {"bias": torch.ones(1, 1, 9, 9), "masked_bias": 1.0}
    module.load_state_dict(state)


def test_what_does_not_fit_is_a_sentence():
    grouped = MultiheadAttention(24, 4, num_kv_heads=2)
    fused = MultiheadAttention(24, 4).state_dict_as("gpt2")
    sentence = "c_attn.weight has 72 rows of q, k and v; 4 \\+ 2 \\+ 2 heads of head_dim=6 have 48"
    with pytest.raises(ValueError, match=sentence):
        grouped.load_state_dict(fused)
    with pytest.raises(ValueError, match="query_key_value.weight is interleaved by head"):
        grouped.state_dict_as("gpt_neox")
    with pytest.raises(ValueError, match="write 'torch_kdim'"):
        MultiheadAttention(24, 4, kdim=12).state_dict_as("torch")
    with pytest.raises(ValueError, match="layout='bert' is not one of onchip, torch, "):
        grouped.state_dict_as("bert")
    with pytest.raises(RuntimeError, match="(?s)Missing.*q_proj.weight.*Unexpected.*query"):
        grouped.load_state_dict({"query.weight": torch.ones(1)})
    extra = nn.MultiheadAttention(24, 4, add_bias_kv=True)
    with pytest.raises(onchip.UnsupportedError, match="bias_k"):
        MultiheadAttention(24, 4).load_state_dict(extra.state_dict())
    with pytest.raises(onchip.UnsupportedError, match="add_bias_kv"):
        MultiheadAttention.from_torch(extra)
