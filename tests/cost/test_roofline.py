"""Predicted times: properties of the model, and every cell that was measured on an H200."""

import json
from pathlib import Path

import pytest
import torch

import onchip
from onchip import cost
from onchip.core.problem import Problem
from onchip.cost import hardware
from onchip.cost.hardware import H200
from onchip.cost.roofline import PipelineModel, TileStep, predict, steps

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BAR = 0.15
MISSED = 0.17  # by four cells: docs/benchmarks.md
HALF = torch.bfloat16


def make_problem(batch, seqlen, heads, head_dim, seqlen_k=None, **options):
    sizes = batch, seqlen, seqlen_k or seqlen, heads, heads, head_dim, head_dim
    return Problem(*sizes, HALF, HALF, 0.1, **options)


def cells():
    """(row, problem) of every row of the Hopper kernels."""
    for way in ("forward", "backward"):
        rows = json.loads((RESULTS / f"h200-{way}.json").read_text())["rows"]
        for r in rows:
            if r["kernel"] == "hopper":
                shape = r["batch"], r["seqlen"], r["num_heads"], r["head_dim"]
                exact = {"deterministic": r["bench"] == "deterministic"}
                yield r, make_problem(*shape, causal=r["mask"] == "causal", **exact)


@pytest.mark.parametrize(
    "bench, limit", [("forward", BAR), ("backward", BAR), ("deterministic", MISSED)]
)
def test_every_measured_cell_is_predicted_within_a_limit(bench, limit):
    """36 cells each of the forward, the backward and the deterministic backward, with one set of
    units and rates. The structure of the model was decided with them in view: this guards it, and
    proves nothing about other calls.
    """
    rows = [(r, p) for r, p in cells() if r["bench"] == bench]
    assert len(rows) == 36
    for r, problem in rows:
        pairs = r["seqlen"] ** 2 / (2 if problem.causal else 1)
        flops = 4 * r["batch"] * r["num_heads"] * pairs * r["head_dim"]
        backward = bench != "forward"
        measured_s = (2.5 if backward else 1) * flops / r["value"] / 1e12
        predicted = predict(problem, H200, "hopper", backward)
        assert predicted.seconds == pytest.approx(measured_s, rel=limit), (r["head_dim"], r["mask"])


def test_held_out_short_calls_are_predicted_within_a_fifth():
    """Rows that were not used to make the model."""
    rows = json.loads((RESULTS / "h200-short.json").read_text())["rows"]
    shares = []
    for r in rows:
        shape = r["batch"], r["seqlen"], r["num_heads"], r["head_dim"]
        predicted = predict(make_problem(*shape, causal=r["mask"] == "causal"), H200, "hopper")
        if r["kernel"] == "hopper" and predicted.modelled:
            shares.append(1e6 * predicted.seconds / r["value"])
    assert len(shares) == 16 and min(shares) > 0.8 and max(shares) < 1.2
    assert sum(0.85 <= share <= 1.15 for share in shares) == 15


def test_one_consumer_waits_for_every_unit_and_many_only_for_the_slowest():
    step = TileStep(512.0, 768.0, 128.0)
    assert step.response(1) == sum(step)
    each = [step.response(n) / n for n in range(1, 60)]
    assert each == sorted(each, reverse=True) and each[-1] > max(step)
    assert each[-1] == pytest.approx(max(step), rel=0.001)


def test_two_consumers_on_two_equal_units_reach_two_thirds():
    """The textbook's case: throughput N / (N + M - 1) of a station's rate, here M = 2."""
    step = TileStep(100.0, 100.0, 0.0)
    for n in (1, 2, 3, 7):
        assert 100 * n / step.response(n) == pytest.approx(n / (n + 1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (100, 0), (37, None), (5, 60)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(799, 799), (111, 799), (63, 1)])
@pytest.mark.parametrize("keys", [False, True])
def test_steps_are_the_tiles_with_a_visible_pair(causal, window, seqlen_q, seqlen_k, keys):
    problem = make_problem(1, seqlen_q, 1, 64, seqlen_k, causal=causal, window_size=window)
    own, tile = 192, 64
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    left, right = window[0], 0 if causal else window[1]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    visible &= (j >= i - left) if left is not None else True
    visible &= (j <= i + right) if right is not None else True
    visible = visible.t() if keys else visible
    want = [sum(bool(part.any()) for part in rows.split(tile, 1)) for rows in visible.split(own)]
    assert steps(problem, own, tile, keys).tolist() == want


