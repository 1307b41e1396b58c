"""Ranks as chunks of one GPU: the kernels of a GPU serve the rounds, and lose nothing by it."""

from dataclasses import replace

import pytest
import torch

import onchip
from onchip.dispatch import plan
from onchip.parallel.comm import run_ranks
from onchip.parallel.rounds import Call, Rule, pose, schedule
from onchip.parallel.sharding import zigzag
from onchip.problem import device_info, laid_out
from tests.parallel.judge import (
    CU,
    OPTIONS,
    PACKED,
    Case,
    differentiate,
    judge,
    on_one_device,
    on_rank,
    rmse,
    whole,
)

CUDA = torch.device("cuda")


def on_gpu(case):
    """The case with its tensors on the GPU."""
    return GpuCase(**{name: getattr(case, name) for name in case.__dataclass_fields__})


class GpuCase(Case):
    def tensors(self):
        inputs, extras = super().tensors()
        return tuple(t.cuda() for t in inputs), {n: t.cuda() for n, t in extras.items()}

    @property
    def cu(self):
        return None if super().cu is None else super().cu.cuda()

    def arguments(self, extras):
        options = super().arguments(extras)
        mask = options.get("mask")
        return options | {"mask": mask.cuda()} if isinstance(mask, torch.Tensor) else options


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zigzag", "striped", "balanced"])
def test_fp32_is_one_device(name):
    cases = [Case(name, 333, 2, dtype=torch.float32, options=options) for options in OPTIONS]
    packed = {"dtype": torch.float32, "cu_seqlens": CU}
    cases += [Case(name, CU[-1], options=options, **packed) for options in PACKED]
    for case in map(on_gpu, cases):
        parts = run_ranks(4, on_rank, case)
        judge(case, [part[0] for part in parts])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "mask": "prefix"}])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sixteen_bits_lose_no_more_on_ranks(size, options, head_dim):
    """RMSE against fp64 of result and gradients, at most 1.02 times that of one call."""
    case = Case("zigzag", 4096, 1, (4, 2), (head_dim,) * 2, torch.bfloat16, options=options)
    case = on_gpu(case)
    (q, k, v, dout, dlse), _ = case.tensors()
    exact_options = replace(case, dtype=torch.float64).arguments({})
    attend = lambda q, k, v, extras: onchip.attention(q, k, v, **exact_options)
    inputs = [t.cpu().double() for t in (q, k, v)]
    exact = differentiate(attend, inputs, dout.cpu().double(), dlse.cpu().double(), {})
    exact = {name: t.cuda() for name, t in exact.items()}
    one = rmse(on_one_device(case), exact)
    many = rmse(whole(case, [part[0] for part in run_ranks(size, on_rank, case)]), exact)
    for name, error in many.items():
        most = 1.25 if name == "lse" else 1.02
        assert error <= most * one[name], f"{name}: {error:.3e} on {size}, {one[name]:.3e} on one"


@pytest.mark.hopper
def test_hopper_serves_every_causal_round_both_ways():
    q, k = (torch.randn(1, 1024, h, 128, dtype=torch.bfloat16, device=CUDA) for h in (8, 2))
    for round in schedule(zigzag(4), Rule(4096, True), 1, CUDA).rounds:
        for backward in (False, True):
            question, x = pose(Call(), round, q, k, k, wide_grads=backward)
            found = plan(laid_out(question.problem, x), device_info(CUDA), None, backward)
            assert found.kernel == "hopper", found.reasons
