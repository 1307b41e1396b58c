"""examples/packing.py: every token is where the text has it, and no piece sees another."""

import torch
from packing import EOS, Corpus, cover, pack, read_corpora, training_batch

from onchip.models import ModelConfig, random_model

CHAPTERS = ["In the beginning", "Jesus wept.", "x", "And it came to pass in those days, that"]


def pieces(batch):
    starts = batch.cu_seqlens.tolist()
    tokens, targets = batch.tokens.tolist(), batch.targets.tolist()
    return [(tokens[a:b], targets[a:b]) for a, b in zip(starts, starts[1:], strict=False)]


def test_a_piece_is_a_part_of_one_chapter_and_its_targets_are_what_follows():
    whole = [[*chapter.encode(), EOS] for chapter in CHAPTERS]
    for step in range(20):
        batch = training_batch(Corpus.of(CHAPTERS), 7, 45, 3, step)
        assert len(batch.tokens) == len(batch.targets) == 45 == batch.cu_seqlens[-1]
        assert batch.cu_seqlens.dtype == torch.int32
        for tokens, targets in pieces(batch):
            assert len(tokens) <= 7 and EOS not in tokens
            assert not tokens or tokens[1:] == targets[:-1]
            text = [*tokens, *targets[-1:]]
            assert any(text == c[i : i + len(text)] for c in whole for i in range(len(c)))


def test_a_batch_depends_on_seed_and_step_alone():
    corpus = Corpus.of(CHAPTERS)
    one, same, later, other = (
        training_batch(corpus, 7, 45, *at).tokens for at in ((0, 5), (0, 5), (0, 6), (1, 5))
    )
    assert torch.equal(one, same) and not torch.equal(one, later) and not torch.equal(one, other)


def test_evaluation_covers_every_byte_and_every_end_once():
    seen = torch.cat([batch.targets for batch in cover(Corpus.of(CHAPTERS), 6)]).tolist()
    assert seen == [token for chapter in CHAPTERS for token in (*chapter.encode()[1:], EOS)]


def test_no_piece_sees_another():
    """Another text in one piece changes no bit of the others."""
    corpus = Corpus.of(CHAPTERS)
    batch = pack(corpus, torch.tensor([0, 17, 31]), 11, 30)
    fields = {"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "rms_norm_eps": 1e-5}
    fields |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = random_model(ModelConfig.from_hf(fields | {"max_position_embeddings": 64}))
    before = model.full(batch.tokens, batch.cu_seqlens, 11)
    tokens = batch.tokens.clone()
    a, b = batch.cu_seqlens[1:3].tolist()
    tokens[a:b] = 7
    after = model.full(tokens, batch.cu_seqlens, 11)
    assert torch.equal(before[:a], after[:a]) and torch.equal(before[b:], after[b:])
    assert not torch.equal(before[a:b], after[a:b])


def test_the_corpus_is_complete_and_a_twentieth_is_held_out():
    trained_on, held_out = read_corpora()
    assert len(trained_on.ends) + len(held_out.ends) == 1189 and len(held_out.ends) == 59
    total = len(trained_on.tokens) + len(held_out.tokens)
    assert total == 4_139_037 - 2 * 1188 + 1189  # an end for what stood between chapters
    assert bytes(trained_on.tokens[:16].tolist()) == b"In the beginning"
