"""The fused quantisation against the executable references of onchip/quant; by Triton's interpreter
on the CPU, and on a GPU where there is one.
"""

import pytest
import torch

from onchip.core import paged
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.quant import kv8, lse_shift, prepare, rotate, smooth_keys
from onchip.quant.recipes import RECIPES
from onchip.testing import make_pages, make_qkv
from tests.interpreted import DEVICE, interpreted_or_gpu
from tests.kv8 import FORMS, quantise_pages

pytest.importorskip("triton")
from onchip.kernels.triton import quantise  # noqa: E402

BLOCK = quantise.BLOCK
LN2 = 0.6931471805599453
# Columns of v by their key, 16 at a time: the order that Hopper's tensor cores need.
PLACES = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
DENSE = [
    ((2, 130, 257), {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2}),
    ((1, 1, 128), {"head_dim": 128, "num_heads": 1, "head_dim_v": 40}),
    ((1, 200, 1100), {"head_dim": 80, "num_heads": 2, "dtype": torch.float16}),
    ((1, 63, 111), {"head_dim": 192, "num_heads": 2, "num_kv_heads": 1, "head_dim_v": 256}),
]
LENGTHS = [(129, 257), (0, 5), (1, 0), (63, 128)]  # queries and keys of packed sequences


def _biased(q, k, v):
    """Channels of k that all keys share, and a value far from the others."""
    k = k + 5 * torch.randn(k.shape[-2:], generator=torch.Generator().manual_seed(3)).to(k)
    v[..., 0, 0, 0] = 100
    return q, k, v


def _dense(shape, options):
    batch, seqlen_q, seqlen_k = shape
    options = {"dtype": torch.bfloat16} | options
    q, k, v = _biased(*make_qkv(batch, seqlen_q, seqlen_k, device=DEVICE, **options))
    return Tensors(q, k, v), ()


def _packed():
    totals = [sum(n) for n in zip(*LENGTHS, strict=True)]
    q, k, v = make_qkv(1, *totals, num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    q, k, v = _biased(*(t[0].to(DEVICE) for t in (q, k, v)))
    cu = [torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in zip(*LENGTHS, strict=True)]
    return Tensors(q, k, v, *cu), tuple(max(n) for n in zip(*LENGTHS, strict=True))


def _sequences(t, cu):
    """(sequence, batch entry or None, tokens) of t, as references have them."""
    if cu is None:
        return [(b, t[b]) for b in range(len(t))]
    bounds = cu.tolist()
    return [(b, t[i:j]) for b, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False))]


def _block(blocks, cu, heads, b, head, n):
    """The number of block n of a sequence and head."""
    if cu is None:
        return (b * heads + head) * blocks.count + n
    return head * blocks.count + int(cu[b]) // BLOCK + b + n


