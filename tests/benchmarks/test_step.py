"""`python -m benchmarks step` without a GPU: its parts run, and are rows, and the thresholds check
them.
"""

import pytest
import torch

from benchmarks import step
from onchip.cli.bench.harness import RowRefused, Session, check_thresholds

TINY = step.QWEN3 | {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CPU = torch.device("cpu")


@pytest.fixture
def ran(monkeypatch):
    """The parts that ran, each for a microsecond."""
    ran = []

    def replay_us(job, rounds, device):
        job()
        ran.append(job.__name__)
        return 7.0 if job.__name__ == "step" else 1.0

    monkeypatch.setattr(step, "replay_us", replay_us)
    # one launch for norms, rotation and page write exists on a GPU only
    monkeypatch.setattr(step.Setup, "place", lambda self: None)
    step.Setup.place.__name__ = "place"
    return ran


def test_every_part_is_a_row(ran):
    rows = step.measure(Session(device=CPU, quick=True), TINY, 3, 37)
    assert ran == [*step.PARTS, "step"]
    values = {row["kernel"]: row["value"] for row in rows}
    assert values["all but attention"] == 6.0 and values["eager"] > 0
    assert {row["unit"] for row in rows} == {"us"} and rows[0]["num_kv_heads"] == 2


def test_a_step_that_is_not_finite_is_refused():
    with torch.inference_mode():
        setup = step.Setup.of(TINY, 3, 37, CPU)
        step.check(setup)
        setup.model.embed.fill_(float("nan"))
        with pytest.raises(RowRefused, match="not finite"):
            step.check(setup)


def test_the_thresholds_are_the_budgets():
    row = lambda part, us: {"bench": "step", "kernel": part, "value": us, "unit": "us"}
    rows = [row("all but attention", 1999.0), row("draw", 151.0), row("attention", 9999.0)]
    assert [v.ok for v in check_thresholds(rows, step.THRESHOLDS)] == [True, False]
