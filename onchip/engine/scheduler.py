"""Which tokens each request computes in the next step. No tensors here.

    waiting --admit--> running --schedule--> step --launch--> in flight --collect--> finished
       ^                  |                                                 |
       +---- preempt -----+ <---------------- one token more ---------------+

There is no prefill/decode split, as in vLLM: a sample has `computed` of `length` known tokens, and
each step computes some of the difference. A step has one token budget. Running samples that lack
one token (decode) come first, then prompts and recomputed samples in chunks, then waiting requests.

Example: max_num_batched_tokens=8, request A decodes, request B arrives with a prompt of 10 tokens.

    step 1   A 1 token   B tokens 0-6
    step 2   A 1 token   B tokens 7-9, and B samples its first token
    step 3   A 1 token   B 1 token

Both queues are sorted by

    order key = arrival time + priority * aging_s

A request can be overtaken only by requests that arrive within (its priority - theirs) * aging_s
seconds after it, so no request starves. When pages run out, the running request with the largest
order key is preempted. Its pages are swapped to the host or recomputed later, whichever is
estimated to be cheaper, and it keeps its position in the queue.

Steps overlap. `mark_launched` counts a step's tokens, though their values are not known yet, and
the next step may be scheduled. `apply_tokens` supplies the values once the device has them. A
sample that ends there has been computed once in vain, and that token is dropped. Beam search,
penalties and drafts need the values: while such a request samples, steps do not overlap.

A request for an embedding (pooling.py) computes its prompt, samples nothing, and ends when the step
with its last token is collected.

Drafts (speculation/) come last. They take the budget and the pages that are left, and preempt
nothing.

A request with a grammar waits until the grammar is compiled, and others overtake it meanwhile.

A long request has more tokens than the pool has slots. It reserves host memory for all of its pages
when it is admitted; until some is free, all requests but other long ones overtake it. Whenever a
request lacks pages, full pages of long requests move to the host before anything is preempted. A
step with a long request lasts as long as these pages stream to the device: `StreamPacer` decides
which steps it joins. In these it precedes prompts, which would leave it no budget.

Progress: while a request is ready and no step is in flight, every step computes at least one token.
Each request that is not long fits into the pool alone (checked in `add`), the first running request
is never preempted for another, and swapped requests free the pages they share if it needs them.
"""

import math
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count

from onchip.engine import beam_search
from onchip.engine.kv_manager import KVManager, PagedCache, ScheduledTokens, SwapTier
from onchip.engine.preemption_costs import PreemptionCosts
from onchip.engine.request import Request, RequestMetrics, Sample, SampledToken, Status
from onchip.engine.request_queue import RequestQueue
from onchip.engine.speculation.speculator import SpeculationStats, Speculator
from onchip.engine.speculation.tree import DraftTree
from onchip.engine.speculation.verify import split_rows
from onchip.engine.step import Chunk, Limits, RejectedRequest, ScheduledStep
from onchip.engine.stream_pacer import StreamPacer
from onchip.kvcache.pool import NoRoom

_ELSEWHERE = "though no other request holds any: the cache is used from elsewhere"


class _Plan:
    """A step being built."""

    def __init__(self, budget: int):
        self.budget = budget
        self.chunks: dict[Request, list[Chunk]] = {}
        self.blocked = False  # a running request lacks pages: admit no other

    def add(self, chunks: dict[Request, list[Chunk]]) -> None:
        self.chunks |= chunks
        self.budget -= sum([c.stop - c.start for listed in chunks.values() for c in listed])

    def add_drafts(self, chunk: Chunk, tree: DraftTree) -> None:
        """Append drafts to a chunk of this plan."""
        listed, (drafts, parents) = self.chunks[chunk.sample.request], tree
        stop = chunk.stop + len(drafts)
        listed[listed.index(chunk)] = chunk._replace(stop=stop, drafts=drafts, parents=parents)
        self.budget -= len(drafts)

    def drop(self, request: Request) -> None:
        self.budget += sum(chunk.num_tokens for chunk in self.chunks.pop(request, ()))

    def list_chunks(self) -> tuple[Chunk, ...]:
        return tuple([chunk for listed in self.chunks.values() for chunk in listed])


