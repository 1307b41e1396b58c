"""Templates and tokenizers before the engine: bounded, and isolated from other requests."""

import threading
import time

import pytest

from onchip.engine import text_worker_pool
from onchip.engine.request import Logprob
from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer
from onchip.server import codec
from onchip.server.codec import Codec, TokenText, text_offsets
from onchip.server.responses import ChoiceDelta, CompletionBuilder

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def folder_engine(fake, folder, template=None, **knobs):
    """An engine with the tokenizer of a folder and a given template."""
    ByteTokenizer().save(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    engine = fake(**knobs)
    engine.tokenizer = FileTokenizer(folder)
    return engine


@pytest.mark.slow
def test_a_template_that_loops_delays_no_plain_prompt(fake, tmp_path, serving, ask, monkeypatch):
    monkeypatch.setattr(text_worker_pool, "JOB_S", 0.5)
    answers = []
    with serving(folder_engine(fake, tmp_path, LOOP)) as (url, _):
        chat = lambda: answers.append(ask(url, CHATS, {"messages": HELLO}))
        threads = [threading.Thread(target=chat) for _ in range(8)]
        for thread in threads:
            thread.start()
        waited = []
        for _ in range(5):
            started = time.monotonic()
            assert ask(url, COMPLETIONS, {"prompt": "abc", "max_tokens": 3})[0] == 200
            waited.append(time.monotonic() - started)
        assert threads[-1].is_alive() or answers
        for thread in threads:
            thread.join()
    assert max(waited) < 2
    assert {status for status, _, _ in answers} == {400}
    assert all("not done within 0.5 s" in a["error"]["message"] for _, a, _ in answers)
    assert all(a["error"]["code"] == "text_limit" for _, a, _ in answers)


def test_the_deadline_covers_the_template(fake, tmp_path, serving, ask):
    with serving(folder_engine(fake, tmp_path, LOOP)) as (url, _):
        started = time.monotonic()
        status, answer, _ = ask(url, CHATS, {"messages": HELLO, "deadline_s": 0.4})
        assert status == 408 and "not done within 0.4 s" in answer["error"]["message"]
        assert time.monotonic() - started < 5
    with serving(folder_engine(fake, tmp_path, LOOP), max_request_s=0.4) as (url, _):
        assert ask(url, CHATS, {"messages": HELLO})[0] == 504


def test_the_deadline_covers_the_wait_for_a_process(fake, tmp_path, serving, ask, monkeypatch):
    """All processes are busy for three seconds: a waiting request leaves at its own deadline."""
    monkeypatch.setattr(text_worker_pool, "JOB_S", 3.0)
    with serving(folder_engine(fake, tmp_path, LOOP)) as (url, _):
        chat = lambda: ask(url, CHATS, {"messages": HELLO})
        threads = [threading.Thread(target=chat) for _ in range(codec.PROCESSES)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        started = time.monotonic()
        assert ask(url, CHATS, {"messages": HELLO, "deadline_s": 0.2})[0] == 408
        assert time.monotonic() - started < 2
        for thread in threads:
            thread.join()


def test_a_template_that_takes_all_memory_fails_alone(fake, tmp_path, serving, ask):
    with serving(folder_engine(fake, tmp_path, "{{ 'a' * 10 ** 11 }}")) as (url, _):
        status, answer, _ = ask(url, CHATS, {"messages": HELLO})
        assert status == 400 and "the chat template failed" in answer["error"]["message"]
        assert ask(url, "/ready")[0] == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    fake, tmp_path, serving, ask, monkeypatch
):
    engine = folder_engine(fake, tmp_path)
    with serving(engine) as (url, server):
        monkeypatch.setattr(server.codec._tokenizer_queue.workers, "encode", pytest.fail)
        status, answer, _ = ask(url, COMPLETIONS, {"prompt": "a" * (3 << 20)})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        # of this tokenizer the longest token is <|endoftext|>
        assert "3145728 characters are too many: a token has 13" in answer["error"]["message"]


def test_a_chat_is_quick(fake, tmp_path, serving, ask):
    """A template and a tokenizer in separate processes: a few milliseconds even on a slow
    machine.
    """
    with serving(folder_engine(fake, tmp_path)) as (url, _):
        took = []
        for _ in range(15):
            started = time.monotonic()
            assert ask(url, CHATS, {"messages": HELLO, "max_tokens": 1})[0] == 200
            took.append(time.monotonic() - started)
    assert sorted(took)[len(took) // 2] < 0.2


def test_a_tokenizer_object_runs_in_the_server_process(fake, serving, ask):
    class Own:
        """The minimal tokenizer protocol."""

        chat_template, special, eos_token_ids = "{{ messages[0].content }}", {}, ()

        def encode(self, text, *, add_special_tokens=True):
            return list(text.encode())

        def decode(self, token_ids):
            return bytes(token_ids).decode(errors="replace")

    engine = fake()
    engine.tokenizer = Own()
    with serving(engine) as (url, _):
        body = {"messages": HELLO, "max_tokens": 5, "logprobs": True}
        status, answer, _ = ask(url, CHATS, body)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "hello"
        assert answer["choices"][0]["logprobs"]["content"][0]["bytes"] == [104]


def test_without_a_template_or_a_tokenizer_there_is_no_chat(fake, tmp_path, serving, ask):
    engine = folder_engine(fake, tmp_path)
    engine.tokenizer.chat_template = None
    with serving(engine) as (url, _):
        status, answer, _ = ask(url, CHATS, {"messages": HELLO})
        assert status == 400 and "no chat_template" in answer["error"]["message"]
    engine = fake()
    engine.tokenizer = None
    with serving(engine) as (url, _):
        for path, body in ((CHATS, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
            status, answer, _ = ask(url, path, body)
            assert status == 400 and "no tokenizer" in answer["error"]["message"]
        assert ask(url, COMPLETIONS, {"prompt": [97], "max_tokens": 1})[0] == 200


class TestTokens:
    def test_a_token_has_the_bytes_that_it_writes(self, shared, ask):
        """The prompt's bytes come back one by one: three of a euro sign, none of them a
        valid text.
        """
        body = {"prompt": list("€".encode()), "max_tokens": 3, "logprobs": 1}
        (choice,) = ask(shared, COMPLETIONS, body)[1]["choices"]
        given = choice["logprobs"]
        assert given["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
        assert given["text_offset"] == [0, 0, 0] and choice["text"] == "€"
        # each table has the token and its neighbour
        assert [len(table) for table in given["top_logprobs"]] == [2, 2, 2]
        assert given["top_logprobs"][0] == {"bytes:\\xe2": -0.5, "bytes:\\xe3": -1.5}

    def test_a_chat_token_has_its_bytes(self, serving, fake, ask):
        engine = fake()
        engine.tokenizer.chat_template = "{{ messages[0].content }}"
        with serving(engine) as (url, _):
            body = {"messages": [{"role": "user", "content": "€"}], "max_tokens": 3}
            answer = ask(url, CHATS, body | {"logprobs": True, "top_logprobs": 2})[1]
        tokens = answer["choices"][0]["logprobs"]["content"]
        assert [t["bytes"] for t in tokens] == [[0xE2], [0x82], [0xAC]]
        assert bytes(b for t in tokens for b in t["bytes"]).decode() == "€"
        assert [t["token"] for t in tokens[0]["top_logprobs"]] == ["bytes:\\xe2", "bytes:\\xe3"]

    def test_two_tokens_of_one_text_are_two_keys(self):
        """As the byte token <0x41> and the token A of a SentencePiece vocabulary."""
        builder = CompletionBuilder("m", lambda token: TokenText("A", b"A"))
        table = {7: Logprob(-0.1, 1), 65: Logprob(-2.0, 2), 66: Logprob(-3.0, 3)}
        choice = builder.build_chunk(ChoiceDelta(0, "A", ((65, table),), 0)).choices[0]
        assert choice.logprobs.top_logprobs == [
            {"A": -0.1, "token_id:65": -2.0, "token_id:66": -3.0}
        ]

    def test_offsets_count_characters_that_are_shown(self):
        tokens = [TokenText("a", b"a"), TokenText("?", b"\xe2"), TokenText("?", b"\x82\xac!")]
        tokens += [TokenText("<s>", b"<s>", hidden=True), TokenText("b", b"b")]
        assert text_offsets(tokens, 5) == [5, 6, 6, 8, 8]

    def test_special_tokens_have_names(self, tmp_path):
        ByteTokenizer().save(tmp_path)
        some = Codec(FileTokenizer(tmp_path), 100)
        assert some.token(256) == TokenText("<|endoftext|>", b"<|endoftext|>", hidden=True)
        assert some.token(0x82) == TokenText("bytes:\\x82", b"\x82")
        some.close()
