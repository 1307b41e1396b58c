"""Every example of docs/masks.md runs and prints the drawing below it."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "masks.md"
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)


def run_examples(page):
    """(printed, expected) per example, all of them in one namespace."""
    namespace = {}
    for code, expected in EXAMPLE.findall(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        yield printed.getvalue(), expected


def test_examples_print_the_drawings_of_the_page():
    results = list(run_examples(PAGE.read_text(encoding="utf-8")))
    assert len(results) >= 8
    for printed, expected in results:
        assert printed == expected
