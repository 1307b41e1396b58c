"""Sampling in Triton against the sampler in torch, token by token, and against fp64; by Triton's
interpreter on the CPU, and on a GPU if there is one.
"""

import pytest
import torch

from onchip.engine import Request, SamplingParams, sampler
from tests.interpreted import DEVICE, INTERPRETED, interpreted_or_gpu, mark_slow_except

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
VOCAB = 299
DTYPES = (BF16, FP32) if INTERPRETED else (BF16, FP16, FP32)
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, top_k=7),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.07),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=111, top_p=0.63, min_p=0.01),
    SamplingParams(top_k=10**9, top_p=0.999),
    SamplingParams(repetition_penalty=1.9, presence_penalty=0.7, frequency_penalty=-1.1),
    SamplingParams(logit_bias={0: 100, 298: -100, 7: 2.5}, top_p=0.8),
    SamplingParams(min_tokens=9, stop_token_ids=(9, 11), temperature=2.0, top_k=5),
    SamplingParams(temperature=0, logit_bias={5: 50}),
    SamplingParams(temperature=1e-20, top_p=0.5),
]


@pytest.fixture
def kernel(monkeypatch):
    """Spans of 128, so that a small vocabulary has several."""
    from onchip.kernels.llm import sampling

    monkeypatch.setattr(sampling, "TRITON_SCAN", sampling.TRITON_SCAN._replace(tile_n=128))
    monkeypatch.setattr(sampling, "TRITON_CUT", sampling.TRITON_CUT._replace(tile_n=128))
    return sampling


@pytest.fixture
def sample(kernel, monkeypatch):
    """sample(logits, rows, fused=True)"""

    def sample(logits, rows, fused=True):
        monkeypatch.setattr(sampler, "_find_kernel", lambda logits: kernel if fused else None)
        return sampler.sample(logits, rows)

    return sample


def members(params, count, seed=0):
    """Samples with the params in turn, each with its own random number."""
    samples = []
    for i in range(count):
        request = Request("r", (3, 5, 5), params[i % len(params)], rng_seed=seed + i)
        request.samples[0].token_ids.extend([7, 7, 40, 3][: i % 5])
        samples += request.samples[:1]
    return samples


def make_sampling_metadata(samples):
    return sampler.make_sampling_metadata(samples, DEVICE)


def randn(*shape, dtype=FP32):
    return torch.randn(*shape).to(DEVICE, dtype)


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", mark_slow_except((0,), DTYPES), ids=str)
def test_the_tokens_and_logprobs_of_the_sampler(sample, dtype):
    """All options in one batch. A token differs only if the last bit of a sum decides."""
    count = len(PARAMS) if INTERPRETED else 1024
    samples = members(PARAMS, count)
    logits = randn(count, VOCAB, dtype=dtype)
    logits[::3] *= 4
    ours, theirs = (
        sample(logits, make_sampling_metadata(samples), fused) for fused in (True, False)
    )
    assert ours.token.dtype == theirs.token.dtype
    assert (ours.token != theirs.token).sum() <= count // 500
    same = ours.token == theirs.token
    torch.testing.assert_close(ours.logprob[same], theirs.logprob[same], rtol=0, atol=1e-5)
    assert torch.equal(ours.rank, theirs.rank) and ours.top_tokens.shape == (count, 0)


@pytest.mark.slow
@interpreted_or_gpu
def test_a_batch_of_one_kind(sample):
    """All greedy, all random, all random with a cut: missing options cost no launch."""
    for params in ([PARAMS[0]], [PARAMS[1]], [PARAMS[5]]):
        samples, logits = members(params, 5), randn(5, VOCAB)
        ours, theirs = (
            sample(logits, make_sampling_metadata(samples), fused) for fused in (True, False)
        )
        assert torch.equal(ours.token, theirs.token)


