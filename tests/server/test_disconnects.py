"""If a client hangs up, its request is no longer computed, in whichever state it is."""

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

COMPLETIONS = "/v1/completions"


@pytest.fixture
def post():
    """post(url, **body): a socket that has sent a request and read nothing."""
    opened = []

    def send(url, **body):
        parts = urlsplit(url)
        client = socket.create_connection((parts.hostname, parts.port), timeout=10)
        opened.append(client)
        text = json.dumps({"prompt": "abc", "max_tokens": 4000} | body)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(text)}\r\n\r\n{text}".encode())
        return client

    yield send
    for client in opened:
        client.close()


def test_a_disconnect_is_noticed_during_a_step(serving, fake, post, until):
    """The request waits for the step to end, and is then not added."""
    engine = fake(step_s=2.0)
    with serving(engine, drain_s=0.0) as (url, server):
        first = post(url, max_tokens=2)
        until(lambda: engine.requests)
        clients = [post(url) for _ in range(20)]
        until(lambda: server.service.num_open == 21)
        for client in clients:
            client.close()
        until(lambda: server.service.num_open == 1, 2.0)
        assert engine.steps == 0, "all that in the first step"
        assert b"200 OK" in first.recv(4096)
        assert len(engine.salts) == 1 and not engine.requests


class SlowToAdd:
    """Adding takes longer than the time for commands between two steps."""

    def __init__(self, engine, add_s):
        self._add, self._add_s = engine.add, add_s

    def __call__(self, *args, **kwargs):
        time.sleep(self._add_s)
        return self._add(*args, **kwargs)


def test_many_disconnects_delay_no_other_request(serving, fake, ask, post, until):
    """Added requests are cancelled at once, the others are never added."""
    engine = fake(step_s=0.02, max_running=4)
    engine.add = SlowToAdd(engine, 0.03)
    with serving(engine) as (url, server):
        clients = [post(url) for _ in range(150)]
        until(lambda: server.service.num_open == 150)
        for client in clients:
            client.close()
        until(lambda: server.service.num_open == 0)
        until(lambda: not engine.requests)
        steps, added = engine.steps, len(engine.salts)
        assert ask(url, COMPLETIONS, {"prompt": "abc", "max_tokens": 3})[0] == 200
        assert engine.steps - steps <= 6 and len(engine.salts) == added + 1
        assert added < 150


def test_cancels_run_before_adds(serving, fake, post, until):
    """While the thread is busy adding, cancelled requests hold no row at the next step."""
    engine = fake(step_s=0.5, max_running=100)
    with serving(engine, drain_s=0.0) as (url, server):
        clients = [post(url) for _ in range(30)]
        until(lambda: len(engine.requests) == 30)
        engine.add = SlowToAdd(engine, 0.05)
        steps = engine.steps
        others = [post(url) for _ in range(10)]  # half a second of adding, 20 ms at a time
        for client in clients:
            client.close()
        until(lambda: len(engine.cancelled) >= 30)
        assert engine.steps - steps <= 3 and len(others) == 10
        assert server.service.num_open == 10


@pytest.mark.slow
def test_a_drain_ends_what_waits_for_a_step_that_hangs(serving, fake, post, until):
    engine = fake(step_s=2.0)
    with serving(engine, drain_s=0.1) as (url, server):
        running = post(url)
        until(lambda: engine.requests)
        waiting = post(url)
        until(lambda: server.service.num_open == 2)
        loop = server.service._loop
        loop.call_soon_threadsafe(lambda: loop.create_task(server.service.drain(0.1)))
        for client in (running, waiting):
            assert b"503" in client.recv(4096)
        assert engine.steps == 0
