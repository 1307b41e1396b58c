"""Templates and tokenizers of hostile folders end only their own process, within time and
memory.
"""

import json
import os
import time

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from onchip.engine import text_worker_pool
from onchip.engine.text_worker_pool import JobEnded, TextWorker, TextWorkerPool
from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer

TALK = [{"role": "user", "content": "hi"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def templates():
    with TextWorkerPool(1) as some:
        yield some


@pytest.fixture
def folder(tmp_path):
    ByteTokenizer().save(tmp_path)
    return tmp_path


def rewrite(folder, **parts):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


def test_a_worker_renders_encodes_and_decodes(folder):
    with TextWorkerPool(1, folder) as some:
        assert some.render("{{ messages[0].content }}{{ a }}", TALK, {"a": "!"}, {}) == "hi!"
        assert some.encode("né€", True) == list("né€".encode())
        assert some.decode([*b"ab", 256]) == "ab"
        assert some.decode([*b"ab", 256], skip_special_tokens=False) == "ab<|endoftext|>"


def test_a_worker_imports_no_torch_and_sees_no_secret(monkeypatch):
    monkeypatch.setenv("ONCHIP_API_KEYS", "secret-key-of-a-tenant")
    one = TextWorker()
    try:
        pid = one._process.pid
        with open(f"/proc/{pid}/environ") as environ, open(f"/proc/{pid}/maps") as maps:
            assert "secret" not in environ.read() and "libtorch" not in maps.read()
    except FileNotFoundError:
        pytest.skip("no /proc here")
    finally:
        one.close()


def test_a_template_that_loops_is_killed_and_the_next_one_runs(templates):
    started = time.monotonic()
    with pytest.raises(JobEnded, match=r"template was ended: not done within 0\.3 s") as caught:
        templates.render(LOOP, TALK, {}, {}, seconds=0.3)
    assert caught.value.late and time.monotonic() - started < 5
    assert templates.render("{{ 1 }}", TALK, {}, {}) == "1"


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is bounded on Linux")
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{% set n = namespace(x='a') %}"
        "{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 10 ** 100000000 }}",
    ],
)
def test_memory_is_bounded(template):
    one = TextWorker(job_bytes=64 << 20)
    try:
        with pytest.raises(ValueError):
            one.run("render", 1.0, template=template, messages=TALK, special={}, options={})
        if one._process.poll() is None:
            with open(f"/proc/{one._process.pid}/status") as status:
                (peak,) = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
            assert peak < 150 << 10
    finally:
        one.close()


def test_a_rendered_text_that_is_too_long_is_rejected(templates):
    with pytest.raises(ValueError, match="wrote 33554433 characters"):
        templates.render("{{ 'a' * (2 ** 25 + 1) }}", TALK, {}, {})


def test_errors_of_a_template_are_passed_on(templates):
    with pytest.raises(ValueError, match="no system"):
        templates.render("{{ raise_exception('no system') }}", TALK, {}, {})
    with pytest.raises(ValueError, match="must be JSON"):
        templates.render("{{ x }}", TALK, {}, {"x": object()})
    assert templates.render("{{ x.y }}", TALK, {}, {"x": {"y": "\ud800"}}) == "\ud800"


def test_a_process_that_was_killed_while_idle_is_replaced(templates):
    templates.start()
    templates._idle[-1]._process.kill()
    templates._idle[-1]._process.wait()
    assert templates.render("{{ 2 }}", TALK, {}, {}) == "2"


def test_closed_workers_end_what_runs():
    some = TextWorkerPool(1)
    some.start()
    assert len(some._idle) == 1
    process = some._idle[0]._process
    some.close()
    assert process.poll() is not None
    with pytest.raises(JobEnded, match="closed"):
        some.render("x", TALK, {}, {})


def merged_into_nothing():
    """Merges with a second half shorter than continuing_subword_prefix."""
    vocab = {"a": 0, "é": 1, "ab": 2}
    return {"type": "BPE", "vocab": vocab, "merges": ["a é"], "continuing_subword_prefix": "éé"}


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": merged_into_nothing()},
    ],
    ids=["charsmap", "merges"],
)
def test_a_panic_while_loading_is_a_value_error(folder, part, capfd):
    """The library panics at each: a BaseException, which `except Exception` does not catch."""
    rewrite(folder, **part)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        FileTokenizer(folder)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        TextWorker(folder)
    capfd.readouterr()  # a panic prints pages


