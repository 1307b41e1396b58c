"""flash_attn.bert_padding: batches with padding to packed sequences and back."""

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor


def rearrange(tensor: Tensor, pattern: str, **axes_lengths: int) -> Tensor:
    """einops.rearrange, which programs import from here. The first call loads einops."""
    try:
        einops = import_module("einops")
    except ImportError as error:
        raise ImportError(
            "flash_attn.bert_padding.rearrange is einops': pip install einops"
        ) from error
    return einops.rearrange(tensor, pattern, **axes_lengths)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices] of (total, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) of zeros, with values at the rows of indices."""
    empty = values.new_zeros(first_axis_dim, *values.shape[1:])
    return empty.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(input[indices], input), both differentiable."""
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Select the tokens of (batch, seqlen, ...) with 1 in attention_mask (batch, seqlen) or in
    unused_mask: (tokens (total, ...), their indices in the flattened batch, cu_seqlens (batch + 1,)
    int32, the longest length, tokens of each sequence in attention_mask (batch,)).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _offsets(seqlens), int(seqlens.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for rows that hold several sequences each: row b of attention_mask_in_length (batch,
    seqlen) has their lengths, then zeros. cu_seqlens counts the sequences of all rows.
    """
    lengths = attention_mask_in_length
    position = torch.arange(lengths.shape[-1], device=lengths.device)
    indices = (position < lengths.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    seqlens = lengths.flatten()[lengths.flatten().nonzero().flatten()]
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _offsets(seqlens), int(seqlens.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: (batch, seqlen, ...), 0 at padding."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _offsets(seqlens: Tensor) -> Tensor:
    return F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
