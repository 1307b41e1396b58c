"""Keys and values in a file: safetensors with a fixed capacity, appended in place and read through
a memory map. No pickle; every field of a header is checked against the file.
"""

import ctypes
import json
import mmap
import os
import warnings
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from onchip.core.files import create_private, open_regular
from onchip.fold.offload import Offloaded

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADER_BYTES = 4096  # of files made here, with the length field: data begins on a memory page
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
NAMES = ("k", "v")


class SpilledTensor(NamedTuple):
    """The place of a tensor in a file; start counts from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one position of one sequence."""
        return prod(self.shape[2:]) * self.dtype.itemsize


class Spill(Offloaded):
    """A source on disk: tensors "k" (batch, capacity, kv_heads, head_dim) and "v" of a safetensors
    file, of which the first `seqlen` positions are valid (the metadata's "seqlen", else all).

    Spill(path) opens for reading, Spill(path, append=True) for reading and appending,
    Spill.create(...) makes an empty file; one writer at a time. Segments are views of the map. Data
    that has been read is dropped from this process's resident memory (the system's file cache may
    keep it).
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False):
        self.path = Path(path)
        with open_regular(self.path) as file:
            self._header, begin = _read_header(file, self.path)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        place = begin, len(self._map), self.path
        self._entries = [_parse_tensor(self._header, name, *place) for name in NAMES]
        _check_disjoint(self._entries, self.path)
        super().__init__(*(_view(self._map, entry) for entry in self._entries))
        self._seqlen = _seqlen(self._header, self.capacity, self.path)
        metadata = self._header.get("__metadata__")
        ours = isinstance(metadata, dict) and "seqlen" in metadata
        if append and not (ours and begin == HEADER_BYTES):
            raise ValueError(f"{self.path} was not made by Spill.create: it can only be read")
        self._file = self.path.open("r+b") if append else None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        batch: int = 1,
    ) -> "Spill":
        """A new, empty file, open for appending. On a file system with sparse files it takes only
        the space that has been written. An existing file is never overwritten. Only its owner can
        read it (mode 0600): keys and values reveal the prompt.
        """
        sizes = (batch, capacity, num_kv_heads, head_dim, head_dim_v or head_dim)
        if min(sizes) < 1 or dtype not in DTYPES.values():
            names = "(batch, capacity, num_kv_heads, head_dim, head_dim_v)"
            raise ValueError(f"{names}={sizes} must be positive, {dtype=} one of {[*DTYPES]}")
        shapes = ((*sizes[:3], sizes[3]), (*sizes[:3], sizes[4]))
        header = _new_header(shapes, dtype)
        with create_private(path) as file:
            file.write(_encode(header))
            file.truncate(HEADER_BYTES + header["v"]["data_offsets"][1])
        return cls(path, append=True)

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def seqlen(self) -> int:
        return self._seqlen

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write (batch, n, kv_heads, dim) behind the existing positions, from any device. The
        header is written after the data, so a reader never sees positions that were not written.
        """
        if self._file is None:
            raise ValueError(f"{self.path} is open for reading: Spill(path, append=True) writes")
        self._check_fits(k, v)
        for t, entry in zip((k, v), self._entries, strict=True):
            rows = t.detach().to("cpu").contiguous()
            for b in range(len(rows)):
                at = entry.start + (b * self.capacity + self._seqlen) * entry.row_bytes
                self._file.seek(at)
                self._file.write(_bytes(rows[b]))  # not through the map: a full disk raises here
        self._seqlen += k.shape[1]
        self._header["__metadata__"]["seqlen"] = str(self._seqlen)
        self._file.flush()
        self._file.seek(0)
        self._file.write(_encode(self._header))
        self._file.flush()

    def _check_fits(self, k: Tensor, v: Tensor) -> None:
        for name, t, held in (("k", k, self.k), ("v", v, self.v)):
            like = (held.shape[0], k.shape[1] if k.dim() == 4 else -1, *held.shape[2:])
            if tuple(t.shape) != like or t.dtype != held.dtype:
                got = f"{t.dtype} {tuple(t.shape)}"
                raise ValueError(f"{name} must be {held.dtype} {like} like the file, got {got}")
        if self._seqlen + k.shape[1] > self.capacity:
            raise ValueError(
                f"{self.path} is full: seqlen {self._seqlen} + {k.shape[1]} exceeds its capacity of"
                f" {self.capacity}"
            )

    def close(self) -> None:
        """Make the appended data durable and stop appending; the map stays open for its views."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefetch(self, lo: int, hi: int) -> None:
        """Let the system read ahead."""
        self._advise("MADV_WILLNEED", lo, hi)

    def release(self, lo: int, hi: int) -> None:
        """Drop the memory pages; the map is never written, so they can be read again."""
        self._advise("MADV_DONTNEED", lo, hi)

    def _advise(self, advice: str, lo: int, hi: int) -> None:
        option = getattr(mmap, advice, None)  # not every system has it; it only saves time
        for start, stop in self._ranges(lo, hi) if option is not None else ():
            start -= start % mmap.PAGESIZE
            self._map.madvise(option, start, stop - start)

    def _ranges(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        for entry in self._entries if lo < hi else ():
            for b in range(self.k.shape[0]):
                first = entry.start + b * self.capacity * entry.row_bytes
                yield first + lo * entry.row_bytes, first + hi * entry.row_bytes


def _new_header(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> dict:
    name = next(name for name, known in DTYPES.items() if known == dtype)
    header, end = {"__metadata__": {"seqlen": "0"}}, 0
    for key, shape in zip(NAMES, shapes, strict=True):
        start, end = end, end + prod(shape) * dtype.itemsize
        header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [start, end]}
    return header


def _encode(header: dict) -> bytes:
    """Length and JSON, padded with blanks: the header can change, the data never moves."""
    text = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO, path: Path) -> tuple[dict, int]:
    """The JSON of a safetensors file, and the offset of its data."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"{path} is not a safetensors file: header of {length} in {size} bytes")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object")
    return header, 8 + length


