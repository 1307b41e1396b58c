"""The invariants of the scheduler, and bugs of other schedulers, one test each (the issue is
named), on a real cache with a hash as the model.
"""

import pytest

from onchip.engine import (
    BeamSearchParams,
    Limits,
    PreemptionCosts,
    RejectedRequest,
    Request,
    SamplingParams,
    Scheduler,
    Status,
)
from onchip.kvcache import NoRoom


def ask(name="r", prompt=5, tokens=6, params=None, **options):
    """A request that runs to its full length. prompt: its tokens, or their number."""
    prompt = range(1, prompt + 1) if isinstance(prompt, int) else prompt
    params = params or SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, prompt, params, **options)


def wide(n, tokens=6):
    return SamplingParams(n=n, max_tokens=tokens, ignore_eos=True)


# Admission


@pytest.mark.parametrize(
    "request_, match",
    [
        (ask(prompt=150, tokens=60), "150 tokens of prompt and max_tokens=60 exceed"),
        (ask(prompt=100, tokens=18), "exceed the 117 tokens that a sequence may have"),
        (ask(params=wide(9)), "9 samples exceed"),
        (ask(prompt=41, params=wide(6, 20)), "6 x 61 tokens may need 40 pages"),
        (ask(prompt=41, params=BeamSearchParams(6, 20)), "6 x 61 tokens may need 40 pages"),
    ],
)
def test_a_request_that_can_never_fit_is_rejected(engine, request_, match):
    """vllm #39734: it waits forever and blocks the queue; vllm #40302: it kills the engine."""
    one = engine(max_model_len=200)
    answer = one.scheduler.add(request_)
    assert (
        isinstance(answer, RejectedRequest) and not answer.is_retryable and match in answer.reason
    )
    one.add(ask("other"))
    one.drain()


def test_a_request_that_fits_exactly_is_served(engine, assert_same):
    """29 pages of 4: the last token needs no slot."""
    one = engine(max_model_len=200)
    request = one.add(ask(prompt=100, tokens=17))
    assert isinstance(one.scheduler.add(ask("more", 100, 18)), RejectedRequest)
    one.drain()
    assert_same(request)


def test_forks_of_a_long_prompt_fit_because_they_share_it(engine, assert_same):
    one = engine(max_model_len=200)
    request = one.add(ask(prompt=80, params=wide(8, 5)))
    one.drain()
    assert_same(request)


def test_max_tokens_none_reaches_max_model_len(engine):
    one = engine(max_model_len=20)
    request = one.add(ask(params=SamplingParams(max_tokens=None, ignore_eos=True)))
    one.drain()
    assert len(request.samples[0].token_ids) == 15
    assert isinstance(one.scheduler.add(ask("full", 20, params=SamplingParams())), RejectedRequest)


def test_the_queue_is_bounded_in_requests_and_tokens(engine):
    """vllm #2901: two and a half years without a bound."""
    one = engine(max_queued_requests=2, max_queued_tokens=30)
    one.add(ask("a", 20))
    full = one.scheduler.add(ask("b", 11))
    assert full.is_retryable and "tokens are waiting" in full.reason
    one.add(ask("b", 10))
    full = one.scheduler.add(ask("c", 1))
    assert full.is_retryable and "2 requests are waiting" in full.reason
    one.step()
    one.add(ask("c", 1))
    one.drain()


def test_a_request_is_added_once(engine):
    one = engine()
    request = one.add(ask())
    for again in (request, ask()):
        with pytest.raises(ValueError, match="added before"):
            one.scheduler.add(again)
    one.drain()
    with pytest.raises(ValueError, match="added before"):
        one.scheduler.add(request)


