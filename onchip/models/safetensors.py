"""The safetensors format: 8 bytes that say how long the header is, the header (JSON: a dtype, a
shape and two offsets per tensor), the bytes. No code is in such a file, and none is run.

Read here rather than by a package because the header must be checked before anything is allocated.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # as the reference implementation
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of a file: bytes start to end of it. dtype as the file says it: types that no
    parameter has (masks) are known by name only.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(file: Path) -> dict[str, Entry]:
    """The tensors of a file, every offset checked against its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{file.name} is no safetensors file: {size} bytes, header {length}")
        text = stream.read(length)
    raw = _parse(file, text)
    return {name: _entry(file, name, fields, 8 + length, size) for name, fields in raw.items()}


def read(entry: Entry, mapped: Tensor) -> Tensor:
    """The tensor of an entry, a view of its mapped file."""
    raw, dtype = mapped[entry.start : entry.end], DTYPES[entry.dtype]
    # A header may have any length: elements that are not aligned to their size are copied.
    raw = raw.clone() if entry.start % dtype.itemsize else raw
    return raw.view(dtype).view(entry.shape)


def map_file(file: Path) -> Tensor:
    """The bytes of a file, read when they are touched; writing to them does not change it."""
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


def write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file of these tensors. The header is padded, so that they start on 64 bytes."""
    fields, at = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        end = at + t.numel() * t.element_size()
        fields[name] = {"dtype": _NAMES[t.dtype], "shape": [*t.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + at)
    _copy_into(file, tensors)


def _copy_into(file: Path, tensors: Mapping[str, Tensor]) -> None:
    size = file.stat().st_size
    mapped = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    for name, entry in header(file).items():
        # As bytes: elements need not be aligned to their size where they lie in the file.
        raw = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
        mapped[entry.start : entry.end].copy_(raw)


def _parse(file: Path, text: bytes) -> dict[str, dict]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of {file.name} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"the header of {file.name} is not an object")
    raw.pop("__metadata__", None)
    return raw


def _entry(file: Path, name: str, fields: Any, base: int, size: int) -> Entry:
    try:
        dtype, shape, (start, end) = (fields[n] for n in ("dtype", "shape", "data_offsets"))
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{name} in {file.name} has no dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"{name} in {file.name} has {dtype=}, {shape=}, offsets {start}, {end}")
    if not start <= end <= size - base:
        has = size - base
        raise ValueError(f"{name} ends at byte {end} of {file.name}, which has {has}: truncated?")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - start:
        raise ValueError(f"{name} in {file.name}: {end - start} bytes for {dtype} {shape}")
    return Entry(file, dtype, tuple(shape), base + start, base + end)
