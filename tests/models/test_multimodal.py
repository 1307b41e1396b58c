"""Multimodal checkpoints with text alone: the logits equal those of transformers."""

import json

import pytest
import torch

from onchip import models
from onchip.models.folders import is_native
from tests.models.foreign_models import quiet, randomise

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MISTRAL = {"model_type": "mistral", "head_dim": 16, "sliding_window": 7}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2}
_MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 2, 2]}
# model_type: its language model, its images, and the rest of its config
CHECKPOINTS = {
    "mistral3": (_MISTRAL, {"model_type": "pixtral", "head_dim": 16}, {}),
    "gemma3": ({"head_dim": 16, "sliding_window": 7}, {}, {}),
    "qwen2_5_vl": (
        {"rope_parameters": _MROPE},
        _QWEN_VISION | {"intermediate_size": 32, "out_hidden_size": 48},
        {"tie_word_embeddings": False},
    ),
    "qwen2_vl": (
        {"rope_parameters": _MROPE},
        _QWEN_VISION | {"embed_dim": 32, "hidden_size": 48},
        {"tie_word_embeddings": True},
    ),
}


@pytest.fixture
def twin(request, tmp_path):
    """A tiny random model of transformers, saved in tmp_path."""
    quiet()
    text, vision, rest = CHECKPOINTS[request.param]
    kind = transformers.CONFIG_MAPPING[request.param]
    config = kind(text_config=TEXT | text, vision_config=VISION | vision, **rest)
    one = transformers.AutoModelForImageTextToText.from_config(config).eval()
    randomise(one).save_pretrained(tmp_path)
    return one


@pytest.mark.parametrize("twin", CHECKPOINTS, indirect=True)
@torch.no_grad()
def test_logits_of_text_equal_transformers(twin, tmp_path):
    words = torch.randint(3, 131, (2, 40), generator=torch.Generator().manual_seed(1))
    assert is_native(tmp_path)
    decoder = models.load(tmp_path)
    ours = decoder.logits(decoder.full(words))
    expected = twin(words).logits
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("twin", ["qwen2_5_vl"], indirect=True)
def test_fields_of_text_at_the_top_level(twin, tmp_path):
    """As in checkpoints from before text_config."""
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    text = data.pop("text_config")
    rope = text.pop("rope_parameters")
    old = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    old["rope_theta"] = rope["rope_theta"]
    file.write_text(json.dumps(text | data | old))
    new, old = models.ModelConfig.from_hf(twin.config.to_dict()), models.inspect(tmp_path).config
    assert new == old


@pytest.mark.parametrize("twin", ["mistral3"], indirect=True)
def test_a_saved_model_is_a_text_model(twin, tmp_path):
    decoder = models.load(tmp_path)
    models.save(decoder, tmp_path / "text")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "mistral"
    again = models.load(tmp_path / "text")
    same = map(torch.equal, again.parameters(), decoder.parameters())
    assert all(same)


def test_a_language_model_of_another_family_is_not_native(tmp_path):
    data = {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert not is_native(tmp_path)