def test_steps_and_updates_alternate(engine):
    one = engine()
    request = one.add(ask())
    step = one.scheduler.schedule()
    with pytest.raises(ValueError, match="under way"):
        one.scheduler.schedule()
    with pytest.raises(ValueError, match="under way"):
        one.scheduler.preempt(one.scheduler.running[0])
    tokens = one.compute(step)
    with pytest.raises(ValueError, match="0 tokens for 1 rows to sample"):
        one.scheduler.update(step, [])
    one.scheduler.update(step, tokens)
    with pytest.raises(ValueError, match="once"):
        one.scheduler.update(step, tokens)
    one.scheduler.preempt(request)
    with pytest.raises(ValueError, match="it is preempted, to be recomputed"):
        one.scheduler.preempt(request)


def test_steps_in_flight_are_collected_in_order(engine):
    one = engine()
    request = one.add(ask(tokens=3))
    scheduler = one.scheduler
    first = scheduler.schedule()
    with pytest.raises(ValueError, match="apply_tokens takes the oldest"):
        scheduler.apply_tokens(first, one.compute(first))
    tokens = one.compute(first)
    scheduler.mark_launched(first)
    with pytest.raises(ValueError, match="mark_launched takes the step that was scheduled last"):
        scheduler.mark_launched(first)
    assert request.samples[0].num_tokens == 1 and not request.samples[0].token_ids
    second = scheduler.schedule()
    one.in_flight = first, tokens
    more = one.compute(second)
    with pytest.raises(ValueError, match="update takes the step that was scheduled last"):
        scheduler.update(second, more)
    scheduler.mark_launched(second)
    assert scheduler.must_collect
    with pytest.raises(ValueError, match="must be collected first: its tokens are needed"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="apply_tokens takes the oldest"):
        scheduler.apply_tokens(second, more)
    with pytest.raises(ValueError, match="0 tokens for 1 rows to sample"):
        scheduler.apply_tokens(first, [])
    scheduler.apply_tokens(first, tokens)
    assert request.samples[0].num_tokens == 2 and len(request.samples[0].token_ids) == 1
    scheduler.apply_tokens(second, more)
    one.drain()


@pytest.mark.parametrize("params", [BeamSearchParams(2, 4), SamplingParams(presence_penalty=1.0)])
def test_beams_and_penalties_wait_for_tokens(engine, params):
    one = engine()
    one.add(ask(params=params))
    step = one.scheduler.schedule()
    tokens = one.compute(step)
    one.scheduler.mark_launched(step)
    assert one.scheduler.must_collect
    with pytest.raises(ValueError, match="its tokens are needed"):
        one.scheduler.schedule()
    one.scheduler.apply_tokens(step, tokens)
    one.drain()


def test_the_maximum_length_is_known_before_the_last_token(engine, assert_same):
    """Its sample is not computed once more in vain; the waiting request gets the step."""
    one = engine(max_num_seqs=1, ahead=True)
    first, second = one.add(ask("a", tokens=2)), one.add(ask("b", [7, 8], tokens=2))
    counts = []
    while one.scheduler.has_work:
        counts.append(one.step().num_tokens)
    assert counts == [5, 1, 0, 2, 1, 0]
    one.check_empty()
    assert_same(first)
    assert_same(second)


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 5}, "each running sample"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"aging_s": float("nan")}, "aging_s=nan"),
    ],
)
def test_limits_are_checked(fields, match):
    with pytest.raises(ValueError, match=match):
        Limits(100, **fields)


def test_a_scheduler_needs_rows_and_both_tier_and_costs(engine):
    one = engine()
    with pytest.raises(ValueError, match="exceeds the cache's"):
        Scheduler(one.cache, Limits(100, max_num_seqs=9))
    with pytest.raises(ValueError, match="a tier needs costs"):
        Scheduler(one.cache, Limits(100, max_num_seqs=8), costs=PreemptionCosts(1))


# Steps


