"""The states of rounds become one, whenever they are merged."""

from types import SimpleNamespace

import pytest
import torch

from onchip.parallel import rounds
from onchip.parallel.rounds import Patient, Total
from onchip.state import merge_at_rest


def state(generator, rows, heads=3, dim=5):
    """Of two batch entries; some rows have seen nothing."""
    draw = lambda *shape: torch.randn(shape, generator=generator)
    lse = (3 * draw(2, heads, rows)).masked_fill(draw(2, heads, rows) < -0.7, -torch.inf)
    out = draw(2, rows, heads, dim)
    return out.masked_fill((lse == -torch.inf).transpose(1, 2)[..., None], 0.0), lse


def fold(own, parts, fresh):
    """What the kernel does, which is tested beside it."""
    if fresh:
        own[0].zero_()
        own[1].fill_(-torch.inf)
    for start, out, lse in parts:
        rows = slice(start, start + out.shape[1])
        before = own[0][:, rows].transpose(1, 2).double(), own[1][:, :, rows]
        new = out.transpose(1, 2).double(), lse.double()
        merged, own_lse = merge_at_rest(*zip(before, new, strict=True))
        own[0][:, rows], own[1][:, :, rows] = merged.transpose(1, 2).float(), own_lse


@pytest.mark.parametrize("kind", [Total, Patient])
@pytest.mark.parametrize(
    "spans", [[], [(0, 7)], [(3, 7)], [(0, 7), (2, 7), (0, 3)], [(0, 7), *[(3, 7), (0, 2)] * 4]]
)
def test_rounds_of_some_rows_are_one(kind, spans, monkeypatch):
    monkeypatch.setattr(rounds, "kernel_module", lambda name: SimpleNamespace(fold=fold))
    generator = torch.Generator().manual_seed(len(spans))
    total = kind(torch.empty(2, 7, 3, 8), 5)
    outs, lses = [torch.zeros(2, 3, 7, 5).double()], [torch.full((2, 3, 7), -torch.inf).double()]
    for lo, hi in spans:
        out, lse = state(generator, hi - lo)
        pad = torch.nn.functional.pad
        outs.append(pad(out.double(), (0, 0, 0, 0, lo, 7 - hi)).transpose(1, 2))
        lses.append(pad(lse.double(), (lo, 7 - hi), value=-torch.inf))
        total.add(slice(lo, hi), out.clone(), lse.clone())
    want, want_lse = merge_at_rest(outs, lses)
    out, lse = total.result()
    torch.testing.assert_close(out, want.transpose(1, 2).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-6, atol=1e-6)
