"""q and k in blocks of channels, v in blocks of keys: which elements share a scale."""

import math
from dataclasses import replace

import pytest
import torch

from onchip.quant import fp4
from onchip.quant.block_operands import quantise_channels, quantise_keys
from onchip.quant.microscaling import BLOCK_FORMATS, NVFP4, choose_tensor_scale, quantise_blocks
from onchip.quant.rounding import draw_tokens
from onchip.testing import make_packed, make_qkv, poison_neighbours

LENGTHS = [63, 0, 111, 1, 300]
EVERY_FORMAT = pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
WAYS = pytest.mark.parametrize("quantise", [quantise_channels, quantise_keys])


def example(seqlen=111):
    return make_qkv(2, seqlen, num_heads=3, head_dim=40, distribution="outlier")[0]


def along(x, fmt, dim):
    """x in blocks along a dimension, with one tensor scale for all of it."""
    scale = choose_tensor_scale(x.abs().amax(), fmt) if fmt.has_tensor_scale else None
    return quantise_blocks(x.movedim(dim, -1), fmt, scale).dequantise().movedim(-1, dim)


@EVERY_FORMAT
@pytest.mark.parametrize(("quantise", "dim"), [(quantise_channels, 1), (quantise_keys, 0)])
def test_each_head_of_each_sequence_alone(fmt, quantise, dim):
    x = example()
    back = quantise(x, fmt).dequantise()
    assert back.shape == x.shape
    for b in range(2):
        for h in range(3):
            assert torch.equal(back[b, :, h], along(x[b, :, h], fmt, dim))


@EVERY_FORMAT
@WAYS
def test_packed_sequences_equal_sequences_alone(fmt, quantise):
    packed = make_packed(LENGTHS, num_heads=3, head_dim=40, distribution="outlier")
    back = quantise(packed.q, fmt, packed.cu_seqlens_q).dequantise()
    alone = [quantise(part[None], fmt).dequantise()[0] for part in packed.q.split(LENGTHS)]
    assert torch.equal(back, torch.cat(alone))


@WAYS
def test_packed_and_dense_round_at_random_alike(quantise):
    x = example()
    cu = torch.tensor([0, 111, 222], dtype=torch.int32)
    dense = quantise(x, NVFP4, None, draw_tokens(x, "v", 5)).dequantise()
    flat = x.flatten(0, 1)
    packed = quantise(flat, NVFP4, cu, draw_tokens(flat, "v", 5, cu)).dequantise()
    assert torch.equal(dense.flatten(0, 1), packed)
    assert not torch.equal(dense, quantise(x, NVFP4).dequantise())


@WAYS
def test_neighbours_and_strides_do_not_matter(quantise):
    x = example()
    want = quantise(x, NVFP4).dequantise()
    assert torch.equal(quantise(poison_neighbours(x), NVFP4).dequantise(), want)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(quantise(transposed, NVFP4).dequantise(), want)


@EVERY_FORMAT
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_affects_its_block_alone(fmt, value):
    """16 or 32 channels of a token, or keys of a channel; the tensor scale is of finite numbers."""
    x = torch.ones(1, 96, 2, 64)
    x[0, 40, 1, 37] = value
    of = 37 // fmt.block * fmt.block
    lost = quantise_channels(x, fmt).dequantise().isnan()
    assert lost.sum() == fmt.block and lost[0, 40, 1, of : of + fmt.block].all()
    of = 40 // fmt.block * fmt.block
    lost = quantise_keys(x, fmt).dequantise().isnan()
    assert lost.sum() == fmt.block and lost[0, of : of + fmt.block, 1, 37].all()


def test_storage():
    """Two codes a byte along the blocks, whose sequences begin new ones."""
    x = example()
    q, v = quantise_channels(x, NVFP4), quantise_keys(x, NVFP4)
    assert q.codes.shape == (2, 111, 3, 20) and q.scales.shape == (2, 111, 3, 3)
    assert v.blocks.codes.shape == (3, 40, 112) and v.blocks.scales.shape == (3, 40, 14)
    assert v.slots[111] == 112  # 111 keys are 7 blocks
    assert fp4.unpack(v.blocks.codes, 112 * 2)[..., 111].max() == 0


def test_empty_sequences():
    for shape in ((2, 0, 3, 40), (0, 5, 3, 40)):
        x = torch.zeros(shape)
        assert quantise_channels(x, NVFP4).dequantise().shape == shape
        assert quantise_keys(x, NVFP4).dequantise().shape == shape


def test_without_a_tensor_scale():
    """SageAttention 3's: blocks far below 1 become zeros."""
    fmt, x = replace(NVFP4, has_tensor_scale=False), 1e-5 * example()
    assert quantise_channels(x, fmt).tensor_scale is None
    assert quantise_channels(x, fmt).dequantise().norm() < 0.1 * x.norm()
    assert (quantise_channels(x, NVFP4).dequantise() - x).norm() < 0.12 * x.norm()


@WAYS
def test_refusals(quantise):
    with pytest.raises(ValueError, match=r"must have rank 4.*got shape \(5, 2, 8\)"):
        quantise(torch.zeros(5, 2, 8), NVFP4)
    with pytest.raises(ValueError, match="must rise from 0 to the 5 tokens"):
        quantise(torch.zeros(5, 2, 8), NVFP4, torch.tensor([0, 3]))
