"""Tiny configs of every family, as in a config.json."""

from copy import deepcopy

import pytest

_BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [130],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_EXACT_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
_SLIDING = {"sliding_window": 7}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
}
_DEEP_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_theta": 500.0},
    "llama-linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama-llama3": {"rope_theta": 5e5, "rope_scaling": _LLAMA3, "tie_word_embeddings": True},
    "mistral": {**_SLIDING, "head_dim": 8},
    "qwen2": {"rope_theta": 1e6, "rope_scaling": _YARN},
    "qwen2-sliding": {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 20, "tie_word_embeddings": True},
    "mixtral": {**_SLIDING, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "mlp_only_layers": [2],
    },
    "qwen3_moe": {
        "head_dim": 20,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {
        **_SLIDING,
        "head_dim": 20,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_theta": 1.5e5,
        "rope_scaling": _EXACT_YARN,
        "swiglu_limit": 1.5,
    },
    "deepseek_v2": {**_LATENT, "rope_scaling": _DEEP_YARN},
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 28,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {**_DEEP_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 0,
    },
    "gemma": {"head_dim": 20, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1},
    "gemma2": {
        **_SLIDING,
        "head_dim": 20,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **_SLIDING,
        "head_dim": 20,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 2,
        "rope_theta": 5e4,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0, **_SLIDING},
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "eos_token_id": 130,
    "bos_token_id": 130,
}


def fields(family):
    """The fields of a config.json, a fresh dict: transformers modifies its argument."""
    if family == "gpt2":
        return dict(GPT2)
    return deepcopy({"model_type": family.split("-")[0]} | _BASE | FAMILIES[family])


@pytest.fixture(params=[*FAMILIES, "gpt2"])
def family(request):
    return request.param


@pytest.fixture
def data(family):
    return fields(family)


@pytest.fixture
def llama():
    return fields("llama")