def test_a_prompt_is_chunked_and_never_delays_decoding(engine, assert_same):
    """nano-vllm #73: decoding stalls while a prompt is computed."""
    one = engine(budget=8, num_pages=60)
    short = one.add(ask("short", 3, 20))
    one.step()
    long = one.add(ask("long", [9] * 50, 4))
    chunks = []
    while not long.samples[0].token_ids:
        step = one.step()
        assert step.num_tokens == 8 or long.samples[0].token_ids
        counts = {chunk.sample.request: chunk.num_tokens for chunk in step.chunks}
        assert counts[short] == 1
        chunks.append(counts[long])
    assert sum(chunks) == 50 and chunks[0] == 7
    one.drain()
    assert_same(short)
    assert_same(long)


def test_an_older_prompt_does_not_wait_for_newer_decoders(engine):
    """The budget has at least one token for each running sequence."""
    one = engine(budget=4, max_num_seqs=4, num_pages=80)
    long = one.add(ask("long", 60, 2))
    one.step()
    for i in range(3):
        one.add(ask(f"s{i}", 1, 30))
    while not long.finished:
        step = one.step()
        assert any(chunk.sample.request is long for chunk in step.chunks)
    one.drain()


def test_samples_of_a_request_share_one_prefill(engine, assert_same):
    """vllm #39647: n samples are n prompts in vLLM."""
    one = engine()
    request = one.add(ask(prompt=13, params=wide(4)))
    step = one.step()
    assert [chunk.num_tokens for chunk in step.chunks] == [13] and len(step.rows_to_sample) == 4
    step = one.step()
    assert [chunk.num_tokens for chunk in step.chunks] == [1] * 4
    tables = [s.sequence.table.pages for s in request.unfinished]
    assert len({pages[:3] for pages in tables}) == 1 and len({pages[3] for pages in tables}) == 4
    one.drain()
    assert_same(request)


@pytest.mark.parametrize("width, penalty", [(1, 1.0), (2, 0.0), (4, 1.0), (3, 2.5), (3, -1.0)])
def test_beams_are_the_search_by_definition(engine, assert_same, width, penalty):
    one = engine(num_pages=60)
    params = BeamSearchParams(width, 11, length_penalty=penalty)
    requests = [
        one.add(ask(f"b{i}", [i, 1, 2], params=params, eos_token_ids=(3, 4))) for i in range(6)
    ]
    one.drain()
    for request in requests:
        assert_same(request)
        scores = [s.cumulative_logprob / len(s.token_ids) ** penalty for s in request.samples]
        assert scores == sorted(scores, reverse=True)
        assert [o.index for o in request.outputs()] == list(range(width))


def test_the_old_interface_returns_n_of_best_of_beams(engine):
    one = engine()
    params = SamplingParams(n=2, best_of=4, use_beam_search=True, temperature=0, max_tokens=7)
    old, new = (
        one.add(ask("old", params=params)),
        one.add(ask("new", params=BeamSearchParams(4, 7))),
    )
    one.drain()
    assert [o.token_ids for o in old.outputs()] == [o.token_ids for o in new.outputs()][:2]


def test_beams_never_take_more_rows_than_their_width(engine, assert_same):
    one = engine(max_num_seqs=3)
    request = one.add(ask(params=BeamSearchParams(3, 9)))
    one.drain()
    assert_same(request)


def test_a_second_request_hits_the_first_ones_prompt(engine, assert_same):
    one = engine()
    first = one.add(ask("a", 13))
    one.drain()
    second = one.add(ask("b", 13))
    step = one.step()
    assert second.num_cached_tokens == 12 and step.num_tokens == 1
    one.drain()
    assert_same(first)
    assert_same(second)


def test_logprobs_of_a_prompt_need_all_its_rows(engine):
    one = engine()
    one.add(ask("a", 13))
    one.drain()
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    one.add(ask("b", 13, params=params))
    assert one.step().num_tokens == 13
    one.drain()


# Running out of pages


