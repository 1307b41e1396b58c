"""Options of speculative decoding are checked before a model loads."""

import pytest

from onchip.engine import LLM
from onchip.engine.speculation.config import SpeculativeConfig


def test_lookup_lengths_default_as_in_vllm():
    lengths = lambda **options: list(SpeculativeConfig(3, **options).lookup_lengths)
    assert lengths() == [5]
    assert lengths(prompt_lookup_max=4) == [4]
    assert lengths(prompt_lookup_min=2) == [2]
    assert lengths(prompt_lookup_max=4, prompt_lookup_min=2) == [4, 3, 2]


def test_a_dict_and_a_config_are_the_same():
    config = SpeculativeConfig(4, prompt_lookup_max=3)
    named = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    assert SpeculativeConfig.parse(named) == config == SpeculativeConfig.parse(config)
    assert SpeculativeConfig.parse(None) is None


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "needs num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"num_speculative_tokens": 65}, "from 1 to 64"),
        ({"num_speculative_tokens": True}, "must be a number"),
        ({"num_speculative_tokens": 2, "method": "medusa"}, "method='medusa'"),
        ({"num_speculative_tokens": 2, "tokens": 2}, "no option 'tokens'; it has"),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min=3 exceeds prompt_lookup_max=2",
        ),
        ({"num_speculative_tokens": 2, "disable_by_batch_size": 0}, "disable_by_batch_size=0"),
        ({"num_speculative_tokens": 2, "enforce_eager": 1}, "enforce_eager=1 of .* must be a bool"),
        ("ngram", "must be a dict"),
    ],
)
def test_invalid_options_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        LLM("no such model", speculative_config=config)
