"""`python -m benchmarks score_mods` without a GPU: its functions, its checks, its rows."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

import onchip
from benchmarks import plots, score_mods, tables, tangents, warm_up
from benchmarks.score_functions import BIAS, FUNCTIONS, ScoreSizes
from onchip.cli import main
from onchip.cli.bench import gpu, peers
from onchip.cli.bench.harness import Case, Inaccurate, Session, check_thresholds, document
from tests.benchmarks.stand_ins import replace_clock

CPU = torch.device("cpu")
BF16 = torch.bfloat16
BY_NAME = {function.name: function for function in (*FUNCTIONS, BIAS)}


@pytest.fixture
def took(monkeypatch):
    """Milliseconds by the name of a candidate; FlexAttention is its own, not compiled."""
    took = {"onchip": 1.0, "flex": 1.4, "tiled": 1.0, "forward": 0.5, "math": 3.0}
    replace_clock(monkeypatch, took)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return took


def cell(name, bench="score flex", way="", n=48):
    sizes = (16, n, 2, 2)
    case = Case(bench, name, BF16, *sizes, backward=bool(way), way=way)
    return score_mods.ScoreCell(case, BY_NAME[name])


def thresholds(rows):
    return {x.threshold.name: x for x in check_thresholds(rows, score_mods.THRESHOLDS)}


@pytest.mark.parametrize("name", [function.name for function in FUNCTIONS])
def test_a_function_means_the_same_to_onchip_flex_and_fp64(took, name):
    (row,) = cell(name).measure(Session(device=CPU))
    assert row["mask"] == name and gpu.counts(row) and row["ratio"] == pytest.approx(1.4)
    assert set(row["errors"]) == {"onchip", "flex"} and row["refusals"] == {}
    assert thresholds([row])["forward over FlexAttention"].ok


@pytest.fixture
def trainable_flex(took, monkeypatch):
    """A stand-in with gradients: FlexAttention has none on CPUs."""
    make = lambda n, mask_mod, device, **options: partial(onchip.attention, **options)
    monkeypatch.setattr(peers, "flex", make)


@pytest.mark.parametrize("name", ["T5", "documents"])
def test_a_step_with_flex(trainable_flex, name):
    (row,) = cell(name, way="forward+backward").measure(Session(device=CPU))
    assert row["pass"] == "forward+backward" and set(row["errors"]) == {"onchip", "flex"}
    assert ("captured" in row["errors"]["flex"]) == (name == "T5")
    assert thresholds([row])["forward+backward over FlexAttention"].measured == pytest.approx(1.4)


def test_the_gradient_of_a_captured_bias(trainable_flex):
    (row,) = cell("bias", "score bias", "backward").measure(Session(device=CPU))
    assert row["pass"] == "backward" and row["errors"]["onchip"]["captured"] < 0.01
    met = thresholds([row])["backward with the gradient of a bias over FlexAttention"]
    assert met.measured == pytest.approx(1.4) and not met.ok


@pytest.mark.parametrize("way", ["", "backward"])
@pytest.mark.parametrize("name", score_mods.OPTIONS)
def test_an_option_is_compared_on_the_kernel_of_the_score_mod(took, monkeypatch, name, way):
    """And on its own kernel, which serves another pass here."""
    kernel = score_mods.ScoreProblem.find_kernel
    by_options = lambda self, options: "reference" if "score_mod" not in options else "tiled"
    assert kernel(score_mods.ScoreProblem(*cell(name), CPU), {}) in ("aten_cpu", "tiled")
    monkeypatch.setattr(score_mods.ScoreProblem, "find_kernel", by_options)
    took |= {"tiled": 0.93, "reference": 0.5}
    (row,) = cell(name, "score option", way).measure(Session(device=CPU))
    assert row["kernel"] == "tiled" and set(row["ratios"]) == {"tiled", "reference"}
    met = thresholds([row])[f"score_mod over the built-in option, {way or 'forward'}, worst cell"]
    assert met.measured == pytest.approx(0.93) and met.ok == (way == "backward")


def test_another_function_or_another_gradient_is_refused(took):
    problem = score_mods.ScoreProblem(*cell("relative", way="backward"), CPU)
    wrong = lambda score, b, h, q, k: score + problem.tensors[0][h, torch.clamp(k - q, -128, 128)]
    other = problem.candidate("onchip", partial(onchip.attention, score_mod=wrong))
    with pytest.raises(Inaccurate, match="FAILS"):
        problem.check(other, True)

    class TwiceTheGradient(gpu.GpuCandidate):
        def differentiate(self, inputs):
            out, gradients = super().differentiate(inputs)
            return out, lambda: (*gradients()[:3], 2 * gradients()[3])

    twice = TwiceTheGradient(**vars(problem.ours))
    with pytest.raises(Inaccurate, match="captured tensor is off by 1"):
        problem.check(twice, False)


def test_a_peer_that_fails_is_named_in_the_row(took, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(peers, "flex", lambda *args, **options: refuse)
    (row,) = cell("tanh").measure(Session(device=CPU))
    assert row["refusals"] == {"flex": "RuntimeError: no such kernel"} and not gpu.counts(row)


def test_an_image_and_the_buckets_of_distances():
    assert (ScoreSizes(2, 4096).width, ScoreSizes(2, 4096).height) == (64, 64)
    learned, (bucket,) = BY_NAME["T5"].draw(ScoreSizes(2, 4096), CPU)
    assert bucket[:9].tolist() == [*range(8), 8] and bucket.max() == 15
    assert learned[0].shape == (32, 2)


def tangent_case(bench, way, n=40):
    return Case(bench, "causal" if bench == "jvp" else "none", BF16, 16, n, 1, 2,
                backward=bench != "jvp", way=way)  # fmt: skip


def test_a_jvp_is_measured_in_forwards(took):
    (row,) = tangents.JvpCell(tangent_case("jvp", "jvp")).measure(Session(device=CPU))
    assert set(row["ratios"]) == {"forward"} and row["errors"]["onchip"]["tangent"] < 0.1
    met = thresholds([row])["jvp over a forward, worst cell"]
    assert met.measured == pytest.approx(2.0) and met.ok


@pytest.mark.parametrize("way", tangents.WAYS)
def test_a_step_is_compared_with_math(took, way):
    (row,) = tangents.StepCell(tangent_case("MeanFlow", way)).measure(Session(device=CPU))
    assert row["best_peer"] == "math" and row["ratio"] == pytest.approx(3.0) and gpu.counts(row)


def test_the_two_steps_have_different_gradients():
    sets = tangents.draw_dual_sets(tangent_case("MeanFlow", "step"), CPU)
    step, second = (tangents.step_gradients(onchip.attention, sets[0], x) for x in (False, True))
    assert not torch.allclose(step[0], second[0], rtol=0.1)


def test_wrong_tangents_are_refused(took):
    (spec,) = tangents.JvpCell(tangent_case("jvp", "jvp")).specs(Session(device=CPU))
    dense = replace(spec.ours, attend=lambda *x: onchip.attention(*x, window_size=(3, 0)))
    with pytest.raises(Inaccurate):
        spec.ours.check(dense, True)
    (spec,) = tangents.StepCell(tangent_case("MeanFlow", "step")).specs(Session(device=CPU))
    with pytest.raises(Inaccurate, match="gradients of the step"):
        spec.ours.check(replace(spec.ours, differentiates_tangent=True), True)


def test_memory_over_the_length(took, tmp_path, monkeypatch):
    """A peer that fails at a length has no point in the picture."""
    measured = iter((2e6, 8e6, 4e6, None))
    monkeypatch.setattr(tangents, "peak_extra_bytes", lambda job, device: peak(next(measured)))
    cells = (tangent_case("MeanFlow memory", "step", n) for n in (40, 80))
    rows = [row for case in cells for row in tangents.MemoryCell(case).measure(Session(device=CPU))]
    assert [row["value"] for row in rows] == [2.0, 4.0] and rows[0]["ratio"] == 4.0
    assert "too large" in rows[1]["refusals"]["math"] and rows[1]["ratio"] is None
    long = [row | {"seqlen": 64 * row["seqlen"]} for row in rows]
    met = thresholds(long)["memory per token of a MeanFlow step, 8k over 2k tokens"]
    assert met.measured == pytest.approx(1.0) and met.ok
    plots.draw(document(rows, {"device": "a GPU"}), tmp_path / "x.svg")
    assert "MeanFlow, step" in (tmp_path / "x.svg").read_text()


def peak(measured):
    if measured is None:
        raise RuntimeError("too large")
    return measured, None


def test_the_cells():
    titles = lambda **options: [title for title, _ in score_mods.steps(Session(**options))]
    assert len(titles(only=["options"])) == 3 * 2 * 2
    assert len(titles(only=["flex"])) == 10 * 2 + 2
    assert len(titles(only=["flex"], head_dims=[64, 128])) == 2 * 10 * 2 + 2
    assert len(titles(only=["jvp"])) == 2 * 2 * 2 + 2 + 2 * 4
    assert titles(device=torch.device("cuda", 0))[0] == "compiling"
    assert len(titles(quick=True)) < 30
    dims = [cell.case.head_dim for cell in score_mods.flex_cells(Session())[:20]]
    assert dims == [64, 64, 128, 128] * 5


def test_a_group_is_compiled_by_running_its_candidates(took, monkeypatch):
    calls = []
    run_once = lambda session, specs, backward: calls.append((specs[0].bench, backward))
    monkeypatch.setattr(gpu, "device", lambda: CPU)
    monkeypatch.setattr(warm_up, "run_once", run_once)
    selection = {"seqlens": [48], "head_dims": [16], "only": ["options"]}
    score_mods.compile_group("score option softcap 16 48", selection)
    assert calls == [("score option", False), ("score option", True)]


def test_processes_that_compile_are_told_apart(monkeypatch, took):
    """A process that fails costs a sentence; a candidate that fails, its own kernels."""
    said = []
    warm_up.run_all(divide, [("nothing", 0)], said.append)
    assert said == ["nothing was not compiled ahead: its process ended with 1"]
    (spec,) = cell("tanh").specs(Session(device=CPU))
    done = []
    broken = replace(spec.ours, attend=divide)
    working = replace(spec.ours, name="other", attend=lambda *x: done.append(1))
    session = Session(device=CPU, say=said.append)
    warm_up.run_once(session, [spec._replace(ours=broken, against=[working])], False)
    assert done == [1] and "TypeError" in said[-1]


def divide(name, number):
    return 1 / number


def test_refused_rows_are_in_the_file(took, tmp_path, monkeypatch):
    for name, value in {"QUICK_LENGTH": 32, "QUICK_MEMORY_LENGTHS": (16,)}.items():
        monkeypatch.setattr(tangents, name, value)
    path = tmp_path / "h200-score-mods.json"
    sizes = ["--seqlens", "48", "--head-dims", "16"]

    def refuse(self, session):
        raise Inaccurate("outside the accuracy rule")

    monkeypatch.setattr(tangents.JvpCell, "measure", refuse)
    options = ["--quick", "--only", "jvp", "--json", str(path), *sizes]
    assert main(["bench", "score_mods", *options]) == 1
    written = json.loads(path.read_text())
    assert len(written["meta"]["refused"]) == 2 and "accuracy" in written["meta"]["refused"][0]
    assert {row["bench"] for row in written["rows"]} == {"MeanFlow", "MeanFlow memory"}


def test_the_documents_name_the_command(tmp_path):
    text = tables.table("bench:h200-score-mods:rows", tmp_path)
    assert text.startswith("Not measured yet: `python -m benchmarks score_mods --json")
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    row = cell("T5").case.row("triton", 1.5, "ms", peers={"flex": 2.0}, best_peer="flex", ratio=1.3)
    whole = document([row | {"error": 1e-3, "peer_error": 1e-3}], {"device": "a GPU"})
    (folder / "h200-score-mods.json").write_text(json.dumps(whole))
    text = tables.table("bench:h200-score-mods:rows", tmp_path)
    assert "score flex, T5, forward" in text and "python -m benchmarks score_mods" in text


@pytest.mark.gpu
@pytest.mark.parametrize("part", score_mods.PARTS)
def test_a_small_run(part, tmp_path):
    """In quick sizes no kernel is compiled ahead."""
    path = tmp_path / "results.json"
    main(["bench", "score_mods", "--quick", "--only", part, "--json", str(path)])
    written = json.loads(path.read_text())
    assert written["meta"]["device"] == torch.cuda.get_device_name()
    assert written["rows"] and written["meta"]["refused"] == []
