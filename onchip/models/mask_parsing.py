"""What transformers says with its mask functions, in our words.

A mask function is sees(batch, head, q, k) over tensors of positions. `Rule` asks one which window
it is. `read` takes those apart that transformers makes itself, so that masks stay structure and no
cell is evaluated. How each is read is compared, once, with what this version's function says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.problem import UnsupportedError

MaskFn = Callable[..., Tensor]
_ROWS = 300  # of a rule, and as many columns, that are compared with what it should be
_TRIED = 17  # positions of the samples that readers are compared on


@dataclass(frozen=True)
class MaskFunction:
    """A mask as transformers describes it: sees(batch, head, q, k) over tensors of indices, and the
    length it names, if it names one. No tensor: a model that computes with its masks, instead of
    handing them over, fails.
    """

    fn: MaskFn
    length: int | None

    def window(self) -> int | None:
        """A query sees itself and window - 1 tokens before it; None: all of them. Found by asking
        the rule about cells where any other would show. UnsupportedError: it is another.
        """
        if self.length is not None and self.length < 1:
            raise UnsupportedError(f"a mask has a window of {self.length} tokens")
        q, k = self._cells()
        expected = k <= q if self.length is None else (k <= q) & (q - k < self.length)
        try:
            zero = torch.zeros((), dtype=torch.long)
            same = torch.equal(self.fn(zero, zero, q, k).expand(expected.shape), expected)
        except (RuntimeError, NotImplementedError):  # it looks at tensors that have no values here
            same = False
        if not same:
            raise UnsupportedError("a mask is neither causal nor a sliding window of it")
        return self.length

    def _cells(self) -> tuple[Tensor, Tensor]:
        """Rows (rows, 1) and columns (1, columns): many, and those around multiples of the length,
        where windows begin to slide and chunks begin.
        """
        if self.length is None:
            return torch.arange(_ROWS)[:, None], torch.arange(_ROWS)[None]
        spread = torch.arange(_ROWS) * (2 * self.length + 2) // _ROWS
        near = torch.arange(-2, 3) + torch.tensor([[0], [self.length], [2 * self.length]])
        each = torch.cat([spread, near.flatten().clamp(min=0)]).unique()
        return each[:, None], each[None]


class MaskTerm(NamedTuple):
    """One function of a conjunction: the name it has in transformers, and what it captured."""

    name: str
    captured: dict[str, Any]


class ParsedMask(NamedTuple):
    """A mask function that was read: a query sees what all parts let it see, an interval."""

    parts: tuple[MaskTerm, ...]

    def has(self, name: str) -> bool:
        return any(part.name == name for part in self.parts)

    def without(self, name: str) -> "ParsedMask":
        return ParsedMask(tuple(part for part in self.parts if part.name != name))

    def options(self) -> dict[str, Any] | None:
        """causal and window_size of `onchip.attention` that say the same of queries which stand at
        the last keys; None where these do not.
        """
        said = {part.name: part.captured for part in self.parts}
        if len(said) < len(self.parts):
            return None
        causal = said.pop("causal_mask_function", None) is not None
        if not causal and said.pop("bidirectional_mask_function", None) is None:
            return None
        if not said:
            return {"causal": causal}
        name, captured = said.popitem()
        size = captured.get("sliding_window")
        windows = {
            ("sliding_window_overlay", True): (size and size - 1, 0),
            ("sliding_window_bidirectional_overlay", False): (size, size),
        }
        window = None if said else windows.get((name, causal))
        return window and {"causal": causal, "window_size": window}

    def bounds(self, q: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """First and end of the positions that queries at positions q (queries,) see, of those below
        end: (batch or 1, queries) each. Where the end does not exceed the first there are none.
        """
        found = [_BOUNDS[part.name](part.captured, q[None], end) for part in self.parts]
        lo, hi = (torch.broadcast_tensors(*side) for side in zip(*found, strict=True))
        return torch.stack(lo).amax(0), torch.stack(hi).amin(0)


def parse_mask(fn: MaskFn, masking: ModuleType) -> ParsedMask | None:
    """A mask function of transformers.masking_utils, taken apart; None: it is not known."""
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
    """The code of each function that our reading of is right in this version, and the code of
    conjunctions.
    """
    samples = {name: _sample(masking, name) for name in _BOUNDS}
    known = {made.__code__: name for name, made in samples.items() if _matches(name, made)}
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
    made = getattr(masking, name, None)
    return made(*arguments[name]) if made is not None and name in arguments else made


def _matches(name: str, made: Any) -> bool:
    """Whether the reader of this name agrees with the function, cell by cell."""
    if not isinstance(made, FunctionType):
        return False
    at = torch.arange(_TRIED)
    said = made(torch.arange(2)[:, None, None], 0, at[:, None], at)
    try:
        lo, hi = _BOUNDS[name](_captured(made), at[None], _TRIED)
    except KeyError:  # it captures other names in this version
        return False
    ours = (lo[..., None] <= at) & (at < hi[..., None])
    return torch.equal(said.expand(2, _TRIED, _TRIED), ours.expand(2, _TRIED, _TRIED))


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
    """Numbers of documents never decrease along a row, so those of one lie together."""
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