def test_the_newest_is_preempted_and_keeps_its_position(engine, assert_same):
    one = engine(num_pages=12, prefix_reuse=False)
    requests = [one.add(ask(f"r{i}", 8, 20)) for i in range(4)]
    preempted = []
    while one.scheduler.has_work:
        before = one.scheduler.running
        step = one.step()
        for request in step.recomputed:
            survivors = [r for r in before if r.status is Status.RUNNING]
            assert all(request.order_key > r.order_key for r in survivors)
            preempted.append(request)
    assert preempted and requests[0] not in preempted
    finished = [r.metrics.finished_s for r in requests]
    assert finished == sorted(finished)
    one.check_empty()
    for request in requests:
        assert_same(request)
        assert request.metrics.num_preemptions == preempted.count(request)


def test_every_step_computes_something_even_in_the_smallest_pool(engine, assert_same):
    """nano-vllm #274: an assertion when pages run out; #277: retried forever."""
    one = engine(num_pages=7, host_pages=6)
    requests = [one.add(ask(f"r{i}", [i] * 9, 14)) for i in range(5)]
    one.drain()  # asserts progress in every step
    for request in requests:
        assert_same(request)


def test_swapped_requests_do_not_hold_the_last_pages(engine, assert_same):
    """Swapped requests share a prefix. Its pages belong to none of them alone and stay on the
    device until the running request needs them.
    """
    one = engine(num_pages=12, page_size=4, host_pages=40, prefix_reuse=True)
    seed = one.add(ask("seed", 24, 2))
    one.step()
    others = [one.add(ask(f"r{i}", [*range(1, 25), 30 + i], 3)) for i in range(3)]
    one.step()
    for request in one.scheduler.running:
        one.scheduler.preempt(request)
    assert one.scheduler.totals["swapped_out"] >= 2
    assert one.cache.pool.num_free < one.cache.pool.capacity
    large = one.add(ask("large", [99, *range(40, 75)], 8, priority=-100))
    one.drain()
    assert one.scheduler.totals["recomputed"] > 0
    for request in (seed, large, *others):
        assert_same(request)


@pytest.mark.parametrize("host_pages, what", [(20, "swapped_out"), (0, "recomputed")])
@pytest.mark.parametrize("params", [wide(1), wide(3), BeamSearchParams(3, 6)], ids=str)
def test_preemption_at_any_step_changes_no_output(engine, assert_same, host_pages, what, params):
    """vllm #4422: samples that are preempted together; nano-vllm #144: the first step after a
    preemption was treated as a prompt.
    """
    for when in range(7):
        one = engine(host_pages=host_pages, budget=8)
        request = one.add(ask(prompt=11, params=params))
        other = one.add(ask("other", 11))
        for _ in range(when):
            one.step()
        if request.status is Status.RUNNING:
            one.scheduler.preempt(request)
            assert one.scheduler.totals[what] == 1
        one.drain()
        assert_same(request)
        assert_same(other)


def test_beams_recomputed_twice_drop_their_candidates(engine, assert_same):
    """With a budget of three tokens the beams are recomputed one after the other."""
    one = engine(budget=3, max_num_seqs=3, prefix_reuse=False)
    request = one.add(ask(params=BeamSearchParams(3, 12)))
    while len(request.unfinished[0].token_ids) < 8:
        one.step()
    one.scheduler.preempt(request)
    while len({bool(beam.candidates) for beam in request.unfinished}) == 1:
        one.step()
    one.scheduler.preempt(request)
    one.drain()
    assert_same(request)


def test_costs_choose_between_swap_and_recomputation():
    costs = PreemptionCosts(page_bytes=1000, link_bytes_per_s=1e6, prefill_tokens_per_s=1000)
    assert costs.swap_s(5) == 0.01 and costs.recompute_s(20) == 0.02
    assert costs.prefers_swap(5, 20) and not costs.prefers_swap(5, 9)
    for _ in range(100):
        costs.observe(5000, 1.0)
    costs.observe(0, 1.0)
    assert 4999 < costs.prefill_tokens_per_s < 5000
    assert not costs.prefers_swap(5, 20)
    with pytest.raises(ValueError, match="link_bytes_per_s=0"):
        PreemptionCosts(1, 0)


