"""Softmax in three, two and one pass; matrix products in tiles."""

import math

import pytest
import torch

from onchip.lab.published import ledger
from onchip.lab.published.matmul import matmul
from onchip.lab.published.softmax import one_pass, three_pass, two_pass


@pytest.mark.parametrize("sram", [1, 10, 111, math.inf])
def test_softmax_reads_x_once_per_pass(sram):
    x = torch.randn(3, 111, dtype=torch.float64)
    for passes, f in ((3, three_pass), (2, two_pass)):
        with ledger(sram) as book:
            y = f(x)
        torch.testing.assert_close(y, x.softmax(-1), rtol=1e-12, atol=1e-12)
        assert book.reads == {"x": passes * x.nbytes} and book.writes == {"y": x.nbytes}


@pytest.mark.parametrize("sram", [1, 100, math.inf])
def test_the_weighted_sum_needs_one_pass(sram):
    x, v = torch.randn(3, 111, dtype=torch.float64), torch.randn(3, 111, 7, dtype=torch.float64)
    with ledger(sram) as book:
        y = one_pass(x, v)
    torch.testing.assert_close(y, (x.softmax(-1)[:, None] @ v)[:, 0], rtol=1e-12, atol=1e-12)
    assert book.reads == {"x": x.nbytes, "v": v.nbytes} and book.writes == {"y": y.nbytes}


def test_softmax_of_hidden_rows_and_huge_scores():
    x = torch.tensor([[-math.inf] * 5, [1e30, -1e30, 0, 1e30, -math.inf]])
    for f in (three_pass, two_pass):
        with ledger(sram=2):
            assert f(x).tolist() == [[0.0] * 5, [0.5, 0.0, 0.0, 0.5, 0.0]]


@pytest.mark.parametrize(("sram", "tile"), [(3 * 16 * 16, 16), (48, 4), (math.inf, 10**6)])
def test_products_read_each_factor_once_for_every_tile_of_the_other(sram, tile):
    a, b = torch.randn(2, 33, 50, dtype=torch.float64), torch.randn(2, 50, 21, dtype=torch.float64)
    with ledger(sram) as book:
        c = matmul(a, b)
    torch.testing.assert_close(c, a @ b, rtol=1e-12, atol=1e-12)
    assert book.reads["a"] == a.nbytes * -(-21 // tile)
    assert book.reads["b"] == b.nbytes * -(-33 // tile)
    assert book.writes == {"c": c.nbytes} and book.flops == 2 * 2 * 33 * 50 * 21


def test_sixteen_bit_products_are_summed_in_thirty_two():
    a, b = torch.randn(64, 999).half(), torch.randn(999, 64).half()
    with ledger(sram=500):
        c = matmul(a, b)
    exact = a.double() @ b.double()
    assert (c.double() - exact).abs().max() <= torch.finfo(torch.float16).eps * exact.abs().max()
