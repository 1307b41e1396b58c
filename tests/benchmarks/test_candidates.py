"""The race of rows that are not in use, without a GPU: captures and kernels are stand-ins."""

from functools import partial

import pytest
import torch

import onchip
from benchmarks import candidates
from onchip.cli.bench import forward, gpu
from onchip.cli.bench.gpu import Capture, GpuCandidate
from onchip.cli.bench.harness import Case, Session
from onchip.kernels import tiles

CPU = torch.device("cpu")
CASE = Case("candidates", "causal", torch.bfloat16, 96, 111, 1, 2)
FASTER = "three consumers"
NAMES = [candidates.IN_USE, *tiles.HOPPER_CANDIDATES[96]]


@pytest.fixture
def rows_of_calls(monkeypatch):
    """The row of the dense table during each call of the kernel. A capture of three consumers
    takes half of the time.
    """
    used, attention = [], onchip.attention

    def attend(*x, kernel=None, **options):
        assert kernel == "hopper"
        used.append(tiles.HOPPER_FORWARD_DENSE[96])
        return attention(*x, **options)

    def capture(candidate, backward):
        candidate.forward(candidate.sets[0])
        return Capture(lambda: None, 1, 1.0 if candidate.name == FASTER else 2.0)

    def peers(session, case, sets, check):
        plain = partial(attention, causal=True)
        return [GpuCandidate("fa3", plain, sets, check)]

    monkeypatch.setattr(candidates.onchip, "attention", attend)
    monkeypatch.setattr(gpu, "capture_calls", capture)
    monkeypatch.setattr(gpu, "replay_in_order", lambda captures: [x.ms for x in captures])
    monkeypatch.setattr(gpu, "still_there", lambda device: None)
    monkeypatch.setattr(gpu, "draw_sets", lambda case, device: [gpu.draw(case, device)])
    monkeypatch.setattr(forward, "sdpa_rivals", lambda *x: [])
    monkeypatch.setattr(forward, "other_rivals", peers)
    return used


def test_every_candidate_is_timed_with_its_own_row(rows_of_calls):
    before = tiles.HOPPER_FORWARD_DENSE[96], tiles.HOPPER_FORWARD[96]
    rows = candidates.measure(Session(device=CPU), CASE)
    assert [row["kernel"] for row in rows] == NAMES
    ratios = {row["kernel"]: row["ratio"] for row in rows}
    assert ratios == {name: 2.0 if name == FASTER else 1.0 for name in NAMES}
    assert list(dict.fromkeys(rows_of_calls)) == [
        before[0],
        *tiles.HOPPER_CANDIDATES[96].values(),
    ]
    assert (tiles.HOPPER_FORWARD_DENSE[96], tiles.HOPPER_FORWARD[96]) == before


def test_cells_are_those_of_the_session():
    def cells(**options):
        return [title for title, _ in candidates.steps(Session(device=CPU, **options))]

    every = len(tiles.HOPPER_CANDIDATES) * 2
    assert len(cells()) == every * 3 and len(cells(quick=True)) == every * 2
    assert cells(head_dims=(80,), seqlens=(4096,)) == [
        f"candidates {mask}, 4,096 tokens, head_dim 80, bfloat16, forward"
        for mask in ("none", "causal")
    ]
