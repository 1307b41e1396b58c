"""What is recorded is what the library does, and can be shown."""

import json

import pytest
import torch

from onchip.engine.tokenizer import ByteTokenizer
from onchip.lab import page, papers, record
from onchip.lab.rounding import round_significant
from onchip.models import ModelConfig, builtin, random_model, save
from tests.models.conftest import fields


def test_recording_is_strict_json_the_same_every_time_and_leaves_the_threads_alone(data):
    before = torch.get_num_threads()
    again = record.record_figures()
    assert json.dumps(data, allow_nan=False) == json.dumps(again, allow_nan=False)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", papers.KERNELS)
def test_formulas_equal_the_ledgers_at_the_last_length_that_runs(name):
    """At the last length that runs, both count the same."""
    book = papers.run_with_ledger(name, papers.EXECUTED)
    formula = papers.count_traffic(name, papers.EXECUTED, papers.HEAD_DIM, papers.HALF, papers.SRAM)
    assert (book.reads, book.writes) == (formula.reads, formula.writes)


def test_phases_and_tensors_are_the_same_bytes(data):
    for runs in data["bytes"]["runs"].values():
        for run in runs:
            phases = sum(phase["read"] + phase["write"] for phase in run["phases"])
            assert phases == sum(map(sum, run["tensors"].values()))


def test_rows_are_probabilities_over_what_came_before(data):
    rows = data["rows"]
    ends = [i for i, owner in enumerate(rows["owners"]) if owner not in rows["owners"][i + 1 :]]
    assert len(ends) == len(rows["words"])
    for layer in rows["weights"]:
        for head in layer:
            for end, row in zip(ends, head, strict=True):
                assert sum(row) == pytest.approx(1, abs=1e-3) and not any(row[end + 1 :])


def test_rows_are_those_of_the_model_that_is_named(tmp_path):
    save(random_model(builtin.tiny().config, seed=3), tmp_path)
    ByteTokenizer().save(tmp_path)
    theirs, ours = record.rows(model=tmp_path), record.rows()
    assert (theirs["model"], theirs["owners"]) == (tmp_path.name, ours["owners"])
    assert theirs["weights"] != ours["weights"]
    with pytest.raises(ValueError, match="missing"):
        record.rows(model=tmp_path / "missing")


@torch.no_grad()
def test_a_sink_has_the_rest_of_the_weight_of_a_row():
    model, recorder = (
        random_model(ModelConfig.from_hf(fields("gpt_oss"))),
        record.WeightRecorder([5]),
    )
    tokens = torch.arange(6)[None]
    hidden = model.run(tokens, tokens, recorder)
    torch.testing.assert_close(hidden, model.full(tokens), rtol=0, atol=1e-6)
    for block, weights in zip(model.layers, recorder.weights, strict=True):
        block.attention.sinks.fill_(-1e4)
        assert (weights.sum(-1) < 0.999).all()
    recorder = record.WeightRecorder([5])
    model.run(tokens, tokens, recorder)
    for weights in recorder.weights:
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, 1))


def test_no_data_can_end_its_element():
    text = page.assemble({"version": "</script><script>alert(1)</script>"})
    assert "</script><script>alert" not in text and "\\u003c/script>" in text
    with pytest.raises(ValueError, match="JSON"):
        page.assemble({"l": float("nan")})


def test_infinities_are_text_and_digits_are_significant():
    assert round_significant(torch.tensor([-torch.inf, 1 / 3])) == ["-inf", 0.3333333]
    assert round_significant([[123456789.0]], 3) == [[123000000.0]]
