"""The Hopper backward at every head_dim, against the oracle.

The columns beside those of a call are NaN in memory, and so is memory that was allocated and freed
before. A copy that reads other columns, and a gradient that is not written, make the result NaN.
"""

import pytest
import torch

import onchip
from onchip.core import torch_op
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.hopper import entry
from onchip.kernels.tiles import hopper_backward_widths
from onchip.testing import assert_accurate, make_packed, rmse
from tests.kernels.gpu import inputs

pytestmark = pytest.mark.hopper

SUMMED = [(32, 32), (80, 80), (96, 96)]  # dq is a sum in memory
SEPARATE = [(160, 160), (192, 192), (192, 128)]  # every gradient has its own kernel
WIDTHS = SUMMED + SEPARATE
PACKED = [5, 130, 0, 777, 64, 9], [9, 200, 3, 777, 1, 0]  # lengths of queries and of keys


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Freed blocks of NaN, which the next allocations take."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        blocks = [torch.full((size,), torch.nan, device="cuda") for _ in range(8)]
        del blocks


def poison_neighbours(t):
    """t as a view of a tensor that has 8 columns of NaN before and behind it."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 16), torch.nan)
    wide[..., 8:-8] = t
    return wide[..., 8:-8]


def poisoned(*sizes, **shape):
    return map(poison_neighbours, inputs(*sizes, **shape))


def attend(q, k, v, **options):
    out = onchip.attention(q, k, v, kernel="hopper", **options)
    out.register_hook(poison_neighbours)  # of dout
    return out


def attend_lse(q, k, v, **options):
    out, lse = onchip.attention(q, k, v, kernel="hopper", return_lse=True, **options)
    out.register_hook(poison_neighbours)
    return out, lse


def attend_packed(q, k, v, **options):
    out, lse = onchip.varlen_attention(q, k, v, kernel="hopper", return_lse=True, **options)
    out.register_hook(poison_neighbours)
    return out, lse


def gradients(q, k, v, **options):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = onchip.attention(q, k, v, kernel="hopper", **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("dim", range(16, 257, 8))
@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim(dim, causal):
    q, k, v = poisoned(199, 333, dim=dim)
    assert_accurate(attend_lse, q, k, v, causal=causal, grad=True)


@pytest.mark.parametrize(
    "dim, dim_v, widths",
    [
        (192, 128, (192, 128)),
        (176, 64, (192, 128)),
        (80, 24, (80, 80)),
        (24, 72, (80, 80)),
        (40, 96, (96, 96)),
        (8, 8, (32, 32)),
        (128, 160, (160, 160)),
        (168, 136, (192, 192)),
    ],
)
def test_values_with_other_columns_than_keys(dim, dim_v, widths):
    """Whole tails and whole tiles of columns may be outside of one of the tensors."""
    q, k, v = poisoned(300, 555, dim=dim, head_dim_v=dim_v)
    assert hopper_backward_widths(describe(Tensors(q, k, v), Options(), ())) == widths
    assert_accurate(attend_lse, q, k, v, causal=True, grad=True)


@pytest.mark.parametrize("dim, dim_v", WIDTHS)
@pytest.mark.parametrize("heads", [(2, 1), (8, 4), (8, 2), (8, 1), (6, 1)], ids=str)
def test_groups_of_heads(dim, dim_v, heads):
    """Groups of 2, 4, 8, 6, and all heads: few key heads, so that groups are divided."""
    shape = {"head_dim_v": dim_v, "num_heads": heads[0], "num_kv_heads": heads[1]}
    assert_accurate(attend, *poisoned(700, 333, dim=dim, **shape), causal=True, grad=True)


@pytest.mark.parametrize("dim, dim_v", WIDTHS)
def test_windows_with_softcap_sinks_and_lse_in_fp16(dim, dim_v):
    sinks = torch.randn(8, device="cuda", requires_grad=True)
    q, k, v = poisoned(555, 801, dim=dim, dtype=torch.float16, head_dim_v=dim_v)
    options = {"window_size": (200, 37), "softcap": 5.0, "sinks": sinks}
    assert_accurate(attend_lse, q, k, v, grad=True, **options)


@pytest.mark.parametrize("dim, dim_v", WIDTHS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences(dim, dim_v, deterministic):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": dim - 8, "head_dim_v": dim_v - 8}
    x = make_packed(*PACKED, **shape, dtype=torch.bfloat16, device="cuda")
    q, k, v = map(poison_neighbours, x[:3])
    options = {"causal": True, "deterministic": deterministic}
    assert_accurate(attend_packed, q, k, v, **x.options, **options, grad=True)


@pytest.mark.parametrize("dim, dim_v", WIDTHS)
def test_packed_sequences_beside_nan(dim, dim_v):
    """NaN in one sequence stays there."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": dim, "head_dim_v": dim_v}
    x = make_packed(*PACKED, **shape, dtype=torch.bfloat16, device="cuda")
    leaves = [t.clone() for t in x[:3]]
    bounds = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist(), x.cu_seqlens_k.tolist()
    for t, cu in zip(leaves, bounds, strict=True):
        t[cu[3] : cu[4]] = torch.nan
        t.requires_grad_()
    out, _ = attend_packed(*leaves, **x.options, causal=True)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for g, cu in zip(grads, bounds, strict=True):
        assert g[: cu[3]].isfinite().all() and g[cu[4] :].isfinite().all()