def test_a_request_larger_than_the_host_tier_is_recomputed(engine, assert_same):
    one = engine(host_pages=2)
    request = one.add(ask(prompt=11))
    one.step()
    one.scheduler.preempt(request)
    assert request.status is Status.RECOMPUTE
    one.drain()
    assert_same(request)


def test_a_full_host_tier_leads_to_recomputation(engine, assert_same):
    one = engine(host_pages=4)
    requests = [one.add(ask(f"r{i}", [i] * 11)) for i in range(3)]
    one.step()
    one.step()
    for request in one.scheduler.running:
        one.scheduler.preempt(request)
    assert one.scheduler.totals == {"swapped_out": 1, "recomputed": 2}
    one.drain()
    for request in requests:
        assert_same(request)


def test_pages_being_swapped_out_are_waited_for(engine, assert_same):
    """vllm-ascend #16315: because pages were freed late, all requests were preempted, 0
    tokens/s.
    """
    one = engine(num_pages=14, host_pages=40, late=True, prefix_reuse=False)
    requests = [one.add(ask(f"r{i}", [i] * 8, 20)) for i in range(4)]
    victims = set()
    while not victims:
        victims.update(one.step().swapped_out)
    assert len(victims) == 1 and victims == {one.scheduler.waiting[0]}
    one.step()
    assert one.scheduler.totals["swapped_out"] == 1
    one.drain()
    for request in requests:
        assert_same(request)


def test_both_requests_run_once_the_swap_out_is_done(engine):
    """The first request in the queue lacks a page that is being swapped out; the second
    would fit.
    """
    one = engine(num_pages=13, host_pages=40, budget=32, late=True, prefix_reuse=False)
    one.add(ask("leaving", 24, 9))
    one.step()
    one.scheduler.preempt(one.scheduler.running[0])
    first = one.add(ask("first", 28, priority=-1))
    second = one.add(ask("second", 4, priority=-1))
    assert [chunk.sample.request for chunk in one.step().chunks] == [first, second]
    one.drain()


def test_a_preempted_request_does_not_return_in_the_same_step(engine):
    one = engine(num_pages=12, prefix_reuse=False)
    for i in range(6):
        one.add(ask(f"r{i}", 8, 20))
    while one.scheduler.has_work:
        step = one.step()
        assert not {chunk.sample.request for chunk in step.chunks} & set(step.recomputed)


# Order


def test_first_come_first_served_within_a_priority(engine):
    one = engine(max_num_seqs=1)
    names = ["low", "a", "b", "urgent"]
    for name, priority in zip(names, (3, 0, 0, -3), strict=True):
        one.add(ask(name, priority=priority))
    one.drain()
    assert [r.request_id for r in one.finished] == ["urgent", "a", "b", "low"]


def test_no_request_starves(engine):
    """One level of priority is worth aging_s seconds of waiting: a stream of urgent requests
    overtakes for that long.
    """
    one = engine(max_num_seqs=1, aging_s=1.0)
    low = one.add(ask("low", tokens=1, priority=5))
    for i in range(2000):
        one.add(ask(f"u{i}", tokens=1, priority=0))
        one.step()
        if low.finished:
            break
    assert low.finished and 5.0 <= low.metrics.finished_s <= 5.2
    one.drain()


def test_a_preempted_request_stays_before_later_ones(engine):
    """vllm #41951: a priority queue put it behind later requests, again and again."""
    one = engine(max_num_seqs=2)
    first, second = one.add(ask("first")), one.add(ask("second"))
    one.step()
    later = [one.add(ask(f"l{i}")) for i in range(3)]
    one.scheduler.preempt(second)
    assert one.scheduler.waiting == (second, *later)
    step = one.step()
    assert {chunk.sample.request for chunk in step.chunks} == {first, second}
    one.drain()


def test_small_requests_do_not_overtake_a_large_one(engine):
    one = engine(num_pages=12)
    one.add(ask("running", 8, 12))
    one.step()
    large = one.add(ask("large", [9] * 33, 2))
    small = [one.add(ask(f"s{i}", [i] * 2, 2)) for i in range(9)]
    one.drain()
    started = [r.metrics.first_scheduled_s for r in (large, *small)]
    assert min(started) == started[0]


