"""A fake engine with scripted outputs behind a real server on the loopback."""

import json
import os
import re
import subprocess
import sys
import time
from array import array
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from onchip.engine import (
    CompletionOutput,
    Logprob,
    PoolingParams,
    RejectedRequest,
    RequestOutput,
    SamplingParams,
)
from onchip.engine.request import RequestMetrics
from onchip.engine.step import Limits
from onchip.engine.tokenizer import ByteTokenizer

NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")
if not all(map(find_spec, NEEDED)):
    collect_ignore_glob = ["test_*.py"]  # the packages of the extra serve are not here

VOCAB = 257
MODEL = "fake"
SIZE = 6  # of embeddings


class FakeRequest:
    def __init__(self, request_id, prompt, params, deadline, salt, stream):
        self.request_id, self.prompt, self.params = request_id, list(prompt), params
        self.deadline, self.salt, self.stream = deadline, salt, stream
        self.made, self.end, self.arrival = 0, None, time.monotonic()
        self.first = self.scheduled = self.finished = None

    def say(self, index):
        """The tokens of sample i: the prompt repeated, from its i-th byte on."""
        return [self.prompt[(index + k) % len(self.prompt)] for k in range(self.made)]

    @property
    def is_embedding(self):
        return isinstance(self.params, PoolingParams)

    def embedding(self):
        """Two numbers for the pooling and the length of the prompt, and its first bytes."""
        head = [float(self.params.pooling == "mean"), float(len(self.prompt)), *self.prompt]
        return array("f", (head + [0.0] * SIZE)[:SIZE])

    def choice(self, index):
        if self.is_embedding:
            end = "stop" if self.end == "length" else self.end
            return CompletionOutput(index, "", (), 0.0, None, end, None)
        tokens = self.say(index)
        text = bytes(tokens).decode(errors="ignore")  # half a character is not shown
        reason, end = None, self.end
        for stop in self.params.stop:
            if stop in text:
                text, reason, end = text[: text.index(stop)], stop, "stop"
        logprobs = None
        if self.params.logprobs is not None:
            entry = lambda t: {t: Logprob(-0.5, 1), (t + 1) % 256: Logprob(-1.5, 2)}
            logprobs = [entry(t) for t in tokens]
        return CompletionOutput(index, text, tuple(tokens), -0.5, logprobs, end, reason)

    def output(self):
        times = RequestMetrics(self.arrival, self.scheduled, self.first, self.finished)
        if self.is_embedding:
            prompt, done = tuple(self.prompt), self.end is not None
            vector = self.embedding() if self.end == "length" else None
            choices = [self.choice(0)]
            return RequestOutput(
                self.request_id, None, prompt, None, choices, done, times, 2, vector
            )
        scored = None
        if self.params.prompt_logprobs is not None:
            scored = [None] + [{t: Logprob(-0.25, 1)} for t in self.prompt[1:]]
        choices = [self.choice(i) for i in range(self.params.n)]
        return RequestOutput(
            self.request_id,
            None,
            tuple(self.prompt),
            scored,
            choices,
            self.end is not None,
            times,
            2,
        )


