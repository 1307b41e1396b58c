"""Ctrl-C in every long command keeps what was done so far, names it, and exits with 130."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import benchmarks  # noqa: F401  # its suites join those of `onchip bench`
from benchmarks import memory
from onchip.cli import demo, main, tune
from onchip.cli.bench import cpu, gpu, harness, levels
from onchip.core.device import DeviceInfo
from onchip.engine import LLM


@pytest.fixture(autouse=True)
def _handler():
    """Python's own handler of SIGINT, which a runner of tests may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(*_, **__):
    """Send a real SIGINT to this process, and wait for it."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def row(n):
    return harness.Case("dense", "none", torch.float32, 64, n).row("tiled", 1.0, "ms")


def run_steps(session):
    session.run([("one", lambda: row(64)), ("two", lambda: row(128)), ("three", press)])


def stopped(capsys, *args):
    """(stdout, the sentence on stderr) of a command that Ctrl-C ends."""
    assert main(list(args)) == 130
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out, err.splitlines()[-1]


@pytest.mark.parametrize(("name", "module"), [("cpu", cpu), ("memory", memory)])
def test_bench_keeps_its_rows(name, module, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(module, "run", run_steps)
    file = tmp_path / "rows.json"
    out, sentence = stopped(capsys, "bench", name, "--json", str(file))
    assert sentence == f"onchip: stopped: 2 rows measured, written to {file}"
    assert [r["seqlen"] for r in json.loads(file.read_text())["rows"]] == [64, 128]
    assert len(out.splitlines()) == 2 and out.count("tiled") == 2
    out, sentence = stopped(capsys, "bench", name, "--json")
    assert len(json.loads(out)["rows"]) == 2 and "written to standard output" in sentence
    _, sentence = stopped(capsys, "bench", name)
    assert sentence == "onchip: stopped: 2 rows measured; --json FILE would have kept them"


def test_tune_keeps_its_rows(monkeypatch, capsys, tmp_path):
    def run(session, steps):
        session.run([("one", lambda: row(64)), ("two", press)])

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    hopper = DeviceInfo("cuda", "NVIDIA H100", (9, 0))
    monkeypatch.setattr(tune, "this_gpu", lambda: hopper, raising=False)
    file = tmp_path / "rows.json"
    out, sentence = stopped(capsys, "tune", "--quick", "--json", str(file))
    assert sentence == f"onchip: stopped: 1 row measured, written to {file}"
    assert len(json.loads(file.read_text())["rows"]) == 1
    assert "every row of tiles.py is kept" in out and tune.CURRENT not in out


def test_the_demo_writes_its_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "QUICK_LENGTHS", (64, 129))
    monkeypatch.setattr(demo, "QUICK_MASKED_LENGTH", 256)
    monkeypatch.setattr(demo.DemoRunner, "measure_masked", press)
    file = tmp_path / "report.html"
    out, sentence = stopped(capsys, "demo", "--quick", "--report", str(file))
    assert sentence.startswith(f"onchip: stopped: {file} has what was measured before")
    assert "129" in out and "the later parts are missing" in out.replace("\n", " ")
    assert "the later parts are missing" in file.read_text()
    monkeypatch.setattr(demo.DemoRunner, "measure", press)
    file.unlink()
    _, sentence = stopped(capsys, "demo", "--quick", "--report", str(file))
    assert sentence == "onchip: stopped: nothing was measured yet" and not file.exists()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_doctor_prints_what_it_measured(options, monkeypatch, capsys):
    def measure(device, report_progress):
        yield levels.LevelTiming("L1", 16384, 150e9, 0.0)
        press()

    monkeypatch.setattr(levels, "measure", measure)
    out, sentence = stopped(capsys, "doctor", "--measure", *options)
    assert sentence == "onchip: stopped: the measurements are not complete"
    if options:
        assert [m["level"] for m in json.loads(out)["memories"]] == ["L1"]
    else:
        assert "150 GB/s" in out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_generate_keeps_its_text(options, monkeypatch, capsys):
    stream = LLM.stream

    def interrupted(llm, *args):
        for count, output in enumerate(stream(llm, *args), 1):
            yield output
            if count == 3:
                press()

    monkeypatch.setattr(LLM, "stream", interrupted)
    words = ("And God said", "--device", "cpu", "--temperature", "0", "--ignore-eos")
    out, sentence = stopped(capsys, "generate", *words, *options)
    assert sentence == "onchip: stopped: 3 tokens after 12 of prompt"
    text = json.loads(out)["text"] if options else out
    assert len(text) == 3 and (not options or json.loads(out)["finish_reason"] == "interrupt")


def test_the_lab_says_that_it_stopped(monkeypatch, capsys):
    monkeypatch.setattr("onchip.lab.record.record_figures", press)
    assert stopped(capsys, "lab")[1] == "onchip: stopped"


def test_a_signal_from_outside_ends_a_process():
    """As a terminal sends it, while tokens are written."""
    words = ("And God said", "--max-tokens", "2000", "--ignore-eos", "--device", "cpu")
    command = [sys.executable, "-m", "onchip", "generate", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        first = child.stdout.read(5)
        child.send_signal(signal.SIGINT)
        rest, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in err, err
    assert f"stopped: {len(first + rest)} tokens" in err.splitlines()[-1]
