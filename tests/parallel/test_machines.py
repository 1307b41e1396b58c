"""The inputs of simulations: measured rates, and interpolation between them."""

import json
from pathlib import Path

import pytest

from onchip.parallel.machines import H200, LENGTHS, LINKS, Fabric, KernelRates

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_kernels_are_as_fast_as_they_were_measured(way):
    """If this fails after a new measurement, write the new figures into machines.py."""
    rows = json.loads((RESULTS / f"h200-{way}.json").read_text())["rows"]
    rows = [r for r in rows if r["bench"] == way]
    assert {r["seqlen"] for r in rows} == set(LENGTHS) and len(rows) >= 35
    for row in rows:
        kernel = H200.kernel(way == "backward", row["mask"] == "causal", row["head_dim"])
        tflops = kernel.rate(row["seqlen"]) / 1e12
        assert tflops == pytest.approx(row["value"], rel=0.05), (row["mask"], row["seqlen"])


def test_memory_and_host_are_as_fast_as_they_were_measured():
    rows = json.loads((RESULTS / "h200-paged.json").read_text())["rows"]
    best = lambda bench: max(r["value"] for r in rows if r["bench"] == bench)
    assert best("decode") * 1e12 == pytest.approx(H200.memory_bytes_s, rel=0.05)
    assert best("offload") * 1e9 == pytest.approx(H200.tiers[0].read_s, rel=0.05)
    assert best("swap out") * 1e9 == pytest.approx(H200.tiers[0].write_s, rel=0.05)


def test_rates_between_and_beyond_measured_lengths():
    kernel = KernelRates((100, 200, 300, 400, 500, 600))
    assert kernel.rate(512) == 100e12 and kernel.rate(16384) == 600e12
    assert kernel.rate(2048 * 2**0.5) == pytest.approx(350e12)
    assert kernel.rate(10**9) == 600e12
    assert kernel.rate(128) == pytest.approx(25e12)  # a quarter of the keys in the same time


def test_a_call_with_few_tiles_leaves_processors_idle():
    assert H200.filled(128, 33) == 0.25
    assert H200.filled(10**6, 1) == 1


def test_rings_over_nodes_cross_between_them():
    fabric = Fabric(LINKS["NVLink 4"], LINKS["InfiniBand NDR"], node=2)
    assert fabric.crosses(5).tolist() == [False, True, False, True, True]
    assert not fabric.crosses(2).any()
    hops = fabric.seconds(4, 450e6)
    assert hops.tolist() == pytest.approx([1e-3 + 11.8e-6, 9e-3 + 22.4e-6] * 2)
