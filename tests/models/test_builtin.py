"""The built-in model."""

import hashlib
import json
import math

import pytest
import torch

from onchip import LLM, SamplingParams
from onchip.models import builtin, load, save

VERSE = "And God saw the light, that it was good: and God divided the light from the darkness."


def test_it_has_the_same_weights_everywhere_and_a_description():
    one, other = builtin.tiny(), builtin.tiny(dtype=torch.bfloat16)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    assert "King James Bible" in builtin.ABOUT
    assert one.config.vocab_size == 257 and one.config.eos_token_ids == (256,)


def bits(text):
    tokens = torch.tensor([list(text.encode())])
    model = builtin.tiny()
    with torch.no_grad():
        logits = model.logits(model.full(tokens))
    nats = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    return nats.item() / math.log(2)


def test_it_predicts_the_english_of_its_training_text():
    """A random byte takes 8 bits; shuffled letters take more bits than English."""
    assert bits(VERSE) < 2.5
    assert bits(VERSE[::-1]) > bits(VERSE) + 2


def test_it_writes_words():
    llm = LLM(num_pages=200, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    (output,) = llm.generate("And it came to pass ", params)
    words = output.outputs[0].text.split()
    common = {"and", "the", "of", "to", "in", "that", "he", "shall", "unto", "lord", "his", "a"}
    assert sum(word.strip(",.;:").lower() in common for word in words) >= len(words) / 4


def test_transformers_loads_what_is_saved_of_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = builtin.tiny(dtype=torch.bfloat16)
    save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor([list(VERSE.encode())])
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = builtin.tiny().logits(builtin.tiny().full(tokens))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_its_card_states_source_and_quality():
    card = (builtin.FOLDER / "MODEL_CARD.md").read_text()
    content = builtin.WEIGHTS.read_bytes()
    assert len(content) <= 6e6 and f"{len(content):,} bytes" in card
    assert hashlib.sha256(content).hexdigest() in card
    config = json.loads((builtin.FOLDER / "config.json").read_text())
    assert f"{config['max_position_embeddings']:,}" in card
    assert f"{sum(w.numel() for w in builtin.tiny().parameters()):,} parameters" in card
    programs = ("examples/train_lm.py", "examples/quantise_lm.py")
    for text in ("King James", "bits per byte", "commit", *programs):
        assert text in card


def test_its_folder_is_refused_as_a_checkpoint():
    """Its matrices are integers: without their scales they would be wrong weights."""
    with pytest.raises(ValueError, match="tensors are not part of the model: .*scale"):
        load(builtin.FOLDER)
