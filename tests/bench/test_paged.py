"""`onchip bench paged` without a GPU: the same numbers in pages and in one piece, and its rows."""

import pytest
import torch

import onchip
from onchip.bench import gpu, paged, peers
from onchip.bench.gpu import Contender, Lane
from onchip.bench.harness import Inaccurate, Session, judge

CPU = torch.device("cpu")


@pytest.fixture
def stand_ins(monkeypatch):
    """A capture runs its jobs once and takes as long as its name says; two sets of inputs."""
    took = {"onchip": 1.0, "dense": 1.25, "cudnn": 1.1}

    def open_lane(contender, backward):
        for job in contender.jobs(backward):
            job()
        return Lane(lambda: None, 1, took.get(contender.name, 0.95))

    monkeypatch.setattr(gpu, "open_lane", open_lane)
    monkeypatch.setattr(gpu, "replay_in_order", lambda lanes: [x.ms for x in lanes])
    monkeypatch.setattr(gpu, "still_there", lambda device: None)
    two = lambda cache, device: [cache.draw(device, i) for i in range(2)]
    monkeypatch.setattr(paged.Cache, "draw_sets", two)
    monkeypatch.setattr(peers, "backend", lambda name, **o: onchip.attention)


@pytest.mark.parametrize("page_size", (1, 4, 16))
def test_pages_hold_the_numbers_of_the_dense_cache(page_size):
    cache = paged.Cache((48, 16, 32))
    q, k, v = cache.draw(CPU, 0)
    ours = paged.our_paged("onchip", cache, [(q, k, v)], page_size)
    out = ours.forward(ours.sets[0])
    for b, n in enumerate(cache.lengths):
        expected = onchip.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        torch.testing.assert_close(out[b : b + 1], expected)


def test_a_wrong_answer_is_inaccurate():
    cache = paged.Cache((64, 64))
    inputs = cache.draw(CPU, 0)
    wrong = lambda q, k, v: onchip.attention(q, k[:, 1:], v[:, 1:])
    contender = Contender("x", wrong, [inputs], paged.DecodeJudge(cache, inputs), ours=True)
    with pytest.raises(Inaccurate, match="FAILS"):
        contender.judge(contender, True)


def test_rows_of_a_cell(stand_ins):
    rows = paged.decode(Session(device=CPU), 2, 64)
    assert [(r["bench"], r["page_size"]) for r in rows] == [("decode", 16), ("decode dense", None)]
    assert rows[0]["ratio"] == pytest.approx(1.1) and rows[1]["ratio"] == pytest.approx(0.88)
    assert rows[0]["num_kv_heads"] == 8 and rows[0]["unit"] == "TB/s"
    assert rows[0]["value"] == pytest.approx(2 * 64 * 8 * 128 * 4 / 1e9)
    assert rows[0]["pass"] == "decode" and gpu.counts(rows[0])


def test_the_other_rows_and_the_bars(stand_ins, monkeypatch):
    session = Session(device=CPU)
    monkeypatch.setattr(paged, "Cache", lambda lengths, *heads: SMALL(tuple(lengths), *heads))
    rows = [*paged.page_sizes(session, 1), *paged.skewed(session), *paged.mha(session)]
    assert [r["best_peer"] for r in rows] == ["pages of 256", "equal lengths", "cudnn"]
    assert [r["num_kv_heads"] for r in rows] == [8, 8, 32]
    verdicts = judge(rows + paged.decode(session, 2, 64), paged.BARS)
    assert [v.ok for v in verdicts] == [True, False, True, False]
    assert verdicts[2].measured == pytest.approx(0.95)


ORIGINAL = paged.Cache


def SMALL(lengths, *heads):
    """The same kind of cache, a few hundred keys long."""
    short = (512, *[256] * 3) if len(set(lengths)) > 1 else (256,) * 2
    return ORIGINAL(short, *heads)