class FakeEngine:
    """The interface of onchip.engine.Engine. step_s: duration of a step; max_running and
    max_waiting: limits; boom: exception of the next step.
    """

    def __init__(self, *, step_s=0.0, max_running=8, max_waiting=1000):
        self.step_s, self.max_running, self.max_waiting = step_s, max_running, max_waiting
        self.tokenizer, self.limits = ByteTokenizer(), Limits(4096)
        self.embedding_size = SIZE
        self.boom = None
        self.requests = {}
        self.salts, self.cancelled, self.closed, self.steps = [], [], False, 0
        self.generated, self.last_step_at = 0, 0.0

    @property
    def has_work(self):
        return bool(self.requests)

    def add(
        self, prompt, params=None, *, request_id, priority=0, deadline_s=None, salt=b"", stream=True
    ):
        params = params or SamplingParams()
        prompt = list(prompt)
        if not prompt:
            raise ValueError("the prompt is empty")
        if max(prompt) >= VOCAB:
            raise ValueError(f"the prompt holds token {max(prompt)}")
        if bytes(prompt) == b"break me":
            raise KeyError("a bug")
        generated = 0 if isinstance(params, PoolingParams) else params.max_tokens or 1
        if len(prompt) + generated > 4096:
            return RejectedRequest(f"{len(prompt)} tokens are too many")
        if len(self.requests) >= self.max_running + self.max_waiting:
            return RejectedRequest("the queue is full", is_retryable=True)
        self.salts.append(salt)
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.requests[request_id] = FakeRequest(request_id, prompt, params, deadline, salt, stream)
        return self.requests[request_id]

    def compile_grammar(self, params):
        if params.grammar is not None:
            raise ValueError("this engine has no grammars")

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def step(self):
        time.sleep(self.step_s)
        if self.boom:
            self.requests.clear()
            raise self.boom
        self.steps += 1
        grown = [r for r in list(self.requests.values())[: self.max_running] if self.grow(r)]
        for request in grown:
            if request.end:
                del self.requests[request.request_id]
        self.last_step_at = time.monotonic()
        return [r.output() for r in grown if r.end or r.stream]

    def grow(self, request):
        now, params = time.monotonic(), request.params
        request.scheduled = request.scheduled or now
        request.made += 1
        if request.is_embedding:
            return self.pool(request, now)
        request.first = request.first or now
        self.generated += params.n
        limit = 64 if params.max_tokens is None else params.max_tokens
        stopped = all(request.choice(i).finished for i in range(params.n))
        if request.deadline and now > request.deadline:
            request.end = "abort"
        elif bytes(request.prompt) == b"fail" and request.made == 3:
            request.end = "error"
        elif stopped or request.made >= limit:
            request.end = "length"
        request.finished = now if request.end else None
        return True

    def pool(self, request, now):
        """An embedding takes two steps."""
        late = request.deadline and now > request.deadline
        failed = bytes(request.prompt) == b"fail"
        if late or request.made == 2:
            request.end = "abort" if late else "error" if failed else "length"
            request.finished = now
        return True

    def stats(self):
        running = list(self.requests.values())[: self.max_running]
        pages = {r.request_id: 1 + r.made // 16 for r in running}
        return SimpleNamespace(
            running=len(running),
            waiting=len(self.requests) - len(running),
            pages_total=1000,
            page_bytes=4096,
            pages_free=1000 - sum(pages.values()),
            pages_cached=7,
            pages_shared=3,
            pages_offloadable=0,
            pages_offloaded=0,
            pages_streamed=0,
            request_pages=pages,
            tokens_generated=self.generated,
            tokens_prefilled=0,
            tokens_cached=0,
            preempted_by_swap=0,
            preempted_by_recompute=0,
            steps=self.steps,
            cascade_steps=0,
            tokens_unread=0,
            tokens_prefilled_8bit=0,
            waited_s=0.0,
            last_step_s=self.step_s,
            last_step_at=self.last_step_at,
            speculation=None,
        )

    def close(self):
        self.closed = True


@pytest.fixture
def fake():
    return FakeEngine


@contextmanager
def serve(engine, keys=(), drain_s=5.0, **options):
    from onchip.server.api_keys import Keyring
    from onchip.server.app import Server, ServerOptions
    from onchip.server.process import BackgroundServer

    server = Server(engine, ServerOptions(MODEL, **options), Keyring(keys))
    with BackgroundServer(server, drain_s=drain_s) as url:
        yield url, server


@pytest.fixture
def serving():
    """`with serving(engine) as (url, server)`; options as for ServerOptions, keys: API keys."""
    return serve


@pytest.fixture(scope="module")
def shared_engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def shared(shared_engine):
    """The address of a server for all tests of a file that leave no requests behind."""
    with serve(shared_engine) as (url, _):
        yield url


def connect(url):
    parts = urlsplit(url)
    return HTTPConnection(parts.hostname, parts.port, timeout=30)


@pytest.fixture(name="connect")
def _connect():
    return connect


@pytest.fixture
def ask():
    """ask(url, path, body, **headers): (status, JSON or text, headers). A body of bytes is sent as
    it is.
    """

    def send(url, path, body=None, method=None, **headers):
        connection = connect(url)
        if body is not None:
            headers = {"content-type": "application/json"} | headers
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text, given = response.read().decode(), dict(response.getheaders())
        connection.close()
        is_json = given.get("content-type", "").startswith("application/json")
        return response.status, json.loads(text) if is_json else text, given

    return send


@pytest.fixture
def open_stream():
    """open_stream(url, ...): the connection of a streamed completion, its response unread."""
    opened = []

    def start(url, **body):
        connection = connect(url)
        opened.append(connection)
        body = {"prompt": "abc", "stream": True} | body
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection

    yield start
    for connection in opened:
        connection.close()


@pytest.fixture
def until():
    """until(condition): wait for it, and fail after a few seconds."""

    def wait(condition, seconds=10.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)

    return wait


@contextmanager
def processes(log):
    """start(*options): (the process, its address). log: a file for its output, which could fill a
    pipe.
    """
    started = []

    def start(*options):
        command = [sys.executable, "-m", "onchip", "serve", "--port", "0", *options]
        with log.open("w") as file:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, env=os.environ
            )
        started.append(child)
        for line in child.stdout or ():
            if match := re.search(r"http://[\d.]+:\d+", line):
                return child, match[0]
        raise AssertionError(log.read_text())

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def process(tmp_path):
    """process(*options): (the process, its address); it is killed at the end."""
    with processes(tmp_path / "log") as start:
        yield start


@pytest.fixture(scope="module")
def shared_log(tmp_path_factory):
    """The output of the shared process."""
    return tmp_path_factory.mktemp("process") / "log"


@pytest.fixture(scope="module")
def shared_process(shared_log):
    """A process for all tests of a file that leave no requests behind; with little memory for
    bodies.
    """
    with processes(shared_log) as start:
        yield start("--max-bodies-mib", "16")
