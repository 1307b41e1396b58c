"""examples/quantise_lm.py: the files of the built-in models, byte for byte."""

import pytest
import quantise_lm
import torch

from onchip.models import builtin, random_model, save


@pytest.mark.parametrize("folder", [builtin.FOLDER, builtin.DRAFT_FOLDER], ids=builtin.NAMES)
def test_a_built_in_model_is_what_the_program_writes(tmp_path, folder):
    name = builtin.NAME if folder == builtin.FOLDER else builtin.DRAFT
    save(builtin.load_builtin(name, "cpu", torch.bfloat16), tmp_path / "plain")
    file = quantise_lm.convert(tmp_path / "plain", tmp_path / "tiny")
    assert file.read_bytes() == (folder / builtin.WEIGHTS.name).read_bytes()
    config = (tmp_path / "tiny" / "config.json").read_bytes()
    assert config == (folder / "config.json").read_bytes()


def test_only_checkpoints_of_bf16_are_converted(tmp_path):
    save(random_model(builtin.tiny().config), tmp_path / "plain")
    with pytest.raises(ValueError, match="float32, and a checkpoint in 8 bits is of bfloat16"):
        quantise_lm.convert(tmp_path / "plain", tmp_path / "tiny")
