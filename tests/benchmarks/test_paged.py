"""`onchip bench paged` without a GPU: the same numbers in pages and in one piece, and its rows."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import onchip
from benchmarks import tiers
from onchip.cli.bench import gpu, paged, peers
from onchip.cli.bench.gpu import Capture, GpuCandidate
from onchip.cli.bench.harness import Inaccurate, Session, check_thresholds
from onchip.cost.prefixes import costs

CPU = torch.device("cpu")


@pytest.fixture
def stand_ins(monkeypatch):
    """A capture runs its jobs once and takes as long as its name says; two sets of inputs."""
    took = {"onchip": 1.0, "dense": 1.25, "cudnn": 1.1}

    def capture_calls(candidate, backward):
        for job in candidate.jobs(backward):
            job()
        return Capture(lambda: None, 1, took.get(candidate.name, 0.95))

    monkeypatch.setattr(gpu, "capture_calls", capture_calls)
    monkeypatch.setattr(gpu, "replay_in_order", lambda captures: [x.ms for x in captures])
    monkeypatch.setattr(gpu, "still_there", lambda device: None)
    two = lambda cache, device: [cache.draw(device, i) for i in range(2)]
    monkeypatch.setattr(paged.Cache, "draw_sets", two)
    monkeypatch.setattr(peers, "backend", lambda name, **o: onchip.attention)


@pytest.mark.parametrize("page_size", (1, 4, 16))
def test_pages_hold_the_numbers_of_the_dense_cache(page_size):
    cache = paged.Cache((48, 16, 32))
    q, k, v = (t.float() for t in cache.draw(CPU, 0))  # two kernels: equal but for rounding
    ours = paged.our_paged("onchip", cache, [(q, k, v)], page_size)
    out = ours.forward(ours.sets[0])
    for b, n in enumerate(cache.lengths):
        expected = onchip.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        torch.testing.assert_close(out[b : b + 1], expected)


def test_a_wrong_answer_is_inaccurate():
    cache = paged.Cache((64, 64))
    inputs = cache.draw(CPU, 0)
    wrong = lambda q, k, v: onchip.attention(q, k[:, 1:], v[:, 1:])
    candidate = GpuCandidate("x", wrong, [inputs], paged.DecodeCheck.of(cache, inputs), ours=True)
    with pytest.raises(Inaccurate, match="FAILS"):
        candidate.check(candidate, True)


def test_rows_of_a_cell(stand_ins):
    rows = paged.decode(Session(device=CPU), 2, 64)
    assert [(r["bench"], r["page_size"]) for r in rows] == [("decode", 16), ("decode dense", None)]
    assert rows[0]["ratio"] == pytest.approx(1.1) and rows[1]["ratio"] == pytest.approx(0.88)
    assert rows[0]["num_kv_heads"] == 8 and rows[0]["unit"] == "TB/s"
    assert rows[0]["value"] == pytest.approx(2 * 64 * 8 * 128 * 4 / 1e9)
    assert rows[0]["pass"] == "decode" and gpu.counts(rows[0])
    assert [r["mask"] for r in rows] == ["pages of 16", "none"]


def test_the_other_rows_and_the_thresholds(stand_ins, monkeypatch):
    session = Session(device=CPU)
    monkeypatch.setattr(paged, "Cache", lambda lengths, *heads: SMALL(tuple(lengths), *heads))
    rows = [*paged.page_sizes(session, 1), *paged.skewed(session), *paged.mha(session)]
    assert [r["best_peer"] for r in rows] == ["pages of 256", "equal lengths", "cudnn"]
    assert [r["num_kv_heads"] for r in rows] == [8, 8, 32]
    verdicts = check_thresholds(rows + paged.decode(session, 2, 64), paged.THRESHOLDS[:4])
    assert [v.ok for v in verdicts] == [True, False, True, False]
    assert verdicts[2].measured == pytest.approx(0.95)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_caches_of_8_bits_against_16_of_the_same_numbers(stand_ins, kv_dtype):
    """Both under the accuracy rule; the threshold is for the largest cell alone."""
    (row,) = paged.kv8_rows(Session(device=CPU), 2, 64, kv_dtype)
    assert (row["bench"], row["best_peer"]) == (f"decode {kv_dtype}", "bf16 cache")
    assert row["unit"] == "tokens/s" and row["kv_dtype"] == kv_dtype and row["page_size"] == 16
    assert row["error"] == pytest.approx(row["peer_error"])
    thresholds = [t for t in paged.THRESHOLDS if t.at_least == paged.KV8_SPEEDUP]
    assert len(thresholds) == 2 and not check_thresholds([row], thresholds)
    batch, keys = paged.KV8_SPEEDUP_AT
    (verdict,) = check_thresholds([row | {"batch": batch, "seqlen": keys}], thresholds)
    assert verdict.threshold.name.startswith(kv_dtype) and verdict.measured == row["ratio"]


@pytest.fixture
def small_l2(monkeypatch):
    about = SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)


def test_a_prefix_is_read_once_and_checked(stand_ins, small_l2, monkeypatch):
    """As a level even where it does not pay, as on the CPU."""
    monkeypatch.setattr(paged, "costs", lambda *x: costs(*x)._replace(level=0))
    calls, plain = [], onchip.paged_attention
    count = lambda q, *a, **o: calls.append(tuple(q.shape[:2])) or plain(q, *a, **o)
    monkeypatch.setattr("onchip.core.functional.paged_attention", count)
    (row,) = paged.cascades(Session(device=CPU), paged.Prefix(6, 512, 32))
    assert (row["bench"], row["best_peer"], row["unit"]) == ("cascade", "one call", "us")
    assert (row["batch"], row["seqlen"], row["mask"]) == (6, 544, "512 shared")
    assert row["ratio"] == pytest.approx(0.95) and gpu.counts(row)
    # own keys, and the prefix for all six
    assert calls == [(6, 1), (1, 6)] * (len(calls) // 2) and calls


def test_only_the_first_prefix_has_a_threshold():
    row = {"bench": "cascade", "page_size": 16, "ratio": 4.0, "band": [3.9, 4.1], "doubts": []}
    threshold = next(t for t in paged.THRESHOLDS if t.at_least == paged.CASCADE)
    for batch, seqlen, expected in ((64, 8448, 4.0), (64, 33024, None), (8, 2112, None)):
        (verdict,) = check_thresholds([row | {"batch": batch, "seqlen": seqlen}], [threshold])
        assert verdict.measured == expected and not verdict.ok
    close = {"batch": 64, "seqlen": 8448, "ratio": 4.99, "band": [4.9, 5.1]}
    (tied,) = check_thresholds([row | close], [threshold])
    assert tied.ok


def test_parts_are_chosen_by_name():
    titles = lambda **o: [title for title, _ in tiers.steps(Session(device=CPU, **o))]
    every = titles()
    assert [titles(only=[part]) for part in tiers.TIERS] == [["prefix"], ["swap"], ["offload"]]
    assert sum((titles(only=[part]) for part in tiers.PARTS), []) == every
    assert titles(only=["decode"], seqlens=[16384])[0] == "decode, 1 x 16,384 keys"
    assert len(titles(quick=True)) == 6
    kv8 = titles(only=["decode"], kv_dtypes=["fp8", "int8"])
    assert len(kv8) == 2 * len(paged.CELLS) and kv8[-1].endswith("8,192 keys, int8 cache")


def test_a_prefix_needs_no_gpu(monkeypatch):
    monkeypatch.setattr(tiers, "prefix", partial(tiers.prefix, num_tokens=100))
    session = Session(only=["prefix"], quick=True)
    tiers.run(session)
    assert [row["bench"] for row in session.rows] == ["prefix hit", "prefix publish"]


ORIGINAL = paged.Cache


def SMALL(lengths, *heads):
    """The same kind of cache, a few hundred keys long."""
    short = (512, *[256] * 3) if len(set(lengths)) > 1 else (256,) * 2
    return ORIGINAL(short, *heads)