def _whole(blocks, t, cu, transposed=False):
    """Values times scales in the layout of t; checks that there are zeros past the end."""
    heads, dim = t.shape[-2:]
    tiles = (
        blocks.values.float().view(-1, quantise.padded_width(dim), BLOCK)
        if transposed
        else (blocks.values.float().view(-1, BLOCK, quantise.padded_width(dim)))
    )
    if transposed:
        back = [PLACES.index(key) for key in range(16)]
        at = torch.tensor([16 * (i // 16) + back[i % 16] for i in range(BLOCK)]).to(t.device)
        tiles = tiles[:, :, at].transpose(1, 2)
    scales = blocks.scales.reshape(len(tiles), -1, 1)
    out = torch.zeros(t.shape, device=t.device)
    codes = torch.zeros(t.shape, device=t.device)
    for (b, sequence), (_, code) in zip(_sequences(out, cu), _sequences(codes, cu), strict=True):
        for head in range(heads):
            for n in range(-(-len(sequence) // BLOCK)):
                at = _block(blocks, cu, heads, b, head, n)
                rows = slice(n * BLOCK, (n + 1) * BLOCK)
                count = len(sequence[rows])
                sequence[rows, head] = (tiles[at] * scales[at])[:count, :dim]
                code[rows, head] = tiles[at][:count, :dim]
                assert not tiles[at][count:].any() and not tiles[at][:, dim:].any()
    return out, codes


def _assert_same(dequantised, codes, want, name):
    """Except numbers between two codes: few of them may have the other code."""
    exact = want.dequantise()
    same = codes == want.values.float()
    assert same.float().mean() > 0.998, f"{name}: {same.float().mean()} of the codes agree"
    step = exact.abs() / 8 + want.token_scales()
    assert ((dequantised - exact).abs() <= 1.01 * step).all(), name


@interpreted_or_gpu
@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_pv16"])
@pytest.mark.parametrize("case", [*DENSE, "packed"], ids=str)
def test_operands_equal_the_recipe(case, precision):
    x, lengths = _packed() if case == "packed" else _dense(*case)
    q, k, v, cu_q, cu_k = x[:5]
    problem = describe(x, Options(precision=precision), lengths)
    shift = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan, device=DEVICE)
    got = quantise.prepare(problem, x, shift)
    want = prepare(RECIPES[precision], q, k, v, cu_q, cu_k)
    _assert_same(*_whole(got.q, q, cu_q), want.q, "q")
    _assert_same(*_whole(got.k, k, cu_k), want.k, "k")
    if precision == "int8_pv16":
        assert got.v is None
    else:
        dequantised, codes = _whole(got.v, v, cu_k, transposed=True)
        assert torch.equal(codes, want.v.values.float())
        assert torch.equal(dequantised, want.v.dequantise())
    exact = lse_shift(q, want.mean, problem.softmax_scale, cu_q)
    torch.testing.assert_close(shift * LN2, exact, rtol=1e-5, atol=1e-4)


def _in_pages(x, page_size, form=None):
    """The tensors of a paged call with the keys of packed sequences, and the numbers that its pages
    hold.
    """
    names = ("k", "v", "page_table", "cache_seqlens")
    held, keys = dict(zip(names, make_pages(x.k, x.v, x.cu_seqlens_k, page_size), strict=True)), x
    if form is not None:
        (k, v), scales = quantise_pages(held["k"], held["v"], form)
        held |= {"k": k, "v": v, **scales}
        exact = (kv8.dequantise(*kv8.quantise(t, form), torch.float32) for t in (x.k, x.v))
        keys = x._replace(**dict(zip("kv", exact, strict=True)))
    q = x.q[:3].expand(len(LENGTHS), -1, -1, -1)
    return Tensors(q, **held), keys


def _of_sequence(blocks, b):
    """The blocks of one of len(LENGTHS) sequences in pages."""
    own = (t.reshape(len(LENGTHS), -1)[b] for t in (blocks.values, blocks.scales))
    return quantise.QuantisedBlocks(*own, blocks.count)


@interpreted_or_gpu
@pytest.mark.parametrize(
    ("precision", "page_size", "form"),
    [("fp8", 16, None), ("int8", 4, None), *(("fp8", 16, form) for form in FORMS)],
    ids=str,
)
def test_keys_in_pages_equal_the_recipe(precision, page_size, form):
    """Slots without keys hold NaN, and the page table has entries of -1 behind its pages."""
    x, keys = _in_pages(_packed()[0], page_size, form)
    problem = paged.describe(x, Options(precision=precision))
    got = quantise.prepare_keys(problem, x, quantise.get_rotation(64, x.q.dtype, x.q.device))
    bounds = keys.cu_seqlens_k.tolist()
    for b, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        k, v = keys.k[None, start:stop], keys.v[None, start:stop]
        want = prepare(RECIPES[precision], k, k, v)
        if start == stop:
            continue
        mean = rotate(want.mean)[0]
        torch.testing.assert_close(got.mean.view(-1, 2, 64)[b], mean, rtol=1e-5, atol=1e-5)
        _assert_same(*_whole(_of_sequence(got.k, b), k, None), want.k, "k")
        dequantised, codes = _whole(_of_sequence(got.v, b), v, None, transposed=True)
        assert torch.equal(codes, want.v.values.float())
        assert torch.equal(dequantised, want.v.dequantise())


@interpreted_or_gpu
@pytest.mark.parametrize("case", [DENSE[2], "packed"], ids=str)
def test_blocks_of_a_strip_equal_blocks_of_single_programs(case, monkeypatch):
    x, lengths = _packed() if case == "packed" else _dense(*case)
    problem = describe(x, Options(precision="fp8"), lengths)
    runs = []
    for programs in (1, 1 << 30):
        monkeypatch.setattr(quantise, "PROGRAMS", programs)
        shift = torch.zeros(*x.q.shape[:-3], x.q.shape[-2], x.q.shape[-3], device=DEVICE)
        q, k, v, _ = quantise.prepare(problem, x, shift)
        whole = _whole(q, x.q, x.cu_seqlens_q), _whole(k, x.k, x.cu_seqlens_k)
        runs.append((shift, *sum(whole, ()), *_whole(v, x.v, x.cu_seqlens_k, transposed=True)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@interpreted_or_gpu
def test_a_mean_of_many_keys():
    """More than one part, the last of which is short."""
    k = torch.randn(1, 2500, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    k = (k + 3).to(DEVICE)
    rotation = quantise.get_rotation(64, k.dtype, k.device)
    got = quantise.compute_key_means(k, quantise.OperandSizes(2500, 2500, 2, None, 1), rotation)
    want = rotate(smooth_keys(k)[1])
    torch.testing.assert_close(got.view(1, 2, 64), want, rtol=1e-5, atol=1e-5)


@interpreted_or_gpu
def test_blocks_of_zeros_and_of_nan():
    """No division by zero; NaN stays in its block."""
    v = torch.zeros(1, 300, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    v[0, 130], v[0, 299, 0, 5] = torch.nan, 2.0
    scales = torch.empty(3, device=DEVICE)
    blocks = quantise.transpose_values(
        v, quantise.OperandSizes(300, 300, 1, None, 1), RECIPES["fp8"].v, scales
    )
    assert blocks.scales[0] == 2.0**-70 and blocks.scales[1].isnan()
    assert blocks.scales[2] == torch.tensor(2.0) / torch.tensor(448.0)
    tiles = blocks.values.float().view(3, 64, BLOCK)
    assert not tiles[0].any() and tiles[2].abs().sum() == 448
