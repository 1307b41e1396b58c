"""Random sequences of events: however requests are batched, chunked, preempted, swapped, forked or
cancelled, with and without drafts, each gives the outputs it gives alone, every step computes
something, and no page leaks.
"""

import random

import pytest

from onchip.engine import BeamSearchParams, RejectedRequest, Request, SamplingParams, Status
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.ngram import NgramProposer
from onchip.engine.speculation.speculator import Speculator
from onchip.engine.speculation.tree import DraftTree
from tests.engine.conftest import HashDraft
from tests.grids import mark_all_after

CONFIG = SpeculativeConfig(5, prompt_lookup_max=3, prompt_lookup_min=1)
SIDE_LEAVES = "[(0,), (1,), (0, 0), (0, 1), (0, 2), (0, 0, 0)]"
BRANCHES = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)]"
PREFIXES = [[1] * 9, [1] * 9 + [2] * 8, list(range(3, 20))]


class Coin:
    """Costs that choose at random."""

    def __init__(self, draw):
        self.draw = draw

    def prefers_swap(self, num_pages, num_tokens):
        return self.draw.random() < 0.6


class Guesses:
    """Drafts that are right with a given probability, each independently."""

    def __init__(self, draw, alone, share):
        self.draw, self.alone, self.share = draw, alone, share
        self.expected = {}

    def propose(self, wanted):
        return [self.guess(*one) for one in wanted]

    def guess(self, sample, limit):
        draw, name = self.draw, sample.request.request_id
        if name not in self.expected:
            self.expected[name] = self.alone(sample.request)
        tokens, known = self.expected[name][sample.index][0], len(sample.token_ids)
        right = [*tokens[known : known + limit], *[0] * limit][: draw.randrange(limit + 1)]
        return [t if draw.random() < self.share else draw.randrange(13) for t in right]


class TreeGuesses(Guesses):
    """Trees of random form. A draft after right ones is right with a given probability."""

    def guess(self, sample, limit):
        draw, name = self.draw, sample.request.request_id
        super().guess(sample, 1)  # computes what is expected
        expected = self.expected[name][sample.index][0][len(sample.token_ids) :]
        paths, parents = [], []
        for i in range(draw.randrange(limit + 1)):
            parents.append(draw.randrange(-1, i))
            before = paths[parents[i]] if parents[i] >= 0 else []
            right = [*expected[: len(before) + 1]]
            is_right = right[:-1] == before and draw.random() < self.share
            paths.append(right if is_right else [*before, draw.randrange(13)])
        return DraftTree(tuple([path[-1] for path in paths]), tuple(parents))


