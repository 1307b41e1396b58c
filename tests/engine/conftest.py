"""A hash as a model: its next token depends on every number that it reads from the cache."""

import importlib.util
import random
from contextlib import nullcontext
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onchip.engine import Limits, PreemptionCosts, RejectedRequest, SampledToken, Scheduler
from onchip.engine.cuda_graphs import fill_in_sampled
from onchip.engine.speculation.draft import DraftModelProposer
from onchip.kvcache import HostTier, KVCache, Spec

VOCAB = 13


def digest(*parts):
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


@lru_cache(1 << 16)  # the engine, each draft and the expected output ask for the same
def link(salt, before, token):
    """The number written for a token. It depends on the number before it, so on all earlier tokens.
    Integers of 24 bits are exact in fp32.
    """
    return float(digest(salt, before, token) % 2**24)


@lru_cache(1 << 14)
def rank_tokens(numbers, sample_key):
    """All tokens with logprobs, best first, from all numbers of a sequence."""
    draw = random.Random(digest(numbers, sample_key))
    logprobs = sorted(-0.01 - draw.random() for _ in range(VOCAB))
    return tuple(zip(draw.sample(range(VOCAB), VOCAB), reversed(logprobs), strict=True))


def next_token(numbers, request, index):
    """All beams see the same candidates; samples of one request differ."""
    key = None if request.beams else (request.rng_seed, index)
    ranked = rank_tokens(tuple(numbers), key)
    top = ranked if request.beams else ()
    return SampledToken(*ranked[0], 1, top)


def numbers_of(request, tokens):
    """The numbers of a sequence of these tokens, by definition."""
    numbers = []
    for token in tokens:
        numbers.append(link(request.salt, numbers[-1] if numbers else None, token))
    return numbers


def alone(request):
    """(token_ids, finish_reason) of each output, without cache, batch and scheduler."""
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
    """Beam search to the very end, without early stopping."""
    width, penalty = request.beams.beam_width, request.beams.length_penalty
    eos = set() if request.beams.ignore_eos else request.eos_token_ids
    alive, ended = [((), 0.0)], []
    for _ in range(request.max_tokens):
        branches = []
        for tokens, total in alive:
            numbers = numbers_of(request, [*request.prompt_token_ids, *tokens])
            ranked = rank_tokens(tuple(numbers), None)[: 2 * width]
            branches += [((*tokens, token), total + p) for token, p in ranked]
        branches.sort(key=lambda b: -b[1])
        ended += [b for b in branches[: 2 * width] if b[0][-1] in eos]
        alive = [b for b in branches if b[0][-1] not in eos][:width]
    ended = [(*b, "stop") for b in ended] + [(*b, "length") for b in alive]
    ended.sort(key=lambda b: -b[1] / len(b[0]) ** penalty)
    return [(tokens, reason) for tokens, _, reason in ended[:width]]