@pytest.mark.parametrize("dim, dim_v", WIDTHS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (63, 111), (111, 777), (600, 129)])
def test_odd_lengths(dim, dim_v, seqlen_q, seqlen_k):
    q, k, v = poisoned(seqlen_q, seqlen_k, dim=dim, head_dim_v=dim_v)
    assert_accurate(attend, q, k, v, causal=True, grad=True)


@pytest.mark.parametrize("dim, dim_v", WIDTHS)
def test_deterministic_gradients(dim, dim_v):
    q, k, v = poisoned(777, 900, dim=dim, head_dim_v=dim_v)
    options = {"causal": True, "deterministic": True}
    assert_accurate(attend, q, k, v, grad=True, **options)
    first = gradients(q, k, v, **options)
    for _ in range(20):
        assert all(map(torch.equal, gradients(q, k, v, **options), first))


@pytest.mark.parametrize("dim, dim_v", WIDTHS)
def test_more_tiles_than_programs(dim, dim_v):
    """Two heads of 40 give what they give alone, and the same bits every time: a program's tiles
    follow one another in its shared memory. Sums of dq in memory have no fixed order.
    """
    shape = {"num_heads": 40, "num_kv_heads": 40, "head_dim_v": dim_v}
    q, k, v = inputs(2048, 2048, dim, **shape)
    first = gradients(q, k, v, causal=True)
    ordered = 1 if (dim, dim_v) in SUMMED else 0
    for _ in range(20):
        again = gradients(q, k, v, causal=True)
        assert all(map(torch.equal, again[ordered:], first[ordered:]))
        assert torch.allclose(again[0].float(), first[0].float(), rtol=2e-2, atol=2e-3)
    few = [t[:, :, :2].contiguous() for t in (q, k, v)]
    assert_accurate(attend, *few, causal=True, grad=True)


@pytest.mark.parametrize("dim, dim_v", [(96, 96), (32, 32), (192, 128)])
def test_block_masks(dim, dim_v, make_mask):
    q, k, v = poisoned(799, dim=dim, head_dim_v=dim_v)
    mask = make_mask("bits of every head", 799, 799)
    assert_accurate(attend, q, k, v, mask=mask, grad=True)


@pytest.mark.parametrize("dim, dim_v", [(80, 80), (160, 160), (192, 128)])
def test_unrounded_gradients_round_to_the_16_bit_gradients(dim, dim_v):
    """Tiles and tails leave in halves."""
    x = Tensors(*poisoned(333, 444, dim=dim, head_dim_v=dim_v))
    problem = describe(x, Options(causal=True), ())
    out, lse, _ = torch_op.run(torch_op.prepare_checked(x, problem), x, "hopper")
    wide, narrow = (
        torch_op.run_backward(
            torch_op.prepare_checked(x, problem._replace(wide_grads=wide)),
            *(x, "hopper", out, lse, out, None),
        )
        for wide in (True, False)
    )
    ordered = 1 if (dim, dim_v) in SUMMED else 0
    for a, b in zip(wide[ordered:3], narrow[ordered:3], strict=True):
        assert a.dtype == torch.float32 and torch.equal(a.to(b.dtype), b)
    torch.testing.assert_close(wide.dq.bfloat16(), narrow.dq, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("dim, num_kv_heads", [(80, 8), (96, 1), (32, 8)])
def test_gradients_are_added_to_sums(dim, num_kv_heads):
    """As in ring attention: over parts of the keys, into slices of longer tensors. Neighbours of a
    slice keep their values.
    """
    q, k, v = poisoned(700, 900, dim=dim, num_kv_heads=num_kv_heads)
    whole = Tensors(q, k, v)
    problem = describe(whole, Options(out_dtype=torch.float32), ())
    out, lse, _ = torch_op.run(torch_op.prepare_checked(whole, problem), whole, "hopper")
    dout = torch.randn_like(out)
    call = torch_op.prepare_checked(whole, problem._replace(wide_grads=True))
    expected = torch_op.run_backward(call, whole, "hopper", out, lse, dout, None)[:3]
    parts = [Tensors(q, k[:, cut], v[:, cut]) for cut in (slice(0, 333), slice(333, None))]
    problems = [describe(x, Options(out_dtype=torch.float32), ()) for x in parts]
    queries = entry.backend.get_accumulate_fn(problems[0])(
        problems[0], parts[0], out, lse, dout, None
    )
    sums = [torch.ones(2, t.shape[1] + 20, *t.shape[2:], device="cuda") for t in (q, k, v)]
    dq, dk, dv = (t[:, 10:-10] for t in sums)
    for part, x, cut in zip(problems, parts, (slice(0, 333), slice(333, None)), strict=True):
        assert queries.add(part, x, (dk[:, cut], dv[:, cut])) is None
    queries.finish(dq)
    for total, t, want in zip(sums, (dq, dk, dv), expected, strict=True):
        assert total[:, :10].eq(1).all() and total[:, -10:].eq(1).all()
        assert rmse(t - 1, want.double()) < 1e-5 * want.abs().max()
