"""The simulation counts what a slow, plain simulation counts, and its allocators never overlap."""

import random
from itertools import islice

import pytest

from benchmarks.simulation import (
    Buddy,
    Contiguous,
    FirstFit,
    Group,
    Lognormal,
    Paged,
    SimRequest,
    SimServer,
    SimWorkload,
    Uniform,
    arrivals,
    beam_search,
    parallel_sampling,
    power_of_two,
    rate_of,
)

SHORT = SimWorkload("short", Lognormal(23, 0.8), Lognormal(31, 0.9), max_length=160)
ALLOCATORS = {
    "max": lambda slots: Contiguous(slots, lambda r: 160),
    "pow2": lambda slots: Contiguous(slots, lambda r: r.prompt + power_of_two(r.output)),
    "oracle": lambda slots: Contiguous(slots, lambda r: r.final),
    "oracle buddy": lambda slots: Contiguous(slots, lambda r: r.final, Buddy),
    "paged 1": lambda slots: Paged(slots, 1),
    "paged 7": lambda slots: Paged(slots, 7, spare=0.0),
    "paged 16": lambda slots: Paged(slots, 16, spare=0.05),
}


def plain(allocator, requests, steps, warmup):
    """Step by step, sequence by sequence: (used, reserved, internal, external, sequences) sums."""
    coming, queue, running, sums, preempted = list(requests), [], [], [0] * 5, 0
    for step in range(steps):
        for run in running:
            run["tokens"] += step > run["start"]
        for run in [r for r in running if r["tokens"] == r["final"]]:
            allocator.release(run["holding"])
            running.remove(run)
        for run in list(running):
            while run in running and run["tokens"] == run["holding"].capacity:
                if allocator.grow(run["holding"]):
                    continue
                newest = running.pop()
                allocator.release(newest["holding"])
                left = newest["final"] - newest["tokens"]
                queue.insert(0, SimRequest(step, newest["tokens"], left))
                preempted += step >= warmup
        while coming and coming[0].arrival <= step:
            queue.append(coming.pop(0))
        while queue and (holding := allocator.admit(queue[0])):
            r = queue.pop(0)
            running.append(dict(start=step, tokens=r.prompt, final=r.final, holding=holding))
        if step >= warmup:
            used = sum(r["tokens"] for r in running)
            useful = sum(min(r["final"], r["holding"].capacity) for r in running)
            capacity = sum(r["holding"].capacity for r in running)
            free = allocator.slots - capacity if queue else 0
            now = (used, useful - used, capacity - useful, free, len(running))
            sums = [s + x for s, x in zip(sums, now, strict=True)]
    return sums, preempted


@pytest.mark.parametrize("load", [0.6, 2.0])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_events_count_what_single_steps_count(name, load):
    slots, steps, warmup = 799, 600, 111
    requests = list(arrivals(SHORT, rate_of(SHORT, slots, load, 0), steps, seed=3))
    usage = SimServer(ALLOCATORS[name](slots), warmup).run(requests, steps)
    sums, preempted = plain(ALLOCATORS[name](slots), requests, steps, warmup)
    assert list(usage.mean) == pytest.approx([s / (steps - warmup) for s in sums])
    assert usage.preempted == preempted
    assert preempted > 0 or load < 1 or not name.startswith("paged")


@pytest.mark.parametrize("name", ALLOCATORS)
def test_slots_of_a_busy_server_are_in_four_states(name):
    slots = 799
    server = SimServer(ALLOCATORS[name](slots), sample_every=1)
    usage = server.run(arrivals(SHORT, rate_of(SHORT, slots, 3, 0), 400, 0), 400)
    busy = [sum(s[:4]) for step, s in usage.timeline if step > 100]
    assert len(busy) > 20 and set(busy) == {slots}
    assert all(min(s) >= 0 for _, s in usage.timeline)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_request_is_served_and_all_memory_is_freed(name):
    """No request is lost or starves, however often it is preempted, and all memory is freed."""
    requests = [SimRequest(0, p, o) for p, o in islice(SHORT.lengths(1), 63)]
    allocator = ALLOCATORS[name](323)
    usage = SimServer(allocator).run(requests, 20_000)
    assert usage.finished == 63
    assert usage.generated == sum(r.output for r in requests)
    if isinstance(allocator, Paged):
        allocator.pool.check()
        assert usage.preempted and allocator.pool.num_free == allocator.pool.capacity
    else:
        assert allocator.space.take(256) is not None


def test_the_oracle_never_wastes_inside_and_max_holds_what_divides():
    slots = 799
    load = lambda: arrivals(SHORT, rate_of(SHORT, slots, 3, 0), 500, 0)
    oracle = SimServer(ALLOCATORS["oracle"](slots), 100).run(load(), 500).mean
    largest = SimServer(ALLOCATORS["max"](slots), 100).run(load(), 500).mean
    assert oracle.internal == 0 and oracle.reserved > 0
    assert largest.sequences == slots // 160


