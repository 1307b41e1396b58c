"""The rounding of out in delta: the failure is there without `precise_delta`, and gone with it."""

import pytest
import torch

from benchmarks import delta_accuracy as bench
from tests.kernels.gpu import each_kernel


@pytest.fixture(scope="module")
def rows():
    rows = bench.backward_rows()
    return {(row["family"], row["kernel"], row["precise_delta"]): row for row in rows}


@pytest.mark.parametrize("kernel", bench.ON_CPU)
def test_roundings_of_a_row_add_up_in_delta(rows, kernel):
    """Bound of dq: 4e-3 (a kernel that rounds P has 3.5e-3)."""
    assert rows["ties", kernel, False]["value"] > 7e-3
    assert rows["ties", kernel, True]["value"] < 2e-3
    assert rows["winning ties", kernel, False]["value"] > 0.1
    assert rows["winning ties", kernel, True]["value"] < 2e-3


@pytest.mark.parametrize("kernel", bench.ON_CPU)
def test_roundings_of_one_sign_do_not_average_out(rows, kernel):
    """How many go that way depends on the CPU: where the rest of a row is lost in fp32, the order
    of additions decides (tiled: -7e-4 on a Neoverse N1, -1.6e-3 on a Xeon).
    """
    plain, precise = (rows["biased ties", kernel, x] for x in (False, True))
    assert plain["drift"] < -100 * abs(precise["drift"]) and abs(precise["drift"]) < 1e-5
    assert plain["dk"] > 0.5 and precise["dk"] < 2e-3


@pytest.mark.parametrize("kernel", bench.ON_CPU)
def test_nothing_is_lost_on_normal_inputs(rows, kernel):
    plain, precise = (rows["N(0,1)", kernel, x] for x in (False, True))
    for name in ("value", "dk", "dv"):
        assert precise[name] <= 1.01 * plain[name]


def test_rounding_p_is_what_is_left_to_a_gpu(rows):
    assert rows["ties", "rounding model", True]["value"] < 4e-3
    assert rows["biased ties", "rounding model", True]["dk"] < 2e-3


def test_the_last_column_of_dq_is_the_error_of_delta():
    """Of a delta that is off by a known share."""
    inputs = bench.normal((1, 63, 2, 16)).to(torch.float64)
    out, dq, *_ = bench.exact_gradients(inputs)
    assert abs(bench.drift(dq, out, inputs.dout)) < 1e-12
    delta = (out * inputs.dout).sum(-1)
    off = dq.clone()
    off[..., -1] -= 1e-3 * delta.abs().mean() * 16**-0.5
    assert bench.drift(off, out, inputs.dout) == pytest.approx(1e-3, rel=1e-6)


def test_the_table_has_a_line_for_every_row(rows):
    assert len(bench.table(list(rows.values())).splitlines()) == 1 + len(rows)


def test_the_cost_is_one_more_out(monkeypatch):
    monkeypatch.setattr(bench, "TIMED", {"cpu": (1, 63, 2, 16), "cuda": (1, 63, 2, 16)})
    row = bench.cost_row()
    assert row["precise_kept_bytes"] - row["plain_kept_bytes"] == 63 * 2 * 16 * 2
    assert row["value"] > 0 and "MB kept for" in bench.cost_line(row)


@each_kernel
def test_gpu_kernels_take_the_residual(rows, kernel):
    model = lambda family, name: rows[family, "rounding model", True][name]
    assert rows["ties", kernel, False]["value"] > 6e-3
    assert rows["ties", kernel, True]["value"] < 4e-3
    assert rows["biased ties", kernel, False]["drift"] < -1e-3
    assert abs(rows["biased ties", kernel, True]["drift"]) < 1e-5
    for family in bench.FAMILIES:
        for name in ("value", "dk", "dv"):
            assert rows[family, kernel, True][name] < 1.25 * model(family, name)
