"""Optional packages: torch alone runs the library, and a command that needs more says so."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import onchip
from onchip.core import extras

ROOT = Path(onchip.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVE = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette")
# What a process sees that has torch alone: these packages cannot be imported.
HIDE = f"""
import sys
for name in ("click", "rich", "matplotlib", "transformers", "tokenizers", "jinja2", *{SERVE}):
    sys.modules[name] = None
"""
# ... and one with click, which `onchip serve` and every other command needs.
SHOW_CLICK = "del sys.modules['click']\n"


def run_with_torch_alone(code, *args):
    command = [sys.executable, "-c", HIDE + code, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def run_command(*args, setup=SHOW_CLICK):
    return run_with_torch_alone(f"{setup}from onchip.cli import main\nsys.exit(main())", *args)


def test_the_package_depends_on_torch_alone():
    assert [re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]] == ["torch"]


def test_the_library_works_with_torch_alone():
    code = """
import torch, onchip
q, k, v = torch.randn(3, 1, 300, 2, 32)
onchip.attention(q, k, v, causal=True)
onchip.masks.causal().show(384)
print(onchip.explain(q, k, v))
sys.stderr.isatty = lambda: True  # progress is drawn on terminals only
with onchip.LLM("tiny", device="cpu") as llm:
    params = onchip.SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = llm.generate(["And God said", "In the beginning"], params)
assert [len(x.outputs[0].token_ids) for x in outputs] == [4, 4]
"""
    done = run_with_torch_alone(code)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\n2/2 requests, [\d,]+ tokens/s +\n$", done.stderr)


@pytest.mark.parametrize(
    ("args", "packages", "extra"),
    [
        (["demo", "--quick"], "rich and matplotlib", "cli"),
        (["bench", "cpu", "--quick"], "rich", "cli"),
        (["bench", "forward", "--plot", "x.svg"], "rich and matplotlib", "cli"),
        (["tune"], "rich", "cli"),
        (["doctor"], "rich", "cli"),
        (["serve"], r"\w+", "serve"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_says_which_packages_it_needs(args, packages, extra):
    done = run_command(*args)
    advice = re.escape(extras.advise(extra))
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(rf"onchip: onchip {args[0]} needs {packages}: {advice}\n", done.stderr)


def test_without_click_there_is_a_version_and_one_sentence():
    done = run_command("--version", setup="")
    assert (done.returncode, done.stdout) == (0, f"onchip {onchip.__version__}\n")
    for args in (["--help"], ["explain"], ["serve", "--help"], []):
        done = run_command(*args, setup="")
        assert (done.returncode, done.stdout) == (3, "")
        sentence = f"onchip: the command line needs click: {extras.advise('cli')}\n"
        assert done.stderr == sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--version"],
        ["--help"],
        ["demo", "--help"],
        ["bench"],
        ["explain", "--device", "cpu"],
        ["generate", "And God", "--max-tokens", "2", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_other_commands_work_with_torch_and_click(args):
    done = run_command(*args)
    assert done.returncode == 0 and done.stdout and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_the_lab_is_written_with_torch_and_click(tmp_path):
    done = run_command("lab", "--out", str(tmp_path / "lab"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lab" / "index.html").exists()


def test_require_names_what_is_missing(monkeypatch):
    extras.require("a program", "cli", "rich", "matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"^a program needs matplotlib: pip install '\.\[cli\]' "):
        extras.require("a program", "cli", "rich", "matplotlib")


def test_advice_names_extras_that_exist():
    names = set(PROJECT["optional-dependencies"])
    assert {"cli", "serve", "transformers", "all", "test", "dev"} <= names
    for file in sorted((ROOT / "onchip").rglob("*.py")):
        assert set(re.findall(r"advise\(['\"](\w+)['\"]\)", file.read_text())) <= names, file
    documents = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "Makefile"]
    for file in documents:
        for found in re.findall(r"'?\"?\.\[([\w,]+)\]", file.read_text(encoding="utf-8")):
            assert set(found.split(",")) <= names, (file, found)
        assert "'onchip[" not in file.read_text(encoding="utf-8"), f"{file}: onchip is not on PyPI"
