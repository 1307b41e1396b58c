"""flash_attn's arguments and lse, converted to onchip's."""

import operator
from collections.abc import Callable
from typing import NamedTuple, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from onchip.core.problem import Window

Function = TypeVar("Function", bound=Callable)
Lengths = tuple[Tensor, Tensor, int, int]  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


class FlashScores(TypedDict):
    """The options of onchip.attention that determine the probabilities."""

    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: Tensor | None


class FlashOptions(FlashScores):
    """All options of onchip.attention that flash_attn has."""

    dropout_p: float
    deterministic: bool


class FlashArguments(NamedTuple):
    """The arguments that flash_attn's functions share, with its names and in its order."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False

    @property
    def scores(self) -> FlashScores:
        """A softcap of 0 or less is off."""
        return {
            "softmax_scale": self.softmax_scale,
            "causal": bool(self.causal),
            "window_size": window(self.window_size),
            "softcap": self.softcap if self.softcap > 0 else 0.0,
            "alibi_slopes": self.alibi_slopes,
        }

    @property
    def options(self) -> FlashOptions:
        return {
            **self.scores,
            "dropout_p": self.dropout_p,
            "deterministic": bool(self.deterministic),
        }


def window(window_size: tuple[int, int]) -> Window:
    """flash_attn's window; -1 or any negative number becomes None, no bound."""
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{window_size=} must be two ints (left, right), -1 = no bound") from error
    return (left if left >= 0 else None, right if right >= 0 else None)


def as_int(length: int | Tensor) -> int:
    """A length, which flash_attn also takes as a tensor of one element."""
    length = cast(int, length.item()) if isinstance(length, Tensor) else length
    if torch.compiler.is_compiling():
        torch._check(length >= 0)  # the compiler needs it for a data-dependent length
    return length


def untraced(function: Function) -> Function:
    """Exclude a function from torch.compile: a call is a graph break."""
    return cast(Function, torch.compiler.disable(function))


def contiguous(t: Tensor) -> Tensor:
    """t with a contiguous last dimension, as in flash_attn; other types are refused later."""
    strided = isinstance(t, Tensor) and t.dim() and t.stride(-1) != 1
    return t.contiguous() if strided else t


def round_multiple(x: int, m: int) -> int:
    """x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


def flash_lse(lse: Tensor) -> Tensor:
    """flash_attn 2 has +inf for a row that sees no key, onchip -inf."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def onchip_lse(lse: Tensor) -> Tensor:
    """The inverse of flash_lse."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)
