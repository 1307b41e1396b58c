"""A replica's own methods, in this process: no Ray is needed."""

import asyncio

import pytest

from onchip.server.replicas.replica import Replica, derive_seed


def make_replica(server):
    replica = object.__new__(Replica)
    replica.server = server
    return replica


class TestHealth:
    """Ray Serve replaces a replica whose check raises three times."""

    def test_a_hanging_step_fails_the_check(self, serving, fake, open_stream, until):
        engine = fake(step_s=1.0)
        with serving(engine, max_stall_s=0.1) as (url, server):
            replica = make_replica(server)
            asyncio.run(replica.check_health())
            assert asyncio.run(replica.is_ready())
            open_stream(url, max_tokens=1)
            until(lambda: not asyncio.run(replica.is_ready()))
            with pytest.raises(RuntimeError, match="a step has run for"):
                asyncio.run(replica.check_health())

    def test_a_dead_engine_fails_the_check(self, serving, fake, ask):
        engine = fake()
        engine.boom = ZeroDivisionError()
        with serving(engine) as (url, server):
            assert ask(url, "/v1/completions", {"prompt": "abc"})[0] == 503
            with pytest.raises(RuntimeError, match="the engine died .ZeroDivisionError"):
                asyncio.run(make_replica(server).check_health())


def test_replicas_sample_with_different_numbers():
    seeds = {derive_seed(seed, name) for seed in (0, 1) for name in ("a", "b", "c")}
    assert len(seeds) == 6 and derive_seed(0, "a") in seeds
