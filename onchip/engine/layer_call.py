"""The attention call of a layer in a step, as dispatch sees it: for choices that depend on whether
and how a kernel serves it.
"""

import torch

from onchip.core.problem import Problem
from onchip.kvcache import KVCache
from onchip.models import Decoder


def layer_call(model: Decoder, cache: KVCache, seqlen_q: int) -> Problem:
    """One sequence of the longest length, in a layer without a window."""
    config, spec = model.config, cache.spec
    scale = config.softmax_scale
    return Problem(
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=cache.max_seqlen,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        head_dim_v=spec.head_dim_v,
        dtype=model.dtype,
        out_dtype=model.dtype,
        softmax_scale=config.head_dim**-0.5 if scale is None else scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        softcap=config.softcap,
        has_sinks=config.sinks,
        page_size=spec.page_size,
        page_dtype=spec.kv_dtype,
    )
