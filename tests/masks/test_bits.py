"""Bit tiles: packing is a bijection, and equal tiles are found despite hash collisions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from onchip.masks import bits


@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(1, 5))
def test_unpack_inverts_pack(seed, rows, words):
    cells = torch.rand(rows, 32 * words, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = bits.pack(cells)
    assert packed.dtype == torch.int32 and packed.shape == (rows, words)
    assert torch.equal(bits.unpack(packed), cells)


def test_bit_k_of_a_row_is_bit_k_mod_32_of_word_k_div_32():
    cells = torch.eye(128, dtype=torch.bool)
    words = bits.pack(cells).tolist()
    for k, row in enumerate(words):
        value = 1 << (k % 32)
        assert row[k // 32] == (value - (1 << 32) if value >> 31 else value)
        assert sum(map(bool, row)) == 1


def test_interval_tiles_set_exactly_the_interval():
    ends = torch.tensor([0, 1, 31, 32, 33, 64, 100, 127, 128])
    lo, hi = (x.flatten().expand(128, -1).T for x in torch.meshgrid(ends, ends, indexing="ij"))
    hi = torch.maximum(lo, hi)
    k = torch.arange(128)
    expected = (lo[..., None] <= k) & (k < hi[..., None])
    assert torch.equal(bits.unpack(bits.interval_tiles(lo, hi)), expected)


def test_distinct_rows_reproduces_the_rows():
    rows = torch.randint(0, 3, (500, 2)) << 60  # the low bits are zero
    keep, inverse = bits.distinct_rows(rows)
    assert torch.equal(rows[keep][inverse], rows)
    assert len(keep) == len(torch.unique(rows, dim=0))


def test_a_hash_collision_is_noticed(monkeypatch):
    monkeypatch.setattr(bits, "_multipliers", lambda count: torch.zeros(count, dtype=torch.int64))
    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]])
    keep, inverse = bits.distinct_rows(rows)
    assert len(keep) == 3 and torch.equal(rows[keep][inverse], rows)


def test_tiles_that_differ_in_one_bit_are_distinct():
    tiles = torch.zeros(129, 128, 128, dtype=torch.bool)
    tiles[torch.arange(128), 3, torch.arange(128)] = True
    distinct, index = bits.distinct_tiles(bits.pack(tiles))
    assert len(distinct) == 129
    assert torch.equal(bits.unpack(distinct[index]), tiles)
