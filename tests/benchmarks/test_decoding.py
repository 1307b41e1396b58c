"""`python -m benchmarks decoding` without a GPU: models with known outputs, a row of each part."""

import pytest
import torch

from benchmarks import decoding
from benchmarks.serving import TINY
from benchmarks.workload import Roofline
from onchip.cli.bench.harness import RowRefused, Session, check_thresholds
from onchip.engine import LLM
from onchip.models import ModelConfig

CPU = torch.device("cpu")
UNTIED = TINY | {"tie_word_embeddings": False}
FEW = decoding.Sizes(8, 10, 20, 3, 2, (1, 3), 200, 96, 2, 128)


@pytest.fixture
def rows(monkeypatch):
    """Runs parts at small sizes."""
    monkeypatch.setattr(decoding, "QUICK", FEW)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)

    def run(*parts):
        session = Session(quick=True, device=CPU, only=parts)
        decoding.run(session)
        return {(row["bench"], row["kernel"], row["batch"]): row for row in session.rows}

    return run


def test_a_token_is_followed_by_the_next_one():
    model = decoding.successor_model(UNTIED, CPU, torch.float32)
    with LLM(model, max_model_len=64) as llm:
        (output,) = llm.generate([[7, 250]], decoding.SamplingParams(max_tokens=9, temperature=0))
    assert output.outputs[0].token_ids == (251, 252, 253, 254, 255, 256, 0, 1, 2)


@pytest.mark.parametrize("right", [0.7, 0.25])
def test_a_share_of_the_tokens_of_a_draft_model_is_right(right):
    model = decoding.successor_model(UNTIED, CPU, torch.float32, right)
    embed = model.embed.data
    normed = embed * embed.square().mean(-1, keepdim=True).rsqrt()
    tokens = torch.arange(len(embed))
    follows = (normed @ model.head.data.T).argmax(-1)
    share = (follows == (tokens + 1) % len(tokens)).float().mean()
    assert float(share) == pytest.approx(right, abs=0.01)
    assert len(set(follows.tolist())) == len(tokens)


def test_latency(rows):
    found = rows("latency")
    steps = [found["latency", name, batch] for name in ("unfused", "fused") for batch in (1, 8)]
    assert all(row["unit"] == "ms" and 0 < row["roofline_share"] < 1 for row in steps)
    for plain, fused in zip(steps[:2], steps[2:], strict=True):
        assert plain["ratio"] is None
        assert fused["ratio"] == plain["value"] / fused["value"]
    assert found["first token", "onchip", 1]["seqlen"] == FEW.first_prompt


def test_drafts_of_a_repeated_text_are_accepted(rows):
    found = rows("speculation")
    assert found["speculation", "ngram", 1]["accepted"] == 1.0
    assert found["speculation", "draft", 1]["tokens_per_step"] > 1
    assert found["large batch", "ngram", FEW.batch]["accepted"] is None  # nothing repeats
    assert all(row["ratio"] > 0 and row["best_peer"] == "without" for row in found.values())


def test_structured_texts(rows):
    pytest.importorskip("llguidance")
    found = rows("structure")
    assert found["structure", "json", FEW.structured]["ratio"] > 0
    assert found["structured first token", "json", 1]["unit"] == "ms"


def test_a_long_request_is_read_from_host_memory(rows):
    found = rows("long")
    assert found["long", "onchip", 1]["value"] > 0
    assert found["beside", "onchip", 8]["ratio"] > 0


def test_steps_of_models_with_experts(rows):
    found = rows("experts")
    names = {row["mask"] for row in found.values()}
    assert names <= {"tiny mixtral", "tiny gpt_oss"} and set(found) == {
        ("experts", "onchip", batch) for batch in FEW.sparse
    }
    assert all(0 < row["roofline_share"] < 1 for row in found.values())


@pytest.mark.parametrize("fields", [decoding.EIGHT_EXPERTS, decoding.GPT_OSS_20B])
def test_bytes_of_experts_are_those_that_tokens_reach(fields):
    """One token reads the experts of one token, and many tokens read all."""
    config = ModelConfig.from_hf(fields | {"tie_word_embeddings": False})
    one, many, all_of_them = (Roofline.of(config, 2, 1.0, n).weight_bytes for n in (1, 999, None))
    experts = config.layers[0].experts
    matrices = 3 * config.hidden_size * experts.intermediate_size * config.num_layers
    assert many == all_of_them == one + 2 * matrices * (experts.num_experts - experts.per_token)


def test_a_refused_request_is_no_row():
    model = decoding.successor_model(UNTIED, CPU, torch.float32)
    with LLM(model, max_model_len=16) as llm, pytest.raises(RowRefused, match="refused"):
        decoding.decode(llm, [[1] * 40], 2)


def test_thresholds():
    row = {"bench": "latency", "mask": "qwen3-0.6b", "batch": 1, "kernel": "fused"}
    row |= {"value": 0.9, "unit": "ms"}
    verdicts = {v.threshold.name: v for v in check_thresholds([row], decoding.THRESHOLDS)}
    assert verdicts["a step of 1, ms"].ok and not verdicts["a step of 8, ms"].ok


def test_words_of_a_wide_tokenizer_are_all_different():
    tokenizer = decoding.WideTokenizer(3000)
    words = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert len(words) == 3000 and tokenizer.decode([104, 105, 257]) == "hiaa"
