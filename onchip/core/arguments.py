"""Arguments that look right and are not: names of other packages, numbers and flags of other types.
Each is refused with a sentence that says what to write.
"""

import difflib
from collections.abc import Mapping
from numbers import Integral
from typing import Any, NoReturn, cast

import torch

# Names that torch's scaled_dot_product_attention, FlexAttention, flash_attn, vLLM and transformers
# have for what is called otherwise here.
ELSEWHERE = {
    "attention_mask": "mask (bool, True where a key is visible), or bias (added to the scores)",
    "attn_bias": "bias",
    "attn_mask": "mask (bool, True where a key is visible), or bias (added to the scores)",
    "block_mask": "mask, which takes a BlockMask of FlexAttention as it is",
    "block_table": "page_table",
    "block_tables": "page_table",
    "cache_batch_idx": "page_table, whose rows may be chosen: page_table[cache_batch_idx]",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
    "dropout": "dropout_p",
    "dropout_rate": "dropout_p",
    "enable_gqa": "nothing: k and v may always have fewer heads than q",
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
    "score_mod": "bias, alibi_slopes, softcap or mask: a score is not computed by a function",
    "seqused_k": "cache_seqlens",
    "sliding_window": "window_size=(sliding_window - 1, 0)",
    "sm_scale": "softmax_scale",
    "soft_cap": "softcap",
    "v_cache": "v_pages",
    "value": "v",
    "value_cache": "v_pages",
    "window": "window_size=(left, right)",
}


def refuse_unknown(function: str, unknown: Mapping[str, Any], known: Mapping[str, Any]) -> NoReturn:
    """TypeError for the first keyword that a function does not have, with the name that it does."""
    name = next(iter(unknown))
    close = difflib.get_close_matches(name, known, n=1)
    meant = ELSEWHERE.get(name) or (close[0] if close else None)
    hint = "" if meant is None else f": did you mean {meant}?"
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def check_flag(name: str, value: object) -> None:
    """Whether value is True or False: a string, a tensor or a number is not."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def as_int(name: str, value: Any, least: int = 0) -> int:
    """An int (or a symbol of the compiler, or an integer of numpy) of at least `least`."""
    whole = isinstance(value, (int, torch.SymInt, Integral))
    if not whole or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
    return cast(int, value) if isinstance(value, (int, torch.SymInt)) else int(value)


def as_ints(name: str, values: Any) -> list[int]:
    """The ints of a sequence, or of a 1-d tensor or array of an integer dtype."""
    if hasattr(values, "tolist"):  # tensors and arrays
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be a sequence of ints, got {values!r}")
    return [as_int(f"{name}[{i}]", value) for i, value in enumerate(values)]
