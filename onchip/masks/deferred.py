"""A mask that is a tensor of a graph: it is built when the graph runs and its values are known."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .blockmask import BlockMask
from .mods import Mask, build, find_numbered, is_spans

_built: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# The dispatch keys that are included and excluded outside of any op. A mask function runs under
# vmap, which is excluded inside of an op.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
_traced: dict[int, Mask] = {}  # graphs of torch.jit.trace and make_fx hold no Python objects


Grid = tuple[int, int, int, int]  # batch, heads, seqlen_q, seqlen_k


class DeferredMask:
    """A dense mask or the bounds of spans, with the shape of the BlockMask to be built from it."""

    lengths: tuple[int, int]

    def __init__(self, source: Tensor, seqlen_q: int, seqlen_k: int):
        self.source = source
        self.lengths = seqlen_q, seqlen_k

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the `BlockMask`; for a dense mask its own shape, so that a wrong one is
        refused.
        """
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
        """The BlockMask: the one cached for this tensor, or a new one."""
        cached = _built.get(self.source)
        if cached is not None and cached[:2] == (version_of(self.source), self.lengths):
            return cached[2]
        batch, heads, _, _ = self.shape
        return build(self.source, batch, heads, *self.lengths, self.device)


class DeferredRule(DeferredMask):
    """A rule that a graph holds by its number, an int64 tensor (1,) on the host: built, or taken
    from the cache, for the planes and lengths of the run.
    """

    def __init__(self, source: Tensor, grid: Grid, device: torch.device):
        super().__init__(source, *grid[2:])
        self._grid, self._device = grid, device

    @classmethod
    def of(cls, mask: Mask, grid: Grid, device: torch.device) -> "DeferredRule":
        if not torch.compiler.is_compiling():
            _traced[mask.number] = mask
        return cls(torch.full((1,), mask.number, dtype=torch.int64), grid, device)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before the mask is built: it may have more planes."""
        return (1, 1, *self.lengths)

    @property
    def device(self) -> torch.device:
        return self._device

    def built(self) -> BlockMask:
        with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
            return find_numbered(int(self.source)).build(*self._grid, self._device)


def is_number(source: Tensor) -> bool:
    """Whether this is the source of a DeferredRule."""
    return source.dim() == 1


def keep(source: Tensor, mask: BlockMask) -> None:
    """Cache the mask of a tensor until the tensor is freed or written to. Only writes that change
    torch's version counter are noticed.
    """
    _built[source] = version_of(source), (mask.seqlen_q, mask.seqlen_k), mask


def version_of(source: Tensor) -> int:
    """The number of writes to the tensor that torch has counted."""
    return -1 if source.is_inference() else source._version
