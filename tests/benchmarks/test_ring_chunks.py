"""A sequence in chunks on one device: what is timed computes what one call computes."""

import pytest
import torch

from benchmarks import ring_chunks, ring_report
from onchip.cli.bench import harness
from onchip.parallel.sharding import zigzag
from onchip.testing import rmse
from tests.parallel.cases import count_pairs


@pytest.fixture(scope="module")
def cut():
    return ring_chunks.Cut.of(333, torch.device("cpu"), heads=2, dim=32)


def test_rounds_are_one_call(cut):
    """Out and gradients, as near to one another as two roundings to bf16 allow."""
    rounds = [zigzag(8).unshard(each) for each in ring_chunks.in_rounds(cut, True)]
    for ring, one in zip(rounds, ring_chunks.one_call(cut, True), strict=True):
        assert rmse(ring, one.double()) < 4e-3 * one.double().square().mean().sqrt()


def test_every_visible_pair_is_in_one_round(cut):
    pairs = sum(count_pairs(at) for step in cut.steps() for _, _, at in step)
    assert pairs == 333 * 334 // 2


def test_no_two_ranks_have_the_same_keys_in_a_step(cut):
    """Or they would add to the same gradients at the same time."""
    for step in cut.steps():
        assert len({source for _, source, _ in step}) == len({r for r, _, _ in step}) == len(step)


def test_a_row_and_its_sheet(cut):
    rows = [ring_chunks.chunks_row(cut, 2, backward) for backward in (False, True)]
    assert set(rows[1]["ms"]) == {"one call", "rounds", "kernels"}
    heads, body = ring_report.SHEETS["chunks"](rows)
    assert len(heads) == 4 and [line[0] for line in body] == ["forward", "forward+backward"]
    (verdict,) = harness.check_thresholds(rows, ring_chunks.THRESHOLDS)
    assert verdict.ok == (max(row["value"] for row in rows) <= 8.0)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is none"):
        ring_chunks.run(harness.Session(quick=True))
