"""`python -m benchmarks train` at toy size: the same model for all candidates, rows
with their ratios, and curves that are compared with the distance of two torch backends.
"""

import json
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks import curves, train, train_report
from benchmarks.trainer import Trainer
from onchip.cli import main
from onchip.cli.bench import gpu
from onchip.cli.bench.gpu import Timing
from onchip.cli.bench.harness import Inaccurate, Session, check_thresholds
from onchip.models import ModelConfig, num_parameters

CPU = torch.device("cpu")


def test_all_rows_are_measured_on_a_cpu(tmp_path, capsys, monkeypatch):
    """In few steps: a CPU without bf16 takes a second for each."""
    monkeypatch.setattr(train, "ROUNDS", 2)
    monkeypatch.setattr(gpu, "TRIES", 1)
    monkeypatch.setattr(train, "TOY_TOKENS", 256)
    monkeypatch.setattr(curves, "TOY_STEPS", 5)
    results, picture = tmp_path / "train.json", tmp_path / "curves.svg"
    options = ["--json", str(results), "--plot", str(picture), "--threads", "1"]
    assert main(["bench", "train", *options]) == 0
    rows = {(r["bench"], r["mask"]): r for r in json.loads(results.read_text())["rows"]}
    models = [("train", "toy gpt2"), ("train", "toy llama"), ("train padded", "toy bert")]
    assert list(rows) == [*models, ("train curves", "toy gpt2")]
    for row in (rows[model] for model in models):
        assert row["value"] > 0 and row["peers"] and row["best_peer"] in row["peers"]
        assert row["unit"] == "tokens/s" and row["error"] > 0 and len(row["band"]) == 2
    heads = lambda row: (row["num_heads"], row["num_kv_heads"])
    assert [heads(rows[model]) for model in models] == [(2, 2), (4, 2), (2, 2)]
    printed = capsys.readouterr().out
    assert "There is no GPU here" in printed and "cudnn is left out" in printed
    assert "missed" not in printed
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize("shape", [train.TOY_GPT2, train.TOY_LLAMA])
def test_layer_by_layer_is_the_decoder(shape):
    trainer = Trainer(train.at_length(shape, 37), CPU, torch.float32)
    batch = train.random_batch(trainer.model.config, [37, 37], CPU)
    attend = train.dense(train.sdpa("math", trainer.model.config, causal=True), 2)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = trainer.model.full(batch.tokens.view(2, 37)).flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(trainer.model.logits(hidden), batch.targets)
    assert trainer(batch, attend).item() == pytest.approx(expected.item(), rel=1e-3)


def test_a_timed_step_leaves_the_weights_as_they_are():
    """So that a later candidate has the loss of the first."""
    config = train.at_length(train.TOY_GPT2, 16)
    trainer, batch = Trainer(config, CPU), train.random_batch(config, [16], CPU)
    attend = train.dense(train.sdpa("math", config, causal=True), 1)
    first, second = (trainer.step(batch, attend).item() for _ in range(2))
    assert first == second
    learns = Trainer(config, CPU, torch.float32, lr=1e-3)
    assert learns.step(batch, attend).item() > learns.step(batch, attend).item()


def test_every_shape_is_compiled_for_itself(monkeypatch):
    """A second number of tokens makes no program for any number; layers share theirs."""
    programs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=programs))
    torch._dynamo.reset()
    config = train.at_length(train.TOY_GPT2, 64)
    trainer = Trainer(config, CPU, compiled=True)
    for count in (1, 3):
        attend = train.dense(train.sdpa("math", config, causal=True), count)
        trainer.step(train.random_batch(config, [64] * count, CPU), attend)
    assert programs.frame_count == 8  # before (the first layer, the others), after, loss
    inputs = [n for g in programs.graphs for n in g.graph.nodes if n.op == "placeholder"]
    shapes = [n.meta["example_value"].shape for n in inputs if "example_value" in n.meta]
    assert shapes and all(type(size) is int for shape in shapes for size in shape)


def test_a_backend_without_a_backward_for_groups_gets_repeated_keys():
    """What is tried is a step of training, not its forward alone."""

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q.clone()

        @staticmethod
        def backward(ctx, dout):
            raise RuntimeError("no backward for groups")

    x = torch.randn(3, 1, 4, 2, 8)
    repeated = lambda q, k, v: q
    assert train._first_that_runs((Refuses.apply, repeated), *x) is repeated
    assert train._first_that_runs((lambda q, k, v: q + k + v, repeated), *x) is not repeated


def test_padded_and_packed_sequences_have_the_same_loss():
    config, lengths = train.at_length(train.TOY_GPT2, 64), torch.tensor([1, 63, 17])
    packed = train.random_batch(config, lengths.tolist(), CPU, 0.4)
    padded = train.pad(packed, lengths, 64)
    assert len(packed.tokens) == 81 and len(padded.tokens) == 192
    assert torch.equal(padded.tokens[padded.rows], packed.tokens[packed.rows])
    seen = torch.arange(64) < lengths[:, None]
    cu = torch.tensor([0, 1, 64, 81], dtype=torch.int32)
    trainer = Trainer(config, CPU, torch.float32)
    attend = train.dense(train.sdpa("math", config, attn_mask=seen[:, None, None]), 3)
    ours = trainer(packed, train.packed_onchip(cu, 64)).item()
    assert ours == pytest.approx(trainer(padded, attend).item(), rel=1e-3)


