"""The protocol of the GPU benchmarks, tested without a GPU: captures and clocks are stand-ins."""

import itertools
import json
import os
import random
import sys
import time
import types
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import onchip
from benchmarks import ablation, host, masks, models, peak, short, tables, video, wide
from benchmarks import versions as versions_bench
from onchip.cli import main
from onchip.cli.bench import backward, forward, gpu, harness, paged, patterns, peers
from onchip.cli.bench.gpu import Capture, GpuCandidate, OutputCheck, RowSpec, paired, time_captures
from onchip.cli.bench.harness import (
    Case,
    Inaccurate,
    Session,
    Threshold,
    check_thresholds,
    worst_cell,
)
from onchip.cli.bench.scores import Scores
from tests.benchmarks.skewed import skewed
from tests.benchmarks.stand_ins import capture, replace_clock

CPU = torch.device("cpu")
MODULES = {
    "forward": forward,
    "backward": backward,
    "short": short,
    "host": host,
    "peak": peak,
    "masks": masks,
    "video": video,
    "wide": wide,
    "paged": paged,
    "models": models,
}
MODULES |= {"versions": versions_bench, "ablation": ablation}
CASE = Case("forward", "causal", torch.bfloat16, 16, 111, 2, 2)
FA4 = peers.fa4  # stand_ins replaces it


@pytest.fixture
def stand_ins(monkeypatch):
    """A capture runs its jobs once and takes as long as its name says; two sets of inputs."""
    took = {"onchip": 1.0, "fa3": 1.1, "cudnn": 1.2}
    monkeypatch.setattr(gpu, "HIDDEN", 128)  # few heads: CPUs without bf16 take minutes for 128
    replace_clock(monkeypatch, took)
    for name in ("fa3", "fa4", "backend"):
        monkeypatch.setattr(peers, name, lambda *args, **options: peers.standard)
    return took


