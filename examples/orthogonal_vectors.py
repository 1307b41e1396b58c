"""Orthogonal vectors by attention: why nobody has attention in less than quadratic time.

Given two sets of n vectors of zeros and ones, is there one in each such that the two have no one in
common? Nobody knows a way in time n^(2 - e) for vectors longer than log n, and one would refute the
strong exponential time hypothesis (Williams 2005). One call of attention answers it, so attention
in time n^(2 - e), even far from exact, would be such a way (after Keles, Wijewardena and Hegde,
arXiv 2209.04881).

    python examples/orthogonal_vectors.py --n 4096 --dim 48
"""

import argparse
import math

import torch
from torch import Tensor

import onchip


def outputs(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One call of attention for rows of zeros and ones, a (m, dim) and b (n, dim): (m,).

    Row i of a asks with -a_i, each row of b is a key of value 0, and one more key of value 1 scores
    -1/2 with everybody: what it gets of the softmax is the output,

        out_i = e^(-C/2) / (e^(-C/2) + sum_j e^(-C a_i.b_j)).

    If a_i.b_j = 0 for some j, then out_i < e^(-C/2). If not, every a_i.b_j >= 1, and
    out_i >= 1 / (1 + n e^(-C/2)). With C = 2 ln(3 n) that is 1 / (3 n) against 3 / 4.
    """
    n = b.shape[0]
    q = torch.cat([-a, torch.full((len(a), 1), -1.0)], 1)
    threshold = torch.zeros(1, q.shape[1])
    threshold[0, -1] = 0.5
    k = torch.cat([torch.cat([b, torch.zeros(n, 1)], 1), threshold])
    v = torch.zeros(n + 1, 1)
    v[-1] = 1.0
    q, k, v = (x.to(a.device, dtype)[None, :, None] for x in (q, k, v))
    return onchip.attention(q, k, v, softmax_scale=2 * math.log(3 * n)).flatten()


def rows_with_orthogonal(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bool (m,): which rows of a are orthogonal to some row of b."""
    return decide_by_additive(outputs(a, b, dtype))


def decide_by_additive(out: Tensor) -> Tensor:
    """The same from outputs that are wrong by up to 1/4: 1 / (3 n) + 1/4 <= 1/2 for n >= 2."""
    return out < 0.5


def decide_by_relative(out: Tensor, n: int) -> Tensor:
    """The same from outputs that are wrong by a share of up to 1 - 1/n of themselves.

    An output below 1 / (3 n) becomes less than 2 / (3 n), one of at least 3/4 stays at or above
    3 / (4 n).
    """
    return out < 0.7 / n


def orthogonal_pair(a: Tensor, b: Tensor) -> tuple[int, int] | None:
    """(i, j) with a_i.b_j = 0, or None: one attention, then one row by hand."""
    rows = rows_with_orthogonal(a, b).nonzero().flatten()
    if not len(rows):
        return None
    i = int(rows[0])
    return i, int((b @ a[i] == 0).nonzero()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=48)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, 2, (2, args.n, args.dim), generator=generator).float()
    pair = orthogonal_pair(a, b)
    print(
        "no pair is orthogonal" if pair is None else "a[{}] and b[{}] are orthogonal".format(*pair)
    )


if __name__ == "__main__":
    main()
