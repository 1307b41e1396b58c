"""Score functions of `python -m benchmarks score_mods`, for onchip, FlexAttention and fp64 alike.

They are restated from attention-gym and docs/score_mods.md. Called with tensors of indices that
broadcast, a function is its own dense formula.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SOFTCAP, REACH, DOCUMENTS = 20.0, 128, 8
EXACT, BUCKETS = 8, 16  # of T5: distances with a bucket of their own, and buckets of a direction
ScoreMod = Callable[..., Tensor]


class ScoreSizes(NamedTuple):
    num_heads: int
    seqlen: int

    @property
    def width(self) -> int:
        """Of an image whose pixels are the tokens."""
        return 1 << (self.seqlen.bit_length() // 2)

    @property
    def height(self) -> int:
        return -(-self.seqlen // self.width)


class ScoreFunction(NamedTuple):
    """make(*tensors) -> score_mod. The first tensor is learned, N(0, 1) / 4 in fp32, if the
    function has a shape for it; `fixed` makes the others.
    """

    name: str
    make: Callable[..., ScoreMod]
    shape: Callable[[ScoreSizes], tuple[int, ...]] | None = None
    fixed: Callable[[ScoreSizes], tuple[Tensor, ...]] = lambda sizes: ()

    def draw(self, sizes: ScoreSizes, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """(the learned tensor, if there is one; the fixed ones)"""
        fixed = [t.to(device) for t in self.fixed(sizes)]
        if self.shape is None:
            return [], fixed
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randn(self.shape(sizes), generator=generator, device=device) / 4
        return [drawn], fixed


def slopes(sizes: ScoreSizes) -> Tensor:
    """Of ALiBi: 2^(-8 / heads), its square, ..."""
    return torch.exp2(torch.arange(1, sizes.num_heads + 1) * (-8.0 / sizes.num_heads))


def documents(sizes: ScoreSizes) -> Tensor:
    return (torch.arange(sizes.seqlen) * DOCUMENTS // sizes.seqlen).int()


def buckets(sizes: ScoreSizes) -> Tensor:
    """The bucket of each distance: its own up to EXACT, then logarithmic."""
    distance = torch.arange(sizes.seqlen)
    far = EXACT + (torch.log2(distance.clamp(min=1) / EXACT) * 2).long()
    return torch.where(distance < EXACT, distance, far.clamp(max=BUCKETS - 1)).int()


def _softcap() -> ScoreMod:
    return lambda score, b, h, q, k: SOFTCAP * torch.tanh(score / SOFTCAP)


def _tanh() -> ScoreMod:
    return lambda score, b, h, q, k: torch.tanh(score)


def _alibi(slope: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score - slope[h] * (q - k).abs()


def _relative(table: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score + table[h, torch.clamp(q - k, -REACH, REACH) + REACH]


def _t5(table: Tensor, bucket: Tensor) -> ScoreMod:
    def t5(score, b, h, q, k):
        return score + table[bucket[(q - k).abs()] + torch.where(k > q, BUCKETS, 0), h]

    return t5


def _decay(rate: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score - rate[h] * torch.log((q - k).abs() + 1.0)


def _temperature(log_scale: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score * torch.exp(log_scale[h])


def _documents(document: Tensor, slope: Tensor) -> ScoreMod:
    def inside(score, b, h, q, k):
        near = score - slope[h] * (q - k).abs()
        return torch.where(document[q] == document[k], near, -float("inf"))

    return inside


def _swin(table: Tensor) -> ScoreMod:
    """The bias of a distance in rows and in columns of an image."""
    height, width = (n // 2 + 1 for n in table.shape[:2])

    def swin(score, b, h, q, k):
        rows, columns = q // width - k // width, q % width - k % width
        return score + table[rows + height - 1, columns + width - 1, h]

    return swin


def _gate(gate: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score * torch.sigmoid(gate[h, q])


def _bias(bias: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score + bias[h, q, k]


FUNCTIONS = (
    ScoreFunction("softcap", _softcap),
    ScoreFunction("ALiBi", _alibi, fixed=lambda sizes: (slopes(sizes),)),
    ScoreFunction("relative", _relative, lambda sizes: (sizes.num_heads, 2 * REACH + 1)),
    ScoreFunction(
        "T5", _t5, lambda sizes: (2 * BUCKETS, sizes.num_heads), lambda sizes: (buckets(sizes),)
    ),
    ScoreFunction("decay", _decay, lambda sizes: (sizes.num_heads,)),
    ScoreFunction("tanh", _tanh),
    ScoreFunction("temperature", _temperature, lambda sizes: (sizes.num_heads,)),
    ScoreFunction("documents", _documents, fixed=lambda sizes: (documents(sizes), slopes(sizes))),
    ScoreFunction(
        "Swin",
        _swin,
        lambda sizes: (2 * sizes.height - 1, 2 * sizes.width - 1, sizes.num_heads),
    ),
    ScoreFunction("gate", _gate, lambda sizes: (sizes.num_heads, sizes.seqlen)),
)
BIAS = ScoreFunction("bias", _bias, lambda sizes: (sizes.num_heads, sizes.seqlen, sizes.seqlen))
