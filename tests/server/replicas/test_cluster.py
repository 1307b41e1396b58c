"""Three replicas of the built-in model on a local Ray cluster, used by the official client."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import pytest

from onchip.server.api_keys import Keyring
from onchip.server.command import make_options
from onchip.server.process import Address, BackgroundServer
from onchip.server.replicas.gateway import Gateway
from tests.cli.parsing import parse

openai = pytest.importorskip("openai")
# This module first: it decides how Ray authenticates, before Ray is imported.
ray_cluster = pytest.importorskip("onchip.server.replicas.cluster", reason="Ray is not installed")
ray = ray_cluster.ray

pytestmark = pytest.mark.slow
MODEL, REPLICAS, PREFIX_TOKENS = "tiny", 3, 512
# Streams may be slow on a machine that does other work.
OPTIONS = ("--replicas", str(REPLICAS), "--device", "cpu", "--pages", "513")
OPTIONS += ("--max-model-len", "1024", "--drain-s", "200")


@contextmanager
def serve(**options):
    """A cluster and the address of its gateway. options: of Cluster."""
    args, address, keys = parse(["serve", *OPTIONS]), Address(port=0), Keyring()
    cluster = ray_cluster.Cluster(vars(args), **options)
    with cluster as replicas:
        gateway = Gateway(replicas, make_options(args, address, keys), keys)
        with BackgroundServer(gateway, address) as url:
            yield cluster, url


def connect(url):
    """The official client, which does not retry by itself."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def served():
    with serve() as served:
        yield served


@pytest.fixture
def cluster(served):
    return served[0]


@pytest.fixture
def url(served):
    return served[1]


@pytest.fixture
def client(url):
    with connect(url) as client:
        yield client


def stream(client, prompt, max_tokens, started=None):
    """The text of a stream. started: called after its first chunk."""
    text = ""
    options = {"max_tokens": max_tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for chunk in client.completions.create(model=MODEL, prompt=prompt, stream=True, **options):
        if not text and started:
            started()
        text += chunk.choices[0].text
    return text


def complete(client, prompts, max_tokens):
    """The texts without any trouble."""
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda prompt: stream(client, prompt, max_tokens), prompts))


@contextmanager
def streams(client, prompts, max_tokens):
    """Streams in threads, all of which have begun: their futures."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(stream, client, p, max_tokens, begun.release) for p in prompts]
        for _ in prompts:
            assert begun.acquire(timeout=60)
        yield futures


def by_replica(ask, url, metric):
    page = ask(url, "/metrics")[1]
    found = re.findall(rf'^onchip_{metric}{{replica="(\w+)"}} (\S+)', page, re.MULTILINE)
    return {name: float(value) for name, value in found}


def kill(cluster, replica):
    """End the process of a replica, as a crash does."""
    name = f"SERVE_REPLICA::{cluster.name}#Replica#{replica}"
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)


def prompts_with(prefixes, count, seed):
    """Each prefix with `count` ends, in random order. A token of the model is a byte."""
    random = Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    starts = ["".join(random.choices(letters, k=PREFIX_TOKENS)) for _ in range(prefixes)]
    prompts = [f"{start} {number}" for start in starts for number in range(count)]
    random.shuffle(prompts)
    return prompts


def count_cached(client, prompts):
    def cached(prompt):
        done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        return done.usage.prompt_tokens_details.cached_tokens

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(cached, prompts))


def test_routing_by_prefix_caches_twice_as_many_tokens_as_round_robin(request):
    """40 prefixes of 512 tokens, 3 requests each. A replica has room for 15 prefixes."""
    prompts = prompts_with(40, 3, seed=4)
    router = "tests.server.replicas.round_robin.RoundRobinRouter"
    with serve(router=router) as (_, url), connect(url) as client:
        in_turn = count_cached(client, prompts)
    by_prefix = count_cached(request.getfixturevalue("client"), prompts)
    print(f"cached tokens: {by_prefix} by prefix, {in_turn} in turn")
    assert by_prefix >= 2 * in_turn


def test_all_replicas_serve_and_answer_equally(client, url, ask):
    prompts = prompts_with(6, 1, seed=0)
    assert complete(client, prompts, 12) == complete(client, prompts, 12)
    generated = by_replica(ask, url, "tokens_generated_total")
    assert len(generated) == REPLICAS and all(generated.values())


def test_streams_survive_scaling_up_and_down(cluster, client, url, ask, until):
    prompts = prompts_with(9, 1, seed=1)
    expected = complete(client, prompts, 100)
    with streams(client, prompts, 100) as futures:
        cluster.scale(REPLICAS + 1)
        until(lambda: len(by_replica(ask, url, "steps_total")) == REPLICAS + 1, 30)
        with streams(client, prompts, 100) as more:  # some of them on the new replica
            cluster.scale(REPLICAS - 1)
            assert [future.result(120) for future in more] == expected
        assert [future.result(120) for future in futures] == expected
    until(lambda: len(by_replica(ask, url, "steps_total")) == REPLICAS - 1, 60)
    assert stream(client, prompts[0], 100) == expected[0]


def test_a_killed_replica_costs_its_own_requests_alone(cluster, client, url, ask, until):
    cluster.scale(REPLICAS)
    until(lambda: ask(url, "/ready")[1]["replicas_ready"] == REPLICAS, 60)
    prompts = prompts_with(18, 1, seed=2)
    expected = complete(client, prompts, 80)
    with streams(client, prompts, 80) as futures:
        running = by_replica(ask, url, "requests_running")
        victim = max(running, key=running.get)
        kill(cluster, victim)
        killed_at = time.monotonic()
        failures = [future.exception(120) for future in futures]
    lost = [failure for failure in failures if failure is not None]
    print(f"{running=} {len(lost)=} all ended after {time.monotonic() - killed_at:.1f} s")
    assert 0 < len(lost) <= running[victim] < len(prompts)
    assert all(isinstance(failure, openai.APIError) for failure in lost)
    assert {failure.body["code"] for failure in lost} == {"replica_died"}
    for future, text in zip(futures, expected, strict=True):
        assert future.exception() or future.result() == text
    assert complete(client, prompts[:3], 80) == expected[:3]
    until(lambda: ask(url, "/ready")[1]["replicas_ready"] == REPLICAS, 60)  # by Ray Serve
    assert victim not in by_replica(ask, url, "steps_total")


def test_the_client_retries_requests_that_had_no_response_yet(cluster, url, ask):
    """Whole responses: the official client sends a lost request again by itself."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5, timeout=120)
    body = {"model": MODEL, "max_tokens": 80, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(12) as pool:
        send = lambda prompt: client.completions.create(prompt=prompt, **body)
        futures = [pool.submit(send, prompt) for prompt in prompts_with(12, 1, seed=3)]
        while sum((running := by_replica(ask, url, "requests_running")).values()) < 12:
            time.sleep(0.05)
        kill(cluster, max(running, key=running.get))
        usages = [future.result(120).usage.completion_tokens for future in futures]
    assert usages == [80] * 12
