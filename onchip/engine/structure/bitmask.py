"""Which tokens each row of the logits may sample: a bit for each token, filled on the host and
applied on the device.

The masks of a batch are filled in parallel, without the GIL. Rows without a grammar have no mask.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onchip.engine.structure.automaton import TokenMatcher, load_package

WORD = 32


@dataclass(frozen=True)
class TokenBitmask:
    """words: (rows, words) int32, bit i of word j is token 32 j + i. rows: of the logits; None if
    all rows have a mask, in order.
    """

    words: Tensor
    rows: Tensor | None

    def apply_(self, logits: Tensor) -> None:
        """Set the logits of all other tokens to -inf. Tokens beyond the mask are not allowed."""
        allowed = self._unpack(logits.shape[-1])
        if self.rows is None:
            logits.masked_fill_(~allowed, float("-inf"))
        else:
            masked = logits[self.rows].masked_fill_(~allowed, float("-inf"))
            logits.index_copy_(0, self.rows, masked)

    def _unpack(self, vocab_size: int) -> Tensor:
        """(rows, vocab_size) bool."""
        shifts = torch.arange(WORD, dtype=torch.int32, device=self.words.device)
        bits = ((self.words[:, :, None] >> shifts) & 1).bool().flatten(1)
        missing = max(0, vocab_size - bits.shape[1])
        return torch.nn.functional.pad(bits, (0, missing))[:, :vocab_size]


def fill_bitmask(matchers: Sequence[TokenMatcher]) -> Tensor:
    """The mask of each matcher, (matchers, words) int32 on the host. All matchers have the same
    vocabulary. A matcher that fails allows every token, and its `error` ends the sample.
    """
    vocab_size = matchers[0].vocab_size
    words = torch.empty(len(matchers), -(-vocab_size // WORD), dtype=torch.int32)
    row_bytes = words.shape[1] * words.element_size()
    inner = [(matcher.matcher, row) for row, matcher in enumerate(matchers)]
    if len(inner) == 1:
        inner[0][0].unsafe_compute_mask_ptr(words.data_ptr(), row_bytes)
    else:
        _executor().unsafe_compute_mask_ptr(inner, words.data_ptr(), row_bytes, len(inner))
    for row, matcher in enumerate(matchers):
        matcher.check()
        if matcher.error is not None:
            words[row] = -1
    return words


@cache
def _executor() -> Any:
    return load_package().LLExecutor(min(8, os.cpu_count() or 1))
