"""A misbehaving client harms only itself; if the engine fails, every client gets an error."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

VOCAB = 257
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "abc", "max_tokens": 4000}


def events(response):
    """The data of a stream's events."""
    lines = response.read().decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


class TestQuestions:
    @pytest.mark.parametrize(
        ("body", "status", "word"),
        [
            (b"{", 400, "JSON"),
            (b"", 400, "application/json"),
            (b"[]", 400, "body"),
            (b"null", 400, "body"),
            (b"\xff\xfe", 400, "JSON"),
            (b'{"prompt": "a", "temperature": NaN}', 400, "JSON"),
            (b'{"prompt": "a", "temperature": Infinity}', 400, "JSON"),
            (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
            (b'{"prompt": "\\ud800"}', 400, "JSON"),
            (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "JSON"),
            (b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}", 400, "JSON"),
            ({"prompt": ""}, 400, "empty"),
            ({"prompt": []}, 400, "prompt"),
            ({"prompt": [257]}, 400, "257"),
            ({"prompt": [-1]}, 400, "prompt"),
            ({"prompt": [[1], ["a"]]}, 400, "prompt"),
            ({"prompt": ["a"] * 129}, 400, "prompt"),
            ({"prompt": ["a"] * 100, "n": 100}, 400, "512"),
            ({"prompt": "a", "n": 10**6}, 400, "n="),
            ({"prompt": "a", "n": 10**30}, 400, "n="),
            ({"prompt": "a", "n": True}, 400, "n="),
            ({"prompt": "a", "n": "2"}, 400, "n="),
            ({"prompt": "a", "stop": ["x"] * 500_000}, 400, "stop"),
            ({"prompt": "a", "stop": "x" * 1000}, 400, "stop"),
            ({"prompt": "a", "stop": ""}, 400, "stop"),
            ({"prompt": "a", "logprobs": 10**6}, 400, "logprobs"),
            ({"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias"),
            ({"prompt": "a", "logit_bias": {str(i): 0 for i in range(301)}}, 400, "logit_bias"),
            ({"prompt": "a", "max_tokens": 0}, 400, "echo"),
            ({"prompt": "a", "max_tokens": 5, "min_tokens": 9}, 400, "min_tokens"),
            ({"prompt": "a", "priority": -1}, 400, "priority"),
            ({"prompt": "a", "deadline_s": 0}, 400, "deadline_s"),
            ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
            ({"prompt": "a", "best_of": 3, "stream": True}, 400, "streamed"),
            ({"prompt": "a", "nonsense": 1}, 400, "Unrecognized request argument"),
            ({"prompt": "a" * 5000}, 400, "too many"),
            ({"prompt": "a" * (5 << 20)}, 413, "larger than"),
            ({"prompt": "a", "model": "other"}, 404, "no model 'other'"),
            ({"prompt": "break me"}, 500, "KeyError"),
        ],
    )
    def test_a_bad_question_is_answered_by_a_sentence(self, shared, ask, body, status, word):
        started = time.monotonic()
        got, answer, _ = ask(shared, COMPLETIONS, body)
        assert got == status and word in answer["error"]["message"], answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(answer["error"]["message"]) < 500 and time.monotonic() - started < 5
        assert ask(shared, COMPLETIONS, {"prompt": "abc", "max_tokens": 2})[0] == 200

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "has no grammars"),
            ({"response_format": {"type": "yaml"}}, "response_format"),
            ({"top_logprobs": 2}, "logprobs=true"),
            ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
            ({"store": True}, "store"),
        ],
    )
    def test_chats_refuse_what_they_cannot_do(self, shared, ask, change, word):
        body = {"messages": [{"role": "user", "content": "a"}]} | change
        status, answer, _ = ask(shared, CHATS, body)
        assert status == 400 and word in answer["error"]["message"], answer

    def test_other_content_types_are_rejected(self, shared, ask):
        """A page of another origin may send text, but not JSON, without a preflight request."""
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {"content-type": kind}
            assert ask(shared, COMPLETIONS, b'{"prompt": "a"}', **headers)[0] == 400

    def test_a_body_without_an_end_is_cut_off(self, shared, connect):
        connection = connect(shared)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("content-type", "application/json")
        connection.putheader("transfer-encoding", "chunked")
        connection.endheaders()
        chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
        with pytest.raises(OSError, match="reset|pipe"):
            for _ in range(64):
                connection.send(chunk)
        connection.close()

    def test_headers_without_an_end_are_refused(self, shared, connect):
        connection = connect(shared)
        connection.putrequest("GET", "/health")
        connection.putheader("x-long", "a" * (1 << 20))
        try:
            connection.endheaders()
            assert connection.getresponse().status == 400
            while connection.sock and connection.sock.recv(4096):
                pass
        except ConnectionError:
            pass  # the connection ended before all was sent
        connection.close()

    def test_unknown_paths_and_methods_get_the_same_error_object(self, shared, ask):
        assert ask(shared, "/v1/nonsense")[1]["error"]["type"] == "invalid_request_error"
        status, answer, headers = ask(shared, COMPLETIONS)
        assert status == 405 and answer["error"] and headers["allow"] == "POST"

    def test_a_foreign_host_name_does_not_reach_a_local_server(self, serving, fake, ask):
        with serving(fake(), hosts=frozenset({"127.0.0.1"})) as (url, _):
            assert ask(url, "/v1/models")[0] == 200
            status, answer, _ = ask(url, "/v1/models", host="evil.example")
            assert status == 421 and "evil.example" in answer["error"]["message"]


