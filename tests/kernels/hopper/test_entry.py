"""Which problems the Hopper kernels accumulate gradients for, decided without a GPU."""

import pytest
import torch

from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.hopper import entry
from onchip.testing import make_qkv


def problem_of(dim=128, seqlen=99, seqlen_k=77, sinks=False, **options):
    q, k, v = make_qkv(1, seqlen, seqlen_k, num_heads=2, head_dim=dim, dtype=torch.bfloat16)
    x = Tensors(q, k, v, sinks=torch.zeros(2) if sinks else None)
    return describe(x, Options(**options), ())


@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}])
def test_gradients_of_one_kernel_can_be_accumulated(dim, options):
    assert entry.backend.get_accumulate_fn(problem_of(dim, **options))


@pytest.mark.parametrize(
    "options",
    [{"dim": 256}, {"dim": 136}, {"deterministic": True}, {"sinks": True}, {"seqlen_k": 0}],
)
def test_gradients_of_several_kernels_or_of_no_keys_cannot_be_accumulated(options):
    assert not entry.backend.get_accumulate_fn(problem_of(**options))


def test_gradients_of_packed_sequences_cannot_be_accumulated():
    assert not entry.backend.get_accumulate_fn(problem_of()._replace(packed=True))
