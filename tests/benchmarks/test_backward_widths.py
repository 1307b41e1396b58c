"""The race of widths of the backward, with stand-ins for the GPU."""

import pytest
import torch

from benchmarks import backward_widths
from benchmarks.backward_widths import OWN, PADDED, TABLE, cells, describe, parse_key, race
from onchip.cli.bench import gpu
from onchip.cli.bench.gpu import Capture, GpuCandidate, Timing
from onchip.cli.bench.harness import Session
from onchip.kernels import tiles


def test_widths_are_named_as_in_the_table():
    assert parse_key("96") == 96 and parse_key("192x128") == (192, 128)
    with pytest.raises(ValueError, match="no width 112"):
        parse_key("112")


def test_cells_have_equally_many_tokens_and_channels():
    found = list(cells([80, (192, 128)], [1024, 8192]))
    assert len(found) == 8 and {key for key, _ in found} == {80, (192, 128)}
    for key, case in found:
        assert (case.head_dim, case.width_v) == (key if isinstance(key, tuple) else (key, key))
        assert case.batch * case.seqlen == gpu.TOKENS and case.backward
        assert gpu.HIDDEN - case.head_dim < case.num_heads * case.head_dim <= gpu.HIDDEN


@pytest.fixture
def captured(monkeypatch):
    """(candidate, what serves width 96) of each capture and check, in order."""
    seen = []

    class Check:
        def __init__(self, samples, visible):
            pass

        def __call__(self, candidate, strict):
            seen.append(("check", getattr(tiles, TABLE)[96]))

    def capture(candidate: GpuCandidate, backward: bool) -> Capture:
        if candidate.name == "fa2":
            raise RuntimeError("takes no such head_dim")
        seen.append((candidate.name, getattr(tiles, TABLE)[96]))
        return Capture(lambda: None, 1, 1.0)

    def time(captures, control, rounds) -> Timing:
        return Timing({name: [2.0, 2.0] for name in captures} | {OWN: [1.0, 1.0]}, 1.0, 1)

    monkeypatch.setattr(backward_widths, "GradientCheck", Check)
    for name, stand_in in {"capture_calls": capture, "time_captures": time}.items():
        monkeypatch.setattr(gpu, name, stand_in)
    monkeypatch.setattr(gpu, "draw_sets", lambda case, device: [()])
    monkeypatch.setattr(gpu, "still_there", lambda device: None)
    return seen


def test_both_versions_are_checked_and_captured_with_their_tiles(captured):
    said = []
    session = Session(device=torch.device("cpu"), say=said.append)
    ((_, case),) = [x for x in cells([96], [1024]) if x[1].mask == "causal"]
    timing = race(session, 96, case)
    own, wide = (("check", 96), ("onchip", 96)), (("check", 128), ("onchip", 128))
    assert captured[:5] == [*own, *wide, ("onchip", 96)]
    assert list(timing.times)[:2] == [OWN, PADDED] and "cudnn" in timing.times
    assert any("fa2 is left out: RuntimeError: takes no such head_dim" in x for x in said)
    text = describe(case, timing)
    assert "own 2.000 of padded" in text and "2.000 of cudnn" in text
