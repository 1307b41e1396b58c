"""A model that is a hash: what it says next depends on every number it reads from the cache."""

import importlib.util
import random
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from onchip.engine import Costs, Drawn, Limits, Refused, Scheduler
from onchip.kvcache import HostTier, KVCache, Spec

VOCAB = 13


def digest(*parts):
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


def link(salt, before, token):
    """The number written for a token: it depends on the number before it, so on all before. Whole
    numbers of 24 bits are exact in fp32.
    """
    return float(digest(salt, before, token) % 2**24)


def rank_tokens(numbers, sample_key):
    """Every token with a logprob, best first, from all the numbers of a sequence."""
    draw = random.Random(digest(tuple(numbers), sample_key))
    logprobs = sorted(-0.01 - draw.random() for _ in range(VOCAB))
    return list(zip(draw.sample(range(VOCAB), VOCAB), reversed(logprobs), strict=True))


def next_token(numbers, request, index):
    """Beams see the same candidates whoever they are; samples of one request differ."""
    key = None if request.beams else (request.draw_seed, index)
    ranked = rank_tokens(numbers, key)
    top = tuple(ranked) if request.beams else ()
    return Drawn(*ranked[0], 1, top)


def numbers_of(request, tokens):
    """What a sequence of these tokens holds, by the definition."""
    numbers = []
    for token in tokens:
        numbers.append(link(request.salt, numbers[-1] if numbers else None, token))
    return numbers


def alone(request):
    """(token_ids, finish_reason) of each output, with no cache, no batch and no scheduler."""
    if request.beams:
        return search(request)
    return [continuation(request, i) for i in range(request.params.n)]


def continuation(request, index):
    params, tokens = request.params, []
    eos = set() if params.ignore_eos else request.eos_token_ids
    while True:
        tokens.append(
            next_token(numbers_of(request, [*request.prompt_token_ids, *tokens]), request, index)[0]
        )
        if len(tokens) >= params.min_tokens and tokens[-1] in eos | set(params.stop_token_ids):
            return tuple(tokens), "stop"
        if len(tokens) == request.max_tokens:
            return tuple(tokens), "length"


def search(request):
    """Beam search to the very end, with no early stop."""
    width, penalty = request.beams.beam_width, request.beams.length_penalty
    eos = set() if request.beams.ignore_eos else request.eos_token_ids
    alive, ended = [((), 0.0)], []
    for _ in range(request.max_tokens):
        branches = []
        for tokens, total in alive:
            numbers = numbers_of(request, [*request.prompt_token_ids, *tokens])
            ranked = rank_tokens(numbers, None)[: 2 * width]
            branches += [((*tokens, token), total + p) for token, p in ranked]
        branches.sort(key=lambda b: -b[1])
        ended += [b for b in branches[: 2 * width] if b[0][-1] in eos]
        alive = [b for b in branches if b[0][-1] not in eos][:width]
    ended = [(*b, "stop") for b in ended] + [(*b, "length") for b in alive]
    ended.sort(key=lambda b: -b[1] / len(b[0]) ** penalty)
    return [(tokens, reason) for tokens, _, reason in ended[:width]]


