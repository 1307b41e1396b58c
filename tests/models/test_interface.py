"""Arguments of transformers' attention functions as options of onchip."""

import pytest
import torch

from onchip import UnsupportedError
from onchip.models.interface import MaskFunction, options_of

CAUSAL = lambda b, h, q, k: k <= q


def sliding(window):
    return lambda b, h, q, k: (k <= q) & (k > q - window)


@pytest.mark.parametrize("window", [1, 2, 7, 4096, 10**12])
def test_a_window_is_found_from_its_mask_function(window):
    assert MaskFunction(sliding(window), window).window() == window
    assert MaskFunction(CAUSAL, None).window() is None


@pytest.mark.parametrize(
    ("fn", "length"),
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
        (lambda b, h, q, k: (k <= q) | (k < 3), None),  # a bidirectional prefix
        (lambda b, h, q, k: q >= 0, None),
        (lambda b, h, q, k: k < q, None),
        (lambda b, h, q, k: (k <= q) & (torch.zeros(9, device="meta")[0] > 0), None),
    ],
)
def test_any_other_mask_function_is_refused(fn, length):
    with pytest.raises(UnsupportedError, match="neither causal nor a sliding window"):
        MaskFunction(fn, length).window()


def test_an_empty_window_is_refused():
    with pytest.raises(UnsupportedError, match="a window of 0 tokens"):
        MaskFunction(sliding(0), 0).window()


def test_keywords_become_options_of_attention():
    sinks = torch.zeros(4)
    keywords = {"scaling": 0.3, "softcap": 5.0, "s_aux": sinks, "dropout": 0.1, "sliding_window": 7}
    assert options_of(keywords) == {"softmax_scale": 0.3, "softcap": 5.0, "sinks": sinks}
    assert options_of({"position_bias": None}) == {"softmax_scale": None, "softcap": 0.0}


@pytest.mark.parametrize(
    "keywords", [{"position_bias": 1}, {"indices": torch.zeros(1)}, {"cache": {}}]
)
def test_a_keyword_without_counterpart_is_named(keywords):
    with pytest.raises(UnsupportedError, match=next(iter(keywords))):
        options_of(keywords)


def test_a_tensor_as_scale_is_refused():
    with pytest.raises(UnsupportedError, match="not a number"):
        options_of({"scaling": torch.ones(4)})
