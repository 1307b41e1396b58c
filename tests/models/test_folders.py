"""A folder's model_type alone decides whether its model runs natively or by transformers."""

import pytest

from onchip import models


def folder(path, text):
    (path / "config.json").write_text(text)
    return path


@pytest.mark.parametrize("kind", models.FAMILIES)
def test_families_of_the_decoder_are_native(kind, tmp_path):
    assert models.is_native(folder(tmp_path, f'{{"model_type": "{kind}"}}'))
    assert models.about(tmp_path) is None


def test_other_families_are_slower_and_described_so(tmp_path):
    assert not models.is_native(folder(tmp_path, '{"model_type": "olmoe"}'))
    assert models.about(tmp_path) == f"{tmp_path} runs through transformers, slower:" + (
        " nothing is fused, and no step is recorded"
    )
    assert models.about("tiny") == models.builtin.ABOUT


@pytest.mark.parametrize("text", ["{}", "[]", '{"model_type": 3}'])
def test_a_folder_without_a_model_type_is_refused_by_the_native_loader(text, tmp_path):
    assert models.is_native(folder(tmp_path, text))
    with pytest.raises(ValueError, match="config.json|model_type"):
        models.inspect(tmp_path)
