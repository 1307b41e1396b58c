"""Who serves: the first that can, unless it defers; who was named serves or refuses."""

import pytest
import torch

import onchip
from onchip.dispatch import plan
from onchip.problem import DeviceInfo, Problem

H200 = DeviceInfo("cuda", "H200", (9, 0))
BF16 = torch.bfloat16


def problem(seqlen_q, seqlen_k, **fields):
    return Problem(1, seqlen_q, seqlen_k, 32, 8, 128, 128, BF16, BF16, 0.1, **fields)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "kernel"),
    [(1, 4096, "triton"), (4, 100, "triton"), (4096, 4096, "hopper"), (16, 16, "hopper")],
)
def test_hopper_defers_few_queries_over_many_keys(seqlen_q, seqlen_k, kernel):
    found = plan(problem(seqlen_q, seqlen_k), H200)
    assert found.kernel == kernel
    reason = found.reasons.get("hopper", "")
    assert reason.startswith(f"leaves seqlen_q={seqlen_q} to triton") == (kernel == "triton")


def test_a_kernel_that_is_named_does_not_defer():
    assert plan(problem(1, 4096), H200, "hopper").kernel == "hopper"


def test_only_the_forward_is_deferred():
    assert plan(problem(1, 4096), H200, None, backward=True).kernel == "hopper"


def test_pages_are_read_by_triton():
    paged = problem(512, 4096, page_size=16)
    assert plan(paged, H200).kernel == "triton"
    with pytest.raises(onchip.UnsupportedError, match="has no pages"):
        plan(paged, H200, "hopper")
