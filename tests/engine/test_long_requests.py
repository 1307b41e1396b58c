"""Requests of several pools: their outputs are those of a large pool, and nothing is left of them
however they end.
"""

import pytest

from onchip.core.problem import UnsupportedError
from onchip.engine import (
    BeamSearchParams,
    PreemptionCosts,
    RejectedRequest,
    Request,
    SamplingParams,
    Status,
)
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.stream_pacer import StreamPacer

TEXT = "in the beginning was the word, and the word was with the others, " * 4
SMALL = {"num_pages": 14, "offload_pages": 64}  # 52 tokens; prompts and outputs of up to 225
GREEDY = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
LONG = [
    (TEXT[:200], GREEDY),
    (TEXT[3:190], SamplingParams(seed=4, max_tokens=20, repetition_penalty=1.2, logprobs=2)),
    (TEXT[:150], SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1)),
]
SHORT = [
    ("no prefix", SamplingParams(temperature=0, max_tokens=14)),
    (TEXT[:30], SamplingParams(seed=5, max_tokens=9, n=2)),
    ("x", BeamSearchParams(2, 5)),
    (TEXT[:33], SamplingParams(seed=6, max_tokens=8, top_k=9)),
]


def add(one, asked):
    requests = [one.add(prompt, params) for prompt, params in asked]
    assert all(isinstance(request, Request) for request in requests), requests
    return requests


def run(tiny, asked, **options):
    with tiny.engine(**options) as one:
        add(one, asked)
        return tiny.visible(tiny.drain(one)[0]), one.stats()


@pytest.fixture(scope="module")
def expected(tiny):
    return run(tiny, LONG + SHORT)[0]


