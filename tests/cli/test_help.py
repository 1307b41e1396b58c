"""One style of help, and documents that match it."""

import re
import shlex
from pathlib import Path

import click
import pytest

import onchip
from onchip.cli import exit_codes, main, root
from onchip.cli.command import Command
from tests.cli.parsing import commands, parse

COMMANDS = commands()
PAGE = Path(onchip.__file__).parents[1].joinpath("docs", "commands.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_one_sentence(name):
    assert type(COMMANDS[name]) is Command and COMMANDS[name].examples
    for option in COMMANDS[name].params:
        if isinstance(option, click.Option):
            assert re.fullmatch(r"[A-Za-z][^\n]*[^. ]\.", option.help or ""), option.name
            assert len(option.help) < 100, option.name


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal(name, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([name, "--help"] if name else ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and not any(line.endswith("...") for line in lines[1:])
    assert lines[0].startswith(f"Usage: onchip {name}") and "-h, --help" in "".join(lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_command_lines(name, monkeypatch, tmp_path):
    (tmp_path / "serve.toml").touch()
    monkeypatch.chdir(tmp_path)
    for example, what in COMMANDS[name].examples:
        line = re.fullmatch(r'(?:eval "\$\()?onchip ([^<>)]+?)(?:\)")?(?: [<>] \S+)?', example)
        assert line and what.endswith("."), example
        assert parse(shlex.split(line[1])).command == name


def test_the_page_of_commands_has_every_command_and_exit_code():
    assert set(re.findall(r"^\| `onchip ([\w-]+)", PAGE, re.M)) == set(COMMANDS)
    codes = {v for n, v in vars(exit_codes).items() if n.isupper()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.M)} == codes


def test_lists_take_values_in_either_way(capsys):
    for words in (["--seqlens", "64", "128"], ["--seqlens", "64", "--seqlens", "128"]):
        assert parse(["bench", "forward", *words, "--quick"]).seqlens == (64, 128)
    args = parse(["bench", "--only", "a", "b", "--quick", "forward"])
    assert (args.only, args.name) == (("a", "b"), "forward")
    args = parse(["generate", "--stop", "x", "--", "--a prompt"])
    assert (args.stop, args.prompt) == (("x",), "--a prompt")
    assert parse(["bench", "cpu", "--json"]).json == parse(["bench", "cpu", "--json", "-"]).json


def test_a_command_of_another_program_has_its_name(capsys):
    assert main(["--help"], command="bench", program="python -m benchmarks") == 0
    assert capsys.readouterr().out.startswith("Usage: python -m benchmarks [OPTIONS] [NAME]")
    assert main(["--jsn"], command="bench", program="python -m benchmarks") == 2
    assert "see `python -m benchmarks --help`" in capsys.readouterr().err


def test_names_of_commands_are_files():
    folder = Path(root.__file__).parent / "commands"
    assert {p.stem for p in folder.glob("*.py")} - {"__init__"} == set(root.NAMES)
