"""examples/quantise_lm.py: the file of the built-in model, byte for byte."""

import pytest
import quantise_lm
import torch

from onchip.models import builtin, random_model, save


def test_the_built_in_model_is_what_the_program_writes(tmp_path):
    save(builtin.tiny(dtype=torch.bfloat16), tmp_path / "plain")
    file = quantise_lm.convert(tmp_path / "plain", tmp_path / "tiny")
    assert file.read_bytes() == builtin.WEIGHTS.read_bytes()
    config = (tmp_path / "tiny" / "config.json").read_bytes()
    assert config == (builtin.FOLDER / "config.json").read_bytes()


def test_only_checkpoints_of_bf16_are_converted(tmp_path):
    save(random_model(builtin.tiny().config), tmp_path / "plain")
    with pytest.raises(ValueError, match="float32, and a checkpoint in 8 bits is of bfloat16"):
        quantise_lm.convert(tmp_path / "plain", tmp_path / "tiny")
