"""Time and bytes of the algorithms, tested without a GPU: captures and counters are stand-ins."""

import json

import pytest
import torch

import onchip
from benchmarks import algorithms, hbm, plots, versions
from benchmarks.counters import KernelBytes
from onchip.cli.bench import peers
from onchip.cli.bench.harness import Session, check_thresholds
from onchip.testing import make_qkv, max_error, oracle
from tests.benchmarks.stand_ins import replace_clock, replace_peers

CPU = torch.device("cpu")
TOOK = {"standard": 9.0, "compiled": 6.0, "v1": 8.0, "v2": 1.5, "v3": 1.2, "onchip": 1.0}


@pytest.fixture
def rows(monkeypatch):
    """measure(part) -> rows of 128 tokens. Every tensor is counted as the model predicts."""
    replace_clock(monkeypatch, TOOK)
    replace_peers(monkeypatch)
    attend = lambda q, k, v, causal, **options: (onchip.attention(q, k, v, causal=causal), None)
    monkeypatch.setattr(versions, "load", lambda name: type(name, (), {"attention": attend}))
    monkeypatch.setattr(hbm, "TOKENS", 256)
    monkeypatch.setattr(hbm, "NUM_HEADS", 2)

    def predicted(calls):
        moved = []
        for call in calls:
            way = "backward" if call.backward else ""
            cell = hbm.Cell(hbm._case(call.seqlen, way=way), (call.algorithm,))
            moved.append([KernelBytes("kernel", hbm.predict(cell, call.algorithm) or 1e6)])
        return moved

    monkeypatch.setattr(hbm.counters, "count", predicted)

    def measure(part, **options):
        session = Session(device=CPU, only=(part,), quick=True, seqlens=(128,), **options)
        steps = list(hbm.steps(session, 0.0))
        return [row for _, step in steps for row in step()]

    return measure


def test_a_row_has_times_and_bytes_of_every_algorithm(rows):
    forward, backward, seconds = rows("lengths")
    assert [forward["kernel"], *forward["peers"]] == list(hbm.FORWARD)
    assert [backward["kernel"], *backward["peers"]] == list(hbm.BACKWARD)
    for row in (forward, backward):
        assert set(row["hbm_bytes"]) == set(row["flops"]) == {row["kernel"], *row["peers"]}
        assert row["hbm_bytes"]["standard"] > row["hbm_bytes"]["onchip"]
    assert backward["flops"]["standard"] * 5 == backward["flops"]["onchip"] * 4
    assert forward["flops"]["v1"] == 4 * 2 * 2 * 128**2 * 64
    found = {v.threshold.name: v for v in check_thresholds([forward, backward], hbm.THRESHOLDS)}
    assert found["traffic of standard, v2, fa2 and onchip by the counters, within"].measured == 0
    assert seconds["bench"] == "elapsed" and seconds["value"] > 0


def test_fewer_keys_of_a_tile_move_more_bytes(rows):
    (*tiles, _) = rows("tiles")
    for row in tiles:
        moved = [row["predicted_bytes"][f"v1/{n}"] for n in hbm.TILES_N]
        assert moved == sorted(moved, reverse=True) and moved[0] > 2 * moved[-1]


def test_blocks_of_a_mask_save_products(rows):
    (*blocks, _) = rows("blocks")
    assert [row["pass"] for row in blocks] == ["forward+backward"] * 5
    flops = [row["flops"][row["kernel"]] for row in blocks]
    assert flops == pytest.approx([x / 100 * flops[-1] for x in hbm.DENSITIES])
    assert all(len(row["hbm_bytes"]) == 1 for row in blocks)


def test_without_a_profiler_there_are_times_alone(rows, monkeypatch):
    def refuse(calls):
        raise ValueError("no ncu")

    said = []
    monkeypatch.setattr(hbm.counters, "count", refuse)
    forward, *_ = rows("lengths", say=said.append)
    assert forward["hbm_bytes"] == {} and forward["peers"]["standard"] == 9.0
    assert said == ["no traffic is counted: no ncu"]
    with pytest.raises(ValueError, match="timed and counted"):
        plots.bytes_and_times([forward])


def test_the_picture(rows, tmp_path):
    pytest.importorskip("matplotlib")
    measured = [row for part in hbm.PARTS for row in rows(part)]
    meta = {"device": "H200", "torch": "2", "commit": "c", "date": "2026-11-18"}
    plots.draw({"meta": meta, "rows": json.loads(json.dumps(measured))}, tmp_path / "hbm.svg")
    text = (tmp_path / "hbm.svg").read_text()
    assert "GB over HBM" in text and "HBM alone" in text and "% of the blocks" in text


def test_ranks_of_time_and_bytes():
    def row(times, moved):
        columns = {"kernel": "standard", "value": times[0], "peers": {"v1": times[1]}}
        return columns | {"hbm_bytes": moved, "flops": dict.fromkeys(moved, 1.0)}

    rising = [row((n, n + 0.5), {"standard": 1e9 * n, "v1": 1.5e9 * n}) for n in (1, 3, 7)]
    assert hbm.rank_correlation(rising) == pytest.approx(1)
    falling = [row((1 / n, 0.5 / n), {"standard": 1e9 * n, "v1": 2e9 * n}) for n in (1, 3, 7)]
    assert hbm.rank_correlation(falling) < -0.8
    bound = hbm.Point("onchip", 1.0, 1e6, 1e12)
    assert not bound.is_memory_bound and bound._replace(hbm_bytes=1e10).is_memory_bound


@pytest.mark.parametrize("name", ["standard", "compiled", "onchip", "onchip/100%"])
def test_every_algorithm_is_attention(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    q, k, v = make_qkv(2, 111, num_heads=3, head_dim=16, dtype=torch.float64)
    layout = algorithms.layout_of(name)
    out = algorithms.find(name, 111, CPU)(layout(q), layout(k), layout(v))
    assert max_error(out, oracle(q, k, v).out) < 1e-12
    assert (layout is peers.heads_first) == (name in ("standard", "compiled"))


def test_an_unknown_algorithm_is_an_error():
    with pytest.raises(KeyError):
        algorithms.find("v9", 64, CPU)
