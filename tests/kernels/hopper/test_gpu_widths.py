"""The Hopper forward at every head_dim, against the oracle: tiles whose width is no power of two.

The columns beside those of a call are NaN in memory. A copy that reads them instead of filling with
zeros makes the result NaN.
"""

import pytest
import torch

import onchip
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels import tiles
from onchip.kernels.hopper import entry
from onchip.testing import assert_accurate, make_packed
from tests.kernels.gpu import inputs

pytestmark = pytest.mark.hopper

WIDTHS = [32, 80, 96, 160, 192]


def attend(q, k, v, **options):
    return onchip.attention(q, k, v, kernel="hopper", return_lse=True, **options)


def attend_packed(q, k, v, **options):
    return onchip.varlen_attention(q, k, v, kernel="hopper", return_lse=True, **options)


def poison_neighbours(t):
    """t as a view of a tensor that has 8 columns of NaN before and behind it."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 16), torch.nan)
    wide[..., 8:-8] = t
    return wide[..., 8:-8]


@pytest.mark.parametrize("dim", range(16, 257, 8))
@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim(dim, causal):
    q, k, v = map(poison_neighbours, inputs(199, 333, dim))
    assert_accurate(attend, q, k, v, causal=causal)


@pytest.mark.parametrize(
    "dim, dim_v", [(192, 128), (80, 24), (24, 80), (40, 96), (128, 160), (168, 72), (256, 184)]
)
def test_values_with_other_columns_than_keys(dim, dim_v):
    q, k, v = map(poison_neighbours, inputs(300, 555, dim, head_dim_v=dim_v))
    assert_accurate(attend, q, k, v, causal=True)


@pytest.mark.parametrize("dim", [24, 72, 88, 152, 184])
def test_packed_sequences(dim):
    x = make_packed(
        [5, 130, 0, 777, 64], [9, 200, 3, 777, 1], num_heads=4, num_kv_heads=2, head_dim=dim,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    q, k, v = map(poison_neighbours, (x.q, x.k, x.v))
    assert_accurate(attend_packed, q, k, v, **x.options, causal=True)


@pytest.mark.parametrize("dim", WIDTHS)
def test_windows_of_grouped_heads(dim):
    q, k, v = map(poison_neighbours, inputs(700, 1111, dim, torch.float16))
    sinks = torch.randn(8, device="cuda")
    assert_accurate(attend, q, k, v, window_size=(200, 37), sinks=sinks, softcap=5.0)


@pytest.mark.parametrize("dim", WIDTHS)
def test_heads_that_share_a_tile(dim):
    q, k, v = map(poison_neighbours, inputs(17, 300, dim, num_heads=8, num_kv_heads=2))
    assert_accurate(attend, q, k, v)


@pytest.mark.parametrize("dim", WIDTHS)
def test_block_masks(dim, make_mask):
    q, k, v = map(poison_neighbours, inputs(799, dim=dim))
    assert_accurate(attend, q, k, v, mask=make_mask("bits of every head", 799, 799))


@pytest.mark.parametrize("dim, dim_v", [(24, 24), (72, 72), (96, 96), (160, 160), (192, 128)])
def test_unrounded_results(dim, dim_v):
    q, k, v = map(poison_neighbours, inputs(333, 555, dim, head_dim_v=dim_v))
    assert_accurate(attend, q, k, v, causal=True, out_dtype=torch.float32)


@pytest.mark.parametrize("dim", [24, 72, 96])
def test_merging_into_a_state(dim):
    """Some twenty tiles for each program, again and again into the same state. Rows beside those of
    the call stay as they are.
    """
    q, k, v = map(poison_neighbours, inputs(9000, 700, dim))
    x = Tensors(q, k, v)
    problem = describe(x, Options(out_dtype=torch.float32), ())
    new, new_lse = attend(q, k, v, out_dtype=torch.float32)
    out = torch.zeros(2, 9100, 8, dim, device="cuda")
    lse = torch.full((2, 8, 9100), -torch.inf, device="cuda", dtype=torch.float64)
    rows, merge = slice(37, 9037), entry.backend.get_merge_fn(problem, x)
    assert merge is not None
    for times in (1, 2):
        merge(out[:, rows], lse[:, :, rows])
        shift = torch.log(torch.tensor(times, dtype=torch.float64))
        torch.testing.assert_close(out[:, rows], new, rtol=0, atol=2e-6)
        torch.testing.assert_close(
            lse[:, :, rows], new_lse.double() + shift.cuda(), rtol=0, atol=2e-6
        )
    assert not out[:, :37].any() and not out[:, 9037:].any()


@pytest.mark.parametrize("dim, dim_v", [(n, n) for n in WIDTHS] + [(192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_more_tiles_than_programs(dim, dim_v, causal):
    """Two heads of 40 give what they give alone, and the same bits every time."""
    q, k, v = inputs(2048, 2048, dim, num_heads=40, num_kv_heads=40, head_dim_v=dim_v)
    few = [t[:, :, :2].contiguous() for t in (q, k, v)]
    out_few, lse_few = attend(*few, causal=causal)
    for _ in range(20):
        out, lse = attend(q, k, v, causal=causal)
        assert torch.equal(out[:, :, :2], out_few) and torch.equal(lse[:, :2], lse_few)
    assert_accurate(attend, *few, causal=causal)


@pytest.fixture(params=tiles.HOPPER_DENSE_KEYS)
def width(request):
    """A width of which dense calls have three consumers, however short they are."""
    with tiles.trial("HOPPER_DENSE_KEYS", request.param, 0):
        yield request.param


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (63, 333), (799, 111), (1111, 1111)])
def test_three_consumers(width, seqlen_q, seqlen_k):
    """Odd lengths, and columns fewer than the tile's."""
    q, k, v = map(poison_neighbours, inputs(seqlen_q, seqlen_k, width - 8))
    assert_accurate(attend, q, k, v)


def test_options_of_three_consumers(width):
    q, k, v = map(poison_neighbours, inputs(700, 1111, width, torch.float16))
    sinks = torch.randn(8, device="cuda")
    assert_accurate(attend, q, k, v, sinks=sinks, softcap=5.0)


def test_packed_sequences_of_three_consumers(width):
    x = make_packed(
        [5, 130, 0, 777, 64], [9, 200, 3, 777, 1], num_heads=4, num_kv_heads=2, head_dim=width,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    q, k, v = map(poison_neighbours, (x.q, x.k, x.v))
    assert_accurate(attend_packed, q, k, v, **x.options)


def test_heads_that_share_a_tile_of_three_consumers(width):
    q, k, v = map(poison_neighbours, inputs(17, 300, width, num_heads=8, num_kv_heads=2))
    assert_accurate(attend, q, k, v)


def test_unrounded_results_of_three_consumers(width):
    q, k, v = map(poison_neighbours, inputs(333, 555, width))
    assert_accurate(attend, q, k, v, out_dtype=torch.float32)


def test_more_tiles_than_programs_of_three_consumers(width):
    """Two heads of 40 give what they give alone, and the same bits every time."""
    q, k, v = inputs(2048, 2048, width, num_heads=40, num_kv_heads=40)
    few = [t[:, :, :2].contiguous() for t in (q, k, v)]
    out_few, lse_few = attend(*few)
    for _ in range(20):
        out, lse = attend(q, k, v)
        assert torch.equal(out[:, :, :2], out_few) and torch.equal(lse[:, :2], lse_few)
    assert_accurate(attend, *few)
