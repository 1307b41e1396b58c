"""With drafts an engine gives the outputs of the same engine without them: token for token, for
every sampling parameter, and in distribution.
"""

import random
from collections import Counter

import pytest
import torch

from onchip.engine import SampledToken, SamplingParams
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.verify import accept
from onchip.models import ModelConfig, random_model

NGRAM = SpeculativeConfig(4, prompt_lookup_max=3, prompt_lookup_min=1)


class Replay:
    """Proposes the known continuations of requests, some tokens wrong."""

    def __init__(self, outputs, right=0.9):
        self.outputs, self.right, self.draw = outputs, right, random.Random(1)

    def propose(self, wanted):
        return [self.replay(*one) for one in wanted]

    def replay(self, sample, limit):
        choices = self.outputs[sample.request.request_id].outputs
        if sample.index >= len(choices):  # best_of: the others are not known
            return [1] * limit
        known = len(sample.token_ids)
        tokens = [*choices[sample.index].token_ids[known : known + limit], *[2] * limit][:limit]
        return [t if self.draw.random() < self.right else 65 for t in tokens]


@pytest.fixture(scope="module")
def plain(tiny):
    """Outputs without drafts."""
    with tiny.engine(prefix_caching=False, budget=500, num_pages=900) as one:
        tiny.ask(one)
        return tiny.drain(one)[0]


def run(tiny, proposer=None, config=NGRAM, **options):
    with tiny.engine(speculative_config=config, **options) as one:
        if proposer:
            one._speculator._proposer = proposer
        tiny.ask(one)
        return tiny.drain(one)[0], one.stats()


def assert_equal(tiny, outputs, expected):
    assert tiny.visible(outputs) == tiny.visible(expected)
    for name, output in outputs.items():
        pairs = zip(output.outputs, expected[name].outputs, strict=True)
        assert all(abs(a.cumulative_logprob - b.cumulative_logprob) < 1e-3 for a, b in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"budget": 21, "num_pages": 40, "host_pages": 60},
        {"budget": 12, "num_pages": 36, "prefix_caching": False},
    ],
)
def test_outputs_equal_those_without_drafts(tiny, plain, options):
    """Greedy, sampled, penalties, logprobs, stop strings, several samples, beams; with preemption
    by swap and by recomputation.
    """
    outputs, stats = run(tiny, Replay(plain), **options)
    assert_equal(tiny, outputs, plain)
    drafts = stats.speculation
    assert drafts.num_accepted_tokens > 20 and drafts.mean_acceptance_length > 1.5
    counts = drafts.num_accepted_tokens_per_pos
    assert sum(counts) == drafts.num_accepted_tokens and counts[0] >= counts[-1]
    assert "num_pages" not in options or stats.preempted_by_swap + stats.preempted_by_recompute


def test_generated_tokens_are_counted_without_rejected_drafts(tiny):
    params = SamplingParams(temperature=0, max_tokens=23, ignore_eos=True)
    counts = []
    for config in (None, NGRAM):
        with tiny.engine(speculative_config=config) as one:
            tiny.ask(one, ["ab" * 9, "x"], [params])
            tiny.drain(one)
            counts.append((one.stats().tokens_generated, one.stats().tokens_prefilled))
    assert counts[0] == counts[1] == (46, 17)


def test_prompt_lookup_gives_the_outputs_without_drafts(tiny, plain):
    outputs, stats = run(tiny)
    assert_equal(tiny, outputs, plain)
    assert stats.speculation.num_drafts


@torch.no_grad()
def test_logits_of_a_chunk_equal_those_of_single_steps(tiny):
    """What greedy equality rests on: to rounding in fp32 and fp64."""
    from onchip.kvcache import KVCache
    from onchip.models import positions_of

    for dtype, most in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        model = random_model(ModelConfig.from_hf(tiny.CONFIG)).to(dtype)
        tokens, rows = list(b"eleven byte"), {}
        for sizes in ([6, 1, 1, 1, 1, 1], [6, 5]):
            cache, logits = KVCache(model.cache_spec(4), 20, max_seqs=1), []
            sequence, start = cache.open(), 0
            for size in sizes:
                ids = tokens[start : start + size]
                cache.append(sequence, ids)
                batch = cache.view([sequence])
                hidden = model(torch.tensor(ids), positions_of(batch), batch, cache)
                logits.append(model.logits(hidden))
                cache.commit(sequence)
                start += size
            rows[len(sizes)] = torch.cat(logits)
        assert (rows[6] - rows[2]).abs().max() < most