class HashEngine:
    """A scheduler on a real cache with tiny pages, stepped by the test; `delay` delays copies.
    ahead: each step is scheduled before the tokens of the last one are known. page_s: time of a
    page that streams from host memory.
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
        speculator=None,
        offload_pages=0,
        page_s=0.0,
        **limits,
    ):
        spec = Spec(1, 1, 1, 1, page_size, torch.float32, device)
        limits = Limits(
            **{"max_model_len": 200, "aging_s": 1.0} | limits,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
        )
        self.cache = KVCache(
            spec,
            num_pages,
            max_seqs=max_num_seqs,
            prefix_reuse=prefix_reuse,
            offload_pages=offload_pages,
        )
        self.cache.pages.k.fill_(float("nan"))
        self.tier = HostTier(self.cache, host_pages, chunk_pages=1) if host_pages else None
        self.late = late
        if late:
            self.delay(self.tier)
        costs = PreemptionCosts(spec.page_bytes, link_bytes_per_s) if host_pages else None
        self.now = 0.0
        self.scheduler = Scheduler(
            self.cache,
            limits,
            tier=self.tier,
            costs=costs,
            speculator=speculator,
            clock=lambda: self.now,
        )
        self.ahead, self.in_flight, self.page_s = ahead, None, page_s
        self.steps = 0
        self.finished = []

    def add(self, request):
        answer = self.scheduler.add(request)
        assert not isinstance(answer, RejectedRequest), answer
        self.now += 0.001
        return request

    def compute(self, step):
        """Write the numbers of the step's tokens, and read back every sequence."""
        batch = self.cache.view(step.sequences)
        pages, size = self.cache.layer(0)[0].view(-1), self.cache.spec.page_size
        table = batch.page_table.cpu()
        assert batch.cu_seqlens_q.diff().tolist() == [chunk.num_tokens for chunk in step.chunks]
        prefixes = {prefix.start: prefix for prefix in batch.host_prefixes}
        slots, rows, first_row = batch.slot_mapping.tolist(), [], 0
        assert len(set(slots)) == len(slots), "two tokens share a slot"
        for row, chunk in enumerate(step.chunks):
            on_host = self.read_host(prefixes.get(first_row))
            first_row += chunk.num_tokens
            places = torch.arange(chunk.stop - len(on_host))
            assert batch.cache_seqlens[row] == len(places)
            at = table[row, places // size].long() * size + places % size
            numbers = on_host + pages[at.to(pages.device)].tolist()
            request = chunk.sample.request
            tokens = [*chunk.sample.tokens(chunk.start, chunk.stop), *chunk.drafts]
            if chunk.sample.pending:
                draws = [sample for _, sample in self.in_flight[0].rows_to_sample]
                tokens.append(self.in_flight[1][draws.index(chunk.sample)].token)
            before, paths = numbers[: chunk.start], []
            for token, parent in zip(tokens, chunk.token_parents, strict=True):
                path = before if parent < 0 else paths[parent]
                paths.append([*path, link(request.salt, path[-1] if path else None, token)])
            numbers[chunk.start :] = [path[-1] for path in paths]
            new, slots = slots[: chunk.num_tokens], slots[chunk.num_tokens :]
            assert new == at[chunk.start - len(on_host) :].tolist()
            pages[at.to(pages.device)] = torch.tensor(numbers[len(on_host) :], device=pages.device)
            ends = paths[len(paths) - len(chunk.drafts) - 1 :]
            rows += [(path, s) for s in chunk.sampled_by for path in ends]
        return self.sample_rows(rows)

    def read_host(self, prefix):
        """The numbers of a sequence that are in host memory."""
        if prefix is None:
            return []
        numbers = self.cache.offloaded.layer(0, prefix.held, prefix.num_tokens)[0].flatten()
        assert len(numbers) == prefix.num_tokens
        return numbers.tolist()

    def sample_rows(self, rows):
        """The next token of each (numbers, sample)."""
        return [next_token(numbers, s.request, s.index) for numbers, s in rows]

    def step(self, between=None):
        """Run one step and check that it keeps the budget and is not empty while there is work."""
        self.now += 0.01
        scheduler = self.scheduler
        step = scheduler.schedule()
        assert step.num_tokens <= scheduler.limits.max_num_batched_tokens
        assert step.num_tokens or self.in_flight or not scheduler.has_work
        tokens = self.compute(step)
        if between:
            between(step)
        if self.ahead:
            self.launch_ahead(step, tokens)
        else:
            self.stream(step)
            self.finished += scheduler.update(step, tokens)
        self.steps += 1
        self.check()
        return step

    def launch_ahead(self, step, tokens):
        """The tokens of the last step are applied only now."""
        self.scheduler.mark_launched(step)
        self.check()
        before, self.in_flight = self.in_flight, (step, tokens)
        if before:
            self.stream(before[0])
            self.finished += self.scheduler.apply_tokens(*before)
        if self.scheduler.must_collect or not step.chunks:
            self.collect()

    def collect(self):
        if self.in_flight:
            self.stream(self.in_flight[0])
            self.finished += self.scheduler.apply_tokens(*self.in_flight)
            self.in_flight = None

    def stream(self, step):
        """Let the time pass that the pages of a step take."""
        if step.streamed_pages:
            self.now += step.streamed_pages * self.page_s
            self.scheduler.pacer.observe(step.streamed_pages * self.page_s)

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
        """No page is in use, on the device or on the host."""
        if self.tier:
            self.tier.synchronize()
            assert not self.tier.groups and self.tier.num_free == self.tier.capacity
        assert not self.cache.offloaded or not self.cache.offloaded.num_reserved
        pool = self.cache.pool
        assert not pool.tables and pool.num_free == pool.capacity
        assert len(self.cache.host_table.free_rows) == self.cache.max_seqs


@pytest.fixture(scope="session")
def tiny():
    """The module tiny.py in this folder."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(late):
    class Delaying(HashEngine):
        delay = staticmethod(late)

    return Delaying


class HashDraft(DraftModelProposer):
    """A draft model with a real cache of pages. It reads back every number of a sequence, and
    proposes the token of the hash model with probability `share`, otherwise another one.
    """

    def __init__(self, share, seed, shape, num_pages=60, page_size=2):
        spec = Spec(1, 1, 1, 1, page_size, torch.float32, "cpu")
        model = SimpleNamespace(logits=lambda hidden, wide: hidden)
        super().__init__(model, KVCache(spec, num_pages, max_seqs=9), 27, shape)
        self.share, self.random = share, random.Random(seed)

    def propose(self, wanted):
        drafts = super().propose(wanted)
        self.cache.check()
        return drafts

    def _limit_threads(self, drafting):
        return nullcontext()

    def _forward(self, sequences, ids, num_rows, parents=None):
        """Logits instead of hidden states."""
        new = iter(fill_in_sampled(torch.tensor(ids), self._last_tokens).tolist())
        batch, pages = self.cache.view(sequences), self.cache.layer(0)[0].view(-1)
        assert len(ids) == len(set(batch.slot_mapping.tolist()))
        drafts, logits = {d.sequence: d for d in self._sequences.values()}, []
        for row, sequence in enumerate(sequences):
            draft, size, done = drafts[sequence], self.cache.spec.page_size, sequence.computed
            places = torch.arange(sequence.length)
            at = batch.page_table[row, places // size].long() * size + places % size
            before = numbers_of(draft.owner.request, self.computed_tokens(draft))
            assert pages[at[:done]].tolist() == before, "a page of the draft model is stale"
            trees, paths = parents[row] if parents else range(-1, len(places) - done - 1), []
            for token, parent in zip(islice(new, len(trees)), trees, strict=True):
                path = before if parent < 0 else paths[parent]
                salt = draft.owner.request.salt
                paths.append([*path, link(salt, path[-1] if path else None, token)])
            pages[at[done:]] = torch.tensor([path[-1] for path in paths])
            logits += [self.guess(path, draft.owner) for path in paths[-num_rows[row] :]]
        return torch.stack(logits)

    def computed_tokens(self, draft):
        """The known tokens, and the drafts that are computed for good."""
        inner = [
            draft.places[i]
            for nodes in draft.shape.levels[1:]
            for i in nodes[:1]
            if i < len(draft.places)
        ]
        known = draft.owner.tokens(0, draft.num_known)
        return [*known, *self._last_tokens[inner].tolist()][: draft.sequence.computed]

    def guess(self, numbers, owner):
        """Logits whose largest one is that of a guess."""
        logits = torch.tensor([-1000 - self.random.random() * 99 for _ in range(VOCAB)])
        right = next_token(numbers, owner.request, owner.index).token
        is_right = self.random.random() < self.share
        logits[right if is_right else self.random.randrange(VOCAB)] = 0.0
        return logits


@pytest.fixture(name="alone")
def _alone():
    return alone


def same(request):
    """The outputs equal those of the request alone."""
    assert [(o.token_ids, o.finish_reason) for o in request.outputs()] == alone(request)


@pytest.fixture
def assert_same():
    return same
