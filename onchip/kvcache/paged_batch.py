"""The arguments of paged_attention for a batch of sequences, built without a loop over pages."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.kvcache.draft_trees import TreeRows, read_trees
from onchip.kvcache.offload import HostRange
from onchip.kvcache.prefill_chunks import PrefillChunks
from onchip.kvcache.shared_prefixes import SharedPrefixes, SharedShape, share_prefixes

_ALIGN = 32  # int32 elements: every tensor of a batch starts on a multiple of 128 bytes
# A static page table of up to this many columns is copied to the device in one piece: 4,096 tokens
# in pages of 16. Of a wider table only the columns in use are copied, as a strided copy.
FULL_COPY_PAGES = 256


class BatchShape(NamedTuple):
    """The sizes of a batch. A static batch (for CUDA graphs) may be larger than its contents.
    num_extra: int32 numbers of the caller that are copied with the batch.
    """

    num_seqs: int
    num_tokens: int
    max_pages: int
    max_seqlen_q: int
    num_extra: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Elements of page_table, cache_seqlens, slot_mapping, cu_seqlens_q and extra."""
        n = self.num_seqs
        return n * self.max_pages, n, self.num_tokens, n + 1, self.num_extra

    @property
    def starts(self) -> list[int]:
        """Offsets of these tensors in one buffer, and the end of the buffer."""
        return list(accumulate((-(-n // _ALIGN) * _ALIGN for n in self.sizes), initial=0))


class HostPrefix(NamedTuple):
    """The first num_tokens tokens of a sequence, which are in host memory. Rows start to stop - 1
    of the batch are its new tokens; the first of them has the position `computed` in the sequence.
    """

    held: HostRange
    num_tokens: int
    start: int
    stop: int
    computed: int


class PagedBatch(NamedTuple):
    """One step of a batch: the arguments of `paged_attention` and `KVCache.write`. All tensors are
    int32 views of one buffer; only a static batch has its page table in separate memory.

    page_table: (num_seqs, max_pages), undefined behind a sequence's pages; cache_seqlens:
    (num_seqs,), lengths with the new tokens; slot_mapping: (num_tokens,), slots of the new tokens;
    cu_seqlens_q: (num_seqs + 1,), offsets of the new tokens; max_seqlen_q: at least the longest
    query length; extra: numbers of the caller. host_prefixes: of sequences that were offloaded in
    part. Lengths and slots of these count from the first page in the table. shared: the pages that
    groups of sequences read once, if the step has any. prefill: chunks that compute their attention
    in 8 bits, likewise. tree: the new tokens of some sequences form trees. is_fresh: no sequence
    had a token before those of this step.
    """

    page_table: Tensor
    cache_seqlens: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    buffer: Tensor
    extra: Tensor
    host_prefixes: tuple[HostPrefix, ...] = ()
    shared: SharedPrefixes | None = None
    prefill: PrefillChunks | None = None
    tree: TreeRows | None = None
    is_fresh: bool = False

    def grow_trees(self, numbers: Tensor) -> "PagedBatch":
        """The same batch with trees of new tokens; numbers: `pack_trees`, on the device."""
        return self._replace(tree=read_trees(numbers, self.cu_seqlens_q, self.max_seqlen_q))

    def packed_options(self) -> dict[str, Any]:
        """Options of paged_attention for packed queries: all new tokens."""
        options = {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": self.max_seqlen_q}
        return options if self.tree is None else options | {"tree_mask": self.tree.mask}

    def share(self, numbers: Tensor, shape: SharedShape, page_size: int) -> "PagedBatch":
        """The same batch with shared prefixes; numbers: `pack_slots`, on the device."""
        tables = self.page_table, self.cache_seqlens
        return self._replace(shared=share_prefixes(*tables, numbers, shape, page_size))

    @property
    def is_prompts(self) -> bool:
        """Whether the new tokens of each sequence are all of it, in a plain row: attention over
        them alone, in the precision of the call, is that over the pages.
        """
        return self.is_fresh and self.prefill is None and self.tree is None

    @property
    def shape(self) -> BatchShape:
        num_seqs, max_pages = self.page_table.shape
        num_tokens, num_extra = self.slot_mapping.shape[0], self.extra.shape[0]
        return BatchShape(num_seqs, num_tokens, max_pages, self.max_seqlen_q, num_extra)


class Members(NamedTuple):
    """Per sequence: its row in the host table, its length, and its number of computed tokens."""

    rows: list[int]
    lengths: list[int]
    computed: list[int]

    def tensors(self) -> Tensor:
        """int64 (3, num_seqs)."""
        numbers = array("q", [*self.rows, *self.lengths, *self.computed])  # torch.tensor takes 7x
        return torch.frombuffer(numbers, dtype=torch.int64).view(3, -1)


class HostTable:
    """The page tables of all sequences: int32 (max_seqs, max_pages) in host memory, updated in
    place. Behind a sequence's pages a row holds stale entries.
    """

    pages: Tensor
    free_rows: list[int]

    def __init__(self, max_seqs: int, max_pages: int):
        self.pages = torch.zeros(max_seqs, max_pages, dtype=torch.int32)
        self.free_rows = list(range(max_seqs - 1, -1, -1))
        # A view for Python: a slice assignment to it avoids the microseconds of a tensor
        # assignment.
        memory = (ctypes.c_int32 * self.pages.numel()).from_address(self.pages.data_ptr())
        self._entries = memoryview(memory).cast("B").cast("i")

    def put(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Set the entries of one row from `start` on."""
        at = row * self.pages.shape[1] + start
        self._entries[at : at + len(pages)] = array("i", pages)


def split_buffer(buffer: Tensor, shape: BatchShape) -> PagedBatch:
    """The tensors of a batch as views of one int32 buffer."""
    parts = (buffer[at : at + n] for at, n in zip(shape.starts, shape.sizes, strict=False))
    table, seqlens, slots, cu, extra = parts
    table = table.view(shape.num_seqs, shape.max_pages)
    return PagedBatch(table, seqlens, slots, cu, shape.max_seqlen_q, buffer, extra)


def empty(
    shape: BatchShape, device: torch.device | str = "cpu", pinned: bool = False
) -> PagedBatch:
    """A batch without sequences."""
    size = shape.starts[-1]
    batch = split_buffer(
        torch.zeros(size, dtype=torch.int32, device=device, pin_memory=pinned), shape
    )
    batch.slot_mapping.fill_(-1)
    return batch


def static(shape: BatchShape, table: Tensor) -> PagedBatch:
    """A batch without sequences; its page table is the first rows of `table`."""
    rest = empty(shape._replace(max_pages=0), table.device)
    return rest._replace(page_table=table[: shape.num_seqs])


def staged_shape(needed: BatchShape, capacity: BatchShape) -> BatchShape:
    """The part of a static batch to copy: all, but of a wide table only the columns in use."""
    return capacity._replace(
        max_pages=min(capacity.max_pages, max(needed.max_pages, FULL_COPY_PAGES))
    )


def refill(batch: PagedBatch, staged: PagedBatch, num_seqs: int) -> None:
    """Copy a batch of shape `staged_shape` with num_seqs sequences from host memory into a static
    batch. The host does not wait for the copy.
    """
    columns = staged.page_table.shape[1]
    batch.buffer.copy_(staged.buffer[staged.shape.starts[1] :], non_blocking=True)
    table = batch.page_table[:num_seqs, :columns]
    table.copy_(staged.page_table[:num_seqs], non_blocking=True)


def fill(batch: PagedBatch, members: Members, host: HostTable, page_size: int) -> None:
    """Write these sequences into an empty batch in host memory."""
    rows, lengths, computed = members.tensors()
    counts = lengths - computed
    ends = counts.cumsum(0)
    n, width = len(rows), min(batch.page_table.shape[1], host.pages.shape[1])
    table = batch.page_table[:n]
    table[:, :width] = host.pages[:, :width].index_select(0, rows)
    batch.cache_seqlens[:n] = lengths
    batch.cu_seqlens_q[1 : n + 1] = ends
    batch.cu_seqlens_q[n + 1 :] = ends[-1]
    each = torch.arange(int(ends[-1]))
    decodes = len(each) == n and not (counts - 1).any()
    owner = each if decodes else _sequence_of_each_token(ends)
    position = each + (lengths - ends)[owner]
    page, slot = table[owner, position // page_size], position % page_size
    batch.slot_mapping[: len(each)] = page * page_size + slot


def _sequence_of_each_token(ends: Tensor) -> Tensor:
    """The sequence of each token, where the tokens of sequence i end at ends[i]. Not by
    repeat_interleave: it starts all intra-op threads, which took 3 ms of a step.
    """
    total = int(ends[-1])
    return torch.bincount(ends[:-1], minlength=total + 1)[:total].cumsum(0)


def shape_of(members: Members, page_size: int, num_extra: int = 0) -> BatchShape:
    """The smallest batch that holds these sequences."""
    counts = [n - done for n, done in zip(members.lengths, members.computed, strict=True)]
    pages = -(-max(members.lengths, default=0) // page_size)
    return BatchShape(len(counts), sum(counts), max(1, pages), max(counts, default=0), num_extra)


def check_fits(batch: PagedBatch, shape: BatchShape) -> None:
    """Raise ValueError if a static batch is too small for this shape."""
    for name, has, needs in zip(BatchShape._fields, batch.shape, shape, strict=True):
        if needs > has:
            raise ValueError(f"the batch has {name}={has}, these sequences need {needs}")
