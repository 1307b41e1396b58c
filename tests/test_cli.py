import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onchip
from onchip.cli import main
from onchip.models import builtin

ROOT = Path(onchip.__file__).parents[1]


def run(*args):
    """The exit code of a command, also where argparse leaves on its own."""
    try:
        return main(list(args))
    except SystemExit as stop:
        return stop.code


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == f"onchip {onchip.__version__}"


def test_python_dash_m_works_uninstalled():
    command = [sys.executable, "-m", "onchip", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert onchip.__version__ in done.stdout


def test_the_console_script_is_the_same_function():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"onchip": "onchip.cli:main"}


def test_importing_onchip_needs_torch_alone():
    lazy = "rich", "matplotlib", "triton", "onchip.demo", "onchip.bench", "onchip.testing"
    code = f"import sys, onchip; print([x for x in {lazy} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["bench", "nonsense"], "nonsense"),
        (["bench", "cpu", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["bench", "cpu", "--plot", "x.svg"], "forward, backward, peak"),
        (["bench", "forward", "--plot", "/no/such/folder/x.svg"], "/no/such/folder"),
        (["demo", "--report", "/no/such/folder/x.html"], "/no/such/folder"),
        (["explain", "--kernel", "nonsense"], "nonsense"),
        (["explain", "--heads", "6", "--kv-heads", "4"], "num_kv_heads"),
        (["explain", "--window", "-5", "0"], "window_size"),
        (["explain", "--dropout", "1.5"], "dropout_p"),
        (["explain", "--head-dim", "300"], "300"),
        (["explain", "--device", "nonsense"], "nonsense"),
        (["explain", "--device", "cuda:99"], "cuda:99"),
        (["explain", "--seqlen", "0"], "at least 1"),
        (["explain", "--dtype", "int8"], "int8"),
        (["nonsense"], "nonsense"),
        ([], "COMMAND"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(args, word, capsys):
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert word in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_bench_without_a_name_lists_the_benchmarks(capsys):
    assert run("bench") == 0
    assert capsys.readouterr().out.startswith("cpu ")


def test_explain_asks_about_any_size_at_no_cost(capsys):
    size = ["--seqlen", "1000000", "--batch", "64", "--heads", "32", "--kv-heads", "8"]
    assert run("explain", *size, "--device", "cpu", "--dtype", "bf16", "--causal") == 0
    out = capsys.readouterr().out
    assert "served by" in out
    assert "32 heads over 8" in out


def test_explain_passes_every_option_on(monkeypatch):
    seen = {}
    monkeypatch.setattr(onchip, "explain", lambda *t, **options: seen.update(options, t=t))
    run("explain", "--device", "cpu", "--window", "255", "-1", "--softcap", "30", "--stats")
    assert seen["window_size"] == (255, None)
    assert (seen["softcap"], seen["return_stats"], seen["kernel"]) == (30.0, True, None)
    run("explain", "--device", "cpu", "--seqlen", "7", "--seqlen-k", "9", "--head-dim-v", "16")
    q, k, v = seen["t"]
    assert (q.shape, k.shape, v.shape) == ((1, 7, 8, 64), (1, 9, 8, 64), (1, 9, 8, 16))
    assert (q.stride(-1), v.stride(-1)) == (1, 1)


def test_explain_lays_keys_into_pages(capsys):
    size = ["--batch", "64", "--seqlen", "1", "--seqlen-k", "8448", "--heads", "32"]
    size += ["--kv-heads", "8", "--head-dim", "128", "--dtype", "bf16", "--device", "cpu"]
    assert run("explain", *size, "--page-size", "16", "--shared", "8192") == 0
    out = capsys.readouterr().out
    assert "33792 of 16 slots" in out and "64 sequences in 1 group read 512 pages" in out
    assert run("explain", "--page-size", "16", "--seqlen-k", "9", "--shared", "10") == 2
    assert "--shared 10 must lie between 0 and the 9 keys" in capsys.readouterr().err


def test_a_broken_pipe_is_no_traceback():
    command = f"{sys.executable} -m onchip doctor | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr("onchip.doctor.findings", stop)
    assert run("doctor") == 130
    assert capsys.readouterr().err == "onchip: stopped\n"


def test_generate_works_offline_and_says_what_its_model_has_read(capfd):
    texts = []
    for seed in ("3", "3", "4"):
        options = ("--max-tokens", "12", "--seed", seed, "--ignore-eos", "--device", "cpu")
        assert run("generate", "Once upon", *options) == 0
        out, err = capfd.readouterr()
        assert "King James Bible" in err and "9 tokens of prompt, 12 drawn" in err
        texts.append(out)
    assert texts[0] == texts[1] != texts[2]


def test_generate_over_a_cache_of_8_bits(capfd):
    options = ("--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--device", "cpu")
    texts = []
    for kv_dtype in ((), ("--kv-dtype", "int8"), ("--kv-dtype", "fp8")):
        assert run("generate", "And God said, Let there", *options, *kv_dtype) == 0
        texts.append(capfd.readouterr().out)
    assert all(text.startswith(" ") for text in texts)
    assert run("generate", "x", "--kv-dtype", "fp4") == 2
    assert run("bench", "cpu", "--kv-dtype", "fp8") == 2
    assert "--kv-dtype is for: paged, serving" in capfd.readouterr().err


def test_generate_says_what_a_broken_model_does(capfd, monkeypatch):
    sick = builtin.tiny()
    with torch.no_grad():
        sick.embed.fill_(float("nan"))
    monkeypatch.setattr(builtin, "tiny", lambda *args: sick)
    assert run("generate", "Once upon", "--device", "cpu") == 2
    assert "the model failed: the logits are not finite" in capfd.readouterr().err


def test_generate_stops_chats_and_refuses(capfd):
    options = ("--max-tokens", "40", "--temperature", "0", "--ignore-eos", "--device", "cpu")
    assert run("generate", "hello", "--chat", *options) == 0
    whole, err = capfd.readouterr()
    assert f"{len('user: hello') + len(' assistant:')} tokens of prompt" in err
    stop = whole[5]
    assert run("generate", "hello", "--chat", "--stop", stop, "never", *options) == 0
    out, err = capfd.readouterr()
    assert out == whole[: whole.index(stop)] and "ended by stop" in err
    assert run("generate", "hello", "--model", "no/such/folder") == 2
    assert "no/such/folder has no config.json" in capfd.readouterr().err
