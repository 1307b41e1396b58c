"""Which keys a query sees, said twice: as rows for an oracle and as options of onchip.attention."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import onchip

WINDOW, NUM_DOCUMENTS, BLOCK, DENSITY = 256, 16, 128, 0.1


class Pattern(NamedTuple):
    """visible(rows) -> bool (len(rows), n) on rows' device; options say it to onchip.attention."""

    name: str
    visible: Callable[[Tensor], Tensor]
    options: dict


def dense(n: int) -> Pattern:
    visible = lambda rows: torch.ones(len(rows), n, dtype=torch.bool, device=rows.device)
    return Pattern("none", visible, {})


def causal(n: int) -> Pattern:
    return Pattern("causal", lambda rows: _keys(n, rows) <= rows[:, None], {"causal": True})


def plain(n: int, mask: str) -> Pattern:
    """The one that a Case calls "none" or "causal"."""
    return causal(n) if mask == "causal" else dense(n)


def window(n: int, size: int = WINDOW) -> Pattern:
    """Each query sees itself and the size - 1 keys before it."""
    distance = lambda rows: rows[:, None] - _keys(n, rows)
    visible = lambda rows: (distance(rows) >= 0) & (distance(rows) < size)
    return Pattern(f"window {size}", visible, {"window_size": (size - 1, 0)})


def _keys(n: int, rows: Tensor) -> Tensor:
    return torch.arange(n, device=rows.device)


def documents(n: int, device: torch.device | str = "cpu") -> Pattern:
    """Documents of unequal length, not in whole blocks; each token sees all of its own document."""
    ends = document_ends(n, NUM_DOCUMENTS)
    ids = torch.bucketize(torch.arange(n), ends[1:], right=True).to(device)
    mask = onchip.masks.document(ends.int()).build(1, 1, n, n, device)
    return Pattern(
        f"{NUM_DOCUMENTS} documents", lambda rows: ids[rows][:, None] == ids, {"mask": mask}
    )


def blocks(n: int, density: float = DENSITY, device: torch.device | str = "cpu") -> Pattern:
    """This share of the blocks: the diagonal (SDPA gives NaN in a row that sees nothing), and the
    rest at random.
    """
    side = -(-n // BLOCK)
    order = torch.rand(side, side, generator=torch.Generator().manual_seed(0))
    order.fill_diagonal_(-1.0)
    last = order.flatten().kthvalue(max(side, round(density * side * side))).values
    chosen = (order <= last).to(device)
    cells = chosen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :n]
    mask = onchip.masks.as_mask(cells).build(1, 1, n, n, device)
    return Pattern(f"{density:.0%} of blocks", lambda rows: cells[rows], {"mask": mask})


def document_ends(n: int, num_documents: int) -> Tensor:
    """Boundaries from 0 to n of documents of unequal lengths, short and long ones mixed."""
    order = torch.arange(num_documents) * 7 % num_documents
    weights = torch.linspace(0.5, 1.5, num_documents)[order]
    ends = (weights.cumsum(0) / weights.sum() * n).round().long()
    return torch.cat([torch.zeros(1, dtype=torch.long), ends])