WAYS = {
    "strict": {"overlap": False},
    "overlap": {"overlap": True},
    "chunks_of_13": {"budget": 13},
    "large_chunks": {"budget": 300},
    "swap": {"host_pages": 30, "overlap": True},
    "no_prefixes": {"prefix_caching": False},
    "two_at_a_time": {"offload_pages": 130},
    "drafts": {"speculative_config": SpeculativeConfig(3, prompt_lookup_max=3)},
    "drafts_in_a_tree": {
        "speculative_config": SpeculativeConfig(
            3, prompt_lookup_min=1, speculative_token_tree="[(0,), (1,), (0, 0)]"
        )
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_a_large_pool(tiny, expected, way):
    """Long requests beside ordinary ones."""
    outputs, stats = run(tiny, LONG + SHORT, **SMALL | WAYS[way])
    assert outputs == expected
    assert (
        stats.pages_offloadable >= 64 and stats.pages_streamed > 500 and not stats.pages_offloaded
    )
    assert (stats.speculation is not None) == way.startswith("drafts")


def test_long_requests_that_arrive_last(tiny, expected):
    outputs, _ = run(tiny, SHORT + LONG, **SMALL)
    assert outputs == expected[len(LONG) :] + expected[: len(LONG)]


def test_a_request_of_four_pools_answers_alone(tiny, expected):
    outputs, stats = run(tiny, LONG[:1], **SMALL)
    assert outputs == expected[:1]
    assert len(LONG[0][0]) + 25 > 4 * 4 * stats.pages_total


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_outputs_on_a_gpu_are_those_of_a_large_pool(tiny, graphs):
    """Pages are copied by a second stream; other steps replay graphs."""
    options = {"device": "cuda", "graphs": graphs}
    expected, _ = run(tiny, LONG[:1] + SHORT, **options)
    for more in ({}, {"host_pages": 30}, {"overlap": False}):
        outputs, stats = run(tiny, LONG[:1] + SHORT, **options, **SMALL, **more)
        assert outputs == expected and stats.pages_streamed


@pytest.mark.parametrize("host_pages", [0, 30])
@pytest.mark.parametrize("after", [2, 5, 9])
def test_a_preempted_long_request_continues(tiny, expected, host_pages, after):
    with tiny.engine(**SMALL, host_pages=host_pages) as one:
        (request,) = add(one, LONG[:1])
        outputs, steps = {}, 0
        while one.has_work:
            outputs |= {output.request_id: output for output in one.step()}
            tiny.check(one)
            steps += 1
            if steps % after == 0 and steps < 30 and request.status is Status.RUNNING:
                one.scheduler.preempt(request)
                assert request.status is Status.SWAPPED or not one.cache.offloaded.num_reserved
        tiny.check_empty(one)
        assert tiny.visible(outputs) == expected[:1]
        assert request.metrics.num_preemptions > 2
        assert bool(one.stats().preempted_by_swap) == bool(host_pages)


@pytest.mark.parametrize("steps", [1, 4, 8, 13])
def test_a_cancelled_long_request_leaves_nothing(tiny, expected, steps):
    with tiny.engine(**SMALL, overlap=True) as one:
        (long,) = add(one, LONG[:1])
        others = add(one, SHORT)
        for _ in range(steps):
            one.step()
        assert one.cancel(long.request_id)
        tiny.check(one)
        assert not one.cache.offloaded.num_reserved
        outputs, _ = tiny.drain(one)
        finished = {r.request_id: r.output() for r in others}
        assert outputs.keys() <= finished.keys()
        assert tiny.visible(finished) == expected[len(LONG) :]


def test_a_stop_text_ends_a_long_request(tiny, expected):
    text = expected[0][0][1]
    stop = text[len(text) // 2 :][:2]
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, stop=[stop])
    (found,), _ = run(tiny, [(TEXT[:200], params)], **SMALL)
    assert found[0][1] == text[: text.index(stop)] and found[0][3] == "stop"


def test_an_interrupt_releases_host_memory(tiny, expected, monkeypatch):
    with tiny.engine(**SMALL) as one:
        add(one, LONG[:1])
        for _ in range(6):
            one.step()
        assert one.cache.num_offloaded
        with monkeypatch.context() as patch:
            patch.setattr(
                one._runner, "launch", lambda step: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                one.step()
        (ended,) = one.step()
        assert ended.outputs[0].finish_reason == "abort"
        tiny.check_empty(one)
        (request,) = add(one, LONG[:1])
        assert tiny.visible(tiny.drain(one)[0]) == expected[:1] and request.finished


def test_a_long_request_waits_for_host_memory_and_others_overtake_it(tiny):
    with tiny.engine(**SMALL) as one:
        first, second, third = add(one, [LONG[0], LONG[0], LONG[2]])
        short = add(one, [SHORT[0], SHORT[3]])
        while not all(request.finished for request in short):
            one.step()
            assert first.status is Status.RUNNING and second.status is Status.WAITING
            assert third.status is Status.WAITING, "no other long request overtakes it"
        tiny.drain(one)
        assert second.status is third.status is Status.FINISHED_LENGTH
        assert second.outputs()[0].token_ids == first.outputs()[0].token_ids


def test_host_memory_that_never_becomes_free_is_an_error(tiny):
    with tiny.engine(**SMALL) as one:
        taken = one.cache.offloaded.reserve(20)
        long, shorter = add(one, [LONG[0], LONG[2]])
        short = add(one, SHORT[:1])
        while one.has_work:
            one.step()
        assert long.status is Status.FINISHED_ERROR and shorter.status is Status.FINISHED_LENGTH
        assert long.error.startswith("56 pages of host memory needed, no such range is free")
        assert short[0].status.finish_reason in ("stop", "length")
        one.cache.offloaded.release(taken)
        tiny.check_empty(one)


def test_what_never_fits_is_rejected(tiny):
    with tiny.engine(num_pages=14, offload_pages=40) as one:
        refused = one.add(TEXT[:150], GREEDY)
        assert isinstance(refused, RejectedRequest) and not refused.is_retryable
        assert "exceed the 161 tokens that a sequence may have" in refused.reason
        refused = one.add(TEXT[:80], SamplingParams(n=2))
        assert "of host memory it has 40, for single samples" in refused.reason
    with tiny.engine(num_pages=14) as one:
        assert "exceed the 53 tokens" in one.add(TEXT[:150], GREEDY).reason
    with pytest.raises(UnsupportedError, match="cannot be offloaded"):
        tiny.engine(**SMALL, kv_dtype="int8")


def test_max_tokens_by_default(tiny):
    """A prompt that fits into the pool ends there; a long one at max_model_len or where host memory
    ends.
    """
    unlimited = SamplingParams(max_tokens=None)
    with tiny.engine(**SMALL) as one:
        short, long = add(one, [(TEXT[:30], unlimited), (TEXT[:60], unlimited)])
        assert (short.max_tokens, short.is_long) == (53 - 30, False)
        assert (long.max_tokens, long.is_long) == (256 - 60, True)
    with tiny.engine(num_pages=14, offload_pages=40) as one:
        assert add(one, [(TEXT[:60], unlimited)])[0].max_tokens == 161 - 60


def test_prefixes_of_long_prompts_are_shared_and_stay_valid(tiny):
    short = [(TEXT[:n], SamplingParams(temperature=0, max_tokens=5)) for n in (24, 31, 40)]
    alone = [run(tiny, [one])[0][0] for one in short]
    with tiny.engine(num_pages=20, offload_pages=64) as one:
        for asked, expected in zip(short, alone, strict=True):
            add(one, LONG[:1])
            for _ in range(4):
                one.step()
            (request,) = add(one, [asked])
            outputs, _ = tiny.drain(one)
            assert tiny.visible({request.request_id: outputs[request.request_id]}) == [expected]
            tiny.check(one)


def test_ordinary_requests_wait_for_few_steps_with_streamed_pages(engine):
    """Each streamed step lasts about 0.2 s, twenty times as long as another."""
    one = engine(num_pages=9, offload_pages=40, page_s=0.01, budget=30)
    one.add(Request("long", [1] * 100, SamplingParams(max_tokens=30, ignore_eos=True)))
    for _ in range(8):
        one.step()
    one.add(Request("short", [2] * 5, SamplingParams(max_tokens=20, ignore_eos=True)))
    steps = []
    while one.scheduler.find("short"):
        steps.append(one.step().streamed_pages > 0)
    assert len(steps) <= 24 and sum(steps) <= 3
    one.drain()


def test_steps_with_streamed_pages_are_timed_for_their_pause_only(tiny, monkeypatch):
    """Their time is not that of a prefill."""
    streamed, prefilled = [], []
    monkeypatch.setattr(StreamPacer, "observe", lambda self, seconds: streamed.append(seconds))
    monkeypatch.setattr(PreemptionCosts, "observe", lambda self, *step: prefilled.append(step[0]))
    with tiny.engine(**SMALL, host_pages=30) as one:
        add(one, LONG[:1])
        tiny.drain(one)
        assert len(streamed) > 25 and min(streamed) > 0
        assert 40 <= sum(prefilled) <= 52, "the prompt as far as it fits into the pool"


def ask(name, prompt, tokens, first=1):
    """A request of the hash model that runs to its full length."""
    prompt = [(first + i) % 13 for i in range(prompt)]
    return Request(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))


def test_a_long_request_leaves_pages_to_running_ones(engine):
    one = engine(num_pages=21, offload_pages=60, budget=70)
    for name in "ab":
        one.add(ask(name, 5, 30))
    one.step()
    long = one.add(ask("long", 120, 5, first=3))
    one.step()
    assert long.samples[0].sequence.length >= 12 * 4
    assert one.cache.pool.num_free >= 2
    one.drain()


def test_requests_are_admitted_while_decodes_take_pages_of_a_long_one(engine, assert_same):
    """Pages of one token: each decode takes one in each step."""
    one = engine(num_pages=41, page_size=1, offload_pages=200, budget=64)
    first = one.add(ask("first", 4, 20))
    one.step()
    long = one.add(ask("long", 60, 30, first=3))
    one.step()
    second = one.add(ask("second", 4, 12, first=5))
    for _ in range(3):
        one.step()
    assert {r.status for r in (first, second, long)} == {Status.RUNNING}
    one.drain()
    for request in (first, second, long):
        assert_same(request)
        assert not request.metrics.num_preemptions


def test_prompts_leave_budget_to_a_long_request(engine):
    one = engine(num_pages=31, offload_pages=60, budget=8)
    long = one.add(ask("long", 130, 5))
    one.step()
    one.add(ask("prompt", 90, 3, first=3))
    for _ in range(6):
        one.step()
    assert long.samples[0].sequence.computed == 4 * 8, "every second step"
    one.drain()


def test_a_swapped_long_request_waits_for_its_pause(engine):
    one = engine(num_pages=9, offload_pages=40, host_pages=9, page_s=0.01, budget=30)
    long = one.add(ask("long", 100, 30))
    for _ in range(8):
        one.step()
    one.add(ask("short", 5, 20, first=3))
    one.step()
    one.scheduler.preempt(long)
    assert long.status is Status.SWAPPED
    assert not sum(one.step().streamed_pages for _ in range(6))
    assert long.status is Status.RUNNING
    one.drain()


def test_ordinary_requests_are_preempted_before_long_ones(engine, assert_same):
    one = engine(num_pages=13, offload_pages=60, budget=40)
    requests = [one.add(ask("a", 5, 30)), one.add(ask("b", 5, 30, first=2))]
    requests.append(one.add(ask("long", 60, 30, first=3)))
    one.drain()
    for request in requests:
        assert_same(request)
    assert [r.metrics.num_preemptions for r in requests[::2]] == [0, 0]
    assert requests[1].metrics.num_preemptions


def test_a_long_request_with_a_cached_prefix_is_admitted(engine, assert_same):
    """The prefix takes nearly all free pages, but they can be offloaded at once."""
    one = engine(num_pages=13, offload_pages=60, budget=64)
    one.add(ask("prefix", 40, 2))
    one.drain()
    other, long = one.add(ask("other", 3, 20, first=5)), ask("long", 80, 5)
    one.step()
    one.add(long)
    one.step()
    assert long.status is Status.RUNNING and long.num_cached_tokens >= 40
    one.drain()
    assert_same(other)
    assert_same(long)