def test_a_panic_while_encoding_is_a_value_error(folder, capfd):
    rewrite(folder, pre_tokenizer={"type": "FixedLength", "length": 0})
    with pytest.raises(ValueError, match="cannot encode the text: chunk size"):
        FileTokenizer(folder).encode("abc")
    with TextWorkerPool(1, folder) as some:
        with pytest.raises(ValueError, match="cannot encode the text: chunk size"):
            some.encode("abc", True)
        assert some.decode([97]) == "a"
    capfd.readouterr()


def test_a_panic_while_decoding_is_a_value_error(folder, capfd):
    rewrite(folder, decoder={"type": "Strip", "content": "a", "start": 0, "stop": 5})
    with pytest.raises(ValueError, match="cannot decode the tokens"):
        FileTokenizer(folder).decode([97])
    capfd.readouterr()


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


BOMB = [replace({"String": "a"}, "a" * 100)] * 6


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Sequence", "normalizers": BOMB}},
        {"decoder": {"type": "Sequence", "decoders": BOMB}},
        {"normalizer": replace({"Regex": ""}, "a" * 300)},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 2000}},
    ],
    ids=["normalizer", "decoder", "empty match", "prepend"],
)
def test_steps_that_expand_a_text_without_bound_are_refused(folder, part):
    rewrite(folder, **part)
    with pytest.raises(ValueError, match="times as long|at once"):
        FileTokenizer(folder)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is bounded on Linux")
def test_a_tokenizer_that_expands_while_it_is_loaded_ends_its_worker(folder, monkeypatch):
    """An added token is normalized while loading: 10^12 characters."""
    monkeypatch.setattr(text_worker_pool, "LOAD_BYTES", 256 << 20)
    token = {"id": 257, "content": "a", "special": False, "normalized": True}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    rewrite(folder, normalizer={"type": "Sequence", "normalizers": BOMB}, added_tokens=[token])
    with pytest.raises(ValueError, match="its process ran out|too much memory|is not a tokenizer"):
        TextWorker(folder)


def test_padding_and_truncation_of_a_file_are_ignored(folder):
    rewrite(
        folder,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            **{"strategy": {"Fixed": 1 << 20}, "direction": "Right", "pad_to_multiple_of": None},
            **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
        },
    )
    assert FileTokenizer(folder).encode("abc") == [97, 98, 99]


def built(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return FileTokenizer(tmp_path)


def letters(**more):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*alphabet, "ab", "abab"])}
    merges = [("a", "b"), ("ab", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, value in more.items():
        setattr(tokenizer, name, value)
    return tokenizer


class TestCharactersOfAToken:
    def test_the_longest_token_bounds_them(self, tmp_path):
        assert ByteTokenizer().chars_per_token == 1
        assert built(tmp_path, letters()).chars_per_token == 4

    def test_normal_forms_compose(self, tmp_path):
        one = built(tmp_path, letters(normalizer=normalizers.NFC()))
        assert one.chars_per_token == 16
        text = "\u03b1\u0313\u0300\u0345" * 50  # four characters become one, of three bytes
        assert len(text) <= one.chars_per_token * len(one.encode(text))

    @pytest.mark.parametrize(
        "change",
        [
            {"normalizer": normalizers.Strip()},
            {"normalizer": normalizers.Replace(" ", "")},
            {"pre_tokenizer": pre_tokenizers.Whitespace()},
            {"pre_tokenizer": pre_tokenizers.Split("a", "removed")},
        ],
        ids=["strip", "replace", "whitespace", "split"],
    )
    def test_what_drops_characters_has_no_bound(self, tmp_path, change):
        assert built(tmp_path, letters(**change)).chars_per_token is None

    def test_unknown_characters_may_be_one_token(self, tmp_path):
        model = models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)
        one = built(tmp_path, Tokenizer(model))
        assert len(one.encode("b" * 100)) == 1 and one.chars_per_token is None


class TestBytesOfAToken:
    def test_byte_level(self, tmp_path):
        one = built(tmp_path, letters())
        ids = one.encode("né€ ab")
        assert b"".join(map(one.token_bytes, ids)) == "né€ ab".encode()
        assert len(ids) == len("né€ ".encode()) + 1

    def test_sentence_piece(self, tmp_path):
        vocab = {f"<0x{i:02X}>": i for i in range(256)} | {
            "<unk>": 256,
            "▁": 257,
            "a": 258,
            "▁a": 259,
        }
        model = models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        tokenizer.add_special_tokens(["</s>"])
        one = built(tmp_path, tokenizer)
        assert b"".join(map(one.token_bytes, one.encode("a a\n€"))) == "a a\n€".encode()
        end = tokenizer.token_to_id("</s>")
        assert one.token_bytes(end) == b"</s>" and one.is_special(end) and not one.is_special(0)
        assert one.token_bytes(10**6) == b""  # a row of the embedding without a token
