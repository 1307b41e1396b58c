"""Ledgers count every load and store, and nothing else."""

import math

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.lab.published import ledger
from onchip.lab.published.ledger import Ledger
from onchip.lab.published.memory import Array, Tile, accumulate


def test_loads_and_stores_are_counted_in_the_bytes_of_the_array():
    book = Ledger()
    x = Array(book, "x", torch.ones(2, 8, 6, dtype=torch.float16), torch.float32)
    tile = x.load((0, 4), (1, 3))
    x.store(tile * 2.0, (4, 8), (1, 3))
    assert book.reads == {"x": 2 * 4 * 2 * 2} and book.writes == {"x": 2 * 4 * 2 * 2}
    assert tile.x.dtype == torch.float32 and x.data[0, 4].tolist() == [1, 2, 2, 1, 1, 1]


def test_an_expanded_array_is_read_by_every_head():
    book = Ledger()
    Array(book, "k", torch.ones(1, 1, 5, 3).expand(1, 4, 5, 3)).load((0, 2))
    assert book.reads["k"] == 4 * 2 * 3 * 4


def test_operations_are_counted_where_they_happen():
    book = Ledger()
    a, b = Tile(torch.ones(3, 4), book), Tile(torch.ones(4, 5), book)
    c = accumulate(Tile(torch.zeros(3, 5), book), a, b)
    assert book.flops == 2 * 3 * 4 * 5 and book.other_ops == 0
    c.exp().rowsum()
    assert book.exps == 15 and book.other_ops == 15


def test_rows_without_keys_give_no_nan():
    book, nothing = Ledger(), torch.tensor([[-math.inf]])
    m = Tile(nothing, book)
    assert m.below(m).exp().x == 0 and Tile(torch.zeros(1, 1), book).over(m.below(m).exp()).x == 0


def test_the_innermost_ledger_records():
    q, k, v = ot.make_qkv(1, 5)
    with ledger() as outer:
        onchip.attention(q, k, v, kernel="paper_v2")
        before = outer.hbm_bytes
        with ledger() as inner:
            onchip.attention(q, k, v, kernel="paper_v2")
        assert outer.hbm_bytes == before == inner.hbm_bytes > 0
    onchip.attention(q, k, v, kernel="paper_v2")
    assert outer.hbm_bytes == before


def test_a_ledger_prints_as_a_table():
    q, k, v = ot.make_qkv(1, 64, num_heads=1, head_dim=16)
    with ledger(sram=2000) as book:
        onchip.attention(q, k, v, kernel="paper_v1")
    text = str(book)
    assert "bytes written" in text and f"{book.flops:,} flops" in text
    assert all(name in text for name in book.reads | book.writes)


def test_the_bits_of_partial_blocks_are_read_by_every_head():
    q, k, v = ot.make_qkv(2, 128, num_heads=3, head_dim=16)
    with ledger(tiles=(64, 64)) as book:
        onchip.attention(q, k, v, kernel="paper_v2", mask=masks.causal())
    assert book.reads["mask"] == 2 * 3 * 128 * 128 // 8


def test_a_row_of_keys_is_read_once_for_every_tile_of_rows():
    """The rule of the traffic: v2 reads K and V N / Br times, v1 reads Q and O N / Bc times."""
    q, k, v = ot.make_qkv(1, 256, num_heads=1, head_dim=16)
    with ledger(tiles=(32, 64)) as v2:
        onchip.attention(q, k, v, kernel="paper_v2")
    with ledger(tiles=(32, 64)) as v1:
        onchip.attention(q, k, v, kernel="paper_v1")
    once = q.numel() * 4
    assert v2.reads["k"] == 256 // 32 * once and v2.reads["q"] == v2.writes["o"] == once
    assert v1.reads["q"] == v1.reads["o"] == v1.writes["o"] == 256 // 64 * once
    assert v1.reads["k"] == once


@pytest.mark.parametrize("options", [{"sram": 0}, {"tiles": (0, 64)}])
def test_a_chip_of_size_zero_is_refused(options):
    with pytest.raises(ValueError, match="at least 1"), ledger(**options):
        pass
