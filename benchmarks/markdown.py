"""Markdown within 120 characters a line: tables that fit, and text that is wrapped.

A table that is too wide loses the columns that are the same in every row: a sentence above it
states them. If it is still too wide, it becomes a block of text in which cells are wrapped.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest

WIDTH = 120
GAP = "  "
Cells = Sequence[str]


def wrap(text: str, indent: str = "") -> str:
    """text in lines of at most WIDTH, all but the first indented; `code` is not broken."""
    return f"\n{indent}".join(_break(text, WIDTH - len(indent), r"`[^`]+`"))


def table(heads: Cells, rows: Iterable[Cells], centred: bool = False) -> str:
    """A table with these heads, or what the module describes if it is too wide."""
    rows = list(rows)
    text = _table(heads, rows, centred)
    if _fits(text):
        return text
    varies = [i for i in range(len(heads)) if len({row[i] for row in rows}) > 1]
    constant = [i for i in range(len(heads)) if i not in varies and rows[0][i]]
    sentence = ", ".join(f"{heads[i]} {rows[0][i]}" for i in constant)
    heads, rows = [heads[i] for i in varies], [[row[i] for i in varies] for row in rows]
    text = _table(heads, rows, centred)
    text = text if _fits(text) else _block(heads, rows)
    return wrap(f"In every row: {sentence}.") + f"\n\n{text}" if sentence else text


def _table(heads: Cells, rows: Iterable[Cells], centred: bool) -> str:
    line = lambda cells: f"| {' | '.join(cells)} |".replace("  ", " ")
    rule = ["---", *([":-:" if centred else "---"] * (len(heads) - 1))]
    return "\n".join([line(heads), line(rule), *map(line, rows)])


def _fits(text: str) -> bool:
    return all(len(line) <= WIDTH for line in text.splitlines())


def _block(heads: Cells, rows: Sequence[Cells]) -> str:
    """Aligned columns; an empty line beside each row of several lines."""
    widths = _widths(heads, rows)
    head, *body = (_row(cells, widths) for cells in (heads, *rows))
    lines = [head, GAP.join("-" * width for width in widths), body[0]]
    for above, row in pairwise(body):
        lines += ["", row] if "\n" in above + row else [row]
    return "\n".join(["```text", *lines, "```"])


def _widths(heads: Cells, rows: Sequence[Cells]) -> list[int]:
    """Widths of columns: the widest column is narrowed, down to its longest word, until all fit.
    Heads are wrapped to their longest word.
    """
    columns = [[*_break(head, 1), *cells] for head, *cells in zip(heads, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in _break(cell, 1)) for column in columns]
    while sum(widths) + len(GAP) * (len(widths) - 1) > WIDTH:
        spare = [(width, i) for i, width in enumerate(widths) if width > least[i]]
        if not spare:
            raise ValueError(f"a table of {len(widths)} columns does not fit {WIDTH} characters")
        widths[max(spare)[1]] -= 1
    return widths


def _row(cells: Cells, widths: Sequence[int]) -> str:
    """One row: each cell wrapped to the width of its column."""
    wrapped = map(_break, cells, widths)
    lines = zip_longest(*wrapped, fillvalue="")
    return "\n".join(GAP.join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _break(text: str, width: int, unbroken: str = r"\([^()]{1,16}\)|\d %") -> list[str]:
    """Lines of at most width where words allow; what matches `unbroken` counts as one word."""
    glued = re.sub(unbroken, lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines] or [""]
