"""The sampler against one row at a time in plain Python, and against its own probabilities."""

import math
from collections import Counter

import pytest
import torch

from onchip.engine import BeamSearchParams, Request, Sample, SamplingParams
from onchip.engine.sampler import (
    SamplingMetadataCache,
    compute_masses,
    draw_uniforms,
    find_threshold,
    make_sampling_metadata,
    pick,
    sample,
)

VOCAB = 799
INF = float("inf")


def member(params=None, prompt=(3, 5, 5), output=(), index=0, **options):
    """A sample that has sampled `output` so far."""
    one = Request("r", prompt, params, eos_token_ids=(1, 2), **options).samples[0]
    one.index = index
    one.token_ids.extend(output)
    return one


def naive_logits(row, one):
    """Bias, penalties and minimum length of one row, a token at a time, in fp64."""
    params, row = one.request.params, row.double().tolist()
    counts = Counter(one.token_ids)
    for token in range(len(row)):
        if token in counts or token in one.request.prompt_token_ids:
            penalty = params.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] += params.logit_bias.get(token, 0)
        row[token] -= params.frequency_penalty * counts[token]
        row[token] -= params.presence_penalty * (token in counts)
        if len(one.token_ids) < params.min_tokens and token in one.request.end_token_ids:
            row[token] = -INF
    return row


def naive_distribution(row, one):
    """{token: probability} by the definitions, with a sort."""
    params, row = one.request.params, naive_logits(row, one)
    top = max(row)
    weights = {t: math.exp((x - top) / params.temperature) for t, x in enumerate(row)}
    weights = {t: w for t, w in weights.items() if w >= params.min_p}
    order = sorted(weights, key=lambda t: -weights[t])
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, kept = math.fsum(weights[t] for t in order), 0.0, []
    for token in order:
        if mass >= params.top_p * total:
            break
        mass += weights[token]
        kept.append(token)
    return {t: weights[t] / mass for t in kept}


GRID = [
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
    SamplingParams(logit_bias={0: 100, 798: -100, 7: 2.5}, top_p=0.8),
    SamplingParams(min_tokens=9, stop_token_ids=(9, 11), temperature=2.0),
    SamplingParams(temperature=1e-20),
]


@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_the_batch_holds_the_distribution_of_each_row(spread):
    """All options in one batch; the naive version handles each row separately."""
    samples = [member(p, output=(7, 7, 7, 40, 3)) for p in GRID]
    logits = torch.randn(len(GRID), VOCAB) * spread
    rows = make_sampling_metadata(samples, "cpu")
    masses = compute_masses(rows.edits.apply(logits), rows)
    for mass, row, one in zip(masses, logits, samples, strict=True):
        expected = naive_distribution(row, one)
        assert set(mass.nonzero()[:, 0].tolist()) <= set(expected)
        share = (mass.double() / mass.sum()).tolist()
        for token, probability in expected.items():
            assert abs(share[token] - probability) < 1e-6


def test_greedy_rows_take_the_largest_after_bias_and_penalties():
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logit_bias={5: 50}),
        SamplingParams(temperature=0, repetition_penalty=100.0),
        SamplingParams(temperature=0, min_tokens=3),
    ]
    logits = torch.randn(1, VOCAB).repeat(4, 1)
    logits[:, 3] = 9  # a token of the prompt
    logits[3, 1] = 20  # eos
    out = sample(logits, make_sampling_metadata([member(p) for p in params], "cpu"))
    logits[2, 3] = -INF
    logits[3, 1] = -INF
    assert out.token.tolist() == [3, 5, int(logits[2].argmax()), 3]


