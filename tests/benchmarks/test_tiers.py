"""Prefix, swap and offload rows of `python -m benchmarks paged`, in miniature on the CPU."""

import pytest
import torch

import onchip
from benchmarks import tiers
from onchip.cli.bench.harness import Inaccurate, Session, check_thresholds
from onchip.kvcache import HostTier

CPU = torch.device("cpu")


@pytest.fixture
def quick():
    return Session(device=CPU, quick=True)


def test_a_prefix_hit_saves_all_but_the_last_token(quick):
    hit, publish = tiers.prefix(quick, 333)
    assert hit["saved_tokens"] == 332 and publish["saved_tokens"] is None
    assert hit["unit"] == "ms" and hit["token_ns"] == pytest.approx(hit["value"] * 1e6 / 333)


def test_a_prefix_that_is_not_found_gets_no_row(quick, monkeypatch):
    monkeypatch.setattr(tiers, "_publish", lambda cache, prompt: None)
    with pytest.raises(Inaccurate, match="0 of 333"):
        tiers.prefix(quick, 333)


def test_swap_rows_are_rates_beside_a_plain_copy(quick, monkeypatch):
    monkeypatch.setattr(tiers, "LINK_BYTES", 1 << 16)
    monkeypatch.setattr(tiers, "WORK", 64)
    rows = tiers.swap(quick, num_tokens=50, num_layers=2)
    assert [row["bench"] for row in rows] == ["swap out", "swap in", "swap beside"]
    for row in rows[:2]:
        assert row["unit"] == "GB/s" and row["best_peer"] == "pinned copy"
        low, high = row["band"]
        assert low <= row["ratio"] <= high and row["num_kv_heads"] == 8
    assert rows[2]["value"] > 0 and rows[2]["ratio"] is None


def test_a_swap_that_loses_bytes_gets_no_row(monkeypatch):
    monkeypatch.setattr(tiers, "LINK_BYTES", 1 << 10)
    swapper = tiers.Swapper(CPU, 40, 1)
    swapper.check()
    swap_back = HostTier.swap_in

    def swap_in(tier, family):
        answer = swap_back(tier, family)
        swapper.cache.pages.v[0, 1, 0] += 1
        return answer

    monkeypatch.setattr(HostTier, "swap_in", swap_in)
    with pytest.raises(Inaccurate, match="other bytes"):
        swapper.check()


def test_streamed_keys_are_checked_and_measured(quick, monkeypatch):
    monkeypatch.setattr(tiers, "peak_extra_bytes", lambda job, device: (3_000_000, job()))
    (row,) = tiers.stream(quick, num_keys=700)
    assert row["device_gb"] == 0.003 and 0 < row["error"] < 1e-2
    assert (row["bench"], row["seqlen"], row["unit"]) == ("offload", 700, "GB/s")
    monkeypatch.setattr(onchip, "offload_attention", lambda q, source: torch.zeros_like(q))
    with pytest.raises(Inaccurate, match="FAILS"):
        tiers.stream(quick, num_keys=700)


def test_rates_are_bytes_over_seconds_and_ratios_are_paired():
    case = tiers.Case("x", "none", None, 0, 1)
    row = tiers._copy_row(case, "swap out", (4_000, [2e-6, 4e-6, 2e-6]), (1_000, [1e-6] * 3))
    assert row["value"] == pytest.approx(2.0) and row["peers"]["pinned copy"] == pytest.approx(1.0)
    assert row["ratio"] == pytest.approx(2.0) and row["band"][0] < 2.0


def test_thresholds_of_copies():
    case = tiers.Case("x", "none", torch.bfloat16, 128, 1)
    slow, fast = ((1_000, [1.3e-6] * 9), (1_000, [1.2e-6] * 9))
    copy = (1_000, [1e-6] * 9)
    rows = [tiers._copy_row(case, "swap out", fast, copy), tiers._beside_row(case, 1.3)]
    rows += [tiers._copy_row(case, "offload", slow, copy) | {"device_gb": 0.6}]
    verdicts = check_thresholds(rows, [t._replace(optional=True) for t in tiers.THRESHOLDS])
    assert {v.threshold.name: v.ok for v in verdicts} == {
        "swap of a plain copy": True,
        "swap out beside computation": False,
        "offload of a plain copy": False,
        "offload, most on the device": True,
    }
