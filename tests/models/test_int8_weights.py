"""Checkpoints with matrices in 8 bits."""

import pytest
import torch

from onchip.models import builtin, safetensors
from onchip.models.int8_weights import dequantise, quantise


def weights(rows=111, columns=63):
    matrix = torch.randn(rows, columns) * torch.logspace(-30, 30, rows)[:, None]
    matrix[3], matrix[4] = 0, torch.randn(columns) * 1e-40  # zeros, and numbers near the smallest
    return {"matrix": matrix.bfloat16(), "norm": torch.randn(columns).bfloat16()}


def test_a_weight_is_within_half_a_step_and_one_rounding():
    tensors = weights()
    restored = dequantise(quantise(tensors))
    assert restored.keys() == tensors.keys()
    assert torch.equal(restored["norm"], tensors["norm"])
    matrix, got = tensors["matrix"].double(), restored["matrix"].double()
    step = matrix.abs().amax(1, keepdim=True) / 127
    smallest = torch.finfo(torch.float32).tiny
    bound = torch.maximum(step / 2 * (1 + 1e-6) + got.abs() * 2**-8, torch.tensor(smallest))
    assert (got - matrix).abs().le(bound).all() and not got[3].any()


def test_the_largest_weight_of_a_row_is_exact():
    tensors = weights()
    largest = [x["matrix"].abs().amax(1)[5:] for x in (tensors, dequantise(quantise(tensors)))]
    assert torch.equal(*largest)


def test_quantising_again_changes_nothing(tmp_path):
    once = quantise(weights())
    twice = quantise(dequantise(once))
    assert list(once) == list(twice) == ["matrix", "matrix.scale", "norm"]
    for i, stored in enumerate((once, twice)):
        safetensors.write(tmp_path / f"{i}", stored)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    assert once["matrix"].dtype == torch.int8 and once["matrix.scale"].dtype == torch.float32


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"^matrix is torch.float32, and a checkpoint in 8 bits"):
        quantise({"matrix": torch.ones(2, 2)})


def test_the_built_in_model_has_every_matrix_in_8_bits():
    stored = safetensors.read_all(builtin.WEIGHTS)
    for name, tensor in dequantise(stored).items():
        assert stored[name].dtype == (torch.int8 if tensor.dim() == 2 else torch.bfloat16), name
