"""make_problem gives the Problem of tensors of these sizes."""

import pytest
import torch

import onchip.testing as ot
from onchip import masks
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.cost import make_problem


@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_the_problem_of_tensors(masked):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 40, "head_dim_v": 24}
    q, k, v = ot.make_qkv(2, 33, 150, **sizes, dtype=torch.bfloat16)
    mask = masks.build(masks.causal(), 1, 1, 33, 150) if masked else None
    options = {"causal": True, "window_size": (9, None), "dropout_p": 0.1}
    want = describe(Tensors(q, k, v, mask=mask), Options(**options))
    sizes |= {"batch": 2, "dtype": torch.bfloat16, "mask": mask}
    assert make_problem(33, 150, **sizes, **options) == want


def test_it_is_refused_like_a_call():
    with pytest.raises(ValueError, match="num_heads"):
        make_problem(64, num_heads=3, num_kv_heads=2)
    for size in ("num_kv_heads", "head_dim_v"):
        with pytest.raises(ValueError, match=size):
            make_problem(64, **{size: 0})
