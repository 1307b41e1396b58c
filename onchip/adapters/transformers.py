"""`attn_implementation="onchip"` for models of transformers: call `register()`, then name it.

transformers asks for a mask once for every kind of layer of a forward, and for attention once for
every layer. Masks stay structure: None where causal says it all, otherwise the interval of keys
that each query sees, int32 (batch or 1, 1, seqlen_q, 2) as in `masks.spans`. So they are tensors
like any other mask of transformers, and travel through caches, checkpoints, graphs and devices, but
their size is linear. What is not an interval is a dense bool mask; the few cells of a decode step,
or of a sequence of a few tokens, are a bias.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from onchip import library
from onchip.masks import deferred, mods
from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import Later
from onchip.models import interface
from onchip.models.interface import options_of
from onchip.models.mask_parsing import ParsedMask, parse_mask
from onchip.ops import attention, varlen_attention
from onchip.problem import UnsupportedError

NAME = "onchip"
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_FEW_KEYS = 8  # or a model that computes with its mask might take two bounds for two keys
_CELLS_AT_ONCE = 1 << 24  # of a rule that is not known
# Models that compute with their masks before they hand them over take those of eager attention.
_ADDITIVE = frozenset({"deepseek_v4", "doge"})


def register(name: str = NAME, *, precise_delta: bool = False) -> None:
    """From now on models take attn_implementation=name. Nothing that is loaded already changes;
    call `model.set_attn_implementation(name)`. precise_delta: as of `onchip.attention`, for all
    that trains under this name.
    """
    if "flash" in name or "/" in name or "|" in name:
        raise ValueError(
            f"name={name!r} means something else to transformers: take one without 'flash', / and |"
        )
    serve = partial(attend, precise_delta=True) if precise_delta else attend
    interface.register(name, serve, mask)


class _Frame(NamedTuple):
    """Where a mask lies: query i stands at position q_offset + i, key j at kv_offset + j."""

    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int

    @property
    def reach(self) -> int:
        """How many of the keys are not behind the last query."""
        return min(self.kv_length, self.q_offset + self.q_length - self.kv_offset)


class _Meaning(NamedTuple):
    """What is known about bounds: they are over kv_length keys, and they say the same as options do
    over the first seqlen_k of them, or as options do within each document; None: they do not.
    """

    kv_length: int
    seqlen_k: int = 0
    options: dict[str, Any] | None = None
    within: dict[str, Any] | None = None


_meanings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    **said: Any,
) -> Tensor | None:
    """A mask for transformers: query q sees key k iff mask_function(batch, head, q, k) over their
    positions, and attention_mask, bool (batch, keys), does not hide the key.
    """
    asked = said | {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    asked |= {"kv_offset": kv_offset, "mask_function": mask_function}
    asked |= {"attention_mask": attention_mask}
    if getattr(said.get("config"), "model_type", None) in _ADDITIVE:
        return _additive(_cells(asked), said.get("dtype", torch.float32))
    if q_length == 1 or kv_length < _FEW_KEYS:
        return _additive(_sdpa_mask(asked), said.get("dtype", torch.float32))
    if torch.compiler.is_compiling():
        return _traced(asked)
    frame = _Frame(q_length, kv_length, int(q_offset), kv_offset)
    reading = None if said.get("use_vmap") else _read(mask_function)
    made = _by_cells(frame, asked) if reading is None else _by_structure(frame, reading, asked)
    if made is not None and made not in _meanings and made.dtype != torch.bool:
        _meanings[made] = _Meaning(kv_length)
    return made


def _read(mask_function: Callable[..., Tensor]) -> ParsedMask | None:
    from transformers import masking_utils

    return parse_mask(mask_function, masking_utils)


def _by_structure(frame: _Frame, reading: ParsedMask, asked: dict[str, Any]) -> Tensor | None:
    keys = frame.reach if reading.has("causal_mask_function") else frame.kv_length
    seen = _seen(frame, asked["attention_mask"])
    if seen is not None and not bool(seen[:, :keys].all()):
        bounds = _without_padding(_bounds(frame, reading, asked["device"]), seen)
        return _cells(asked) if bounds is None else bounds
    options = reading.options()
    if options is not None and _may_skip(frame, options, asked):
        return None
    bounds = _bounds(frame, reading, asked["device"])
    if frame.q_offset + frame.q_length == frame.kv_offset + keys:
        documents = reading.without("packed_sequence_mask_function")
        _meanings[bounds] = _Meaning(frame.kv_length, keys, options, documents.options())
    return bounds


def _may_skip(frame: _Frame, options: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether no mask says the same: to attention that is causal, over as many keys as queries."""
    if options == {"causal": True}:
        return asked.get("allow_is_causal_skip", True) and frame.q_offset == frame.kv_offset == 0
    return options == {"causal": False} and asked.get("allow_is_bidirectional_skip", False)


