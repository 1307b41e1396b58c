"""The documents tell the truth: examples run, links lead somewhere, commands exist, tables fit."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import tables
from onchip.cli import bench
from tests.cli.parsing import parse
from tests.masks.test_masks_doc import run_examples

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EVERY_PAGE = [
    *(*PAGES, ROOT / "CHANGELOG.md"),
    *(page for folder in ("onchip", "examples") for page in sorted((ROOT / folder).rglob("*.md"))),
]
MEASURED = "benchmarks/results"  # empty until a benchmark has been run
COMMAND = re.compile(
    r"(?<![\w./-])((?:make|onchip|python -m onchip|python -m benchmarks(?= ))\b(?: [^`#\n]+)?)"
)
name = lambda page: page.relative_to(ROOT).as_posix()


def blocks(text, language):
    """(line, code) of every fenced block in a language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(text[: m.start()].count("\n") + 1, m[1]) for m in fence.finditer(text)]


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The fragments that GitHub gives to a page's headings."""
    heads = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def spans(page):
    """What stands in backticks, and every line of shell blocks."""
    text = page.read_text(encoding="utf-8")
    lines = [line for _, code in blocks(text, "sh") for line in code.splitlines()]
    return re.findall(r"`([^`\n]+)`", prose(text)) + lines


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for line, code in blocks(page.read_text(encoding="utf-8"), "python"):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_the_readme_opens_with_two_short_proofs():
    """That onchip gives SDPA's result, and that partial results merge."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first_two = blocks(readme, "python")[:2]
    for (_, code), name in zip(first_two, ("scaled_dot", "merge_states"), strict=True):
        lines = [line for line in code.splitlines() if line]
        assert len(lines) <= 6 and name in code and "assert_close" in lines[-1]


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_lines_have_at_most_120_characters(page):
    """Generated tables too: benchmarks/markdown.py wraps them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [(i, len(line)) for i, line in enumerate(lines, 1) if len(line) > 120]
    assert not long, f"(line, length): {long}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page):
    for span in spans(page):
        for path in re.findall(r"(?<![\w/.])(?:onchip|tests|docs|bench|\.ci)/[\w./-]*", span):
            assert path.startswith(MEASURED) or (ROOT / path).exists(), path


def _without_shell(words):
    """The words of a command before a pipe, a redirection or the end of the line."""
    ends = (i for i, word in enumerate(words) if word in ("|", "<", ">", "&"))
    return words[: next(ends, len(words))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page, monkeypatch, tmp_path):
    (tmp_path / "serve.toml").touch()
    monkeypatch.chdir(tmp_path)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in (m[1] for span in spans(page) for m in [COMMAND.match(span)] if m):
        command = command.replace("python -m benchmarks ", "onchip bench ")
        words = shlex.split(command.removeprefix("python -m "))
        if words[0] == "make":
            assert words[1] in targets, command
        elif len(words) > 1 and words[0] == "onchip":
            args = parse(_without_shell(words[1:]))  # raises if there is no such command
            assert args.command != "bench" or args.name in (None, *bench.BENCHES), command


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_suites_of_a_clone_are_not_commands_of_the_package(page):
    """`onchip bench NAME` has the suites of the wheel; `python -m benchmarks NAME` has all."""
    source = (ROOT / "onchip" / "cli" / "bench" / "__init__.py").read_text(encoding="utf-8")
    packaged = set(re.findall(r'^    "(\w+)": Benchmark\(', source, re.MULTILINE))
    assert "cpu" in packaged
    assert set(re.findall(r"onchip bench ([a-z]+)", page.read_text(encoding="utf-8"))) <= packaged


def test_limits_quotes_the_errors():
    results = list(run_examples((ROOT / "docs" / "limits.md").read_text(encoding="utf-8")))
    assert len(results) > 12
    for printed, expected in results:
        assert printed == expected


def test_named_tests_exist():
    """Every `TEST=...` of CONTRIBUTING and of the claims selects at least one test."""
    pages = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "claims.md"
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for path, _, words in re.findall(r"TEST=\"?(tests/[\w./]+)( -k (\w+))?", text):
        files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("test_*.py"))
        source = "".join(f.read_text(encoding="utf-8") for f in files)
        assert re.search(rf"(def|class) \w*{words}\w*", source, re.IGNORECASE), (path, words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_are_up_to_date(page):
    """If this fails, run `python -m benchmarks.tables`."""
    text = page.read_text(encoding="utf-8")
    assert tables.rewrite(text) == text


def test_every_option_is_explained():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^- (`[^:]+):", text, re.M))))
    for function in tables.FUNCTIONS:
        assert set(tables.keyword_options(function)) <= explained


def test_every_package_is_in_architecture():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = {p.stem for p in (ROOT / "onchip").iterdir() if p.suffix == ".py" or p.is_dir()}
    words = set(re.findall(r"\w+", blocks(text, "text")[0][1]))
    assert packages - {"__main__", "__pycache__"} <= words


def test_every_file_of_the_hopper_kernels_is_in_their_table():
    section = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").split("## The files")[1]
    listed = re.findall(r"`([\w*]+\.py)`", section.split("## ")[0])
    folder = ROOT / "onchip" / "kernels" / "hopper"
    found = {path for pattern in listed for path in folder.glob(pattern)}
    assert {path.name for path in folder.glob("[!_]*.py")} == {path.name for path in found}


def test_contributing_is_short():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
