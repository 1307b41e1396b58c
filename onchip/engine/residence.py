"""Which requests have pages on the device, and how they come and go. No tensors here."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from onchip.engine.costs import Costs
from onchip.engine.request import Request, Sample, Status
from onchip.engine.step import Run
from onchip.kvcache.pool import NoRoom

Chunk = tuple[Sample, int]  # a sample, and how many tokens it computes


class Pages(Protocol):
    """What the scheduler asks of a pool."""

    page_size: int

    @property
    def capacity(self) -> int: ...

    @property
    def num_free(self) -> int: ...


class Cache(Protocol):
    """What the scheduler asks of a cache; `onchip.kvcache.KVCache` is one. Its sequences have
    `computed`, `length`, `tokens` and `hit_tokens`.
    """

    max_seqs: int
    max_seqlen: int

    @property
    def pool(self) -> Pages: ...
    def open(self, tokens: Sequence[int], *, salt: str) -> Any: ...
    def reserve_all(self, sequences: Sequence[Any], counts: Sequence[int]) -> NoRoom | None: ...
    def reserve_each(self, sequences: Sequence[Any]) -> NoRoom | None: ...
    def append_tokens(self, sequence: Any, tokens: Sequence[int]) -> None: ...
    def fork(self, sequence: Any) -> Any: ...
    def truncate(self, sequence: Any, length: int) -> None: ...
    def commit_all(self, sequences: Sequence[Any], lengths: Sequence[int]) -> None: ...
    def free(self, sequence: Any) -> None: ...


class Tier(Protocol):
    """And of a place for sequences that wait; `onchip.kvcache.HostTier` is one. Its families have
    `sequences`, `pages` and `is_swapping_out`.
    """

    capacity: int

    def swap_out(self, sequences: Sequence[Any]) -> Any: ...
    def swap_in(self, family: Any) -> NoRoom | None: ...
    def discard(self, family: Any) -> None: ...
    def poll(self) -> None: ...
    def synchronize(self) -> None: ...


class Residence:
    """The cache and the host tier as requests see them. A request that leaves becomes SWAPPED (its
    pages travel to the host) or RECOMPUTE (they are given up), whichever costs less.
    """

    def __init__(self, cache: Cache, tier: Tier | None, costs: Costs | None):
        self._cache, self._tier, self.costs = cache, tier, costs
        self._too_full: tuple[Request, int] | None = None

    @property
    def num_free(self) -> int:
        return self._cache.pool.num_free

    def poll(self) -> None:
        if self._tier is not None:
            self._tier.poll()

    def synchronize(self) -> None:
        """Wait until every page that leaves has left."""
        if self._tier is not None:
            self._tier.synchronize()

    def append(self, chunks: Sequence[Chunk]) -> NoRoom | None:
        """Slots for the next tokens of these samples, all or none."""
        if not chunks:
            return None
        sequences = [sample.sequence for sample, _ in chunks]
        if full := self._cache.reserve_all(sequences, [count for _, count in chunks]):
            return full
        for sample, _ in chunks:
            self.tell(sample)
        return None

    def append_each(self, samples: Sequence[Sample]) -> NoRoom | None:
        """A slot for the next token of each of these samples, all or none."""
        if full := self._cache.reserve_each([sample.sequence for sample in samples]):
            return full
        for sample in samples:
            if not sample.pending:
                self.tell(sample)
        return None

    def tell(self, sample: Sample) -> None:
        """What is known of the tokens of a sample that have slots."""
        sequence = sample.sequence
        self._cache.append_tokens(sequence, sample.tokens(len(sequence.tokens), sequence.length))

    def tell_last(self, samples: Iterable[Sample]) -> None:
        """The last token of each is known now; those that went on have a slot for it already."""
        for sample in samples:
            sequence = sample.sequence
            if sequence is not None and len(sequence.tokens) < sequence.length:
                self._cache.append_tokens(sequence, (sample.token_ids[-1],))

    def commit(self, runs: Sequence[Run]) -> None:
        """What these runs compute is written."""
        self._cache.commit_all([run.sample.sequence for run in runs], [run.stop for run in runs])

    def fork(self, parent: Sample, child: Sample) -> bool:
        """The child goes on where the parent is. False: there is no row for one more sequence."""
        sequence = self._cache.fork(parent.sequence)
        if isinstance(sequence, NoRoom):
            return False
        child.sequence = sequence
        return True

    def release(self, sample: Sample) -> None:
        """Give back what a sample holds on the device; on the host families stay together."""
        if sample.sequence is not None and sample.request.family is None:
            self._cache.free(sample.sequence)
            sample.sequence = None

    def release_all(self, request: Request) -> None:
        """Give back what a request holds, wherever it is."""
        if request.family is not None:
            self._tier.discard(request.family)
            request.family = None
        else:
            for sample in request.samples:
                self.release(sample)
        for sample in request.samples:
            sample.sequence, sample.candidates = None, ()

    def leave(self, request: Request) -> None:
        for sample in request.rooted:  # slots of a step that is not going to happen
            self._cache.truncate(sample.sequence, sample.sequence.computed)
        request.family = self._swap_out(request)
        request.status = Status.SWAPPED
        if request.family is None:
            self.give_up(request)

    def give_up(self, request: Request) -> None:
        """It is computed again, wherever it is now."""
        self.release_all(request)
        request.status = Status.RECOMPUTE

    def enter(self, request: Request, seats: int) -> bool:
        """Whether it is there now, beside `seats` samples that run; 0: it has the device alone."""
        return self._return(request, seats) if request.family else self._open(request, seats)

    def _swap_out(self, request: Request) -> Any:
        """The family on the host; None if that is not possible or not worth it."""
        sequences = [s.sequence for s in request.rooted]
        longest = max((s.computed for s in sequences), default=0)
        pages = request.pages(self._cache.pool.page_size, longest)
        if self._tier is None or not longest or pages > self._tier.capacity:
            return None
        shared = min(longest, len(request.prompt_token_ids))
        tokens = shared + sum(max(0, s.computed - shared) for s in sequences)
        if not self.costs.prefers_swap(pages, tokens):
            return None
        family = self._tier.swap_out(sequences)
        return None if isinstance(family, NoRoom) else family

    def _return(self, request: Request, seats: int) -> bool:
        """Bring it home from the host."""
        family = request.family
        if seats and len(family.pages) + len(family.sequences) + seats > self.num_free:
            return False
        if isinstance(self._tier.swap_in(family), NoRoom):
            return False
        request.family = None
        for sample in request.samples:
            if sample.finished:  # it was stopped while it was away
                self.release(sample)
        return True

    def _open(self, request: Request, seats: int) -> bool:
        """Begin, or begin again: the first sample starts with what is cached."""
        if seats and self._too_full == (request, self.num_free):
            return False  # nothing was freed since it did not fit
        sequence = self._cache.open(_findable(request), salt=request.salt)
        if isinstance(sequence, NoRoom):
            return False
        if seats and not self._fits(request, sequence, seats):
            self._cache.free(sequence)
            self._too_full = (request, self.num_free)
            return False
        request.live[0].sequence = sequence
        return True

    def _fits(self, request: Request, sequence: Any, seats: int) -> bool:
        """All that is known of the request and one token more finds room beside those that run, if
        each of them takes one page more: prompts that are let in too early are preempted again.
        """
        size = self._cache.pool.page_size
        need = request.pages(size, request.live[0].length + 1) - -(-sequence.length // size)
        return need + seats <= self.num_free


def _findable(request: Request) -> list[int]:
    """The tokens of its first sample that need not be computed if the cache has them. Others fork
    from it at the end of the prompt; and log probabilities of a prompt need all of its logits.
    """
    first, prompt = request.live[0], len(request.prompt_token_ids)
    if request.params.prompt_logprobs is not None and not first.token_ids:
        return []
    return first.tokens(0, prompt if len(request.live) > 1 else first.length)
