"""The options of the public functions as TypedDicts, for type checkers.

The overloads of a function (functional.py, onchip.parallel) say how its result depends on
return_lse and return_stats; all other options are in one of these. A program that passes options on
can name them, too: `def layer(x: Tensor, **options: Unpack[AttentionOptions])`.
"""

from typing import Literal, TypedDict

import torch
from torch import Tensor

from onchip.core.problem import Window
from onchip.fold.cascade import CascadePlan
from onchip.masks.mods import MaskLike
from onchip.score_mods.tracing import ScoreFunction, ScoreMod

# The values of return_lse and its like, which overloads distinguish.
Yes = Literal[True]
No = Literal[False]


class CallOptions(TypedDict, total=False):
    """Options of every function."""

    causal: bool
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    out_dtype: torch.dtype | None
    kernel: str | None


class OffloadOptions(CallOptions, total=False):
    """Options of offload_attention."""

    window_size: Window
    segment_bytes: int | None


class CascadeOptions(CallOptions, total=False):
    """Options of cascade_attention."""

    latent: int | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    plan: CascadePlan | None
    cu_seqlens_q: Tensor | None


class ScoreOptions(CallOptions, total=False):
    """Options of the functions over dense, packed and paged keys."""

    window_size: Window
    alibi_slopes: Tensor | None
    deterministic: bool


class PagedOptions(ScoreOptions, total=False):
    """Options of paged_attention."""

    latent: int | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    tree_mask: Tensor | None
    precision: str | None
    reproducible: bool


class TrainingOptions(ScoreOptions, total=False):
    """Options of attention, varlen_attention and context_parallel_attention (with gradients)."""

    dropout_p: float
    dropout_seed: int | Tensor | None
    precise_delta: bool


class VarlenOptions(TrainingOptions, total=False):
    """Options of varlen_attention and attention."""

    precision: str | None
    score_mod: ScoreFunction | ScoreMod | None
    reproducible: bool


class AttentionOptions(VarlenOptions, total=False):
    """Options of attention."""

    mask: "MaskLike | None"
    bias: Tensor | None
