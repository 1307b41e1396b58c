"""What transformers says to an attention function, in our words."""

import pytest
import torch

from onchip import UnsupportedError
from onchip.models.interface import MaskFunction, options_of

CAUSAL = lambda b, h, q, k: k <= q


def sliding(window):
    return lambda b, h, q, k: (k <= q) & (k > q - window)


@pytest.mark.parametrize("window", [1, 2, 7, 4096, 10**12])
def test_a_window_is_found_by_asking_its_rule(window):
    assert MaskFunction(sliding(window), window).window() == window
    assert MaskFunction(CAUSAL, None).window() is None


@pytest.mark.parametrize(
    ("sees", "length"),
    [
        (sliding(6), 7),
        (sliding(4095), 4096),
        (sliding(4097), 4096),
        (lambda b, h, q, k: (k <= q) & (k // 4096 == q // 4096), 4096),
        (sliding(8), 7),
        (CAUSAL, 7),
        (sliding(7), None),
        (sliding(299), None),
        (lambda b, h, q, k: (k <= q) & (k // 7 == q // 7), 7),  # chunks
        (lambda b, h, q, k: (k <= q) | (k < 3), None),  # a prefix that sees itself
        (lambda b, h, q, k: q >= 0, None),
        (lambda b, h, q, k: k < q, None),
        (lambda b, h, q, k: (k <= q) & (torch.zeros(9, device="meta")[0] > 0), None),
    ],
)
def test_any_other_rule_is_refused(sees, length):
    with pytest.raises(UnsupportedError, match="neither causal nor a sliding window"):
        MaskFunction(sees, length).window()


def test_a_window_of_nothing_is_refused():
    with pytest.raises(UnsupportedError, match="a window of 0 tokens"):
        MaskFunction(sliding(0), 0).window()


def test_options_are_those_of_attention():
    sinks = torch.zeros(4)
    said = {"scaling": 0.3, "softcap": 5.0, "s_aux": sinks, "dropout": 0.1, "sliding_window": 7}
    assert options_of(said) == {"softmax_scale": 0.3, "softcap": 5.0, "sinks": sinks}
    assert options_of({"position_bias": None}) == {"softmax_scale": None, "softcap": 0.0}


@pytest.mark.parametrize("said", [{"position_bias": 1}, {"indices": torch.zeros(1)}, {"cache": {}}])
def test_what_has_no_counterpart_is_named(said):
    with pytest.raises(UnsupportedError, match=next(iter(said))):
        options_of(said)


def test_a_scale_that_is_computed_is_refused():
    with pytest.raises(UnsupportedError, match="not a number"):
        options_of({"scaling": torch.ones(4)})
