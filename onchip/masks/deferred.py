"""A mask that is a tensor of a graph: its values are known when that runs, and it is built then."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .blockmask import BlockMask
from .mods import Mask, build, find_numbered, is_spans

_built: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# What the dispatcher includes and excludes outside of any op. A mask function runs under vmap,
# which is excluded inside of one.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
_traced: dict[int, Mask] = {}  # graphs of torch.jit.trace and make_fx hold no Python object


Grid = tuple[int, int, int, int]  # batch, heads, seqlen_q, seqlen_k


class Later:
    """A dense mask or the bounds of spans, with the shape of the BlockMask that it will be."""

    def __init__(self, source: Tensor, seqlen_q: int, seqlen_k: int):
        self.source = source
        self.lengths = seqlen_q, seqlen_k

    @property
    def shape(self) -> tuple[int, ...]:
        """As of `BlockMask`; what a dense mask claims, so that a wrong one is refused."""
        if is_spans(self.source):
            return (*self.source.shape[:3], self.lengths[1])
        return (1,) * (4 - self.source.dim()) + tuple(self.source.shape)

    @property
    def device(self) -> torch.device:
        return self.source.device

    def tensors(self) -> list[Tensor]:
        return [self.source]

    def density(self) -> float:
        return self.built().density()

    def built(self) -> BlockMask:
        """The mask as data: what was kept for this tensor, or built now."""
        kept = _built.get(self.source)
        if kept is not None and kept[:2] == (version_of(self.source), self.lengths):
            return kept[2]
        batch, heads, _, _ = self.shape
        return build(self.source, batch, heads, *self.lengths, self.device)


class LaterRule(Later):
    """A rule that a graph holds by its number, an int64 tensor (1,) on the host: built, or found
    again, for the planes and lengths that the graph runs with.
    """

    def __init__(self, source: Tensor, grid: Grid, device: torch.device):
        super().__init__(source, *grid[2:])
        self._grid, self._device = grid, device

    @classmethod
    def of(cls, mask: Mask, grid: Grid, device: torch.device) -> "LaterRule":
        if not torch.compiler.is_compiling():
            _traced[mask.number] = mask
        return cls(torch.full((1,), mask.number, dtype=torch.int64), grid, device)

    @property
    def shape(self) -> tuple[int, ...]:
        """What is known before it is built: planes may be more."""
        return (1, 1, *self.lengths)

    @property
    def device(self) -> torch.device:
        return self._device

    def built(self) -> BlockMask:
        with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
            return find_numbered(int(self.source)).build(*self._grid, self._device)


def is_number(source: Tensor) -> bool:
    """Whether this is the source of a LaterRule."""
    return source.dim() == 1


def keep(source: Tensor, mask: BlockMask) -> None:
    """Remember what a tensor means for as long as it lives and is not written to. Whoever writes to
    it must be one whom torch notices.
    """
    _built[source] = version_of(source), (mask.seqlen_q, mask.seqlen_k), mask


def version_of(source: Tensor) -> int:
    """How often it was written to, as far as torch counts."""
    return -1 if source.is_inference() else source._version
