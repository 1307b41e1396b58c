"""Spill: a file returns the bytes written to it, grows in place, and invalid files are refused."""

import json
import os

import pytest
import torch

import onchip
from onchip.fold import offload
from onchip.fold.spill import HEADER_BYTES, Spill

SHAPE = {"num_kv_heads": 2, "head_dim": 8, "head_dim_v": 12, "batch": 2}


def pieces(*lengths, dtype=torch.bfloat16):
    return [
        tuple(torch.randn(2, n, 2, dim).to(dtype) for dim in (8, 12)) for n in lengths
    ]  # (k, v) of each


@pytest.fixture
def spill(tmp_path):
    with Spill.create(tmp_path / "kv.safetensors", capacity=100, **SHAPE) as spill:
        yield spill


def test_appended_keys_are_read_back(spill):
    parts = pieces(1, 63, 0, 17)
    for part in parts:
        spill.append(*part)
    assert spill.seqlen == 81 and spill.capacity == 100
    for got, want in zip(spill.segment(0, 81), zip(*parts, strict=True), strict=True):
        assert got.equal(torch.cat(want, 1))


def test_strided_tensors_are_written_correctly(spill):
    k, v = pieces(7)[0]
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    spill.append(turned, v)
    assert spill.segment(0, 7)[0].equal(k)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_file_survives_its_process(tmp_path, dtype):
    """Written, closed, read, appended to again, read."""
    path, (first, second) = tmp_path / "kv", pieces(5, 6, dtype=dtype)
    with Spill.create(path, capacity=11, dtype=dtype, **SHAPE) as spill:
        spill.append(*first)
    assert Spill(path).seqlen == 5 and Spill(path).k.dtype == dtype
    with Spill(path, append=True) as spill:
        spill.append(*second)
    assert Spill(path).segment(5, 11)[1].equal(second[1])


