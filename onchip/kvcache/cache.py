"""The key/value cache of a batch of sequences: allocate, fork, roll back, commit and free."""

from collections import abc
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from onchip.kvcache import paged_batch as batches
from onchip.kvcache.offload import HostRange, OffloadMemory
from onchip.kvcache.page_tensors import LayerScales, PageTensors, Spec
from onchip.kvcache.paged_batch import BatchShape, HostPrefix, HostTable, Members, PagedBatch
from onchip.kvcache.pool import NoRoom, PageTable, Pool, as_int, as_ints
from onchip.kvcache.prefix import Chain, Hit, PrefixIndex, pack_token_ids
from onchip.kvcache.prefix_tree import PrefixTree

DEFAULT_MAX_SEQLEN = 131_072
_MISS = Hit((), (), None, 0, 0)


class PendingTransfer(Protocol):
    """A copy of pages from the host that is not finished."""

    def wait(self) -> None:
        """Make work that is queued on the current stream from now on wait for the copy."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A handle: the pages of one sequence, its tokens, and how far they are computed.

    tokens: the known token ids; fewer than `length` where slots are reserved for unknown ids.
    computed: tokens with keys and values in the cache (`KVCache.commit`). hit_tokens: tokens that
    `KVCache.open` reused from the cache; copied_tokens of them were copied from a partial page.
    host_range: host memory for its first pages, if it may exceed the pool; host_tokens of its
    tokens are there, and the table has the others.
    """

    cache: "KVCache"
    table: PageTable
    tokens: list[int]
    chain: Chain
    row: int | None  # in the host table; None: freed or swapped out
    computed: int = field(init=False)
    hit_tokens: int = 0
    copied_tokens: int = 0
    pending_transfer: PendingTransfer | None = None
    host_range: HostRange | None = None
    host_tokens: int = 0

    def __post_init__(self) -> None:
        self.computed = self.table.length

    @property
    def length(self) -> int:
        """Tokens that have a slot, computed or not."""
        return self.host_tokens + self.table.length

    def __repr__(self) -> str:
        return f"Sequence({self.computed} of {self.length} tokens computed, {self.table})"


