"""Completion in a shell: click's scripts load, and ask `onchip` for the words that fit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onchip
from onchip.cli import main
from tests.cli.parsing import commands

ROOT = Path(onchip.__file__).parents[1]
PROGRAM = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m onchip "$@"\n'


def script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(monkeypatch, capfd, *words):
    """The completions of the last word, as the script for bash asks for them."""
    monkeypatch.setenv("_ONCHIP_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(("onchip", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert main([]) == 0
    lines = capfd.readouterr().out.split()
    return [line.partition(",")[2] for line in lines]


def test_commands_options_and_values(monkeypatch, capfd, tmp_path):
    assert complete(monkeypatch, capfd, "") == list(commands())
    assert complete(monkeypatch, capfd, "ge") == ["generate"]
    assert complete(monkeypatch, capfd, "serve", "--max-q") == ["--max-queue"]
    assert complete(monkeypatch, capfd, "bench", "fo") == ["forward"]
    assert complete(monkeypatch, capfd, "generate", "--dtype", "fp") == ["fp64", "fp32", "fp16"]
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert complete(monkeypatch, capfd, "serve", "--model", "o") == ["org/name", "o"]


def test_the_script_completes_in_bash(tmp_path, capsys):
    """COMPREPLY is filled as after `onchip gen<TAB>`."""
    (tmp_path / "script").write_text(script("bash", capsys))
    (tmp_path / "onchip").write_text(PROGRAM)  # the tests run without an installation
    (tmp_path / "onchip").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ask = "COMP_WORDS=(onchip gen); COMP_CWORD=1; _onchip_completion onchip; complete -p onchip"
    code = f'source {tmp_path}/script && {ask} && echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "generate" and "_onchip_completion" in done.stdout


@pytest.mark.parametrize(
    ("shell", "begins"), [("zsh", "#compdef onchip"), ("fish", "function _onchip_completion")]
)
def test_the_scripts_of_other_shells_parse(shell, begins, tmp_path, capsys):
    text = script(shell, capsys)
    assert text.startswith(begins) and f"_ONCHIP_COMPLETE={shell}_complete" in text
    if shutil.which(shell) is None:
        assert text.count("{") == text.count("}") and text.count("(") == text.count(")")
        return
    (tmp_path / "script").write_text(text)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_other_shells_are_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err
