"""Tiny random models of many families, as transformers makes them: each has something that the
others have not.
"""

from functools import cache

import torch

from tests.models import foreign_models
from tests.models.foreign_models import quiet

_SMALL = foreign_models._SMALL
_SLIDING = {"sliding_window": 7}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], **_SLIDING}
_PAIR = {
    "vocab_size": 131,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 72,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Decoders of text.
DECODERS = {
    "llama": {"attention_bias": True},
    "mistral": {**_SLIDING, "head_dim": 8},
    "qwen2": {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 20},
    "qwen3_moe": {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 20, "num_key_value_heads": 1},
    "gemma2": {**_ALTERNATING, "head_dim": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 24},
    "phi3": _SLIDING,
    "gpt_oss": {**_EXPERTS, **_ALTERNATING, "head_dim": 16},  # sinks
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama4_text": {  # chunks
        "attention_chunk_size": 9,
        "head_dim": 16,
        "num_local_experts": 2,
        "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 72,
        "no_rope_layers": [1, 0],
    },
    "doge": {"keep_window_size": 5},  # computes with its masks
    "deepseek_v4": {  # has more keys than its masks, which it extends itself
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "head_dim": 32,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 2,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["moe", "moe"],
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 24,
        "sliding_window": 8,
    },
    **foreign_models.SERVED,
}
# Models that are not decoders of text.
OTHERS = {
    "bert": _SMALL,
    "roberta": _SMALL,
    "modernbert": {**_SMALL, "local_attention": 6, "global_attn_every_n_layers": 2},
    "vit": {**_SMALL, "image_size": 24, "patch_size": 4},
    "bart": _PAIR,
    "whisper": {**_PAIR, "num_mel_bins": 8, "max_source_positions": 20},
    "t5": {  # a learned position bias
        "vocab_size": 131,
        "d_model": 48,
        "d_kv": 12,
        "d_ff": 72,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
}
_CLASSES = {
    **dict.fromkeys(("bert", "roberta", "modernbert", "vit"), "AutoModel"),
    "whisper": "WhisperForConditionalGeneration",
    **dict.fromkeys(("bart", "t5"), "AutoModelForSeq2SeqLM"),
}


@cache
def model(kind):
    """fp32, with logits of order one."""
    import transformers

    quiet()
    if kind in DECODERS:
        return foreign_models.build(config(kind))
    made = transformers.CONFIG_MAPPING[kind](**OTHERS[kind])
    name = _CLASSES[kind]
    build = getattr(transformers, name)
    build = build.from_config if name.startswith("Auto") else build._from_config
    with torch.device("cpu"):
        one = build(made, attn_implementation="eager").eval()
    return foreign_models.randomise(one)


@torch.no_grad()
def same_experts(one):
    """Make all experts of a layer equal, so that rounding in the router has no effect."""
    for name, weight in one.named_parameters():
        if ".experts." in name:
            weight.copy_(weight[:1].expand_as(weight))
    for module in one.modules():
        if hasattr(module, "router_jitter_noise"):
            module.router_jitter_noise = 1e9  # phimoe then keeps all experts in its softmax
    return one


def config(kind, **fields):
    import transformers

    return transformers.CONFIG_MAPPING[kind](**_SMALL | DECODERS[kind] | fields)


def inputs(kind, batch=3, tokens=23):
    """The inputs of a model that is no decoder of text; right padding if it takes padding."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, 131, (batch, tokens), generator=generator)
    if kind == "vit":
        return {"pixel_values": torch.randn(batch, 3, 24, 24, generator=generator)}
    if kind == "whisper":
        sound = torch.randn(batch, 8, 40, generator=generator)
        return {"input_features": sound, "decoder_input_ids": words[:, :11]}
    inputs = {"input_ids": words, "attention_mask": padding(batch, tokens, "right")}
    return inputs | ({"decoder_input_ids": words[:, :11]} if kind in ("bart", "t5") else {})


def padding(batch, tokens, side):
    """(batch, tokens) of ones, with 0 for five tokens of the first row and two of the last."""
    seen = torch.ones(batch, tokens, dtype=torch.long)
    seen[0, :5] = seen[-1, :2] = 0
    return seen if side == "left" else seen.flip(1)
