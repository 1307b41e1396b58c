"""Every parameter has bounds, and a value outside is rejected in one sentence."""

import dataclasses

import pytest

from onchip.engine import BeamSearchParams, SamplingParams

NAN, INF = float("nan"), float("inf")
BAD = {
    "n": (0, -1, 10**6, 1.0, True, "2", None, 10**400),
    "best_of": (0, 129, 1.5),
    "presence_penalty": (NAN, INF, -2.1, 2.1, "0", None),
    "frequency_penalty": (NAN, -INF, -2.1, 2.1),
    "repetition_penalty": (NAN, INF, 0, -1, 101),
    "temperature": (NAN, INF, -0.1, 2.1, 1e-300, True, "1", 10**400),
    "top_p": (NAN, 0, -0.1, 1.1),
    "top_k": (-2, 1.5, NAN, False),
    "min_p": (NAN, -0.1, 1.1),
    "seed": (2**63, -(2**63) - 1, 1.0, "7"),
    "stop": (5, [""], ["a" * 257], ["a"] * 17, [7], ["x"] * 500_000),
    "stop_token_ids": (5, "12", [-1], [1.0], [True], list(range(129))),
    "ignore_eos": (1, None, "yes"),
    "max_tokens": (0, -1, 1.0, True),
    "min_tokens": (-1, 17, 1.0),
    "logprobs": (-1, 21, 1.0, True),
    "prompt_logprobs": (-1, 151_936),
    "logit_bias": (5, [1], {-1: 0.0}, {1: NAN}, {1: INF}, {1: 101}, {"1": 0.0}, {1.0: 1.0}),
}


@pytest.mark.parametrize("name, value", [(n, v) for n, many in BAD.items() for v in many])
def test_a_value_out_of_bounds_is_rejected_by_name(name, value):
    """NaN temperature, n = 10^6, 500k stops (vllm #51447), all logprobs of a prompt, and so on."""
    with pytest.raises(ValueError, match=name) as error:
        SamplingParams(**{name: value})
    assert len(str(error.value)) < 250 and "\n" not in str(error.value)


def test_a_number_too_long_to_print_is_rejected():
    with pytest.raises(ValueError, match="bits"):
        SamplingParams(seed=1 << 100_000)


def test_too_many_biases():
    with pytest.raises(ValueError, match="logit_bias has 301 entries"):
        SamplingParams(logit_bias=dict.fromkeys(range(301), 0.0))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128},
        {"n": 2, "best_of": 5},
        {"temperature": 0},
        {"temperature": 1e-10},
        {"top_k": -1},
        {"top_p": 1e-9},
        {"stop": "end"},
        {"stop": None, "stop_token_ids": None, "logit_bias": None},
        {"max_tokens": None, "min_tokens": 10_000},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"seed": -(2**63)},
        {"repetition_penalty": 2},
    ],
)
def test_bounds_are_inclusive(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        if value is not None and name != "stop":
            assert getattr(params, name) == value


def test_lists_are_kept_as_values():
    ids, bias = [3], {1: 2.0}
    params = SamplingParams(stop="end", stop_token_ids=ids, logit_bias=bias)
    ids.append(4)
    bias[9] = NAN
    assert params.stop == ("end",) and params.stop_token_ids == (3,)
    assert params.logit_bias == {1: 2.0}


def test_best_of_is_at_least_n():
    with pytest.raises(ValueError, match="best_of=2 must be a whole number, 3 to"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=5).num_samples == 5


def test_beam_search_of_the_old_interface_is_mapped():
    params = SamplingParams(
        n=2, best_of=4, use_beam_search=True, temperature=0, max_tokens=9, length_penalty=0.5
    )
    assert params.beams == BeamSearchParams(4, 9, length_penalty=0.5)
    assert SamplingParams().beams is None


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.9}, {"temperature": 0.7}, {"logit_bias": {1: 1.0}}, {"stop": "x"}]
)
def test_beam_search_refuses_what_it_would_ignore(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(use_beam_search=True, **{"temperature": 0} | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 0},
        {"beam_width": 129},
        {"max_tokens": 0},
        {"temperature": NAN},
        {"length_penalty": INF},
        {"ignore_eos": 1},
    ],
)
def test_beams_are_checked_too(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        BeamSearchParams(**{"beam_width": 2} | fields)


def test_token_ids_are_of_the_vocabulary():
    params = SamplingParams(stop_token_ids=[99], logit_bias={98: 1.0})
    params.check_vocab(100)
    with pytest.raises(ValueError, match="stop_token_ids names token 99; vocab_size=99"):
        params.check_vocab(99)


def test_params_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 3