def test_a_rival_with_another_loss_is_left_out():
    config, printed = train.at_length(train.TOY_GPT2, 16), []
    session = Session(quick=True, say=printed.append)
    batch = train.random_batch(config, [16], CPU)
    attend = train.dense(train.sdpa("math", config, causal=True), 1)
    entered = {
        "onchip": train.Entry(batch, attend),
        "wrong": train.Entry(batch, lambda q, k, v: 9 * v),
        "late": train.Entry(batch, lambda q, k, v: 1 / 0),
    }
    case = train._case("toy", config, 16, 1)
    measured, _ = train.contest(session, case, Trainer(config, CPU), entered)
    assert list(measured.times) == ["onchip"] and len(printed) == 2
    assert "its loss is" in printed[0] and "ZeroDivisionError" in printed[1]


def test_wrong_attention_has_no_row():
    config = train.at_length(train.TOY_LLAMA, 64)
    with pytest.raises(Inaccurate):
        train.check_attention(lambda q, k, v: q + 1, config, 64, CPU)


def test_the_shapes_are_those_of_the_models_they_are_named_after():
    of = lambda shape, n: num_parameters(train.at_length(shape, n))
    assert of(train.GPT2, 1024) == 354_823_168  # gpt2-medium
    assert of(train.LLAMA, 2048) == 1_100_048_384  # TinyLlama-1.1B
    assert abs(of(train.BERT, 512) / 335e6 - 1) < 0.01  # bert-large


def test_flops_are_six_a_weight_and_twelve_a_pair():
    """A model of one layer, its products by hand."""
    config = ModelConfig.from_hf(
        train.TOY_LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 8}
    )
    weights = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64  # norms count for little
    expected = 6 * 10 * (weights + 64) + 6 * 10 * 211 * 64 + 12 * 64 * (7**2 + 3**2) / 2
    assert train.model_flops(config, [7, 3], causal=True) == expected


def test_a_row_is_ours_against_the_best(monkeypatch):
    timing = Timing({"onchip": [100.0] * 4, "slow": [300.0] * 4, "fast": [110.0] * 4}, 1.03, 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    case = train._case("llama", train.at_length(train.TOY_LLAMA, 64), 64, 2)
    session = Session(device=torch.device("cuda"))
    row = train._row(session, case, timing, 1000, 98.95e12 / 2, ["slow", "fast", "absent"])
    assert row["value"] == 10_000 and row["best_peer"] == "fast"
    assert row["ratio"] == pytest.approx(1.1) and row["mfu"]["onchip"] == pytest.approx(0.5)
    assert row["doubts"] == ["its A/A control is off by 3.0%"]
    heads, (line,) = train_report.steps_sheet([row])
    assert len(heads) == len(line) and line[0] == "Llama 1.1B" and line[4] == "50%"


def test_the_thresholds_are_the_required_ones():
    def row(mask, n, ratio, bench="train"):
        columns = {"bench": bench, "mask": mask, "seqlen": n, "ratio": ratio, "unit": "x"}
        return columns | {"band": (ratio - 0.001, ratio + 0.001), "value": 0.0}

    rows = [row("llama", 2048, 0.985), row("llama", 16384, 1.03), row("llama", 32768, 1.04)]
    rows += [row("bert", 512, 1.9, "train padded"), row("gpt2", 1024, 0.5, "train curves")]
    verdicts = check_thresholds(rows, train.THRESHOLDS)
    assert [v.ok for v in verdicts] == [False, True, False, True, False]


def test_curves_are_compared_with_those_of_the_first_backend():
    case = train._case("gpt2", train.at_length(train.TOY_GPT2, 64), 64, 2)
    row = curves.row(case, {"onchip": [2.0, 1.01], "fa2": [2.0, 1.0], "math": [2.0, 1.02]})
    assert row["value"] == pytest.approx(0.01 / 2**0.5) and row["ratio"] == pytest.approx(2)
    assert row["largest"] == pytest.approx({"onchip": 0.01, "math": 0.02})
    _, body = train_report.curves_sheet([row | {"bench": "train curves"}])
    assert [line[0] for line in body] == ["onchip and fa2", "math and fa2"]


def test_batches_follow_the_text():
    one, *_ = curves.batches(CPU, 64, 3, 2)
    assert torch.equal(one.tokens.view(3, 64)[:, 1:], one.targets.view(3, 64)[:, :-1])
    assert bytes(one.tokens.tolist()).isascii()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [train.TOY_GPT2, train.TOY_LLAMA])
def test_a_compiled_step_on_a_gpu_has_rivals(shape):
    session = Session(quick=True, device=torch.device("cuda", torch.cuda.current_device()))
    (row,) = train.measure(session, "toy", shape, 256, toy=False)
    assert "fa2" in row["peers"] and row["ratio"] > 0 and row["batch"] == train.TOKENS // 256


@pytest.mark.gpu
def test_packed_and_padded_on_a_gpu():
    session = Session(quick=True, device=torch.device("cuda", torch.cuda.current_device()))
    rows = train.measure_bert(session, train.TOY_GPT2, toy=False)
    assert rows[0]["bench"] == "train padded" and rows[0]["ratio"] > 0
