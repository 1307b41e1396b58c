"""Recipes: how attention is computed with operands of 8 or 4 bits. `emulation.attend` executes
them, and kernels are judged by it.
"""

from dataclasses import dataclass, replace

import torch

from onchip.quant import formats, microscaling
from onchip.quant.accumulator import Accumulator
from onchip.quant.formats import E4M3, NumberFormat
from onchip.quant.microscaling import BlockFormat
from onchip.quant.schemes import Scheme


@dataclass(frozen=True)
class Recipe:
    """How the operands of both products are quantised.

    q, k, v: their schemes, or microscaling formats, with blocks along head_dim for q and k and
    along the keys for v and p; None leaves q and k unchanged, and rounds v to pv_dtype.
    p: the format of the weights, exp(score - running maximum) * p_scale; None: pv_dtype, unscaled.
    p_scale None: each row of a tile has its own, which makes its largest weight p.max.
    rotate: multiply q and k by a signed Hadamard matrix of `seed`.
    smooth: subtract from the keys the mean of their sequence, and correct lse.
    smooth_q: subtract from the queries the mean of their tile, and add its products to the scores.
    rounding_seed: operands in microscaling formats are rounded at random; None: to nearest.
    tile_m queries loop over tiles of tile_n keys, from the last to the first if `backwards`.
    accumulator: how products of two FP8 operands are added; None: in fp32.
    """

    name: str
    q: Scheme | BlockFormat | None
    k: Scheme | BlockFormat | None
    v: Scheme | BlockFormat | None = None
    p: NumberFormat | BlockFormat | None = None
    p_scale: float | None = 256.0
    pv_dtype: torch.dtype = torch.bfloat16
    rotate: bool = False
    smooth: bool = False
    smooth_q: bool = False
    seed: int = 0
    rounding_seed: int | None = None
    tile_m: int = 128
    tile_n: int = 128
    backwards: bool = True
    accumulator: Accumulator | None = None

    def __post_init__(self) -> None:
        scale, p = self.p_scale, self.p
        if p is not None and scale is not None and not 0 < scale <= p.max:
            raise ValueError(f"p_scale={scale} must be in (0, {p.max}], otherwise p = 1 saturates")
        if self.tile_m < 1 or self.tile_n < 1:
            raise ValueError(f"tile_m={self.tile_m} and tile_n={self.tile_n} must be positive")
        if isinstance(self.p, BlockFormat) and self.tile_n % self.p.block:
            raise ValueError(
                f"tile_n={self.tile_n} must be a multiple of {self.p.block}, p's block"
            )
        if not isinstance(self.p, BlockFormat) and self.p is not None and self.p_scale is None:
            raise ValueError("p_scale=None, a scale for each row, is for microscaling formats")
        if self.rounding_seed is not None:
            self._check_rounding_seed(self.rounding_seed)

    def _check_rounding_seed(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"rounding_seed={seed} must be in [0, 2^32)")
        if not any(isinstance(x, BlockFormat) for x in (self.q, self.k, self.v, self.p)):
            raise ValueError("rounding_seed needs an operand in a microscaling format")

    @property
    def weight_scale(self) -> float:
        """The factor of all weights before they are cast."""
        return 1.0 if self.p is None or self.p_scale is None else self.p_scale


_BLOCK = Scheme(E4M3, "block", 128)
_TOKEN = Scheme(formats.INT8, "token")
_TENSOR = Scheme(E4M3, "tensor")
_HEAD = Scheme(E4M3, "head")

# precision="fp8": the FlashAttention-3 paper's block quantisation and rotation; keys without their
# mean, on which e4m3 would spend its bits if channels are biased; and p scaled so that weights down
# to 2^-17 of a row's largest survive the cast.
FP8 = Recipe("fp8", _BLOCK, _BLOCK, _BLOCK, E4M3, rotate=True, smooth=True)
# int8 per token has 7 bits where e4m3 has 4: scores are 5 to 7 times as exact. It matters if scores
# are large: with one key that scores 8 above the others, FP8 loses 5 %, INT8 1 to 3 %, mostly by p
# and v in e4m3.
INT8 = Recipe("int8", _TOKEN, _TOKEN, _BLOCK, E4M3, rotate=True, smooth=True)
INT8_PV16 = replace(INT8, name="int8_pv16", v=None, p=None)

