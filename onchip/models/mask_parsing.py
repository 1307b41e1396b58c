"""Parse the mask functions of transformers into masks and options of onchip.

A mask function is fn(batch, head, q, k) over tensors of positions. `MaskFunction.window` finds
which sliding window it is. `parse_mask` takes apart the functions that transformers itself makes,
so that masks keep their structure and no cell is evaluated. Each parser is compared once with the
function of the installed version.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import UnsupportedError

MaskFn = Callable[..., Tensor]
_ROWS = 300  # rows and columns of a mask function that are compared with a window
_TRIED = 17  # positions of the samples that parsers are compared on


@dataclass(frozen=True)
class MaskFunction:
    """A mask as transformers describes it: fn(batch, head, q, k) over tensors of indices, and its
    window length, if it has one. It is not a tensor, so a model that computes with its masks fails
    instead of running with a wrong mask.
    """

    fn: MaskFn
    length: int | None

    def window(self) -> int | None:
        """The window: a query sees itself and window - 1 tokens before it; None: all of them. It is
        verified on cells where any other mask would differ; UnsupportedError for other masks.
        """
        if self.length is not None and self.length < 1:
            raise UnsupportedError(f"a mask has a window of {self.length} tokens")
        q, k = self._cells()
        expected = k <= q if self.length is None else (k <= q) & (q - k < self.length)
        try:
            zero = torch.zeros((), dtype=torch.long)
            same = torch.equal(self.fn(zero, zero, q, k).expand(expected.shape), expected)
        except (RuntimeError, NotImplementedError):  # it reads tensors that have no values here
            same = False
        if not same:
            raise UnsupportedError("a mask is neither causal nor a sliding window of it")
        return self.length

    def _cells(self) -> tuple[Tensor, Tensor]:
        """Rows (rows, 1) and columns (1, columns): many, and the ones near multiples of the length,
        where windows begin to slide and chunks begin.
        """
        if self.length is None:
            return torch.arange(_ROWS)[:, None], torch.arange(_ROWS)[None]
        spread = torch.arange(_ROWS) * (2 * self.length + 2) // _ROWS
        near = torch.arange(-2, 3) + torch.tensor([[0], [self.length], [2 * self.length]])
        each = torch.cat([spread, near.flatten().clamp(min=0)]).unique()
        return each[:, None], each[None]


class MaskTerm(NamedTuple):
    """One function of a conjunction: its name in transformers, and its captured variables."""

    name: str
    captured: dict[str, Any]


class ParsedMask(NamedTuple):
    """A parsed mask function: a query sees the intersection of all terms, which is an interval."""

    parts: tuple[MaskTerm, ...]

    def has(self, name: str) -> bool:
        return any(part.name == name for part in self.parts)

    def without(self, name: str) -> "ParsedMask":
        return ParsedMask(tuple(part for part in self.parts if part.name != name))

    def options(self) -> dict[str, Any] | None:
        """causal and window_size of `onchip.attention` for the same mask, for queries at the last
        keys; None if these options cannot express it.
        """
        terms = {part.name: part.captured for part in self.parts}
        if len(terms) < len(self.parts):
            return None
        causal = terms.pop("causal_mask_function", None) is not None
        if not causal and terms.pop("bidirectional_mask_function", None) is None:
            return None
        if not terms:
            return {"causal": causal}
        name, captured = terms.popitem()
        size = captured.get("sliding_window")
        windows = {
            ("sliding_window_overlay", True): (size and size - 1, 0),
            ("sliding_window_bidirectional_overlay", False): (size, size),
        }
        window = None if terms else windows.get((name, causal))
        return window and {"causal": causal, "window_size": window}

    def bounds(self, q: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """First and end of the positions below `end` that queries at positions q (queries,) see:
        (batch or 1, queries) each. A query with end <= first sees none.
        """
        intervals = [_BOUNDS[part.name](part.captured, q[None], end) for part in self.parts]
        lo, hi = (torch.broadcast_tensors(*side) for side in zip(*intervals, strict=True))
        return torch.stack(lo).amax(0), torch.stack(hi).amin(0)


def parse_mask(fn: MaskFn, masking: ModuleType) -> ParsedMask | None:
    """A mask function of transformers.masking_utils as terms; None if it is not known."""
    known, pairs = _known_code(masking)
    parts = [_parse_term(leaf, known) for leaf in _leaves(fn, pairs)]
    return None if None in parts else ParsedMask(tuple(parts))  # pyright: ignore[reportArgumentType]


def _parse_term(leaf: MaskFn, known: dict[CodeType, str]) -> MaskTerm | None:
    name = known.get(getattr(leaf, "__code__", None))  # pyright: ignore[reportArgumentType]
    return None if name is None else MaskTerm(name, _captured(leaf))


def _leaves(fn: MaskFn, pairs: CodeType | None) -> list[MaskFn]:
    """The functions of nested conjunctions."""
    if pairs is None or getattr(fn, "__code__", None) is not pairs:
        return [fn]
    inner = _captured(fn)["mask_functions"]
    return [leaf for each in inner for leaf in _leaves(each, pairs)]


def _captured(fn: Any) -> dict[str, Any]:
    cells = fn.__closure__ or ()
    names = fn.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


@lru_cache(maxsize=1)
def _known_code(masking: ModuleType) -> tuple[dict[CodeType, str], CodeType | None]:
    """The code of each function that is parsed correctly in this version, and the code of
    conjunctions.
    """
    samples = {name: _sample(masking, name) for name in _BOUNDS}
    known = {
        function.__code__: name for name, function in samples.items() if _matches(name, function)
    }
    joined = masking.and_masks(masking.causal_mask_function)
    captured = _captured(joined)
    return known, joined.__code__ if isinstance(captured.get("mask_functions"), tuple) else None


def _sample(masking: ModuleType, name: str) -> Any:
    documents = torch.tensor([[0] * 6 + [1] * 4 + [2] * 7, [0] * 1 + [1] * 15 + [2] * 1])
    arguments = {
        "chunked_overlay": (5, torch.tensor([0, 3])),
        "packed_sequence_mask_function": (documents,),
        "sliding_window_overlay": (5,),
        "sliding_window_bidirectional_overlay": (5,),
    }
    function = getattr(masking, name, None)
    return function(*arguments[name]) if function is not None and name in arguments else function


def _matches(name: str, function: Any) -> bool:
    """Whether the parser of this name agrees with the function, cell by cell."""
    if not isinstance(function, FunctionType):
        return False
    at = torch.arange(_TRIED)
    expected = function(torch.arange(2)[:, None, None], 0, at[:, None], at)
    try:
        lo, hi = _BOUNDS[name](_captured(function), at[None], _TRIED)
    except KeyError:  # it captures other names in this version
        return False
    ours = (lo[..., None] <= at) & (at < hi[..., None])
    return torch.equal(expected.expand(2, _TRIED, _TRIED), ours.expand(2, _TRIED, _TRIED))


def _causal(_: dict[str, Any], q: Tensor, end: int) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), q + 1


def _bidirectional(_: dict[str, Any], q: Tensor, end: int) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.full_like(q, end)


def _sliding(captured: dict[str, Any], q: Tensor, end: int) -> tuple[Tensor, Tensor]:
    return q - captured["sliding_window"] + 1, torch.full_like(q, end)


def _sliding_both(captured: dict[str, Any], q: Tensor, end: int) -> tuple[Tensor, Tensor]:
    return q - captured["sliding_window"], q + captured["sliding_window"] + 1


def _chunked(captured: dict[str, Any], q: Tensor, end: int) -> tuple[Tensor, Tensor]:
    size, left = captured["chunk_size"], captured["left_padding"][:, None].to(q.device)
    first = (q - left) // size * size + left
    return first, first + size


def _packed(captured: dict[str, Any], q: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Document numbers never decrease along a row, so each document is contiguous."""
    numbers = captured["packed_sequence_mask"].contiguous()
    own = numbers[:, q[0]]
    return torch.searchsorted(numbers, own), torch.searchsorted(numbers, own, right=True)


_BOUNDS = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": _bidirectional,
    "sliding_window_overlay": _sliding,
    "sliding_window_bidirectional_overlay": _sliding_both,
    "chunked_overlay": _chunked,
    "packed_sequence_mask_function": _packed,
}
