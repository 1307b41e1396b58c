"""Formulas for torch's FlopCounterMode. They count the multiply-adds of the matrix products, two
operations each, over every pair of a query and a key of one sequence. Pairs that causal, window and
masks hide are counted, too, as in torch's formula for scaled_dot_product_attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onchip.core.problem import Problem, Tensors

Formula = Callable[..., int]


def forward_flops(problem: Problem, x: Tensors) -> int:
    """The products q k^T and p v."""
    return 2 * _pairs(problem, x) * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: Problem, x: Tensors) -> int:
    """The products of the recomputed scores, dq and dk (head_dim), dp and dv (head_dim_v)."""
    return 2 * _pairs(problem, x) * (3 * problem.head_dim + 2 * problem.head_dim_v)


def _pairs(problem: Problem, x: Tensors) -> int:
    """Pairs over all sequences and heads. cu_seqlens without values (fake tensors): as if every
    sequence had the maximum length.
    """
    lengths = problem.seqlen_q, problem.seqlen_k
    if problem.page_size or not problem.packed or type(x.cu_seqlens_q) is not torch.Tensor:
        return problem.batch * problem.num_heads * lengths[0] * lengths[1]
    sizes = x.cu_seqlens_q.diff() * x.cu_seqlens_k.diff().long()
    return problem.num_heads * int(sizes.sum())


def register_flop_formulas(formulas: dict[Any, Formula]) -> None:
    """Add formulas to the active FlopCounterModes. Registering them with torch at import would
    import torch.utils.flop_counter, which takes a second.
    """
    if torch.compiler.is_compiling():
        return
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            registry.update(formulas)
