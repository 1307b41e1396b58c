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
    """Numbers moved by any algorithm that computes each visible q.k as the sum of its d products
    in any order, with M = sram numbers on the chip: up to a constant N^2 d^2 / M if M >= d^2, and
    N^2 d / sqrt(M) if M <= d^2.

    Proof. Divide the transfers into phases of M. In a phase at most 2 M numbers of Q and K are on
    the chip at some time: M from before, and M that were moved. Scores that a phase computes whole
    belong to a rows of Q and b of K with (a + b) d <= 2 M: at most a b <= (M / d)^2.

    Of the other scores, first count those that end in the phase: they began before it, and their
    partial sums are among the same 2 M numbers. So at most (M / d)^2 + 2 M scores end in a phase.

    Now count their products instead. A phase that loads u and stores M - u numbers sees x numbers
    of Q, y of K and z partial sums that come from before or remain after it, with
    x + y + z <= (M + u) + (M + M - u) = 3 M and x + y <= 2 M. A product belongs to one of each, so
    there are at most sqrt(x y z) (Loomis and Whitney 1949) <= M^(3/2). With those of whole scores
    a phase computes at most M^2 / d + M^(3/2) of the N^2 d products.

    Raises ValueError for a block mask or packed sequences: a Problem does not hold their pairs.
    """
    if problem.has_mask or problem.packed:
        raise ValueError(
            "the bound knows the pairs that causal and window hide, and this call hides more:"
            f" has_mask={problem.has_mask}, packed={problem.packed}"
        )
    if sram == math.inf:
        return compulsory(problem)
    if not sram >= 1:
        raise ValueError(f"{sram=} must be at least 1 number")
    parts = min(2 * sram, sram**1.5 / problem.head_dim)  # less than 2 M if M < 4 d^2
    scores_per_phase = (sram / problem.head_dim) ** 2 + parts
    phases = int(-(-_pairs(problem) // scores_per_phase))  # the last phase may be short
    return max(compulsory(problem), int(sram * (phases - 1)))


def recompute_below(itemsize: int, ridge: float) -> float:
    """The head_dim below which recomputing a score (2 d flops) takes less time than storing and
    loading its probability (2 itemsize bytes). ridge: the flops per byte of the device.
    """
    return itemsize * ridge


def _pairs(problem: Problem) -> int:
    return problem.batch * problem.num_heads * problem.visible_pairs
