"""Checkpoints: stored weights are loaded, and errors are raised before anything is allocated."""

import json
import os
import pickle
import struct

import pytest
import torch

from onchip import models
from onchip.models import ModelConfig, num_parameters, random_model, safetensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def same(a, b):
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def folder(llama, tmp_path):
    models.save(random_model(ModelConfig.from_hf(llama), dtype=torch.bfloat16), tmp_path)
    return tmp_path


def tensors(folder):
    """All tensors of a folder, to store them again with a change."""
    file = folder / SINGLE
    mapped = safetensors.map_file(file)
    return {
        name: safetensors.read(entry, mapped).clone()
        for name, entry in safetensors.header(file).items()
    }


def rewrite(folder, change):
    stored = tensors(folder)
    change(stored)
    safetensors.write(folder / SINGLE, stored)


def header_of(file):
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(file, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(folder, *words):
    """Refused by `inspect`, which allocates nothing, with an error that contains these words."""
    with pytest.raises(ValueError) as caught:
        models.inspect(folder)
    for word in words:
        assert word in str(caught.value), caught.value


def test_a_saved_model_is_loaded(data, tmp_path):
    decoder = random_model(ModelConfig.from_hf(data), seed=3)
    models.save(decoder, tmp_path)
    loaded = models.load(tmp_path)
    assert same(decoder, loaded) and loaded.config == decoder.config
    assert sum(p.numel() for p in loaded.parameters()) == num_parameters(decoder.config)
    again = models.load(tmp_path, dtype=torch.bfloat16)
    # A router in fp32 remains so; `to` rounds it.
    wide = {name for name, p in again.named_parameters() if p.dtype != torch.bfloat16}
    assert all(name.endswith(("mlp.router.weight", "mlp.choice_bias")) for name in wide)
    assert same(decoder.to(torch.bfloat16), again.to(torch.bfloat16))


def test_a_model_saved_by_transformers_is_loaded(data, tmp_path):
    """Shards with an index; the logits equal those of transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**data)
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    other.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / INDEX).is_file()
    decoder, text = models.load(tmp_path), torch.arange(40)[None] * 3
    assert decoder.embed.dtype == torch.float32
    with torch.no_grad():
        ours, theirs = decoder.logits(decoder.full(text)), other(text).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_reference_implementation_reads_our_files(tmp_path):
    reference = pytest.importorskip("safetensors.torch")
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    stored = {str(d): torch.randn(3, 5).to(d) for d in kinds} | {"scalar": torch.tensor(2.0)}
    stored["none"] = torch.empty(0, 4)
    safetensors.write(tmp_path / "a.safetensors", stored)
    loaded = reference.load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_unaligned_elements_are_read(folder):
    decoder = models.load(folder)
    header, data = header_of(folder / SINGLE)
    text = json.dumps(header).encode()
    with_header(folder / SINGLE, text + b" " * (1 - len(text) % 2), data)
    assert all(e.start % 2 for e in safetensors.header(folder / SINGLE).values())
    assert same(decoder, models.load(folder))


def test_a_shard_is_a_slice_of_every_projection(folder):
    """Heads and columns of both ranks, joined projection by projection, are the whole model."""
    whole, parts = models.load(folder), [models.load(folder, rank=r, world_size=2) for r in (0, 1)]
    config = whole.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"qkv": (q // 2, kv // 2, kv // 2), "up": (config.intermediate_size // 2,) * 2}
    for name, parameter in whole.named_parameters():
        shares = [part.get_parameter(name) for part in parts]
        kind = name.split(".")[-2] if "." in name else name
        if kind in sizes:
            pieces = [share.split(sizes[kind]) for share in shares]
            joined = torch.cat([torch.cat(pair) for pair in zip(*pieces, strict=True)])
        elif kind in ("out", "down"):
            joined = torch.cat(shares, 1) if parameter.dim() == 2 else shares[0] + shares[1]
        else:
            joined = shares[0]
            assert torch.equal(*shares)
        assert torch.equal(joined, parameter), name


def test_sizes_that_do_not_divide_are_refused(folder):
    with pytest.raises(ValueError, match="num_heads=4 cannot be divided among 3 ranks"):
        models.load(folder, world_size=3)
    with pytest.raises(ValueError, match="rank=2 must be in"):
        models.load(folder, rank=2, world_size=2)


def test_a_shard_cannot_be_saved(folder, tmp_path):
    with pytest.raises(ValueError, match="only a whole model"):
        models.save(models.load(folder, world_size=2), tmp_path / "other")


def test_the_tokenizer_file_is_found(folder):
    assert models.inspect(folder).tokenizer_file is None
    (folder / "tokenizer.json").write_text("{}")
    assert models.inspect(folder).tokenizer_file == folder / "tokenizer.json"
    assert models.inspect(folder).dtype == torch.bfloat16


def test_old_gpt2_files_have_no_prefix_and_masks(tmp_path):
    data = {"model_type": "gpt2", "vocab_size": 31, "n_embd": 8, "n_layer": 2, "n_head": 2}
    data |= {"n_positions": 16, "n_ctx": 16}
    decoder = random_model(ModelConfig.from_hf(data), seed=1)
    models.save(decoder, tmp_path)
    stored = {name.removeprefix("transformer."): t for name, t in tensors(tmp_path).items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    safetensors.write(tmp_path / SINGLE, stored)
    assert same(decoder, models.load(tmp_path))


def test_a_tied_head_that_differs_is_refused(llama, tmp_path):
    config = ModelConfig.from_hf(llama | {"tie_word_embeddings": True})
    decoder = random_model(config)
    models.save(decoder, tmp_path)
    name = "model.embed_tokens.weight"
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[name].clone()}))
    assert same(decoder, models.load(tmp_path))
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[name] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight differ"):
        models.load(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[name][:1]}))
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight differ"):
        models.load(tmp_path)


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    refused(folder, "1 tensors are missing", "model.layers.2.mlp.up_proj.weight")


def test_an_unexpected_tensor_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.layers.3.extra": torch.ones(2)}))
    refused(folder, "not part of the model", "model.layers.3.extra")


def test_a_wrong_shape_is_named(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(folder, lambda t: t.update({name: t[name][:, 1:].contiguous()}))
    refused(folder, name, "(24, 47)", "(24, 48)")


def test_an_unsupported_dtype_is_named(folder):
    file = folder / SINGLE
    header, data = header_of(file)
    header["model.norm.weight"]["dtype"] = "I16"
    with_header(file, header, data)
    refused(folder, "model.norm.weight", "I16")


def test_a_truncated_file_is_refused(folder):
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    refused(folder, SINGLE, "truncated")


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x05", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 900) + b"{}"],
    ids=["empty", "no length", "a huge header", "a cut header"],
)
def test_a_file_that_is_not_safetensors_is_refused(folder, raw):
    (folder / SINGLE).write_bytes(raw)
    refused(folder, "is not a safetensors file")


@pytest.mark.parametrize(
    "header, words",
    [
        (b"[" * 3000, "not JSON"),
        (b"[1, 2]", "not an object"),
        ({"a": {"dtype": "F32"}}, "no dtype, shape and data_offsets"),
        ({"a": 3}, "no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "shape=[-1]"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "shape=[True]"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "ends at byte 0"),
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}}, "8 bytes for F32"),
    ],
)
def test_an_invalid_header_is_refused(folder, header, words):
    with_header(folder / SINGLE, header, b"\0" * 8)
    refused(folder, words)


def test_a_pickle_is_not_read(folder):
    """Neither under its own name nor as .safetensors."""
    bomb = pickle.dumps({"weight": 1})
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(bomb)
    refused(folder, "pytorch_model.bin", "a pickle can run code")
    (folder / SINGLE).write_bytes(bomb)
    refused(folder, "is not a safetensors file")
    torch.save({"weight": torch.ones(3)}, folder / SINGLE)
    refused(folder, "is not a safetensors file")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", ".."])
def test_an_index_stays_in_its_folder(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(folder, repr(name), "not a .safetensors file of the folder")


@pytest.mark.parametrize(
    "index, words",
    [
        ({"weight_map": {"model.norm.weight": "absent.safetensors"}}, "which is missing"),
        ({"weight_map": {"absent": SINGLE}}, "which does not have it"),
        ({"weight_map": [SINGLE]}, "no weight_map"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_invalid_index_is_refused(folder, index, words):
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, words)


def test_folders_without_a_model_are_refused(folder, tmp_path):
    refused(tmp_path / "nowhere", "there is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    (folder / SINGLE).rename(folder / "a.safetensors")
    assert models.load(folder)
    (folder / "b.safetensors").write_bytes(b"")
    refused(folder, "2 safetensors files and no model.safetensors.index.json")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not JSON")


def test_unsupported_dtypes_are_refused(folder):
    with pytest.raises(ValueError, match="dtype torch.int8 is not one of"):
        models.load(folder, dtype=torch.int8)


def test_a_config_cannot_cause_large_allocations(folder):
    """Sizes are compared with the file before anything of that size is allocated."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2**31 - 1}))
    refused(folder, "the config implies (2147483647, 48)")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    refused(folder, "num_hidden_layers=1000000000 exceeds 4096")


def test_damaged_headers_are_refused_or_harmless(folder):
    """With any byte of the header changed: a ValueError, or a model of the right shapes."""
    file, generator = folder / SINGLE, torch.Generator().manual_seed(0)
    shapes = [p.shape for p in models.load(folder).parameters()]
    raw = file.read_bytes()
    length = 8 + struct.unpack("<Q", raw[:8])[0]
    draws = torch.randint(2**31, (400, 2), generator=generator).tolist()
    refusals = 0
    for at, byte in draws:
        damaged = bytearray(raw)
        damaged[at % length] = byte % 256
        file.write_bytes(damaged)
        try:
            assert [p.shape for p in models.load(folder).parameters()] == shapes
        except ValueError:
            refusals += 1
    assert refusals > 350


@pytest.mark.parametrize("name", ["config.json", SINGLE, INDEX, "shard.safetensors"])
def test_a_fifo_in_the_folder_is_refused(folder, name):
    """Opening it would wait for a writer."""
    if name == "shard.safetensors":
        (folder / INDEX).write_text(json.dumps({"weight_map": {"norm": name}}))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, name, "is not a regular file")


def test_a_folder_that_transformers_reads_holds_regular_files(folder):
    pytest.importorskip("transformers")
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ValueError, match="generation_config.json is not a regular file"):
        models.inspect_foreign(folder)


def test_tensors_that_overlap_are_refused(folder):
    """A file of megabytes could allocate gigabytes."""
    header, data = header_of(folder / SINGLE)
    names = [n for n in header if n.endswith("mlp.up_proj.weight")]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    with_header(folder / SINGLE, header, data)
    refused(folder, SINGLE, "overlap")
