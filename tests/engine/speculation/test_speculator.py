"""When samples get drafts: free tokens, failures, limits of a request."""

import math

import pytest

from onchip.engine import BeamSearchParams, Request, SamplingParams
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.speculator import SpeculationStats, Speculator


class Same:
    """Always proposes the same token; the hash model rarely agrees."""

    def __init__(self, count=99):
        self.count, self.asked = count, 0

    def propose(self, wanted):
        self.asked += len(wanted)
        return [[1] * min(limit, self.count) for _, limit in wanted]


def speculator(proposer=None, free=math.inf, **options):
    return Speculator(SpeculativeConfig(3, **options), proposer or Same(), lambda cached: free)


def request(name, max_tokens=60, **options):
    return Request(name, [2, 3, 4], SamplingParams(max_tokens=max_tokens, **options))


def sizes(one, steps=1):
    return [[chunk.num_tokens for chunk in one.step().chunks] for _ in range(steps)]


def test_drafts_come_after_the_prompt_and_keep_the_budget(engine, assert_same):
    one = engine(budget=9, speculator=speculator())
    first, second = one.add(request("a", 20)), one.add(request("b", 20, n=2))
    assert sizes(one) == [[3, 3]]  # prompts have no drafts
    assert sizes(one) == [[3, 3, 3]]  # 6 of the budget are left for 3 samples
    one.drain()
    assert_same(first)
    assert_same(second)


def test_a_step_has_no_more_tokens_than_are_free(engine):
    one = engine(budget=16, speculator=speculator(free=5))
    one.add(request("a"))
    one.add(request("b"))
    assert sizes(one, 2) == [[3, 3], [2, 2]]


@pytest.mark.parametrize("options", [{"free": 2}, {"disable_by_batch_size": 1}])
def test_a_large_batch_gets_no_drafts_and_overlaps(engine, options):
    proposer = Same()
    one = engine(budget=16, ahead=True, speculator=speculator(proposer, **options))
    one.add(request("a"))
    one.add(request("b"))
    for _ in range(6):
        step = one.step()
        assert not step.num_drafts and not step.speculates
    assert not proposer.asked


def test_failing_drafts_are_tried_less_often(engine):
    """Every step, every second one, every fourth ... every sixteenth."""
    proposer = Same()
    one = engine(num_pages=90, max_model_len=300, speculator=speculator(proposer))
    one.add(Request("a", [2], SamplingParams(max_tokens=200)))
    steps = [one.step().num_drafts for _ in range(100)]
    drafts = [i for i, count in enumerate(steps) if count]
    accepted = one.scheduler.speculation.num_accepted_tokens
    assert len(drafts) <= 5 + 100 / 16 + 5 * accepted
    assert proposer.asked == len(drafts)


def test_an_accepted_draft_restores_the_period():
    sample, one = request("a").samples[0], speculator()
    for expected in (2, 4, 8, 16, 16):
        one.observe(sample, 3, 0)
        assert sample.draft_period == expected
    one.observe(sample, 3, 2)
    assert sample.draft_period == 1
    assert one.stats() == SpeculationStats(6, 18, 2, (1, 1, 0))
    assert one.stats().mean_acceptance_length == 1 + 2 / 6
    assert one.stats().acceptance_rate == 2 / 18
    assert "2 of 18 drafts accepted" in str(one.stats())
    assert math.isnan(SpeculationStats().acceptance_rate)


def test_max_tokens_leaves_a_place_for_the_token_after_the_drafts(engine, assert_same):
    one = engine(speculator=speculator())
    short = one.add(request("a", max_tokens=3))
    assert sizes(one, 2) == [[3], [2]]
    one.drain()
    assert_same(short)


def test_beam_search_has_no_drafts(engine, assert_same):
    proposer = Same()
    one = engine(speculator=speculator(proposer))
    search = one.add(Request("a", [2, 3], BeamSearchParams(2, 6)))
    one.drain()
    assert_same(search)
    assert not proposer.asked


def test_drafts_preempt_nothing(engine, assert_same):
    """Four pages of 4: 3 + 3 tokens of prompt, and drafts only where pages are left."""
    one = engine(num_pages=5, page_size=4, max_num_seqs=2, speculator=speculator())
    requests = [one.add(request(name, max_tokens=5)) for name in "ab"]
    one.drain()
    assert not one.scheduler.totals["recomputed"]
    for each in requests:
        assert_same(each)


def test_cancelling_during_verification_frees_every_page(engine, assert_same):
    one = engine(speculator=speculator())
    gone, other = one.add(request("a")), one.add(request("b"))
    one.step()
    step = one.step(between=lambda _: one.scheduler.abort("a"))
    assert step.num_drafts == 6 and gone.finished
    assert len(one.cache.pool.tables) == 1
    one.drain()
    assert_same(other)


@pytest.mark.parametrize("host_pages", [0, 20])
def test_preemption_during_verification_drops_the_drafts(engine, assert_same, host_pages):
    """The scheduler's own API allows it between launch and collection."""
    one = engine(host_pages=host_pages, speculator=speculator())
    request_ = one.add(request("a", max_tokens=9))
    one.step()
    step = one.scheduler.schedule()
    tokens = one.compute(step)
    one.scheduler.mark_launched(step)
    assert step.num_drafts == 3 and one.scheduler.must_collect
    one.scheduler.preempt(request_)
    one.scheduler.apply_tokens(step, tokens)
    one.check()
    assert bool(request_.host_group) == bool(host_pages)
    one.drain()
    assert_same(request_)


def test_rejected_drafts_are_never_shared(engine, assert_same):
    """A prompt that is the first one's drafts finds only tokens that were accepted."""
    one = engine(page_size=1, num_pages=90, speculator=speculator())
    first = one.add(request("a", max_tokens=8))
    one.drain()
    second = one.add(Request("b", [2, 3, 4, first.samples[0].token_ids[0], 1, 1, 1, 1]))
    third = one.add(Request("c", [2, 3, 4, *first.samples[0].token_ids], SamplingParams()))
    one.drain()
    assert_same(second)
    assert_same(third)
    assert third.num_cached_tokens == 10
