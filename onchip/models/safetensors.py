"""The safetensors format: 8 bytes with the length of the header, the header (JSON: a dtype, a shape
and two offsets per tensor), the data. Such a file contains no code, and none is run.

It is parsed here rather than by a package because the header must be checked before anything is
allocated. The tensors must cover the data, each byte once: so no more is allocated than the file
has. Everything that the package safetensors refuses is refused here. Duplicate names, fields beyond
the three, and shapes with a product of non-zero sizes that overflows are refused here alone.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.files import open_regular

MAX_HEADER_BYTES = 100_000_000  # as the reference implementation
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Weights are DTYPES; `int8_weights` makes them of I8, `mxfp4_weights` of U8.
STORED_DTYPES = DTYPES | {"I8": torch.int8, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
# Bits per element of every dtype of the format.
BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "I8", "U8"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
FIELDS = ("dtype", "shape", "data_offsets")


class TensorEntry(NamedTuple):
    """A tensor of a file: its bytes start to end. dtype as in the file, one of `BITS`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file, which cover its bytes from the header to its end."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{file.name} is not a safetensors file: {size} bytes, {length=}")
        text = stream.read(length)
    raw = _parse(file, text)
    entries = {name: _entry(file, name, fields, 8 + length, size) for name, fields in raw.items()}
    _check_cover(file, entries, 8 + length, size)
    return entries


def read(entry: TensorEntry, mapped: Tensor) -> Tensor:
    """The tensor of an entry, a view of its mapped file."""
    raw, dtype = mapped[entry.start : entry.end], STORED_DTYPES[entry.dtype]
    # A header may have any length: unaligned elements are copied.
    raw = raw.clone() if entry.start % dtype.itemsize else raw
    return raw.view(dtype).view(entry.shape)


def read_all(file: Path) -> dict[str, Tensor]:
    """Every tensor of a file whose dtypes are all among STORED_DTYPES."""
    mapped = map_file(file)
    return {name: read(entry, mapped) for name, entry in header(file).items()}


def map_file(file: Path) -> Tensor:
    """The bytes of a file, read on first access; writing to them does not change the file."""
    with open_regular(file) as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of these tensors. The header is padded to a multiple of 64 bytes."""
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
        # As bytes: elements in the file need not be aligned to their size.
        raw = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
        mapped[entry.start : entry.end].copy_(raw)


def _parse(file: Path, text: bytes) -> dict[str, dict]:
    try:
        # Decoded first: from bytes, json would also accept UTF-16 and UTF-32.
        raw = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of {file.name} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"the header of {file.name} is not an object")
    metadata = raw.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"__metadata__ of {file.name} is not an object of strings")
    try:  # an escape in JSON may be half a surrogate pair
        "".join([*raw, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError:
        raise ValueError(f"a text in the header of {file.name} is not Unicode") from None
    return raw


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name occurs twice: readers differ in which one they take")
    return fields


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _check_cover(file: Path, entries: Mapping[str, TensorEntry], base: int, size: int) -> None:
    """Overlaps would allocate more than the file has; gaps would be data of no tensor."""
    at = base
    for name, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
        if entry.start != at:
            kind = "overlap" if entry.start < at else "have a gap"
            raise ValueError(f"the tensors of {file.name} {kind} where {name} begins")
        at = entry.end
    if at != size:
        raise ValueError(f"the tensors of {file.name} end {size - at} bytes before it does")


def _entry(file: Path, name: str, fields: Any, base: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = (fields[n] for n in FIELDS)
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{name} in {file.name} has no dtype, shape and data_offsets") from None
    if len(fields) > len(FIELDS):
        raise ValueError(f"{name} in {file.name} has fields beyond {', '.join(FIELDS)}")
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"{name} in {file.name} has {dtype=}, {shape=}, offsets {start}, {end}")
    if not start <= end <= size - base:
        has = size - base
        raise ValueError(f"{name} ends at byte {end} of {file.name}, which has {has}: truncated?")
    if dtype not in BITS:
        raise ValueError(f"{name} in {file.name} is {dtype}, which is not one of {', '.join(BITS)}")
    if math.prod(shape) * BITS[dtype] != 8 * (end - start) or _overflows(shape):
        raise ValueError(f"{name} in {file.name}: {end - start} bytes for {dtype} {shape}")
    return TensorEntry(file, dtype, tuple(shape), base + start, base + end)


def _overflows(shape: Iterable[int]) -> bool:
    """Whether torch cannot compute strides for it, even if it has no elements."""
    return math.prod(n for n in shape if n) >= 2**63
