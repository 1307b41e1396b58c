"""`attn_implementation="onchip"` for models of transformers: call `register()`, then use the name.

transformers makes a mask once for every kind of layer in a forward, and calls attention once for
every layer. Masks here keep their structure: None if causal is enough, otherwise the interval of
keys that each query sees, int32 (batch or 1, 1, seqlen_q, 2) as in `masks.spans`. So they are
tensors like any other mask of transformers, and pass through caches, checkpoints, graphs and
devices, but their size is linear. A mask that is not an interval is a dense bool mask. The few
cells of a decode step, or of a sequence of a few tokens, are a bias.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from onchip.core import torch_op
from onchip.core.functional import attention, varlen_attention
from onchip.core.problem import UnsupportedError
from onchip.integrations.flash_attn.options import contiguous
from onchip.masks import deferred, mods
from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import DeferredMask
from onchip.models import interface
from onchip.models.interface import options_of
from onchip.models.mask_parsing import ParsedMask, parse_mask

NAME = "onchip"
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_MIN_KEYS = 8  # with fewer, a model that computes with its mask might take two bounds for two keys
_CELLS_PER_STEP = 1 << 24  # of an unknown mask_function
# Models that compute with their masks before attention: the form that each expects, additive as in
# eager attention or bool as in SDPA.
_DENSE_MASKS = {
    "beit": "additive",
    "deepseek_v4": "additive",
    "doge": "additive",
    "lasr_encoder": "bool",
    "nemotron_asr_streaming_encoder": "bool",
    "t5gemma2_decoder": "bool",
}


def register(name: str = NAME, *, precise_delta: bool = False) -> None:
    """Make attn_implementation=name available to models. Models that are loaded already do not
    change; call `model.set_attn_implementation(name)`. precise_delta: as in `onchip.attention`, for
    all training under this name.
    """
    if "flash" in name or "/" in name or "|" in name:
        raise ValueError(
            f"name={name!r} has another meaning in transformers: take one without 'flash', / and |"
        )
    serve = partial(attend, precise_delta=True) if precise_delta else attend
    interface.register(name, serve, mask)


class _MaskFrame(NamedTuple):
    """The positions of a mask: query i is at q_offset + i, key j at kv_offset + j."""

    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int

    @property
    def num_reachable(self) -> int:
        """The number of keys that are not after the last query."""
        return min(self.kv_length, self.q_offset + self.q_length - self.kv_offset)


class _KnownBounds(NamedTuple):
    """Known properties of bounds: they are over kv_length keys, and equal `options` over the first
    seqlen_k of them, or `within` inside each document. None: no options equal them.
    """

    kv_length: int
    seqlen_k: int = 0
    options: dict[str, Any] | None = None
    within: dict[str, Any] | None = None


_known_bounds: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for transformers: query q sees key k if mask_function(batch, head, q, k) of their
    positions, and if attention_mask, bool (batch, keys), does not hide the key.
    """
    arguments = kwargs | {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    arguments |= {"kv_offset": kv_offset, "mask_function": mask_function}
    arguments |= {"attention_mask": attention_mask}
    form = _DENSE_MASKS.get(getattr(kwargs.get("config"), "model_type", ""))
    if form is not None:
        cells = _cells(arguments)
        return cells if form == "bool" else _additive(cells, kwargs.get("dtype", torch.float32))
    if q_length == 1 or kv_length < _MIN_KEYS:
        return _additive(_sdpa_mask(arguments), kwargs.get("dtype", torch.float32))
    if torch.compiler.is_compiling():
        return _mask_in_graph(arguments)
    frame = _MaskFrame(q_length, kv_length, int(q_offset), kv_offset)
    reading = None if kwargs.get("use_vmap") else _read(mask_function)
    mask_ = (
        _mask_from_cells(frame, arguments)
        if reading is None
        else _mask_from_structure(frame, reading, arguments)
    )
    if mask_ is not None and mask_ not in _known_bounds and mask_.dtype != torch.bool:
        _known_bounds[mask_] = _KnownBounds(kv_length)
    return mask_


def _read(mask_function: Callable[..., Tensor]) -> ParsedMask | None:
    from transformers import masking_utils

    return parse_mask(mask_function, masking_utils)


def _mask_from_structure(
    frame: _MaskFrame, reading: ParsedMask, arguments: dict[str, Any]
) -> Tensor | None:
    keys = frame.num_reachable if reading.has("causal_mask_function") else frame.kv_length
    unpadded = _unpadded_keys(frame, arguments["attention_mask"])
    if unpadded is not None and not bool(unpadded[:, :keys].all()):
        bounds = _without_padding(_bounds(frame, reading, arguments["device"]), unpadded)
        return _cells(arguments) if bounds is None else bounds
    options = reading.options()
    if options is not None and _may_skip(frame, options, arguments):
        return None
    bounds = _bounds(frame, reading, arguments["device"])
    if frame.q_offset + frame.q_length == frame.kv_offset + keys:
        documents = reading.without("packed_sequence_mask_function")
        _known_bounds[bounds] = _KnownBounds(frame.kv_length, keys, options, documents.options())
    return bounds


def _may_skip(frame: _MaskFrame, options: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether no mask is needed: causal attention over as many keys as queries does the same."""
    if options == {"causal": True}:
        return (
            arguments.get("allow_is_causal_skip", True) and frame.q_offset == frame.kv_offset == 0
        )
    return options == {"causal": False} and arguments.get("allow_is_bidirectional_skip", False)


def _bounds(frame: _MaskFrame, reading: ParsedMask, device: torch.device | str) -> Tensor:
    q = torch.arange(frame.q_length, device=device) + frame.q_offset
    both = torch.stack(reading.bounds(q, frame.kv_offset + frame.kv_length), -1)
    return (both - frame.kv_offset).clamp(0, frame.kv_length).int()[:, None]


def _unpadded_keys(frame: _MaskFrame, attention_mask: Tensor | None) -> Tensor | None:
    """bool (batch, kv_length): keys without padding. Keys beyond attention_mask are padding."""
    if attention_mask is None:
        return None
    unpadded = attention_mask[:, frame.kv_offset : frame.kv_offset + frame.kv_length]
    return nn.functional.pad(unpadded, (0, frame.kv_length - unpadded.shape[1]))


def _without_padding(bounds: Tensor, seen: Tensor) -> Tensor | None:
    """The bounds within the unpadded keys; None if these have gaps."""
    first, last = (side[:, None, None, None] for side in _first_and_end(seen))
    count = seen.sum(-1)[:, None, None, None]
    if bool((count < last - first).any()):
        return None
    lo, hi = bounds[..., :1], bounds[..., 1:]
    return torch.cat([torch.maximum(lo, first), torch.minimum(hi, last)], -1).int()


def _first_and_end(seen: Tensor) -> tuple[Tensor, Tensor]:
    """First and end of the true elements along the last dimension: (size, 0) if there are none."""
    size = seen.shape[-1]
    at = torch.arange(size, device=seen.device)
    return torch.where(seen, at, size).amin(-1), torch.where(seen, at + 1, 0).amax(-1)


def _mask_from_cells(frame: _MaskFrame, arguments: dict[str, Any]) -> Tensor:
    """Bounds of an unknown mask_function, a few rows at a time; its cells if rows have gaps."""
    step, bounds = max(1, _CELLS_PER_STEP // frame.kv_length), []
    for start in range(0, frame.q_length, step):
        rows = {"q_length": min(step, frame.q_length - start), "q_offset": frame.q_offset + start}
        cells = _cells(arguments | rows)
        bounds.append(_bounds_from_cells(cells))
        if bool((bounds[-1] < 0).any()):
            return cells if step >= frame.q_length else _cells(arguments)
    return torch.cat(bounds, 2)


def _cells(arguments: dict[str, Any]) -> Tensor:
    """bool (batch, 1, q_length, kv_length)"""
    always = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return cast(Tensor, _sdpa_mask(arguments | always))


def _bounds_from_cells(cells: Tensor) -> Tensor:
    """The bounds of each row; -1 if the row has gaps."""
    first, last = _first_and_end(cells)
    gaps = cells.sum(-1) < last - first
    return torch.stack([first, last], -1).int().masked_fill(gaps[..., None], -1)


def _mask_in_graph(arguments: dict[str, Any]) -> Tensor | None:
    """The mask in a graph that is being compiled, where only shapes are known. Bounds are reduced
    from cells, which a compiler need not materialise. `masks.spans` refuses them if a row has gaps.
    """
    from transformers.masking_utils import causal_mask_function

    rule, offset = arguments["mask_function"], arguments["q_offset"]
    starts = not isinstance(offset, Tensor) and offset == 0 and arguments["kv_offset"] == 0
    plain = rule is causal_mask_function and arguments["attention_mask"] is None
    if plain and starts and arguments.get("allow_is_causal_skip", True):
        return None
    cells = _cells(arguments)
    has_gaps = (
        arguments.get("use_vmap") or rule.__name__ == "or_mask"
    )  # unions are not always intervals
    return torch_op.build_once(
        cells if has_gaps else _bounds_from_cells(cells), arguments["kv_length"]
    )


def _additive(cells: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if cells is None:
        return None
    zero = torch.zeros((), dtype=dtype, device=cells.device)
    return torch.where(cells, zero, torch.finfo(dtype).min)


def _sdpa_mask(arguments: dict[str, Any]) -> Tensor | None:
    # a compiler cannot trace `from transformers import masking_utils`
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**arguments)


class _AttentionCall(NamedTuple):
    """One call of `attention`, in its layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    options: dict[str, Any]

    def run(self) -> Tensor:
        return attention(self.q, self.k, self.v, bias=self.bias, **self.options)  # pyright: ignore[reportReturnType]

    def with_options(self, **options: Any) -> "_AttentionCall":
        return self._replace(options=self.options | options)

    def with_first_keys(self, seqlen_k: int) -> "_AttentionCall":
        """The call over the first seqlen_k keys."""
        if seqlen_k == self.k.shape[1]:
            return self
        bias = None if self.bias is None else self.bias[..., :seqlen_k]
        return self._replace(k=self.k[:, :seqlen_k], v=self.v[:, :seqlen_k], bias=bias)

    def without_mask(self, is_causal: bool) -> "_AttentionCall":
        """The call without a mask. A single query sees all keys; of several, the first sees the
        first key. There are more keys than queries only if a cache of fixed size was empty.
        """
        if not is_causal or self.q.shape[1] == 1:
            return self
        return self.with_first_keys(self.q.shape[1]).with_options(causal=True)

    def with_mask(self, mask: Tensor) -> "_AttentionCall":
        if mask.is_floating_point():
            return self._replace(bias=mask if self.bias is None else self.bias + mask)
        if mask.dtype != torch.bool and not mods.is_spans(mask):
            raise UnsupportedError(
                f"an attention mask of {mask.dtype} {tuple(mask.shape)} is neither bool nor float:"
                " a model that computes with its masks needs attn_implementation='eager'"
            )
        if torch.compiler.is_compiling():
            return self.with_options(mask=mask)
        known = _known_bounds.get(mask)
        if known is not None and known.kv_length != self.k.shape[1]:
            raise UnsupportedError(
                f"the mask is over {known.kv_length} keys, the call has {self.k.shape[1]} keys"
            )
        if known is not None and known.options is not None:
            return self.with_first_keys(known.seqlen_k).with_options(**known.options)
        return self.with_options(mask=_blocks(mask, self.q.shape[1], self.k.shape[1]))


def _blocks(mask: Tensor, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """The block mask, built once for all layers. A dense mask that a caller may write to is not
    cached if it is a tensor of inference mode, which does not count writes.
    """
    built = DeferredMask(mask, seqlen_q, seqlen_k).built()
    if mods.is_spans(mask) or not mask.is_inference():
        deferred.keep(mask, built)
    return built


class _PackedRow(NamedTuple):
    """Sequences packed in one row, from the arguments of a flattening collator."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def pop_from(cls, kwargs: dict[str, Any]) -> "_PackedRow | None":
        values = [kwargs.pop(name, None) for name in _PACKING]
        if values[0] is None or values[1] is None:
            return None
        offsets, longest = [cu.int() for cu in values[:2]], values[2:]
        longest = [
            int(cu.diff().max() if most is None else most)
            for cu, most in zip(offsets, longest, strict=True)
        ]
        return cls(*offsets, *longest)

    @classmethod
    def from_positions(cls, position_ids: Tensor) -> "_PackedRow | None":
        """The sequences of a row, from positions (1, seqlen) that begin at 0 again; None if it is
        one sequence, or if positions do not count from 0.
        """
        at = position_ids[0]
        begins = at == 0
        counts = begins[1:] | (at[1:] == at[:-1] + 1)
        if not bool(begins[0] & begins[1:].any() & counts.all()):
            return None
        end = torch.tensor([at.shape[0]], device=at.device)
        offsets = torch.cat([begins.nonzero()[:, 0], end]).int()
        longest = int(at.max()) + 1
        return cls(offsets, offsets, longest, longest)

    def attend(self, call: _AttentionCall, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Use options if they equal the mask within each sequence, else the mask."""
        if mask is None:
            return self._packed(call.with_options(causal=is_causal))
        if torch.compiler.is_compiling():
            return call.with_mask(torch_op.build_once(self.restrict(mask), call.k.shape[1])).run()
        known = _known_bounds.get(mask)
        if known is not None and known.within is not None:
            return self._packed(call.with_options(**known.within))
        return call.with_mask(self.restrict(mask)).run()

    def _packed(self, call: _AttentionCall) -> Tensor:
        if call.q.shape[0] != 1 or call.bias is not None:
            raise UnsupportedError(
                f"cu_seq_lens of a batch of {call.q.shape[0]}, or with a position bias: pack"
                " sequences in one row, without a bias"
            )
        q, k, v = (t[0] for t in call[:3])
        out = varlen_attention(q, k, v, *self, **call.options)
        return out[None]  # pyright: ignore[reportArgumentType, reportCallIssue]

    def restrict(self, mask: Tensor) -> Tensor:
        """The mask, of any kind, without keys of other sequences."""
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: query, key, value (batch, num_heads, seqlen, head_dim); out
    (batch, seqlen_q, num_heads, head_dim_v).
    """
    if kwargs.get("output_attentions") or _records_attentions():
        raise UnsupportedError(
            "output_attentions needs probabilities, which are never stored: use"
            " attn_implementation='eager', or onchip.attention_weights for some rows"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    batch = max(query.shape[0], key.shape[0])  # Q-Former has one row of queries for all, as in SDPA
    query, key, value = (_with_batch(t, batch) for t in (query, key, value))
    packing = _PackedRow.pop_from(kwargs)
    if packing is None and is_causal:
        packing = _packed_by_positions(kwargs.get("position_ids"), attention_mask, query, key)
    # Kernels read whole vectors of head_dim elements; Florence-2 passes transposed ones.
    q, k, v = (contiguous(t).transpose(1, 2) for t in (query, key, value))
    options = options_of(kwargs) | {"dropout_p": dropout, "precise_delta": precise_delta}
    call = _AttentionCall(q, k, v, position_bias, options)
    if packing is not None:
        return packing.attend(call, attention_mask, is_causal), None
    if attention_mask is None:
        return call.without_mask(is_causal).run(), None
    return call.with_mask(attention_mask).run(), None


def _with_batch(t: Tensor, batch: int) -> Tensor:
    return t.expand(batch, -1, -1, -1) if t.shape[0] == 1 != batch else t


_rows_by_positions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _packed_by_positions(
    position_ids: Tensor | None, mask: Tensor | None, query: Tensor, key: Tensor
) -> _PackedRow | None:
    """The sequences of a row whose positions begin at 0 again, as transformers finds them for
    flash_attention_2: some models (AFMoE, GPT-OSS) give position_ids to attention, but not to the
    mask. Values are read once for all layers, and not in a graph that is compiled or captured.
    """
    if position_ids is None or position_ids.shape != (1, key.shape[2]) or query.shape[0] != 1:
        return None
    if query.shape[2] != key.shape[2] or key.shape[2] < 2 or torch.compiler.is_compiling():
        return None
    known = None if mask is None else _known_bounds.get(mask)
    if mask is not None and (known is None or known.options is None):
        return None  # the mask has structure of its own
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if position_ids.is_inference():
        return _PackedRow.from_positions(position_ids)
    known_row = _rows_by_positions.get(position_ids)
    if known_row is None or known_row[0] != position_ids._version:
        known_row = position_ids._version, _PackedRow.from_positions(position_ids)
        _rows_by_positions[position_ids] = known_row
    return known_row[1]


def _records_attentions() -> bool:
    """Whether the running model collects the probabilities that its modules return: most models
    read output_attentions themselves and do not pass it on.
    """
    from transformers.utils import output_capturing

    active = output_capturing._active_collector.get()
    return active is not None and any("attentions" in key for key in active)
