"""The arithmetic of FlashAttention-4 in the loop of FlashAttention-2: exp2 by a polynomial, and
accumulators rescaled only if a maximum has grown by more than 2^8. Its schedule is not modelled
here.

The loop and its picture are in v2.py; examples/versions/v4.py teaches both changes in Gluon.
"""

import torch
from torch import Tensor

from onchip.core.backend import Grads, Result, make_backend
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors

from . import v2
from .arithmetic import POLYNOMIALS, Arithmetic
from .call import OPTIONS
from .ledger import current

THRESHOLD_LOG2 = 8.0
# The paper's degree is 3: accurate enough for out, but lse is then off by up to 9e-5, and the
# contract allows 1e-5. (The paper computes only some exponentials this way.)
DEGREES = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 6}
PUBLISHED = Arithmetic("paper_v4", 3, THRESHOLD_LOG2)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.dtype not in DEGREES:
        return "takes 2^x by a polynomial made for float32, not for float64"
    return None


def arithmetic_of(problem: Problem) -> Arithmetic:
    """The arithmetic of the open ledger, or the one that keeps the contract."""
    arithmetic = current().arithmetic
    if arithmetic is None:
        return Arithmetic("paper_v4", DEGREES[problem.dtype], THRESHOLD_LOG2)
    if arithmetic.degree not in (None, *POLYNOMIALS):
        raise ValueError(f"degree={arithmetic.degree} is not None or one of {sorted(POLYNOMIALS)}")
    return arithmetic


def forward(problem: Problem, x: Tensors) -> Result:
    return v2.attend(problem, x, arithmetic_of(problem))


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    return v2.attend_backward(problem, x, (out, lse, dout, dlse), arithmetic_of(problem))


backend = make_backend(supports, forward, backward, options=OPTIONS - {"dropout_p"})
