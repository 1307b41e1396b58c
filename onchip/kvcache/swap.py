"""Sequences that wait in host memory: families go out together and come back as they were."""

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from onchip.kvcache import cache as caches
from onchip.kvcache.cache import KVCache
from onchip.kvcache.pages import Pages, to_device
from onchip.kvcache.pool import NoRoom, Table
from onchip.kvcache.prefix import Chain

# One copy this large runs at the speed of the link (a launch costs some 10 us, this 300 us over
# PCIe 5), and a family wastes less than one of them.
CHUNK_BYTES = 16 * 2**20


class Transfer(Protocol):
    """Copies under way."""

    def done(self) -> bool:
        """Whether they are finished, without waiting."""
        ...

    def wait(self) -> None:
        """What is queued on the current stream from now on comes after them."""
        ...

    def synchronize(self) -> None:
        """Block until they are finished."""
        ...


class Mover(Protocol):
    """Moves pages of all layers between the device and chunks of host memory."""

    def move_out(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer: ...

    def move_in(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer: ...


class Place(Enum):
    """Where a family is."""

    LEAVING = "its pages are being copied to the host"
    AWAY = "on the host"
    HOME = "on the device again"
    DISCARDED = "freed"


class Family:
    """Sequences that were swapped out together: what `swap_out` gives and `swap_in` takes."""

    def __init__(self, sequences: Sequence[caches.Sequence], pages: list[int], chunks: list[int]):
        self.sequences = tuple(sequences)
        self.pages = pages  # those that travel, by their ids when they left
        self.chunks = chunks
        self.place = Place.LEAVING

    @property
    def tables(self) -> list[Table]:
        return [s.table for s in self.sequences]

    @property
    def leaving(self) -> bool:
        """Its pages are still to be given back."""
        return self.place is Place.LEAVING


class HostTier:
    """At most num_pages pages of host memory, pinned if the cache is on a GPU.

    Sequences are swapped out as a family. A page that only the family holds travels once, however
    many of its members share it, and is shared again on return. A page that others hold too stays
    on the device, still counted: it could not be freed anyway. So forks that are to make room leave
    together.

    Copies run beside the computation. Device pages go back to the pool when their copy is done,
    noticed by the next `poll`, `swap_out` or `swap_in`. A family fills whole chunks of chunk_pages.
    """

    def __init__(self, cache: KVCache, num_pages: int, *, chunk_pages: int | None = None):
        if num_pages < 1 or (chunk_pages is not None and chunk_pages < 1):
            raise ValueError(f"{num_pages=} and {chunk_pages=} must be at least 1")
        self._cache = cache
        wanted = chunk_pages or max(1, CHUNK_BYTES // cache.spec.page_bytes)
        self.chunk_pages = min(wanted, num_pages)
        num_chunks = num_pages // self.chunk_pages
        self.capacity = num_chunks * self.chunk_pages
        self._mover = _mover(cache.pages, self.chunk_pages, num_chunks)
        self.reset()

    def reset(self) -> None:
        """Be as new, in whatever state a call was interrupted, after all copies are finished, also
        those that nobody remembers. It goes with the cache's own `reset`.
        """
        if self._cache.device.type == "cuda":
            torch.cuda.synchronize(self._cache.device)
        self._free_chunks = list(range(self.capacity // self.chunk_pages - 1, -1, -1))
        self._moving: list[tuple[Transfer, Family]] = []
        self._families: set[Family] = set()

    @property
    def num_free(self) -> int:
        """Pages of the chunks that nobody uses."""
        return len(self._free_chunks) * self.chunk_pages

    @property
    def families(self) -> frozenset[Family]:
        """Those that have neither come home nor been discarded."""
        return frozenset(self._families)

    def swap_out(self, sequences: Sequence[caches.Sequence]) -> Family | NoRoom:
        """Send sequences to the host; their handles rest until `swap_in`."""
        self.poll()
        tables = [self._cache.resident(s) for s in sequences]
        if not tables or len(set(tables)) != len(tables):
            raise ValueError(f"{len(tables)} sequences to swap out: at least one, none twice")
        pages = self._cache.pool.exclusive(tables)
        need = -(-len(pages) // self.chunk_pages)
        if need * self.chunk_pages > self.capacity:
            raise ValueError(f"{len(pages)} pages exceed the host tier's {self.capacity} in all")
        if need > len(self._free_chunks):
            return NoRoom(need * self.chunk_pages, self.num_free, "host pages")
        family = Family(sequences, pages, [self._free_chunks.pop() for _ in range(need)])
        for sequence in sequences:
            self._cache.release_row(sequence)
        self._families.add(family)
        self._moving.append((self._mover.move_out(pages, family.chunks), family))
        self.poll()
        return family

    def swap_in(self, family: Family) -> NoRoom | None:
        """Bring a family back. None: its sequences are usable; whatever uses them waits for the
        copy. One that has not left yet just stays.
        """
        self.poll()
        self._check_member(family)
        rows = self._cache.host_table.free_rows
        if len(family.sequences) > len(rows):
            return NoRoom(len(family.sequences), len(rows), "sequences")
        if family.place is Place.AWAY:
            fresh = self._cache.pool.enter(family.tables, len(family.pages))
            if isinstance(fresh, NoRoom):
                return fresh
            self._fetch(family, fresh)
        for sequence in family.sequences:
            self._cache.assign_row(sequence)
        self._dismiss(family, Place.HOME)
        return None

    def discard(self, family: Family) -> None:
        """Free a family where it is (a request that was cancelled)."""
        self._check_member(family)
        for table in family.tables:
            self._cache.pool.free(table)
        settled = family.place is Place.AWAY
        self._dismiss(family, Place.DISCARDED)
        if settled:
            self._free_chunks += family.chunks

    def poll(self) -> None:
        """Give back what finished copies no longer need: the device pages of those that left, the
        chunks of those that came home.
        """
        moving, self._moving = self._moving, []
        for transfer, family in moving:
            if not transfer.done():
                self._moving.append((transfer, family))
            elif family.place is Place.LEAVING:
                self._cache.pool.leave(family.tables, family.pages)
                family.place = Place.AWAY
            else:
                self._free_chunks += family.chunks

    def synchronize(self) -> None:
        """Wait for all copies, then `poll`."""
        for transfer, _ in self._moving:
            transfer.synchronize()
        self.poll()

    def _fetch(self, family: Family, pages: list[int]) -> None:
        transfer = self._mover.move_in(pages, family.chunks)
        self._moving.append((transfer, family))
        for sequence in family.sequences:
            sequence.arrival = transfer
            sequence.chain = Chain(sequence.chain.root)  # its pages are new: publish them again

    def _dismiss(self, family: Family, place: Place) -> None:
        family.place = place
        self._families.discard(family)

    def _check_member(self, family: Family) -> None:
        if not isinstance(family, Family):
            raise ValueError(f"{family!r} is no family of sequences that were swapped out")
        if family not in self._families:
            raise ValueError(f"the family is not in this host tier: it is {family.place.value}")


class _Chunks:
    """Host memory in chunks. A chunk of n pages is their keys, then their values, then scales if
    they have any, in one piece, so that it travels in one copy: k (n, num_layers, row), and so on.
    """

    def __init__(self, pages: Pages, chunk_pages: int, num_chunks: int):
        rows = _wide([t.flatten(2) for t in pages.tensors])
        self.rows = [t.transpose(0, 1) for t in rows]  # (num_pages, num_layers, row)
        self._page_shapes = [t.shape[1:] for t in self.rows]
        self._chunk_pages = chunk_pages
        self._page_size = sum(map(math.prod, self._page_shapes))
        self.host = torch.empty(
            (num_chunks, chunk_pages * self._page_size),
            dtype=rows[0].dtype,
            pin_memory=pages.k.is_cuda,
        )

    def parts(self, ids: Tensor, chunks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """(page ids, host memory) of each chunk."""
        for i, chunk in enumerate(chunks):
            part = ids[i * self._chunk_pages : (i + 1) * self._chunk_pages]
            yield part, self.host[chunk, : len(part) * self._page_size]

    def gather(self, ids: Tensor, packed: Tensor) -> None:
        """Pages into one piece of memory on their device."""
        for rows, part in zip(self.rows, self._split(packed, len(ids)), strict=True):
            torch.index_select(rows, 0, ids, out=part)

    def scatter(self, ids: Tensor, packed: Tensor) -> None:
        """And back."""
        for rows, part in zip(self.rows, self._split(packed, len(ids)), strict=True):
            rows.index_copy_(0, ids, part)

    def _split(self, packed: Tensor, count: int) -> list[Tensor]:
        parts = packed.split([count * math.prod(shape) for shape in self._page_shapes])
        return [p.view(count, *shape) for p, shape in zip(parts, self._page_shapes, strict=True)]


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """The same bytes as 64-bit words where rows allow it: a quarter of the elements to index, or
    fewer.
    """
    fits = all(t.shape[-1] * t.itemsize % 8 == 0 for t in tensors)
    return [t.view(torch.int64 if fits else torch.uint8) for t in tensors]


class _Done:
    """A transfer that was finished when it was made."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Plain:
    """The mover of a cache in host memory: plain copies."""

    def __init__(self, chunks: _Chunks):
        self._chunks = chunks

    def move_out(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host in self._chunks.parts(torch.tensor(pages), chunks):
            self._chunks.gather(ids, host)
        return _Done()

    def move_in(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host in self._chunks.parts(torch.tensor(pages), chunks):
            self._chunks.scatter(ids, host)
        return _Done()


class _Events:
    """The end of what was queued on some streams."""

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


class _Lanes:
    """The mover of a cache on a GPU. Chunks alternate between two streams, each with a staging
    buffer of its own: while one copies over the link the other packs or unpacks its pages.
    """

    def __init__(self, chunks: _Chunks, device: torch.device):
        self._chunks = chunks
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        host = chunks.host
        self._staging = torch.empty((2, host.shape[1]), dtype=host.dtype, device=device)
        for stream in self._streams:  # memory that outlives its last use on these streams
            for used in (self._staging, *chunks.rows):
                used.record_stream(stream)

    def move_out(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host, staged, stream in self._lanes(pages, chunks):
            with torch.cuda.stream(stream):
                self._chunks.gather(ids, staged)
                host.copy_(staged, non_blocking=True)
        return _Events(self._streams)

    def move_in(self, pages: Sequence[int], chunks: Sequence[int]) -> Transfer:
        for ids, host, staged, stream in self._lanes(pages, chunks):
            with torch.cuda.stream(stream):
                staged.copy_(host, non_blocking=True)
                self._chunks.scatter(ids, staged)
        return _Events(self._streams)

    def _lanes(
        self, pages: Sequence[int], chunks: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, torch.cuda.Stream]]:
        """(page ids, host memory, staging, stream) of each chunk; both streams come after what is
        queued on the current one: it may still write the pages, or read what was there before.
        """
        ids = to_device(torch.tensor(pages), self._device)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            ids.record_stream(stream)
        for i, (part, host) in enumerate(self._chunks.parts(ids, chunks)):
            yield part, host, self._staging[i % 2, : len(host)], self._streams[i % 2]


def _mover(pages: Pages, chunk_pages: int, num_chunks: int) -> Mover:
    chunks = _Chunks(pages, chunk_pages, num_chunks)
    return _Lanes(chunks, pages.k.device) if pages.k.is_cuda else _Plain(chunks)
