"""examples/train_lm.py: an interrupted run ends with the same bits, and its model is served."""

import json
import math
from dataclasses import replace

import pytest
import torch
import train_lm
from packing import EOS, Corpus, training_batch

from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer
from onchip.models import load

CPU = torch.device("cpu")
SIZE = train_lm.Size(32, 48, 2, 2, 1, 24, 96, 8, 1e-2)
CORPORA = (Corpus.of(["abcabcabcabcabc" * 4, "bcabca" * 9]), Corpus.of(["cabcab" * 5]))


def run(folder, until, size=SIZE):
    one = train_lm.Run(size, folder, 3, CPU)
    train_lm.train(one, CORPORA, False, 2, until)
    return one


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole", 8)
    run(tmp_path / "parts", 2)
    again = run(tmp_path / "parts", 8)
    assert again.losses == whole.losses and again.held_out == whole.held_out
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    files = [tmp_path / name / "checkpoint.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert whole.losses[-1] < whole.losses[0] and whole.held_out[-1][0] == 8


def test_a_checkpoint_of_another_size_is_refused(tmp_path):
    run(tmp_path, 2)
    with pytest.raises(ValueError, match="another model"):
        train_lm.Run(replace(SIZE, width=64), tmp_path, 3, CPU)


def test_an_exported_model_can_be_loaded(tmp_path, capsys):
    one = run(tmp_path, 2, replace(SIZE, context=200, tokens=200))
    train_lm.finish(one)
    loaded = load(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16 and loaded.config.eos_token_ids == (EOS,)
    for a, b in zip(loaded.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())
    assert all(prompt in capsys.readouterr().out for prompt in train_lm.PROMPTS[:1])
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert curve["losses_nats"] == one.losses and curve["size"]["width"] == 32
    assert "thread" in curve["device"] and curve["torch"] == torch.__version__
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_its_tokenizer_is_that_of_bytes(tmp_path):
    ByteTokenizer().save(tmp_path)
    stored, plain = FileTokenizer(tmp_path), ByteTokenizer()
    for text in ("In the beginning", " \n\t~", "naïve Ω 日本 \x00\x7f", ""):
        assert stored.encode(text) == plain.encode(text)
        assert stored.decode([*stored.encode(text), EOS]) == text
    assert stored.eos_token_ids == plain.eos_token_ids and stored.vocab_size == 257
    assert stored.chat_template == plain.chat_template


def test_bits_per_byte_count_ends_as_bits_but_not_as_bytes(tmp_path):
    one = train_lm.Run(SIZE, tmp_path, 3, CPU)
    with torch.no_grad():
        one.model.embed.zero_()  # all logits are equal
    corpus = Corpus.of(["abcdefg" * 9, "hijk"])
    expected = math.log2(257) * (63 - 1 + 1 + 4 - 1 + 1) / (63 + 4)
    assert train_lm.bits_per_byte(one.model, corpus, SIZE) == pytest.approx(expected, rel=1e-6)


def test_the_learning_rate_rises_and_falls_to_nothing():
    rates = [train_lm.learning_rate(replace(SIZE, steps=200), step) for step in range(201)]
    assert rates[0] == pytest.approx(SIZE.lr / 10) and rates.index(max(rates)) == 9
    assert rates[200] == 0 and all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))


def test_the_full_size_fits_into_the_package():
    """At most 12 MB in bf16."""
    assert (
        2
        * sum(w.numel() for w in train_lm.fresh_model(train_lm.SIZES["full"], 0, CPU).parameters())
        < 12e6
    )


def test_a_step_compiles_into_one_graph():
    model = train_lm.fresh_model(SIZE, 0, CPU)
    batch = training_batch(CORPORA[0], SIZE.context, SIZE.tokens, 0, 0)
    compiled = torch.compile(train_lm.loss_of, backend="aot_eager", fullgraph=True)
    loss, expected = (f(model, batch, SIZE.context) for f in (compiled, train_lm.loss_of))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_learns_as_a_cpu_does(tmp_path, compiled):
    """The same batches from the same weights: losses within what bf16 rounds."""
    there = train_lm.Run(SIZE, tmp_path / "gpu", 3, torch.device("cuda"))
    train_lm.train(there, CORPORA, compiled, 8, 8)
    assert there.losses == pytest.approx(run(tmp_path / "cpu", 8).losses, rel=0.02)
