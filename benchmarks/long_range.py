"""The table of docs/training.md: accuracies that examples/long_range.py wrote to examples/data."""

import json
from pathlib import Path
from typing import Any

from benchmarks import markdown

ATTENTIONS = ("dense", "sparse")


def table(path: Path) -> str:
    """Tasks down, attentions across: the mean over the seeds, in brackets the least and largest."""
    command = f"`python examples/long_range.py --results examples/data/{path.name}`"
    if not path.exists():
        return f"Not measured yet: {command} writes the accuracies."
    document = json.loads(path.read_text(encoding="utf-8"))
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        cells.setdefault(row["task"], {})[row["attention"]] = row
    heads = ["task", "tokens", "best constant answer", *ATTENTIONS]
    body = [_line(task, attentions) for task, attentions in cells.items()]
    return f"{markdown.table(heads, body)}\n\n{markdown.wrap(_caption(document, path))}"


def _line(task: str, attentions: dict[str, dict[str, Any]]) -> list[str]:
    first = next(iter(attentions.values()))
    tokens = f"{'2 x ' if task == 'retrieval' else ''}{first['seqlen']:,}"
    found = [_accuracy(attentions.get(name)) for name in ATTENTIONS]
    return [task, tokens, f"{100 * first['constant']:.1f} %", *found]


def _accuracy(row: dict[str, Any] | None) -> str:
    if row is None or not row["accuracies"]:
        return ""
    return "{:.1f} % ({:.1f} to {:.1f})".format(*(100 * row[k] for k in ("mean", "min", "max")))


def _caption(document: dict[str, Any], path: Path) -> str:
    options = f"--seeds {document['seeds']} --steps {document['steps']}"
    command = f"python examples/long_range.py {options} --results examples/data/{path.name}"
    return (
        f"{document['held_out']} held-out examples, {document['seeds']} seeds, {document['steps']}"
        f" steps of {document['batch']} examples, {document['layers']} layers {document['width']}"
        f" wide, {document['dtype']}; {document['device']}, torch {document['torch']}, commit"
        f" {document['commit']}, {document['date'][:10]}: `{command}`."
    )
