"""A request and its samples: ends, pages, outputs."""

import copy
import pickle

import pytest

from onchip.engine import (
    BeamSearchParams,
    CompletionOutput,
    Request,
    SampledToken,
    SamplingParams,
    Status,
)


@pytest.mark.parametrize(
    "prompt, options, match",
    [
        ((), {}, "the prompt is empty"),  # vllm #7632
        ((1, 50), {"vocab_size": 50}, "token 50; vocab_size=50"),
        ((1, -1), {}, "token -1"),
        ((1, 2.0), {}, "token ids must be integers"),
        ((1,), {"priority": 101}, "priority=101"),
        ((1,), {"deadline_s": float("nan")}, "deadline_s=nan"),
        ((1,), {"deadline_s": "now"}, "deadline_s='now'"),
        ((1,), {"params": SamplingParams(logit_bias={9: 1}), "vocab_size": 9}, "logit_bias"),
    ],
)
def test_invalid_requests_are_rejected(prompt, options, match):
    with pytest.raises(ValueError, match=match):
        Request("r", prompt, **options)


def taken(params, tokens, **options):
    request = Request("r", (1, 2), params, eos_token_ids=(7,), **options)
    request.max_tokens = params.max_tokens
    sample = request.samples[0]
    for token in tokens:
        sample.append(SampledToken(token, -0.5, 1, ((token, -0.5), (0, -1.5))))
    return sample


@pytest.mark.parametrize(
    "params, tokens, end, reason",
    [
        (SamplingParams(max_tokens=3), (4, 4), None, None),
        (SamplingParams(max_tokens=3), (4, 4, 4), Status.FINISHED_LENGTH, None),
        (SamplingParams(max_tokens=3), (4, 7), Status.FINISHED_STOPPED, None),
        (SamplingParams(max_tokens=2), (4, 7), Status.FINISHED_STOPPED, None),
        (SamplingParams(max_tokens=3, ignore_eos=True), (4, 7), None, None),
        (SamplingParams(max_tokens=3, min_tokens=3), (4, 7), None, None),
        (SamplingParams(stop_token_ids=[9]), (9,), Status.FINISHED_STOPPED, 9),
        (SamplingParams(stop_token_ids=[7], ignore_eos=True), (7,), Status.FINISHED_STOPPED, 7),
    ],
)
def test_a_sample_ends_by_eos_stop_token_or_length(params, tokens, end, reason):
    sample = taken(params, tokens)
    assert (sample.end, sample.stop_reason) == (end, reason)
    assert sample.output().finish_reason == (end.finish_reason if end else None)


def test_logprobs_are_kept_if_requested():
    plain, with_logprobs = (taken(SamplingParams(logprobs=p), (4, 5)) for p in (None, 1))
    assert plain.output().logprobs is None
    assert [set(place) for place in with_logprobs.output().logprobs] == [{4, 0}, {5, 0}]
    assert with_logprobs.output().cumulative_logprob == -1.0


def test_an_output_does_not_change_later():
    """It is copied lazily, but shows the state of its own time."""
    sample = taken(SamplingParams(logprobs=1), (4, 5))
    sample.text.add("ab")
    early, untouched = sample.output(), sample.output()
    assert early.token_ids == (4, 5)
    sample.text.add("cd")
    sample.append(SampledToken(6, -1.0))
    for output in (early, untouched):
        assert (output.text, output.token_ids, len(output.logprobs)) == ("ab", (4, 5), 2)
        assert output.cumulative_logprob == -1.0 and output == untouched
    late = sample.output()
    text, ids, tables = late.since(2, 2)
    assert (text, ids, [set(t) for t in tables]) == ("cd", (6,), [{6}])
    plain = pickle.loads(pickle.dumps(late))
    assert plain == copy.copy(late) and type(plain) is CompletionOutput
    assert plain.since(2, 2) == late.since(2, 2) and "token_ids=(4, 5, 6)" in repr(late)


def test_logits_that_are_not_finite_end_the_sample_alone():
    sample = taken(SamplingParams(), (4,))
    sample.append(SampledToken(5, float("nan")))
    assert sample.end is Status.FINISHED_ERROR and sample.token_ids == [4]


def test_tokens_of_prompt_and_continuation():
    sample = taken(SamplingParams(), (4, 5, 6))
    assert [sample.tokens(a, b) for a, b in ((0, 5), (1, 3), (3, 5), (0, 2), (2, 2))] == [
        [1, 2, 4, 5, 6],
        [2, 4],
        [5, 6],
        [1, 2],
        [],
    ]


def test_best_of_returns_the_most_probable():
    request = Request("r", (1,), SamplingParams(n=2, best_of=3, max_tokens=1))
    request.max_tokens = 1
    for sample, logprob in zip(request.samples, (-3.0, -1.0, -2.0), strict=True):
        sample.append(SampledToken(4, logprob))
    request.status = Status.FINISHED_LENGTH
    assert [o.index for o in request.output().outputs] == [1, 2]


def test_pages_count_the_prompt_once():
    request = Request("r", range(10), SamplingParams(n=3))
    assert request.pages(4, 10) == 2 + 3 * 1
    assert request.pages(4, 17) == 2 + 3 * 3
    assert Request("b", range(8), BeamSearchParams(3)).pages(4, 9) == 2 + 3


def test_output_has_the_fields_of_vllm():
    request = Request("r", (1, 2))
    output = request.output()
    assert output.request_id == "r" and output.prompt_token_ids == (1, 2)
    assert not output.finished and output.outputs[0].token_ids == ()
    assert not output.outputs[0].finished
