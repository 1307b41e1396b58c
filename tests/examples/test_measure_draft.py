"""examples/measure_draft.py: accepted drafts of held-out chapters."""

import sys

import measure_draft
from packing import Corpus


def test_prompts_are_beginnings_of_chapters():
    corpus = Corpus.of(["first chapter", "another one"])
    assert measure_draft.beginnings(corpus, 9, 4) == [list(b"firs"), list(b"anot")]


def test_it_prints_accepted_drafts_by_position(monkeypatch, capsys):
    words = ["--chapters", "3", "--prompt", "60", "--tokens", "12", "--drafts", "2"]
    monkeypatch.setattr(sys, "argv", ["measure_draft.py", *words])
    measure_draft.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(measure_draft.TEMPERATURES)
    assert all("drafts accepted" in line and "by position 0." in line for line in lines)