def _parse_tensor(header: dict, name: str, begin: int, size: int, path: Path) -> SpilledTensor:
    """The place of a tensor; a ValueError unless the header agrees with the file."""
    fields = header.get(name)
    fields = fields if isinstance(fields, dict) else {}
    dtype = DTYPES.get(str(fields.get("dtype")))
    shape, offsets = (_int_list(fields.get(key)) for key in ("shape", "data_offsets"))
    if dtype is None or len(offsets) != 2 or len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(
            f"{path}: {name!r} must be a tensor [batch,] seqlen, kv_heads, dim of {[*DTYPES]}, its"
            f" header says {fields}"
        )
    start, stop = (begin + offset for offset in offsets)
    inside = begin <= start and stop - start == prod(shape) * dtype.itemsize and stop <= size
    if not inside or start % dtype.itemsize:
        raise ValueError(f"{path}: {name!r} at {offsets} does not fit its {shape} or the {size=}")
    return SpilledTensor(dtype, shape if len(shape) == 4 else (1, *shape), start)


def _check_disjoint(entries: list[SpilledTensor], path: Path) -> None:
    """Otherwise appending to one tensor would change the other."""
    first, second = sorted(entries, key=lambda entry: entry.start)
    if first.start + prod(first.shape) * first.dtype.itemsize > second.start:
        raise ValueError(f"{path}: its tensors overlap")


def _int_list(x: object) -> tuple[int, ...]:
    """A JSON list of integers; anything else is ()."""
    return tuple(x) if isinstance(x, list) and all(type(n) is int for n in x) else ()


def _seqlen(header: dict, capacity: int, path: Path) -> int:
    metadata = header.get("__metadata__")
    text = metadata.get("seqlen") if isinstance(metadata, dict) else None
    if text is None:
        return capacity
    if not isinstance(text, str) or not text.isdecimal() or int(text) > capacity:
        raise ValueError(f"{path}: seqlen {text!r} must be a number up to its {capacity=}")
    return int(text)


def _view(mapped: mmap.mmap, entry: SpilledTensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # it is only read
        flat = torch.frombuffer(
            mapped, dtype=entry.dtype, count=prod(entry.shape), offset=entry.start
        )
    return flat.view(entry.shape)


def _bytes(t: Tensor) -> memoryview:
    """The memory of a contiguous tensor, to write it without a copy (and without numpy)."""
    return memoryview((ctypes.c_char * t.nbytes).from_address(t.data_ptr()))
