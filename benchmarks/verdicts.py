"""Verdicts about the quantitative claims of five texts: docs/verdicts.md.

verdicts.toml has the claims and names the rows of benchmarks/results that decide them. Numbers are
read from the rows, so that a verdict follows a new measurement: `check` fails where it does not.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import markdown
from benchmarks.paper_report import number_with_unit
from onchip.cli.bench.harness import Row, geomean

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
TEXTS = {
    "survey": "A survey of FlashAttention's versions, 2025",
    "notes": "Lecture notes on FlashAttention, 2025",
    "blog": "A blog on FlashAttention's versions, 2025",
    "paper": "FlashAttention, NeurIPS 2022, section 3.2",
    "tutorial": "A tutorial on FlashAttention, PagedAttention and Ring Attention, 2025",
}
REPRODUCED, FAILED, UNMEASURED, FOREIGN = VERDICTS = (
    "reproduced",
    "not reproduced",
    "not measured yet",
    "not ours",
)
PUBLISHED = "cpu-paper"  # its rows have a published figure and a verdict of their own
BEST: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "geomean": geomean}
OUTCOME = re.compile(r"^(follows|does not follow|possible[^;]*|impossible|as predicted)(; |$)")
OPTIONS = ("file", "take", "over", "over_rows", "best", "label", "compare")


class Claim(NamedTuple):
    text: str
    section: str
    says: str
    verdict: str
    rows: tuple[dict[str, Any], ...] = ()
    published: float | tuple[float, float] | None = None
    tolerance: float = 0.1
    check: str = ""  # a page of docs and a heading
    command: str = ""
    why: str = ""
    compare: bool = True


@cache
def claims() -> tuple[Claim, ...]:
    with (FOLDER / "verdicts.toml").open("rb") as file:
        document = tomllib.load(file)
    return tuple(_read(text, entry) for text in document for entry in document[text])


def _read(text: str, entry: dict[str, Any]) -> Claim:
    published = entry.get("published")
    lists = {"rows": tuple(entry.get("rows", ()))}
    if isinstance(published, list):
        lists["published"] = tuple(published)
    return Claim(text, **(entry | lists))


@cache
def _results(file: str) -> list[Row]:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]


def select(evidence: dict[str, Any]) -> list[Row]:
    """The rows of a results file that have these columns; a ValueError if there are none."""
    columns = {name: x for name, x in evidence.items() if name not in OPTIONS}
    rows = _results(evidence["file"])
    found = [r for r in rows if all(r.get(name) == x for name, x in columns.items())]
    if not found:
        raise ValueError(f"no row of {evidence['file']}.json has {columns}")
    return found


def _column(row: Row, name: str) -> float:
    outer, _, inner = name.partition(".")
    return row[outer][inner] if inner else row[outer]


def number(evidence: dict[str, Any]) -> float:
    """The number that these rows give."""
    take, over = evidence.get("take", "value"), evidence.get("over")
    values = [_column(r, take) / (_column(r, over) if over else 1) for r in select(evidence)]
    if len(values) > 1 and "best" not in evidence:
        raise ValueError(f"{len(values)} rows, and no `best`: {evidence}")
    value = BEST[evidence.get("best", "max")](values)
    return value / number(evidence["over_rows"]) if "over_rows" in evidence else value


def agrees(value: float, published: float | tuple[float, float], tolerance: float) -> bool:
    """Whether the value is the published one, or in the published range, within the tolerance."""
    low, high = published if isinstance(published, tuple) else (published, published)
    return low * (1 - tolerance) <= value <= high * (1 + tolerance)


def outcomes(claim: Claim) -> Iterator[bool]:
    """For each row with a published figure, whether it is reproduced."""
    for evidence in claim.rows if claim.compare else ():
        if not evidence.get("compare", True):
            continue
        if claim.published is not None:
            yield agrees(number(evidence), claim.published, claim.tolerance)
        elif _is_published(evidence):
            verdict = select(evidence)[0]["verdict"]
            if verdict.startswith(("follows", "possible", "does not follow", "impossible")):
                yield verdict.startswith(("follows", "possible"))


def _is_published(evidence: dict[str, Any]) -> bool:
    return evidence["file"] == PUBLISHED and not {"take", "over_rows"} & evidence.keys()


def check(claim: Claim) -> None:
    """Raise a ValueError if the claim has no verdict, no ground, or another one than its rows."""
    if claim.verdict not in VERDICTS:
        raise ValueError(f"{claim.says!r} has no verdict: {claim.verdict!r}")
    if not (claim.rows or claim.check or claim.command or claim.why):
        raise ValueError(f"{claim.says!r} has neither rows, a check, a command nor a reason")
    if (claim.verdict == UNMEASURED) != bool(claim.command):
        raise ValueError(f"{claim.says!r}: a command is for what is not measured yet, and only it")
    for evidence in claim.rows:
        number(evidence)
    found = set(outcomes(claim))
    expected = {REPRODUCED: {True}, FAILED: {False}}.get(claim.verdict, found)
    if found and found != expected:
        raise ValueError(f"{claim.says!r} is {claim.verdict!r}, but its rows say {found}")


def describe(claim: Claim, evidence: dict[str, Any]) -> str:
    """What a row gives, and by how much it differs from what was published."""
    compare = claim.compare and evidence.get("compare", True)
    if _is_published(evidence):
        return _published(select(evidence)[0], compare)
    value = number(evidence)
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    text = f"{shown} {evidence.get('label', '')}".rstrip()
    if isinstance(claim.published, (int, float)) and compare:
        text += f" ({value / claim.published - 1:+.0%})"
    return f"{text} [{evidence['file']}]"


def _published(row: Row, compare: bool) -> str:
    """Of a row of PUBLISHED: computed, measured, the gap, and the reason of its verdict."""
    given = {"computed": row["predicted"], "measured": row["measured"]}
    if row["exact"] and row["measured"] is not None:
        del given["computed"]
    parts = [f"{name} {number_with_unit(x, row['unit'])}" for name, x in given.items() if x]
    value = row["value"] if row["exact"] or row["predicted"] is None else row["predicted"]
    compare = compare and row["published"] is not None
    gap = f" ({value / row['published'] - 1:+.0%})" if compare else ""
    reason = OUTCOME.sub("", row["verdict"])
    return f"{' and '.join(parts)}{gap} [{PUBLISHED}]" + (f": {reason}" if reason else "")


def item(claim: Claim) -> str:
    """A claim as an item of a list."""
    found = "; ".join(describe(claim, evidence) for evidence in claim.rows)
    parts = [f"**{claim.verdict}**: {claim.says}", found[:1].upper() + found[1:], claim.why]
    text = ". ".join(part.removesuffix(".") for part in parts if part) + "."
    if claim.command:
        text += f" To measure it: `{claim.command}`."
    if claim.check:
        text += f" See [{claim.check.partition('#')[0]}]({claim.check})."
    return "- " + markdown.wrap(text, indent="  ")


def table(text: str) -> str:
    """The Markdown of a text's claims, or of the number of verdicts by text (`summary`)."""
    if text == "summary":
        return _summary()
    chosen = [claim for claim in claims() if claim.text == text]
    sections: dict[str, list[str]] = {}
    for claim in chosen:
        sections.setdefault(claim.section, []).append(item(claim))
    return "\n\n".join(f"*{name}*\n\n" + "\n".join(items) for name, items in sections.items())


def _summary() -> str:
    counts = {text: Counter(c.verdict for c in claims() if c.text == text) for text in TEXTS}
    rows = [[TEXTS[text], *(str(count[v]) for v in VERDICTS)] for text, count in counts.items()]
    total = Counter(claim.verdict for claim in claims())
    return markdown.table(["", *VERDICTS], [*rows, ["all", *(str(total[v]) for v in VERDICTS)]])
