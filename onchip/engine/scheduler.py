"""Who computes which tokens in the next step. No tensors here.

There are no phases: a sample is so far computed, and catches up with what is known of it. A step
has one budget of tokens. First come the running samples that lack one token, then prompts (and
samples that are computed again) with what is left, in chunks, then requests that wait. Every line
is in the order of ranks:

    rank = arrival + priority * aging

so a request is overtaken only by those that arrive within (its priority - theirs) * aging after it,
and nobody starves. When pages run out, the running request of the last rank makes room. Its pages
travel to the host or are given up and computed again, whichever is estimated to be cheaper; either
way it stands in line where it stood.

A step takes its time on the device. `advance` says that it is under way: from then on its tokens
count, though nobody knows which they are, and the next step may be scheduled. `resolve` tells them
when they are there. A sample that is then found to have ended leaves what was computed for it in
vain. Beams and penalties look at tokens: while such a request draws, steps follow one another.

Progress: while there are requests and no step is under way, every step computes at least one token.
Each request fits into the pool alone (checked when it is added), the first in line is never
preempted for another, and for it even requests on the host give up the pages they still share.
"""

import math
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count

from onchip.engine import beams
from onchip.engine.costs import Costs
from onchip.engine.line import Line
from onchip.engine.request import Drawn, Request, RequestMetrics, Sample, Status
from onchip.engine.residence import Cache, Chunk, Residence, Tier
from onchip.engine.step import Limits, Refused, Run, Step
from onchip.kvcache.pool import NoRoom

_ELSEWHERE = "though nobody else has any: the cache is used from elsewhere"


class _Plan:
    """A step in the making."""

    def __init__(self, budget: int):
        self.budget = budget
        self.runs: dict[Request, list[Run]] = {}
        self.blocked = False  # somebody lacks pages: nobody new may take them

    def add(self, runs: dict[Request, list[Run]]) -> None:
        self.runs |= runs
        self.budget -= sum([run.stop - run.start for many in runs.values() for run in many])

    def drop(self, request: Request) -> None:
        self.budget += sum(run.num_tokens for run in self.runs.pop(request, ()))

    def step(self, news: dict[str, list[Request]]) -> Step:
        runs = tuple([run for many in self.runs.values() for run in many])
        return Step(runs, **{what: tuple(who) for what, who in news.items()})


