"""A transformers model over pages gives the same logits, or it is refused."""

import json
import math
import socket
import sys
from itertools import pairwise

import pytest
import torch

import onchip
from onchip import UnsupportedError, models
from onchip.kvcache import KVCache
from onchip.models import foreign, positions_of, safetensors
from tests.models import foreign_models


@pytest.fixture(autouse=True)
def _transformers():
    pytest.importorskip("transformers")


def tokens(count, seed=0):
    return torch.randint(3, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def loaded(kind, folder, **options):
    foreign_models.model(kind).save_pretrained(folder)
    return models.load_foreign(folder, **options)


def described(folder, kind, **fields):
    """A folder with a config and one tensor that is not of the model."""
    foreign_models.config(kind, **fields).save_pretrained(folder)
    safetensors.write(folder / "model.safetensors", {"x": torch.zeros(3)})
    return folder


def edited(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("kind", foreign_models.mark_most_slow(foreign_models.SERVED))
@torch.no_grad()
def test_a_packed_step_gives_the_logits_of_transformers(kind, page_size, tmp_path):
    """Three sequences in odd chunks and token by token, past the windows, on pages with NaN
    in every unwritten slot. Logits are of order one to ten.
    """
    one = loaded(kind, tmp_path)
    cache = KVCache(one.cache_spec(page_size), 200 // page_size + 8)
    cache.pages.k.fill_(math.nan)
    cache.pages.v.fill_(math.nan)
    texts = [tokens(n, seed=n) for n in (29, 17, 1)]
    cuts = [(0, 1, 11, 12, 13, 29), (0, 8, 9, 17), (0, 1)]
    sequences, parts = [cache.open() for _ in texts], [[], [], []]
    for step in range(5):
        running = [i for i in range(3) if step < len(cuts[i]) - 1]
        chunks = [texts[i][slice(*list(pairwise(cuts[i]))[step])] for i in running]
        members = [sequences[i] for i in running]
        assert cache.append_all(members, chunks) is None
        batch = cache.view(members)
        new = torch.tensor([token for chunk in chunks for token in chunk])
        rows = one(new, positions_of(batch), batch, cache)
        for i, part in zip(running, rows.split([len(c) for c in chunks]), strict=True):
            cache.commit(sequences[i])
            parts[i].append(part)
    for text, part in zip(texts, parts, strict=True):
        theirs = foreign_models.model(kind)(torch.tensor([text]), use_cache=False).logits[0]
        torch.testing.assert_close(one.logits(torch.cat(part)), theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_every_type_of_transformers_agrees_or_is_refused(tmp_path):
    """For all types with a small config in this file."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as kinds

    foreign_models.quiet()
    fates = {kind: fate(kind, tmp_path / kind) for kind in sorted(kinds)}
    assert [kind for kind, what in fates.items() if what == "differs"] == []
    assert list(fates.values()).count("served") >= 80


def fate(kind, folder):
    try:
        config = foreign_models.most_of(kind)
        theirs = config and foreign_models.build(config)
    except Exception:
        return "unknown"
    if theirs is None:
        return "large"
    theirs.save_pretrained(folder)
    try:
        return "served" if greedy_tokens_are_the_best(folder, theirs) else "differs"
    except UnsupportedError:
        return "refused"


@torch.no_grad()
def greedy_tokens_are_the_best(folder, theirs):
    """Each token is the most probable one of transformers after the tokens before it."""
    options = {"block_size": 4, "num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 9}
    prompts = [tokens(n, seed=n) for n in (4, 31, 1)]
    with onchip.LLM(models.load_foreign(folder), swap_space=0, **options) as llm:
        params = onchip.SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    sequences = [
        prompt + list(o.outputs[0].token_ids) for prompt, o in zip(prompts, outputs, strict=True)
    ]
    rows = [
        theirs(torch.tensor([text]), use_cache=False).logits[0].argmax(-1) for text in sequences
    ]
    return all(
        row[-15:-1].tolist() == text[-14:] for row, text in zip(rows, sequences, strict=True)
    )


def test_only_selected_rows_are_computed(tmp_path):
    one = loaded("olmo2", tmp_path)
    cache = KVCache(one.cache_spec(4), 20)
    sequence = cache.open()
    cache.append(sequence, tokens(13))
    batch = cache.view([sequence])
    rows = torch.tensor([12, 3], dtype=torch.int32)
    some = one(torch.tensor(tokens(13)), positions_of(batch), batch, cache, rows)
    every = one(torch.tensor(tokens(13)), positions_of(batch), batch, cache)
    torch.testing.assert_close(some, every[[12, 3]], rtol=0, atol=1e-5)
    assert some.shape == (2, one.width)


def test_a_checkpoint_is_described_without_its_weights(tmp_path):
    foreign_models.model("granite_swa").save_pretrained(tmp_path)
    checkpoint = models.inspect_foreign(tmp_path)
    assert checkpoint.layout.windows == (7, None)
    assert checkpoint.layout.heads == (4, 2, 12, 12, torch.float32)
    assert checkpoint.config.eos_token_ids == (2,) and checkpoint.config.max_seqlen == 256
    assert (checkpoint.config.vocab_size, checkpoint.config.num_layers) == (131, 2)


def test_weights_may_be_in_several_files(tmp_path):
    foreign_models.model("olmo2").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert models.load_foreign(tmp_path).config.num_layers == 2


def test_keys_and_values_may_differ_in_width(tmp_path):
    spec = loaded("deepseek_v3", tmp_path).cache_spec(4)
    assert (spec.head_dim, spec.head_dim_v, spec.num_kv_heads) == (20, 12, 4)


@pytest.mark.parametrize("kind", ["olmo2", "granite_swa"])
def test_16_bit_models_pass_the_self_check(kind, tmp_path):
    one = loaded(kind, tmp_path, dtype=torch.bfloat16)
    assert one.cache_spec().dtype == one.dtype == torch.bfloat16


def test_nothing_is_downloaded_and_no_code_of_a_checkpoint_is_run(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    foreign_models.model("olmo2").save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text("raise AssertionError('code of a checkpoint was run')")
    edited(tmp_path, auto_map={"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"})
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert models.load_foreign(tmp_path).config.model_type == "olmo2"


REFUSED = {
    "bloom": ({}, "BloomModel runs attention of its own"),  # ALiBi
    "falcon": ({"alibi": False}, "a table of its own"),
    "xglm": ({}, "XGLMModel runs attention of its own"),
    "doge": ({}, "computes with its masks"),
    "jetmoe": ({}, "before it is loaded"),
    "mamba": ({}, "keep more state than keys and values"),
    "jamba": ({}, "keep more state than keys and values"),
    "deepseek_v32": (
        {**foreign_models._HEADS_OF_MLA, "head_dim": 8},
        "keep more state than keys and values",
    ),
    "openai-gpt": ({}, "OpenAIGPTModel runs attention of its own"),
    "bert": ({}, "neither causal"),
    "llama4_text": ({"attention_chunk_size": 64}, "neither causal"),
    "bart": ({"decoder_layers": 2, "is_encoder_decoder": True}, "encoder"),
    "moshi": ({"sliding_window": 7}, "its masks have windows None, its cache has 7"),
    "gemma4_text": (
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "layers differ",
    ),
    "stablelm": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "change with the length",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_pages_cannot_serve_are_refused_by_their_config(kind, tmp_path):
    """Without weights in the folder, so before anything is allocated."""
    fields, sentence = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=sentence) as error:
        models.inspect_foreign(described(tmp_path, kind, **fields))
    assert f"model_type={kind!r}" in str(error.value)


def test_an_unknown_type_is_refused(tmp_path):
    described(tmp_path, "olmo2")
    with pytest.raises(UnsupportedError, match="model_type='novel'.*transformers 5"):
        models.inspect_foreign(edited(tmp_path, model_type="novel"))


def test_a_model_with_other_positions_fails_the_self_check(tmp_path):
    """RoBERTa's positions begin after the id of its padding, not at 0."""
    kind = foreign_models.config("roberta", is_decoder=True)
    foreign_models.build(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="in a self check its logits"):
        models.load_foreign(tmp_path)


def test_an_unknown_option_is_refused(tmp_path, monkeypatch):
    from transformers.models.olmo2 import modeling_olmo2

    attend = modeling_olmo2.ALL_ATTENTION_FUNCTIONS.get_interface

    def with_a_bias(self, name, default):
        function = attend(name, default)
        return lambda *args, **keywords: function(*args, **keywords, position_bias=torch.zeros(1))

    monkeypatch.setattr(type(modeling_olmo2.ALL_ATTENTION_FUNCTIONS), "get_interface", with_a_bias)
    with pytest.raises(UnsupportedError, match="position_bias"):
        models.inspect_foreign(described(tmp_path, "olmo2"))


def test_quantised_weights_adapters_and_pickles_are_refused(tmp_path):
    described(tmp_path, "olmo2")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapter"):
        models.inspect_foreign(tmp_path)
    with pytest.raises(UnsupportedError, match="quantised"):
        models.inspect_foreign(edited(tmp_path, quantization_config={"quant_method": "fp8"}))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="a pickle can run code"):
        models.inspect_foreign(edited(tmp_path, quantization_config=None))


def test_a_config_is_bounded_by_the_files(tmp_path):
    foreign_models.model("olmo2").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="needs .* weights, the files hold"):
        models.inspect_foreign(edited(tmp_path, vocab_size=10**9))
    with pytest.raises(UnsupportedError, match="1000000000 layers"):
        models.inspect_foreign(edited(tmp_path, num_hidden_layers=10**9))


def test_missing_weights_are_refused(tmp_path):
    foreign_models.model("olmo2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    entries, mapped = safetensors.header(file), safetensors.map_file(file)
    held = {name: safetensors.read(entry, mapped).clone() for name, entry in entries.items()}
    held["spare"] = held.pop("model.norm.weight")
    safetensors.write(file, held)
    with pytest.raises(UnsupportedError, match="1 missing keys in its files: model.norm.weight"):
        models.load_foreign(tmp_path)


def test_the_error_names_transformers_if_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    described_elsewhere = tmp_path / "config.json"
    described_elsewhere.write_text('{"model_type": "olmo2"}')
    safetensors.write(tmp_path / "model.safetensors", {"x": torch.zeros(3)})
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[transformers\]' in"):
        models.inspect_foreign(tmp_path)


def test_attention_outside_a_step_is_refused(tmp_path):
    one = loaded("olmo2", tmp_path)
    with pytest.raises(UnsupportedError, match="steps of an engine"):
        foreign.call(one.model, torch.tensor([3, 4]))
