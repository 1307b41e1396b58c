"""The gateway in front of replicas in this process: no Ray is needed."""

import asyncio
import json
import re
import time
from contextlib import contextmanager

import openai
import pytest

from onchip.server.api_keys import Keyring
from onchip.server.app import Server, ServerOptions
from onchip.server.process import BackgroundServer
from onchip.server.replicas import gateway as gateway_module
from onchip.server.replicas.gateway import Gateway, ReplicaDied, ReplicasBusy
from onchip.server.replicas.replica import Replica
from onchip.server.replicas.request import GatewaySalts

MODEL = "fake"


class LocalReplicas:
    """Calls replicas of fake engines in turn. boom: the exception of a replica after its first
    messages, as (number of messages, exception).
    """

    def __init__(self, engines):
        self.engines, self.boom, self.requests, self.broadcasts = engines, None, [], 0
        self._replicas = None

    async def _start(self):
        if self._replicas is None:
            self._replicas = [object.__new__(Replica) for _ in self.engines]
            for replica, engine in zip(self._replicas, self.engines, strict=True):
                await replica.start(Server(engine, ServerOptions(MODEL), GatewaySalts()))
        return self._replicas

    async def respond(self, request):
        replicas = await self._start()
        self.requests.append(request)
        replica = replicas[len(self.requests) % len(replicas)]
        number = 0
        messages = replica.respond(request)
        try:
            async for message in messages:
                if self.boom and number == self.boom[0]:
                    raise self.boom[1]
                yield message
                number += 1
        finally:
            await messages.aclose()

    async def broadcast(self, method, timeout_s):
        replicas = await self._start()
        self.broadcasts += 1
        results = await asyncio.gather(*(getattr(replica, method)() for replica in replicas))
        return {f"r{number}": result for number, result in enumerate(results)}


class EventReplicas:
    """One replica that sends events of 64 KiB, faster than a client reads. is_whole: with a last
    message.
    """

    EVENT = b"data: " + b"x" * (1 << 16) + b"\n\n"

    def __init__(self, num_events, is_whole=True):
        self.num_events, self.is_whole, self.num_sent = num_events, is_whole, 0
        self.is_closed = False

    async def respond(self, request):
        headers = [(b"content-type", b"text/event-stream")]
        try:
            yield {"type": "http.response.start", "status": 200, "headers": headers}
            for _ in range(self.num_events):
                yield {"type": "http.response.body", "body": self.EVENT, "more_body": True}
                self.num_sent += 1
                await asyncio.sleep(0)
            if self.is_whole:
                yield {"type": "http.response.body", "body": b"", "more_body": False}
        finally:
            self.is_closed = True


@contextmanager
def serve(replicas, keys=(), **options):
    gateway = Gateway(replicas, ServerOptions(MODEL, **options), Keyring(keys))
    with BackgroundServer(gateway, drain_s=1.0) as url:
        yield url, gateway


@pytest.fixture
def replicas(fake):
    return LocalReplicas([fake(), fake()])


