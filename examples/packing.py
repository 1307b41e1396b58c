"""Packed batches of text: pieces of documents, one after another, for `onchip.varlen_attention`.
examples/train_lm.py trains on them.
"""

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.engine.tokenizer import ByteTokenizer

TEXT = Path(__file__).with_name("data") / "kjv.txt.xz"
HELD_OUT = 20  # one of so many chapters is held out of training
EOS = ByteTokenizer.EOS


class Corpus(NamedTuple):
    """Concatenated chapters, each followed by the end token. ends: the positions of end tokens."""

    tokens: Tensor
    ends: Tensor

    @classmethod
    def of(cls, chapters: list[str]) -> "Corpus":
        ids = [[*chapter.encode(), EOS] for chapter in chapters]
        ends = torch.tensor([len(i) for i in ids]).cumsum(0) - 1
        return cls(torch.tensor([token for i in ids for token in i]), ends)


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(t.to(device, non_blocking=True) for t in self))


def read_corpora() -> tuple[Corpus, Corpus]:
    """The training corpus and the held-out corpus."""
    chapters = lzma.decompress(TEXT.read_bytes()).decode().split("\n\n")
    aside = lambda i: i % HELD_OUT == HELD_OUT // 2
    kept = lambda held: [c for i, c in enumerate(chapters) if aside(i) == held]
    return Corpus.of(kept(False)), Corpus.of(kept(True))


def pack(corpus: Corpus, starts: Tensor, context: int, total: int) -> Batch:
    """`total` tokens of the pieces that begin at `starts`; each ends after `context` tokens or with
    its chapter. Pieces that do not fit are empty: shapes do not depend on lengths.
    """
    lengths = (corpus.ends[torch.searchsorted(corpus.ends, starts)] - starts).clamp(max=context)
    cu = F.pad(lengths.cumsum(0).clamp(max=total), (1, 0))
    each = torch.arange(total)
    piece = torch.searchsorted(cu, each, right=True) - 1
    where = starts[piece] + each - cu[piece]
    return Batch(corpus.tokens[where], corpus.tokens[where + 1], cu.int())


def training_batch(corpus: Corpus, context: int, total: int, seed: int, step: int) -> Batch:
    """A pure function of its arguments, so a checkpoint needs no random state."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 32))
    pieces = 4 * total // context + 16  # their mean length is more than half the context
    starts = torch.randint(len(corpus.tokens), (pieces,), generator=generator)
    return pack(corpus, starts, context, total)


def cover(corpus: Corpus, context: int) -> Iterator[Batch]:
    """Every byte once: chapters cut into pieces of `context` tokens."""
    begins = F.pad(corpus.ends[:-1] + 1, (1, 0))
    for begin, end in zip(begins.tolist(), corpus.ends.tolist(), strict=True):
        yield pack(corpus, torch.arange(begin, end, context), context, end - begin)