def test_attention_while_the_context_grows(tmp_path):
    """Decode: each step appends one position and attends to all of them."""
    ((k, v),) = pieces(40, dtype=torch.float64)
    spill = Spill.create(tmp_path / "kv", capacity=40, dtype=k.dtype, **SHAPE)
    for n in range(1, 41):
        spill.append(k[:, n - 1 : n], v[:, n - 1 : n])
        q = torch.randn(2, 1, 4, 8, dtype=k.dtype)
        got = offload.run(onchip.attention, q, spill, causal=True, segment_bytes=3000)
        want = onchip.attention(q, k[:, :n], v[:, :n], causal=True, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_released_segment_can_be_read_again(spill):
    ((k, v),) = pieces(99)
    spill.append(k, v)
    spill.prefetch(0, 99)
    spill.release(3, 99)
    spill.release(99, 99)
    assert spill.segment(0, 99)[0].equal(k)


def test_a_file_takes_the_space_that_was_written(tmp_path):
    """A terabyte of capacity costs nothing until it is used (on file systems with sparse files)."""
    spill = Spill.create(tmp_path / "kv", capacity=1 << 28, num_kv_heads=8, head_dim=128)
    blocks = (tmp_path / "kv").stat().st_blocks
    if blocks * 512 > 1 << 20:
        pytest.skip("no sparse files on this file system")
    spill.append(*torch.randn(2, 1, 5, 8, 128, dtype=torch.bfloat16))
    assert spill.segment(0, 5)[0].shape == (1, 5, 8, 128)
    assert (tmp_path / "kv").stat().st_blocks * 512 < 1 << 20


def test_it_is_a_safetensors_file(tmp_path, spill):
    safetensors = pytest.importorskip("safetensors.torch")
    ((k, v),) = pieces(100)
    spill.append(k, v)
    held = safetensors.load_file(spill.path)
    assert held["k"].equal(k) and held["v"].equal(v)
    safetensors.save_file({"k": k[0], "other": v.clone(), "v": v[0]}, tmp_path / "theirs")
    theirs = Spill(tmp_path / "theirs")
    assert theirs.seqlen == 100 and theirs.k.equal(k[:1]) and theirs.v.equal(v[:1])


def foreign(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def tensor(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_foreign_files_are_read_but_not_appended_to(tmp_path):
    """Three dimensions are one sequence; without a length all positions count."""
    data = torch.arange(24, dtype=torch.float32)
    header = {"v": tensor([3, 2, 2], [0, 48]), "k": tensor([3, 2, 2], [48, 96])}
    text = json.dumps(header).encode().ljust(160)
    path = foreign(tmp_path / "f", text, data.numpy().tobytes())
    spill = Spill(path)
    assert spill.seqlen == 3 and spill.k.flatten().tolist() == data[12:].tolist()
    with pytest.raises(ValueError, match="can only be read"):
        Spill(path, append=True)


GOOD = {"k": tensor([1, 2, 2], [0, 16]), "v": tensor([1, 2, 2], [16, 32])}


@pytest.mark.parametrize(
    "match, header, length",
    [
        ("header of 9999 in", GOOD, 9999),
        ("header of 0 in", b"", None),
        ("not JSON$", b"{'k': 1}", None),
        ("not JSON$", b"\xff\xfe\xfd", None),
        ("not a JSON object", [1, 2], None),
        ("'k' must be a tensor", {"v": GOOD["v"]}, None),
        ("'k' must be a tensor", {**GOOD, "k": 7}, None),
        ("'v' must be a tensor", {**GOOD, "v": tensor([1, 2, 2], [16, 32], "I64")}, None),
        ("'v' must be a tensor", {**GOOD, "v": tensor([4], [16, 32])}, None),
        ("'v' must be a tensor", {**GOOD, "v": tensor([1, 0, 2], [16, 16])}, None),
        ("'v' must be a tensor", {**GOOD, "v": tensor([1, -2, -2], [16, 32])}, None),
        ("'v' must be a tensor", {**GOOD, "v": tensor([1, 2, 2.0], [16, 32])}, None),
        ("'v' must be a tensor", {**GOOD, "v": tensor([1, 2, 2], [16])}, None),
        ("'v' at .* does not fit", {**GOOD, "v": tensor([1, 2, 2], [16, 30])}, None),
        ("'v' at .* does not fit", {**GOOD, "v": tensor([1, 2, 2], [160, 176])}, None),
        ("'k' at .* does not fit", {**GOOD, "k": tensor([1, 2, 2], [-16, 0])}, None),
        ("seqlen 'many' must be", {**GOOD, "__metadata__": {"seqlen": "many"}}, None),
        ("seqlen '2' must be", {**GOOD, "__metadata__": {"seqlen": "2"}}, None),
        ("seqlen '-1' must be", {**GOOD, "__metadata__": {"seqlen": "-1"}}, None),
    ],
)
def test_a_header_that_contradicts_the_file_is_refused(tmp_path, match, header, length):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8) if text.startswith(b'{"') else text
    with pytest.raises(ValueError, match=match):
        Spill(foreign(tmp_path / "f", text, bytes(32), length))


def test_a_truncated_file_is_refused(spill):
    path = spill.path
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 100)
    with pytest.raises(ValueError, match="does not fit"):
        Spill(path)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Spill(path)


class TestErrors:
    def test_full(self, spill):
        spill.append(*pieces(98)[0])
        with pytest.raises(ValueError, match="seqlen 98 \\+ 3 exceeds its capacity of 100"):
            spill.append(*pieces(3)[0])
        assert spill.seqlen == 98

    def test_other_shapes_and_types(self, spill):
        k, v = pieces(3)[0]
        for bad in ((k[:1], v), (k, v[:, :2]), (k.float(), v), (v, k), (k[0], v[0])):
            with pytest.raises(ValueError, match=r"must be torch.bfloat16 \(2, .* like the file"):
                spill.append(*bad)
        assert spill.seqlen == 0

    def test_appending_needs_append_mode(self, spill):
        with pytest.raises(ValueError, match="open for reading"):
            Spill(spill.path).append(*pieces(1)[0])

    def test_an_existing_file_is_not_overwritten(self, spill):
        with pytest.raises(FileExistsError):
            Spill.create(spill.path, capacity=1, **SHAPE)

    @pytest.mark.parametrize("change", [{"capacity": 0}, {"batch": 0}, {"dtype": torch.int8}])
    def test_creation(self, tmp_path, change):
        options = {"capacity": 4, **SHAPE, **change}
        with pytest.raises(ValueError, match="must be positive"):
            Spill.create(tmp_path / "kv", **options)
        assert not (tmp_path / "kv").exists()


def test_only_the_owner_can_read_a_new_file(tmp_path):
    before = os.umask(0)
    try:
        Spill.create(tmp_path / "kv", capacity=4, **SHAPE).close()
    finally:
        os.umask(before)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o600


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="is not a regular file"):
        Spill(tmp_path / "fifo")


def test_tensors_that_overlap_are_refused(tmp_path):
    header = {"k": tensor([3, 2, 2], [0, 48]), "v": tensor([3, 2, 2], [44, 92])}
    with pytest.raises(ValueError, match="overlap"):
        Spill(foreign(tmp_path / "f", json.dumps(header).encode().ljust(160), bytes(96)))
    with pytest.raises(ValueError, match="not JSON"):
        Spill(foreign(tmp_path / "deep", b'{"k":' + b"[" * 9000 + b"]" * 9000 + b"}"))
