"""Parsed mask functions of transformers equal the functions, cell by cell."""

from types import ModuleType

import pytest
import torch

from onchip.models import mask_parsing
from onchip.models.mask_parsing import parse_mask

masking = pytest.importorskip("transformers").masking_utils

LEFT = torch.tensor([0, 4])
DOCUMENTS = torch.tensor([[0] * 9 + [1] + [2] * 30, [0] * 17 + [1] * 23])
FUNCTIONS = {
    "causal": masking.causal_mask_function,
    "all": masking.bidirectional_mask_function,
    "window": masking.sliding_window_causal_mask_function(7),
    "window of one": masking.sliding_window_causal_mask_function(1),
    "window of both sides": masking.sliding_window_bidirectional_mask_function(5),
    "chunks": masking.chunked_causal_mask_function(9, LEFT),
    "documents": masking.and_masks(
        masking.sliding_window_causal_mask_function(7),
        masking.packed_sequence_mask_function(DOCUMENTS),
    ),
}
OPTIONS = {
    "causal": {"causal": True},
    "all": {"causal": False},
    "window": {"causal": True, "window_size": (6, 0)},
    "window of one": {"causal": True, "window_size": (0, 0)},
    "window of both sides": {"causal": False, "window_size": (5, 5)},
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows", [(0, 40), (11, 29), (39, 40)])
def test_bounds_equal_the_function(name, rows):
    q, k = torch.arange(*rows), torch.arange(40)
    expected = FUNCTIONS[name](torch.arange(2)[:, None, None], 0, q[:, None], k)
    lo, hi = parse_mask(FUNCTIONS[name], masking).bounds(q, 40)
    ours = (lo[..., None] <= k) & (k < hi[..., None])
    shape = (2, len(q), 40)
    assert torch.equal(ours.expand(shape), expected.expand(shape))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_are_given_where_they_express_the_mask(name):
    assert parse_mask(FUNCTIONS[name], masking).options() == OPTIONS.get(name)


def test_unknown_functions_are_not_parsed():
    prefix = lambda b, h, q, k: k < 5
    for fn in (
        prefix,
        masking.and_masks(masking.causal_mask_function, prefix),
        masking.or_masks(masking.causal_mask_function, prefix),
        masking.padding_mask_function(torch.ones(2, 40, dtype=torch.bool)),
        torch.nn.Identity(),
    ):
        assert parse_mask(fn, masking) is None


def test_two_windows_have_no_options():
    twice = masking.and_masks(
        masking.sliding_window_causal_mask_function(7), masking.sliding_window_overlay(3)
    )
    reading = parse_mask(twice, masking)
    assert reading.options() is None
    assert reading.bounds(torch.arange(9), 9)[0].tolist() == [[0, 0, 0, 1, 2, 3, 4, 5, 6]]


def other_version(**changes):
    """transformers.masking_utils with other functions."""
    made = ModuleType("masking_utils")
    made.__dict__.update({**vars(masking), **changes})
    return made


@pytest.fixture
def _afresh():
    yield
    mask_parsing._known_code.cache_clear()


@pytest.mark.usefixtures("_afresh")
def test_a_function_with_a_changed_meaning_is_not_parsed():
    """Its name and captured variables are the same, but the window ends elsewhere."""

    def sliding_window_overlay(sliding_window):
        return lambda b, h, q, k: k >= q - sliding_window

    changed = other_version(sliding_window_overlay=sliding_window_overlay)
    assert parse_mask(sliding_window_overlay(7), changed) is None
    assert parse_mask(masking.causal_mask_function, changed) is not None


@pytest.mark.usefixtures("_afresh")
def test_a_function_with_other_captured_names_is_not_parsed():
    def sliding_window_overlay(width):
        return lambda b, h, q, k: k > q - width

    changed = other_version(sliding_window_overlay=sliding_window_overlay)
    assert parse_mask(sliding_window_overlay(7), changed) is None


@pytest.mark.usefixtures("_afresh")
def test_removed_functions_are_no_error():
    changed = other_version(chunked_overlay=None)
    assert parse_mask(FUNCTIONS["chunks"], changed) is None
    assert parse_mask(FUNCTIONS["window"], changed).options() == OPTIONS["window"]
