"""Tiny random models of families that `decoder` does not have, as transformers makes them."""

from functools import cache

import pytest
import torch

_SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS_OF_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_RARER = {
    "ffn_dim": 72,
    "first_k_dense_replace": 1,
    "is_decoder": True,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "sliding_window": 7,
    "topk_group": 1,
}
# The peculiar fields of each model.
SERVED = {
    "opt": {"ffn_dim": 72, "word_embed_proj_dim": 48},  # learned positions from 2 on
    "gpt_neox": {"rotary_pct": 0.5, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # norms of all heads together
    "granite_swa": {**_ALTERNATING, "attention_multiplier": 0.4},  # sinks
    "stablelm": {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "cohere2": {**_ALTERNATING, "logit_scale": 0.5},  # layers without RoPE
    "olmo2": {},
    "deepseek_v3": {  # values narrower than keys
        **_HEADS_OF_MLA,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "granite": {"attention_multiplier": 0.4, "logits_scaling": 0.1},
    "vaultgemma": {**_ALTERNATING, "head_dim": 16, "attn_logit_softcapping": 5.0},
    "phimoe": {**_EXPERTS, "sliding_window": 7},  # a window that is only in its mask
    "diffllama": {},  # two attentions a layer
}


def mark_most_slow(kinds):
    """Model types as parameters of a test, all but a few representative ones marked slow."""
    quick = {"llama", "mistral", "gemma3_text", "gpt_oss", "granite_swa"}
    quick |= {"deepseek_v3", "bert", "t5"}
    marks = lambda kind: () if kind in quick else (pytest.mark.slow,)
    return [pytest.param(kind, marks=marks(kind)) for kind in kinds]


def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def config(kind, **fields):
    """The config of a model_type; fields override the small defaults."""
    import transformers

    quiet()
    return transformers.CONFIG_MAPPING[kind](**_SMALL | SERVED.get(kind, {}) | fields)


def most_of(kind):
    """A small config of any model_type, as far as its fields are known here; None: it is large."""
    import transformers

    known = transformers.CONFIG_MAPPING[kind]().get_text_config()
    names = {*vars(known), *known.attribute_map}
    small = {name: value for name, value in (_SMALL | _RARER).items() if name in names}
    if "kv_lora_rank" in names:
        small |= _HEADS_OF_MLA
    elif "head_dim" in names:
        small["head_dim"] = 16
    made = type(known)(**small)
    with torch.device("meta"):
        one = transformers.AutoModelForCausalLM.from_config(made)
    return made if sum(weight.numel() for weight in one.parameters()) < 20_000_000 else None


@cache
def model(kind):
    """Random weights in fp32 with logits of order one; attention by transformers."""
    return build(config(kind))


def build(made):
    import transformers

    with torch.device("cpu"):
        one = transformers.AutoModelForCausalLM.from_config(
            made, attn_implementation="eager", dtype=torch.float32
        ).eval()
    return randomise(one)


def randomise(one):
    """Weights of such a size that the outputs are of order one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return one


def greedy(one, prompt, count):
    """The greedy tokens of transformers itself."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = one.generate(torch.tensor([prompt]), max_new_tokens=count, **settings)
    return tuple(tokens[0, len(prompt) :].tolist())
