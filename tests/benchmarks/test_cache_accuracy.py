"""What caches of 8 bits change in what a model says, and that nothing else does."""

import math

import pytest
import torch

from benchmarks import cache_accuracy
from onchip.models import builtin

# Stated in docs/paged.md, for 8 chapters of 1,024 bytes; these read 2 of 300. RMSE of the logits
# (their RMS is 8), and the change of the perplexity.
BOUNDS = {"bf16": (0.02, 0.001), "fp8": (0.2, 0.01), "int8": (0.05, 0.002)}


@pytest.fixture(scope="module")
def rows():
    torch.set_num_threads(1)
    return {row["kernel"]: row for row in cache_accuracy.rows(chapters=2, length=300)}


def test_pages_of_fp32_are_the_model(rows):
    model, texts = builtin.tiny(), cache_accuracy.held_out(2, 300)
    got = cache_accuracy.read(model, texts, None)
    with torch.no_grad():
        want = model.logits(model.full(texts[:, :-1]))
    torch.testing.assert_close(got.logits, want, rtol=0, atol=1e-3)
    assert math.log(rows["fp32"]["value"]) == pytest.approx(got.nats)
    assert rows["fp32"]["error"] == rows["fp32"]["divergence"] == rows["fp32"]["other_top"] == 0


@pytest.mark.parametrize("name", BOUNDS)
def test_the_stated_bounds_hold(rows, name):
    error, change = BOUNDS[name]
    assert 0 < rows[name]["error"] < error
    assert abs(rows[name]["perplexity_change"]) < change


def test_int8_is_closer_than_e4m3_and_bytes_are_those_of_the_cache(rows):
    """A scale for each token leaves nothing to the exponent of e4m3."""
    assert rows["int8"]["error"] < 0.5 * rows["fp8"]["error"]
    assert rows["int8"]["token_bytes"] == rows["fp8"]["token_bytes"] == 7 * 2 * (64 + 4)
    assert rows["bf16"]["token_bytes"] == 7 * 2 * 128 and rows["fp32"]["token_bytes"] == 7 * 2 * 256
    assert len(list(cache_accuracy.lines(rows.values()))) == 5
