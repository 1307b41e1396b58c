"""Rotary position embeddings (RoPE): frequencies, cos and sin, and their application."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onchip.models.fields import Fields
from onchip.models.reproducible import in_whole_vectors

_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class Rotary:
    """Elements i and i + dim / 2 of a head rotate by position * frequency(i); elements from dim on
    do not rotate. kind: "default" is theta ** (-2 i / dim), "linear" that over factor; "llama3" and
    "yarn" divide low frequencies by factor and keep high ones. original: the maximum length before
    it was extended. amplitude: a factor of cos and sin (yarn).
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
            raise ValueError(f"theta={self.theta} must be above 1 and factor={self.factor} above 0")
        if self.kind in ("llama3", "yarn") and not (self.original > 0 and self.low > 0):
            raise ValueError(
                f"{self.kind} needs original={self.original} and low={self.low} above 0"
            )
        if self.kind == "llama3" and not self.high > self.low:
            raise ValueError(f"llama3 needs high={self.high} above low={self.low}")
        if self.kind == "yarn" and not self.high >= self.low:  # Kimi-K2: equal, a step
            raise ValueError(f"yarn needs high={self.high} to be at least low={self.low}")

    @classmethod
    def from_hf(
        cls, stated: Mapping[str, Any], head_dim: int, max_seqlen: int, partial: bool = False
    ) -> "Rotary":
        """From a rope_parameters block of a config.json. partial: the family may rotate only a part
        of each head.
        """
        f = Fields(stated, "rope_parameters")
        if not partial:
            f.must_be("partial_rotary_factor", 1.0)
        dim = int(head_dim * min(f.positive("partial_rotary_factor", 1.0), 1.0))
        kind = f.text("rope_type", f.text("type", "default"))
        if kind in _LENGTH_DEPENDENT:
            raise ValueError(
                f"rope_type={kind!r} is not served: its frequencies change with the length of a"
                " sequence, so keys that are cached already would be wrong"
            )
        if kind not in _PARSERS:
            raise ValueError(f"rope_type={kind!r} is not one of {', '.join(_PARSERS)}")
        rotary = cls(f.positive("rope_theta"), dim, kind, **_PARSERS[kind](f, max_seqlen))
        f.reject_unread()
        return rotary


def _read_llama3(f: Fields, max_seqlen: int) -> dict[str, Any]:
    return {
        "factor": f.positive("factor"),
        "low": f.positive("low_freq_factor"),
        "high": f.positive("high_freq_factor"),
        "original": f.size("original_max_position_embeddings"),
    }


def _read_yarn(f: Fields, max_seqlen: int) -> dict[str, Any]:
    factor = f.positive("factor")
    return {
        "factor": factor,
        "low": f.positive("beta_slow", 1.0),
        "high": f.positive("beta_fast", 32.0),
        "original": f.size("original_max_position_embeddings", max_seqlen),
        "amplitude": _yarn_amplitude(f, factor),
        "truncate": f.flag("truncate", True),
    }


def _yarn_amplitude(f: Fields, factor: float) -> float:
    """0.1 ln(factor) + 1, unless stated; with mscale and mscale_all_dim the ratio of two."""
    over, under = f.non_negative("mscale", 0.0), f.non_negative("mscale_all_dim", 0.0)
    is_ratio = over and under
    implied = yarn_growth(factor, over) / yarn_growth(factor, under) if is_ratio else None
    return f.positive("attention_factor", implied or yarn_growth(factor))


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 for a context that is `factor` times as long; 1 if no longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_PARSERS: dict[str, Callable[[Fields, int], dict[str, Any]]] = {
    "default": lambda f, max_seqlen: {},
    "linear": lambda f, max_seqlen: {"factor": f.positive("factor")},
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


@lru_cache(maxsize=64)
def frequencies(rotary: Rotary, device: torch.device) -> Tensor:
    """fp32 (dim / 2,) on the device, radians per token; computed once. fp32 throughout, because
    checkpoints were trained with the rounding errors of this formula.
    """
    with torch.inference_mode(False):
        steps = torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim
        plain = 1.0 / (rotary.theta**steps)
        return _SCALED[rotary.kind](rotary, plain).to(device)


def _llama3(rotary: Rotary, plain: Tensor) -> Tensor:
    """Wavelengths above original / low are stretched, wavelengths below original / high are not."""
    turns = rotary.original * plain / (2 * math.pi)  # full turns over the original length
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


def cos_sin(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every position, fp32 (*positions, 1, dim / 2); all heads share them."""
    angles = positions[..., None, None].float() * frequencies(rotary, positions.device)
    cos, sin = in_whole_vectors(torch.cos, angles), in_whole_vectors(torch.sin, angles)
    return cos * rotary.amplitude, sin * rotary.amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (..., heads, head_dim) by (cos, sin) of `cos_sin` in fp32, rounded once."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Like `rotate`, of the pairs (2i, 2i + 1) of x; first of pairs first in the result. Scores are
    the same in any order that q and k share.
    """
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
