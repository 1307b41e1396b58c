"""Formulas for torch's FlopCounterMode. They count the multiply-adds of the matrix products, two
operations each, over every pair of a query and a key of one sequence. Pairs that causal, window and
masks hide are counted, too, as in torch's formula for scaled_dot_product_attention, so that the
numbers of both compare. `onchip.explain` and `Problem.flops` count the visible pairs alone.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onchip.core.backend import Tangents
from onchip.core.problem import Problem, Tensors

Formula = Callable[..., int]


def forward_flops(problem: Problem, x: Tensors) -> int:
    """The products q k^T and p v."""
    return 2 * _pairs(problem, x) * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: Problem, x: Tensors) -> int:
    """The products of the recomputed scores, dq and dk (head_dim), dp and dv (head_dim_v)."""
    return 2 * _pairs(problem, x) * (3 * problem.head_dim + 2 * problem.head_dim_v)


def tangents_flops(problem: Problem, x: Tensors, dx: Tangents) -> int:
    """The products of the forward, (p ds) v, and dq k^T, q dk^T and p dv of the tangents given."""
    products = 1 + (dx.q is not None) + (dx.k is not None)
    products_v = 2 + (dx.v is not None)
    return 2 * _pairs(problem, x) * (products * problem.head_dim + products_v * problem.head_dim_v)


def tangent_gradients_flops(problem: Problem, x: Tensors, dx: Tangents) -> int:
    """The products of the tangents, then those of the backward with the scores and their tangents
    recomputed, dout dv^T, and the shares of dk in dq and of dq in dk.
    """
    products = 3 + 2 * ((dx.q is not None) + (dx.k is not None))
    products_v = 2 + (dx.v is not None)
    again = products * problem.head_dim + products_v * problem.head_dim_v
    return tangents_flops(problem, x, dx) + 2 * _pairs(problem, x) * again


def _pairs(problem: Problem, x: Tensors) -> int:
    """Pairs over all sequences and heads. Lengths without values (fake and meta tensors): as if
    every sequence had the maximum length, which for pages is a full row of the page table.
    """
    lengths_q: Any = problem.seqlen_q
    lengths_k: Any = problem.seqlen_k
    if _has_values(x.cu_seqlens_q):
        lengths_q = x.cu_seqlens_q.diff().long()
    if _has_values(x.cu_seqlens_k):
        lengths_k = x.cu_seqlens_k.diff()
    elif _has_values(x.cache_seqlens):
        lengths_k = x.cache_seqlens
    pairs = lengths_q * lengths_k
    per_head = int(pairs.sum()) if isinstance(pairs, Tensor) else problem.batch * pairs
    return problem.num_heads * per_head


def _has_values(lengths: Tensor | None) -> bool:
    return type(lengths) is Tensor and not lengths.is_meta


def register_flop_formulas(formulas: dict[Any, Formula]) -> None:
    """Add formulas to torch's registry, if it is loaded, and to the active FlopCounterModes, which
    copied the registry when they were made. Loading it here would cost `import onchip` a second.
    torch.compile loads it: the fakes of the ops call this when a graph is traced.
    """
    registry = getattr(sys.modules.get("torch.utils.flop_counter"), "flop_registry", {})
    registry.update(formulas)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", {})
        registry.update(formulas)