def test_a_row_samples_the_same_token_in_any_batch():
    """Alone, in a batch, or at another row: a hash of seed, sample and position decides."""
    samples = [member(GRID[i % len(GRID)], output=[4] * (i % 5), rng_seed=i) for i in range(40)]
    logits = torch.randn(40, VOCAB) * 3
    together = sample(logits, make_sampling_metadata(samples, "cpu")).token.tolist()
    alone = [
        sample(logits[i : i + 1], make_sampling_metadata([samples[i]], "cpu")).token.item()
        for i in range(40)
    ]
    order = torch.randperm(40)
    shuffled = sample(
        logits[order], make_sampling_metadata([samples[i] for i in order], "cpu")
    ).token
    assert together == alone
    assert shuffled.tolist() == [together[i] for i in order]


def test_uniforms_differ_by_seed_sample_and_position():
    """Seed s of sample 1 is not seed s + 1 of sample 0, as if seeds were added."""
    draws = {
        (seed, index, place): draw_uniforms(
            [member(SamplingParams(seed=seed), output=[0] * place, index=index)]
        ).item()
        for seed in (-(2**63), 0, 1, 2, 2**63 - 1)
        for index in (0, 1, 2)
        for place in (0, 1, 2)
    }
    assert len(set(draws.values())) == len(draws)
    assert all(0 <= u < 1 for u in draws.values())
    again = draw_uniforms([member(SamplingParams(seed=1), output=[0], index=2)]).item()
    assert again == draws[1, 2, 1]
    one = member(SamplingParams(seed=1), index=2)
    one.pending = 1  # sampled, but not known on the host yet
    assert draw_uniforms([one]).item() == again


