"""The attention layout of a transformers model: found by running it on the meta device, before its
weights are read.
"""

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import DTYPES, UnsupportedError, check_head_dims
from onchip.models import interface
from onchip.models.config import MAX_LAYERS
from onchip.models.interface import MaskFunction

_TOKENS = 3
# The cache layers of transformers that hold keys and values alone, all or the last of them.
_KEYS_AND_VALUES = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # rope types with frequencies that change with length


class Heads(NamedTuple):
    """The head counts, dimensions and dtype of one attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionLayout:
    """The result of `probe`. windows: of each attention, in the order of the calls. heads: of the
    first; num_kv_heads, dimensions and dtype are the same for all. selects_rows: whether the model
    can compute logits of chosen rows only.
    """

    heads: Heads
    windows: tuple[int | None, ...]
    vocab_size: int
    logits_dtype: torch.dtype
    selects_rows: bool


class _AttentionRecorder:
    """An `AttentionHandler` that records shapes and windows, and returns an empty result."""

    def __init__(self) -> None:
        self.heads: list[Heads] = []
        self.windows: list[int | None] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, rule: MaskFunction, options: dict[str, Any]
    ) -> Tensor:
        if len({t.dtype for t in (q, k, v)}) > 1:
            raise UnsupportedError("queries, keys and values of a layer differ in dtype")
        shape = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        self.heads.append(Heads(*shape, k.dtype))
        self.windows.append(rule.window())
        return q.new_empty(*q.shape[:2], v.shape[2])


def check_config(config: Any, transformers: ModuleType) -> None:
    """Refuse by the config alone: layers with other state than keys and values, or frequencies that
    would make cached keys wrong.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("it has an encoder")
    text = config.get_text_config()
    if not 1 <= text.num_hidden_layers <= MAX_LAYERS:
        raise ValueError(f"{text.num_hidden_layers} layers are not in 1 to {MAX_LAYERS}")
    kinds = {type(layer).__name__ for layer in transformers.DynamicCache(config=text).layers}
    if others := sorted(kinds - _KEYS_AND_VALUES):
        raise UnsupportedError(
            f"its layers keep more state than keys and values ({', '.join(others)})"
        )
    if growing := sorted(_rope_types(getattr(text, "rope_parameters", None)) & _LENGTH_DEPENDENT):
        raise UnsupportedError(
            f"its rotary frequencies change with the length ({growing[0]}), so cached keys would"
            " be wrong"
        )


def probe(model: Any, transformers: ModuleType) -> AttentionLayout:
    """The layout of a model of transformers on the meta device."""
    named = inspect.signature(model.forward).parameters
    if "position_ids" not in named:
        raise UnsupportedError("it takes no position_ids, so tokens cannot be given positions")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # routes without reading values
    recorder, selects_rows = _AttentionRecorder(), "logits_to_keep" in named
    keep = (
        {"logits_to_keep": torch.zeros(1, dtype=torch.long, device="meta")} if selects_rows else {}
    )
    with interface.handle_attention(recorder), torch.no_grad():
        zeros = torch.zeros(_TOKENS, dtype=torch.long, device="meta")
        logits = call(model, zeros, position_ids=zeros[None], **keep)
    if logits.shape[0] != (1 if selects_rows else _TOKENS):
        raise UnsupportedError(f"it gives {logits.shape[0]} rows of logits for {_TOKENS} tokens")
    _check_memory(recorder, model.config.get_text_config(), transformers)
    return AttentionLayout(
        _common(recorder.heads),
        tuple(recorder.windows),
        logits.shape[-1],
        logits.dtype,
        selects_rows,
    )


def call(model: Any, tokens: Tensor, **named: Any) -> Tensor:
    """Logits (rows, vocab_size) of tokens (num_tokens,) by transformers, without its cache. The
    mask is all ones, as in its `generate`: without a mask it would search for packed sequences.
    """
    inputs = {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None]}
    answer = model(**inputs, use_cache=False, return_dict=True, **named)
    return answer.logits[0]


def _check_memory(recorder: _AttentionRecorder, config: Any, transformers: ModuleType) -> None:
    """Raise unless every layer with keys and values in transformers' cache calls the interface,
    with the window of its cache layer.
    """
    count, layers = len(recorder.heads), transformers.DynamicCache(config=config).layers
    if not count or count < len(layers):
        raise UnsupportedError(
            f"{count} of its {len(layers) or 1} layers use the attention interface of transformers"
        )
    cache_windows = [getattr(layer, "sliding_window", None) for layer in layers]
    if count == len(layers) and cache_windows != recorder.windows:
        raise UnsupportedError(
            f"its masks have windows {_distinct(recorder.windows)},"
            f" its cache has {_distinct(cache_windows)}"
        )


def _distinct(windows: list[int | None]) -> str:
    return ", ".join(map(str, dict.fromkeys(windows)))


def _common(heads: list[Heads]) -> Heads:
    """The shape of the first layer; a ValueError unless its pages fit all layers."""
    first = heads[0]
    for other in heads:
        if other[1:] != first[1:]:
            raise UnsupportedError(f"layers differ in their keys and values: {first} and {other}")
        if other.num_heads % other.num_kv_heads:
            raise UnsupportedError(f"{other} has no whole group of heads")
    try:
        check_head_dims(first.head_dim, first.head_dim_v)
    except ValueError as error:
        raise UnsupportedError(f"{first} is too wide: {error}") from error
    if first.dtype not in DTYPES:
        raise UnsupportedError(f"{first} is not of {', '.join(map(str, DTYPES))}")
    return first


def _rope_types(stated: Any) -> set[str]:
    """The rope types in rope_parameters, which may hold a block for each kind of layer."""
    if not isinstance(stated, dict):
        return set()
    inner = set().union(*map(_rope_types, stated.values()))
    return inner | ({stated["rope_type"]} if "rope_type" in stated else set())
