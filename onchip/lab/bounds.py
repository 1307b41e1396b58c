"""Lower bounds on HBM traffic: Theorem 2 of FlashAttention, and bounds for any exact algorithm. All
count numbers, over all heads of a Problem; times itemsize they are bytes.
"""

import math

from onchip.core.problem import Problem


def theorem2(problem: Problem, sram: float) -> float:
    """N^2 d^2 / M: the traffic of FlashAttention for d <= M <= N d, up to a constant (12 in v1 as
    published, 4 in the best order of its loops).
    """
    dim = (problem.head_dim + problem.head_dim_v) / 2
    return _pairs(problem) * dim * dim / sram


def standard(problem: Problem) -> float:
    """N^2 + N d: the traffic of Algorithm 0, up to a constant (4) and if M >= d^2."""
    dim = (problem.head_dim + problem.head_dim_v) / 2
    heads = problem.batch * problem.num_heads
    return heads * (problem.seqlen_q * problem.seqlen_k + problem.seqlen_q * dim)


def compulsory(problem: Problem) -> int:
    """Every input that causal and window leave visible is read once and out is written once,
    however large the chip.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    rows = problem.seqlen_q * dv + problem.seen_queries * d
    keys = problem.seen_keys * (d + dv)
    return problem.batch * (problem.num_heads * rows + problem.num_kv_heads * keys)


def lower_bound(problem: Problem, sram: float) -> int:
    """Numbers that any algorithm moves that computes each visible q.k as the sum of its d products,
    in any order, with M = sram numbers on the chip: N^2 d^2 / M up to a constant if M >= d^2.

    Divide its transfers into phases of M. In a phase at most 2 M numbers of Q and K are ever on the
    chip, M from before and M that were moved: a rows of Q and b of K with (a + b) d <= 2 M, which
    meet in at most a b <= (M / d)^2 products. Other products that end in the phase began before it,
    and a part of each is among the same 2 M. So at most (M / d)^2 + 2 M products end in a phase.
    Raises ValueError for a block mask or packed sequences: a Problem does not hold their pairs.
    """
    if problem.has_mask or problem.packed:
        raise ValueError(
            "the bound counts the pairs that causal and window leave visible, and this call hides"
            f" others: has_mask={problem.has_mask}, packed={problem.packed}"
        )
    if sram == math.inf:
        return compulsory(problem)
    if not sram >= 1:
        raise ValueError(f"{sram=} must be at least 1 number")
    ended = (sram / problem.head_dim) ** 2 + 2 * sram
    phases = int(-(-_pairs(problem) // ended))  # the last phase may be short
    return max(compulsory(problem), int(sram * (phases - 1)))


def recompute_below(itemsize: int, ridge: float) -> float:
    """The head_dim below which computing a score again (2 d flops) takes less time than storing its
    probability and loading it (2 itemsize bytes), on a machine with a ridge of so many flops per
    byte.
    """
    return itemsize * ridge


def _pairs(problem: Problem) -> int:
    return problem.batch * problem.num_heads * problem.visible_pairs