class Blast:
    """An engine, and all events that can happen to it."""

    def __init__(self, engine, alone, seed, drafts=None, config=CONFIG, **options):
        self.random = random.Random(seed)
        if drafts:
            proposer = drafts(self.random, alone, config)
            options["speculator"] = Speculator(config, proposer)
        self.engine = engine(**options)
        self.scheduler = self.engine.scheduler
        if self.engine.tier and "link_bytes_per_s" not in options:
            self.scheduler._kv.costs = Coin(self.random)
        self.alone = alone
        self.requests = []
        self.number = 0
        self.seen = dict.fromkeys(
            ("swapped", "recomputed", "returned", "hit", "beams", "forks", "refused", "ended"), 0
        )
        self.seen |= {"long": 0, "offloaded": 0}

    def prompt(self):
        draw = self.random
        if self.engine.cache.offloaded and draw.random() < 0.1:
            return [draw.randrange(2) for _ in range(draw.randrange(40, 130))]  # up to 4 pools
        head = draw.choice(PREFIXES)
        tail = [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
        return head[: draw.randrange(len(head) + 1)] + tail

    def params(self):
        draw = self.random
        tokens = draw.randrange(1, 14)
        if draw.random() < 0.15:
            return BeamSearchParams(draw.randrange(1, 4), tokens, draw.random() < 0.3)
        return SamplingParams(
            n=draw.choice((1, 1, 1, 2, 3)),
            max_tokens=tokens,
            min_tokens=draw.randrange(tokens + 1),
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=draw.choice(((), (5, 6))),
        )

    def arrive(self):
        draw = self.random
        self.number += 1
        request = Request(
            f"r{self.number}",
            self.prompt(),
            self.params(),
            priority=draw.choice((0, 0, 0, -1, 2)),
            deadline_s=self.engine.now + draw.random() if draw.random() < 0.15 else None,
            salt=draw.choice(("blue", "gold")),
            eos_token_ids=(7, 8),
            rng_seed=draw.randrange(5),
        )
        if isinstance(self.scheduler.add(request), RejectedRequest):
            self.seen["refused"] += 1
        else:
            self.requests.append(request)

    def abort(self, _=None):
        if self.requests and self.random.random() < 0.02:
            victim = self.random.choice(self.requests)
            done = victim.finished
            assert self.scheduler.abort(victim.request_id) is not done

    def stop(self):
        """Stop a sample as a stop string does; only the tokens before it are compared."""
        if self.requests and self.random.random() < 0.02:
            request = self.random.choice(self.requests)
            if not request.beams and not request.finished:
                self.scheduler.stop(self.random.choice(request.samples), "text")

    def preempt(self):
        if self.scheduler.running and self.random.random() < 0.15:
            self.scheduler.preempt(self.random.choice(self.scheduler.running))

    def step(self):
        for _ in range(self.random.choice((0, 0, 1, 1, 2))):
            self.arrive()
        self.abort()
        self.stop()
        self.preempt()
        if self.engine.late and self.random.random() < 0.3:
            self.engine.tier._mover.run()
        self.engine.check()
        step = self.engine.step(between=self.abort)
        self.seen["swapped"] += len(step.swapped_out)
        self.seen["recomputed"] += len(step.recomputed)
        self.seen["returned"] += len(step.swapped_in)
        self.seen["ended"] += len(step.ended)
        self.seen["offloaded"] += step.streamed_pages > 0
        self.judge()

    def judge(self):
        for request in [r for r in self.requests if r.finished]:
            self.requests.remove(request)
            assert all(s.sequence is None and s.finished for s in request.samples)
            self.seen["hit"] += request.num_cached_tokens > 0
            self.seen["beams"] += bool(request.beams)
            self.seen["long"] += request.is_long and request.status.finish_reason != "abort"
            self.seen["forks"] += len(request.samples) > 1 and not request.beams
            self.compare(request)

    def compare(self, request):
        """Compare all of a request that finished, and the existing part of one that was cut off."""
        expected = self.alone(request)
        cut = request.status in (Status.FINISHED_ABORTED, Status.FINISHED_EXPIRED)
        if request.beams:
            got = [(s.token_ids, s.end.finish_reason) for s in request.samples]
            assert cut or [(tuple(t), reason) for t, reason in got] == expected
            return
        for sample, (tokens, reason) in zip(request.samples, expected, strict=True):
            early = sample.stop_reason == "text" or sample.end.finish_reason == "abort"
            assert early or sample.end.finish_reason == reason
            assert tuple(sample.token_ids) == (tokens[: len(sample.token_ids)] if early else tokens)


def guesses(share):
    return lambda draw, alone, config: Guesses(draw, alone, share)


def tree_guesses(share):
    return lambda draw, alone, config: TreeGuesses(draw, alone, share)


def tree(paths):
    options = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return SpeculativeConfig.parse({"speculative_token_tree": paths} | options)


def look_up(draw, alone, config):
    return NgramProposer(config)


def draft_model(share):
    return lambda draw, alone, config: HashDraft(share, draw.random(), config.shape)


SHAPES = {
    "tight": dict(num_pages=24, page_size=4, max_num_seqs=8, budget=11, host_pages=12),
    "single_tokens": dict(num_pages=90, page_size=1, max_num_seqs=5, budget=5, host_pages=60),
    "late_copies": dict(
        num_pages=24, page_size=4, max_num_seqs=8, budget=19, host_pages=60, late=True
    ),
    "no_host": dict(num_pages=16, page_size=4, max_num_seqs=6, budget=40),
    "no_prefixes": dict(
        num_pages=24, page_size=4, max_num_seqs=9, budget=17, host_pages=40, prefix_reuse=False
    ),
    "ahead": dict(num_pages=24, page_size=4, max_num_seqs=8, budget=15, host_pages=30, ahead=True),
    "ahead_late": dict(
        num_pages=40, page_size=2, max_num_seqs=8, budget=9, host_pages=90, late=True, ahead=True
    ),
    "ahead_no_host": dict(num_pages=16, page_size=4, max_num_seqs=6, budget=40, ahead=True),
    "drafts": dict(
        num_pages=24, page_size=4, max_num_seqs=5, budget=11, host_pages=12, drafts=guesses(0.8)
    ),
    "drafts_ahead": dict(
        num_pages=24, page_size=4, max_num_seqs=8, budget=30, ahead=True, drafts=guesses(0.5)
    ),
    "drafts_late": dict(
        num_pages=60,
        page_size=1,
        max_num_seqs=4,
        budget=25,
        host_pages=60,
        late=True,
        drafts=guesses(0.7),
    ),
    "ngram": dict(
        num_pages=24, page_size=4, max_num_seqs=5, budget=19, host_pages=12, drafts=look_up
    ),
    "draft_model": dict(
        num_pages=24, page_size=4, max_num_seqs=4, budget=9, host_pages=12, drafts=draft_model(0.7)
    ),
    "trees": dict(
        num_pages=30,
        page_size=4,
        max_num_seqs=5,
        budget=25,
        host_pages=12,
        drafts=tree_guesses(0.8),
    ),
    "trees_late": dict(
        num_pages=60,
        page_size=1,
        max_num_seqs=4,
        budget=33,
        host_pages=60,
        late=True,
        ahead=True,
        drafts=tree_guesses(0.6),
    ),
    "ngram_trees": dict(
        num_pages=24, page_size=4, max_num_seqs=5, budget=29, host_pages=12, drafts=look_up
    )
    | {"config": tree(BRANCHES)},
    "draft_model_leaves": dict(
        num_pages=24, page_size=4, max_num_seqs=4, budget=19, host_pages=12, drafts=draft_model(0.6)
    )
    | {"config": tree(SIDE_LEAVES)},
    "draft_model_trees": dict(
        num_pages=24, page_size=4, max_num_seqs=4, budget=29, host_pages=12, drafts=draft_model(0.5)
    )
    | {"config": tree(BRANCHES)},
    "long_trees": dict(
        num_pages=17, page_size=2, max_num_seqs=4, budget=25, ahead=True, drafts=tree_guesses(0.7)
    )
    | {"offload_pages": 90},
    "long": dict(num_pages=9, page_size=4, max_num_seqs=6, budget=23, offload_pages=70),
    "long_swapped": dict(
        num_pages=10, page_size=4, max_num_seqs=5, budget=40, host_pages=30, offload_pages=50
    ),
    "long_late": dict(
        num_pages=36, page_size=1, max_num_seqs=5, budget=9, host_pages=60, late=True, ahead=True
    )
    | {"offload_pages": 300, "page_s": 4e-4},
    "long_drafts": dict(
        num_pages=17, page_size=2, max_num_seqs=4, budget=25, ahead=True, drafts=guesses(0.7)
    )
    | {"offload_pages": 90},
    "slow_link": dict(
        num_pages=20, page_size=8, max_num_seqs=7, budget=13, host_pages=9, link_bytes_per_s=9e5
    ),
}


def run(engine, alone, options, seed, steps):
    blast = Blast(engine, alone, seed, **options, max_queued_requests=12)
    for _ in range(steps):
        blast.step()
    blast.engine.drain()
    blast.judge()
    if drafts := blast.scheduler.speculation:
        assert drafts.failure is None
        blast.seen["accepted"] = drafts.num_accepted_tokens
        blast.seen["rejected"] = drafts.num_draft_tokens - drafts.num_accepted_tokens
    return blast.seen


@pytest.mark.parametrize("shape", SHAPES)
def test_any_sequence_of_events_gives_the_outputs_of_a_request_alone(engine, alone, shape):
    cases = run(engine, alone, SHAPES[shape], 1, 300)
    expected = {"recomputed", "beams", "forks", "refused", "ended"}
    expected |= {"hit"} if shape != "no_prefixes" else set()
    expected |= {"swapped", "returned"} if "host_pages" in SHAPES[shape] else set()
    expected |= {"accepted", "rejected"} if "drafts" in SHAPES[shape] else set()
    expected |= {"long", "offloaded"} if "offload_pages" in SHAPES[shape] else set()
    assert all(cases[what] for what in expected), cases


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["tight", "no_prefixes"])
def test_any_sequence_of_events_on_a_gpu(engine, alone, shape):
    """Swaps are real copies on separate streams."""
    options = SHAPES[shape] | {"device": "cuda"}
    assert run(engine, alone, options, 3, 150)["swapped"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_all_after(2, range(5)))
@pytest.mark.parametrize("shape", SHAPES)
def test_twenty_thousand_steps(engine, alone, shape, seed):
    """With two seeds 33,600 steps, 15,400 of them with drafts; with all, 84,000."""
    run(engine, alone, SHAPES[shape], 100 + seed, 700)
