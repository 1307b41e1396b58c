"""Connections: byte-level misbehaviour of clients, and their number."""

import logging
import signal
import socket
import time
from urllib.parse import urlsplit

import pytest

from onchip.server.app import Server, ServerOptions
from onchip.server.auth import MAX_HEAD_BYTES
from onchip.server.process import BackgroundServer

COMPLETIONS = "/v1/completions"


@pytest.fixture
def dial():
    """dial(url, data): a socket that has sent this data."""
    opened = []

    def connect(url, data=b""):
        parts = urlsplit(url)
        opened.append(socket.create_connection((parts.hostname, parts.port), timeout=20))
        opened[-1].sendall(data)
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


def read(client):
    """All bytes until the end of the connection."""
    data = b""
    try:
        while part := client.recv(65536):
            data += part
    except ConnectionError:  # closed with something unread
        pass
    return data


def post(*headers, body=b"{}", version="1.1"):
    lines = [f"POST {COMPLETIONS} HTTP/{version}", "host: a", "content-type: application/json"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status", "word"),
    [
        (post("content-length: 13", "transfer-encoding: chunked", body=CHUNKS), b"400", b"exclude"),
        (post("transfer-encoding: chunked", "content-length: 13", body=CHUNKS), b"400", b"exclude"),
        (post("transfer-encoding: chunked", body=CHUNKS, version="1.0"), b"400", b"exclude"),
        (post(f"x: {'a' * 70_000}", "content-length: 2"), b"431", b"head is larger"),
        (post(*[f"x{i}: {'a' * 90}" for i in range(700)], "content-length: 2"), b"431", b"head"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", b"431", b"head"),
        (b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", b"431", b"head"),
        (b"nonsense\r\n\r\n", b"400", b"not HTTP"),
        (post("content-length: 2", "content-length: 3"), b"400", b"not HTTP"),
        (post("transfer-encoding: gzip, chunked", body=CHUNKS), b"400", b"not HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400", b"not HTTP"),
    ],
)
def test_a_head_that_is_ambiguous_or_too_large_is_refused(shared, dial, request_, status, word):
    """In one read, in which h11 would accept it; the connection ends."""
    answer = read(dial(shared, request_))
    assert answer.split()[1] == status and word in answer, answer[:300]
    assert b"connection: close" in answer.lower() and answer.count(b"HTTP/1.1") == 1


def test_one_body_length_is_accepted(shared, dial):
    small = f"x: {'a' * (MAX_HEAD_BYTES - 1000)}"
    for header, body in (("transfer-encoding: chunked", CHUNKS), ("content-length: 2", b"{}")):
        client = dial(shared, post(header, small, "connection: close", body=body))
        assert b"prompt is missing" in read(client)


def test_nothing_a_client_sends_late_writes_a_traceback(shared, dial, caplog):
    """An invalid chunk, after the response has begun or ended."""
    caplog.set_level(logging.INFO)
    for body in (b"zz\r\n", b"ffffffffffffffffffffff\r\n", b"2\r\n{}zz\r\n"):
        client = dial(shared, post("transfer-encoding: chunked", body=body))
        assert b"400" in read(client)
    text = b'{"prompt": "abc", "max_tokens": 30, "stream": true}'
    client = dial(shared, post(f"content-length: {len(text)}", body=text))
    assert client.recv(10)
    client.sendall(b"nonsense\r\n\r\n")
    read(client)
    assert "Traceback" not in caplog.text and "rror" not in caplog.text


def test_idle_connections_are_closed_for_new_ones(fake, ask, dial):
    """More connections than allowed, all silent or slow: the oldest of them are closed."""
    server = Server(fake(), ServerOptions("fake"))
    with BackgroundServer(server, max_connections=20) as url:
        silent = [dial(url, b"GET /health HTTP/1.1\r\nx: " * (i % 2)) for i in range(60)]
        for _ in range(3):
            assert ask(url, "/health")[0] == 200
        assert silent[0].recv(1) == b"" and silent[39].recv(1) == b""
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)


def test_a_connection_beyond_the_limit_gets_a_503(fake, ask, open_stream, dial, until):
    """All connections are busy: none is closed for a new one."""
    engine = fake(step_s=0.02)
    background = BackgroundServer(
        Server(engine, ServerOptions("fake")), max_connections=3, drain_s=0.0
    )
    with background as url:
        streams = [open_stream(url, max_tokens=4000) for _ in range(3)]
        until(lambda: len(engine.requests) == 3)
        answer = read(dial(url))
        assert b" 503 " in answer and b"all connections are in use" in answer
        streams[0].close()
        until(lambda: len(engine.requests) == 2)
        assert ask(url, "/health")[0] == 200 and len(engine.requests) == 2


def test_a_body_that_arrives_during_shutdown_is_rejected(fake, dial, until, caplog):
    """SIGTERM while a client is sending: it gets an error, and no traceback is logged."""
    caplog.set_level(logging.INFO)
    background = BackgroundServer(Server(fake(), ServerOptions("fake")), drain_s=20.0)
    started = time.monotonic()
    with background as url:
        client = dial(url, post("content-length: 1000"))
        until(lambda: background.process.server.service.num_incoming == 1)
        background.process.handle_exit(signal.SIGTERM)
        answer = read(client)
    assert b" 503 " in answer and b"shutting down" in answer
    assert "Traceback" not in caplog.text and "rror" not in caplog.text
    assert time.monotonic() - started < 15


def test_a_client_that_does_not_read_does_not_delay_the_shutdown(
    fake, dial, until, caplog, monkeypatch
):
    monkeypatch.setattr("onchip.server.process.FLUSH_S", 0.5)
    caplog.set_level(logging.INFO)
    engine = fake()
    text = b'{"prompt": "abc", "max_tokens": 2000, "n": 32, "stream": true, "logprobs": 2}'
    with BackgroundServer(Server(engine, ServerOptions("fake")), drain_s=0.0) as url:
        client = dial(url)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.sendall(post(f"content-length: {len(text)}", body=text))
        until(lambda: engine.requests)
        time.sleep(1.0)
    assert "Traceback" not in caplog.text and engine.closed
