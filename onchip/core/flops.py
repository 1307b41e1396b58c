"""What torch's FlopCounterMode counts of a call: the multiply-adds of its products, two operations
each, over every pair of a query and a key of the same sequence. causal, window and masks subtract
nothing, as in torch's own formula for scaled_dot_product_attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onchip.core.problem import Problem, Tensors

Formula = Callable[..., int]


def forward_flops(problem: Problem, x: Tensors) -> int:
    """q k^T and p v."""
    return 2 * _pairs(problem, x) * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: Problem, x: Tensors) -> int:
    """The scores again, dq and dk; dp and dv."""
    return 2 * _pairs(problem, x) * (3 * problem.head_dim + 2 * problem.head_dim_v)


def _pairs(problem: Problem, x: Tensors) -> int:
    """Over all sequences and heads. Offsets without values (fake tensors) stand for the longest."""
    lengths = problem.seqlen_q, problem.seqlen_k
    if problem.page_size or not problem.packed or type(x.cu_seqlens_q) is not torch.Tensor:
        return problem.batch * problem.num_heads * lengths[0] * lengths[1]
    sizes = x.cu_seqlens_q.diff() * x.cu_seqlens_k.diff().long()
    return problem.num_heads * int(sizes.sum())


def tell_counters(formulas: dict[Any, Formula]) -> None:
    """Add formulas to the FlopCounterModes that are active. To register them with torch beforehand
    would import its module, which takes a second.
    """
    if torch.compiler.is_compiling():
        return
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            registry.update(formulas)
