"""Serving without a model: the slots of a key/value cache by request, step by step. No torch.

A slot holds the keys and values of one token in every layer. A request is admitted with its prompt
and grows by one token a step until its output is complete; requests wait in the order of arrival.
At every step a slot is one of

  used       holds a token
  reserved   will hold a token of the sequence that has it, later
  internal   belongs to a sequence that will never fill it
  external   is free while a request waits that it cannot serve: too few, or not contiguous

and waste is all but the first. Between two events (an arrival, a full page, an end) the only change
is that every sequence grows, so the averages over time are exact sums, not samples.
"""

import heapq
import math
import random
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

from onchip.kvcache.pool import NoRoom, Pool

GROW, FINISH = 1, 0  # at one step, ends free slots before sequences grow


class SimRequest(NamedTuple):
    """`output` tokens follow a prompt; both are stored."""

    arrival: int
    prompt: int
    output: int

    @property
    def final(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Lognormal:
    """Whole numbers from 1 with this mean; sigma is that of the logarithm."""

    mean: float
    sigma: float

    def draw(self, rng: random.Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(rng.lognormvariate(mu, self.sigma)))


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class SimWorkload:
    """Lengths of prompts and outputs; a pair longer than max_length is drawn again."""

    name: str
    prompt: Lognormal | Uniform
    output: Lognormal | Uniform
    max_length: int = 2048

    def lengths(self, seed: int) -> Iterator[tuple[int, int]]:
        rng = random.Random(seed)
        while True:
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            if prompt + output <= self.max_length:
                yield prompt, output


def arrivals(workload: SimWorkload, rate: float, steps: int, seed: int) -> Iterator[SimRequest]:
    """Poisson arrivals, `rate` a step, until `steps`."""
    rng = random.Random(f"arrivals {seed}")
    time = rng.expovariate(rate)
    for prompt, output in workload.lengths(seed):
        if time >= steps:
            return
        yield SimRequest(math.ceil(time), prompt, output)
        time += rng.expovariate(rate)


def rate_of(workload: SimWorkload, slots: int, load: float, seed: int) -> float:
    """The arrivals a step that would fill `load` times the slots if nothing were wasted.

    A request occupies prompt + 1, ..., prompt + output slots, one step each.
    """
    sample = [length for length, _ in zip(workload.lengths(seed), range(4096), strict=False)]
    held = sum(o * p + o * (o + 1) / 2 for p, o in sample) / len(sample)
    return load * slots / held


@dataclass
class Holding:
    """An allocation of one sequence: its capacity in tokens, and its position."""

    capacity: int
    place: Any


class Allocator(Protocol):
    """admit() returns None and grow() returns False if there is no free space; the state is then
    unchanged.
    """

    slots: int

    def admit(self, request: SimRequest) -> Holding | None: ...

    def grow(self, holding: Holding) -> bool: ...

    def release(self, holding: Holding) -> None: ...


class FirstFit:
    """Contiguous ranges, each at the lowest address where it fits; free neighbours are joined."""

    def __init__(self, slots: int):
        self.free = [(0, slots)]

    def take(self, size: int) -> tuple[int, int] | None:
        for i, (start, length) in enumerate(self.free):
            if length >= size:
                rest = [(start + size, length - size)] if length > size else []
                self.free[i : i + 1] = rest
                return start, size
        return None

    def give(self, start: int, size: int) -> None:
        insort(self.free, (start, size))
        joined: list[tuple[int, int]] = []
        for at, length in self.free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((at, length))
        self.free = joined


class Buddy:
    """Ranges with a size that is a power of two, split on demand, joined with their buddy."""

    def __init__(self, slots: int):
        self.free: dict[int, set[int]] = {1 << i: set() for i in range(slots.bit_length())}
        start = 0
        for size in reversed(self.free):
            if slots & size:
                self.free[size].add(start)
                start += size

    def take(self, size: int) -> tuple[int, int] | None:
        size = power_of_two(size)
        larger = [s for s in self.free if s >= size and self.free[s]]
        if not larger:
            return None
        found = min(larger)
        start = min(self.free[found])
        self.free[found].remove(start)
        while found > size:
            found //= 2
            self.free[found].add(start + found)
        return start, size

    def give(self, start: int, size: int) -> None:
        while start ^ size in self.free[size]:
            self.free[size].remove(start ^ size)
            start, size = start & ~size, 2 * size
        self.free[size].add(start)


class Contiguous:
    """Everything a sequence may need, in one piece, when it is admitted."""

    def __init__(self, slots: int, reserve: Callable[[SimRequest], int], space: type = FirstFit):
        self.slots, self.reserve, self.space = slots, reserve, space(slots)

    def admit(self, request: SimRequest) -> Holding | None:
        place = self.space.take(self.reserve(request))
        return place and Holding(place[1], place)

    def grow(self, holding: Holding) -> bool:
        raise ValueError(f"a sequence outgrew the {holding.capacity} slots reserved for it")

    def release(self, holding: Holding) -> None:
        self.space.give(*holding.place)


class Paged:
    """Pages of a real Pool, on demand. `spare` of the pages are withheld from new requests, so that
    running requests can grow for a while before one is preempted.
    """

    def __init__(self, slots: int, page_size: int = 16, spare: float = 0.01):
        self.slots, self.page_size = slots, page_size
        self.pool = Pool(slots // page_size + 1, page_size)  # page 0 is never handed out
        self.spare = math.ceil(spare * self.pool.capacity)

    def admit(self, request: SimRequest) -> Holding | None:
        """Admit a request if the prompt and the token after it fit."""
        pages = request.prompt // self.page_size + 1
        if self.pool.num_free < pages + self.spare:
            return None
        return Holding(pages * self.page_size, self.pool.alloc(pages * self.page_size))

    def grow(self, holding: Holding) -> bool:
        """A page is taken whole; how much of it is used the server counts."""
        if isinstance(self.pool.extend(holding.place, self.page_size), NoRoom):
            return False
        holding.capacity += self.page_size
        return True

    def release(self, holding: Holding) -> None:
        self.pool.free(holding.place)


class Running(NamedTuple):
    """A sequence of `now - born` tokens, as if its prompt had come a token a step."""

    holding: Holding
    final: int
    born: int

    @property
    def useful(self) -> int:
        """The allocated slots that hold a token at the end."""
        return min(self.holding.capacity, self.final)


class Slots(NamedTuple):
    """Slots by what they hold; sequences is how many run."""

    used: float
    reserved: float
    internal: float
    external: float
    sequences: float

    @property
    def waste(self) -> float:
        """The fraction of the slots that is empty while a request waits for space."""
        wasted = self.reserved + self.internal + self.external
        return wasted / (self.used + wasted)


@dataclass
class SimUsage:
    """After the warm-up: the mean over time, what ended, and what preemption cost. The timeline
    holds samples of the whole run.
    """

    mean: Slots
    timeline: list[tuple[int, Slots]]
    generated: int = 0
    finished: int = 0
    preempted: int = 0
    recomputed: int = 0  # tokens with recomputed keys and values


class SimServer:
    """Runs requests on an allocator; the first `warmup` steps are not averaged."""

    def __init__(self, allocator: Allocator, warmup: int = 0, sample_every: int = 16):
        self.allocator, self.warmup, self.sample_every = allocator, warmup, sample_every
        self.coming: Iterator[SimRequest] = iter(())
        self.arriving: SimRequest | None = None
        self.queue: deque[SimRequest] = deque()
        self.running: dict[int, Running] = {}  # by age: the newest is the last
        self.events: list[tuple[int, int, int]] = []  # (step, kind, key in running)
        self.keys = count()
        self.now = self.used = self.capacity = self.useful = 0
        self.sums = [0] * len(Slots._fields)
        self.usage = SimUsage(Slots(0, 0, 0, 0, 0), [])

    def run(self, requests: Iterable[SimRequest], steps: int) -> SimUsage:
        """Serve until `steps`; what still runs or waits then is left as it is."""
        self.coming = iter(requests)
        self.arriving = next(self.coming, None)
        while (step := self._next()) < steps:
            self._advance(int(step))
            while self.events and self.events[0][0] == step:
                self._happen(*heapq.heappop(self.events)[1:])
            while self._somebody_waits() and self._admit(self.queue[0]):
                self.queue.popleft()
            self._sample()
        self._advance(steps)
        self.usage.mean = Slots(*(x / (steps - self.warmup) for x in self.sums))
        self.usage.generated = int(self.sums[-1])
        return self.usage

    def _next(self) -> float:
        """The next event. An arrival is an event only if the queue is empty."""
        event = self.events[0][0] if self.events else math.inf
        return min(event, self.arriving.arrival) if self.arriving and not self.queue else event

    def _somebody_waits(self) -> bool:
        """Add arrived requests when the queue is empty: under load most never are."""
        if not self.queue and self.arriving and self.arriving.arrival <= self.now:
            self.queue.append(self.arriving)
            self.arriving = next(self.coming, None)
        return bool(self.queue)

    def _advance(self, step: int) -> None:
        """Every sequence gains a token a step; nothing else changes until `step`."""
        if self.now < self.warmup < step:
            self._advance(self.warmup)
        elapsed, n = step - self.now, len(self.running)
        if self.now >= self.warmup and elapsed:
            gained = n * elapsed * (elapsed - 1) // 2
            self.sums = [s + x * elapsed for s, x in zip(self.sums, self.slots, strict=True)]
            self.sums[0] += gained
            self.sums[1] -= gained
        self.used += n * elapsed
        self.now = step

    @property
    def slots(self) -> Slots:
        free = self.allocator.slots - self.capacity if self.queue else 0
        reserved, internal = self.useful - self.used, self.capacity - self.useful
        return Slots(self.used, reserved, internal, free, len(self.running))

    def _sample(self) -> None:
        timeline = self.usage.timeline
        if not timeline or self.now >= timeline[-1][0] + self.sample_every:
            timeline.append((self.now, self.slots))

    def _admit(self, request: SimRequest) -> bool:
        holding = self.allocator.admit(request)
        if holding is None:
            return False
        key = next(self.keys)
        self.running[key] = Running(holding, request.final, self.now - request.prompt)
        self.used += request.prompt
        self._count(self.running[key], 1)
        self._schedule(key)
        return True

    def _happen(self, kind: int, key: int) -> None:
        if key not in self.running:  # it was preempted meanwhile
            return
        if kind == FINISH:
            self._leave(key)
            self.usage.finished += self.now >= self.warmup
        else:
            self._grow(key)

    def _grow(self, key: int) -> None:
        """Grow a sequence; if needed, preempt the newest, which may be the sequence itself."""
        sequence = self.running[key]
        capacity, useful = sequence.holding.capacity, sequence.useful
        while not self.allocator.grow(sequence.holding):
            newest = next(reversed(self.running))
            self._preempt(newest)
            if newest == key:
                return
        self.capacity += sequence.holding.capacity - capacity
        self.useful += sequence.useful - useful
        self._schedule(key)

    def _preempt(self, key: int) -> None:
        """Back to the head of the queue; what it had is recomputed as a longer prompt."""
        final, tokens = self.running[key].final, self.now - self.running[key].born
        self._leave(key)
        self.queue.appendleft(SimRequest(self.now, tokens, final - tokens))
        if self.now >= self.warmup:
            self.usage.preempted += 1
            self.usage.recomputed += tokens

    def _leave(self, key: int) -> None:
        sequence = self.running.pop(key)
        self._count(sequence, -1)
        self.used -= self.now - sequence.born
        self.allocator.release(sequence.holding)

    def _count(self, sequence: Running, sign: int) -> None:
        self.capacity += sign * sequence.holding.capacity
        self.useful += sign * sequence.useful

    def _schedule(self, key: int) -> None:
        """Its next event: it ends, or it has filled its allocation."""
        holding, final, born = self.running[key]
        ends = holding.capacity >= final
        event = (born + (final if ends else holding.capacity), FINISH if ends else GROW, key)
        heapq.heappush(self.events, event)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


class Sharing(NamedTuple):
    """Pages that sequences of one request held, summed over its steps, and what was copied."""

    held: int  # pages of the pool
    alone: int  # pages that the same sequences hold if none is shared
    copied: int  # tokens copied on write
    moved: int  # tokens copied if every sequence is contiguous and its own
    generated: int

    @property
    def saved(self) -> float:
        return 1 - self.held / self.alone


def parallel_sampling(lengths: Iterable[tuple[int, int]], n: int, page_size: int = 16) -> Sharing:
    """n outputs of one prompt, of equal length: forks of it, none of which ends early."""
    return _shared(lengths, n, page_size, lambda: range(n))


def beam_search(
    lengths: Iterable[tuple[int, int]], width: int, turnover: float, page_size: int = 16
) -> Sharing:
    """Beams that at every step continue, or with probability `turnover` restart as a child of any
    beam of the last step: 0 is parallel sampling, 1 chooses every parent anew.
    """
    rng = random.Random(f"beams {width} {turnover}")
    fate = lambda beam: rng.randrange(width) if rng.random() < turnover else beam
    return _shared(lengths, width, page_size, lambda: [fate(beam) for beam in range(width)])


def _shared(
    lengths: Iterable[tuple[int, int]],
    width: int,
    page_size: int,
    parents: Callable[[], Sequence[int]],
) -> Sharing:
    total = Sharing(0, 0, 0, 0, 0)
    for prompt, output in lengths:
        group = Group(prompt, output, width, page_size)
        for _ in range(output):
            group.step(parents())
        total = Sharing(*map(sum, zip(total, group.close(), strict=True)))
    return total


class Group:
    """Sequences that began as one prompt, in a pool of their own that could hold them unshared."""

    def __init__(self, prompt: int, output: int, width: int, page_size: int):
        pages = -(-(prompt + output) // page_size)
        self.pool = Pool((2 * width + 1) * pages + 1, page_size)
        first = self.pool.alloc(prompt)
        self.tables = [first, *(self.pool.fork(first) for _ in range(width - 1))]
        self.held = self.alone = self.copied = self.generated = 0
        self.moved = prompt * (width - 1)

    def step(self, parents: Sequence[int]) -> None:
        """Each sequence gets a parent among the sequences of the last step, and one token."""
        self._reorder(parents)
        for table in self.tables:
            copies = self.pool.extend(table, 1)
            self.copied += len(copies) * ((table.length - 1) % self.pool.page_size)
        self.generated += len(self.tables)
        self.held += self.pool.capacity - self.pool.num_free
        self.alone += sum(len(table) for table in self.tables)

    def _reorder(self, parents: Sequence[int]) -> None:
        """A parent's first child continues the parent's sequence; the other children are forks."""
        old, tables = self.tables, []
        for parent in parents:
            first = old[parent] not in tables
            tables.append(old[parent] if first else self.pool.fork(old[parent]))
            self.moved += 0 if first else old[parent].length
        for table in set(old) - set(tables):
            self.pool.free(table)
        self.tables = tables

    def close(self) -> Sharing:
        for table in self.tables:
            self.pool.free(table)
        self.pool.check()
        return Sharing(self.held, self.alone, self.copied, self.moved, self.generated)
