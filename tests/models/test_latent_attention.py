"""Latent attention in every kind of step, its cache, and refusals."""

import json
from functools import partial

import pytest
import torch

from onchip import LLM, SamplingParams, UnsupportedError, models
from onchip.core.device import DeviceInfo
from onchip.engine import ExecutionConfig, cuda_graphs
from onchip.engine import llm as llm_module
from onchip.kvcache import KVCache
from onchip.kvcache.draft_trees import pack_trees
from onchip.kvcache.prefill_chunks import PrefillChunks
from onchip.models import LatentSizes, ModelConfig, positions_of, random_model, safetensors
from onchip.quant import kv8
from tests.models.conftest import fields

FAMILIES = ["deepseek_v2", "deepseek_v3"]
PROMPTS = [[5, 9, 5, 7], list(range(10, 41)), [3], [*range(20, 31)], [*range(10, 33), 90]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def made(family="deepseek_v3", seed=3, dtype=torch.float32, **change):
    return random_model(ModelConfig.from_hf(fields(family) | change), seed=seed, dtype=dtype)


def token_ids(model, prompts=PROMPTS, check=lambda llm: None, params=GREEDY, **options):
    """Greedy tokens of an engine; check is called before it ends."""
    small = {"max_model_len": 128, "block_size": 4, "max_num_seqs": 4, "swap_space": 0}
    small |= {"num_pages": 90, "max_num_batched_tokens": 9}
    with LLM(model, **small | options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check(llm)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


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
    """The greedy tokens of the two families."""
    return {family: [greedy(made(family), p) for p in PROMPTS] for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_expanded_and_absorbed_attention_are_equal(family):
    """The steps of a prompt in one piece and in three, against whole sequences; fp64."""
    decoder, text = made(family, dtype=torch.float64), torch.arange(37).mul(29).remainder(130)
    exact = decoder.full(text[None])[0]
    for pieces in ((37,), (10, 26, 1)):
        cache = KVCache(decoder.cache_spec(4), 12)
        sequence, outs = cache.open(), []
        for piece in text.split(pieces):
            assert cache.append(sequence, piece.tolist()) is None
            batch = cache.view([sequence])
            assert batch.is_fresh == (not outs)
            outs.append(decoder(piece, positions_of(batch), batch, cache))
            cache.commit(sequence)
        torch.testing.assert_close(torch.cat(outs), exact, rtol=0, atol=1e-12)


def test_only_sequences_without_earlier_tokens_are_fresh():
    decoder = made()
    cache = KVCache(decoder.cache_spec(4), 12, max_seqs=3)
    first, second = cache.open(), cache.open()
    cache.append_all([first, second], [[1] * 9, [2] * 5])
    assert cache.view([first, second]).is_fresh
    cache.commit(first, 8)
    assert not cache.view([first, second]).is_fresh and cache.view([second]).is_fresh
    assert not cache.view([second], cache.static_batch(cache.view([second]).shape)).is_fresh


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_one_latent_of_memory(family):
    decoder = made(family)
    spec, sizes = decoder.cache_spec(), decoder.config.latent
    assert (spec.num_kv_heads, spec.head_dim, spec.latent) == (1, 28, 20)
    assert spec.page_bytes == 16 * 3 * sizes.cached * 4  # tokens, layers, numbers of fp32
    assert LatentSizes(512, 1536, 128, 64, 128).cached == 576


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batched", [9, 128])
def test_an_engine_gives_the_tokens_of_whole_sequences(family, batched, expected):
    assert token_ids(made(family), max_num_batched_tokens=batched) == expected[family]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("how", "gib"), [("recompute", 0), ("swap", 1)])
def test_preemption_changes_no_token(family, how, gib, expected):
    """Pages for two of the five sequences at their longest."""

    def check(llm):
        assert getattr(llm.stats(), f"preempted_by_{how}") > 0

    tokens = token_ids(made(family), check=check, num_pages=20, swap_space=gib)
    assert tokens == expected[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_in_host_memory_change_no_token(family, expected):
    def check(llm):
        assert llm.stats().pages_streamed > 0

    options = {"num_pages": 6, "kv_offloading_size": 0.01}
    assert token_ids(made(family), check=check, **options) == expected[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_pages_that_are_read_once_change_no_token(family, expected, monkeypatch):
    def check(llm):
        assert llm.stats().cascade_steps > 0

    monkeypatch.setattr(llm_module, "ExecutionConfig", partial(_with_cascade, "always"))
    assert token_ids(made(family), check=check) == expected[family]


def _with_cascade(mode, **options):
    return ExecutionConfig(**options | {"cascade": mode})


def test_pages_of_a_prefix_are_used_again(expected):
    """A second request with the prompt of the first; and two samples of one prompt."""
    llm_options = {"max_model_len": 128, "block_size": 4, "num_pages": 90, "swap_space": 0}
    with LLM(made(), **llm_options) as llm:
        for _ in range(2):
            outputs = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
            assert list(outputs[0].outputs[0].token_ids) == expected["deepseek_v3"][1]
        assert outputs[0].num_cached_tokens >= 28
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, n=2)
    twice = token_ids(made(), [PROMPTS[1]], params=params)
    assert twice == [expected["deepseek_v3"][1]] * 2


@pytest.mark.parametrize("tree", [None, "[(0,), (1,), (0, 0), (1, 0)]"])
def test_drafts_change_no_token(tree, expected):
    drafts = {"method": "ngram", "prompt_lookup_min": 1}
    drafts |= {"num_speculative_tokens": 3} if tree is None else {"speculative_token_tree": tree}
    assert token_ids(made(), speculative_config=drafts) == expected["deepseek_v3"]


@torch.no_grad()
def test_pages_in_8_bits_round_latents_alone():
    """One scale for the latent and the rotated columns of a token, which are rounded alike."""
    decoder, text = made(), torch.arange(37) * 3
    plain, rounded = (KVCache(decoder.cache_spec(4, kind), 12) for kind in (None, "fp8"))
    form = kv8.parse_kv_dtype("fp8")
    write = plain.pages.write
    round_trip = lambda k: kv8.dequantise(*kv8.quantise(k, form), k.dtype)
    plain.pages.write = lambda layer, k, v, slots: write(layer, round_trip(k), v, slots)
    outs = []
    for cache in (rounded, plain):
        sequence = cache.open()
        assert cache.append(sequence, text.tolist()) is None
        batch = cache.view([sequence])._replace(is_fresh=False)
        outs.append(decoder(text, positions_of(batch), batch, cache))
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)
    assert (outs[0] - decoder.full(text[None])[0]).abs().max() > 1e-4


def test_an_engine_serves_8_bit_pages():
    """In chunks and with preemption, as without."""
    tokens = token_ids(made(), kv_dtype="fp8", max_num_batched_tokens=9)
    again = token_ids(made(), kv_dtype="fp8", num_pages=20, max_num_batched_tokens=9)
    assert tokens == again
    with pytest.raises(UnsupportedError, match="int8 pages of latents are not served"):
        token_ids(made(), kv_dtype="int8")


@torch.no_grad()
def test_a_prompt_that_is_a_tree_or_in_8_bits_reads_its_pages():
    """Attention over the new tokens alone would see a chain, in 16 bits."""
    decoder, text = made(dtype=torch.float64), torch.arange(6) * 17 + 3
    cache = KVCache(decoder.cache_spec(4), 12)
    sequence = cache.open()
    assert cache.append(sequence, text.tolist()) is None
    batch = cache.view([sequence])
    assert batch.is_prompts
    assert not batch._replace(prefill=PrefillChunks("fp8", "hopper", ())).is_prompts
    numbers = torch.tensor(pack_trees([[-1, 0, 1, 1, 3, 2]]), dtype=torch.int32)
    grown = batch.grow_trees(numbers)
    run = lambda batch: decoder(text, positions_of(batch), batch, cache)
    assert torch.equal(run(grown), run(grown._replace(is_fresh=False)))
    assert not torch.allclose(run(grown), run(batch))


def test_layers_that_draft_are_not_loaded(tmp_path):
    """Multi-token prediction: the layers behind the last, in the file of DeepSeek-V3."""
    decoder = made()
    models.save(decoder, tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in safetensors.read_all(file).items()}
    stored |= {f"model.layers.3.{name}.weight": torch.ones(2) for name in ("enorm", "eh_proj")}
    safetensors.write(file, stored)
    with pytest.raises(ValueError, match="2 tensors are not part of the model: model.layers.3"):
        models.load(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        (tmp_path / "config.json").write_text(json.dumps(settings | {name: 1}))
        loaded = models.load(tmp_path)
        assert loaded.config.unused_layers == 1
        assert all(map(torch.equal, loaded.parameters(), decoder.parameters()))


def test_a_router_stays_in_fp32(tmp_path):
    """Its logits and the bias of the choice decide between experts that are nearly equal."""
    models.save(made(), tmp_path)
    loaded = models.load(tmp_path, dtype=torch.bfloat16)
    layer = loaded.layers[1].mlp
    assert loaded.dtype == layer.up.weight.dtype == torch.bfloat16
    assert layer.router.weight.dtype == layer.choice_bias.dtype == torch.float32
    assert torch.equal(layer.choice_bias, made().layers[1].mlp.choice_bias)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "recorded"),
    [
        (torch.bfloat16, None, True),
        (torch.float32, None, False),
        (torch.bfloat16, "fp8", False),
    ],
)
def test_steps_of_16_bits_are_recorded(dtype, kv_dtype, recorded, monkeypatch):
    """576 and 512 columns, as DeepSeek's: a GPU has a kernel for pages of 16 bits alone."""
    model = made(first_k_dense_replace=3, kv_lora_rank=512, qk_rope_head_dim=64, dtype=dtype)

    class Cache:
        device, max_seqlen, spec = torch.device("cuda"), 128, model.cache_spec(16, kv_dtype)

    monkeypatch.setattr(cuda_graphs, "device_info", lambda _: DeviceInfo("cuda", "", (9, 0)))
    assert cuda_graphs.can_record(model, Cache) == recorded


YARN = fields("deepseek_v3")["rope_scaling"]


def test_yarn_sharpens_the_scores():
    """By (0.1 mscale_all_dim ln(factor) + 1) ** 2. Equal mscale leaves the rotation as it is."""
    plain, yarn = (made(rope_scaling=block).config for block in (None, YARN))
    growth = 0.1 * torch.tensor(4.0, dtype=torch.float64).log().item() + 1
    assert plain.softmax_scale == 20**-0.5
    assert yarn.softmax_scale == pytest.approx(20**-0.5 * growth**2, rel=1e-12)
    assert yarn.rotaries[0].amplitude == 1.0


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True .* only False is"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "only 'softmax' is"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "is not one of greedy, group_limited_greedy"),
        ("deepseek_v2", {"mlp_bias": True}, "only False is"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank=0 must be an integer"),
        ("deepseek_v2", {"kv_lora_rank": 513}, "head_dim_v=513 between 1 and 512"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "rotary dim=7 must be even"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "latent attention shares no heads"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"topk_method": "greedy"}, "only 'noaux_tc' is"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "only 'sigmoid' is"),
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot form 3 equal groups"),
        ("deepseek_v3", {"topk_group": 5}, "of which a token chooses 5"),
        ("deepseek_v3", {"n_group": 8}, "groups of 1 experts are too small"),
        ("deepseek_v3", {"topk_group": 1}, "a token chooses 3 experts from 1 groups"),
        ("deepseek_v3", {"n_group": None}, "has no n_group"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
        ("deepseek_v3", {"num_nextn_predict_layers": 10**9}, r"must be in \[0, 4096\]"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("deepseek_v3", {"head_dim": 20}, "head_dim=20 .* only 8 is"),
        ("deepseek_v3", {"use_mla": False}, "use_mla=False"),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 1e300}}, "and finite"),
    ],
)
def test_unsupported_fields_are_refused(family, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(fields(family) | change)


@pytest.mark.parametrize("name", ["norm_topk_prob", "rope_interleave"])
def test_a_flag_that_is_null_is_false(name):
    """As in transformers, which asks whether it is true; an absent rope_interleave is true."""
    without, null = ModelConfig.from_hf(fields("deepseek_v3") | {name: None}), {name: False}
    assert without == ModelConfig.from_hf(fields("deepseek_v3") | null)
    assert without != ModelConfig.from_hf(fields("deepseek_v3") | {name: True})


def test_a_growth_of_zero_is_none():
    """As in transformers, for which 0 is the same as no field."""
    plain = {name: value for name, value in YARN.items() if "mscale" not in name}
    zeros = plain | {"mscale": 0, "mscale_all_dim": 0.0}
    absent, zero = (made(rope_scaling=block).config for block in (plain, zeros))
    assert absent == zero != made(rope_scaling=YARN).config


def test_fields_of_published_files_that_change_nothing_are_read():
    """Of DeepSeek-V2-Lite, DeepSeek-V2 and DeepSeek-V3."""
    common = {"ep_size": 1, "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True}
    common |= {"pretraining_tp": 1, "attention_dropout": 0.0, "head_dim": 8, "qk_head_dim": 20}
    lite = {"scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    v3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
    for family, more in (("deepseek_v2", lite), ("deepseek_v3", v3)):
        plain = fields(family)
        assert ModelConfig.from_hf(plain | common | more) == ModelConfig.from_hf(plain)
