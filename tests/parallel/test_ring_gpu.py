"""Ranks as chunks of one GPU: GPU kernels compute the rounds, as accurately as one call."""

from dataclasses import replace

import pytest
import torch

import onchip
from onchip.core import torch_op
from onchip.core.device import device_info
from onchip.core.dispatch import plan
from onchip.core.problem import resolve_layout
from onchip.parallel.comm import run_ranks
from onchip.parallel.rounds import (
    GlobalMask,
    Round,
    RoundOptions,
    RunningGradients,
    differentiate_round,
    plan_rounds,
    prepare_round,
)
from onchip.parallel.sharding import zigzag
from tests.parallel.cases import (
    CU,
    OPTIONS,
    PACKED,
    Case,
    check_case,
    differentiate,
    near,
    on_one_device,
    on_rank,
    rmse,
    unshard_results,
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
def test_fp32_equals_one_device(name):
    cases = [Case(name, 333, 2, dtype=torch.float32, options=options) for options in OPTIONS]
    packed = {"dtype": torch.float32, "cu_seqlens": CU}
    cases += [Case(name, CU[-1], options=options, **packed) for options in PACKED]
    for case in map(on_gpu, cases):
        parts = run_ranks(4, on_rank, case)
        check_case(case, [part[0] for part in parts])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "mask": "prefix"}])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sixteen_bits_are_as_accurate_as_one_call(size, options, head_dim):
    """RMSE against fp64 of result and gradients, at most 1.02 times that of one call."""
    case = Case("zigzag", 4096, 1, (4, 2), (head_dim,) * 2, torch.bfloat16, options=options)
    check_rmse(on_gpu(case), size)


@pytest.mark.gpu
def test_sixteen_bits_are_as_accurate_with_allgather():
    """Pieces of odd lengths, and sums of all keys."""
    dims, options = (128, 128), {"causal": True}
    case = Case("zigzag", 3001, 1, (4, 2), dims, torch.bfloat16, None, "allgather", options)
    check_rmse(on_gpu(case), 3)


def check_rmse(case, size):
    (q, k, v, dout, dlse), _ = case.tensors()
    exact_options = replace(case, dtype=torch.float64).arguments({})
    attend = lambda q, k, v, extras: onchip.attention(q, k, v, **exact_options)
    inputs = [t.cpu().double() for t in (q, k, v)]
    exact = differentiate(attend, inputs, dout.cpu().double(), dlse.cpu().double(), {})
    exact = {name: t.cuda() for name, t in exact.items()}
    one = rmse(on_one_device(case), exact)
    many = rmse(unshard_results(case, [part[0] for part in run_ranks(size, on_rank, case)]), exact)
    for name, error in many.items():
        most = 1.25 if name == "lse" else 1.02
        assert error <= most * one[name], f"{name}: {error:.3e} on {size}, {one[name]:.3e} on one"


@pytest.mark.hopper
def test_hopper_computes_every_causal_round_forward_and_backward():
    q, k = (torch.randn(1, 1024, h, 128, dtype=torch.bfloat16, device=CUDA) for h in (8, 2))
    for round in plan_rounds(zigzag(4), GlobalMask(4096, True), 1, CUDA).rounds:
        for backward in (False, True):
            cached_call, x = prepare_round(RoundOptions(), round, q, k, k, wide_grads=backward)
            chosen = plan(resolve_layout(cached_call.problem, x), device_info(CUDA), None, backward)
            assert chosen.kernel == "hopper", chosen.reasons


ROUNDS = [
    Round(slice(0, 300), slice(0, 333), causal=True),
    Round(slice(0, 300), slice(0, 166)),  # zigzag: keys of an earlier rank
    Round(slice(150, 300), slice(0, 333)),  # zigzag: keys of a later rank
    Round(slice(37, 168), slice(101, 230)),
    Round(slice(256, 257), slice(64, 320), window_size=(99, None)),
]


def poisoned(t, at):
    """NaN in all tokens outside the round."""
    t[:, : at.start] = t[:, at.stop :] = torch.nan
    return t


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (80, 40)])
@pytest.mark.parametrize("round", ROUNDS, ids=str)
def test_hopper_adds_gradients_as_torch_would(round, dims, dtype):
    """Three times to the same sums, two batch entries, groups of heads. dk and dv are the same to
    the last bit as if they were added later; dq is summed in any order. No other token changes.
    """
    draw = lambda n, heads, dim: torch.randn(2, n, heads, dim, device=CUDA)
    q, out, dout = (poisoned(draw(300, 6, d).to(dtype), round.rows) for d in (*dims, dims[1]))
    k, v = (poisoned(draw(333, 2, d).to(dtype), round.keys) for d in dims)
    lse, dlse = torch.randn(2, 2, 6, 300, device=CUDA).unbind()
    saved = out, lse + 6, dout, dlse
    prepared = prepare_round(RoundOptions(), round, q, k, v, wide_grads=True)
    assert torch_op.get_accumulate_fn(*prepared, None) is not None
    dq, dk, dv = sums = [torch.randn(t.shape, device=CUDA) for t in (q, k, v)]
    want = [t.clone() for t in sums]
    queries = RunningGradients(RoundOptions(), q, saved, dq)
    for _ in range(3):
        assert queries.add(round, k, v, (dk, dv)) is None
        grads = differentiate_round(RoundOptions(), round, q, k, v, saved)[:3]
        for total, at, share in zip(want, (round.rows, round.keys, round.keys), grads, strict=True):
            total[:, at] += share
    assert queries.finish() is dq
    assert torch.equal(dk, want[1]) and torch.equal(dv, want[2])
    near(dq[:, round.rows], want[0][:, round.rows], 1e-5, "dq")
    dq[:, round.rows] = want[0][:, round.rows] = 0
    assert torch.equal(dq, want[0])


@pytest.mark.hopper
def test_hopper_returns_gradients_of_keys_without_sums():
    """Rounds over several keys, of queries that were prepared once."""
    q, k, v = (torch.randn(1, n, 4, 128, device=CUDA).bfloat16() for n in (200, 333, 333))
    saved = torch.randn_like(q), torch.randn(1, 4, 200, device=CUDA) + 6, torch.randn_like(q), None
    dq = torch.zeros(q.shape, device=CUDA)
    queries, exact = RunningGradients(RoundOptions(), q, saved, dq), torch.zeros_like(dq)
    for keys, causal in ((slice(0, 131), False), (slice(131, 333), True), (slice(7, 8), False)):
        round = Round(slice(11, 200), keys, causal)
        dk, dv = queries.add(round, k, v)
        want = differentiate_round(RoundOptions(), round, q, k, v, saved)
        assert torch.equal(dk, want.dk) and torch.equal(dv, want.dv)
        exact[:, round.rows] += want.dq
    near(queries.finish(), exact, 1e-5, "dq")
    assert dq[:, :11].eq(0).all()