def _bounds(frame: _Frame, reading: ParsedMask, device: torch.device | str) -> Tensor:
    q = torch.arange(frame.q_length, device=device) + frame.q_offset
    both = torch.stack(reading.bounds(q, frame.kv_offset + frame.kv_length), -1)
    return (both - frame.kv_offset).clamp(0, frame.kv_length).int()[:, None]


def _seen(frame: _Frame, attention_mask: Tensor | None) -> Tensor | None:
    """bool (batch, kv_length): keys that are not padding. Keys that no mask reaches are."""
    if attention_mask is None:
        return None
    seen = attention_mask[:, frame.kv_offset : frame.kv_offset + frame.kv_length]
    return nn.functional.pad(seen, (0, frame.kv_length - seen.shape[1]))


def _without_padding(bounds: Tensor, seen: Tensor) -> Tensor | None:
    """The bounds within what is seen; None where that has gaps."""
    first, last = (side[:, None, None, None] for side in _ends(seen))
    count = seen.sum(-1)[:, None, None, None]
    if bool((count < last - first).any()):
        return None
    lo, hi = bounds[..., :1], bounds[..., 1:]
    return torch.cat([torch.maximum(lo, first), torch.minimum(hi, last)], -1).int()


def _ends(seen: Tensor) -> tuple[Tensor, Tensor]:
    """First and end of what is true along the last dimension: (its size, 0) where nothing is."""
    size = seen.shape[-1]
    at = torch.arange(size, device=seen.device)
    return torch.where(seen, at, size).amin(-1), torch.where(seen, at + 1, 0).amax(-1)