class TestClients:
    def test_a_client_that_hangs_up_mid_stream_is_cancelled(
        self, serving, fake, open_stream, until
    ):
        engine = fake(step_s=0.005)
        with serving(engine) as (url, server):
            connection = open_stream(url, **LONG)
            connection.getresponse().fp.readline()
            assert engine.requests
            connection.close()
            connection.sock = None
            until(lambda: not engine.requests)
            assert len(engine.cancelled) == 1 and server.service.num_open == 0

    def test_a_client_that_hangs_up_while_it_waits_is_cancelled(
        self, serving, fake, open_stream, until
    ):
        engine = fake(step_s=0.005)
        with serving(engine) as (url, server):
            connection = open_stream(url, **LONG, stream=False)
            until(lambda: engine.requests)
            connection.close()
            until(lambda: not engine.requests)
            assert engine.cancelled and server.service.num_open == 0

    def test_a_reader_that_takes_nothing_delays_no_other_client(
        self, serving, fake, open_stream, ask, until
    ):
        engine = fake()
        with serving(engine) as (url, _):
            connection = open_stream(url, max_tokens=300, n=16)
            until(lambda: engine.requests)
            started = time.monotonic()
            for _ in range(5):
                assert ask(url, COMPLETIONS, {"prompt": "abc", "max_tokens": 3})[0] == 200
            assert time.monotonic() - started < 10
            until(lambda: not engine.requests)  # although no byte of it was read
            chunks = [json.loads(e) for e in events(connection.getresponse())[:-1]]
            texts = ["".join(c["text"] for c in one) for one in by_index(chunks)]
            assert [len(text) for text in texts] == [300] * 16

    @pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux can tell")
    def test_a_stuck_reader_is_disconnected(self, serving, fake, until, monkeypatch):
        monkeypatch.setattr("onchip.server.process.STUCK_CLIENT_MS", 1000)
        engine = fake(step_s=0.001)
        body = json.dumps({**LONG, "n": 64, "logprobs": 2, "stream": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        with serving(engine) as (url, server), socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            host, port = url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            client.sendall(head.encode() + body)
            until(lambda: engine.cancelled, 30)
            assert server.service.num_open == 0

    def test_a_request_that_breaks_add_fails_alone(self, serving, fake, ask, open_stream):
        engine = fake(step_s=0.001)
        with serving(engine) as (url, _):
            connection = open_stream(url, max_tokens=50)
            assert ask(url, COMPLETIONS, {"prompt": ["a", "break me"]})[0] == 500
            assert len(events(connection.getresponse())) > 2
            assert ask(url, "/health")[0] == 200 and not engine.requests

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_failed_prompt_ends_only_its_own_call(
        self, serving, fake, ask, open_stream, until, stream
    ):
        engine = fake(step_s=0.002)
        with serving(engine) as (url, _):
            other = open_stream(url, max_tokens=300)
            body = {"prompt": ["abc", "fail"], "max_tokens": 4000, "stream": stream}
            status, answer, _ = ask(url, COMPLETIONS, body)
            if stream:
                answer = json.loads(answer.split("\n\n")[-3].removeprefix("data: "))
            assert status == (200 if stream else 500)
            assert "the model failed" in answer["error"]["message"]
            until(lambda: len(engine.requests) == 1)
            assert events(other.getresponse())[-1] == "[DONE]"

    def test_a_full_queue_gets_a_429_with_retry_after(self, serving, fake, ask, open_stream, until):
        engine = fake(step_s=0.002, max_running=1, max_waiting=2)
        with serving(engine) as (url, _):
            taken = [open_stream(url, max_tokens=200, prompt="abc") for _ in range(3)]
            until(lambda: len(engine.requests) == 3)
            status, answer, headers = ask(url, COMPLETIONS, {"prompt": "a"})
            assert status == 429 and answer["error"]["code"] == "queue_full"
            assert int(headers["retry-after"]) >= 1
            assert all(events(c.getresponse())[-1] == "[DONE]" for c in taken)

    def test_all_prompts_of_a_call_are_accepted_or_none(self, serving, fake, ask):
        engine = fake(max_running=1, max_waiting=2)
        with serving(engine) as (url, _):
            status, _, _ = ask(url, COMPLETIONS, {"prompt": ["a"] * 4, "max_tokens": 4000})
            assert status == 429 and not engine.requests

    def test_max_open_is_kept(self, serving, fake, ask, open_stream, until):
        engine = fake(step_s=0.002)
        with serving(engine, max_open=2, drain_s=0.0) as (url, server):
            taken = [open_stream(url, **LONG) for _ in range(2)]
            until(lambda: server.service.num_open == 2)
            assert ask(url, COMPLETIONS, {"prompt": "a"})[0] == 429
            assert len(taken) == 2

    def test_slow_uploads_are_open_requests_too(self, serving, fake, ask, connect, until):
        """300 clients send a body byte by byte: up to the limit they are read, the others get a 429
        with Retry-After at once, and a client that hangs up frees its place.
        """
        body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()

        def upload(url):
            connection = connect(url)
            connection.putrequest("POST", COMPLETIONS)
            connection.putheader("content-type", "application/json")
            connection.putheader("content-length", str(len(body)))
            connection.endheaders(body[:1])
            return connection

        with serving(fake(), max_open=120) as (url, server):
            service, slow = server.service, [upload(url) for _ in range(120)]
            until(lambda: service.num_incoming == 120)
            late = [upload(url).getresponse() for _ in range(180)]
            assert {answer.status for answer in late} == {429} and service.num_incoming == 120
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in late)
            assert ask(url, "/v1/models")[0] == ask(url, "/health")[0] == 200
            for connection in slow[60:]:
                connection.close()
            until(lambda: service.num_incoming == 60)
            assert ask(url, COMPLETIONS, body)[0] == 200
            for connection in slow[:60]:
                connection.send(body[1:])
            assert {connection.getresponse().status for connection in slow[:60]} == {200}
            until(lambda: service.num_incoming == service.num_open == 0)

    def test_a_server_with_max_open_1_serves_requests(self, serving, fake, ask):
        """A request does not count twice while it is read."""
        with serving(fake(), max_open=1) as (url, _):
            assert [ask(url, COMPLETIONS, {"prompt": "a"})[0] for _ in range(3)] == [200] * 3

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_deadline_is_kept(self, serving, fake, ask, open_stream, stream):
        with serving(fake(step_s=0.005), max_request_s=60.0) as (url, _):
            body = {**LONG, "deadline_s": 0.2}
            if stream:
                error = json.loads(events(open_stream(url, **body).getresponse())[-2])["error"]
            else:
                status, answer, _ = ask(url, COMPLETIONS, body)
                error = answer["error"]
                assert status == 408
            assert error["code"] == "deadline" and "not done within 0.2 s" in error["message"]

    def test_no_request_takes_longer_than_max_request_s(self, serving, fake, ask):
        with serving(fake(step_s=0.005), max_request_s=0.2) as (url, _):
            assert ask(url, COMPLETIONS, {**LONG, "deadline_s": 1000})[0] == 504


class TestEngine:
    def test_if_it_dies_all_pending_calls_fail(self, serving, fake, ask, open_stream, until):
        engine = fake(step_s=0.005, max_running=2)
        with serving(engine) as (url, server), ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(ask, url, COMPLETIONS, LONG) for _ in range(4)]
            streams = [open_stream(url, **LONG) for _ in range(4)]
            until(lambda: len(engine.requests) == 8)
            assert ask(url, "/health")[0] == 200
            engine.boom = RuntimeError("secret")
            for answer in waiting:
                status, body, _ = answer.result(10)
                assert status == 503 and body["error"]["code"] == "engine_dead"
                assert "secret" not in str(body)
            for stream in streams:
                *_, failure, done = events(stream.getresponse())
                assert json.loads(failure)["error"]["code"] == "engine_dead" and done == "[DONE]"
            status, health, _ = ask(url, "/health")
            assert status == 503 and health == {"status": "dead", "reason": "RuntimeError"}
            assert ask(url, "/ready")[0] == 503
            assert ask(url, COMPLETIONS, LONG)[0] == 503
            assert 'onchip_state{state="dead"} 1.0' in ask(url, "/metrics")[1]
            assert server.service.num_open == 0
        assert engine.closed

    def test_if_it_dies_while_rejecting_a_call_the_call_fails(self, serving, fake, ask):
        """The second prompt is invalid, so the first is cancelled: by a step that fails."""
        engine = fake()
        engine.boom = RuntimeError("gone")
        with serving(engine) as (url, _):
            status, reply, _ = ask(url, COMPLETIONS, {"prompt": [[1], [VOCAB]]})
            assert status == 503 and reply["error"]["code"] == "engine_dead"

    def test_a_hanging_step_makes_the_server_not_ready(
        self, serving, fake, ask, open_stream, until
    ):
        engine = fake()
        with serving(engine, max_stall_s=0.1) as (url, _):
            assert ask(url, "/ready")[1]["last_step_age_s"] is None
            assert ask(url, COMPLETIONS, {"prompt": "a"})[0] == 200
            status, ready, _ = ask(url, "/ready")
            assert status == 200 and ready["last_step_age_s"] < 5 and ready["step_age_s"] == 0
            engine.step_s = 1.0
            connection = open_stream(url, max_tokens=1)
            until(lambda: ask(url, "/ready")[0] == 503)
            assert ask(url, "/ready")[1]["status"] == "stalled"
            assert ask(url, "/health")[0] == 200
            assert events(connection.getresponse())[-1] == "[DONE]"
            until(lambda: ask(url, "/ready")[0] == 200)

    def test_a_deadline_is_kept_while_a_step_hangs(self, serving, fake, ask, monkeypatch):
        monkeypatch.setattr("onchip.server.streaming.GRACE_S", 0.1)
        with serving(fake(step_s=1.0)) as (url, _):
            started = time.monotonic()
            assert ask(url, COMPLETIONS, {**LONG, "deadline_s": 0.1})[0] == 408
            assert time.monotonic() - started < 0.9

    def test_a_drain_finishes_what_runs_and_takes_nothing_new(
        self, serving, fake, ask, open_stream, until
    ):
        engine = fake(step_s=0.01)
        with serving(engine) as (url, server), ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, url, COMPLETIONS, {"prompt": "abc", "max_tokens": 60})
            until(lambda: engine.requests)
            loop = server.service._loop
            loop.call_soon_threadsafe(lambda: loop.create_task(server.service.drain(30)))
            until(lambda: ask(url, "/ready")[0] == 503)
            assert ask(url, "/ready")[1]["status"] == "draining" and ask(url, "/health")[0] == 200
            status, answer, headers = ask(url, COMPLETIONS, {"prompt": "abc"})
            assert (
                status == 503 and answer["error"]["code"] == "shutdown" and headers["retry-after"]
            )
            assert running.result(10)[1]["usage"]["completion_tokens"] == 60

    def test_calls_that_a_drain_cannot_finish_get_an_error(
        self, serving, fake, ask, open_stream, until
    ):
        engine = fake(step_s=0.01)
        with ThreadPoolExecutor(1) as pool:
            with serving(engine, drain_s=0.2) as (url, _):
                whole = pool.submit(ask, url, COMPLETIONS, LONG)
                stream = open_stream(url, **LONG)
                until(lambda: len(engine.requests) == 2)
            status, answer, _ = whole.result(10)
            assert status == 503 and answer["error"]["code"] == "shutdown"
            assert json.loads(events(stream.getresponse())[-2])["error"]["code"] == "shutdown"
        assert engine.closed and not engine.requests


def by_index(chunks):
    """The choices of a stream, grouped by choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    indices = sorted({choice["index"] for choice in choices})
    return [[c for c in choices if c["index"] == i] for i in indices]
