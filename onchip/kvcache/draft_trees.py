"""Sequences whose new tokens form trees: the drafts of a step that verifies several continuations.

    new tokens   c d e f g      depth  0 1 1 2 2        f sees c, d, f
    slots        0 1 2 3 4      c: 0   d e: 1   f g after d: 2

Each new token has a slot of its own, in this order, but its position in the sequence is its depth
after the first one, and of the new tokens it sees those on its path.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_CHUNK_TOKENS = 64  # new tokens of a sequence: a bit for each in two words
_NUMBERS = 3  # of a token: its depth, and the bits of its path


class TreeRows(NamedTuple):
    """mask: bool (num_seqs, max_seqlen_q, max_seqlen_q), `tree_mask` of paged_attention. depths:
    int32 (num_tokens,).
    """

    mask: Tensor
    depths: Tensor


def count_tree_numbers(num_tokens: int) -> int:
    """How many numbers `pack_trees` makes of so many tokens."""
    return _NUMBERS * num_tokens


def pack_trees(trees: Iterable[Sequence[int]]) -> list[int]:
    """int32 numbers for `read_trees`. trees: for each new token of a sequence, the index of the new
    token before it; -1 if only computed tokens are before it.
    """
    numbers = []
    for parents in trees:
        if len(parents) > MAX_CHUNK_TOKENS:
            raise ValueError(f"{len(parents)} tokens of a tree exceed {MAX_CHUNK_TOKENS}")
        depths, paths = [], []
        for i, parent in enumerate(parents):
            depths.append(0 if parent < 0 else 1 + depths[parent])
            paths.append((0 if parent < 0 else paths[parent]) | 1 << i)
            numbers += [depths[i], _to_int32(paths[i]), _to_int32(paths[i] >> 32)]
    return numbers


def _to_int32(bits: int) -> int:
    bits &= 0xFFFF_FFFF
    return bits - (bits >> 31 << 32)


def read_trees(numbers: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> TreeRows:
    """numbers: `pack_trees` of all new tokens, on the device. Nothing waits for it."""
    depths, words = numbers.view(-1, _NUMBERS).tensor_split([1], 1)
    each = torch.arange(max_seqlen_q, device=numbers.device)
    rows = (cu_seqlens_q[:-1, None] + each).clamp_(max=len(depths) - 1)
    paths = words[rows.long()][..., each // 32]
    return TreeRows((paths >> each % 32) & 1 != 0, depths[:, 0])
