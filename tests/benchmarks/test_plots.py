"""Pictures of results: every line is drawn; the documents' pictures show the committed files."""

import itertools
import json
from pathlib import Path

import pytest
import torch

import onchip
from benchmarks import plots
from onchip.cli.bench.harness import Case, document
from onchip.cli.bench.plots import caption, short_count

ROOT = Path(onchip.__file__).parents[1]


def results(*rows):
    return document(list(rows), {"device": "a GPU"})


def speed(n, mask="none", bench="forward", **peers):
    case = Case(bench, mask, torch.bfloat16, 64, n)
    return case.row("hopper", 100.0 + n, "TFLOP/s", peers=peers)


def test_every_contender_is_a_line(tmp_path):
    cells = itertools.product((512, 1024), ("none", "causal"))
    rows = [speed(n, mask, fa3=90.0, cudnn=80.0) for n, mask in cells]
    rows += [speed(512, bench="forward triton", fa3=90.0)]
    plots.draw(results(*rows), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    for word in ("FlashAttention-3", "cuDNN", "onchip, triton", "no mask", "causal", "a GPU"):
        assert word in text
    assert "FlexAttention" not in text


def test_a_file_is_the_same_every_time(tmp_path):
    document = results(speed(512, fa3=1.0), speed(1024, fa3=2.0))
    for name in ("a.svg", "b.svg"):
        plots.draw(document, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_memory_that_was_not_measured_is_dashed(tmp_path):
    def peak(n, measured):
        case = Case("peak", "causal", torch.bfloat16, 128, n, 1, 4)
        row = case.row("hopper", n / 1e3, "MB", peers={"standard": n * n / 1e3})
        return row | {"peer_measured": measured}

    rows = results(peak(1024, True), peak(2048, True), peak(1 << 20, False))
    plots.draw(rows, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert all(word in text for word in ("its square law", "standard attention", "1M", "dasharray"))


def test_loss_curves_are_drawn_in_one_plot(tmp_path):
    """Also where speeds were measured in the same run; how far apart the first of SDPA is from
    itself is not drawn.
    """
    case = Case("train curves", "gpt2", torch.bfloat16, 64, 1024, way="3 steps")
    curves = {"onchip": [3.0, 2.0, 1.5], "fa2": [3.0, 2.1, 1.5], "cudnn": [3.0, 2.0, 1.4]}
    step = Case("train", "llama", torch.bfloat16, 64, 2048).row("onchip", 1e5, "tokens/s")
    rows = results(step, case.row("onchip", 0.1, "RMS to fa2") | {"curves": curves})
    plots.draw(rows, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert all(word in text for word in ("apart from FlashAttention-2", "cuDNN", "a GPU"))
    above, below = plots.curves(rows["rows"]).axes
    assert len(above.lines) == 3 and len(below.lines) == 2


def test_results_without_speeds_are_refused(tmp_path):
    row = Case("host", "none", torch.bfloat16, 64, 64).row("hopper", 50.0, "us")
    with pytest.raises(ValueError, match="TFLOP/s"):
        plots.draw(results(row), tmp_path / "x.svg")


def test_lengths_are_short():
    shown = {512: "512", 1024: "1k", 1500: "1500", 1 << 20: "1M"}
    assert {n: short_count(n) for n in shown} == shown


@pytest.mark.parametrize(("stem", "picture"), plots.PICTURES.items())
def test_the_pictures_of_the_documents_are_up_to_date(stem, picture):
    """`python -m benchmarks.plots` draws them anew."""
    source = ROOT / "benchmarks/results" / f"{stem}.json"
    if not source.exists():
        pytest.skip(f"{source.name} is not measured yet")
    meta = json.loads(source.read_text())["meta"]
    assert caption(meta) in (ROOT / "docs" / picture).read_text()


def test_a_picture_is_drawn_from_a_file(tmp_path, capsys):
    source = tmp_path / "x.json"
    source.write_text(json.dumps(results(speed(512, fa3=1.0))))
    assert plots.main([str(source), str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_file_without_a_picture_is_misuse(capsys):
    assert plots.main(["x.json"]) == 2
    assert "RESULTS.json PICTURE" in capsys.readouterr().err
