"""Incremental texts: shown characters do not change, and no character is cut."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from onchip.engine.detokenizer import Detokenizer, decode_text
from onchip.engine.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
WORDS = ["naïve café", "日本語のテキスト", "👩‍👩‍👧 family", "plain words, and more", "\n\ttabs  "]


class Library:
    """A tokenizer of the library, as FileTokenizer wraps one."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text):
        return self.tokenizer.encode(text).ids

    def decode(self, token_ids):
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def byte_level():
    """Like GPT-2's and Llama 3's: tokens are pieces of bytes, also of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS[:1] + WORDS[3:], trainer)
    return Library(tokenizer)


def sentence_piece():
    """Like Llama 2's: words begin with a mark, and unknown characters are bytes."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"<unk>": 256}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz,", "▁w", "or", "ds"):
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "w"), ("o", "r"), ("d", "s")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Library(tokenizer)


TOKENIZERS = {"bytes": lambda: BYTES, "byte_level": byte_level, "sentence_piece": sentence_piece}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def shown(detokenizer, token_ids, size=1):
    """The visible text after each push of tokens, and at the end."""
    texts = []
    for i in range(0, len(token_ids), size):
        assert detokenizer.push(token_ids[i : i + size]) is None
        texts.append(str(detokenizer.text))
    assert detokenizer.finish() is None
    return [*texts, str(detokenizer.text)]


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("words", [*WORDS, " ".join(WORDS) * 3])
def test_a_text_grows_to_itself(tokenizer, words, size):
    prompt, whole = tokenizer.encode("words,"), tokenizer.encode("words, " + words)
    token_ids = whole[len(prompt) :]
    texts = shown(Detokenizer(tokenizer, prompt), token_ids, size)
    assert texts[-1] == " " + words == decode_text(tokenizer, prompt, token_ids)
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before) and "\ufffd" not in before


@given(st.text(max_size=40), st.text(max_size=9))
def test_any_text_by_bytes(text, prompt):
    texts = shown(Detokenizer(BYTES, BYTES.encode(prompt)), BYTES.encode(text))
    assert texts[-1] == text
    assert all(text.startswith(one) for one in texts)


@given(st.lists(st.integers(0, 256), max_size=200), st.integers(1, 5))
def test_any_bytes_valid_or_not(token_ids, size):
    """Shown characters do not change, and the end equals the text of all tokens."""
    texts = shown(Detokenizer(BYTES, []), token_ids, size)
    assert texts[-1] == BYTES.decode(token_ids)
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before)


def test_invalid_bytes_are_shown_eventually_at_bounded_cost():
    draw = random.Random(0)
    noise = [
        draw.randrange(128, 192) for _ in range(500)
    ]  # continuation bytes without a first byte
    counts = []

    class Counting(ByteTokenizer):
        def decode(self, token_ids):
            counts.append(len(token_ids))
            return super().decode(token_ids)

    texts = shown(Detokenizer(Counting(), []), [*noise, *"end€".encode()])
    assert texts[-1] == "\ufffd" * 500 + "end€"
    assert max(counts) <= 65 and len(texts[-2]) >= 503


def stopped(text, stops, prompt="", **options):
    detokenizer = Detokenizer(BYTES, BYTES.encode(prompt), stops)
    texts = []
    for token in BYTES.encode(text):
        stop = detokenizer.push([token], **options)
        texts.append(str(detokenizer.text))
        if stop:
            return str(detokenizer.text), stop, texts
    return str(detokenizer.text), detokenizer.finish(), [*texts, str(detokenizer.text)]


@pytest.mark.parametrize(
    "text, stops, expected, which",
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("one STO two", ["STOP"], "one STO two", None),
        ("aaab", ["aab"], "a", "aab"),
        ("say wörld", ["ö", "rld"], "say w", "ö"),
        ("x\n\ny", ["\n\n", "\n"], "x", "\n"),
        ("STOP", ["STOP"], "", "STOP"),
    ],
)
def test_a_stop_string_and_its_beginning_are_never_output(text, stops, expected, which):
    got, stop, seen = stopped(text, stops)
    assert stop == which and seen[-1] == expected
    assert got == expected or which is None
    assert all(expected.startswith(one) for one in seen)


def test_a_stop_text_in_the_prompt_does_not_count():
    assert stopped("OP here", ["STOP"], prompt="ST")[1] is None


def test_a_stop_text_counts_from_where_a_sample_may_stop():
    detokenizer = Detokenizer(BYTES, [], ["ab"])
    assert detokenizer.push(b"xa", search=False) is None
    assert detokenizer.push(b"b") is None, "its beginning came too early"
    assert detokenizer.push(b"ab") == "ab" and str(detokenizer.text) == "xab"


def test_several_tokens_at_once_end_before_the_first_stop():
    detokenizer = Detokenizer(BYTES, [], ["two", "one"])
    assert detokenizer.push(b"zero one two") == "one" and str(detokenizer.text) == "zero "
