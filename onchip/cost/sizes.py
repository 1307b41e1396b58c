"""A Problem from sizes, without tensors."""

from typing import Any

import torch

from onchip.core.problem import Options, Problem, Tensors
from onchip.core.validation import describe
from onchip.masks import BlockMask


def make_problem(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    batch: int = 1,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float16,
    mask: BlockMask | None = None,
    **options: Any,
) -> Problem:
    """The Problem of a call with tensors of these sizes; options are those of
    `onchip.core.problem.Options`. Takes no memory, whatever the sizes; raises ValueError as the
    call would.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    empty = lambda *shape: torch.empty(shape, dtype=dtype, device="meta")
    q = empty(batch, seqlen_q, num_heads, head_dim)
    k = empty(batch, seqlen_k, kv_heads, head_dim)
    v = empty(batch, seqlen_k, kv_heads, head_dim if head_dim_v is None else head_dim_v)
    shaped = None if mask is None else mask.to("meta")
    return describe(Tensors(q, k, v, mask=shaped), Options(**options))
