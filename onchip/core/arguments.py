"""Errors for arguments that are nearly right: names of other packages, numbers and flags of the
wrong type. Each error says what to write instead.
"""

import difflib
from collections.abc import Mapping
from numbers import Integral
from typing import Any, NoReturn, cast

import torch

# Names in torch's scaled_dot_product_attention, FlexAttention, flash_attn, vLLM and transformers of
# options that have another name here.
FOREIGN_NAMES = {
    "attention_mask": "mask (bool, True where a key is visible), or bias (added to the scores)",
    "attn_bias": "bias",
    "attn_mask": "mask (bool, True where a key is visible), or bias (added to the scores)",
    "block_mask": "mask, which also takes a BlockMask of FlexAttention",
    "block_table": "page_table",
    "block_tables": "page_table",
    "cache_batch_idx": "page_table with the rows selected: page_table[cache_batch_idx]",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
    "dropout": "dropout_p",
    "dropout_rate": "dropout_p",
    "enable_gqa": "no argument: k and v may always have fewer heads than q",
    "is_causal": "causal, which is aligned bottom-right: the last query sees the last key",
    "k_cache": "k_pages",
    "key": "k",
    "key_cache": "k_pages",
    "kernel_options": "kernel",
    "learnable_sink": "sinks",
    "logits_soft_cap": "softcap",
    "max_seqlen": "max_seqlen_q and max_seqlen_k",
    "p_dropout": "dropout_p",
    "query": "q",
    "return_attn_probs": "return_lse, and attention_weights() for the probabilities of some rows",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "scale": "softmax_scale",
    "seqused_k": "cache_seqlens",
    "sliding_window": "window_size=(sliding_window - 1, 0)",
    "sm_scale": "softmax_scale",
    "soft_cap": "softcap",
    "v_cache": "v_pages",
    "value": "v",
    "value_cache": "v_pages",
    "window": "window_size=(left, right)",
}
# Names of options that another function has: what to call instead.
OTHER_FUNCTIONS = {
    ("varlen_attention", "mask"): (
        "attention(q[None], k[None], v[None], mask=masks.document(cu_seqlens) & ...)"
    ),
    **dict.fromkeys(
        ((name, "score_mod") for name in ("paged_attention", "cascade_attention")),
        "softcap or alibi_slopes, or score_mod of attention() and varlen_attention() over keys that"
        " are not in pages",
    ),
}


def refuse_unknown(function: str, unknown: Mapping[str, Any], known: Mapping[str, Any]) -> NoReturn:
    """Raise TypeError for the first unknown keyword, and suggest the name that the function has."""
    name = next(iter(unknown))
    close = difflib.get_close_matches(name, known, n=1)
    known_name = OTHER_FUNCTIONS.get((function, name)) or FOREIGN_NAMES.get(name)
    suggestion = known_name or (close[0] if close else None)
    hint = "" if suggestion is None else f": did you mean {suggestion}?"
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless value is True or False. Strings, tensors and numbers are refused."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def as_int(name: str, value: Any, least: int = 0) -> int:
    """value as an int of at least `least`. SymInts stay SymInts; numpy's integers are converted."""
    is_integer = isinstance(value, (int, torch.SymInt, Integral))
    if not is_integer or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
    return cast(int, value) if isinstance(value, (int, torch.SymInt)) else int(value)


def as_ints(name: str, values: Any) -> list[int]:
    """The ints of a sequence, or of a 1-d integer tensor or array."""
    if hasattr(values, "tolist"):  # tensors and arrays
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be a sequence of ints, got {values!r}")
    return [as_int(f"{name}[{i}]", value) for i, value in enumerate(values)]