@interpreted_or_gpu
def test_ranks_and_top_tokens_are_reported(sample):
    samples, logits = members([SamplingParams(logprobs=3)], 4), randn(4, VOCAB)
    ours, theirs = (
        sample(logits, make_sampling_metadata(samples), fused) for fused in (True, False)
    )
    for a, b in zip(vars(ours).values(), vars(theirs).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.slow
@interpreted_or_gpu
def test_a_row_samples_the_same_in_any_batch(sample):
    """Its log probability is the same bit by bit, too."""
    count = 7 if INTERPRETED else 64
    samples, logits = members([*PARAMS[3:], *PARAMS[:3]], count), randn(count, VOCAB) * 3
    together = sample(logits, make_sampling_metadata(samples))
    alone = [
        sample(logits[i : i + 1], make_sampling_metadata(samples[i : i + 1])) for i in range(count)
    ]
    assert together.token.tolist() == [one.token.item() for one in alone]
    assert together.logprob.tolist() == [one.logprob.item() for one in alone]


@interpreted_or_gpu
@pytest.mark.parametrize("vocab", mark_slow_except((1,), [1, 128, 799]))
def test_every_token_has_its_share_of_the_unit_interval(kernel, vocab):
    """Against fp64, at places all over the interval and at its ends."""
    count = 23
    logits = randn(1, vocab).repeat(count, 1)
    uniform = torch.linspace(0, 1, count, dtype=torch.float64).clamp(max=1 - 2**-53).to(DEVICE)
    temperature = torch.full((count,), 0.6, device=DEVICE)
    token = kernel.draw(logits, None, temperature, uniform)[0]
    running = (logits.double() / 0.6).softmax(-1).cumsum(-1)
    column = token[:, None]
    after = running.gather(1, column)[:, 0]
    before = after - (logits.double() / 0.6).softmax(-1).gather(1, column)[:, 0]
    assert ((before - 1e-6 <= uniform) & (uniform <= after + 1e-6)).all()
    assert token[0] == 0 and token[-1] == vocab - 1


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", mark_slow_except((0,), DTYPES), ids=str)
def test_the_floor_equals_that_of_a_sort(kernel, dtype):
    logits = randn(4, VOCAB, dtype=dtype) * 5
    logits[:, 100:200] = logits[:, 99:100]  # ties
    logits[2] = logits[2].abs() + 100  # one sign, few exponents
    logits[3] = -logits[2] * 3
    ones = torch.ones(4, device=DEVICE)
    ordered = logits.float().sort(-1, descending=True).values
    kept = lambda least: logits.float() >= least
    for k in (1, 63, 298):
        floor = kernel._floor(logits, ones, None, k * ones.long(), None)
        assert torch.equal(kept(floor[:, None]), kept(ordered[:, k - 1 : k]))
    mass = (ordered.double() - ordered[:, :1]).exp().cumsum(-1)
    for p in (1e-3, 0.9):
        floor = kernel._floor(logits, ones, None, None, p * ones.double())
        index = (mass < p * mass[:, -1:]).sum(-1, keepdim=True)
        assert torch.equal(kept(floor[:, None]), kept(ordered.gather(1, index)))


@interpreted_or_gpu
def test_masked_tokens_are_never_sampled(kernel):
    """-inf for most tokens, and top_k above the number of the others: only these are sampled."""
    logits = torch.full((4, VOCAB), -INF, device=DEVICE)
    logits[:, 127:129] = 0.0  # of two spans
    uniform = torch.linspace(0, 1 - 2**-53, 4, dtype=torch.float64).to(DEVICE)
    ones = torch.ones(4, device=DEVICE)
    for top_k in (None, 50 * ones.long()):
        for top_p in (None, 0.999 * ones.double()):
            token, logprob, lse = kernel.draw(logits, None, ones, uniform, None, top_k, top_p)
            assert token.tolist() == [127, 127, 128, 128]
            torch.testing.assert_close(lse, ones * 0.6931472)
            assert torch.equal(logprob, -lse)


@interpreted_or_gpu
@pytest.mark.parametrize("bad", mark_slow_except((0,), [float("nan"), INF]))
def test_a_row_that_is_not_finite_does_not_affect_others(sample, bad):
    samples, logits = members(PARAMS[4:], 6), randn(6, VOCAB)
    clean = sample(logits, make_sampling_metadata(samples))
    logits[::2, 9] = bad
    out = sample(logits, make_sampling_metadata(samples))
    assert not out.logprob[::2].isfinite().any()
    assert ((out.token >= 0) & (out.token < VOCAB)).all()
    assert torch.equal(out.token[1::2], clean.token[1::2]) and out.logprob[1::2].isfinite().all()


@interpreted_or_gpu
def test_without_rows(kernel):
    nothing = torch.empty(0, device=DEVICE)
    drawn = kernel.draw(randn(0, 5), None, nothing, nothing.double())
    assert [t.shape for t in drawn] == [(0,)] * 3


@pytest.mark.gpu
def test_a_whole_vocabulary_replays_from_a_graph():
    """bf16, 256 x 151,936, temperature 0.6: the shares of fp64, and no wait for the host."""
    from onchip.kernels.llm import sampling

    logits = torch.randn(256, 151_936, device="cuda", dtype=BF16)
    uniform = torch.rand(256, dtype=torch.float64, device="cuda")
    temperature = torch.full((256,), 0.6, device="cuda")
    sampling.draw(logits, None, temperature, uniform)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, logprob, _ = sampling.draw(logits, None, temperature, uniform)
    uniform.copy_(torch.rand(256, dtype=torch.float64))
    graph.replay()
    share = (logits.double() / 0.6).softmax(-1)
    after = share.cumsum(-1).gather(1, token[:, None])[:, 0]
    before = after - share.gather(1, token[:, None])[:, 0]
    assert ((before - 1e-6 <= uniform) & (uniform <= after + 1e-6)).all()
    exact = logits.double().log_softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), exact, rtol=0, atol=1e-5)