def test_a_waiting_request_holds_no_row(engine):
    """vllm #53130: postponed requests kept their rows forever."""
    one = engine(max_num_seqs=4, num_pages=12)
    one.add(ask("a", 8, 12))
    one.step()
    one.add(ask("large", [9] * 33, 2))
    one.step()
    assert one.scheduler._num_running_seqs() == 1
    assert len(one.cache.host_table.free_rows) == one.cache.max_seqs - 1
    one.drain()


# Leaving


@pytest.mark.parametrize("params", [wide(1), wide(3), BeamSearchParams(3, 6)], ids=str)
@pytest.mark.parametrize("when", range(6))
def test_cancelled_at_any_step_its_pages_are_free_at_once(engine, params, when):
    """Waiting, in a prompt, decoding, in the middle of a step (sglang-jax #982: freed twice)."""
    one = engine(budget=8)
    request = one.add(ask(prompt=13, params=params))
    for _ in range(when):
        one.step()
    assert one.scheduler.abort("r")
    one.check_empty()
    assert not one.scheduler.abort("r") and not one.scheduler.has_work
    assert {s.end for s in request.samples} == {Status.FINISHED_ABORTED}
    assert not one.scheduler.schedule().chunks
    again = engine(budget=8)
    again.add(ask(prompt=13, params=params))
    for _ in range(when):
        again.step()
    again.step(between=lambda step: again.scheduler.abort("r"))
    again.check_empty()


@pytest.mark.parametrize("ready", [False, True])
def test_cancelled_during_a_swap(engine, ready):
    """vllm #46283: blocks leaked when a request was cancelled during an asynchronous load."""
    one = engine(host_pages=10, late=True)
    one.add(ask(prompt=13, params=wide(2)))
    one.step()
    one.step()
    one.scheduler.preempt(one.scheduler.running[0])
    if ready:
        one.tier.synchronize()
        one.scheduler.schedule()  # swap-in under way
    assert one.scheduler.abort("r")
    one.check_empty()


def test_a_sample_that_is_stopped_frees_its_pages_wherever_it_is(engine):
    for away in (False, True):
        one = engine(host_pages=20)
        request = one.add(ask(prompt=9, params=wide(3, 9)))
        one.step()
        one.step()
        if away:
            one.scheduler.preempt(request)
        one.scheduler.stop(request.samples[0], "###")
        one.scheduler.stop(request.samples[0], "again")
        one.step()
        assert len(one.cache.pool.tables) == 2
        one.drain()
        assert [o.finish_reason for o in request.outputs()] == ["stop", "length", "length"]
        assert request.outputs()[0].stop_reason == "###"


def test_the_first_sample_is_stopped_before_others_forked_from_it(engine, assert_same):
    one = engine(budget=8, prefix_reuse=False)
    request = one.add(ask(prompt=13, params=wide(3)))
    for _ in range(4):
        one.step()
    one.scheduler.preempt(request)
    one.step()
    assert len(request.resident) == 1
    one.step(between=lambda step: one.scheduler.stop(request.samples[0], "x"))
    one.drain()
    assert [len(s.token_ids) for s in request.samples] == [3, 6, 6]


def test_a_deadline_ends_a_request_that_waits_or_runs(engine):
    one = engine(max_num_seqs=1)
    running = one.add(ask("running", tokens=50, deadline_s=0.1))
    waiting = one.add(ask("waiting", deadline_s=0.05))
    in_time = one.add(ask("in_time", deadline_s=9.0))
    ended = []
    while one.scheduler.has_work:
        ended += one.step().ended
    assert ended == [waiting, running] and in_time.status is Status.FINISHED_LENGTH
    assert running.outputs()[0].finish_reason == "abort" and running.samples[0].token_ids
    assert not one.scheduler._deadlines
    one.check_empty()


