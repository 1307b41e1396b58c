"""Requests and their pages: allocation, forks, swapping and recomputation. No tensors here."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from onchip.engine.preemption_costs import PreemptionCosts
from onchip.engine.request import Request, Sample, Status
from onchip.engine.step import Chunk
from onchip.kvcache.pool import NoRoom

_OFFLOADED_AT_ONCE = 32  # pages: a copy of fewer costs the host about as much
ScheduledTokens = tuple[Sample, int]  # a sample, and how many of its tokens the step computes


class PagePool(Protocol):
    """The interface of a pool that the scheduler needs."""

    page_size: int

    @property
    def capacity(self) -> int: ...

    @property
    def num_free(self) -> int: ...


class PagedCache(Protocol):
    """The interface of a cache that the scheduler needs; `onchip.kvcache.KVCache` implements it. A
    sequence has `computed`, `length`, `tokens`, `hit_tokens` and `host_tokens`.
    """

    max_seqs: int
    max_seqlen: int

    @property
    def pool(self) -> PagePool: ...
    @property
    def offload_pages(self) -> int: ...
    def open(self, tokens: Sequence[int], *, salt: str, offload_pages: int) -> Any: ...
    def reserve_all(self, sequences: Sequence[Any], counts: Sequence[int]) -> NoRoom | None: ...
    def reserve_each(self, sequences: Sequence[Any]) -> NoRoom | None: ...
    def append_tokens(self, sequence: Any, tokens: Sequence[int]) -> None: ...
    def fork(self, sequence: Any) -> Any: ...
    def truncate(self, sequence: Any, length: int) -> None: ...
    def move_tokens(self, sequence: Any, sources: Sequence[int], start: int) -> None: ...
    def commit_all(self, sequences: Sequence[Any], lengths: Sequence[int]) -> None: ...
    def free(self, sequence: Any) -> None: ...
    def offload(self, sequence: Any, num_pages: int) -> int: ...
    def num_offloadable(self, sequence: Any) -> int: ...
    def can_reserve_host(self, num_pages: int) -> bool: ...


class SwapTier(Protocol):
    """The interface of host memory for preempted sequences; `onchip.kvcache.HostTier` implements
    it. A group of swapped sequences has `sequences`, `pages` and `is_swapping_out`.
    """

    capacity: int

    def swap_out(self, sequences: Sequence[Any]) -> Any: ...
    def swap_in(self, group: Any) -> NoRoom | None: ...
    def discard(self, group: Any) -> None: ...
    def poll(self) -> None: ...
    def synchronize(self) -> None: ...


class KVManager:
    """The cache and the host tier, by request. A preempted request becomes SWAPPED (its pages are
    copied to the host) or RECOMPUTE (its pages are freed), whichever costs less.
    """

    costs: PreemptionCosts | None

    def __init__(self, cache: PagedCache, tier: SwapTier | None, costs: PreemptionCosts | None):
        self._cache, self._tier, self.costs = cache, tier, costs
        self._last_misfit: tuple[Request, int] | None = None

    @property
    def num_free(self) -> int:
        return self._cache.pool.num_free

    def poll(self) -> None:
        if self._tier is not None:
            self._tier.poll()

    def synchronize(self) -> None:
        """Wait until every swap-out under way has finished."""
        if self._tier is not None:
            self._tier.synchronize()

    def append(self, scheduled: Sequence[ScheduledTokens]) -> NoRoom | None:
        """Reserve slots for the next tokens of all these samples; if pages are missing, reserve
        none.
        """
        if not scheduled:
            return None
        sequences = [sample.sequence for sample, _ in scheduled]
        if full := self._cache.reserve_all(sequences, [count for _, count in scheduled]):
            return full
        for sample, _ in scheduled:
            self._append_known(sample)
        return None

    def append_each(self, samples: Sequence[Sample]) -> NoRoom | None:
        """Reserve one slot for each of these samples; if pages are missing, reserve none."""
        if full := self._cache.reserve_each([sample.sequence for sample in samples]):
            return full
        for sample in samples:
            if not sample.pending:
                self._append_known(sample)
        return None

    def _append_known(self, sample: Sample) -> None:
        """Give the cache the known tokens of a sample that have slots and are new to it."""
        sequence = sample.sequence
        self._cache.append_tokens(sequence, sample.tokens(len(sequence.tokens), sequence.length))

    def append_drafts(self, sample: Sample, num_drafts: int) -> NoRoom | None:
        """Reserve slots for drafts. The cache does not get their ids: no other request may share a
        slot that is overwritten if its draft is rejected.
        """
        return self._cache.reserve_all([sample.sequence], [num_drafts])

    def roll_back(self, sample: Sample, start: int, path: Sequence[int]) -> None:
        """Drop the slots of rejected drafts, and give the cache the tokens of the others. The last
        token of the sample has no slot yet. start: position of the first draft's slot; path: the
        accepted drafts, whose keys and values move to consecutive slots.
        """
        sequence = sample.sequence
        if sequence is None or sample.request.host_group is not None:
            return  # ended, or preempted during the step, which dropped all drafts
        kept = path[: max(0, sample.length - 1 - start)]
        self._cache.move_tokens(sequence, [start + draft for draft in kept], start)
        self._cache.truncate(sequence, min(sequence.length, sample.length - 1))
        self._append_known(sample)

    def append_last(self, samples: Iterable[Sample]) -> None:
        """Give the cache the last token of each sample that already has a slot for it."""
        for sample in samples:
            sequence = sample.sequence
            if sequence is not None and len(sequence.tokens) < sequence.length:
                self._cache.append_tokens(sequence, (sample.token_ids[-1],))

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """Mark the tokens of these chunks as written."""
        self._cache.commit_all(
            [chunk.sample.sequence for chunk in chunks], [chunk.stop for chunk in chunks]
        )

    def offload(self, requests: Iterable[Request], num_pages: int) -> bool:
        """Free num_pages pages or a few more by copying pages of long requests to the host, or as
        many as they have, the first of these requests first. Return whether any page was freed.
        """
        freed, num_pages = 0, max(num_pages, _OFFLOADED_AT_ONCE)
        for sample in [s for r in requests if r.is_long for s in r.resident]:
            if freed < num_pages:
                freed += self._cache.offload(sample.sequence, num_pages - freed)
        return freed > 0

    def make_room(self, sample: Sample, num_tokens: int, running: Iterable[Request]) -> int:
        """Offload pages of a long request until it has slots for its next num_tokens tokens. Return
        how many of them have slots. The request takes none of the pages that the running ones need
        soon, except that it takes one if any is free: otherwise it would starve.
        """
        size, sequence = self._cache.pool.page_size, sample.sequence
        unused = -sequence.length % size  # slots of its last page
        needed, reserve = -(-(num_tokens - unused) // size), self._num_needed_soon(running)
        if needed > 0 and needed + reserve > self.num_free:
            self.offload([sample.request], needed + reserve - self.num_free)
        pages = max(self.num_free - reserve, min(1, self.num_free))
        return min(num_tokens, unused + pages * size)

    def _num_needed_soon(self, running: Iterable[Request]) -> int:
        """Pages for the known tokens of all ordinary requests, and one more for each sequence."""
        samples = [s for r in running if not r.is_long for s in r.resident]
        size = self._cache.pool.page_size
        return sum([1 + max(0, s.length - s.sequence.length) // size for s in samples])

    def lacks_host_range(self, request: Request) -> bool:
        """Whether a waiting request must reserve host memory. A swapped one has kept its own."""
        return request.is_long and request.host_group is None

    def can_reserve_host(self, request: Request) -> bool:
        return self._cache.can_reserve_host(request.offload_pages)

    def num_offloaded(self, request: Request) -> int:
        """Pages of a running request that are in host memory."""
        size = self._cache.pool.page_size
        return sum(sample.sequence.host_tokens for sample in request.resident) // size

    def fork(self, parent: Sample, child: Sample) -> bool:
        """Fork the parent's sequence for the child. Return False if the batch has no free row."""
        sequence = self._cache.fork(parent.sequence)
        if isinstance(sequence, NoRoom):
            return False
        child.sequence = sequence
        return True

    def release(self, sample: Sample) -> None:
        """Free a sample's sequence on the device. On the host, the sequences of a request stay
        together.
        """
        if sample.sequence is not None and sample.request.host_group is None:
            self._cache.free(sample.sequence)
            sample.sequence = None

    def release_all(self, request: Request) -> None:
        """Free all pages of a request, on the device or on the host."""
        if request.host_group is not None:
            self._tier.discard(request.host_group)
            request.host_group = None
        else:
            for sample in request.samples:
                self.release(sample)
        for sample in request.samples:
            sample.sequence, sample.candidates = None, ()

    def preempt(self, request: Request) -> None:
        """Swap a request out, or free its pages."""
        for sample in request.resident:  # free the slots of tokens that no step computes
            known = sample.length - sample.pending  # drafts of a step in flight follow
            self._cache.truncate(sample.sequence, min(sample.sequence.computed, known))
        request.host_group = self._swap_out(request)
        request.status = Status.SWAPPED
        if request.host_group is None:
            self.discard(request)

    def discard(self, request: Request) -> None:
        """Free all pages of a request, which is then recomputed."""
        self.release_all(request)
        request.status = Status.RECOMPUTE

    def make_resident(self, request: Request, num_running: int) -> bool:
        """Bring a request onto the device. num_running: sequences that run now; 0 skips the check
        that leaves pages for them. Return False if the request does not fit.
        """
        return (
            self._swap_in(request, num_running)
            if request.host_group
            else self._start(request, num_running)
        )

    def _swap_out(self, request: Request) -> Any:
        """Copy a request to the host. Return None if the host is full or recomputing is cheaper."""
        sequences = [s.sequence for s in request.resident]
        longest = max((s.computed for s in sequences), default=0)
        pages = request.pages(self._cache.pool.page_size, longest) - self.num_offloaded(request)
        if self._tier is None or not longest or pages > self._tier.capacity:
            return None
        shared = min(longest, len(request.prompt_token_ids))
        tokens = shared + sum(max(0, s.computed - shared) for s in sequences)
        if not self.costs.prefers_swap(pages, tokens):
            return None
        group = self._tier.swap_out(sequences)
        return None if isinstance(group, NoRoom) else group

    def _swap_in(self, request: Request, num_running: int) -> bool:
        group = request.host_group
        if num_running and len(group.pages) + len(group.sequences) + num_running > self.num_free:
            return False
        if isinstance(self._tier.swap_in(group), NoRoom):
            return False
        request.host_group = None
        for sample in request.samples:
            if sample.finished:  # stopped while it was on the host
                self.release(sample)
        return True

    def _start(self, request: Request, num_running: int) -> bool:
        """Open the sequence of the first sample, starting with its cached prefix."""
        if num_running and self._last_misfit == (request, self.num_free):
            return False  # no page was freed since the last attempt
        sequence = self._cache.open(
            _cacheable_tokens(request), salt=request.salt, offload_pages=request.offload_pages
        )
        if isinstance(sequence, NoRoom):
            return False
        if num_running and not self._fits(request, sequence, num_running):
            self._cache.free(sequence)
            self._last_misfit = (request, self.num_free)
            return False
        request.unfinished[0].sequence = sequence
        return True

    def _fits(self, request: Request, sequence: Any, num_running: int) -> bool:
        """Whether all known tokens of the request and one more fit while each running sequence
        still gets one more page. Prompts admitted without this reserve would be preempted again
        soon.
        """
        if request.is_long:  # it offloads its own pages, also those of a cached prefix
            return num_running < self.num_free + self._cache.num_offloadable(sequence)
        size = self._cache.pool.page_size
        need = request.pages(size, request.unfinished[0].length + 1) - -(-sequence.length // size)
        return need + num_running <= self.num_free


def _cacheable_tokens(request: Request) -> list[int]:
    """The tokens of the first sample that may come from the prefix cache. The other samples fork at
    the end of the prompt, so nothing beyond it may be cached. Prompt logprobs and the mean of
    hidden states need the whole prompt, so nothing may be.
    """
    first, prompt = request.unfinished[0], len(request.prompt_token_ids)
    if request.params.prompt_logprobs is not None and not first.token_ids:
        return []
    if request.pooling is not None and request.pooling.pooling == "mean":
        return []
    return first.tokens(0, prompt if len(request.unfinished) > 1 else first.length)