def test_a_band_holds_the_middle_of_the_paired_ratios():
    ours = [1.0, 2.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    theirs = [a * (1 + i / 10) for i, a in enumerate(ours)]  # drift of ours is drift of theirs
    assert paired(ours, theirs) == pytest.approx((1.5, 1.1, 1.9))


def test_every_round_has_all_and_the_first_is_dropped():
    sampled_ms = []

    def sample(captures):
        sampled_ms.extend(x.ms for x in captures)
        return [float(i) for i in range(len(captures))]

    times = gpu.alternate([("a", capture(1)), ("b", capture(2)), ("c", capture(3))], 2, sample)
    rounds = [sampled_ms[i : i + 3] for i in range(0, 9, 3)]
    assert all(sorted(each) == [1, 2, 3] for each in rounds) and len(sampled_ms) == 9
    places = {
        name: [3.0 * i + rounds[i].index(ms) for i in (1, 2)]
        for name, ms in zip("abc", (1, 2, 3), strict=True)
    }
    assert times == places


@pytest.mark.parametrize("num", range(1, 10))
def test_every_ordered_pair_occurs_equally_often(num):
    orders = gpu.balanced(num)
    assert all(sorted(order) == list(range(num)) for order in orders)
    after = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(after) == num * (num - 1) and len(set(after.values())) <= 1
    for places in zip(*orders, strict=True):  # and each is first, second, ... equally often
        assert len(set(Counter(places).values())) == 1


def test_a_control_off_by_more_than_its_limit_repeats_the_cell():
    tries = itertools.count(1)

    def sample(captures):
        skew = {1: 1.03, 2: 0.98, 3: 1.01}[next(tries)]
        return [x.ms * (skew if x.calls == 7 else 1.0) for x in captures]

    control = Capture(lambda: None, 7, 1.0)
    result = time_captures({"onchip": capture(1.0), "peer": capture(2.0)}, control, 30, sample)
    assert (result.tries, result.control) == (3, pytest.approx(1.01))
    assert result.against("onchip", "peer").ratio == 2.0
    assert list(result.times) == ["onchip", "peer"] and len(result.times["peer"]) == 30


def test_after_three_tries_the_best_control_counts():
    skews = iter([1.04, 1.02, 1.03])

    def sample(captures):
        skew = next(skews)
        return [x.ms * (skew if x.calls == 7 else 1.0) for x in captures]

    result = time_captures({"onchip": capture(1.0)}, Capture(lambda: None, 7, 1.0), 30, sample)
    assert (result.tries, result.control) == (3, pytest.approx(1.02))


def test_noise_that_hits_all_alike_cancels():
    noise = random.Random(0)

    def sample(captures):
        factors = [1 + noise.random() for _ in range(len(captures) // 3)]
        return [x.ms * factors[i // 3] for i, x in enumerate(captures)]

    result = time_captures({"onchip": capture(1.0), "peer": capture(1.3)}, capture(1.0), 30, sample)
    assert result.control == pytest.approx(1.0)
    assert result.against("onchip", "peer") == pytest.approx((1.3, 1.3, 1.3))


@pytest.mark.parametrize(("set_bytes", "sets"), [(1, 201), (60, 4), (100, 3), (200, 2), (201, 1)])
def test_the_sets_are_more_than_twice_the_cache(set_bytes, sets):
    assert gpu.num_sets(set_bytes, 100) == sets
    assert sets * set_bytes > 200 >= (sets - 1) * set_bytes


@pytest.mark.parametrize(
    ("ms", "sets", "calls"), [(1.0, 1, 5), (1.0, 3, 6), (9.0, 1, 1), (9.0, 4, 4), (1e-9, 1, 2000)]
)
def test_a_sample_is_about_5_ms_and_uses_every_set(ms, sets, calls):
    assert gpu.calls_per_sample(ms, sets) == calls


def test_the_grid_is_the_papers():
    cases = list(gpu.grid(Session(), "forward"))
    assert len(set(map(str, cases))) == 36
    assert all(c.batch * c.seqlen == 16384 and c.num_heads * c.head_dim == 2048 for c in cases)
    chosen = Session(seqlens=[2048], head_dims=[64, 128])
    assert len(list(gpu.grid(chosen, "forward"))) == 4


def test_grouped_heads_are_further_cells():
    session = Session(seqlens=[2048], head_dims=[80, 128, 256], groups=[1, 4, 16])
    cases = list(gpu.grid(session, "backward", backward=True))
    assert len(cases) == len(set(map(str, cases))) == 18
    heads = {(c.head_dim, c.num_heads, c.kv_heads) for c in cases}
    assert {(128, 16, 16), (128, 16, 4), (128, 16, 1), (80, 25, 25), (80, 24, 6)} < heads
    assert (256, 16, 1) in heads  # one key head at least
    q, k, v, dout = gpu.draw(replace(cases[-1], seqlen=3, batch=1), CPU)
    assert (q.shape[2], k.shape[2]) == (16, 1) and dout.shape == q.shape and v.shape == k.shape


def test_unequal_sizes_are_drawn_and_counted():
    sizes = {"num_kv_heads": 2, "head_dim_v": 8, "seqlen_k": 7}
    case = Case("x", "none", torch.bfloat16, 24, 5, 3, 4, backward=True, **sizes)
    shapes = [tuple(x.shape) for x in gpu.draw(case, CPU)]
    assert shapes == [(3, 5, 4, 24), (3, 7, 2, 24), (3, 7, 2, 8), (3, 5, 4, 8)]
    assert gpu.flops(case) == 2 * 3 * 4 * 5 * 7 * (3 * 24 + 2 * 8)
    row = case.row("x", 1.0, "us")
    assert (row["num_kv_heads"], row["head_dim_v"], row["seqlen_k"]) == (2, 8, 7)
    assert {"head_dim_v", "seqlen_k"}.isdisjoint(CASE.row("x", 1.0, "us"))


@pytest.mark.parametrize("head_dim", [80, 96, 112])
def test_a_cell_of_grouped_heads_and_another_head_dim(stand_ins, monkeypatch, head_dim):
    """Its rows have thresholds of their own."""
    grouped = lambda *args, **options: lambda q, k, v: onchip.attention(q, k, v, causal=True)
    for name in ("fa3", "fa4", "backend"):
        monkeypatch.setattr(peers, name, grouped)
    case = replace(CASE, head_dim=head_dim, seqlen=48, num_heads=4, num_kv_heads=1)
    row = forward.measure(Session(device=CPU), case)[0]
    assert row["num_kv_heads"] == 1 and "4/1" in harness.line(row)
    backward_case = replace(case, bench="backward", backward=True)
    (plain, _) = backward.measure(Session(device=CPU), backward_case)
    grids = ("forward",), ("backward, head_dim 64", "backward, head_dim 128")
    for module, measured, names in ((forward, row, grids[0]), (backward, plain, grids[1])):
        results = check_thresholds([measured], module.THRESHOLDS)
        found = {x.threshold.name: x.measured for x in results}
        assert found[f"{measured['bench']}, grouped heads"] == pytest.approx(measured["ratio"])
        assert [found[name] for name in names] == [None] * len(names)  # not a cell of the papers
    assert "groups of 4" in tables._grid([row])


def test_groups_are_for_forward_and_backward(capsys):
    assert main(["bench", "paged", "--groups", "4"]) == 2
    assert "--groups is for operands of 16 bits, in: forward, backward" in capsys.readouterr().err


def test_flops_are_counted_as_the_papers_count():
    case = Case("x", "none", torch.bfloat16, 128, 16384, 1, 16)
    assert gpu.flops(case) == 4 * 16 * 16384**2 * 128
    half = Case("x", "causal", torch.bfloat16, 128, 16384, 1, 16, backward=True)
    assert gpu.flops(half) == gpu.flops(case) / 2 * 2.5


def test_24_short_cells():
    cases = list(short.cases(Session()))
    assert len(set(short.CELLS)) == len(cases) == 24 and max(c.seqlen for c in cases) <= 512


def test_a_cell_gives_a_row_against_all_peers(stand_ins):
    session = Session(device=CPU)
    rows = forward.measure(session, CASE)
    assert [(r["bench"], r["kernel"]) for r in rows] == [("forward", "aten_cpu")]
    row = rows[0]
    assert (row["best_peer"], row["ratio"]) == ("fa3", pytest.approx(1.1))
    assert row["band"] == pytest.approx([1.1, 1.1]) and row["control"] == 1.0
    assert set(row["peers"]) == {"cudnn", "fa2", "efficient", "fa3", "fa4"}
    assert row["value"] == pytest.approx(gpu.flops(CASE) / 1.0 / 1e9)
    assert row["peers"]["fa3"] == pytest.approx(row["value"] / 1.1)
    assert row["unit"] == "TFLOP/s" and row["doubts"] == [] and gpu.counts(row)
    assert set(row["errors"]["onchip"]) == {"normal", "outlier"}
    assert row["error"] == row["errors"]["onchip"]["normal"]
    json.dumps(row)
    schema = list(CASE.row("x", 0.0, "ms"))
    assert list(row)[: len(schema)] == schema
    assert "fa3 1." not in harness.line(row) and "1.1x fa3 [1.100, 1.100]" in harness.line(row)


def test_a_row_without_fa3_does_not_count(stand_ins, monkeypatch):
    def missing(**options):
        raise ImportError("No module named 'fa3_fwd_interface'")

    monkeypatch.setattr(peers, "fa3", missing)
    printed = []
    session = Session(device=CPU, say=printed.append)
    row = forward.measure(session, CASE)[0]
    forward.measure(session, CASE)
    assert not gpu.counts(row) and row["doubts"] == ["no fa3 in this run"]
    assert row["best_peer"] == "cudnn"
    assert len([x for x in printed if x.startswith("fa3 is left out: ImportError: No module")]) == 1
    assert harness.check_thresholds([row], forward.THRESHOLDS)[0].measured is None
    assert "does not count: no fa3" in harness.line(row)


def test_fa4_is_a_peer_of_both_passes(stand_ins, monkeypatch):
    """Its function may return lse, too. A backward row without it does not count."""
    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func = lambda q, k, v, causal: (peers.standard(q, k, v), None)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(peers, "fa4", FA4)
    case = replace(CASE, bench="backward", backward=True)
    assert "fa4" in forward.measure(Session(device=CPU), CASE)[0]["peers"]
    row = backward.measure(Session(device=CPU), case)[0]
    assert row["peers"].keys() == {"cudnn", "fa2", "fa4"} and gpu.counts(row)
    monkeypatch.delitem(sys.modules, "flash_attn.cute")
    row = backward.measure(Session(device=CPU), case)[0]
    assert row["doubts"] == ["no fa4 in this run"] and not gpu.counts(row)


def test_a_contender_that_raises_is_reported_and_left_out(stand_ins, monkeypatch):
    def broken(name, **options):
        def attend(q, k, v):
            raise RuntimeError(f"no {name} here\nand a long story")

        return attend if name == "fa2" else peers.standard

    monkeypatch.setattr(peers, "backend", broken)
    printed = []
    session = Session(device=CPU, say=printed.append)
    row = forward.measure(session, CASE)[0]
    assert "fa2" not in row["peers"] and "cudnn" in row["peers"]
    assert any(x.startswith("fa2 is left out: RuntimeError: no fa2 here (") for x in printed)
    assert any(x.startswith("fa2, heads first, is left out: RuntimeError") for x in printed)
    assert any(x.startswith("hopper is left out: UnsupportedError") for x in printed)


def test_a_peer_that_computes_something_else_is_left_out(stand_ins, monkeypatch):
    monkeypatch.setattr(peers, "fa3", lambda **options: peers.sdpa)  # not causal
    printed = []
    row = forward.measure(Session(device=CPU, say=printed.append), CASE)[0]
    assert "fa3" not in row["peers"] and any("fa3 is left out: Inaccurate" in x for x in printed)


def test_a_wrong_answer_of_ours_gets_no_row(stand_ins, monkeypatch):
    right = onchip.attention
    monkeypatch.setattr(onchip, "attention", lambda *x, **o: right(*x, **o) * 1.01)
    session = Session(device=CPU)
    session.run([("cell", lambda: forward.measure(session, CASE))])
    assert session.rows == [] and "outside the accuracy rule" in session.refused[0]


def test_a_step_that_fails_costs_no_other_row(stand_ins, monkeypatch):
    monkeypatch.setattr(gpu, "device", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(gpu, "Monitor", Watch)
    kept = []
    session = Session(keep=kept.append)
    fine = lambda: [CASE.row("x", 1.0, "ms") | {"sm_mhz": 1700.0, "power_w": 600.0}]
    gpu.run(session, lambda: [("bad", lambda: 1 / 0), ("good", fine)])
    assert session.refused == ["bad: ZeroDivisionError: division by zero"]
    assert kept == session.rows and len(kept) == 1
    assert session.where == {"device": "a GPU", "clocks": {"sm_mhz": 1700.0, "power_w": 600.0}}


class Watch:
    def __init__(self, device):
        self.since = lambda start: {"sm_mhz": 1.0, "power_w": 2.0}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


def test_the_fastest_layout_of_a_peer_counts(stand_ins, monkeypatch):
    times = iter([1.0, 3.0, 2.0, 1.0])  # ours, two layouts, control
    monkeypatch.setattr(gpu, "capture_calls", lambda candidate, backward: capture(next(times)))
    sets = [gpu.draw(CASE, CPU)]
    check = OutputCheck({"normal": sets[0]}, patterns.causal(CASE.seqlen).visible)
    attend = lambda q, k, v: onchip.attention(q, k, v, causal=True)
    ours = GpuCandidate("onchip", attend, sets, check, ours=True)
    spec = RowSpec("x", "aten_cpu", ours, gpu.both_layouts("peer", attend, sets, check))
    row = gpu.contest(Session(device=CPU), CASE, [spec], gpu.MILLISECONDS)[0]
    assert row["peers"] == {"peer": 2.0}


def test_backward_rows_and_the_deterministic_one(stand_ins):
    stand_ins["deterministic"] = 1.25
    case = next(iter(gpu.grid(Session(seqlens=[96], head_dims=[16]), "backward", backward=True)))
    case = Case("backward", "causal", torch.bfloat16, 16, 111, 2, 2, True, case.way)
    rows = backward.measure(Session(device=CPU), case)
    assert [r["bench"] for r in rows] == ["backward", "deterministic"]
    assert rows[0]["pass"] == rows[1]["pass"] == "backward"
    assert rows[0]["best_peer"] == "cudnn" and rows[0]["doubts"] == []
    assert (rows[1]["best_peer"], rows[1]["ratio"]) == ("onchip", pytest.approx(0.8))


@pytest.mark.parametrize("pattern", [patterns.dense, patterns.causal])
def test_sampled_gradients_are_those_of_the_oracle(pattern, monkeypatch):
    monkeypatch.setattr(backward, "CHUNK_ELEMENTS", 5000)
    n = 199
    case = Case("backward", "none", torch.float64, 8, n, 2, 3, backward=True)
    inputs, visible = gpu.draw(case, CPU), pattern(n).visible
    check = backward.GradientCheck({"normal": inputs}, visible)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    mask = visible(torch.arange(n))
    out = onchip.testing.oracle(*leaves, mask=mask).out
    want = torch.autograd.grad(out, leaves, inputs[3])
    for got, exact in zip(check.exact["normal"], want, strict=True):
        assert torch.allclose(got, exact[:, check.rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shares_bias", [False, True])
def test_sampled_gradients_of_grouped_heads_softcap_bias_and_sinks(shares_bias, monkeypatch):
    monkeypatch.setattr(backward, "CHUNK_ELEMENTS", 5000)
    sizes = {"num_kv_heads": 2, "head_dim_v": 5, "seqlen_k": 157, "backward": True}
    case = Case("backward", "none", torch.float64, 8, 143, 2, 6, **sizes)
    inputs, window = gpu.draw(case, CPU), {"causal": True, "window_size": (99, None)}
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64).requires_grad_()
    bias = draw(1 if shares_bias else 2, 6, 143, 157)
    scores = Scores(softmax_scale=0.7, softcap=1.5, bias=bias, sinks=draw(6))
    distance = lambda rows: rows[:, None] + 14 - torch.arange(157)
    visible = lambda rows: (distance(rows) >= 0) & (distance(rows) < 100)
    check = backward.GradientCheck({"normal": inputs}, visible, scores)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = onchip.testing.oracle(*leaves, **window, **scores.options).out
    want = torch.autograd.grad(out, (*leaves, bias, scores.sinks), inputs[3])
    pairs = zip(check.exact["normal"], check.sample(want), strict=True)
    assert all(torch.allclose(got, exact, rtol=0, atol=1e-12) for got, exact in pairs)


def test_the_model_of_a_gradient_is_that_of_the_rule():
    n = 111
    case = Case("backward", "none", torch.bfloat16, 16, n, 1, 2, backward=True)
    inputs = gpu.draw(case, CPU)
    check = backward.GradientCheck({"normal": inputs}, patterns.causal(n).visible)
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out, _ = onchip.testing.rounding_model(*leaves, dtype=torch.bfloat16, causal=True)
    want = torch.autograd.grad(out, leaves, inputs[3].double())
    problem = check.problems["normal"]
    delta = (out.detach().transpose(1, 2) * problem.dout).sum(-1)
    rounded = lambda x: x.to(torch.bfloat16).double()
    model = check.strips(problem._replace(delta=delta), rounded)
    for got, expected in zip(model, want, strict=True):
        expected = rounded(expected[:, check.rows])
        assert (got != expected).double().mean() < 0.01  # P may differ in its last bit of fp64


def test_a_wrong_gradient_gets_no_row():
    case = Case("backward", "causal", torch.bfloat16, 16, 111, 2, 2, backward=True)
    inputs = gpu.draw(case, CPU)
    check = backward.GradientCheck({"normal": inputs}, patterns.causal(111).visible)

    right = lambda q, k, v: onchip.attention(q, k, v, causal=True)
    wrong = lambda q, k, v: right(q, skewed(k, 1.01), v)
    ours = lambda attend: GpuCandidate("onchip", attend, [inputs], check, ours=True)
    assert 0 < check(ours(right), strict=True)["normal"] < 0.01
    with pytest.raises(Inaccurate, match="dk .*FAILS"):
        check(ours(wrong), strict=True)


def test_masks_are_compared_with_our_own_calls(stand_ins):
    stand_ins["dense"], stand_ins["closed form"] = 4.0, 0.95
    session = Session(device=CPU)
    sparse = masks._case("blocks", "25% of blocks", 16, 300)
    row = masks.blocks(session, sparse, 0.25)[0]
    assert row["ratio"] == 4.0 and row["density"] == pytest.approx(5 / 9, abs=0.3)
    assert masks._excess([row]) == pytest.approx(0.25 - row["density"])
    bits = masks._case("bits", "causal", 16, 300)
    row = masks.bits(session, bits, patterns.causal(300))[0]
    assert row["best_peer"] == "closed form" and row["ratio"] == pytest.approx(0.95)


def test_a_window_row_counts_if_fa2_is_measured(stand_ins, monkeypatch):
    case = masks._case("window", "window 1024", 64, 300)
    assert not gpu.counts(masks.window(Session(device=CPU), case)[0])  # it has no CPU kernel
    size = {"window_size": (masks.WINDOW - 1, 0)}
    monkeypatch.setattr(masks, "fa2_window", lambda n: lambda *x: onchip.attention(*x, **size))
    row = masks.window(Session(device=CPU), case)[0]
    assert "fa2" in row["ratios"] and gpu.counts(row)


VIDEO_MASKS = (
    video.VideoMask((3, 6, 8), (3, 2, 5)),
    video.VideoMask((4, 6, 10), (1, 3, 4), (2, 3, 5)),
    video.VideoMask((4, 6, 8), (1, 3, 2), (2, 2, 4), is_sliding=True),
)


@pytest.mark.parametrize("mask", VIDEO_MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize("backward", [False, True])
def test_a_video_is_compared_with_flex_under_the_same_mask(stand_ins, monkeypatch, mask, backward):
    stand_ins["flex"], stand_ins["dense"] = 1.5, 4.0
    by_rule = lambda n, mod, device: partial(onchip.attention, mask=onchip.masks.mod(mod))
    monkeypatch.setattr(peers, "flex", by_rule)
    sizes = {"num_heads": 2, "backward": backward}
    case = Case("video", mask.name, torch.bfloat16, 16, mask.tokens, **sizes)
    (row,) = video.measure(Session(device=CPU), case, mask)
    assert row["pass"] == ("forward+backward" if backward else "forward")
    assert set(row["errors"]) == {"onchip", "flex", "dense"} and row["density"] > 0
    results = check_thresholds([row], video.THRESHOLDS)
    met = {x.threshold.name: x.measured for x in results}
    assert met[f"{row['pass']} over FlexAttention, worst cell"] == pytest.approx(1.5)
    seen = onchip.masks.mod(video.mask_mod(mask)).build(1, 1, mask.tokens, mask.tokens)
    assert torch.equal(mask.build(CPU).to_dense(), seen.to_dense())


def test_a_cell_within_its_band_of_the_threshold_is_tied():
    row = lambda ratio, *band: {"ratio": ratio, "band": list(band)}
    threshold = worst_cell("worst", lambda row: True, 0.92)
    assert check_thresholds([row(1.1, 1.0, 1.2), row(0.91, 0.90, 0.93)], [threshold])[0].ok
    verdict = check_thresholds([row(1.1, 1.0, 1.2), row(0.90, 0.89, 0.91)], [threshold])[0]
    assert not verdict.ok and verdict.measured == 0.90


def test_an_optional_threshold_without_rows_is_not_checked():
    threshold = Threshold("flex", lambda row: False, at_least=1.0, optional=True)
    assert check_thresholds([], [threshold, threshold._replace(optional=False)])[0].measured is None
    assert len(check_thresholds([], [threshold])) == 0


def test_each_head_dim_of_the_backward_has_a_threshold():
    cell = {
        "bench": "backward",
        "mask": "none",
        "num_heads": 16,
        "num_kv_heads": 16,
        "peers": {"fa4": 1.0},
        "doubts": [],
        "errors": {},
        "kernel": "hopper",
    }
    rows = [{**cell, "head_dim": d, "ratio": r, "band": [r, r]} for d, r in ((64, 1.1), (128, 0.9))]
    verdicts = {v.threshold.name: v for v in check_thresholds(rows, backward.THRESHOLDS)}
    assert verdicts["backward, head_dim 64"].ok and not verdicts["backward, head_dim 128"].ok
    assert not verdicts["backward, head_dim 64 and 128, worst cell"].ok
    assert verdicts["backward, head_dim 256"].measured is None


def test_readings_of_another_gpu_and_nonsense_are_skipped():
    monitor = gpu.Monitor(CPU)
    lines = [
        "GPU-a, 1700, 600.5\n",
        "GPU-b, 100, 50\n",
        "GPU-a, [N/A], 1\n",
        "GPU-a, 1800, 610.5\n",
    ]
    monitor.read(lines, "a")
    assert monitor.since(0.0) == {"sm_mhz": 1750.0, "power_w": 605.5}
    assert monitor.since(float("inf")) == {"sm_mhz": None, "power_w": None}


def test_the_monitor_reads_what_a_program_writes(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-x, 1700, 600'\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    with gpu.Monitor(CPU) as monitor:
        deadline = time.monotonic() + 10
        while not monitor.readings and time.monotonic() < deadline:
            time.sleep(0.01)
    assert monitor.since(0.0) == {"sm_mhz": 1700.0, "power_w": 600.0}
    assert monitor.process.returncode is not None


def test_without_nvidia_smi_there_are_no_readings(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    with gpu.Monitor(CPU) as monitor:
        assert monitor.since(0.0) == {"sm_mhz": None, "power_w": None}


def test_an_error_is_one_line():
    assert gpu.sentence(RuntimeError("\n  first\nsecond")) == "RuntimeError: first"
    assert gpu.sentence(KeyError()) == "KeyError"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", MODULES)
def test_without_a_gpu_one_sentence(name, capsys):
    assert main(["bench", name]) == 2
    captured = capsys.readouterr()
    assert captured.err == "onchip: this benchmark needs a CUDA GPU, and torch finds none here\n"
    assert captured.out.strip() == ""


def test_the_options_of_a_gpu_are_refused_by_the_cpu(capsys):
    assert main(["bench", "cpu", "--seqlens", "512"]) == 2
    assert "--seqlens" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODULES)
def test_a_small_run(name, tmp_path):
    path = tmp_path / "results.json"
    lengths = ["197"] if name == "short" else ["512"]
    sizes = ["--seqlens", *lengths, "--head-dims", "64"]
    main(["bench", name, "--json", str(path), "--quick", *sizes])
    document = json.loads(path.read_text())
    assert document["meta"]["device"] == torch.cuda.get_device_name()
    assert document["rows"] and all(row["value"] > 0 for row in document["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_a_program_raced_against_itself_is_even(backward):
    case = Case("x", "causal", torch.bfloat16, 64, 1024, 4, 8, backward=backward)
    sets = [gpu.draw(case, torch.device("cuda"), seed=i) for i in range(2)]
    attend = lambda q, k, v: onchip.attention(q, k, v, causal=True)
    one = GpuCandidate("onchip", attend, sets, lambda *x: {})
    captures = [gpu.capture_calls(one, backward) for _ in range(3)]
    result = time_captures({"a": captures[0], "b": captures[1]}, captures[2], 10)
    assert 0.9 < result.against("a", "b").ratio < 1.1
