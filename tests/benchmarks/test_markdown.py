"""Generated Markdown stays within 120 characters, and no cell of a table is lost."""

import pytest

from benchmarks import markdown

LONG = (
    "follows for chat, where other spreads of the same means give 82.7 and 80.9 % of all the slots"
)


def test_a_table_that_fits_is_a_table_of_markdown():
    text = markdown.table(["a", "b"], [["1", ""], ["3", "4"]])
    assert text == "| a | b |\n| --- | --- |\n| 1 | |\n| 3 | 4 |"
    assert "| --- | :-: |" in markdown.table(["a", "b"], [], centred=True)


def test_a_wide_table_states_its_constant_columns_once():
    rows = [["bf16", str(i), "", f"{LONG} {LONG}"] for i in range(3)]
    text = markdown.table(["type", "tokens", "RMSE", "verdict"], rows)
    sentence, table = text.split("\n\n")
    assert sentence.startswith("In every row: type bf16, verdict") and "RMSE" not in text
    assert table == "| tokens |\n| --- |\n| 0 |\n| 1 |\n| 2 |"


def test_a_table_that_is_still_too_wide_has_wrapped_cells():
    rows = [[f"claim {i}", LONG, f"measured {i} (0.98 to 1.02)"] for i in range(2)]
    rows.append(["short", "yes", "no"])
    rows.append(["shorter", "no", "no"])
    text = markdown.table(["published", "verdict", "here"], rows)
    lines = text.splitlines()
    assert lines[0] == "```text" and lines[-1] == "```" and max(map(len, lines)) <= 120
    assert lines[1].split() == ["published", "verdict", "here"]
    assert text.count("(0.98 to 1.02)") == 2  # not broken
    assert sum(not line for line in lines) == 2  # beside rows of several lines only
    assert sorted(text.replace("-", "").split()[1:-1]) == sorted(
        " ".join([*lines[1].split(), *(cell for row in rows for cell in row)]).split()
    )


def test_heads_are_wrapped_to_their_longest_word():
    rows = [[f"{LONG} {LONG}", "7"], ["yes", "8"]]
    text = markdown.table(["verdict", "tokens of the longest of all the sequences"], rows)
    assert [line.split()[-1] for line in text.splitlines()[1:4]] == ["of", "the", "longest"]


def test_words_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="a table of 3 columns does not fit 120"):
        markdown.table(["a", "b", "c"], [["x" * 50, "y" * 50, "z" * 50], ["x", "y", "z"]])


def test_code_is_not_broken():
    code = "`python -m benchmarks ring --simulate --json benchmarks/results/simulated-ring.json`"
    text = markdown.wrap(f"a simulation of a machine with many devices, kernels measured: {code}.")
    assert text.splitlines()[1] == f"{code}."