class Scheduler:
    """Takes requests, gives steps, takes what was drawn: `add`, then `schedule` and `update` in
    turns; or `schedule`, `advance` and later `resolve`. cache and tier belong to it alone. tier and
    costs: none, and preempted requests are always computed again.
    """

    def __init__(
        self,
        cache: Cache,
        limits: Limits,
        *,
        tier: Tier | None = None,
        costs: Costs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if limits.max_num_seqs > cache.max_seqs:
            raise ValueError(
                f"max_num_seqs={limits.max_num_seqs} exceeds the cache's max_seqs={cache.max_seqs}"
            )
        if (tier is None) != (costs is None):
            raise ValueError("a tier needs costs to choose by, and costs need a tier")
        self.limits, self.clock = limits, clock
        self._pool, self._max_seqlen = cache.pool, cache.max_seqlen
        self._home = Residence(cache, tier, costs)
        self.totals = Counter[str]()  # how often what a Step tells has happened
        self.num_cached_tokens = 0  # of prompts, found in the cache when they came first
        self._requests: dict[str, Request] = {}
        self._waiting, self._running = Line(), Line()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._queued_tokens = 0
        self._step: Step | None = None  # scheduled last, not under way yet
        self._flying: deque[Step] = deque()  # under way, oldest first
        self._news: dict[str, list[Request]] = {}

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Those that never ran and those that were preempted, next first."""
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def must_resolve(self) -> bool:
        """The next step cannot be scheduled before the oldest one under way is resolved."""
        flying = self._flying
        return len(flying) > 1 or (bool(flying) and flying[0].needs_tokens)

    def find(self, request_id: str) -> Request | None:
        """The request of this name, if it is not done."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> Refused | None:
        """None if it is in line now."""
        if request.request_id in self._requests or request.rank[1]:
            raise ValueError(f"request {request.request_id!r} was added before")
        if not request.max_tokens:
            room = self.limits.max_model_len - len(request.prompt_token_ids)
            request.max_tokens = max(1, room)
        if reason := self._never(request) or self._not_now(request):
            return reason
        now, number = self.clock(), next(self._numbers) + 1
        request.rank = (now + request.priority * self.limits.aging_s, number)
        request.metrics = RequestMetrics(now)
        self._requests[request.request_id] = request
        self._enqueue(request)
        if request.deadline_s is not None:
            insort(self._deadlines, (request.deadline_s, number, request))
        return None

    def abort(self, request_id: str) -> bool:
        """Cancel a request, between two steps or while one is computed; its pages are free when
        this returns. False: there is no such request, or it is done.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, Status.FINISHED_ABORTED)
        return request is not None

    def fail(self, request: Request, error: str) -> None:
        """End one request because of an error of its own; the others go on."""
        if not request.finished:
            request.error = error
            self._end(request, Status.FINISHED_ERROR)

    def collapse(self, end: Status, error: str) -> list[Request]:
        """End all requests where they stand, after what leaves nothing to rely on: lines and pages
        are not tidied up, and the scheduler is of no use afterwards.
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
        """End a sample (a stop text was seen); its pages are free when this returns."""
        if sample.finished:
            return
        sample.finish(Status.FINISHED_STOPPED, stop_reason)
        self._home.release(sample)
        request = sample.request
        if not request.live:
            self._end(request, Status.FINISHED_STOPPED)
        elif request.status is Status.RUNNING and not request.rooted:
            self._preempt(request)  # the others were to fork from this one

    def preempt(self, request: Request) -> None:
        """Take a running request off the device between two steps."""
        if self._step is not None:
            raise ValueError("a step is under way: update it first")
        if request.status is not Status.RUNNING:
            raise ValueError(f"{request} does not run: it is {request.status.meaning}")
        self._preempt(request)

    def schedule(self) -> Step:
        """The next step; empty only if there is no request, or if a step is under way."""
        if self._step is not None:
            raise ValueError("a step is under way: update it first")
        if self.must_resolve:
            raise ValueError("a step is under way whose tokens must be known: resolve it first")
        self._expire()
        plan = self._plan()
        if not plan.runs and self._requests and not self._flying:
            self._home.synchronize()  # everyone waits for pages that are on their way out
            plan = self._plan()
        self._step = plan.step(self._news)
        self._news.clear()
        return self._step

    def update(self, step: Step, drawn: Iterable[Drawn]) -> list[Request]:
        """The step was computed, and this was drawn for `step.draws`. Answers the requests that are
        finished by it. Whoever was cancelled meanwhile is passed over.
        """
        if step is not self._step or self._flying:
            raise ValueError("update takes the step that was scheduled last, once")
        drawn = _as_many(drawn, step.draws)
        self.advance(step)
        return self.resolve(step, drawn)

    def advance(self, step: Step) -> None:
        """The step is on its way, and everything that is queued on the device from now on comes
        after it.
        """
        if step is not self._step:
            raise ValueError("advance takes the step that was scheduled last, once")
        self._step = None
        self._flying.append(step)
        self._home.commit([run for run in step.runs if run.sample.sequence is not None])
        for run in step.runs:
            if run.sample.request.solo is None:
                self._fork(run)
        for _, sample in step.draws:
            request = sample.request
            if sample.end is None and request.status is Status.RUNNING and not request.beams:
                sample.pending += 1

    def resolve(self, step: Step, drawn: Iterable[Drawn]) -> list[Request]:
        """This was drawn for `step.draws`, of the oldest step under way. Answers the requests that
        are finished by it.
        """
        if not self._flying or step is not self._flying[0]:
            raise ValueError("resolve takes the oldest step that is under way, once")
        drawn = _as_many(drawn, step.draws)
        self._flying.popleft()
        touched: dict[Request, None] = {}
        for (_, sample), one in zip(step.draws, drawn, strict=True):
            if sample.pending:
                sample.take(one)
                if sample.end is not None:
                    touched[sample.request] = None
            elif sample.request.beams and sample.status is Status.RUNNING:
                self._take_candidates(sample, one)
                touched[sample.request] = None
        self._told(step)
        for request in touched:
            self._close(request)
        return [request for request in touched if request.finished]

    def check(self) -> None:
        """Raise AssertionError unless lines, limits, pages and states agree (for tests)."""
        running, waiting = set(self._running), set(self._waiting)
        _law(not running & waiting, "a request runs and waits")
        _law(running | waiting == set(self._requests.values()), "a request is in no line")
        _law(all(r.status is Status.RUNNING for r in running), "a status in the running line")
        _law(not any(r.rooted for r in waiting if not r.family), "a request that waits has pages")
        _law(all(bool(r.family) == (r.status is Status.SWAPPED) for r in waiting), "families")
        _law(self._seats() <= self.limits.max_num_seqs, "more samples than seats")
        tokens = sum(len(r.prompt_token_ids) for r in waiting)
        _law(tokens == self._queued_tokens, "the count of tokens that wait")

    def _never(self, request: Request) -> Refused | None:
        """Why it can never run. Only so are the others sure to get their turn."""
        prompt, limits, pool = len(request.prompt_token_ids), self.limits, self._pool
        total = prompt + request.max_tokens
        longest = min(limits.max_model_len, self._max_seqlen + 1)
        if total > longest:
            return Refused(
                f"{prompt} tokens of prompt and max_tokens={request.max_tokens} exceed the"
                f" {longest} tokens that a sequence may have"
            )
        if request.widest > limits.max_num_seqs:
            return Refused(f"{request.widest} samples exceed max_num_seqs={limits.max_num_seqs}")
        pages = request.pages(pool.page_size, total - 1)  # the last token is never computed
        if pages > pool.capacity:
            return Refused(
                f"{request.widest} x {total} tokens may need {pages} pages, the cache has"
                f" {pool.capacity} in all"
            )
        return None

    def _not_now(self, request: Request) -> Refused | None:
        limits, tokens = self.limits, len(request.prompt_token_ids)
        if len(self._waiting) >= limits.max_queued_requests:
            return Refused(f"{len(self._waiting)} requests are waiting, as many as may", later=True)
        if self._waiting and self._queued_tokens + tokens > limits.max_queued_tokens:
            return Refused(
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
            self._end(request, Status.FINISHED_EXPIRED)
            self._tell("ended", request)

    def _plan(self) -> _Plan:
        self._home.poll()
        plan = _Plan(self.limits.max_num_batched_tokens)
        self._decode(plan)
        for request in self._running if len(plan.runs) < len(self._running) else ():
            if request.status is Status.RUNNING and request not in plan.runs:
                self._serve(request, plan)
        self._admit(plan)
        return plan

    def _decode(self, plan: _Plan) -> None:
        """One token for each sample that lacks one, with one call to the cache if there is room
        for all of them: prompts never hold them up.
        """
        ready = {r: runs for r in self._running if (runs := _decoding(r))}
        samples = [run.sample for runs in ready.values() for run in runs]
        if self._home.append_each(samples) is None:
            plan.add(ready)
            return
        for request in ready:
            if request.status is Status.RUNNING:
                self._serve(request, plan)

    def _serve(self, request: Request, plan: _Plan) -> None:
        """Slots for its next tokens; whoever stands behind it makes room."""
        while chunks := list(request.chunks(plan.budget)):
            full = self._home.append(chunks)
            if full is None:
                plan.add({request: _runs(request, chunks)})
                return
            plan.blocked = True
            if not self._make_room(request, full, plan):
                return

    def _make_room(self, request: Request, full: NoRoom, plan: _Plan) -> bool:
        """Whether to try again; if not, the request is not served in this step."""
        if full.needed - full.free <= self._pages_leaving():
            return False  # preempting more would empty the device while copies are under way
        last = self._running[-1]
        if last is not request:
            plan.drop(last)
            self._preempt(last)
            return True
        if len(self._running) > 1:
            self._preempt(request)
            return False
        if self._strip_last_swapped():
            return True
        self._fail_now(request, f"{full.needed} pages needed, {full.free} free")
        return False

    def _fail_now(self, request: Request, lack: str) -> None:
        """It is promised that a request that has the device alone fits."""
        self.fail(request, f"{lack}, {_ELSEWHERE}")
        self._tell("ended", request)

    def _pages_leaving(self) -> int:
        families = (r.family for r in self._waiting if r.family)
        return sum(len(family.pages) for family in families if family.is_swapping_out)

    def _strip_last_swapped(self) -> bool:
        """Give up what the last request on the host holds: pages it shares stay on the device."""
        swapped = [r for r in self._waiting if r.family]
        if swapped:
            self._home.give_up(swapped[-1])
            self._tell("recomputed", swapped[-1])
        return bool(swapped)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._home.leave(request)
        self._tell("recomputed" if request.family is None else "swapped_out", request)
        metrics = request.metrics
        request.metrics = replace(metrics, num_preemptions=metrics.num_preemptions + 1)
        self._enqueue(request)

    def _tell(self, what: str, request: Request) -> None:
        """In the next step that is scheduled."""
        self.totals[what] += 1
        self._news.setdefault(what, []).append(request)

    def _admit(self, plan: _Plan) -> None:
        """Requests that wait, strictly in line: the first one that has no room stops the others,
        or large ones would never find any.
        """
        while self._waiting and plan.budget and not plan.blocked:
            request = self._waiting[0]
            if any(sample.pending for sample in request.samples):
                return  # its last token is on its way
            if self._seats() + request.width > self.limits.max_num_seqs:
                return
            if not self._enter(request):
                return
            self._dequeue(request)
            self._running.add(request)
            request.status = Status.RUNNING
            if request.metrics.first_scheduled_s is None:
                request.num_cached_tokens = request.live[0].sequence.hit_tokens
                self.num_cached_tokens += request.num_cached_tokens
                request.metrics = replace(request.metrics, first_scheduled_s=self.clock())
            self._serve(request, plan)

    def _enter(self, request: Request) -> bool:
        """Whether it is on the device now. If nobody runs it must be: others on the host give up
        what they still share, and in the end the request does.
        """
        away = request.family
        while not self._home.enter(request, self._seats()):
            if self._running or self._pages_leaving():
                return False
            if not self._strip_last_swapped():
                self._fail_now(request, "no room for one more sequence")
                return False
        if away is not None and request.status is Status.SWAPPED:
            self._tell("swapped_in", request)
        return True

    def _seats(self) -> int:
        return sum(request.width for request in self._running)

    def _fork(self, run: Run) -> None:
        """The prompt is there: the other samples fork."""
        parent, request = run.sample, run.sample.request
        if run.stop != len(request.prompt_token_ids) or parent.sequence is None:
            return
        for other in request.live:
            if other.sequence is None and not self._home.fork(parent, other):
                self.fail(request, f"no room to fork a sequence, {_ELSEWHERE}")
                return

    def _told(self, step: Step) -> None:
        """Tokens of a step are known: the sample leaves, or the cache is told."""
        for _, sample in step.draws:
            if sample.end is not None:
                self._home.release(sample)
            request = sample.request
            if request.metrics.first_token_s is None and (sample.token_ids or sample.candidates):
                request.metrics = replace(request.metrics, first_token_s=self.clock())
        self._home.tell_last([sample for _, sample in step.draws])

    def _take_candidates(self, beam: Sample, drawn: Drawn) -> None:
        if drawn.top and math.isfinite(drawn.logprob):
            beam.candidates = drawn.top
        else:
            self.fail(beam.request, f"no finite candidates for a beam: {drawn}")

    def _close(self, request: Request) -> None:
        """After a draw: beams that are complete are chosen from, and the request may be done."""
        if request.finished:
            return
        if request.beams and all(s.candidates for s in request.live):
            if end := beams.advance(request, self._home):
                self._end(request, end)
        elif not request.live:
            failed = [s for s in request.samples if s.end is Status.FINISHED_ERROR]
            request.error = str(failed[0].stop_reason) if failed else None
            self._end(request, failed[0].end if failed else request.samples[-1].end)

    def _end(self, request: Request, status: Status) -> None:
        """A request leaves, with everything it holds."""
        self._home.release_all(request)
        for sample in request.live:
            sample.finish(status)
        (self._running.remove if request.status is Status.RUNNING else self._dequeue)(request)
        request.status = status
        request.metrics = replace(request.metrics, finished_s=self.clock())
        if request.beams:
            request.samples = beams.best(request.samples, request.beams.beam_width)
        del self._requests[request.request_id]
        if request.deadline_s is not None:
            del self._deadlines[bisect_left(self._deadlines, (request.deadline_s, request.rank[1]))]


def _decoding(request: Request) -> list[Run]:
    """Its samples that lack one token, if none lacks more."""
    if (solo := request.solo) is not None:
        start, stop = solo.sequence.computed, solo.goal
        return [Run(solo, start, stop, (solo,))] if stop - start == 1 else []
    live = request.live
    if any([sample.sequence is None for sample in live]):
        return []
    lacking = [(sample, sample.goal - sample.sequence.computed) for sample in live]
    if any([count > 1 for _, count in lacking]):
        return []
    return _runs(request, [chunk for chunk in lacking if chunk[1]])


def _runs(request: Request, chunks: Sequence[Chunk]) -> list[Run]:
    """Who draws: all of whom everything that is known is computed. Before the prompt is, all
    samples draw from the run of the first.
    """
    live = request.live
    forks = any([sample.sequence is None for sample in live])
    runs = []
    for sample, num_tokens in chunks:
        start = sample.sequence.computed
        stop = start + num_tokens
        drawing = live if forks else (sample,)
        runs.append(Run(sample, start, stop, tuple([s for s in drawing if s.length == stop])))
    return runs


def _as_many(drawn: Iterable[Drawn], draws: Sequence[tuple[int, Sample]]) -> list[Drawn]:
    drawn = list(drawn)
    if len(drawn) != len(draws):
        raise ValueError(f"{len(drawn)} tokens for {len(draws)} draws")
    return drawn


def _law(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(f"the scheduler is inconsistent: {broken}")
