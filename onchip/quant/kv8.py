"""8-bit keys and values (kv8): one fp32 scale per token and head, x ~ values * scale.

The scale of a token is computed when the token is written, so nothing is ever quantised twice. A
head of dim elements takes dim + 4 bytes: 132 for 128, where 16 bits take 256.
"""

from functools import cache

import torch
from torch import Tensor

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
MAX_VALUES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_BYTES = 4
# The smallest scale, a normal number: x / scale is then finite for any x, and 0 for zeros.
MIN_SCALE = 2.0**-126


def parse_kv_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of a kv_dtype: "fp8" (e4m3), "int8", or None: not quantised."""
    if name is None:
        return None
    if name not in FORMATS:
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(f"kv_dtype={name!r} must be None or one of {names}")
    return FORMATS[name]


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values, scales) of x (..., dim): the largest element of a row becomes the largest of the
    format, the others are rounded to nearest even. A row that is not finite gets a scale of NaN.
    """
    x = x.float()
    nan = (x * 0.0).sum(-1)
    # Divide by a tensor: on a GPU torch would multiply by a number's reciprocal, and scales differ.
    scales = x.abs().amax(-1) / x.new_tensor(MAX_VALUES[dtype])
    scales = scales.clamp_(min=MIN_SCALE) + nan
    values = x / scales[..., None]
    if dtype == torch.int8:
        values = values.round_().nan_to_num_(0.0)
    return values.to(dtype), scales


def snap_to_grid(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor near x (..., dim), in its dtype, that quantises without loss: each row is on the
    grid of the format times a power of two, with one element at the end of the grid. 16 bits hold
    it exactly, too, so calls over it in 8 and in 16 bits have the same result.
    """
    wide = x.float()
    unit = torch.exp2((wide.abs().amax(-1, keepdim=True) / MAX_VALUES[dtype]).log2().ceil())
    y = wide / unit
    y = widen((y.round() if dtype == torch.int8 else y).to(dtype), torch.float32)
    at = wide.abs().argmax(-1, keepdim=True)
    y.scatter_(-1, at, MAX_VALUES[dtype] * wide.gather(-1, at).sign())
    return (y * unit).to(x.dtype)


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values (..., dim) * scales (...) in dtype."""
    return widen(values, dtype).mul_(scales[..., None].to(dtype))


def widen(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values without scales, in a dtype that holds them exactly. By a table: torch's own
    conversion of e4m3 takes five times as long on the CPU (6.8 against 1.4 ms for a million,
    2026-11-15).
    """
    if values.dtype == torch.int8 or values.device.type != "cpu":
        return values.to(dtype)
    at = values.view(torch.uint8).flatten().int()
    return _e4m3_table(dtype).index_select(0, at).view(values.shape)


@cache
def _e4m3_table(dtype: torch.dtype) -> Tensor:
    """The numbers of all 256 bytes in e4m3."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
