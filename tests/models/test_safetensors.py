"""The safetensors format, written and read; malformed headers against the package safetensors."""

import copy
import json
import math
import random
import struct

import pytest
import torch

from onchip.models import safetensors


def test_tensors_of_any_size_and_order_are_read_back(tmp_path):
    """Three bf16 numbers before an fp64 one: it is not aligned to its size."""
    file = tmp_path / "odd.safetensors"
    tensors = {
        "three": torch.randn(3).bfloat16(),
        "wide": torch.randn(2, 5, dtype=torch.float64).T,
        "scalar": torch.tensor(7.0),
        "none": torch.empty(0, 4),
    }
    safetensors.write(file, tensors)
    mapped = safetensors.map_file(file)
    for name, entry in safetensors.header(file).items():
        assert torch.equal(safetensors.read(entry, mapped), tensors[name]), name


def test_a_mapped_file_is_not_written_to(tmp_path):
    file = tmp_path / "one.safetensors"
    safetensors.write(file, {"one": torch.ones(3)})
    before = file.read_bytes()
    mapped = safetensors.map_file(file)
    safetensors.read(safetensors.header(file)["one"], mapped).fill_(2.0)
    assert file.read_bytes() == before


def tensor(shape, offsets, dtype="F32", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def packed(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = b'"%s":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
BYTES = bytes(32)
# name -> (file, whether it is accepted)
FILES = {
    "one tensor": (packed({"a": tensor([2], [0, 8])}, BYTES[:8]), True),
    "in any order": (
        packed({"a": tensor([1], [8, 12]), "b": tensor([2], [0, 8])}, BYTES[:12]),
        True,
    ),
    "overlap": (packed({"a": tensor([2], [0, 8]), "b": tensor([2], [4, 12])}, BYTES[:12]), False),
    "twice the same bytes": (
        packed({"a": tensor([2], [0, 8]), "b": tensor([2], [0, 8])}, BYTES[:8]),
        False,
    ),
    "gap": (packed({"a": tensor([2], [0, 8]), "b": tensor([1], [12, 16])}, BYTES[:16]), False),
    "gap before the first": (packed({"a": tensor([2], [4, 12])}, BYTES[:12]), False),
    "bytes after the last": (packed({"a": tensor([2], [0, 8])}, BYTES[:9]), False),
    "past the end": (packed({"a": tensor([2], [0, 8])}, BYTES[:7]), False),
    "negative": (packed({"a": tensor([2], [-8, 0])}, BYTES[:8]), False),
    "end before start": (packed({"a": tensor([2], [8, 0])}, BYTES[:8]), False),
    "fraction": (packed({"a": tensor([2], [0.0, 8])}, BYTES[:8]), False),
    "true": (packed({"a": tensor([True, 2], [0, 8])}, BYTES[:8]), False),
    "three offsets": (packed({"a": tensor([2], [0, 8, 8])}, BYTES[:8]), False),
    "wrong size": (packed({"a": tensor([3], [0, 8])}, BYTES[:8]), False),
    "overflow": (packed({"a": tensor([2**63, 2**63], [0, 8])}, BYTES[:8]), False),
    "overflow to nothing": (packed({"a": tensor([2**62, 2**62, 0], [0, 0])}), False),
    "nothing": (packed({"a": tensor([0, 4], [0, 0]), "b": tensor([1], [0, 4])}, BYTES[:4]), True),
    "nothing inside": (
        packed({"b": tensor([2], [0, 8]), "a": tensor([0, 4], [4, 4])}, BYTES[:8]),
        False,
    ),
    "scalar": (packed({"a": tensor([], [0, 4])}, BYTES[:4]), True),
    "no tensor": (packed({}), True),
    "no tensor but bytes": (packed({}, BYTES[:2]), False),
    "unknown dtype": (packed({"a": tensor([2], [0, 8], "Q8")}, BYTES[:8]), False),
    "dtype no parameter has": (packed({"a": tensor([1], [0, 8], "I64")}, BYTES[:8]), True),
    "wrong size of another dtype": (packed({"a": tensor([3], [0, 8], "BOOL")}, BYTES[:8]), False),
    "half bytes": (packed({"a": tensor([16], [0, 8], "F4")}, BYTES[:8]), True),
    "part of a byte": (packed({"a": tensor([3], [0, 2], "F4")}, BYTES[:2]), False),
    "metadata": (packed({"__metadata__": {"format": "pt"}}), True),
    "metadata null": (packed({"__metadata__": None}), True),
    "metadata of numbers": (packed({"__metadata__": {"format": 1}}), False),
    "metadata a list": (packed({"__metadata__": [1]}), False),
    "huge header": (packed({}, length=2**63), False),
    "header past the end": (packed({}, length=50), False),
    "header over the limit": (packed({}, length=100_000_001), False),
    "no header": (b"1234", False),
    "not UTF-8": (packed(b"{" + ONE % b"\xff" + b"}", BYTES[:8]), False),
    "UTF-16": (packed(("{" + (ONE % b"a").decode() + "}").encode("utf-16"), BYTES[:8]), False),
    "byte order mark": (packed(b"\xef\xbb\xbf{}"), False),
    "control character": (packed(b"{" + ONE % b"a\nb" + b"}", BYTES[:8]), False),
    "half a character": (packed(b"{" + ONE % b"\\ud800" + b"}", BYTES[:8]), False),
    "NaN": (packed(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', BYTES[:8]), False),
    "deep": (packed(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"), False),
    "deep inside": (
        packed(b'{"a":{"x":' + b"[" * 300 + b"]" * 300 + b"," + (ONE % b"a")[5:] + b"}", BYTES[:8]),
        False,
    ),
    "a list": (packed([1]), False),
    "blanks": (packed(b"  {" + ONE % b"a" + b"}   ", BYTES[:8]), True),
}
# Refused here alone, with the reason.
STRICTER = {
    "name twice": packed(b"{" + ONE % b"a" + b"," + ONE % b"a" + b"}", BYTES[:8]),
    "another field": packed({"a": tensor([2], [0, 8], x=1)}, BYTES[:8]),
    "overflow after nothing": packed({"a": tensor([0, 2**62, 2**62], [0, 0])}),
}


def ours(file):
    try:
        return set(safetensors.header(file))
    except ValueError as error:
        assert file.name in str(error)
        return None


def theirs(file):
    package = pytest.importorskip("safetensors")
    try:
        with package.safe_open(file, "pt") as opened:
            return set(opened.keys())
    except package.SafetensorError:
        return None


@pytest.mark.parametrize("name", FILES)
def test_a_header_is_accepted_or_refused_as_by_the_package(name, tmp_path):
    raw, served = FILES[name]
    file = tmp_path / "any.safetensors"
    file.write_bytes(raw)
    assert (ours(file) is not None) == served and ours(file) == theirs(file)


@pytest.mark.parametrize("name", STRICTER)
def test_some_headers_are_refused_here_but_not_by_safetensors(name, tmp_path):
    file = tmp_path / "any.safetensors"
    file.write_bytes(STRICTER[name])
    assert ours(file) is None and theirs(file) is not None


def mutate(chance, header):
    """One change in a header of three tensors that cover 24 bytes."""
    name = chance.choice(list(header))
    entry, number = header[name], chance.choice([0, 1, 2, 4, 8, 12, 16, 24, 25, 2**40, 2**64, -4])
    change = chance.randrange(6)
    if change == 0:
        entry["data_offsets"][chance.randrange(2)] = number
    elif change == 1 and entry["shape"]:
        entry["shape"][chance.randrange(len(entry["shape"]))] = number
    elif change == 2:
        entry["shape"].insert(chance.randrange(2), number)
    elif change == 3:
        entry["dtype"] = chance.choice([*safetensors.BITS, "F128", "f32", ""])
    elif change == 4:
        header[chance.choice("abcd")] = copy.deepcopy(entry)
    else:
        del header[name]


def overflows(header):
    """The one case of `STRICTER` that `mutate` can produce."""
    sizes = [math.prod(n for n in e["shape"] if n) for e in header.values() if 0 in e["shape"]]
    return max(sizes, default=0) >= 2**63


def test_mutated_headers_are_accepted_or_refused_as_by_the_package(tmp_path):
    chance, file, counts = random.Random(0), tmp_path / "any.safetensors", [0, 0]
    whole = {
        "a": tensor([2], [0, 8]),
        "b": tensor([2, 2], [8, 16], "F16"),
        "c": tensor([8], [16, 24], "I8"),
    }
    for _ in range(300):
        header = copy.deepcopy(whole)
        for _ in range(chance.choice([1, 1, 2])):
            if header:
                mutate(chance, header)
        size = max([e["data_offsets"][1] for e in header.values()], default=0)
        file.write_bytes(packed(header, BYTES[: size if 0 <= size <= 32 else 24]))
        tensors = ours(file)
        counts[tensors is not None] += 1
        assert tensors == theirs(file) or (tensors is None and overflows(header)), header
    assert min(counts) > 30
