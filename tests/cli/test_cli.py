import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks  # noqa: F401  # its suites join those of `onchip bench`
import onchip
from onchip import models
from onchip.cli import main, options, progress
from onchip.models import builtin
from tests.cli.parsing import commands, parse

ROOT = Path(onchip.__file__).parents[1]


HUB = "no model of that name in the Hub cache"
HUB_COMMAND = "run `hf download Qwen/Qwen3-0.6B`"


def run(*args):
    """The exit code of a command, which `main` returns for --help and for mistakes as well."""
    return main(list(args))


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


def test_versions_and_help_are_printed_without_torch():
    """It takes seconds to load; so do rich and matplotlib."""
    code = f"""
import io, sys
from contextlib import redirect_stderr, redirect_stdout
from onchip.cli import main
names = {list(commands())}
more = ["--version"], ["--help"], [], ["version"], ["completion", "bash"], ["bench"]
for args in (*more, ["serve", "--print-config"], *([name, "--help"] for name in names)):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        assert main(args) == (0 if args else 2), args
    assert out.getvalue(), args
slow = "torch", "rich", "matplotlib", "asyncio", "webbrowser"
print([x for x in slow if x in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_names_of_options_are_those_of_the_package():
    """The parser has copies, for it does not import torch."""
    from onchip.core.problem import EIGHT_BIT_PRECISIONS
    from onchip.quant.kv8 import FORMATS

    assert tuple(FORMATS) == options.KV_DTYPES
    assert tuple(EIGHT_BIT_PRECISIONS) == options.PRECISIONS and builtin.NAME == options.BUILTIN


def test_functions_are_imported_at_their_first_use():
    """`onchip.explain` is the function; its module is onchip.core.explain."""
    code = """