# Others, for comparison. FA3_PAPER is arXiv 2407.08608, FA3_FP8 the released kernel
# (hopper/flash_fwd_kernel_sm90.h of github.com/Dao-AILab/flash-attention): descales per head, p *
# 2^8 (its Max_offset), no rotation. SAGE1 and SAGE2: arXiv 2410.02367 and 2411.10958, the 8-bit
# variants.
FA3_PAPER = replace(FP8, name="fa3_paper", smooth=False)
FP8_TENSOR = Recipe("fp8_tensor", _TENSOR, _TENSOR, _TENSOR, E4M3, p_scale=1.0)
FA3_FP8 = Recipe("fa3_fp8", _HEAD, _HEAD, _HEAD, E4M3, p_scale=256.0)
SAGE1 = Recipe(
    "sage1",
    Scheme(formats.INT8, "block", 128),
    Scheme(formats.INT8, "block", 64),
    pv_dtype=torch.float16,
    smooth=True,
    backwards=False,
)
SAGE2 = Recipe(
    "sage2",
    _TOKEN,
    _TOKEN,
    Scheme(E4M3, "channel"),
    E4M3,
    p_scale=448.0,
    smooth=True,
    backwards=False,
)

# precision="nvfp4" and "mxfp4": all four operands in E2M1, for devices with FP4 tensor cores. Each
# operand adds 9 % of noise in NVFP4 and 12 % in MXFP4. p * 2688 gives a row's largest weight the
# largest scale of E4M3, 448, so that a block of weights of 2^-17 of it still has its own scale. In
# MXFP4 factors of two change nothing; 3/4 takes the weights nearest to 1 out of the upper quarter
# of a power of two, which saturates. "nvfp4_pv8" has p and v in e4m3: a sink's small value is lost
# among those of its neighbours in a block of v.
_BLOCKS = replace(microscaling.NVFP4, name="nvfp4_blocks", has_tensor_scale=False)
NVFP4 = Recipe(
    "nvfp4",
    microscaling.NVFP4,
    microscaling.NVFP4,
    microscaling.NVFP4,
    _BLOCKS,
    p_scale=_BLOCKS.max,
    rotate=True,
    smooth=True,
)
NVFP4_PV8 = replace(NVFP4, name="nvfp4_pv8", v=_BLOCK, p=E4M3, p_scale=256.0)
MXFP4 = replace(
    NVFP4,
    name="mxfp4",
    **dict.fromkeys("qkvp", microscaling.MXFP4),
    p_scale=0.75,
)

# Others, for comparison: rounded at random; the formats as they are, without rotation and
# smoothing; scales of MXFP4 rounded up; SAGE3, arXiv 2505.11594, whose weights have a scale for
# each row of a tile, and which has no tensor scales and does not rotate.
NVFP4_RANDOM = replace(NVFP4, name="nvfp4_random", rounding_seed=0)
NVFP4_PLAIN = replace(NVFP4, name="nvfp4_plain", rotate=False, smooth=False)
MXFP4_PLAIN = replace(MXFP4, name="mxfp4_plain", p_scale=1.0, rotate=False, smooth=False)
MXFP4_CEIL = replace(MXFP4, name="mxfp4_ceil", **dict.fromkeys("qkvp", microscaling.MXFP4_CEIL))
SAGE3 = Recipe(
    "sage3",
    **dict.fromkeys("qkvp", _BLOCKS),
    p_scale=None,
    smooth=True,
    smooth_q=True,
    backwards=False,
)
EIGHT_BITS = (FP8, INT8, INT8_PV16, FP8_TENSOR, FA3_PAPER, FA3_FP8, SAGE1, SAGE2)
FOUR_BITS = (NVFP4, NVFP4_PV8, MXFP4, NVFP4_RANDOM, NVFP4_PLAIN, MXFP4_PLAIN, MXFP4_CEIL, SAGE3)
RECIPES = {r.name: r for r in (*EIGHT_BITS, *FOUR_BITS)}
