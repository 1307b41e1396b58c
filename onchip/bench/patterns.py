"""Which keys a query sees, said twice: as rows for an oracle and as options of onchip.attention."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import onchip

WINDOW, NUM_DOCUMENTS, BLOCK, DENSITY = 256, 16, 128, 0.1


class Pattern(NamedTuple):
    """visible(rows) -> bool (len(rows), n) on the CPU; options say the same to onchip.attention."""

    name: str
    visible: Callable[[Tensor], Tensor]
    options: dict


def dense(n: int) -> Pattern:
    return Pattern("none", lambda rows: torch.ones(len(rows), n, dtype=torch.bool), {})


def causal(n: int) -> Pattern:
    return Pattern("causal", lambda rows: torch.arange(n) <= rows[:, None], {"causal": True})


def window(n: int) -> Pattern:
    """Each query sees itself and the 255 keys before it."""
    distance = lambda rows: rows[:, None] - torch.arange(n)
    visible = lambda rows: (distance(rows) >= 0) & (distance(rows) < WINDOW)
    return Pattern(f"window {WINDOW}", visible, {"window_size": (WINDOW - 1, 0)})


def documents(n: int, device: torch.device | str = "cpu") -> Pattern:
    """Unequal documents whose ends fall inside blocks; each token sees all of its own document."""
    ends = document_ends(n, NUM_DOCUMENTS)
    ids = torch.bucketize(torch.arange(n), ends[1:], right=True)
    mask = onchip.masks.document(ends.int()).build(1, 1, n, n, device)
    return Pattern(
        f"{NUM_DOCUMENTS} documents", lambda rows: ids[rows][:, None] == ids, {"mask": mask}
    )


def blocks(n: int) -> Pattern:
    """A random tenth of the blocks, and the diagonal: SDPA gives NaN in a row that sees nothing."""
    side = -(-n // BLOCK)
    chosen = torch.rand(side, side, generator=torch.Generator().manual_seed(0)) < DENSITY
    chosen |= torch.eye(side, dtype=torch.bool)
    cells = chosen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :n]
    mask = onchip.masks.as_mask(cells).build(1, 1, n, n)
    return Pattern(f"{DENSITY:.0%} of blocks", lambda rows: cells[rows], {"mask": mask})


def document_ends(n: int, num_documents: int) -> Tensor:
    """Boundaries from 0 to n of documents of unequal lengths, short and long ones mixed."""
    weights = torch.linspace(0.5, 1.5, num_documents)[
        torch.arange(num_documents) * 7 % num_documents
    ]
    ends = (weights.cumsum(0) / weights.sum() * n).round().long()
    return torch.cat([torch.zeros(1, dtype=torch.long), ends])
