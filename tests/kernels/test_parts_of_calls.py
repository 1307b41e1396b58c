"""Calls that are a part of a larger one: explicit positions, a first head, lse over more keys, and
gradients that are not rounded.
"""

import pytest
import torch

import onchip.lab  # noqa: F401  registers the kernels of the papers
from onchip.core import torch_op
from onchip.core.backend import accumulator_dtype
from onchip.core.functional import attention, merge_states
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.tiles import TritonConfig
from onchip.masks import dense
from tests.interpreted import INTERPRETED, interpreted

# an interpreter takes seconds for what a kernel does in microseconds
BATCH, HEADS, KV_HEADS, SEQLEN = (1, 2, 1, 45) if INTERPRETED else (2, 4, 2, 75)
DIM, DIM_V = 16, 24
VISIBLE = torch.rand(SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(0)) < 0.6
SEED = 2**41 + 3
SLOPES = torch.tensor([0.1, 0.02, 0.3, 0.004])[:HEADS]
OPTIONS = {
    "bare": {},
    "dropout": {"dropout_p": 0.3},
    "alibi": {"alibi_slopes": SLOPES},
    "all": {"dropout_p": 0.2, "alibi_slopes": SLOPES, "softcap": 5.0},
}
SERVED = [(kernel, name) for kernel in ("reference", "tiled") for name in OPTIONS]
SERVED += [("aten_cpu", "bare")]
PAPERS = ["paper_v0", "paper_v1", "paper_v2"]
SERVED += [(kernel, name) for kernel in PAPERS for name in ("bare", "dropout")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small tiles: the interpreter does not need those of a GPU."""
    if INTERPRETED:
        from onchip.kernels.triton import launch

        config = lambda kernel, use: TritonConfig(32, 64 if use.has_mask else 32, 4, 1)
        monkeypatch.setattr(launch, "triton_config", config)


def cut(size, parts, seed):
    """Any positions, ascending in each part."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return [at.sort().values for at in order.tensor_split(parts)]


def tensors(dtype):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    rows = (BATCH, SEQLEN)
    q, k, v = draw(*rows, HEADS, DIM), draw(*rows, KV_HEADS, DIM), draw(*rows, KV_HEADS, DIM_V)
    return q, k, v, draw(*rows, HEADS, DIM_V), draw(BATCH, HEADS, SEQLEN)


def prepare_part(x, rows, cols, options, heads=slice(None)):
    """The part of rows, columns and heads, as a CachedCall, and its tensors."""
    options = dict(options)
    slopes = options.pop("alibi_slopes", None)
    first = heads.start or 0
    kv = slice(first * KV_HEADS // HEADS, None)  # whole groups, or the one there is
    places = torch.stack([rows, torch.zeros_like(rows)]).int()
    mask = dense(VISIBLE[rows][:, cols]).build(BATCH, HEADS, len(rows), len(cols))
    q, k, v = x[0][:, rows][:, :, heads], *(t[:, cols][:, :, kv] for t in x[1:3])
    part = Tensors(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        alibi_slopes=None if slopes is None else slopes[heads],
        dropout_seed=torch.tensor(SEED) if "dropout_p" in options else None,
        positions_q=places,
        positions_k=cols.int(),
        mask=mask,
    )
    wide = accumulator_dtype(q.dtype)
    problem = describe(part, Options(out_dtype=wide, **options))
    problem = problem._replace(first_head=first, wide_grads=True)
    return torch_op.prepare_checked(part, problem), part


def reference(x, options, dlse):
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    if "dropout_p" in options:
        options = options | {"dropout_seed": SEED}
    out, lse = attention(*leaves, mask=VISIBLE, kernel="tiled", return_lse=True, **options)
    torch.autograd.backward((out, lse), (x[3], dlse))
    return out.detach(), lse.detach(), [t.grad for t in leaves]


def check(kernel, name, dtype, tolerance):
    x, options = tensors(dtype), OPTIONS[name]
    dlse = x[4].to(accumulator_dtype(dtype))
    out, lse, grads = reference(x, options, dlse)
    sums = [torch.zeros_like(t) for t in grads]
    for rows in cut(SEQLEN, 2, 5):
        states = []
        saved = out[:, rows], lse[:, :, rows].contiguous(), x[3][:, rows], dlse[:, :, rows]
        for cols in cut(SEQLEN, 2, 6):
            call, part = prepare_part(x, rows, cols, options)
            states.append(torch_op.run(call, part, kernel)[:2])
            shares = torch_op.run_backward(call, part, kernel, *saved)
            sums[0][:, rows] += shares.dq
            sums[1][:, cols] += shares.dk
            sums[2][:, cols] += shares.dv
        merged = merge_states(*zip(*states, strict=True))
        near(merged[0], out[:, rows], tolerance)
        near(merged[1], lse[:, :, rows], tolerance)
    for mine, whole in zip(sums, grads, strict=True):
        near(mine, whole, tolerance)


def near(got, expected, tolerance):
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kernel, name", SERVED)
def test_parts_add_up_to_the_whole(kernel, name):
    check(kernel, name, torch.float64, 1e-12)


def check_heads(kernel):
    """Dropout of a part counts heads from the first head of the whole call."""
    x, options = tensors(torch.float32), OPTIONS["dropout"]
    out, _, _ = reference(x, options, x[4])
    everything = torch.arange(SEQLEN)
    call, part = prepare_part(x, everything, everything, options, slice(HEADS // 2, None))
    near(torch_op.run(call, part, kernel)[0], out[:, :, HEADS // 2 :], 1e-5)


@pytest.mark.parametrize("kernel", ["reference", "tiled", *PAPERS])
def test_a_part_may_start_at_a_later_head(kernel):
    check_heads(kernel)


@pytest.mark.parametrize("kernel", ["reference", "tiled", "aten_cpu", *PAPERS])
def test_wide_gradients_are_not_rounded(kernel):
    check_wide(kernel)


def check_wide(kernel):
    x = tensors(torch.bfloat16)
    everything = torch.arange(SEQLEN)
    call, part = prepare_part(x, everything, everything, {})
    out, lse, _ = torch_op.run(call, part, kernel)
    wide = torch_op.run_backward(call, part, kernel, out, lse, x[3], None)
    narrow = torch_op.prepare_checked(part, call.problem._replace(wide_grads=False))
    rounded = torch_op.run_backward(narrow, part, kernel, out, lse, x[3], None)
    for a, b in zip(wide[:3], rounded[:3], strict=True):
        assert a.dtype == torch.float32
        assert not torch.equal(a, a.bfloat16().float())
        assert torch.equal(a.bfloat16(), b)


@interpreted
@pytest.mark.parametrize("name", ["all"])
def test_triton_parts_add_up_to_the_whole(name):
    check("triton", name, torch.float32, 1e-5)


@interpreted
def test_triton_a_part_may_start_at_a_later_head():
    check_heads("triton")


@interpreted
def test_triton_wide_gradients_are_not_rounded():
    check_wide("triton")
