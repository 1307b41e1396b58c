"""Measured numbers in sentences: those that follow from rows do, and each has a source."""

import re
from pathlib import Path

import pytest

from tests.measured_sentences import ROOT, SENTENCES, Sentence
from tests.test_docs import PAGES, name


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda s: f"{s.page}: {s.text[:40]}")
def test_sentences_have_the_numbers_of_the_rows(sentence: Sentence):
    page = flat((ROOT / sentence.page).read_text(encoding="utf-8"))
    assert sentence.current() in page, f"{sentence.page} must read: {sentence.current()}"


NUMBER = r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?"
DECIMAL = r"(?<![\w.,-])\d[\d,]*\.\d+"
MEASURED = re.compile(
    rf"{NUMBER} ?(?:TFLOP/s|Tflop/s|[TGM]B/s|tokens/s|pages/s|calls/s)"  # rates
    rf"|{NUMBER} (?:us|ns)\b|{DECIMAL} m?s\b"  # times that nobody states as a limit
    rf"|{DECIMAL} ?(?:x\b|times)|{NUMBER}x\b"  # ratios
    rf"|{NUMBER} % (?:faster|slower|longer|shorter)|of the best peer|geomean|geometric mean"
    rf"|\b(?:took|takes|built in) (?:about )?{NUMBER} (?:ms|s|seconds|minutes)\b"
)
SOURCE = re.compile(
    r"20\d\d-\d\d-\d\d"  # a date
    r"|benchmarks\.md|notebook\.md|benchmarks/results|examples/data|#h200|#on-a-gpu"  # rows
    r"|data ?sheet|[Pp]ublished|arxiv\.org|together\.ai|programming guide"  # numbers of others
    r"|threshold|may be|at most|<=|[Pp]redict|[Ss]imulat|not measured"  # not measured
)
GENERATED = re.compile(r"<!-- ([\w:-]+) -->\n.*?<!-- /\1 -->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TABLE = "<generated>"
EXEMPT = (
    "docs/notebook.md",  # each section has a date
    "docs/claims.md",  # thresholds, each with the command that checks it
)


def statements(text: str) -> list[tuple[int, str, str]]:
    """(line, heading, text) of every paragraph, list item and table without its code."""
    blank = lambda match: "\n" * match[0].count("\n")
    text = GENERATED.sub(lambda match: TABLE + blank(match), text)
    found, heading, start, lines = [], "", 0, []
    for i, line in enumerate([*FENCE.sub(blank, text).splitlines(), ""], 1):
        ends = not line.strip() or line.startswith("#") or re.match(r"([-*]|\d+\.) ", line)
        if line.startswith("|") and not lines and found and found[-1][1] == heading:
            start, _, before = found.pop()  # a table belongs to the paragraph before it
            lines.append(before)
        if ends and lines:
            found.append((start, heading, " ".join(lines)))
            lines = []
        if line.startswith("#"):
            heading = line
        elif line.strip():
            start = start if lines else i
            lines.append(line.strip())
    return found


def unsourced(text: str) -> list[str]:
    """Statements with a measured number, and neither a source nor generated rows in the section."""
    found = statements(text)
    with_rows = {heading for _, heading, statement in found if TABLE in statement}
    return [
        f"line {line}: {statement}"
        for line, heading, statement in found
        if MEASURED.search(statement) and not SOURCE.search(statement) and heading not in with_rows
    ]


@pytest.mark.parametrize("page", [p for p in PAGES if name(p) not in EXEMPT], ids=name)
def test_measured_numbers_have_a_source(page: Path):
    """A date, a link to rows or to the notebook, or a generated table in the same section."""
    assert not unsourced(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "sentence",
    [
        "It reaches 752 TFLOP/s.",
        "A call takes 35 us on the host.",
        "A step took 3 minutes.",
        "It is 1.3x as fast, or 1.3 times.",
        "The geomean is above one.",
        "- steps are 12 % faster",
        "Measured:\n\n| a | b |\n|---|---|\n| speed | 4.5 TB/s |",
    ],
)
def test_the_rule_finds_measured_numbers(sentence: str):
    dated = sentence.replace("\n", " (2026-11-18)\n", 1) if "\n" in sentence else sentence
    dated = dated if "2026" in dated else f"{dated} (2026-11-18)"
    rows = f"{sentence}\n\n<!-- bench:cpu -->\n| a |\n<!-- /bench:cpu -->"
    assert unsourced(f"## Speed\n\n{sentence}\n")
    assert not unsourced(f"## Speed\n\n{dated}\n")
    assert not unsourced(f"## Speed\n\n{rows}\n")
    assert unsourced(f"## Speed\n\n{sentence}\n\n## Rows\n\n<!-- a -->\n<!-- /a -->\n")


@pytest.mark.parametrize(
    "sentence",
    ["blocks of 128 x 128", "a timeout of 10 s", "tiles of 64 KiB", "within 60 seconds, 3 times"],
)
def test_the_rule_leaves_shapes_and_limits_alone(sentence: str):
    assert not unsourced(f"## Shapes\n\n{sentence}\n")
