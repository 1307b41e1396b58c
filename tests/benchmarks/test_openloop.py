import asyncio
import math
import os

import pytest

from benchmarks import openloop
from benchmarks.openloop import Load, Outcome

pytest.importorskip("fastapi")


def test_arrivals_are_drawn_beforehand_and_again():
    plan = Load(500, rate=10.0, seed=3).arrivals()
    assert plan == Load(500, rate=10.0, seed=3).arrivals() != Load(500, rate=10.0).arrivals()
    times = [at for at, _ in plan]
    assert times == sorted(times) and 40 < times[-1] < 60
    assert {at for at, _ in Load(9).arrivals()} == {0.0}


def test_memory_growth_is_what_stays():
    ramp = [(float(i), 100.0 + min(i, 20)) for i in range(80)]
    assert openloop.growth_mib(ramp) == 0.0
    assert openloop.growth_mib([(float(i), 100.0 + i) for i in range(80)]) == 40.0
    assert openloop.growth_mib([(0.0, 1.0)]) == 0.0 and openloop.rss_mib(os.getpid()) > 10


def test_fairness_compares_requests_served_together():
    assert openloop.fairness([2.0] * 5) == 1 and openloop.fairness([1.0, 0.0, 0.0, 0.0]) == 0.25
    slow_then_fast = [9.0] * 40 + [1.0] * 40
    assert openloop.fairness(slow_then_fast) < 0.7 < openloop.neighbours(slow_then_fast) == 1
    assert openloop.neighbours([]) == openloop.fairness([]) == 1


def test_a_summary_counts_what_failed():
    outcomes = [
        Outcome(0.0, 200, None, 1.0, 3.0, 20, [0.5, 1.5]),
        Outcome(0.0, 429, "full"),
        Outcome(0.0, 0, "refused"),
    ]
    got = openloop.summary(outcomes)
    assert (got["requests"], got["answered"], got["output_tokens"]) == (3, 1, 20)
    assert got["statuses"] == {200: 1, 429: 1, 0: 1} and got["errors"] == {"full": 1, "refused": 1}
    assert got["first_token_ms"]["p50"] == 1000 and got["between_pieces_ms"]["max"] == 1500
    assert math.isclose(got["tokens_per_s"], 20 / 3)


def test_a_server_under_load_is_measured(capsys):
    from onchip.engine.llm import LLM
    from onchip.server.app import Server, ServerOptions
    from onchip.server.process import BackgroundServer

    llm = LLM("tiny", num_pages=200, max_num_seqs=8, swap_space=0)
    with BackgroundServer(Server(llm.engine, ServerOptions("tiny"))) as url:
        outcomes = asyncio.run(openloop.run(url, Load(12, rate=100.0, max_tokens=(3, 9))))
        assert all(o.ok and 3 <= o.num_tokens <= 9 and o.first_token_s > 0 for o in outcomes)
        assert (
            openloop.main([url, "--rate", "20", "--seconds", "0.2", "--pid", str(os.getpid())]) == 0
        )
    assert openloop.main([url, "--seconds", "0.1"]) == 1
    assert '"memory_growth_mib"' in capsys.readouterr().out
