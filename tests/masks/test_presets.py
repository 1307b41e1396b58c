"""The presets equal the rules in their docstrings, for any pair of lengths."""

import pytest
import torch

from onchip import masks

SEQLENS = [(1, 1), (799, 799), (1024, 1024), (257, 1024), (300, 130), (63, 640)]


def near(p, k, reach, block=128):
    return (p >= 0) & ((p // block - k // block).abs() <= reach)


def spread(p, k, stride):
    distance = p // 128 - k // 128
    return (k <= p) & ((distance < stride) | (distance % stride == 0))


def one_digit(p, k):
    digits = (p // 128) ^ (k // 128)
    return (p >= 0) & ((digits & (digits - 1)) == 0)


def tokens(p, k, count):
    return ((p >= 0) & (p < count)) | (k < count)


RULES = {
    "block_local": (masks.block_local(100), lambda p, k: near(p, k, 0, 100)),
    "longformer": (masks.longformer(70, 5), lambda p, k: ((p - k).abs() <= 70) | tokens(p, k, 5)),
    "strided": (masks.strided(3), lambda p, k: spread(p, k, 3)),
    "butterfly": (masks.butterfly(), one_digit),
    "bigbird without random blocks": (
        masks.bigbird(1, 0, 2),
        lambda p, k: near(p, k, 1) | tokens(p, k, 256),
    ),
}


@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("name", RULES)
def test_a_preset_equals_its_rule(name, seqlens):
    mask, rule = RULES[name]
    q, k = torch.arange(seqlens[0])[:, None], torch.arange(seqlens[1])
    expected = rule(q + seqlens[1] - seqlens[0], k).expand(seqlens)
    assert torch.equal(mask.build(2, 2, *seqlens).to_dense()[0, 0], expected)


def test_bigbird_draws_different_blocks_per_row_from_its_seed():
    grid = masks.bigbird(0, 4, 0, seed=3).build(1, 1, 2048, 2048).status()
    assert set(grid.sum(1).tolist()) <= {2 * 4, 2 * 5}  # four drawn blocks, and the diagonal
    again = masks.bigbird(0, 4, 0, seed=3).build(1, 1, 2048, 2048).status()
    other = masks.bigbird(0, 4, 0, seed=4).build(1, 1, 2048, 2048).status()
    assert torch.equal(grid, again) and not torch.equal(grid, other)


def test_bigbird_draws_for_positions_not_for_query_indices():
    whole = masks.bigbird(seed=1).build(1, 1, 1024, 1024).to_dense()
    tail = masks.bigbird(seed=1).build(1, 1, 300, 1024).to_dense()
    assert torch.equal(whole[:, :, -300:], tail)


def test_aligned_block_presets_have_no_partial_block():
    for mask in (masks.butterfly(), masks.bigbird(), masks.block_local(256)):
        assert mask.build(1, 1, 4096, 4096).num_partial == 0


def test_butterfly_has_one_block_per_binary_digit():
    grid = masks.butterfly().build(1, 1, 4096, 4096).status()
    assert set((grid == 2).sum(1).tolist()) == {1 + 5}
