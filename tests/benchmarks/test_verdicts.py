"""Verdicts: each claim has one, and it is the one that its rows give."""

import pytest

from benchmarks import verdicts
from benchmarks.verdicts import Claim, claims

NAMED = {"file": "cpu-paper", "bench": "N x N", "kernel": "2,048 tokens"}
GOOD = Claim("survey", "", "16 MB", "reproduced", (NAMED,))
WRONG = {"file": "cpu-paper", "bench": "N x N", "kernel": "32K, more than"}


@pytest.mark.parametrize("claim", claims(), ids=lambda c: f"{c.text}: {c.says[:50]}")
def test_the_verdict_is_that_of_the_rows(claim):
    verdicts.check(claim)


def test_every_text_has_claims_and_none_twice():
    found = [(claim.text, claim.section, claim.says) for claim in claims()]
    assert len(set(found)) == len(found) > 150
    assert {text for text, _, _ in found} == set(verdicts.TEXTS)
    assert {claim.verdict for claim in claims()} == set(verdicts.VERDICTS)


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (GOOD._replace(verdict=""), "has no verdict"),
        (GOOD._replace(rows=({**NAMED, "kernel": "2,049 tokens"},)), "no row of cpu-paper"),
        (GOOD._replace(rows=({"file": "cpu-paper", "bench": "N x N"},)), "no `best`"),
        (GOOD._replace(verdict="not reproduced"), "but its rows say {True}"),
        (GOOD._replace(rows=(WRONG,)), "but its rows say {False}"),
        (GOOD._replace(rows=(NAMED, WRONG)), "but its rows say"),
        (GOOD._replace(published=32.0), "but its rows say {False}"),
        (GOOD._replace(published=(17.0, 20.0), tolerance=0.0), "but its rows say {False}"),
        (GOOD._replace(rows=()), "neither rows"),
        (GOOD._replace(verdict="not measured yet"), "a command is for"),
        (GOOD._replace(command="onchip bench cpu"), "a command is for"),
    ],
)
def test_what_a_claim_may_not_be(claim, reason):
    verdicts.check(GOOD)
    with pytest.raises(ValueError, match=reason.replace("{", r"\{").replace("}", r"\}")):
        verdicts.check(claim)


def test_numbers_come_from_rows():
    peaks = {"file": "h200-peak", "pass": "forward"}
    linear = {**peaks, "seqlen": 1048576, "over_rows": {**peaks, "seqlen": 1024}}
    assert verdicts.number(linear) == pytest.approx(1024)
    faster = {"file": "h200-forward", "bench": "forward", "take": "value", "over": "peers.fa2"}
    least, mean, most = (verdicts.number(faster | {"best": b}) for b in ("min", "geomean", "max"))
    assert 1 < least < mean < most
    assert verdicts.agrees(2.2, (1, 2), 0.1) and not verdicts.agrees(2.21, (1, 2), 0.1)
    assert verdicts.agrees(0.9, 1, 0.1) and not verdicts.agrees(0.89, 1, 0.1)


def test_an_item_has_the_number_the_gap_and_the_file():
    text = " ".join(verdicts.item(GOOD._replace(check="io.md#operations", why="So it is")).split())
    assert text == (
        "- **reproduced**: 16 MB. Computed 16 MiB (+0%) [cpu-paper]: fp32, of one head. So it is."
        " See [io.md](io.md#operations)."
    )
    assert "(" not in verdicts.describe(GOOD._replace(compare=False), NAMED)
    assert "| all |" in verdicts.table("summary")