def test_the_official_client_completes_and_streams(replicas):
    with serve(replicas) as (url, gateway):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options = {"model": MODEL, "prompt": "abc", "max_tokens": 7}
        assert client.completions.create(**options).choices[0].text == "abcabca"
        chunks = list(client.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abcabca"
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(**options, temperature=-3)
    assert "clients_gone_total 0.0" in gateway.metrics.render({}, 0).decode()


def test_responses_and_embeddings_pass_with_the_keys_of_their_prompts(replicas):
    with serve(replicas) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options = {"model": MODEL, "input": "hello " * 50, "max_output_tokens": 9}
        assert client.responses.create(**options).output_text == "user: hel"
        stream = client.responses.create(**options, stream=True)
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == "user: hel"
        vectors = client.embeddings.create(model=MODEL, input=["hello " * 50, "x"])
        assert len(vectors.data) == 2
    chats = [request.keys for request in replicas.requests[:2]]
    assert chats[0] == chats[1] and len(chats[0]) > 3 and len(replicas.requests[2].keys) > 3


def test_a_replica_that_dies_ends_a_stream_of_a_response_with_an_error(replicas):
    replicas.boom = 3, ReplicaDied()
    replicas.engines[1].step_s = replicas.engines[0].step_s = 0.02
    with serve(replicas) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.responses.create(model=MODEL, input="a", stream=True)
        with pytest.raises(openai.APIError, match="the replica of this request died"):
            list(stream)


def test_large_bodies_of_all_paths_are_refused(replicas, ask):
    with serve(replicas, max_body_bytes=1000) as (url, _):
        for path in ("/v1/responses", "/v1/embeddings"):
            assert ask(url, path, {"input": "a" * 2000})[0] == 413
    assert not replicas.requests


def test_headers_pass_both_ways_once(replicas, ask):
    with serve(replicas) as (url, _):
        status, _, headers = ask(url, "/v1/models", **{"X-Request-Id": "mine"})
        assert status == 200 and headers["x-request-id"] == "mine"
        names = [name for name, _ in replicas.requests[0].scope["headers"]]
        assert names.count(b"x-request-id") == 1
        status, body, _ = ask(url, "/nothing")
        assert status == 404 and body["error"]["message"] == "Not Found"


class TestKeys:
    def test_keys_stay_in_the_gateway_and_tenants_have_their_own_salts(self, replicas, ask):
        with serve(replicas, keys=["first-key", "second-key"]) as (url, _):
            assert ask(url, "/v1/models")[0] == 401
            for key in ("first-key", "second-key"):
                header = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "a" * 100}
                assert ask(url, "/v1/completions", body, **header)[0] == 200
        first, second = replicas.requests  # the request without a key reached no replica
        assert first.keys and not set(first.keys) & set(second.keys)
        assert "-key" not in str(replicas.requests)
        salts = {salt for engine in replicas.engines for salt in engine.salts}
        assert len(salts) == 2 and all(salts)

    def test_a_replica_accepts_salts_of_the_gateway_alone(self):
        salts = GatewaySalts()
        assert salts.find_salt(b"Salt 6162") == b"ab" and salts.find_salt(b"Salt ") == b""
        assert salts.find_salt(None) is None and salts.find_salt(b"Bearer Salt 61") is None


class TestFailures:
    def test_before_the_response_begins_the_client_may_retry(self, replicas, ask):
        replicas.boom = (0, ReplicaDied("killed"))
        with serve(replicas) as (url, gateway):
            status, body, headers = ask(url, "/v1/completions", {"prompt": "abc"})
            assert status == 503 and headers["retry-after"] == "1"
            assert body["error"]["code"] == "replica_died"
            replicas.boom = None
            assert ask(url, "/v1/completions", {"prompt": "abc"})[0] == 200
            assert "onchip_gateway_requests_lost_total 1.0" in ask(url, "/metrics")[1]

    def test_a_stream_ends_in_an_error_event(self, replicas, until):
        replicas.boom = (4, ReplicaDied("killed"))
        for engine in replicas.engines:
            engine.step_s = 0.01  # so that a busy machine sends more than 4 messages, too
        with serve(replicas) as (url, gateway):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            stream = client.completions.create(model=MODEL, prompt="abc", stream=True)
            with pytest.raises(openai.APIError, match="died before it was done: send it again"):
                list(stream)
            until(lambda: not gateway.num_open)
            until(lambda: not any(engine.has_work for engine in replicas.engines))

    def test_full_replicas_are_a_429(self, replicas, ask):
        replicas.boom = (0, ReplicasBusy("64 wait"))
        with serve(replicas) as (url, _):
            status, body, headers = ask(url, "/v1/completions", {"prompt": "abc"})
            assert (status, body["error"]["code"], headers["retry-after"]) == (
                429,
                "queue_full",
                "1",
            )

    def test_a_client_that_hangs_up_frees_its_request(self, fake, open_stream, until):
        replicas = LocalReplicas([fake(step_s=0.02)])
        with serve(replicas) as (url, gateway):
            connection = open_stream(url, max_tokens=4000)
            connection.getresponse().read(10)
            connection.close()
            until(lambda: replicas.engines[0].cancelled and not gateway.num_open)

    def test_open_requests_and_bodies_are_bounded(self, fake, ask, open_stream, until):
        replicas = LocalReplicas([fake(step_s=0.02)])
        with serve(replicas, max_open=1, max_body_bytes=1000) as (url, gateway):
            assert ask(url, "/v1/completions", {"prompt": "a" * 2000})[0] == 413
            open_stream(url, max_tokens=4000)
            until(lambda: gateway.num_open == 1)
            status, body, _ = ask(url, "/v1/completions", {"prompt": "abc"})
            assert status == 429 and body["error"]["code"] == "queue_full"

    def test_a_body_counts_until_its_response_is_complete(self, fake, ask, connect, until):
        replicas = LocalReplicas([fake(step_s=0.02)])
        body = json.dumps({"prompt": "abc", "stream": True, "max_tokens": 4000}).encode()
        large = body + b" " * 100_000
        limits = {"max_body_bytes": 150_000, "max_bodies_bytes": 150_000}
        with serve(replicas, **limits) as (url, gateway):
            connection = connect(url)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", large, headers)
            connection.getresponse().read(10)
            status, error, _ = ask(url, "/v1/completions", large)
            assert status == 503 and error["error"]["code"] == "bodies_full"
            assert ask(url, "/tokenize", {"prompt": "abc"})[0] == 200
            connection.close()
            until(lambda: not gateway.num_open)
            assert gateway._reader.memory.used == 0

    def test_shutdown_ends_open_streams(self, fake, open_stream, until):
        replicas = LocalReplicas([fake(step_s=0.02)])
        with serve(replicas) as (url, gateway):
            response = open_stream(url, max_tokens=4000).getresponse()
            until(lambda: gateway.num_open == 1)
        assert json.loads(response.read().split(b"data: ")[-2])["error"]["code"] == "shutdown"