def test_programs_of_equal_length_run_in_waves():
    pipeline = PipelineModel(TileStep(10.0, 5.0, 1.0), 2, torch.full((3,), 7), planes=44)
    tile = 8 * pipeline.step.response(2)
    assert pipeline.clocks(132) == pytest.approx(tile) and pipeline.clocks(131) == pytest.approx(
        2 * tile
    )
    uneven = pipeline._replace(counts=torch.tensor([1, 2, 3]))
    assert uneven.clocks(10**9) == pytest.approx(4 * pipeline.step.response(2))  # the longest alone


def test_the_limiting_unit():
    """head_dim 64 waits for exponentials, 128 and 256 for products; short causal rows and few
    queries for memory; a tiny call for its launch.
    """
    binds = lambda *shape, **options: predict(make_problem(*shape, **options), H200, "hopper").binds
    assert binds(1, 16384, 32, 64) == "exp unit"
    assert binds(1, 16384, 16, 128) == binds(1, 16384, 8, 256) == "tensor cores"
    assert predict(make_problem(64, 1, 32, 128, 8192), H200, "triton").binds == "HBM"
    tiny = predict(make_problem(1, 16, 1, 64), H200, "triton")
    assert tiny.binds == "launch" and "launch needs 2.5 us" in str(tiny)
    exact = predict(cost.make_problem(4096, num_heads=16, dtype=torch.float32), H200, "triton")
    assert exact.binds == "fp32 lanes" and "fp32 lanes need" in str(exact)


def test_a_bound_is_below_every_measurement():
    for r, problem in cells():
        backward = r["bench"] != "forward"
        bound = predict(problem, H200, "triton", backward)
        modelled = predict(problem, H200, "hopper", backward)
        assert not bound.modelled and bound.seconds < modelled.seconds


def test_a_mask_scales_the_time_by_its_density():
    dense, masked = make_problem(1, 8192, 16, 128), make_problem(1, 8192, 16, 128, has_mask=True)
    for backward in (False, True):
        whole = predict(dense, H200, "hopper", backward).seconds
        tenth = predict(masked, H200, "hopper", backward, density=0.1).seconds
        assert 0.1 * whole < tenth < 0.2 * whole
    with pytest.raises(ValueError, match="density=1.5"):
        predict(masked, H200, "hopper", density=1.5)


def test_only_hoppers_pipelines_are_modelled():
    problem = make_problem(1, 8192, 16, 128)
    assert not predict(problem, hardware.A100, "hopper").modelled
    assert predict(problem, hardware.H100, "hopper").modelled
    assert not predict(problem._replace(packed=True), H200, "hopper").modelled


@pytest.mark.parametrize(
    ("dims", "columns", "padded", "padded_columns"),
    [
        ((80, 80), 5 * 80, 128, 5 * 128),
        ((88, 88), 5 * 96, 128, 5 * 128),
        ((160, 160), 8 * 160, 256, 8 * 256),
        ((192, 128), 5 * 192 + 3 * 128, 256, 8 * 256),
    ],
    ids=str,
)
def test_a_backward_is_predicted_at_the_width_of_its_tiles(dims, columns, padded, padded_columns):
    """Products of five kinds, or of eight in three kernels: of them s, and dq or dk over the
    columns of q and k (five), dp and dv over those of v (three).
    """
    problem = make_problem(1, 8192, 16, dims[0])._replace(head_dim_v=dims[1])
    own = predict(problem, H200, "hopper", backward=True)
    wide = predict(make_problem(1, 8192, 16, padded), H200, "hopper", backward=True)
    gain = own.alone["tensor cores"] / wide.alone["tensor cores"]
    assert gain == pytest.approx(columns / padded_columns)
    assert columns / padded_columns < own.seconds / wide.seconds < 0.9


def test_explain_predicts_a_backward_by_the_width_of_its_tiles():
    def seconds(head_dim: int) -> float:
        q = torch.empty(1, 8192, 16, head_dim, dtype=HALF, device="meta").requires_grad_()
        return onchip.explain(q, q, q, causal=True, on="H200").backward_roofline.seconds

    assert seconds(96) < 0.85 * seconds(128)


def test_predictions_print_as_sentences():
    text = str(predict(make_problem(1, 16384, 16, 128), H200, "hopper"))
    assert text.startswith("3.2 ms: tensor cores need 2.22 ms of it; exp unit 1.6 ms, ")
    unknown = hardware.Hardware("x", 1, 0.0, H200.levels[:1], {}, 0, 0, 0, "")
    assert (
        str(predict(make_problem(1, 64, 1, 64), unknown))
        == "at least 6.88 ns: HBM needs 6.88 ns of it"
    )