def test_a_page_of_one_slot_wastes_nothing_inside():
    slots = 799
    pages = SimServer(Paged(slots, 1, spare=0.0), 100).run(arrivals(SHORT, 5, 500, 0), 500).mean
    assert pages.internal == 0 and pages.reserved <= pages.sequences
    assert pages.waste < 0.05


def test_outgrowing_a_reservation_is_an_error():
    with pytest.raises(ValueError, match="outgrew the 20 slots"):
        SimServer(Contiguous(100, lambda r: 20)).run([SimRequest(0, 10, 15)], 50)


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
@pytest.mark.parametrize("slots", [1, 64, 111, 799])
def test_ranges_never_overlap_and_all_come_back(kind, slots):
    rng, space, held = random.Random(slots), kind(slots), []
    for _ in range(500):
        size = rng.randint(1, max(1, slots // 5))
        if rng.random() < 0.55 and (place := space.take(size)):
            start, got = place
            assert size <= got and 0 <= start <= slots - got
            assert all(start + got <= s or s + n <= start for s, n in held)
            held.append(place)
        elif held:
            space.give(*held.pop(rng.randrange(len(held))))
    for place in held:
        space.give(*place)
    assert space.free == kind(slots).free


def test_first_fit_refuses_only_what_fits_nowhere():
    space = FirstFit(100)
    first, second, _ = (space.take(30) for _ in range(3))
    assert space.take(11) is None and space.take(10) == (90, 10)
    space.give(*first)
    space.give(*second)
    assert space.take(60) == (0, 60) and space.free == []


def test_buddy_blocks_round_up_and_merge():
    space = Buddy(96)  # 64 and 32
    assert space.take(33) == (0, 64) and space.take(17) == (64, 32) and space.take(1) is None
    space.give(0, 64)
    assert [space.take(16) for _ in range(4)] == [(0, 16), (16, 16), (32, 16), (48, 16)]
    space.give(16, 16)
    assert space.take(32) is None
    space.give(0, 16)
    assert space.take(32) == (0, 32)


def test_lengths_are_those_stated_and_repeat():
    chat = SimWorkload("chat", Lognormal(161, 1.0), Lognormal(338, 1.0), max_length=10**9)
    lengths = list(islice(chat.lengths(0), 20_000))
    assert lengths == list(islice(chat.lengths(0), 20_000)) != list(islice(chat.lengths(1), 20_000))
    mean = lambda i: sum(pair[i] for pair in lengths) / len(lengths)
    assert (mean(0), mean(1)) == pytest.approx((161, 338), rel=0.03)
    even = SimWorkload("even", Uniform(3, 5), Uniform(7, 9), max_length=13)
    pairs = set(islice(even.lengths(0), 1000))
    assert pairs == {(p, o) for p in (3, 4, 5) for o in (7, 8, 9) if p + o <= 13}


def test_arrivals_come_at_their_rate():
    requests = list(arrivals(SHORT, 0.5, 20_000, 0))
    assert len(requests) == pytest.approx(10_000, rel=0.03)
    assert requests == sorted(requests, key=lambda r: r.arrival)


LENGTHS = list(islice(SHORT.lengths(2), 12))


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_samples_share_the_full_pages_of_their_prompt(n, page_size):
    """After a write every sample has its own last page: full pages of the prompt are shared."""
    simulated = parallel_sampling(LENGTHS, n, page_size)
    held = alone = 0
    for prompt, output in LENGTHS:
        for length in range(prompt + 1, prompt + output + 1):
            pages, full = -(-length // page_size), prompt // page_size
            held, alone = held + full + n * (pages - full), alone + n * pages
    assert (simulated.held, simulated.alone) == (held, alone)
    assert simulated.copied == sum((n - 1) * (prompt % page_size) for prompt, _ in LENGTHS)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_beams_hold_each_history_once(page_size):
    """After every step the pool holds exactly the distinct pages of the histories of the beams."""
    rng, width, names = random.Random(5), 4, iter(range(10**6))
    group = Group(prompt=21, output=63, width=width, page_size=page_size)
    histories = [tuple(next(names) for _ in range(21))] * width
    for _ in range(63):
        parents = rng.choices(range(width), k=width)
        before = group.held
        group.step(parents)
        histories = [(*histories[p], next(names)) for p in parents]
        ends = range(page_size, len(histories[0]) + page_size, page_size)
        assert group.held - before == len({h[:end] for h in histories for end in ends})
    assert 0 < group.close().saved < 1 - 1 / width


def test_beams_that_are_never_replaced_are_samples():
    assert beam_search(LENGTHS, 3, 0.0) == parallel_sampling(LENGTHS, 3)
    assert beam_search(LENGTHS, 1, 1.0).saved == 0
    ordered = [beam_search(LENGTHS, 4, turnover).saved for turnover in (0.0, 0.1, 1.0)]
    assert ordered == sorted(ordered)