class TestSlowReaders:
    def test_unread_chunks_of_all_streams_are_bounded(self, monkeypatch, open_stream, until):
        monkeypatch.setattr(gateway_module, "MAX_UNSENT_BYTES", 1 << 20)
        replicas = EventReplicas(10_000)
        with serve(replicas) as (url, gateway):
            connection = open_stream(url)
            until(lambda: replicas.is_closed)
            assert replicas.num_sent < 1000  # the rest are buffers of the connection
            text = connection.getresponse().read()
            assert json.loads(text.split(b"data: ")[-2])["error"]["code"] == "streams_full"
            until(lambda: gateway._unsent.used == 0)

    def test_reading_does_not_count_as_time_of_the_request(self, monkeypatch, open_stream, until):
        monkeypatch.setattr(gateway_module, "GRACE_S", 0.0)
        replicas = EventReplicas(512)
        with serve(replicas, max_request_s=2.0) as (url, gateway):
            connection = open_stream(url)
            until(lambda: replicas.is_closed)
            time.sleep(2.1)
            text = connection.getresponse().read()
            assert text == EventReplicas.EVENT * 512
            assert "clients_gone_total 0.0" in gateway.metrics.render({}, 0).decode()

    def test_a_response_without_its_end_is_an_error(self, open_stream):
        with serve(EventReplicas(3, is_whole=False)) as (url, _):
            text = open_stream(url).getresponse().read()
        assert b"replica_died" in text


def test_only_prompts_that_are_computed_have_keys(replicas, ask):
    with serve(replicas) as (url, _):
        for path in ("/tokenize", "/v1/completions"):
            assert ask(url, path, {"prompt": "a" * 100})[0] == 200
    tokenized, completed = replicas.requests
    assert not tokenized.keys and completed.keys


def test_reading_opens_no_request(fake, ask, open_stream, until):
    replicas = LocalReplicas([fake(step_s=0.02)])
    with serve(replicas, max_open=1) as (url, gateway):
        open_stream(url, max_tokens=4000)
        until(lambda: gateway.num_open == 1)
        assert ask(url, "/stats")[0] == ask(url, "/v1/models")[0] == 200


def test_probes_share_an_answer(replicas, ask, monkeypatch):
    monkeypatch.setattr(gateway_module, "PROBE_S", 60.0)
    with serve(replicas) as (url, _):
        assert {ask(url, "/ready")[0] for _ in range(5)} == {200}
    assert replicas.broadcasts == 1


def test_one_page_has_the_metrics_of_all_replicas(replicas, ask):
    with serve(replicas) as (url, _):
        for _ in range(4):
            assert ask(url, "/v1/completions", {"prompt": "abc", "max_tokens": 5})[0] == 200
        assert ask(url, "/v1/completions", {"prompt": "", "max_tokens": 5})[0] == 400
        page = ask(url, "/metrics")[1]
        ready = ask(url, "/ready")
    assert "onchip_replicas 2.0" in page
    generated = re.findall(r'^onchip_tokens_generated_total{replica="(r\d)"} (\S+)', page, re.M)
    assert [name for name, _ in generated] == ["r0", "r1"]
    assert sum(float(value) for _, value in generated) == 20
    assert page.count("# TYPE onchip_tokens_generated_total counter") == 1
    assert 'onchip_request_seconds_bucket{le="0.005",replica="r0"}' in page
    assert ready[0] == 200 and ready[1]["replicas_ready"] == 2
