"""Docstrings as Markdown: what is described becomes code, and no character becomes markup."""

import pytest

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

from website.griffe_extension import to_markdown


def test_described_parameters_become_code():
    text = "q, k: the inputs. v: the values.\nmask: `v: ...` is code.\nOther words: stay."
    expected = "\n`q`, `k`: the inputs. `v`: the values.\n\n`mask`: `v: ...` is code."
    assert to_markdown(text, ["q", "k", "v", "mask"]) == f"{expected}\nOther words: stay."


def test_characters_of_formulas_are_no_markup():
    assert to_markdown("a * b <= c_d; out[, lse]", []) == r"a \* b &lt;= c\_d; out\[, lse]"


def test_indented_code_stays():
    assert to_markdown("Steps:\n\n    x = a * b\n", ["x"]) == "Steps:\n\n    x = a * b\n"
