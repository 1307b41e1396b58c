"""Which elements share a scale, in every layout, and the error that a scale guarantees."""

import math

import pytest
import torch

from onchip.quant.formats import E4M3, E5M2, FORMATS, FP4, INT8
from onchip.quant.schemes import PER, Scheme, quantise
from onchip.testing import make_packed, make_qkv, poison_neighbours

LENGTHS = [63, 0, 111, 1, 300]
ERROR = {E4M3: 1 / 16, E5M2: 1 / 8, INT8: 0.5, FP4: 0.25}  # relative, but of INT8: in steps


def example(seqlen=111, **kwargs):
    return make_qkv(2, seqlen, num_heads=3, head_dim=24, distribution="outlier", **kwargs)[0]


def packed_example(**kwargs):
    packed = make_packed(LENGTHS, num_heads=3, head_dim=24, distribution="outlier", **kwargs)
    return packed.q, packed.cu_seqlens_q


def pieces(x, per, block):
    """The parts of one sequence (seqlen, heads, dim) that share a scale, written out."""
    for h in range(x.shape[1]):
        if per == "head":
            yield x[:, h]
        elif per == "channel":
            yield from x[:, h].unbind(-1)
        else:
            yield from x[:, h].split(block if per == "block" else 1)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_values_and_scales_are_near_x(fmt, per):
    """|x - values * scales| <= what rounding to nearest allows, relative to x or to the scale."""
    x = example()
    got = quantise(x, Scheme(fmt, per, 32))
    error, scales = (got.dequantise() - x).abs(), got.token_scales()
    assert got.values.dtype == fmt.dtype and got.values.shape == x.shape
    assert got.scales.dtype == torch.float32
    smallest = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits - 1) * scales
    bound = ERROR[fmt] * scales if fmt is INT8 else torch.maximum(ERROR[fmt] * x.abs(), smallest)
    assert (error <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("per", PER)
def test_the_largest_of_each_scale_becomes_the_formats_max(per):
    """Scales are exactly as large as needed; the groups are written out."""
    x = example()
    got = quantise(x, Scheme(E4M3, per, 32))
    if per == "tensor":
        assert got.values.float().abs().max() == E4M3.max
        return
    for sequence in got.values.float():
        parts = list(pieces(sequence, per, 32))
        assert len(parts) == got.scales[0].numel()
        assert all(part.abs().max() == E4M3.max for part in parts)


SHAPES = {"tensor": (), "head": (2, 3), "channel": (2, 3, 24), "block": (2, 4, 3)}


@pytest.mark.parametrize(("per", "shape"), [*SHAPES.items(), ("token", (2, 111, 3))])
def test_shapes_of_scales(per, shape):
    assert quantise(example(), Scheme(INT8, per, 32)).scales.shape == shape


@pytest.mark.parametrize("per", PER[1:])
def test_packed_sequences_equal_sequences_alone(per):
    """Each sequence begins a new block; its values and scales depend on no other sequence."""
    x, cu = packed_example()
    scheme = Scheme(INT8, per, 32)
    got = quantise(x, scheme, cu)
    alone = [quantise(part[None], scheme) for part in x.split(LENGTHS)]
    assert torch.equal(got.values, torch.cat([a.values[0] for a in alone]))
    assert torch.equal(got.dequantise(), torch.cat([a.dequantise()[0] for a in alone]))
    join = torch.cat if per in ("block", "token") else torch.stack
    assert torch.equal(got.scales, join([a.scales[0] for a in alone]))


@pytest.mark.parametrize("per", PER[1:])
def test_nan_affects_only_its_scale(per):
    x, cu = packed_example()
    x[70, 1, 5] = math.nan
    for fmt in (E4M3, INT8):
        back = quantise(x, Scheme(fmt, per, 32), cu).dequantise()
        assert back[70, 1, 5].isnan()
        assert back[:63].isfinite().all() and back[63 + 111 :].isfinite().all()
        assert back[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("per", PER)
def test_infinity_gives_nan(per):
    x = example()
    x[0, 7, 1, 3] = math.inf
    assert quantise(x, Scheme(E4M3, per)).dequantise()[0, 7, 1, 3].isnan()


@pytest.mark.parametrize("per", PER)
def test_zeros_and_tiny_numbers(per):
    scheme = Scheme(E4M3, per)
    assert (quantise(torch.zeros(1, 5, 2, 8), scheme).dequantise() == 0).all()
    tiny = quantise(torch.full((1, 5, 2, 8), 1e-44), scheme).dequantise()
    assert tiny.isfinite().all() and tiny.abs().max() < 1e-38
    assert quantise(torch.zeros(0, 5, 2, 8), scheme).dequantise().shape == (0, 5, 2, 8)
    assert quantise(torch.zeros(3, 0, 2, 8), scheme).dequantise().shape == (3, 0, 2, 8)


@pytest.mark.parametrize("per", PER)
def test_neighbours_and_strides_do_not_matter(per):
    x, scheme = example(), Scheme(INT8, per, 32)
    want = quantise(x, scheme).dequantise()
    assert torch.equal(quantise(poison_neighbours(x), scheme).dequantise(), want)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(quantise(transposed, scheme).dequantise(), want)


def test_finer_scales_save_small_tokens():
    """A row of small numbers next to a large one: int8 with a shared scale loses it completely."""
    x = torch.ones(1, 4, 1, 8)
    x[0, 0] = 1000
    assert quantise(x, Scheme(INT8, "block")).dequantise()[0, 1].abs().max() == 0
    assert quantise(x, Scheme(INT8, "token")).dequantise()[0, 1] == pytest.approx(1)


def test_random_rounding_is_unbiased():
    x, scheme = example(), Scheme(FP4, "token")
    generator = torch.Generator().manual_seed(0)
    draws = [quantise(x, scheme, generator=generator).dequantise() for _ in range(400)]
    off = torch.stack(draws).mean(0) - x
    nearest = quantise(x, scheme).dequantise() - x
    assert off.square().mean() < nearest.square().mean() / 50  # 2 x 1/400 of it, on average


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_widened_first(dtype):
    x = example(dtype=dtype)
    got, want = (quantise(t, Scheme(E4M3, "block", 32)) for t in (x, x.float()))
    assert got.scales.allclose(want.scales, rtol=1e-6)
    assert got.dequantise().dtype == torch.float32
    assert (got.dequantise() - x).abs().max() <= x.abs().max() / 16


def test_refusals():
    with pytest.raises(ValueError, match="per='row' must be one of"):
        Scheme(E4M3, "row")
    with pytest.raises(ValueError, match="block=0 must be"):
        Scheme(E4M3, "block", 0)
    with pytest.raises(ValueError, match=r"rank 4.*got shape \(5, 2, 8\)"):
        quantise(torch.zeros(5, 2, 8), Scheme(E4M3, "head"))
    with pytest.raises(ValueError, match="rank 3.*with cu_seqlens"):
        quantise(example(), Scheme(E4M3, "head"), torch.tensor([0, 5]))
    for wrong in ([0, 3], [1, 5], [0, 4, 3, 5]):
        with pytest.raises(ValueError, match="must rise from 0 to the 5 tokens of x"):
            quantise(torch.zeros(5, 2, 8), Scheme(E4M3, "head"), torch.tensor(wrong))


@pytest.mark.gpu
@pytest.mark.parametrize("per", PER)
def test_the_same_numbers_on_a_gpu(per):
    x, cu = packed_example()
    x[70, 1, 5] = math.nan
    got = quantise(x.cuda(), Scheme(E4M3, per, 32), cu.cuda())
    want = quantise(x, Scheme(E4M3, per, 32), cu)
    assert torch.allclose(got.scales.cpu(), want.scales, rtol=0, atol=0, equal_nan=True)
    back = got.dequantise().cpu()
    assert torch.allclose(back, want.dequantise(), rtol=0, atol=0, equal_nan=True)