def _by_cells(frame: _Frame, asked: dict[str, Any]) -> Tensor:
    """Bounds of a rule that is not known, a few rows at a time; its cells if it is no interval."""
    step, found = max(1, _CELLS_AT_ONCE // frame.kv_length), []
    for start in range(0, frame.q_length, step):
        rows = {"q_length": min(step, frame.q_length - start), "q_offset": frame.q_offset + start}
        cells = _cells(asked | rows)
        found.append(_bounds_of(cells))
        if bool((found[-1] < 0).any()):
            return cells if step >= frame.q_length else _cells(asked)
    return torch.cat(found, 2)


def _cells(asked: dict[str, Any]) -> Tensor:
    """bool (batch, 1, q_length, kv_length)"""
    always = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return cast(Tensor, _sdpa_mask(asked | always))


def _bounds_of(cells: Tensor) -> Tensor:
    """The bounds of each row; -1 where it has gaps."""
    first, last = _ends(cells)
    gaps = cells.sum(-1) < last - first
    return torch.stack([first, last], -1).int().masked_fill(gaps[..., None], -1)


def _traced(asked: dict[str, Any]) -> Tensor | None:
    """Of a graph that is being compiled, where nothing is known but shapes. Bounds are reduced from
    cells that a compiler need not write down, and refused by `masks.spans` if a row has gaps.
    """
    from transformers.masking_utils import causal_mask_function

    rule, offset = asked["mask_function"], asked["q_offset"]
    starts = not isinstance(offset, Tensor) and offset == 0 and asked["kv_offset"] == 0
    plain = rule is causal_mask_function and asked["attention_mask"] is None
    if plain and starts and asked.get("allow_is_causal_skip", True):
        return None
    cells = _cells(asked)
    odd = asked.get("use_vmap") or rule.__name__ == "or_mask"  # unions are not always intervals
    return library.built_once(cells if odd else _bounds_of(cells), asked["kv_length"])


def _additive(cells: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if cells is None:
        return None
    zero = torch.zeros((), dtype=dtype, device=cells.device)
    return torch.where(cells, zero, torch.finfo(dtype).min)


def _sdpa_mask(asked: dict[str, Any]) -> Tensor | None:
    # `from transformers import masking_utils` is no module to a compiler that traces it
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**asked)


class _Call(NamedTuple):
    """One call of `attention`, in its layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    options: dict[str, Any]

    def run(self) -> Tensor:
        return attention(self.q, self.k, self.v, bias=self.bias, **self.options)  # pyright: ignore[reportReturnType]

    def saying(self, **options: Any) -> "_Call":
        return self._replace(options=self.options | options)

    def over(self, seqlen_k: int) -> "_Call":
        """The first keys alone."""
        if seqlen_k == self.k.shape[1]:
            return self
        bias = None if self.bias is None else self.bias[..., :seqlen_k]
        return self._replace(k=self.k[:, :seqlen_k], v=self.v[:, :seqlen_k], bias=bias)

    def unmasked(self, is_causal: bool) -> "_Call":
        """Without a mask a query alone sees everything; of several, the first sees the first key.
        There are more keys than queries only where a cache of fixed size was empty.
        """
        if not is_causal or self.q.shape[1] == 1:
            return self
        return self.over(self.q.shape[1]).saying(causal=True)

    def masked(self, mask: Tensor) -> "_Call":
        if mask.is_floating_point():
            return self._replace(bias=mask if self.bias is None else self.bias + mask)
        if mask.dtype != torch.bool and not mods.is_spans(mask):
            raise UnsupportedError(
                f"an attention mask of {mask.dtype} {tuple(mask.shape)} is neither bool nor float:"
                " a model that computes with its masks needs attn_implementation='eager'"
            )
        if torch.compiler.is_compiling():
            return self.saying(mask=mask)
        meaning = _meanings.get(mask)
        if meaning is not None and meaning.kv_length != self.k.shape[1]:
            raise UnsupportedError(
                f"a mask over {meaning.kv_length} keys came with {self.k.shape[1]} keys"
            )
        if meaning is not None and meaning.options is not None:
            return self.over(meaning.seqlen_k).saying(**meaning.options)
        return self.saying(mask=_blocks(mask, self.q.shape[1], self.k.shape[1]))


def _blocks(mask: Tensor, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Built once for all layers. A dense mask may be somebody's who writes to it, which tensors of
    inference mode would not tell.
    """
    built = Later(mask, seqlen_q, seqlen_k).built()
    if mods.is_spans(mask) or not mask.is_inference():
        deferred.keep(mask, built)
    return built


class _Packing(NamedTuple):
    """Sequences packed in one row, as collators that flatten say it."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def taken_from(cls, said: dict[str, Any]) -> "_Packing | None":
        found = [said.pop(name, None) for name in _PACKING]
        if found[0] is None or found[1] is None:
            return None
        offsets, longest = [cu.int() for cu in found[:2]], found[2:]
        longest = [
            int(cu.diff().max() if most is None else most)
            for cu, most in zip(offsets, longest, strict=True)
        ]
        return cls(*offsets, *longest)

    def attend(self, call: _Call, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Options where they say what the mask does within each sequence, the mask otherwise."""
        if mask is None:
            return self._packed(call.saying(causal=is_causal))
        if torch.compiler.is_compiling():
            return call.masked(library.built_once(self.within(mask), call.k.shape[1])).run()
        meaning = _meanings.get(mask)
        if meaning is not None and meaning.within is not None:
            return self._packed(call.saying(**meaning.within))
        return call.masked(self.within(mask)).run()

    def _packed(self, call: _Call) -> Tensor:
        if call.q.shape[0] != 1 or call.bias is not None:
            raise UnsupportedError(
                f"cu_seq_lens of a batch of {call.q.shape[0]}, or with a position bias: pack"
                " sequences in one row, without a bias"
            )
        q, k, v = (t[0] for t in call[:3])
        out = varlen_attention(q, k, v, *self, **call.options)
        return out[None]  # pyright: ignore[reportArgumentType, reportCallIssue]

    def within(self, mask: Tensor) -> Tensor:
        """A mask that lets no query leave its sequence, whatever kind of mask it is."""
        at = torch.arange(mask.shape[-2], device=mask.device)
        if mods.is_spans(mask):
            own = torch.searchsorted(self.cu_seqlens_q, at, right=True, out_int32=True) - 1
            lo, hi = self.cu_seqlens_k[own][:, None], self.cu_seqlens_k[own + 1][:, None]
            kept = torch.maximum(mask[..., :1], lo), torch.minimum(mask[..., 1:], hi)
            return torch.cat(kept, -1)
        keys = torch.arange(mask.shape[-1], device=mask.device)
        own = torch.searchsorted(self.cu_seqlens_q, at, right=True)[:, None]
        same = own == torch.searchsorted(self.cu_seqlens_k, keys, right=True)
        if mask.dtype == torch.bool:
            return mask & same
        return mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    precise_delta: bool = False,
    **said: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: query (batch, num_heads, seqlen_q, head_dim), key and value
    alike; out (batch, seqlen_q, num_heads, head_dim_v).
    """
    if said.get("output_attentions") or _records_attentions():
        raise UnsupportedError(
            "output_attentions needs probabilities that are never there: use"
            " attn_implementation='eager', or onchip.attention_weights for some rows"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    packing = _Packing.taken_from(said)
    q, k, v = (_last_contiguous(t).transpose(1, 2) for t in (query, key, value))
    options = options_of(said) | {"dropout_p": dropout, "precise_delta": precise_delta}
    call = _Call(q, k, v, position_bias, options)
    if packing is not None:
        return packing.attend(call, attention_mask, is_causal), None
    if attention_mask is None:
        return call.unmasked(is_causal).run(), None
    return call.masked(attention_mask).run(), None


def _last_contiguous(t: Tensor) -> Tensor:
    """Kernels read whole vectors of head_dim elements; Florence-2 hands over transposed ones."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _records_attentions() -> bool:
    """Whether the model that runs collects the probabilities that its modules return: most models
    read output_attentions themselves and do not hand it on.
    """
    from transformers.utils import output_capturing

    active = output_capturing._active_collector.get()
    return active is not None and any("attentions" in key for key in active)