class KVCache:
    """num_pages pages as `spec` describes them, shared by up to max_seqs sequences.

    One step: `append` tokens, `view` the batch, `write` keys and values of each layer, attend,
    `commit`. A call returns `NoRoom` and changes nothing if no page or no row for one more sequence
    is free. A request that never fits is a ValueError. All calls use the current stream: pages are
    copied, written and read in the order of that stream.

    offload_pages: pages of host memory for sequences that are longer than the pool. `open` one with
    offload_pages, then `offload` its first pages when others need theirs.
    """

    max_seqlen: int
    pages: PageTensors
    pool: Pool
    prefix: PrefixIndex
    prefix_tree: PrefixTree
    host_table: HostTable
    offloaded: OffloadMemory | None

    def __init__(
        self,
        spec: Spec,
        num_pages: int,
        *,
        max_seqs: int = 256,
        max_seqlen: int = DEFAULT_MAX_SEQLEN,
        prefix_reuse: bool = True,
        offload_pages: int = 0,
    ):
        if max_seqs < 1 or max_seqlen < 1:
            raise ValueError(f"{max_seqs=} and {max_seqlen=} must be at least 1")
        self.spec = spec
        self.pool = Pool(num_pages, spec.page_size)
        self.max_seqs = max_seqs
        self.max_seqlen = min(max_seqlen, max(self.pool.capacity, offload_pages) * spec.page_size)
        self.pages = PageTensors(spec, self.pool)
        self.offloaded = OffloadMemory(self.pages, offload_pages) if offload_pages else None
        self.prefix_reuse = prefix_reuse
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, also after a call that was interrupted: no sequence, no
        prefix, every page free. The page tensors keep their memory. Older handles become foreign.
        """
        self.pool = self.pages.pool = Pool(self.pool.num_pages, self.spec.page_size)
        self.prefix = PrefixIndex(self.pool)
        self.prefix_tree = PrefixTree()
        if self.offloaded is not None:
            self.offloaded.reset()
        width = min(-(-self.max_seqlen // self.spec.page_size), self.pool.capacity)
        self.host_table = HostTable(self.max_seqs, width)

    def release_memory(self) -> None:
        """`reset`, and free the memory of the pages: until `take_memory` no sequence is opened."""
        self.reset()
        self.pages.release_memory()

    def take_memory(self) -> None:
        """Allocate the memory of the pages again, after `release_memory`."""
        self.pages.take_memory()

    @property
    def device(self) -> torch.device:
        return self.pages.k.device

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(k_pages, v_pages) of one layer, as paged_attention takes them."""
        return self.pages.layer(layer)

    def scales(self, layer: int) -> LayerScales:
        """k_scales and v_scales of one layer, as paged_attention takes them; empty unless the cache
        is quantised.
        """
        return self.pages.scales(layer)

    def open(
        self, tokens: abc.Sequence[int] = (), *, salt: str = "", offload_pages: int = 0
    ) -> Sequence | NoRoom:
        """A sequence that starts with the cached prefix of the prompt `tokens` under this salt, or
        an empty one. Append the rest of the prompt, tokens[sequence.length:]: at least one token.
        offload_pages: pages of host memory to reserve, for `offload`.
        """
        tokens = _ids(tokens)
        self.pages.check_memory()
        self._check_fits(len(tokens))
        if not self.host_table.free_rows:
            return NoRoom(1, 0, "sequences")
        root, host_range = self.prefix.root(salt), self._reserve_host(offload_pages)
        if isinstance(host_range, NoRoom):
            return host_range
        hit = self.prefix.match(tokens, root) if self.prefix_reuse and tokens else _MISS
        table = self.pool.adopt(hit.pages)
        copied = 0 if hit.source is None else self._copy_partial_page(table, hit.source, hit.copied)
        cached = tokens[: table.length]
        chain, row = Chain(root, hit.keys), self._assign_row(table)
        return Sequence(self, table, cached, chain, row, len(cached), copied, host_range=host_range)

    def append(self, sequence: Sequence, tokens: abc.Sequence[int]) -> NoRoom | None:
        """Allocate slots for tokens that are computed next. None on success."""
        return self.append_all([sequence], [tokens])

    def append_all(
        self, sequences: abc.Sequence[Sequence], tokens: abc.Sequence[abc.Sequence[int]]
    ) -> NoRoom | None:
        """`append` to many sequences, all or none, with one batch of page copies."""
        ids = [_ids(more) for more in tokens]
        self._residents(sequences)
        lengths = [s.length for s in sequences]
        if full := self.reserve_all(sequences, [len(more) for more in ids]):
            return full
        for sequence, length, more in zip(sequences, lengths, ids, strict=True):
            if len(sequence.tokens) == length:
                sequence.tokens += more
        return None

    def reserve(self, sequence: Sequence, num_tokens: int) -> NoRoom | None:
        """Allocate slots for tokens with ids that are not known yet. The prefix index leaves out
        these tokens and all tokens after them until `append_tokens` names their ids. Positions of
        embeddings never get ids.
        """
        return self.reserve_all([sequence], [num_tokens])

    def reserve_all(
        self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]
    ) -> NoRoom | None:
        """`reserve` for many sequences, all or none, with one batch of page copies."""
        tables = [self.resident(s) for s in sequences]
        counts = as_ints("num_tokens", counts)
        size = self.spec.page_size
        places = [t.length // size for t in tables]
        for sequence, count in zip(sequences, counts, strict=False):
            self._check_fits(sequence.length + count)
        copies = self.pool.extend_all(tables, counts)
        if isinstance(copies, NoRoom):
            return copies
        self.pages.copy(copies)
        for sequence, table, place in zip(sequences, tables, places, strict=True):
            self.host_table.put(sequence.row, place, table.pages_from(place))
        return None

    def reserve_each(self, sequences: abc.Sequence[Sequence]) -> NoRoom | None:
        """`reserve` of one token for many sequences, all or none."""
        tables = self._residents(sequences)
        self._check_fits(1 + max([s.length for s in sequences], default=0))
        grown = self.pool.extend_each(tables)
        if isinstance(grown, NoRoom):
            return grown
        moved, copies = grown
        self.pages.copy(copies)
        for i in moved:
            place = len(tables[i]) - 1
            self.host_table.put(sequences[i].row, place, tables[i].pages_from(place))
        return None

    def append_tokens(self, sequence: Sequence, tokens: abc.Sequence[int]) -> None:
        """Set the ids of the first reserved tokens without ids."""
        ids, slots = pack_token_ids(tokens), self.resident(sequence).length + sequence.host_tokens
        free = slots - len(sequence.tokens)
        if len(ids) > free:
            raise ValueError(f"{len(ids)} ids for {free} reserved tokens")
        sequence.tokens += ids

    def fork(self, sequence: Sequence) -> Sequence | NoRoom:
        """A second sequence with the same tokens. Both share pages until one of them writes. All
        tokens must be computed: otherwise both sequences would write the same slots.
        """
        table = self.resident(sequence)
        if sequence.computed < sequence.length:
            raise ValueError(
                f"{sequence.length - sequence.computed} tokens are not computed yet: commit or"
                " truncate them before a fork"
            )
        if sequence.host_range is not None:
            raise ValueError("a sequence with pages in host memory cannot be forked")
        if not self.host_table.free_rows:
            return NoRoom(1, 0, "sequences")
        table = self.pool.fork(table)
        row, chain = self._assign_row(table), sequence.chain.fork()
        return Sequence(self, table, sequence.tokens.copy(), chain, row)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drop the tokens from `length` on. Those in host memory cannot be dropped."""
        table, on_host = self.resident(sequence), sequence.host_tokens
        length = as_int("length", length)
        if 0 <= length < on_host:
            raise ValueError(f"{length=} would drop some of {on_host} tokens in host memory")
        self.pool.truncate(table, length - on_host)
        if length < self.prefix_tree.num_pages(sequence) * self.spec.page_size:
            self.prefix_tree.remove(sequence)
        sequence.computed = min(sequence.computed, length)
        del sequence.tokens[length:]
        del sequence.chain.keys[length // self.spec.page_size :]

    def move_tokens(self, sequence: Sequence, sources: abc.Sequence[int], start: int) -> None:
        """Copy keys and values of the tokens at these positions, which rise, to the positions from
        `start` on. No other sequence may read these, and the tokens there must have no ids yet.
        """
        table, size = self.resident(sequence), self.spec.page_size
        positions = *sources, *range(start, start + len(sources))
        places = [position - sequence.host_tokens for position in positions]
        if places and not 0 <= min(places) <= max(places) < table.length:
            raise ValueError(f"positions {list(sources)} and {start=} of {sequence}")
        if start < len(sequence.tokens):
            raise ValueError(f"{start=}, but {len(sequence.tokens)} tokens have ids")
        pages = table.pages_from(0)
        slots = [pages[place // size] * size + place % size for place in places]
        pairs = zip(slots[: len(sources)], slots[len(sources) :], strict=True)
        if moved := [pair for pair in pairs if pair[0] != pair[1]]:
            self.pages.move_slots(moved)

    def commit(self, sequence: Sequence, length: int | None = None) -> None:
        """Keys and values of the first `length` tokens (default: all) are written in every layer.
        From now on `open` may share them.
        """
        self.resident(sequence)
        self.commit_all([sequence], [sequence.length if length is None else length])

    def commit_all(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> None:
        """`commit` for many sequences, all or none."""
        size, filled = self.spec.page_size, self.pool.filled
        tables = self._residents(sequences)
        lengths = as_ints("length", lengths)
        if len(set(sequences)) != len(sequences) or len(lengths) != len(sequences):
            raise ValueError(
                f"{len(sequences)} sequences and {len(lengths)} lengths must be as many, no"
                " sequence twice"
            )
        for sequence, table, length in zip(sequences, tables, lengths, strict=True):
            slots = sequence.host_tokens + table.length
            if not sequence.computed <= length <= slots:
                done = sequence.computed
                raise ValueError(f"cannot commit {length=}: {done} of {slots} are computed")
        for sequence, table, length in zip(sequences, tables, lengths, strict=True):
            sequence.computed = length
            if sequence.host_tokens:
                continue  # not published any more
            known = min(length, len(sequence.tokens))
            full = known // size
            # A decode step changes the prefix index only when a page fills up or a page begins.
            if full > len(sequence.chain.keys) or (known % size and not filled(table[full])):
                self._publish(sequence, final=False)

    def free(self, sequence: Sequence) -> None:
        """Release the pages. Committed tokens stay in the prefix index until their pages are
        reused.
        """
        table = self.resident(sequence)
        self._publish(sequence, final=True)
        self.release_row(sequence)
        self.pool.free(table)
        self.release_host_range(sequence)

    def offload(self, sequence: Sequence, num_pages: int) -> int:
        """Copy the first pages on the device to the host, and release them, until num_pages of them
        are free: only full pages of computed tokens, and shared ones only if private ones follow.
        Return how many are free. From then on the sequence enters no page into the prefix index;
        those entered before stay valid until they are reused.
        """
        num_pages = max(0, as_int("num_pages", num_pages))
        places = list(islice(self._offloadable(sequence), num_pages))
        if places:
            table, count = sequence.table, places[-1] + 1
            self.prefix_tree.remove(sequence)
            self.offloaded.store(sequence.host_range, table.pages_from(0)[:count])
            self.pool.drop_first(table, count)
            sequence.host_tokens += count * self.spec.page_size
            self.host_table.put(sequence.row, 0, table.pages_from(0))
        return len(places)

    def num_offloadable(self, sequence: Sequence) -> int:
        """How many pages `offload` can free."""
        return len(list(self._offloadable(sequence)))

    def _offloadable(self, sequence: Sequence) -> abc.Iterator[int]:
        """The places of full pages of computed tokens that no other sequence holds, as far as host
        memory is reserved for them.
        """
        table, held = self.resident(sequence), sequence.host_range
        if held is None:
            raise ValueError("the sequence was opened without offload_pages")
        full = (sequence.computed - sequence.host_tokens) // self.spec.page_size
        pages = table.pages_from(0)[: min(full, held.capacity - held.num_pages)]
        return (place for place, page in enumerate(pages) if self.pool.refs(page) == 1)

    def release_host_range(self, sequence: Sequence) -> None:
        """Release the host memory of a sequence that is freed."""
        if sequence.host_range is not None:
            self.offloaded.release(sequence.host_range)
            sequence.host_range, sequence.host_tokens = None, 0

    @property
    def offload_pages(self) -> int:
        """Pages of host memory for sequences that are longer than the pool."""
        return 0 if self.offloaded is None else self.offloaded.capacity

    @property
    def num_offloaded(self) -> int:
        """Pages in host memory now."""
        return 0 if self.offloaded is None else self.offloaded.num_used

    def can_reserve_host(self, num_pages: int) -> bool:
        """Whether `open` with this many offload_pages would find them."""
        num_pages = as_int("num_pages", num_pages)
        return self.offloaded is not None and self.offloaded.find_gap(num_pages) is not None

    def track_prefixes(self, sequences: abc.Iterable[Sequence]) -> None:
        """Enter sequences into `prefix_tree` with their full pages of computed tokens, if they are
        not there. The cache removes a sequence that loses one of these pages: by `free`, `truncate`
        or `offload`, or swapped out.
        """
        size, tree = self.spec.page_size, self.prefix_tree
        for sequence in sequences:
            full = sequence.computed // size
            if full and not sequence.host_tokens and sequence not in tree:
                tree.add(sequence, self.resident(sequence).pages_from(0)[:full])

    def write(self, layer: int, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        """Write k (tokens, num_kv_heads, head_dim) and v (tokens, num_kv_heads, head_dim_v) of one
        layer to the slots of slot_mapping, int32 (tokens,); slot -1 writes nothing. v is None if
        the keys hold the values (`Spec.latent`).
        """
        self.pages.write(layer, k, v, slot_mapping)

    def view(
        self,
        sequences: abc.Sequence[Sequence],
        out: PagedBatch | None = None,
        extra: Tensor | None = None,
    ) -> PagedBatch:
        """The tokens of these sequences that are not computed yet, as one step on the device.

        out: a batch from `static_batch`, refilled in place (for CUDA graphs). Its page table keeps
        stale entries behind the pages of each sequence. extra: int32 numbers that are copied to the
        device with the batch.
        """
        members, prefixes = self._members(sequences), self._host_prefixes(sequences)
        if prefixes and out is not None:
            raise ValueError("a static batch takes no sequence with pages in host memory")
        num_extra = 0 if extra is None else len(extra)
        shape = batches.shape_of(members, self.spec.page_size, num_extra)
        if out is not None:
            batches.check_fits(out, shape)
            shape = batches.staged_shape(shape, out.shape)
        staged = batches.empty(shape, pinned=self.device.type == "cuda")
        if members.rows:
            batches.fill(staged, members, self.host_table, self.spec.page_size)
        if extra is not None:
            staged.extra[:num_extra] = extra
        if out is None:
            buffer = staged.buffer.to(self.device, non_blocking=True)
            batch = batches.split_buffer(buffer, shape)
            is_fresh = not prefixes and not any(members.computed)
            return batch._replace(host_prefixes=prefixes, is_fresh=is_fresh)
        batches.refill(out, staged, len(members.rows))
        return out

    def static_table(self) -> Tensor:
        """A page table on the device for max_seqs sequences of max_seqlen tokens."""
        return torch.zeros_like(self.host_table.pages, device=self.device)

    def static_batch(self, shape: BatchShape, table: Tensor | None = None) -> PagedBatch:
        """An empty batch on the device with fixed addresses, for `view(sequences, out=...)`. Static
        batches that are never in use at the same time may share a table of max_pages columns.
        """
        if table is None:
            size = shape.num_seqs, shape.max_pages
            table = torch.zeros(size, dtype=torch.int32, device=self.device)
        return batches.static(shape, table)

    def check(self) -> None:
        """Raise AssertionError unless pool, prefix index and host table are consistent. It walks
        every page: call it in tests and idle moments.
        """
        self.pool.check()
        self.prefix.check()
        self.prefix_tree.check((s, s.table.pages_from(0)) for s in self.prefix_tree.sequences)
        if self.offloaded is not None:
            self.offloaded.check()
        rows = self.host_table.free_rows
        if len(set(rows)) != len(rows) or not set(rows) <= set(range(self.max_seqs)):
            raise AssertionError("a row of the host table is free twice")

    def resident(self, sequence: Sequence) -> PageTable:
        """The table of a sequence on the device. Work queued from now on waits until its pages have
        arrived.
        """
        own = isinstance(sequence, Sequence) and sequence.cache is self
        # A handle from before a `reset` has a row, but its table belongs to a discarded pool.
        if not own or sequence.row is None or not self.pool.holds([sequence.table]):
            raise ValueError(self._describe_foreign(sequence))
        if sequence.pending_transfer is not None:
            sequence.pending_transfer.wait()
            sequence.pending_transfer = None
        return sequence.table

    def _residents(self, sequences: abc.Sequence[Sequence]) -> list[PageTable]:
        """`resident` for many sequences; the fast path skips sequences that need no wait."""
        for s in sequences:
            if s.cache is not self or s.row is None or s.pending_transfer is not None:
                self.resident(s)
        tables = [s.table for s in sequences]
        return tables if self.pool.holds(tables) else [self.resident(s) for s in sequences]

    def _describe_foreign(self, sequence: Sequence) -> str:
        if not isinstance(sequence, Sequence):
            return f"{sequence!r} is not a sequence"
        if sequence.cache is not self:
            return "a sequence of another cache"
        is_freed = sequence.table not in self.pool.tables
        return f"the sequence was {'freed already' if is_freed else 'swapped out'}"

    def release_row(self, sequence: Sequence) -> None:
        """Take the sequence out of the host table: it is about to be swapped out or freed."""
        self.resident(sequence)
        self.prefix_tree.remove(sequence)
        self.host_table.free_rows.append(sequence.row)
        sequence.row = None

    def assign_row(self, sequence: Sequence) -> None:
        """Give a sequence that was swapped in a row of the host table."""
        own = isinstance(sequence, Sequence) and sequence.cache is self and sequence.row is None
        if not own or not self.pool.holds([sequence.table]) or not self.host_table.free_rows:
            raise ValueError(f"{sequence!r} needs no row, or its pages are not on the device")
        sequence.row = self._assign_row(sequence.table)

    def _assign_row(self, table: PageTable) -> int:
        row = self.host_table.free_rows.pop()
        self.host_table.put(row, 0, table.pages_from(0))
        return row

    def _copy_partial_page(self, table: PageTable, source: int, num_tokens: int) -> int:
        """The number of tokens reused by copy: 0 if no page is free to copy to."""
        copies = self.pool.copy_partial_page(table, source, num_tokens)
        if isinstance(copies, NoRoom):
            return 0
        self.pages.copy(copies)
        return num_tokens

    def _publish(self, sequence: Sequence, final: bool) -> None:
        if self.prefix_reuse and not sequence.host_tokens:
            length = min(sequence.computed, len(sequence.tokens))
            self.prefix.publish(sequence.table, sequence.tokens, length, sequence.chain, final)

    def _members(self, sequences: abc.Sequence[Sequence]) -> Members:
        """Counted from the first page of each table."""
        lengths = [t.length for t in self._residents(sequences)]
        computed = [s.computed - s.host_tokens for s in sequences]
        return Members([s.row for s in sequences], lengths, computed)

    def _host_prefixes(self, sequences: abc.Sequence[Sequence]) -> tuple[HostPrefix, ...]:
        if self.offloaded is None:
            return ()
        prefixes, start = [], 0
        for s in sequences:
            stop = start + s.length - s.computed
            if s.host_tokens:
                prefixes.append(HostPrefix(s.host_range, s.host_tokens, start, stop, s.computed))
            start = stop
        return tuple(prefixes)

    def _reserve_host(self, num_pages: int) -> HostRange | NoRoom | None:
        if not as_int("offload_pages", num_pages):
            return None
        if self.offloaded is None:
            raise ValueError(f"offload_pages={num_pages}, but the cache has no offload_pages")
        return self.offloaded.reserve(int(num_pages))

    def _check_fits(self, length: int) -> None:
        if length > self.max_seqlen:
            raise ValueError(f"{length} tokens exceed the cache's max_seqlen={self.max_seqlen}")


def _ids(tokens: abc.Sequence[int] | Tensor) -> list[int]:
    return pack_token_ids(tokens.tolist() if isinstance(tokens, Tensor) else tokens).tolist()
