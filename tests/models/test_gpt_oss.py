"""gpt-oss: sinks in every kind of step, files in MXFP4, and refusals."""

import json
from functools import partial

import pytest
import torch

import onchip
from onchip import LLM, SamplingParams, UnsupportedError, models
from onchip.engine import ExecutionConfig
from onchip.engine import llm as llm_module
from onchip.engine.prefill_precision import make_prefill_planner
from onchip.kvcache import KVCache
from onchip.models import ModelConfig, mxfp4_weights, random_model, safetensors
from onchip.quant import kv8
from onchip.quant.microscaling import MXFP4, quantise_blocks
from tests.models.conftest import fields

PROMPTS = [[5, 9, 5, 7], list(range(10, 41)), [3], [*range(20, 31)], [*range(10, 33), 90]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
GLOBAL = {"layer_types": ["full_attention"] * 3}


def made(seed=0, **change):
    return random_model(ModelConfig.from_hf(fields("gpt_oss") | change), seed=seed)


def with_sinks(decoder, value):
    """The same model with other sinks."""
    for block in decoder.layers:
        block.attention.sinks.detach().fill_(value)
    return decoder


def token_ids(model, prompts=PROMPTS, check=lambda llm: None, **options):
    """Greedy tokens of an engine; check is called before it ends."""
    small = {"max_model_len": 128, "block_size": 4, "max_num_seqs": 4, "swap_space": 0}
    small |= {"num_pages": 90, "max_num_batched_tokens": 9}
    with LLM(model, **small | options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        check(llm)
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def greedy(decoder, prompt):
    """By whole sequences, without pages."""
    tokens = list(prompt)
    for _ in range(14):
        logits = decoder.logits(decoder.full(torch.tensor([tokens]))[0, -1])
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected():
    """The greedy tokens of two models: with windows, and without."""
    kinds = {"windows": made(seed=3), "global": made(seed=3, **GLOBAL)}
    return {kind: [greedy(model, p) for p in PROMPTS] for kind, model in kinds.items()}


@torch.no_grad()
def test_sinks_change_the_result():
    """Far below all scores they are as none; far above, attention adds nothing."""
    text = torch.arange(37)[None] * 3
    logits = [
        model.logits(model.full(text))
        for model in (made(), *(with_sinks(made(), value) for value in (-1e4, 1e4)))
    ]
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(logits, logits[1:], strict=False))
    model = with_sinks(made(), 1e4)
    for block in model.layers:
        block.attention.qkv.weight.zero_()
        block.attention.qkv.bias.zero_()
    torch.testing.assert_close(model.logits(model.full(text)), logits[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("how", "gib"), [("recompute", 0), ("swap", 1)])
def test_preemption_changes_no_token(how, gib, expected):
    """Pages for two of the five sequences at their longest."""

    def check(llm):
        assert getattr(llm.stats(), f"preempted_by_{how}") > 0

    tokens = token_ids(made(seed=3), check=check, num_pages=20, swap_space=gib)
    assert tokens == expected["windows"]


def test_pages_in_host_memory_change_no_token(expected):
    """Sinks count once, among the pages on the device."""

    def check(llm):
        assert llm.stats().pages_streamed > 0

    options = {"num_pages": 6, "kv_offloading_size": 0.01}
    assert token_ids(made(seed=3), check=check, **options) == expected["windows"]


@pytest.mark.parametrize(("kind", "change"), [("windows", {}), ("global", GLOBAL)])
def test_shared_pages_that_are_read_once_change_no_token(kind, change, expected, monkeypatch):
    """Sinks count once, among the own pages; layers with a window read all pages."""

    def check(llm):
        assert llm.stats().cascade_steps > 0

    monkeypatch.setattr(llm_module, "ExecutionConfig", partial(_with_cascade, "always"))
    assert token_ids(made(seed=3, **change), check=check) == expected[kind]


def _with_cascade(mode, **options):
    return ExecutionConfig(**options | {"cascade": mode})


def test_drafts_change_no_token(expected):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    assert token_ids(made(seed=3), speculative_config=drafts) == expected["windows"]


def test_trees_of_drafts_are_served_without_windows(expected):
    tree = {"method": "ngram", "prompt_lookup_min": 1}
    tree["speculative_token_tree"] = "[(0,), (1,), (0, 0), (1, 0)]"
    assert token_ids(made(seed=3, **GLOBAL), speculative_config=tree) == expected["global"]
    with pytest.raises(ValueError, match="tree is not served: the model has layers with a window"):
        token_ids(made(seed=3), speculative_config=tree)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@torch.no_grad()
def test_pages_in_8_bits_round_keys_and_values_alone(kv_dtype):
    decoder, text = made(), torch.arange(37) * 3
    cache = KVCache(decoder.cache_spec(4, kv_dtype), 12)
    sequence = cache.open()
    assert cache.append(sequence, text.tolist()) is None
    batch = cache.view([sequence])
    positions, form = models.positions_of(batch), kv8.parse_kv_dtype(kv_dtype)

    def attend(layer, q, k, v, **options):
        k, v = (kv8.dequantise(*kv8.quantise(t, form), t.dtype)[None] for t in (k, v))
        return onchip.attention(q[None], k, v, causal=True, **options)[0]

    ours, expected = decoder(text, positions, batch, cache), decoder.run(text, positions, attend)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_8_bit_prefill_is_refused_where_no_kernel_has_sinks():
    """The recipe on the CPU has none. The Hopper kernel has."""
    decoder = made()
    cache = KVCache(decoder.cache_spec(16), 12)
    with pytest.raises(UnsupportedError, match="prefill_precision='fp8' is not served.*sinks"):
        make_prefill_planner(decoder, cache, "fp8")
    assert make_prefill_planner(decoder, cache, "auto") is None


QUANTISED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
}
# Rows of whole blocks: 64 and 96 columns.
WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def published(tmp_path):
    """A folder in bf16 with the experts in MXFP4, and the plain tensors that they stand for."""
    models.save(made(seed=5, **WIDE).bfloat16(), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in safetensors.read_all(file).items()}
    plain = dict(stored)
    for name in [n for n in stored if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        matrices = quantise_blocks(stored.pop(name).float().transpose(1, 2), MXFP4)
        blocks = matrices.codes.unflatten(-1, (-1, 16))
        scales = matrices.scales.view(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = matrices.dequantise().bfloat16().transpose(1, 2)
    safetensors.write(file, stored)
    edit(tmp_path, quantization_config=QUANTISED)
    return tmp_path, plain


def edit(folder, **change):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def test_experts_in_mxfp4_are_loaded(published, tmp_path):
    """Exactly, and saved in the dtype of the decoder."""
    folder, plain = published
    loaded = models.load(folder)
    assert loaded.dtype == torch.bfloat16
    models.save(loaded, tmp_path / "saved")
    saved = safetensors.read_all(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in plain)
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    again = models.load(tmp_path / "saved")
    assert all(map(torch.equal, again.parameters(), loaded.parameters()))


def test_an_engine_serves_experts_in_mxfp4(published):
    folder, _ = published
    decoder = models.load(folder, dtype=torch.float32)
    served = token_ids(str(folder), dtype="float32")
    assert served == [greedy(decoder, prompt) for prompt in PROMPTS]


def test_mxfp4_is_dequantised_as_by_transformers(published):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder, plain = published
    stored = safetensors.read_all(folder / "model.safetensors")
    for name in (n for n in plain if n not in stored):
        pair = (stored[name + suffix] for suffix in mxfp4_weights.SUFFIXES)
        theirs = mxfp4.convert_moe_packed_tensors(*pair, dtype=torch.bfloat16)
        assert torch.equal(theirs, plain[name])


def test_every_code_and_scale_of_mxfp4_is_dequantised():
    """E8M0: 0 to 254 are powers of two, 255 is NaN."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256).view(16, 1, 16).repeat(1, 255, 1).to(torch.uint8)
    scales = torch.arange(255).repeat(16, 1).to(torch.uint8)
    ours = mxfp4_weights.dequantise(blocks, scales, 255 * 32).bfloat16()
    theirs = mxfp4.convert_moe_packed_tensors(blocks[None], scales[None])[0].T
    assert torch.equal(ours, theirs)
    unknown = torch.full_like(scales, 255)
    assert mxfp4_weights.dequantise(blocks, unknown, 255 * 32).isnan().all()


def test_a_shard_has_a_part_of_every_expert_in_mxfp4(published):
    folder, _ = published
    whole = models.load(folder).layers[0].mlp
    shares = [models.load(folder, rank=rank, world_size=2).layers[0].mlp for rank in (0, 1)]
    up = [share.up.weight.view(5, 2, 48, 64) for share in shares]
    assert torch.equal(torch.cat(up, 2), whole.up.weight.view(5, 2, 96, 64))
    down = [share.down.weight for share in shares]
    assert torch.equal(torch.cat(down, 1), whole.down.weight)


def test_ranks_divide_sinks_with_the_heads(published):
    folder, _ = published
    whole = models.load(folder)
    shares = [models.load(folder, rank=rank, world_size=2) for rank in (0, 1)]
    for i, block in enumerate(whole.layers):
        parts = [share.layers[i].attention.sinks for share in shares]
        assert torch.equal(torch.cat(parts), block.attention.sinks)


def rewrite(folder, change):
    file = folder / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in safetensors.read_all(file).items()}
    change(stored)
    safetensors.write(file, stored)


def test_damaged_files_in_mxfp4_are_named(published):
    folder, _ = published
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite(folder, lambda stored: stored.update({name: stored[name].float()}))
    with pytest.raises(ValueError, match=f"{name} is stored as F32; weights are one of U8"):
        models.inspect(folder)
    rewrite(folder, lambda stored: stored.update({name: stored[name][:, 1:].byte()}))
    with pytest.raises(ValueError, match=rf"{name} has shape .* implies \(5, 64, 3\)"):
        models.inspect(folder)
    rewrite(folder, lambda stored: stored.pop(name))
    with pytest.raises(ValueError, match=f"1 tensors are missing: {name}"):
        models.inspect(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "only 'mxfp4' is"),
        ({"quantization_config": {"bits": 4}}, "bits=4 in quantization_config is not known"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* only 'silu' is"),
        ({"experts_per_token": 4}, "experts_per_token=4 .* only 2 is"),
        ({"swiglu_limit": 0}, "swiglu_limit=0 .* must be a number above 0"),
        ({"rope_scaling": None}, "has neither rope_scaling nor rope_parameters"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 3 of"),
        ({"num_experts": 6}, r"n_routed_experts, got \[5, 6, None\]"),
        ({"qkv_bias": True}, "qkv_bias=True"),
    ],
)
def test_unsupported_fields_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(fields("gpt_oss") | change)


def test_fields_of_published_files_that_change_nothing_are_read():
    """Of gpt-oss-20b."""
    plain = fields("gpt_oss")
    unused = {"experts_per_token": 2, "initial_context_length": 64, "output_router_logits": False}
    unused |= {"router_aux_loss_coef": 0.9, "attention_dropout": 0.0, "hidden_act": "silu"}
    unused |= {"use_cache": True, "quantization_config": QUANTISED}
    assert ModelConfig.from_hf(plain | unused) == ModelConfig.from_hf(plain)
