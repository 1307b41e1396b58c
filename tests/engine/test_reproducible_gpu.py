"""An engine with reproducible=True on a GPU: the log probabilities of random lives have the bits of
forwards of the trainable model, with CUDA graphs or without.
"""

import random

import pytest
import torch

import onchip
from onchip.engine import Engine, ExecutionConfig, Limits, SamplingParams
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.models import ModelConfig, random_model
from tests.engine import test_reproducible as on_cpu

pytestmark = pytest.mark.gpu

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "eos_token_id": 151_645,
}
LLAMA_8B_4_LAYERS = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128_001,
}
SMALL = on_cpu.CONFIG  # windows, softcaps, two kinds of layers
NGRAM = SpeculativeConfig(4, prompt_lookup_max=3, prompt_lookup_min=1)


def make_model(config, dtype=torch.bfloat16):
    return random_model(ModelConfig.from_hf(config), seed=1, dtype=dtype, device="cuda")


def make_engine(model, reproducible=True, graphs=True, num_pages=700, **options):
    execution = ExecutionConfig(reproducible=reproducible, graphs=graphs)
    options = {"page_size": 16, "host_pages": 300, "speculative_config": NGRAM} | options
    limits = Limits(1600, 600, 24)
    return Engine(model, None, limits=limits, num_pages=num_pages, execution=execution, **options)


def arrive(engine, draw, vocab):
    """Prompts that share beginnings, of up to 1,200 tokens; some repeat themselves (drafts)."""
    head = list(range(draw.choice((0, 0, 16, 100, 600, 1100))))
    tail = [draw.randrange(vocab) for _ in range(draw.randrange(1, 40))]
    params = SamplingParams(
        n=draw.choice((1, 1, 2, 3)),
        max_tokens=draw.randrange(1, 90),
        temperature=draw.choice((0, 0.6, 1.0)),
        top_p=draw.choice((1.0, 0.9)),
        seed=draw.randrange(1000),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=draw.choice((None, None, None, 0)),
    )
    prompt = [token % vocab for token in head] + tail * draw.choice((1, 1, 2))
    return engine.add(prompt, params, priority=draw.choice((0, 0, 1)))


def live(engine, seed, count, vocab, monkeypatch):
    monkeypatch.setattr(on_cpu, "arrive", lambda engine, draw: arrive(engine, draw, vocab))
    return on_cpu.live(engine, seed, count)


def score(model, texts):
    """The log probabilities of all tokens but the first of each text, by packed forwards with
    gradients, a few texts at a time.
    """
    for start in range(0, len(texts), 4):
        some = texts[start : start + 4]
        lengths = [len(text) for text in some]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        packed = torch.tensor([token for text in some for token in text]).cuda()
        logits = model.logits(model.full(packed, cu_seqlens, max(lengths)))
        assert logits.requires_grad
        for text, rows in zip(some, logits.log_softmax(-1).split(lengths), strict=True):
            yield rows[:-1].gather(1, torch.tensor(text[1:]).cuda()[:, None])[:, 0].detach().cpu()


def count_differences(model, outputs):
    """(tokens, log probabilities with other bits than in a forward)."""
    sequences = list(on_cpu.collect(outputs))
    total = differ = 0
    for (_, first, logprobs), exact in zip(
        sequences, score(model, [text for text, _, _ in sequences]), strict=True
    ):
        exact = exact[first - 1 : first - 1 + len(logprobs)]
        total += len(logprobs)
        differ += int((torch.tensor(logprobs, dtype=exact.dtype) != exact).sum())
    return total, differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_small_model(graphs, dtype, monkeypatch):
    model = make_model(SMALL | {"max_position_embeddings": 2048}, dtype)
    with make_engine(model, graphs=graphs) as engine:
        outputs, seen = live(engine, 0, 60, 66, monkeypatch)
        seen["drafts"] = engine.scheduler.speculation.num_accepted_tokens
    total, differ = count_differences(model, outputs)
    assert total > 2000 and differ == 0
    assert all(seen.values()), seen


@pytest.mark.parametrize("config", [QWEN3_06B, LLAMA_8B_4_LAYERS], ids=lambda c: c["model_type"])
def test_the_shapes_of_models(config, monkeypatch):
    """10,000 tokens; the default differs."""
    model = make_model(config)
    with make_engine(model) as engine:
        outputs, seen = live(engine, 1, 180, 5000, monkeypatch)
    total, differ = count_differences(model, outputs)
    print(f"\n{config['model_type']}: {differ} of {total} differ; {seen}")
    assert total > 10_000 and differ == 0
    model.set_reproducible(False)
    with make_engine(model, reproducible=False) as engine:
        outputs, _ = live(engine, 1, 10, 5000, monkeypatch)
    total, differ = count_differences(model, outputs)
    print(f"by default {differ} of {total} differ")
    assert differ > total / 10


def test_graphs_and_eager_steps_give_the_same_bits(monkeypatch):
    model, logprobs = make_model(LLAMA_8B_4_LAYERS | {"num_hidden_layers": 2}), []
    for graphs in (True, False):
        with make_engine(model, graphs=graphs) as engine:
            outputs, _ = live(engine, 3, 25, 5000, monkeypatch)
        outputs.sort(key=lambda output: output.request_id)
        logprobs.append([row for _, _, rows in on_cpu.collect(outputs) for row in rows])
    assert logprobs[0] == logprobs[1]


def test_a_step_of_an_optimiser_is_sampled_from():
    config = SMALL | {"max_position_embeddings": 2048}
    options = {"max_model_len": 512, "num_pages": 200, "reproducible": True}
    with onchip.LLM(make_model(config), enforce_eager=True, **options) as llm:
        params = SamplingParams(max_tokens=9, logprobs=0, temperature=0.7, ignore_eos=True)
        prompts = [[1, 2, 3] * 30, [4, 5]]
        before = llm.generate(prompts, params, use_tqdm=False)
        model = llm.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.arange(60, device="cuda")[None]
        model.logits(model.full(tokens)).log_softmax(-1)[..., 3].sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimiser.step()
        llm.serve()
        after = llm.generate(prompts, params, use_tqdm=False)
        assert count_differences(model, after) == (18, 0)
        assert count_differences(model, before)[1] > 0


def test_other_engines_are_refused():
    with pytest.raises(onchip.UnsupportedError, match="float64"):
        make_engine(make_model(SMALL, torch.float64))


def test_sampled_tokens_do_not_depend_on_the_batch():
    model, draw = make_model(LLAMA_8B_4_LAYERS | {"num_hidden_layers": 1}), random.Random(4)
    prompts = [[draw.randrange(5000) for _ in range(draw.choice((3, 90)))] for _ in range(12)]
    params = [SamplingParams(seed=i, max_tokens=20, top_p=0.95, logprobs=1) for i in range(12)]
    outputs = []
    for groups in ([list(range(12))], [[i] for i in range(12)]):
        with make_engine(model, speculative_config=None) as engine:
            for group in groups:
                for i in group:
                    engine.add(prompts[i], params[i])
                number = lambda output: int(output.request_id.removeprefix("request-"))
                outputs += sorted(on_cpu.drain(engine), key=number)
    for one, other in zip(outputs[:12], outputs[12:], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