class Engine:
    """A scheduler on a real cache with tiny pages, stepped by hand; `delay` makes copies late.
    ahead: a step is scheduled before the tokens of the one before it are told.
    """

    delay = None

    def __init__(
        self,
        num_pages=30,
        page_size=4,
        max_num_seqs=8,
        budget=16,
        host_pages=0,
        link_bytes_per_s=1e30,
        prefix_reuse=True,
        late=False,
        ahead=False,
        device="cpu",
        **limits,
    ):
        spec = Spec(1, 1, 1, 1, page_size, torch.float32, device)
        limits = Limits(
            **{"max_model_len": 200, "aging_s": 1.0} | limits,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
        )
        self.cache = KVCache(spec, num_pages, max_seqs=max_num_seqs, prefix_reuse=prefix_reuse)
        self.cache.pages.k.fill_(float("nan"))
        self.tier = HostTier(self.cache, host_pages, chunk_pages=1) if host_pages else None
        self.late = late
        if late:
            self.delay(self.tier)
        costs = Costs(spec.page_bytes, link_bytes_per_s) if host_pages else None
        self.now = 0.0
        self.scheduler = Scheduler(
            self.cache, limits, tier=self.tier, costs=costs, clock=lambda: self.now
        )
        self.ahead, self.flying = ahead, None
        self.steps = 0
        self.finished = []

    def add(self, request):
        answer = self.scheduler.add(request)
        assert not isinstance(answer, Refused), answer
        self.now += 0.001
        return request

    def compute(self, step):
        """Write the numbers of the step's tokens, and read back all of each sequence."""
        batch = self.cache.view(step.sequences)
        pages, size = self.cache.layer(0)[0].view(-1), self.cache.spec.page_size
        table = batch.page_table.cpu()
        assert batch.cu_seqlens_q.diff().tolist() == [run.num_tokens for run in step.runs]
        assert batch.cache_seqlens.tolist() == [run.stop for run in step.runs]
        slots, asked = batch.slot_mapping.tolist(), []
        assert len(set(slots)) == len(slots), "two tokens share a slot"
        for row, run in enumerate(step.runs):
            places = torch.arange(run.stop)
            at = table[row, places // size].long() * size + places % size
            numbers = pages[at.to(pages.device)].tolist()
            request = run.sample.request
            tokens = run.sample.tokens(run.start, run.stop)
            if run.sample.pending:
                draws = [sample for _, sample in self.flying[0].draws]
                tokens.append(self.flying[1][draws.index(run.sample)].token)
            for i, token in zip(range(run.start, run.stop), tokens, strict=True):
                numbers[i] = link(request.salt, numbers[i - 1] if i else None, token)
            new, slots = slots[: run.num_tokens], slots[run.num_tokens :]
            assert new == at[run.start :].tolist()
            pages[at.to(pages.device)] = torch.tensor(numbers, device=pages.device)
            asked += [(numbers, s) for s in run.draws]
        return self.draw(asked)

    def draw(self, asked):
        """The next token of each (numbers, sample)."""
        return [next_token(numbers, s.request, s.index) for numbers, s in asked]

    def step(self, between=None):
        """One step, with the laws: within the budget, and never empty while there is work."""
        self.now += 0.01
        scheduler = self.scheduler
        step = scheduler.schedule()
        assert step.num_tokens <= scheduler.limits.max_num_batched_tokens
        assert step.num_tokens or self.flying or not scheduler.has_work
        drawn = self.compute(step)
        if between:
            between(step)
        if self.ahead:
            self.fly(step, drawn)
        else:
            self.finished += scheduler.update(step, drawn)
        self.steps += 1
        self.check()
        return step

    def fly(self, step, drawn):
        """What the step before it drew is told only now."""
        self.scheduler.advance(step)
        self.check()
        before, self.flying = self.flying, (step, drawn)
        if before:
            self.finished += self.scheduler.resolve(*before)
        if self.scheduler.must_resolve or not step.runs:
            self.land()

    def land(self):
        if self.flying:
            self.finished += self.scheduler.resolve(*self.flying)
            self.flying = None

    def drain(self, limit=3000):
        while self.scheduler.has_work:
            self.step()
            limit -= 1
            assert limit, "requests do not finish"
        self.check_empty()

    def check(self):
        self.scheduler.check()
        self.cache.check()

    def check_empty(self):
        """No page is held, and nothing is left on the host."""
        if self.tier:
            self.tier.synchronize()
            assert not self.tier.groups and self.tier.num_free == self.tier.capacity
        pool = self.cache.pool
        assert not pool.tables and pool.num_free == pool.capacity
        assert len(self.cache.host_table.free_rows) == self.cache.max_seqs


@pytest.fixture(scope="session")
def tiny():
    """The module tiny.py beside this one."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(late):
    class Delaying(Engine):
        delay = staticmethod(late)

    return Delaying


@pytest.fixture(name="alone")
def _alone():
    return alone


def same(request):
    """Its outputs are those of a run alone."""
    assert [(o.token_ids, o.finish_reason) for o in request.outputs()] == alone(request)


@pytest.fixture
def assert_same():
    return same
