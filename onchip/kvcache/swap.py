"""Swapping: a group of sequences moves to host memory together and returns unchanged."""

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from onchip.kvcache import cache as caches
from onchip.kvcache.cache import KVCache, PendingTransfer
from onchip.kvcache.page_tensors import PageTensors, to_device
from onchip.kvcache.pool import NoRoom, PageTable
from onchip.kvcache.prefix import Chain

# One copy this large runs at the speed of the link (a launch costs some 10 us, this copy 300 us
# over PCIe 5), and a group wastes less than one chunk.
CHUNK_BYTES = 16 * 2**20


class Transfer(PendingTransfer, Protocol):
    """Copies in flight."""

    def done(self) -> bool:
        """Whether the copies are finished, without waiting."""
        ...

    def synchronize(self) -> None:
        """Block the host until the copies are finished."""
        ...


class Mover(Protocol):
    """Moves pages of all layers between the device and chunks of host memory."""

    def move_out(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer: ...

    def move_in(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer: ...

    def resize(self, factor: int) -> None: ...


class SwapStatus(Enum):
    """Where the pages of a group are."""

    SWAPPING_OUT = "its pages are being copied to the host"
    SWAPPED_OUT = "on the host"
    RESIDENT = "on the device again"
    DISCARDED = "freed"


class SequenceGroup:
    """Sequences that were swapped out together: returned by `swap_out`, taken by `swap_in`."""

    sequences: tuple[caches.Sequence, ...]

    def __init__(self, sequences: Sequence[caches.Sequence], pages: list[int], chunks: list[int]):
        self.sequences = tuple(sequences)
        self.pages = pages  # the pages to copy, by their ids before the swap
        self.chunks = chunks
        self.status = SwapStatus.SWAPPING_OUT

    @property
    def tables(self) -> list[PageTable]:
        return [s.table for s in self.sequences]

    @property
    def is_swapping_out(self) -> bool:
        """Whether its device pages are not released yet."""
        return self.status is SwapStatus.SWAPPING_OUT


class HostTier:
    """At most num_pages pages of host memory, pinned if the cache is on a GPU.

    Sequences are swapped out as a group. A page that only the group holds is copied once, however
    many members share it, and is shared again after the swap in. A page with another holder stays
    on the device and keeps its reference: it could not be freed anyway. So swap out forks together.

    Copies overlap with computation. Device pages return to the pool when their copy is done, which
    the next `poll`, `swap_out` or `swap_in` notices. A group occupies whole chunks of chunk_pages.
    waits: these calls wait for the copies instead, so that nothing depends on their time.
    """

    chunk_pages: int
    capacity: int

    def __init__(
        self,
        cache: KVCache,
        num_pages: int,
        *,
        chunk_pages: int | None = None,
        waits: bool = False,
    ):
        if num_pages < 1 or (chunk_pages is not None and chunk_pages < 1):
            raise ValueError(f"{num_pages=} and {chunk_pages=} must be at least 1")
        self._cache, self._waits = cache, waits
        wanted = chunk_pages or max(1, CHUNK_BYTES // cache.spec.page_bytes)
        self.chunk_pages = min(wanted, num_pages)
        num_chunks = num_pages // self.chunk_pages
        self.capacity = num_chunks * self.chunk_pages
        self._mover = _make_mover(cache.pages, self.chunk_pages, num_chunks)
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, also after a call that was interrupted. It first waits for
        all copies, including copies that no record is left of. Call the cache's `reset` with it.
        """
        if self._cache.device.type == "cuda":
            torch.cuda.synchronize(self._cache.device)
        self._free_chunks = list(range(self.capacity // self.chunk_pages - 1, -1, -1))
        self._moving: list[tuple[Transfer, SequenceGroup]] = []
        self._groups: set[SequenceGroup] = set()

    def release_memory(self) -> None:
        """`reset`, and free the host memory, unless it is pinned: then a GPU trains, which has its
        own.
        """
        self.reset()
        self._mover.resize(0)

    def take_memory(self) -> None:
        """Allocate the host memory again, after `release_memory`."""
        self._mover.resize(1)

    @property
    def num_free(self) -> int:
        """Pages of the chunks that are not in use."""
        return len(self._free_chunks) * self.chunk_pages

    @property
    def groups(self) -> frozenset[SequenceGroup]:
        """The groups that are neither swapped in again nor discarded."""
        return frozenset(self._groups)

    def swap_out(self, sequences: Sequence[caches.Sequence]) -> SequenceGroup | NoRoom:
        """Copy sequences to the host; their handles are unusable until `swap_in`."""
        self.poll()
        tables = [self._cache.resident(s) for s in sequences]
        if not tables or len(set(tables)) != len(tables):
            raise ValueError(f"{len(tables)} sequences to swap out: at least one, none twice")
        pages = self._cache.pool.exclusive(tables)
        need = -(-len(pages) // self.chunk_pages)
        if need * self.chunk_pages > self.capacity:
            raise ValueError(f"{len(pages)} pages exceed the host tier's capacity {self.capacity}")
        if need > len(self._free_chunks):
            return NoRoom(need * self.chunk_pages, self.num_free, "host pages")
        group = SequenceGroup(sequences, pages, [self._free_chunks.pop() for _ in range(need)])
        for sequence in sequences:
            self._cache.release_row(sequence)
        self._groups.add(group)
        self._moving.append((self._mover.move_out(pages, group.chunks), group))
        self.poll()
        return group

    def swap_in(self, group: SequenceGroup) -> NoRoom | None:
        """Bring a group back. None on success: its sequences are usable, and work that uses them
        waits for the copy. A group whose copy out is not finished keeps its device pages.
        """
        self.poll()
        self._check_member(group)
        rows = self._cache.host_table.free_rows
        if len(group.sequences) > len(rows):
            return NoRoom(len(group.sequences), len(rows), "sequences")
        if group.status is SwapStatus.SWAPPED_OUT:
            fresh = self._cache.pool.swap_in(group.tables, len(group.pages))
            if isinstance(fresh, NoRoom):
                return fresh
            self._fetch(group, fresh)
        for sequence in group.sequences:
            self._cache.assign_row(sequence)
        self._remove(group, SwapStatus.RESIDENT)
        return None

    def discard(self, group: SequenceGroup) -> None:
        """Free a group wherever its pages are (its request was cancelled)."""
        self._check_member(group)
        for sequence in group.sequences:
            self._cache.pool.free(sequence.table)
            self._cache.release_host_range(sequence)
        settled = group.status is SwapStatus.SWAPPED_OUT
        self._remove(group, SwapStatus.DISCARDED)
        if settled:
            self._free_chunks += group.chunks

    def poll(self) -> None:
        """Release the memory of finished copies: the device pages of groups that were swapped out,
        the chunks of groups that were swapped in.
        """
        moving, self._moving = self._moving, []
        for transfer, group in moving:
            if self._waits:
                transfer.synchronize()
            if not transfer.done():
                self._moving.append((transfer, group))
            elif group.status is SwapStatus.SWAPPING_OUT:
                self._cache.pool.swap_out(group.tables, group.pages)
                group.status = SwapStatus.SWAPPED_OUT
            else:
                self._free_chunks += group.chunks

    def synchronize(self) -> None:
        """Wait for all copies, then `poll`."""
        for transfer, _ in self._moving:
            transfer.synchronize()
        self.poll()

    def _fetch(self, group: SequenceGroup, pages: list[int]) -> None:
        transfer = self._mover.move_in(pages, group.chunks)
        self._moving.append((transfer, group))
        for sequence in group.sequences:
            sequence.pending_transfer = transfer
            sequence.chain = Chain(sequence.chain.root)  # its pages are new: publish them again

    def _remove(self, group: SequenceGroup, status: SwapStatus) -> None:
        group.status = status
        self._groups.discard(group)

    def _check_member(self, group: SequenceGroup) -> None:
        if not isinstance(group, SequenceGroup):
            raise ValueError(f"{group!r} is not a group of swapped-out sequences")
        if group not in self._groups:
            raise ValueError(f"the group is not in this host tier: it is {group.status.value}")


class _Chunks:
    """Host memory in chunks. A chunk of n pages holds their keys, then their values, then their
    scales if they have any, contiguously, so that one copy moves it: k (n, num_layers, row), etc.
    """

    def __init__(self, pages: PageTensors, chunk_pages: int, num_chunks: int):
        rows = _view_as_int64([t.flatten(2) for t in pages.tensors])
        self.rows = [t.transpose(0, 1) for t in rows]  # (num_pages, num_layers, row)
        self._page_shapes = [t.shape[1:] for t in self.rows]
        self._chunk_pages = chunk_pages
        self._page_size = sum(map(math.prod, self._page_shapes))
        self.host = torch.empty(
            (num_chunks, chunk_pages * self._page_size),
            dtype=rows[0].dtype,
            pin_memory=pages.k.is_cuda,
        )

    def per_chunk(self, ids: Tensor, chunks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """(page ids, host memory) of each chunk."""
        for i, chunk in enumerate(chunks):
            part = ids[i * self._chunk_pages : (i + 1) * self._chunk_pages]
            yield part, self.host[chunk, : len(part) * self._page_size]

    def gather(self, ids: Tensor, packed: Tensor) -> None:
        """Copy pages into contiguous memory on their device."""
        for rows, part in zip(self.rows, self._split(packed, len(ids)), strict=True):
            torch.index_select(rows, 0, ids, out=part)

    def scatter(self, ids: Tensor, packed: Tensor) -> None:
        """Copy contiguous memory back into pages."""
        for rows, part in zip(self.rows, self._split(packed, len(ids)), strict=True):
            rows.index_copy_(0, ids, part)

    def _split(self, packed: Tensor, count: int) -> list[Tensor]:
        parts = packed.split([count * math.prod(shape) for shape in self._page_shapes])
        return [p.view(count, *shape) for p, shape in zip(parts, self._page_shapes, strict=True)]


def _view_as_int64(tensors: list[Tensor]) -> list[Tensor]:
    """The same bytes as int64 where rows allow it: a quarter of the elements to index, or fewer."""
    fits = all(t.shape[-1] * t.itemsize % 8 == 0 for t in tensors)
    return [t.view(torch.int64 if fits else torch.uint8) for t in tensors]


class _FinishedTransfer:
    """A transfer that finished before its constructor returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _HostMover:
    """Moves pages of a cache in host memory, by plain copies."""

    def __init__(self, chunks: _Chunks):
        self._chunks = chunks

    def resize(self, factor: int) -> None:
        """0: free the host memory; 1: allocate it."""
        host = self._chunks.host
        host.untyped_storage().resize_(factor * host.numel() * host.itemsize)

    def move_out(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host in self._chunks.per_chunk(torch.tensor(pages), chunks):
            self._chunks.gather(ids, host)
        return _FinishedTransfer()

    def move_in(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host in self._chunks.per_chunk(torch.tensor(pages), chunks):
            self._chunks.scatter(ids, host)
        return _FinishedTransfer()


class _CudaTransfer:
    """The work that is queued on some streams at its construction."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]):
        self._device = streams[0].device
        self._events = [stream.record_event() for stream in streams]

    def done(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


class _CudaMover:
    """Moves pages of a cache on a GPU. Chunks alternate between two streams, each with its own
    staging buffer: while one stream copies over the link, the other packs or unpacks pages.
    """

    def __init__(self, chunks: _Chunks, device: torch.device):
        self._chunks = chunks
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        host = chunks.host
        self._staging = torch.empty((2, host.shape[1]), dtype=host.dtype, device=device)
        for stream in self._streams:  # the allocator must not reuse this memory under the copies
            for used in (self._staging, *chunks.rows):
                used.record_stream(stream)

    def resize(self, factor: int) -> None:
        """Pinned memory stays."""

    def move_out(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host, staged, stream in self._stage_chunks(pages, chunks):
            with torch.cuda.stream(stream):
                self._chunks.gather(ids, staged)
                host.copy_(staged, non_blocking=True)
        return _CudaTransfer(self._streams)

    def move_in(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host, staged, stream in self._stage_chunks(pages, chunks):
            with torch.cuda.stream(stream):
                staged.copy_(host, non_blocking=True)
                self._chunks.scatter(ids, staged)
        return _CudaTransfer(self._streams)

    def _stage_chunks(
        self, pages: Sequence[int], chunks: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, torch.cuda.Stream]]:
        """(page ids, host memory, staging, stream) of each chunk. Both streams first wait for the
        current stream: it may still write the pages, or read their old contents.
        """
        ids = to_device(torch.tensor(pages), self._device)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            ids.record_stream(stream)
        for i, (part, host) in enumerate(self._chunks.per_chunk(ids, chunks)):
            yield part, host, self._staging[i % 2, : len(host)], self._streams[i % 2]


def _make_mover(pages: PageTensors, chunk_pages: int, num_chunks: int) -> Mover:
    chunks = _Chunks(pages, chunk_pages, num_chunks)
    return _CudaMover(chunks, pages.k.device) if pages.k.is_cuda else _HostMover(chunks)
