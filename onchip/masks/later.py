"""A mask that is a tensor of a graph: its values are known when that runs, and it is built then."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .blockmask import BlockMask
from .mods import build, is_spans

_built: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


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


def keep(source: Tensor, mask: BlockMask) -> None:
    """Remember what a tensor means for as long as it lives and is not written to. Whoever writes to
    it must be one whom torch notices.
    """
    _built[source] = version_of(source), (mask.seqlen_q, mask.seqlen_k), mask


def version_of(source: Tensor) -> int:
    """How often it was written to, as far as torch counts."""
    return -1 if source.is_inference() else source._version