import sys, onchip
assert "torch" not in sys.modules
import onchip.parallel, onchip.core.explain
assert callable(onchip.explain) and onchip.explain.__module__ == "onchip.core.explain"
assert {*onchip.__all__, "LLM", "masks"} <= set(dir(onchip))
from onchip import *
assert attention is onchip.attention
found = {name: getattr(onchip, name) for name in onchip.__all__}
print([name for name, x in found.items() if not callable(x) and x is not sys.modules[x.__name__]])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_onchip_needs_torch_alone():
    lazy = "rich", "matplotlib", "triton", "onchip.cli.demo", "onchip.cli.bench", "onchip.testing"
    code = f"import sys, onchip; onchip.attention; print([x for x in {lazy} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["bench", "nonsense"], "nonsense"),
        (["bench", "--json", "cpu"], "--json cpu is a file, and NAME is missing"),
        (["bench", "cpu", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["bench", "cpu", "--plot", "x.svg"], "forward, backward, peak"),
        (["bench", "forward", "--plot", "/no/such/folder/x.svg"], "/no/such/folder"),
        (["demo", "--report", "/no/such/folder/x.html"], "/no/such/folder"),
        (["explain", "--kernel", "nonsense"], "nonsense"),
        (["explain", "--heads", "6", "--kv-heads", "4"], "num_kv_heads"),
        (["explain", "--window", "-1", "0"], "-1 must be none (unbounded) or at least 0"),
        (["explain", "--window", "none", "x"], "x must be none"),
        (["explain", "--dropout", "1.5"], "dropout_p"),
        (["explain", "--head-dim", "577"], "577"),
        (["explain", "--device", "nonsense"], "nonsense"),
        (["explain", "--device", "cuda:99"], "cuda:99"),
        (["explain", "--seqlen", "0"], "at least 1"),
        (["explain", "--dtype", "int8"], "'int8' is not one of float64 (fp64), float32"),
        (["generate", "x", "--dtype", "bf17"], "bfloat16 (bf16)"),
        (["generate", "x", "--model", "Qwen/Qwen3-0.6B"], HUB),
        (["generate", "x", "--model", "Qwen/Qwen3-0.6B"], HUB_COMMAND),
        (["serve", "--model", "Qwen/Qwen3-0.6B"], HUB),
        (["doctor", "--model", "Qwen/Qwen3-0.6B"], HUB),
        (["lab", "--model", "Qwen/Qwen3-0.6B", "--no-open"], HUB),
        (["generate", "x", "--model", "./no/such"], "there is no folder ./no/such: a model is"),
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


def test_explain_allocates_nothing_for_any_size(capsys):
    size = ["--seqlen", "1000000", "--batch", "64", "--heads", "32", "--kv-heads", "8"]
    assert run("explain", *size, "--device", "cpu", "--dtype", "bf16", "--causal") == 0
    out = capsys.readouterr().out
    assert "served by" in out
    assert "32 heads over 8" in out


def test_explain_passes_every_option_on(monkeypatch):
    passed = {}
    monkeypatch.setattr(onchip, "explain", lambda *t, **options: passed.update(options, t=t))
    run("explain", "--device", "cpu", "--window", "255", "none", "--softcap", "30", "--stats")
    assert passed["window_size"] == (255, None)
    assert (passed["softcap"], passed["return_stats"], passed["kernel"]) == (30.0, True, None)
    run("explain", "--device", "cpu", "--seqlen", "7", "--seqlen-k", "9", "--head-dim-v", "16")
    q, k, v = passed["t"]
    assert (q.shape, k.shape, v.shape) == ((1, 7, 8, 64), (1, 9, 8, 64), (1, 9, 8, 16))
    assert (q.stride(-1), v.stride(-1)) == (1, 1)


@pytest.mark.parametrize(
    ("args", "dtype"),
    [
        (["--device", "cpu"], "float32"),
        (["--device", "cpu", "--on", "H200"], "bfloat16"),
        (["--device", "cpu", "--on", "H200", "--dtype", "fp16"], "float16"),
        (["--device", "cpu", "--dtype", "bf16"], "bfloat16"),
        (["--device", "cpu", "--dtype", "bfloat16"], "bfloat16"),
    ],
)
def test_explain_takes_the_dtype_of_the_device(args, dtype, capsys):
    assert run("explain", *args) == 0
    assert f"head_dim 64 / 64, {dtype}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["generate", "serve"])
def test_both_names_of_a_dtype_are_one(name):
    prompt = ["x"] if name == "generate" else []
    for text in ("bf16", "bfloat16"):
        assert parse([name, *prompt, "--dtype", text]).dtype == "bfloat16"


def test_the_model_has_one_name():
    for args in (["generate", "x"], ["serve"], ["lab"], ["doctor"]):
        assert parse([*args, "--model", "a/b"]).model == "a/b"


def test_explain_gives_a_reason_once(capsys):
    assert run("explain", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert out.count("has precedence") == 1
    for name in ("hopper", "tiled", "reference"):
        assert name in out


def test_progress_is_seen_where_there_is_no_terminal(monkeypatch, capsys):
    from rich.console import Console

    monkeypatch.setattr(progress, "PROGRESS_S", 0.0)
    with progress.ProgressDisplay(Console()) as report_progress:
        report_progress("first part", 0.0)
        report_progress("second part", 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["onchip:   0% after 0 s: first part", "onchip:  50% after 0 s: second part"]
    monkeypatch.setattr(progress, "PROGRESS_S", 3600.0)
    with progress.ProgressDisplay(Console()) as report_progress:
        report_progress("first part", 0.0)
    with progress.ProgressDisplay(Console(force_terminal=True)) as report_progress:
        monkeypatch.setattr(progress, "PROGRESS_S", 0.0)
        report_progress("first part", 0.0)
    assert capsys.readouterr().err == ""


def test_explain_lays_keys_into_pages(capsys):
    size = ["--batch", "64", "--seqlen", "1", "--seqlen-k", "8448", "--heads", "32"]
    size += ["--kv-heads", "8", "--head-dim", "128", "--dtype", "bf16", "--device", "cpu"]
    assert run("explain", *size, "--page-size", "16", "--shared", "8192") == 0
    out = capsys.readouterr().out
    assert "33792 of 16 slots" in out and "64 sequences in 1 group read 512 pages" in out
    assert run("explain", "--page-size", "16", "--seqlen-k", "9", "--shared", "10") == 2
    assert "--shared 10 must lie between 0 and the 9 keys" in capsys.readouterr().err


def test_a_broken_pipe_is_no_traceback():
    command = f"{sys.executable} -m onchip doctor | head -n 1; echo ${{PIPESTATUS[0]}}"
    bash = ["bash", "-c", command]
    done = subprocess.run(bash, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr
    assert done.stdout.split()[-1] in ("0", "141")  # 0 if the pipe held all of it


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr("onchip.cli.doctor.findings", stop)
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


def test_generate_with_drafts_of_the_built_in_draft_model(capfd):
    options = ("--max-tokens", "30", "--temperature", "0", "--ignore-eos", "--device", "cpu")
    assert run("generate", "And God said, Let there", *options) == 0
    plain = capfd.readouterr().out
    config = '{"method": "draft", "model": "tiny-draft", "num_speculative_tokens": 3}'
    assert run("generate", "And God said, Let there", *options, "--speculative-config", config) == 0
    out, err = capfd.readouterr()
    assert out == plain and "drafts accepted" in err
    assert run("generate", "x", "--speculative-config", "{") == 2
    assert "--speculative-config '{' is not JSON" in capfd.readouterr().err


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
    assert "there is no folder no/such/folder" in capfd.readouterr().err


def test_json_for_programs(capfd):
    commands = {
        "explain": ["explain", "--device", "cpu", "--causal", "--json"],
        "pages": ["explain", "--device", "cpu", "--page-size", "16", "--json"],
        "doctor": ["doctor", "--json"],
        "model": ["doctor", "--model", "no/such", "--json"],
        "version": ["version", "--json"],
        "bench": ["bench", "--json"],
        "generate": ["generate", "And", "--max-tokens", "3", "--device", "cpu", "--json"],
    }
    found = {}
    for name, words in commands.items():
        assert run(*words) == (2 if name == "model" else 0)
        out = capfd.readouterr().out
        found[name] = json.loads(out) if out else None
    assert found["explain"]["problem"]["causal"] and found["explain"]["kernel"]
    assert "hopper" in found["explain"]["not_by"] and found["pages"]["problem"]["page_size"] == 16
    assert {f["subject"] for f in found["doctor"]["machine"]} >= {"Python", "torch", "CPU"}
    assert found["model"] is None and found["version"]["onchip"] == onchip.__version__
    assert "cpu" in found["bench"]
    assert found["generate"]["completion_tokens"] == 3 and found["generate"]["text"]


def test_a_served_model_as_json(capsys, tmp_path):
    models.save(builtin.tiny(), tmp_path)
    assert run("doctor", "--model", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["served"] is True


@pytest.mark.parametrize("words", [[], ["-"]])
def test_a_prompt_from_standard_input(words, monkeypatch, capfd):
    options = ("--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--device", "cpu")
    assert run("generate", "And God said", *options) == 0
    expected = capfd.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("And God said\n"))
    assert run("generate", *words, *options) == 0
    assert capfd.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run("generate", *words, *options) == 2
    assert "the prompt is empty" in capfd.readouterr().err


def test_a_terminal_is_no_prompt(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert run("generate") == 2
    assert "missing PROMPT: give a text, or pipe one; see `onchip" in capsys.readouterr().err


def test_what_nothing_serves_has_its_own_exit_code(tmp_path, capsys):
    config = {"model_type": "x", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("generate", "x", "--model", str(tmp_path)) == 3
    assert "which is not served" in capsys.readouterr().err
    assert run("explain", "--kernel", "hopper", "--device", "cpu") == 3
    assert "hopper" in capsys.readouterr().err