class Scheduler:
    """Call `add`, then `schedule` and `update` in turns; or, to overlap steps, `schedule`,
    `mark_launched` and later `apply_tokens`. The scheduler owns cache and tier. Without tier and
    costs, preempted requests are always recomputed. speculator: adds drafts to steps. pacer:
    its `observe` is called when a step that streamed pages has ended.
    """

    limits: Limits
    clock: Callable[[], float]
    pacer: StreamPacer
    totals: Counter[str]
    num_cached_tokens: int

    def __init__(
        self,
        cache: PagedCache,
        limits: Limits,
        *,
        tier: SwapTier | None = None,
        costs: PreemptionCosts | None = None,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if limits.max_num_seqs > cache.max_seqs:
            raise ValueError(
                f"max_num_seqs={limits.max_num_seqs} exceeds the cache's max_seqs={cache.max_seqs}"
            )
        if (tier is None) != (costs is None):
            raise ValueError("a tier needs costs to choose by, and costs need a tier")
        self.limits, self.clock, self._speculator = limits, clock, speculator
        self._pool, self._max_seqlen = cache.pool, cache.max_seqlen
        self._offload_pages = cache.offload_pages
        self._kv = KVManager(cache, tier, costs)
        self.pacer = StreamPacer(clock)
        self.totals = Counter[str]()  # events of all steps, by name
        self.num_cached_tokens = 0  # of prompts, found in the cache when they were first scheduled
        self._requests: dict[str, Request] = {}
        self._waiting, self._running = RequestQueue(), RequestQueue()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._queued_tokens = 0
        self._step: ScheduledStep | None = None  # scheduled, not launched yet
        self._in_flight: deque[ScheduledStep] = deque()  # launched, oldest first
        self._events: dict[str, list[Request]] = {}

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """New and preempted requests, the next to run first."""
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def must_collect(self) -> bool:
        """The oldest step in flight must be collected before the next step can be scheduled."""
        in_flight = self._in_flight
        return len(in_flight) > 1 or (bool(in_flight) and in_flight[0].needs_tokens)

    @property
    def speculation(self) -> SpeculationStats | None:
        """Drafts so far; None without a speculator."""
        return None if self._speculator is None else self._speculator.stats()

    def find(self, request_id: str) -> Request | None:
        """The unfinished request with this id."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> RejectedRequest | None:
        """Queue a request. Return None if it was accepted."""
        if request.request_id in self._requests or request.order_key[1]:
            raise ValueError(f"request {request.request_id!r} was added before")
        if not request.max_tokens:
            request.max_tokens = self._default_max_tokens(len(request.prompt_token_ids))
        request.offload_pages = self._offload_pages_for(request)
        if reason := self._check_feasible(request) or self._check_queue_limits(request):
            return reason
        now, number = self.clock(), next(self._numbers) + 1
        request.order_key = (now + request.priority * self.limits.aging_s, number)
        request.metrics = RequestMetrics(now)
        self._requests[request.request_id] = request
        self._enqueue(request)
        if request.deadline_s is not None:
            insort(self._deadlines, (request.deadline_s, number, request))
        return None

    def abort(self, request_id: str) -> bool:
        """Cancel a request, between two steps or during one. Its pages are free when this returns.
        Return False if no unfinished request has this id.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, Status.FINISHED_ABORTED)
        return request is not None

    def fail(self, request: Request, error: str) -> None:
        """End one request with an error; the others continue."""
        if not request.finished:
            request.error = error
            self._finish(request, Status.FINISHED_ERROR)

    def abandon_all(self, end: Status, error: str) -> list[Request]:
        """End all requests after an unrecoverable error. Queues and pages are not cleaned up: the
        scheduler must not be used afterwards.
        """
        requests = list(self._requests.values())
        for request in requests:
            request.error, request.status = error, end
            for sample in request.samples:
                sample.sequence = None
                if not sample.finished:
                    sample.finish(end)
        self._requests.clear()
        return requests

    def stop(self, sample: Sample, stop_reason: str | int | None = None) -> None:
        """End a sample (its text contains a stop string). Its pages are free when this returns."""
        if sample.finished:
            return
        sample.finish(Status.FINISHED_STOPPED, stop_reason)
        self._kv.release(sample)
        request = sample.request
        if not request.unfinished:
            self._finish(request, Status.FINISHED_STOPPED)
        elif request.status is Status.RUNNING and not request.resident:
            self._preempt(request)  # the others would have forked from this sample

    def preempt(self, request: Request) -> None:
        """Preempt a running request between two steps."""
        if self._step is not None:
            raise ValueError("a step is under way: update it first")
        if request.status is not Status.RUNNING:
            raise ValueError(f"{request} does not run: it is {request.status.meaning}")
        self._preempt(request)

    def schedule(self) -> ScheduledStep:
        """Build the next step. It is empty only if no request is ready or a step is in flight."""
        if self._step is not None:
            raise ValueError("a step is under way: update it first")
        if self.must_collect:
            raise ValueError("a step in flight must be collected first: its tokens are needed")
        self._expire()
        plan = self._build_plan()
        if not plan.chunks and self._requests and not self._in_flight:
            self._kv.synchronize()  # all requests wait for pages of swap-outs under way
            plan = self._build_plan()
        self._schedule_drafts(plan)
        self._step = self._make_step(plan, self._record_long(plan))
        self._events.clear()
        return self._step

    def update(self, step: ScheduledStep, sampled: Iterable[SampledToken]) -> list[Request]:
        """Apply the sampled tokens of a step that ran without overlap, one for each of its
        `rows_to_sample`. Return the requests that finished. Requests cancelled meanwhile are
        skipped.
        """
        if step is not self._step or self._in_flight:
            raise ValueError("update takes the step that was scheduled last, once")
        sampled = _check_count(sampled, step.rows_to_sample)
        self.mark_launched(step)
        return self.apply_tokens(step, sampled)

    def mark_launched(self, step: ScheduledStep) -> None:
        """Count the step's tokens. Work queued on the device from now on runs after it."""
        if step is not self._step:
            raise ValueError("mark_launched takes the step that was scheduled last, once")
        self._step = None
        self._in_flight.append(step)
        self._kv.commit([chunk for chunk in step.chunks if chunk.sample.sequence is not None])
        for chunk in step.chunks:
            if chunk.sample.request.single_sample is None:
                self._fork(chunk)
        for sample in [sample for chunk in step.chunks for sample in chunk.sampled_by]:
            request = sample.request
            if sample.end is None and request.status is Status.RUNNING and not request.beams:
                sample.pending += 1

    def apply_tokens(self, step: ScheduledStep, sampled: Iterable[SampledToken]) -> list[Request]:
        """Apply the sampled tokens of the oldest step in flight, one for each of its
        `rows_to_sample`. Drafts are accepted or rejected here. Return the requests that finished.
        """
        if not self._in_flight or step is not self._in_flight[0]:
            raise ValueError("apply_tokens takes the oldest step that is under way, once")
        sampled = _check_count(sampled, step.rows_to_sample)
        self._in_flight.popleft()
        touched: dict[Request, None] = {}
        for chunk, sample, tokens, path in split_rows(step, sampled):
            if sample.pending:
                if chunk.drafts:
                    self._append_verified(chunk, sample, tokens, path)
                else:
                    sample.append(tokens[0])
                if sample.end is not None:
                    touched[sample.request] = None
            elif sample.request.beams and sample.status is Status.RUNNING:
                self._take_candidates(sample, tokens[0])
                touched[sample.request] = None
        for request in _pooled_requests(step):
            self._finish_pooled(request)
            touched[request] = None
        self._finish_rows(step)
        for request in touched:
            self._finish_if_done(request)
        return [request for request in touched if request.finished]

    def check(self) -> None:
        """Raise AssertionError unless queues, limits, pages and states agree (for tests)."""
        running, waiting = set(self._running), set(self._waiting)
        _check_invariant(not running & waiting, "a request runs and waits")
        _check_invariant(
            running | waiting == set(self._requests.values()), "a request is in no queue"
        )
        _check_invariant(
            all(r.status is Status.RUNNING for r in running), "a status in the running queue"
        )
        _check_invariant(
            not any(r.resident for r in waiting if not r.host_group),
            "a waiting request holds pages",
        )
        _check_invariant(
            all(bool(r.host_group) == (r.status is Status.SWAPPED) for r in waiting),
            "a swapped request without its group",
        )
        _check_invariant(
            self._num_running_seqs() <= self.limits.max_num_seqs, "more sequences than max_num_seqs"
        )
        _check_invariant(
            bool(self._step or self._in_flight)
            or all(s.sequence.length <= s.length for r in running for s in r.resident),
            "a rejected draft has a slot",
        )
        tokens = sum(len(r.prompt_token_ids) for r in waiting)
        _check_invariant(tokens == self._queued_tokens, "the count of queued tokens")

    def _default_max_tokens(self, prompt: int) -> int:
        """As many as max_model_len leaves. With host memory, a prompt that fits into the pool ends
        there: otherwise all requests without max_tokens would be long ones.
        """
        end, in_pool = self.limits.max_model_len, self._pool.capacity * self._pool.page_size + 1
        if self._offload_pages:
            end = min(end, in_pool if prompt < in_pool else self._max_seqlen + 1)
        return max(1, end - prompt)

    def _offload_pages_for(self, request: Request) -> int:
        """The pages of a long request; 0 if the request fits into the pool, or has no host memory
        because there is none or it has several samples.
        """
        pages = request.pages(self._pool.page_size, request.max_computed)
        is_long = pages > self._pool.capacity and request.single_sample is not None
        return pages if is_long and pages <= self._offload_pages else 0

    def _check_feasible(self, request: Request) -> RejectedRequest | None:
        """Reject a request that can never run: otherwise it would block the queue forever."""
        prompt, limits, pool = len(request.prompt_token_ids), self.limits, self._pool
        total, computed = request.max_length, request.max_computed
        longest = min(limits.max_model_len, self._max_seqlen + total - computed)
        if total > longest:
            more = f" and max_tokens={request.max_tokens}" if total > prompt else ""
            return RejectedRequest(
                f"{prompt} tokens of prompt{more} exceed the"
                f" {longest} tokens that a sequence may have"
            )
        if request.max_seqs > limits.max_num_seqs:
            return RejectedRequest(
                f"{request.max_seqs} samples exceed max_num_seqs={limits.max_num_seqs}"
            )
        pages = request.pages(pool.page_size, computed)
        if pages > pool.capacity and not request.is_long:
            host = f"; of host memory it has {self._offload_pages}, for single samples"
            return RejectedRequest(
                f"{request.max_seqs} x {total} tokens may need {pages} pages, the cache has"
                f" {pool.capacity} in all{host if self._offload_pages else ''}"
            )
        return None

    def _check_queue_limits(self, request: Request) -> RejectedRequest | None:
        limits, tokens = self.limits, len(request.prompt_token_ids)
        if len(self._waiting) >= limits.max_queued_requests:
            return RejectedRequest(
                f"{len(self._waiting)} requests are waiting, as many as may", is_retryable=True
            )
        if self._waiting and self._queued_tokens + tokens > limits.max_queued_tokens:
            return RejectedRequest(
                f"{self._queued_tokens} tokens are waiting, {tokens} more are too many", True
            )
        return None

    def _enqueue(self, request: Request) -> None:
        self._waiting.add(request)
        self._queued_tokens += len(request.prompt_token_ids)

    def _dequeue(self, request: Request) -> None:
        self._waiting.remove(request)
        self._queued_tokens -= len(request.prompt_token_ids)

    def _expire(self) -> None:
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._deadlines[0][2]
            self._finish(request, Status.FINISHED_EXPIRED)
            self._record_event("ended", request)

    def _build_plan(self) -> _Plan:
        self._kv.poll()
        plan = _Plan(self.limits.max_num_batched_tokens)
        self._schedule_decodes(plan)
        if self.pacer.is_due:
            self._schedule_long(plan)
        for request in self._running if len(plan.chunks) < len(self._running) else ():
            is_ready = request.status is Status.RUNNING and not request.is_long
            if is_ready and request not in plan.chunks:
                self._schedule_request(request, plan)
        self._admit_waiting(plan)
        if not plan.chunks:
            self._schedule_long(plan)
        return plan

    def _schedule_drafts(self, plan: _Plan) -> None:
        """Append drafts to decodes, as many as fit."""
        if self._speculator is None:
            return
        for chunk, tree in self._speculator.propose(plan.list_chunks(), plan.budget):
            if self._kv.append_drafts(chunk.sample, len(tree.tokens)) is not None:
                return
            plan.add_drafts(chunk, tree)

    def _record_long(self, plan: _Plan) -> int:
        """Tell the pacer about the long requests of a step. Return the pages that it streams."""
        if not self._offload_pages:
            return 0
        joined = [request for request in plan.chunks if request.is_long]
        self.pacer.record(bool(joined))
        return sum(map(self._kv.num_offloaded, joined))

    def _make_step(self, plan: _Plan, streamed_pages: int) -> ScheduledStep:
        chunks, speculator = plan.list_chunks(), self._speculator
        events = {name: tuple(listed) for name, listed in self._events.items()}
        speculates = speculator is not None and speculator.needs_tokens(chunks)
        return ScheduledStep(chunks, speculates=speculates, streamed_pages=streamed_pages, **events)

    def _schedule_decodes(self, plan: _Plan) -> None:
        """Schedule one token for each sample that lacks exactly one, with one call to the cache if
        all fit. Decodes come first, so prompts never delay them.
        """
        ready = {r: chunks for r in self._running if (chunks := _decode_chunks(r))}
        samples = [chunk.sample for chunks in ready.values() for chunk in chunks]
        if self._kv.append_each(samples) is None:
            plan.add(ready)
            return
        for request in ready:
            if request.status is Status.RUNNING:
                self._schedule_request(request, plan)

    def _schedule_request(self, request: Request, plan: _Plan) -> None:
        """Reserve slots for the request's next tokens, preempting requests behind it if pages run
        out.
        """
        while scheduled := list(request.next_tokens(plan.budget)):
            full = self._kv.append(scheduled)
            if full is None:
                plan.add({request: _make_chunks(request, scheduled)})
                return
            if not self._free_pages_for(request, full, plan):
                return

    def _schedule_long(self, plan: _Plan) -> None:
        """Schedule the running long requests."""
        for request in self._running if self._offload_pages else ():
            if request.is_long and request.status is Status.RUNNING:
                self._schedule_long_request(request, plan)

    def _schedule_long_request(self, request: Request, plan: _Plan) -> None:
        """Reserve slots for as many of the next tokens of a long request as find some, after its
        own first pages were offloaded. It preempts requests behind it only if it finds none.
        """
        while wanted := list(request.next_tokens(plan.budget)):
            (sample, num_tokens), full = wanted[0], NoRoom(1, 0)
            if count := self._kv.make_room(sample, num_tokens, self._running):
                full = self._kv.append([(sample, count)])
                if full is None:
                    plan.add({request: _make_chunks(request, [(sample, count)])})
                    return
            if not self._free_pages_for(request, full, plan):
                return

    def _free_pages_for(self, request: Request, full: NoRoom, plan: _Plan) -> bool:
        """Offload pages of long requests or, if they have none, preempt a request. Return True to
        try again, False to skip this request in this step.
        """
        if self._kv.offload(reversed(self.running), full.needed - full.free):
            return True
        plan.blocked = True
        if full.needed - full.free <= self._pages_swapping_out():
            return False  # wait for copies under way: preempting more would empty the device
        last = self._last_to_preempt(request)
        if last is not request:
            plan.drop(last)
            self._preempt(last)
            return True
        if len(self._running) > 1:
            if not request.is_long:  # a long one holds too few pages to be worth it
                self._preempt(request)
            return False
        if self._drop_last_swapped():
            return True
        self._fail_now(request, f"{full.needed} pages needed, {full.free} free")
        return False

    def _last_to_preempt(self, request: Request) -> Request:
        """The last of this request and the running ones that are not long. A long one only if no
        other is left: it holds few pages, and may have to be recomputed for them.
        """
        others = [r for r in self.running if not r.is_long and r is not request]
        if not others:
            return self._running[-1]
        return max(others[-1], request, key=lambda r: r.order_key)

    def _fail_now(self, request: Request, lack: str) -> None:
        """Fail a request that does not fit alone, which `_check_feasible` rules out for an unshared
        cache.
        """
        self.fail(request, f"{lack}, {_ELSEWHERE}")
        self._record_event("ended", request)

    def _pages_swapping_out(self) -> int:
        groups = (r.host_group for r in self._waiting if r.host_group)
        return sum(len(group.pages) for group in groups if group.is_swapping_out)

    def _drop_last_swapped(self) -> bool:
        """Free the pages of the last swapped request: it still holds shared pages on the device."""
        swapped = [r for r in self._waiting if r.host_group]
        if swapped:
            self._kv.discard(swapped[-1])
            self._record_event("recomputed", swapped[-1])
        return bool(swapped)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.preempt(request)
        self._record_event("recomputed" if request.host_group is None else "swapped_out", request)
        metrics = request.metrics
        request.metrics = replace(metrics, num_preemptions=metrics.num_preemptions + 1)
        self._enqueue(request)

    def _record_event(self, what: str, request: Request) -> None:
        """Report the event in the next scheduled step."""
        self.totals[what] += 1
        self._events.setdefault(what, []).append(request)

    def _admit_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests strictly in order. The first that does not fit stops the loop:
        otherwise small requests would overtake large ones forever.
        """
        while plan.budget and not plan.blocked and (request := self._next_to_admit()):
            if any(sample.pending for sample in request.samples):
                return  # its last token is not known yet
            if self._num_running_seqs() + request.num_seqs > self.limits.max_num_seqs:
                return
            if not self._make_resident(request):
                return
            self._dequeue(request)
            self._running.add(request)
            request.status = Status.RUNNING
            request.start_matchers()
            if request.metrics.first_scheduled_s is None:
                request.num_cached_tokens = request.unfinished[0].sequence.hit_tokens
                self.num_cached_tokens += request.num_cached_tokens
                request.metrics = replace(request.metrics, first_scheduled_s=self.clock())
            if not request.is_long:
                self._schedule_request(request, plan)
            elif self.pacer.is_due:
                self._schedule_long_request(request, plan)

    def _next_to_admit(self) -> Request | None:
        """The first waiting request, except those whose grammar is still being compiled and long
        ones without host memory: others overtake them. A request whose grammar is refused ends.
        """
        if self._waiting and self._waiting[0].grammar is None and not self._waiting[0].is_long:
            return self._waiting[0]
        host_is_full = False
        for request in self._waiting:
            grammar = request.grammar
            needs_host = self._kv.lacks_host_range(request)
            if needs_host and not host_is_full:
                host_is_full = self._waits_for_host(request)
            if request.finished or (needs_host and host_is_full):
                continue
            if grammar is None or (grammar.is_ready and grammar.error is None):
                return request
            if grammar.is_ready:
                for sample in request.samples:
                    sample.finish(Status.FINISHED_ERROR, grammar.error)
                self.fail(request, str(grammar.error))
                self._record_event("ended", request)
        return None

    def _waits_for_host(self, request: Request) -> bool:
        """Whether a long request waits for host memory that another one holds. It fails if no other
        does: otherwise it would wait forever.
        """
        if self._kv.can_reserve_host(request):
            return False
        swapped = [r for r in self._waiting if r.host_group]
        if any(r.is_long for r in (*self._running, *swapped)):
            return True
        needed = request.offload_pages
        self._fail_now(request, f"{needed} pages of host memory needed, no such range is free")
        return False

    def _make_resident(self, request: Request) -> bool:
        """Bring a waiting request onto the device. If no request runs it must succeed: swapped
        requests free the pages they share, and if that does not suffice the request fails.
        """
        away = request.host_group
        while not self._kv.make_resident(request, self._num_running_seqs()):
            if self._kv.offload(reversed(self.running), 1):
                continue
            if self._running or self._pages_swapping_out():
                return False
            if not self._drop_last_swapped():
                self._fail_now(request, "no free row for one more sequence")
                return False
        if away is not None and request.status is Status.SWAPPED:
            self._record_event("swapped_in", request)
        return True

    def _num_running_seqs(self) -> int:
        return sum(request.num_seqs for request in self._running)

    def _fork(self, chunk: Chunk) -> None:
        """Fork the other samples once the prompt is computed."""
        parent, request = chunk.sample, chunk.sample.request
        if chunk.stop != len(request.prompt_token_ids) or parent.sequence is None:
            return
        for other in request.unfinished:
            if other.sequence is None and not self._kv.fork(parent, other):
                self.fail(request, f"no free row to fork a sequence, {_ELSEWHERE}")
                return

    def _finish_rows(self, step: ScheduledStep) -> None:
        """Release finished samples and give the cache the tokens of the others."""
        for _, sample in step.rows_to_sample:
            if sample.end is not None:
                self._kv.release(sample)
            request = sample.request
            if request.metrics.first_token_s is None and (sample.token_ids or sample.candidates):
                request.metrics = replace(request.metrics, first_token_s=self.clock())
        self._kv.append_last([sample for _, sample in step.rows_to_sample])

    def _append_verified(
        self,
        chunk: Chunk,
        sample: Sample,
        tokens: Sequence[SampledToken],
        path: Sequence[int],
    ) -> None:
        """Append the tokens of a chunk with drafts, and drop its rejected drafts."""
        num_accepted = max(0, sample.append_accepted(tokens) - 1)
        self._kv.roll_back(sample, chunk.stop - len(chunk.drafts), path)
        if self._speculator is not None:
            self._speculator.observe(sample, len(chunk.drafts), num_accepted)

    def _take_candidates(self, beam: Sample, sampled: SampledToken) -> None:
        if sampled.top and math.isfinite(sampled.logprob):
            beam.candidates = sampled.top
        else:
            self.fail(beam.request, f"no finite candidates for a beam: {sampled}")

    def _finish_pooled(self, request: Request) -> None:
        """The prompt of an embedding is computed. It may have been preempted meanwhile."""
        sample = request.samples[0]
        if request.pooled is None:
            sample.finish(Status.FINISHED_ERROR, "the hidden states are not finite")
        else:
            sample.finish(Status.FINISHED_STOPPED)

    def _finish_if_done(self, request: Request) -> None:
        """After sampling: choose among beams once all have candidates, and finish a request when
        all of its samples have ended.
        """
        if request.finished:
            return
        if request.beams and all(s.candidates for s in request.unfinished):
            if end := beam_search.advance_beams(request, self._kv):
                self._finish(request, end)
        elif not request.unfinished:
            failed = [s for s in request.samples if s.end is Status.FINISHED_ERROR]
            request.error = str(failed[0].stop_reason) if failed else None
            self._finish(request, failed[0].end if failed else request.samples[-1].end)

    def _finish(self, request: Request, status: Status) -> None:
        """Finish a request and free everything it holds."""
        self._kv.release_all(request)
        for sample in request.unfinished:
            sample.finish(status)
        (self._running.remove if request.status is Status.RUNNING else self._dequeue)(request)
        request.status = status
        request.metrics = replace(request.metrics, finished_s=self.clock())
        if request.beams:
            request.samples = beam_search.select_best(request.samples, request.beams.beam_width)
        del self._requests[request.request_id]
        if request.deadline_s is not None:
            del self._deadlines[
                bisect_left(self._deadlines, (request.deadline_s, request.order_key[1]))
            ]


def _decode_chunks(request: Request) -> list[Chunk]:
    """The chunks of a request whose samples lack at most one token each; otherwise none. A long
    request has none here.
    """
    if request.offload_pages:
        return []
    if (single_sample := request.single_sample) is not None:
        start, stop = single_sample.sequence.computed, single_sample.target_length
        sampled_by = (single_sample,) if request.pooling is None else ()
        return [Chunk(single_sample, start, stop, sampled_by)] if stop - start == 1 else []
    unfinished = request.unfinished
    if any([sample.sequence is None for sample in unfinished]):
        return []
    lacking = [(sample, sample.target_length - sample.sequence.computed) for sample in unfinished]
    if any([count > 1 for _, count in lacking]):
        return []
    return _make_chunks(request, [chunk for chunk in lacking if chunk[1]])


def _make_chunks(request: Request, scheduled: Sequence[ScheduledTokens]) -> list[Chunk]:
    """A sample samples its next token if the chunk reaches its last known token. Until the prompt
    is computed, all samples of a request sample from the chunk of the first.
    """
    unfinished = request.unfinished
    forks = any([sample.sequence is None for sample in unfinished])
    chunks = []
    for sample, num_tokens in scheduled:
        start = sample.sequence.computed
        stop = start + num_tokens
        candidates = unfinished if forks else (sample,)
        candidates = candidates if request.pooling is None else ()
        chunks.append(
            Chunk(sample, start, stop, tuple([s for s in candidates if s.length == stop]))
        )
    return chunks


def _pooled_requests(step: ScheduledStep) -> list[Request]:
    """Requests for an embedding whose prompt this step has completed."""
    return [
        request
        for chunk in step.chunks
        if (request := chunk.sample.request).pooling is not None
        and chunk.stop == len(request.prompt_token_ids)
        and not request.finished
    ]


def _check_count(
    sampled: Iterable[SampledToken], rows: Sequence[tuple[int, Sample]]
) -> list[SampledToken]:
    sampled = list(sampled)
    if len(sampled) != len(rows):
        raise ValueError(f"{len(sampled)} tokens for {len(rows)} rows to sample")
    return sampled


def _check_invariant(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(f"the scheduler is inconsistent: {broken}")