def test_a_stop_string_inside_accepted_drafts_drops_the_tokens_after_it(tiny):
    """Streamed or not: text, tokens and logprob end with the token that completes the string."""
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with tiny.engine() as one:
        (request,) = tiny.ask(one, ["Zo"], [greedy])
        free = tiny.drain(one)[0]
    text = free[request.request_id].outputs[0].text
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, stop=[text[4:6]], logprobs=1
    )
    results = []
    for config in (None, SpeculativeConfig(6)):
        with tiny.engine(speculative_config=config) as one:
            if config:
                one._speculator._proposer = Replay(free, right=1)
            (request,) = tiny.ask(one, ["Zo"], [params])
            outputs, shown = tiny.drain(one)
            results.append(outputs[request.request_id].outputs[0])
            assert all(text.startswith(o.outputs[0].text) for o in shown)
    plain, drafted = results
    assert len(plain.token_ids) == 6  # of the 8 that the first chunk with drafts would make
    assert drafted.token_ids == plain.token_ids and drafted.text == plain.text
    assert len(drafted.logprobs) == len(plain.logprobs) == len(plain.token_ids)
    assert abs(drafted.cumulative_logprob - plain.cumulative_logprob) < 1e-4
    assert drafted.stop_reason == plain.stop_reason == text[4:6]


def test_sampled_tokens_have_the_distribution_without_drafts(tiny):
    """Chi-square of the first three tokens, with other seeds. Seeds that agree would make it
    trivial: the tokens would be equal.
    """

    class Likely:
        """A wrong and a likely token in turns."""

        def propose(self, wanted):
            return [[self.guess(sample)] * limit for sample, limit in wanted]

        def guess(self, sample):
            return seen[len(sample.token_ids)].most_common(2)[sample.request.rng_seed % 2][0]

    def draw(config, seeds):
        counts = [Counter() for _ in range(4)]
        with tiny.engine(speculative_config=config, num_pages=900, budget=99) as one:
            if config:
                one._speculator._proposer = Likely()
            params = [
                SamplingParams(seed=s, max_tokens=4, top_k=3, temperature=1.3, ignore_eos=True)
                for s in seeds
            ]
            tiny.ask(one, ["the same"], params)
            for output in tiny.drain(one)[0].values():
                for place, token in enumerate(output.outputs[0].token_ids):
                    counts[place][token] += 1
            return counts, one.stats().speculation

    seen, _ = draw(None, range(240))
    drafted, stats = draw(SpeculativeConfig(2), range(1000, 1240))
    assert stats.num_accepted_tokens > 50
    for plain, other in zip(seen, drafted, strict=True):
        tiny.assert_same_distribution(plain, other)


def test_accepted_drafts_end_at_the_first_that_differs():
    tokens = [SampledToken(t) for t in (5, 6, 7)]
    assert accept((), tokens[:1]) == []
    assert accept((5, 6), tokens) == [0, 1]
    assert accept((5, 9), tokens) == [0]
    assert accept((9, 6), tokens) == []


def test_accepted_drafts_are_the_path_of_the_sampled_tokens():
    """Drafts 4 and 5 follow the known token, 6 and 7 follow 4, 7 and 8 follow 5."""
    drafts, parents = (4, 5, 6, 7, 7, 8), (-1, -1, 0, 0, 1, 1)
    rows = lambda *tokens: [SampledToken(t) for t in tokens]
    assert accept(drafts, rows(5, 0, 8, 0, 0, 0, 1), parents) == [1, 5]
    assert accept(drafts, rows(5, 7, 7, 0, 0, 0, 0), parents) == [1, 4]
    assert accept(drafts, rows(4, 7, 0, 0, 0, 0, 0), parents) == [0, 3]
    assert accept(drafts, rows(4, 8, 8, 0, 0, 0, 0), parents) == [0]
    assert accept(drafts, rows(6, 6, 8, 0, 0, 0, 0), parents) == []
    assert accept((4, 4, 5), rows(4, 9, 5, 0), (-1, -1, 1)) == [0]  # equal siblings: the first
