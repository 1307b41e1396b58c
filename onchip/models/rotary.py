"""Rotary positions: how far each pair of a head's elements turns per token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    },
}
_MOVING = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class Rotary:
    """Elements i and i + dim / 2 of a head turn by position * frequency(i); elements from dim on
    stay. kind: "default" is theta ** (-2 i / dim), "linear" that over factor, "llama3" and "yarn"
    divide low frequencies by factor and leave high ones. original: the length before it was
    stretched. amplitude: cos and sin are multiplied by it (yarn).
    """

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0
    amplitude: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rotary dim={self.dim} must be even and at least 2")
        if not self.theta > 1 or not self.factor > 0:
            raise ValueError(f"{self.theta=} must be above 1 and {self.factor=} above 0")
        if self.kind in ("llama3", "yarn") and not (self.original > 0 and self.low > 0):
            raise ValueError(f"{self.kind} needs {self.original=} and {self.low=} above 0")
        if self.kind in ("llama3", "yarn") and not self.high > self.low:
            raise ValueError(f"{self.kind} needs {self.high=} above {self.low=}")

    @classmethod
    def from_hf(cls, stated: Mapping[str, Any], head_dim: int, max_seqlen: int) -> "Rotary":
        """From a block rope_parameters of a config.json. partial_rotary_factor is for the caller:
        some families have it, others have the field and do not read it.
        """
        kind = stated.get("rope_type") or stated.get("type") or "default"
        if kind in _MOVING:
            raise ValueError(
                f"rope_type={kind!r} is not served: its frequencies change with the length of a"
                " sequence, so that keys which are cached already would be wrong"
            )
        if kind not in _FIELDS:
            raise ValueError(f"rope_type={kind!r} is not one of {', '.join(_FIELDS)}")
        allowed = _FIELDS[kind] | _COMMON
        unknown = [n for n in stated if stated[n] is not None and n not in allowed]
        if unknown:
            raise ValueError(f"rope_type={kind!r} has no field {unknown[0]!r}")
        theta = float(stated["rope_theta"])
        return cls(theta, head_dim, kind, **_scaling(kind, stated, max_seqlen))


def _scaling(kind: str, stated: Mapping[str, Any], max_seqlen: int) -> dict[str, Any]:
    if kind == "default":
        return {}
    if stated.get("factor") is None:
        raise ValueError(f"rope_type={kind!r} needs a factor")
    factor = float(stated["factor"])
    if kind == "linear":
        return {"factor": factor}
    original = stated.get("original_max_position_embeddings") or max_seqlen
    if kind == "llama3":
        low, high = stated.get("low_freq_factor", 1.0), stated.get("high_freq_factor", 4.0)
        return {"factor": factor, "low": low, "high": high, "original": original}
    return {
        "factor": factor,
        "low": stated.get("beta_slow") or 1.0,
        "high": stated.get("beta_fast") or 32.0,
        "original": original,
        "amplitude": _yarn_amplitude(factor, stated),
        "truncate": stated.get("truncate") is not False,
    }


def _yarn_amplitude(factor: float, stated: Mapping[str, Any]) -> float:
    """0.1 ln(factor) + 1, unless stated; with mscale and mscale_all_dim the ratio of two such."""
    if stated.get("attention_factor") is not None:
        return float(stated["attention_factor"])
    grown = lambda mscale: 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    over, under = stated.get("mscale"), stated.get("mscale_all_dim")
    return grown(over) / grown(under) if over and under else grown(1.0)


@lru_cache(maxsize=64)
def frequencies(rotary: Rotary, device: torch.device) -> Tensor:
    """fp32 (dim / 2,) on the device, radians per token; computed once. fp32 throughout, because
    checkpoints were trained with the roundings of that formula.
    """
    with torch.inference_mode(False):
        steps = torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim
        plain = 1.0 / (rotary.theta**steps)
        return _SCALED[rotary.kind](rotary, plain).to(device)


def _llama3(rotary: Rotary, plain: Tensor) -> Tensor:
    """Wavelengths over original / low are stretched, those below original / high are not."""
    turns = rotary.original * plain / (2 * math.pi)  # over the original length
    smooth = ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0, 1)
    return (1 - smooth) * plain / rotary.factor + smooth * plain


def _yarn(rotary: Rotary, plain: Tensor) -> Tensor:
    """Like llama3, but the ramp is linear in the index of the element."""
    scale = rotary.dim / (2 * math.log(rotary.theta))
    index = lambda turns: scale * math.log(rotary.original / (turns * 2 * math.pi))
    first, last = index(rotary.high), index(rotary.low)
    if rotary.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(rotary.dim // 2) - first) / (last - first)).clamp(0, 1)
    return plain / rotary.factor * ramp + plain * (1 - ramp)


_SCALED = {
    "default": lambda rotary, plain: plain,
    "linear": lambda rotary, plain: plain / rotary.factor,
    "llama3": _llama3,
    "yarn": _yarn,
}


def turns(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every position, fp32 (*positions, 1, dim / 2): one for all heads."""
    angles = positions[..., None, None].float() * frequencies(rotary, positions.device)
    return angles.cos() * rotary.amplitude, angles.sin() * rotary.amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (..., heads, head_dim), turned by (cos, sin) of `turns` in fp32 and rounded once."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)