def test_splitmix_by_its_definition():
    """In Python's integers, from the reference in C of Vigna, 2015."""
    one = member(SamplingParams(seed=3), output=[0] * 6)
    draw_uniforms([one])
    z = (one.rng_key + 7 * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    assert draw_uniforms([one]).item() == ((z ^ (z >> 31)) >> 11) * 2.0**-53


def test_cached_metadata_gets_new_uniforms():
    greedy, random = (
        member(SamplingParams(temperature=0)),
        member(SamplingParams(seed=1, top_p=0.8)),
    )
    short = member(SamplingParams(seed=2, min_tokens=1))
    cache = SamplingMetadataCache("cpu")
    both = [greedy, random]
    for samples in ([greedy], both, both, [random, short], [random, short]):
        got, expected = cache.make(samples), make_sampling_metadata(samples, "cpu")
        logits = torch.randn(len(samples), VOCAB)
        assert torch.equal(got.uniform, expected.uniform)
        assert torch.equal(sample(logits, got).token, sample(logits, expected).token)
        for one in samples:
            one.token_ids.append(1)
    assert got.edits.add is None, "short is long enough by now"


def test_samples_follow_the_probabilities():
    """Chi-squared over 20,000 positions of one seed: 99.9 % of 9 degrees of freedom is 27.9."""
    logits = torch.randn(10)
    one = member(SamplingParams(seed=11))
    places = draw_uniforms([Sample(one.request, one.index, pending=i) for i in range(20_000)])
    rows = make_sampling_metadata([member(SamplingParams())], "cpu")
    masses = compute_masses(logits[None], rows).expand(len(places), -1)
    tokens = pick(masses, places)
    expected = logits.double().softmax(-1) * len(places)
    statistic = ((tokens.bincount(minlength=10) - expected) ** 2 / expected).sum()
    assert statistic < 27.9


def test_the_ends_of_the_unit_interval_pick_valid_tokens():
    masses = torch.tensor([[0, 0, 5, 0, 3, 0]]).expand(4, -1)
    ends = torch.tensor([0.0, 0.625, 1 - 2**-53, 0.62499], dtype=torch.float64)
    assert pick(masses, ends).tolist() == [2, 4, 4, 2]


@pytest.mark.parametrize("rows, n", [(1, 1), (3, 63), (5, 1023)])
def test_threshold_is_the_key_at_which_a_sort_reaches_the_mass(rows, n):
    keys = torch.randint(0, 2**31 - 1, (rows, n), dtype=torch.int32)
    keys[:, : n // 3] = keys[:, n // 3 : n // 3 + 1]  # ties
    masses = torch.randint(0, 2**40, (rows, n))
    for share in (0.0, 1e-9, 0.3, 0.9, 1.0, 2.0):
        wanted = (masses.sum(-1) * share).ceil().long().clamp(min=1)
        thresholds = find_threshold(keys, masses, wanted)
        for i in range(rows):
            goal = min(wanted[i], masses[i].sum())
            fits = [k for k in keys[i].tolist() if masses[i][keys[i] >= k].sum() >= goal]
            assert thresholds[i] == max(fits)


def test_equal_weights_stay_together():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    rows = make_sampling_metadata([member(SamplingParams(top_k=2))], "cpu")
    assert (compute_masses(logits, rows) > 0).tolist() == [[False, True, True, True, False]]


def test_logprobs_are_the_models_own():
    """Before temperature and bias; the rank counts from 1."""
    params = SamplingParams(temperature=0, logit_bias={4: 60}, logprobs=3)
    samples = [member(params), member(SamplingParams(temperature=0))]
    logits = torch.randn(2, VOCAB)
    exact = logits.double().log_softmax(-1)
    tokens = sample(logits, make_sampling_metadata(samples, "cpu")).to_tokens(samples)
    assert tokens[0].token == 4 and tokens[0].rank == int((logits[0] > logits[0, 4]).sum()) + 1
    assert abs(tokens[0].logprob - exact[0, 4]) < 1e-5
    best = logits[0].topk(3)
    assert [t for t, _ in tokens[0].top] == best.indices.tolist()
    assert tokens[1].top == () and tokens[1].rank == 1
    (silent,) = sample(logits[1:], make_sampling_metadata(samples[1:], "cpu")).to_tokens(
        samples[1:]
    )
    assert silent == tokens[1]._replace(rank=None)
    assert tokens[0].logprobs()[4] == (tokens[0].logprob, tokens[0].rank, None)


def test_beams_get_twice_their_number_of_candidates():
    one = Request("r", (3,), BeamSearchParams(4, temperature=0.5)).samples[0]
    logits = torch.randn(1, VOCAB)
    (tokens,) = sample(logits, make_sampling_metadata([one], "cpu")).to_tokens([one])
    exact = (logits[0].double() / 0.5).log_softmax(-1)
    assert len(tokens.top) == 8
    assert all(abs(exact[token] - p) < 1e-5 for token, p in tokens.top)


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_a_row_that_is_not_finite_fails_alone(bad):
    params = SamplingParams(top_k=5, top_p=0.5)
    samples = [member(params), member(params, rng_seed=3), member(SamplingParams(temperature=0))]
    logits = torch.randn(3, VOCAB)
    clean = sample(logits, make_sampling_metadata(samples, "cpu")).token.tolist()
    logits[0, 9] = bad
    out = sample(logits, make_sampling_metadata(samples, "cpu"))
    assert not out.logprob[0].isfinite() and 0 <= out.token[0] < VOCAB
    assert out.token[1:].tolist() == clean[1:] and out.logprob[1:].isfinite().all()


def test_logits_of_the_caller_are_not_modified():
    logits = torch.randn(1, VOCAB).bfloat16()
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 3.0}, repetition_penalty=1.4)
    sample(logits, make_sampling_metadata([member(params)], "cpu"))
    single = logits.float()
    sample(single, make_sampling_metadata([member(params)], "cpu"))
    assert torch.equal(logits, before) and torch.equal(single, before.float())


@pytest.mark.gpu
def test_on_a_gpu_sampling_does_not_synchronize():
    samples = [member(GRID[i % len(GRID)], output=[4] * (i % 5), rng_seed=i) for i in range(56)]
    logits = torch.randn(56, 151_936, device="cuda") * 3
    sample(logits, make_sampling_metadata(samples, "cuda"))  # the first call may allocate
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = sample(logits, make_sampling_metadata(samples, "cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    alone = [
        sample(logits[i : i + 1], make_sampling_metadata([samples[i]], "cuda")).token.item()
        for i in range(56)
    ]
    assert out.token.tolist() == alone