def test_one_bad_row_fails_alone(engine, assert_same):
    one = engine()
    bad, good = one.add(ask("bad")), one.add(ask("good"))
    step = one.scheduler.schedule()
    tokens = one.compute(step)
    tokens[0] = tokens[0]._replace(logprob=float("nan"))
    assert one.scheduler.update(step, tokens) == [bad]
    one.drain()
    assert bad.status is Status.FINISHED_ERROR and bad.error == "the logits are not finite"
    assert bad.outputs()[0].finish_reason == "error"
    assert_same(good)


def test_a_beam_without_candidates_fails_alone(engine):
    one = engine()
    request = one.add(ask(params=BeamSearchParams(2)))
    step = one.scheduler.schedule()
    tokens = [d._replace(top=()) for d in one.compute(step)]
    assert one.scheduler.update(step, tokens) == [request]
    assert "no finite candidates" in request.error
    one.check_empty()


def test_beams_that_cannot_fork_fail_and_leave_nothing(engine):
    one = engine(max_num_seqs=3)
    thief = one.cache.open()
    request = one.add(ask(params=BeamSearchParams(3, 9)))
    one.step()
    assert request.status is Status.FINISHED_ERROR and "used from elsewhere" in request.error
    one.cache.free(thief)
    one.check_empty()


def test_a_cache_that_is_used_from_elsewhere_fails_a_request_not_the_engine(engine):
    one = engine(num_pages=8)
    thief = one.cache.open()
    assert not isinstance(thief, NoRoom) and one.cache.append(thief, [0] * 24) is None
    request = one.add(ask(prompt=9, tokens=9))
    step = one.scheduler.schedule()
    assert step.ended == (request,) and "used from elsewhere" in request.error
    one.cache.free(thief)
    one.check_empty()


# Prefixes


def test_a_prompt_that_is_cached_to_the_last_page_still_computes_a_token(engine, assert_same):
    """nano-vllm #144, #199: nothing was left to compute, and the step crashed."""
    one = engine()
    one.add(ask("a", 12, 1))
    one.drain()
    request = one.add(ask("b", 12))
    assert one.step().num_tokens >= 1
    one.drain()
    assert_same(request)


def test_chunks_start_after_the_cached_prefix(engine, assert_same):
    """nano-vllm #211, #233: counted before the cache lookup, so wrong after a hit."""
    one = engine(budget=9)
    first = one.add(ask("a", 40, 3))
    for _ in range(5):
        one.step()
    one.scheduler.preempt(first)
    step = one.step()
    assert step.chunks[0].start == first.samples[0].sequence.hit_tokens > 30
    one.drain()
    assert_same(first)


def test_a_prompt_being_computed_is_not_hit(engine, assert_same):
    """ROCm/ATOM #902: pages were published before they were written."""
    one = engine(budget=8)
    first = one.add(ask("a", 23))
    one.step()
    second = one.add(ask("b", 23))
    one.drain()
    assert second.num_cached_tokens <= 23
    assert_same(first)
    assert_same(second)


def test_different_salts_share_no_prefix(engine, assert_same):
    one = engine()
    one.add(ask("a", 13, salt="blue"))
    one.drain()
    same, other = ask("b", 13, salt="blue"), ask("c", 13, salt="gold")
    one.add(same)
    one.add(other)
    one.drain()
    assert (same.num_cached_tokens, other.num_cached_tokens) == (12, 0)
    assert_same(same)
    assert_same(other)


def test_pages_of_a_hit_are_not_free(engine, assert_same):
    """sglang #35270 counted them twice: a hit takes free pages, and the rest must suffice."""
    one = engine(num_pages=12)
    one.add(ask("a", 24, 2))
    one.drain()
    runner = one.add(ask("runner", [50] * 14, 12))
    one.step()
    request = one.add(ask("b", [*range(1, 25), 60], 10))
    one.drain()
    assert_same(runner)
    assert_same(request)
