"""Scheduler, cache and sampler together: sampled tokens depend on the seed alone."""

import pytest
import torch

from onchip.engine import BeamSearchParams, Request, SamplingParams
from onchip.engine.sampler import make_sampling_metadata, sample

VOCAB = 63
PARAMS = [
    SamplingParams(max_tokens=12, seed=5),
    SamplingParams(max_tokens=12, seed=5, n=3, top_p=0.8, presence_penalty=0.5),
    SamplingParams(max_tokens=9, seed=-1, top_k=7, temperature=1.6, min_tokens=9),
    SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.5, n=2),
    SamplingParams(max_tokens=10, seed=8, min_p=0.1, logprobs=2, n=2, best_of=3),
    BeamSearchParams(3, 8),
]


@pytest.fixture
def sampling(engine):
    """The engine with the real sampler, and logits that are a hash of the numbers in the cache."""

    class Sampling(engine):
        def sample_rows(self, rows):
            logits = torch.stack([self.logits(numbers) for numbers, _ in rows] or [torch.ones(0)])
            samples = [one for _, one in rows]
            return (
                sample(logits, make_sampling_metadata(samples, "cpu")).to_tokens(samples)
                if samples
                else []
            )

        def logits(self, numbers):
            seed = int(sum(numbers)) % 2**62
            return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2

    return Sampling


def requests():
    return [
        Request(f"r{i}{copy}", [1, 2, 3, 4, 5, i], params, eos_token_ids=(7,), vocab_size=VOCAB)
        for copy in range(3)
        for i, params in enumerate(PARAMS)
    ]


def outputs(request):
    return [
        (o.index, o.token_ids, o.finish_reason, o.cumulative_logprob, o.logprobs)
        for o in request.outputs()
    ]


def test_batched_alone_preempted_or_swapped_give_the_same_tokens(sampling):
    expected = []
    for request in requests():
        one = sampling(num_pages=99, prefix_reuse=False)
        one.add(request)
        one.drain()
        expected.append(outputs(request))
    for options in ({}, {"host_pages": 30}, {"budget": 9, "num_pages": 22, "page_size": 4}):
        together, one = requests(), sampling(**options)
        for request in together:
            one.add(request)
        for _ in range(4):
            one.step()
        for request in one.scheduler.running:
            one.scheduler.preempt(request)
        one.drain()
        assert one.scheduler.totals["recomputed"] + one.scheduler.totals["swapped_out"]
        assert [outputs(request) for request in together] == expected


def test_samples_of_one_seed_differ(sampling):
    """vllm #10980: n samples of a seeded request were the same."""
    one = sampling(num_pages=99)
    request = one.add(Request("r", [1, 2], SamplingParams(n=8, seed=3, max_tokens=12)))
    one.drain()
    assert len({o.token_ids for o in request.outputs()}) == 8
