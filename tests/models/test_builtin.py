"""The built-in models."""

import hashlib
import json
import math

import pytest
import torch

from onchip import LLM, SamplingParams
from onchip.models import builtin, load, save

VERSE = "And God saw the light, that it was good: and God divided the light from the darkness."


MODELS = {
    "tiny": (builtin.tiny, builtin.FOLDER, 6_000_000),
    "tiny-draft": (builtin.tiny_draft, builtin.DRAFT_FOLDER, 300_000),
}


@pytest.mark.parametrize("name", builtin.NAMES)
def test_it_has_the_same_weights_everywhere_and_a_description(name):
    make, _, _ = MODELS[name]
    one, other = make(), builtin.load_builtin(name, "cpu", torch.bfloat16)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    assert "King James Bible" in builtin.ABOUT
    assert one.config.vocab_size == 257 and one.config.eos_token_ids == (256,)


def bits(text, model):
    tokens = torch.tensor([list(text.encode())])
    with torch.no_grad():
        logits = model.logits(model.full(tokens))
    nats = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    return nats.item() / math.log(2)


@pytest.mark.parametrize("name", builtin.NAMES)
def test_it_predicts_the_english_of_its_training_text(name):
    """A random byte takes 8 bits; shuffled letters take more bits than English."""
    model = MODELS[name][0]()
    assert bits(VERSE, model) < 2.5
    assert bits(VERSE[::-1], model) > bits(VERSE, model) + 2


def test_the_draft_serves_every_length_of_the_model():
    """Its layers have a window, which is shorter than the texts that it was trained on."""
    draft, target = builtin.tiny_draft().config, builtin.tiny().config
    assert draft.vocab_size == target.vocab_size and draft.max_seqlen == target.max_seqlen
    assert all(layer.window < 256 for layer in draft.layers)
    long = VERSE * 20
    assert bits(long[-600:], builtin.tiny_draft()) < 2.5


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


@pytest.mark.parametrize("name", builtin.NAMES)
def test_its_card_states_source_and_quality(name):
    make, folder, most_bytes = MODELS[name]
    card = (folder / "MODEL_CARD.md").read_text()
    content = (folder / builtin.WEIGHTS.name).read_bytes()
    assert len(content) <= most_bytes and f"{len(content):,} bytes" in card
    assert hashlib.sha256(content).hexdigest() in card
    config = json.loads((folder / "config.json").read_text())
    assert f"{config['max_position_embeddings']:,}" in card
    assert f"{sum(w.numel() for w in make().parameters()):,} parameters" in card
    programs = ("examples/train_lm.py", "examples/quantise_lm.py")
    for text in ("King James", "bits per byte", "commit", *programs):
        assert text in card


@pytest.mark.parametrize("name", builtin.NAMES)
def test_its_folder_is_refused_as_a_checkpoint(name):
    """Its matrices are integers: without their scales they would be wrong weights."""
    with pytest.raises(ValueError, match="tensors are not part of the model: .*scale"):
        load(MODELS[name][1])
