"""The papers' kernels are exact for any size of the chip, and refuse options they lack."""

import math

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.lab.published import ledger
from onchip.lab.published.arithmetic import POLYNOMIALS, exp2
from onchip.lab.published.ledger import Ledger
from onchip.lab.published.memory import Tile
from onchip.lab.published.v4 import PUBLISHED

PAPERS = ["paper_v0", "paper_v1", "paper_v2", "paper_v4"]
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 40, "head_dim_v": 24}


@pytest.mark.parametrize("kernel", PAPERS)
@pytest.mark.parametrize("sram", [700, 5000, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_for_any_size_of_the_chip(kernel, sram, dtype):
    q, k, v = ot.make_qkv(2, 63, 111, **SIZES, dtype=dtype, distribution="outlier")
    attention = lambda *qkv, **o: onchip.attention(*qkv, kernel=kernel, return_lse=True, **o)
    with ledger(sram):
        ot.assert_accurate(attention, q, k, v, grad=True, causal=True)


@pytest.mark.parametrize("kernel", PAPERS[1:3])
@pytest.mark.parametrize("tiles", [(1, 5), (32, 48), (200, 300)])
def test_dropout_equals_the_contract_for_any_tile(kernel, tiles):
    q, k, v = ot.make_qkv(2, 50, 70, **SIZES)
    options = {"dropout_p": 0.3, "dropout_seed": 2**40 + 17}
    attention = lambda *qkv, **o: onchip.attention(*qkv, kernel=kernel, return_lse=True, **o)
    with ledger(tiles=tiles):
        ot.assert_accurate(attention, q, k, v, grad=True, **options)


@pytest.mark.parametrize("kernel", PAPERS)
@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"sinks": torch.ones(4)}, {"alibi_slopes": torch.ones(4)}]
)
def test_options_that_the_papers_lack_are_refused(kernel, options):
    with pytest.raises(onchip.UnsupportedError, match=rf"{kernel}' cannot serve this call: has no"):
        onchip.attention(*ot.make_qkv(1, 5, **SIZES), kernel=kernel, **options)


def test_v4_has_neither_dropout_nor_fp64():
    q, k, v = ot.make_qkv(1, 5)
    with pytest.raises(onchip.UnsupportedError, match="has no dropout"):
        onchip.attention(q, k, v, kernel="paper_v4", dropout_p=0.1, dropout_seed=1)
    with pytest.raises(onchip.UnsupportedError, match="not for float64"):
        onchip.attention(q.double(), k.double(), v.double(), kernel="paper_v4")


class TestAlgorithm3:
    """Standard attention's backward."""

    def test_outside_of_a_ledger_p_is_written_again(self):
        q, k, v = ot.make_qkv(1, 63, 111, **SIZES)
        attention = lambda *qkv: onchip.attention(*qkv, kernel="paper_v0")
        ot.assert_accurate(attention, q, k, v, grad=True)

    def test_inside_a_ledger_p_is_that_of_the_forward(self):
        q, k, v = (x.requires_grad_() for x in ot.make_qkv(1, 63, 111, **SIZES))
        with ledger() as book:
            out = onchip.attention(q, k, v, kernel="paper_v0")
            out.sum().backward()
        assert "p.rewritten" not in book.writes and not book.saved

    def test_one_ledger_of_two_calls_keeps_their_p_apart(self):
        q, k, v = ot.make_qkv(1, 63, 111, **SIZES)
        leaves = [[(x * s).requires_grad_() for x in (q, k, v)] for s in (1.0, 0.5)]
        with ledger():
            outs = [onchip.attention(*x, kernel="paper_v0") for x in leaves]
            for out in outs:
                out.sum().backward()
        for x in leaves:
            y = [t.detach().double().requires_grad_() for t in x]
            ot.oracle(*y).out.sum().backward()
            for got, want in zip(x, y, strict=True):
                torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-5)


class TestArithmeticOfV4:
    @pytest.mark.parametrize(("degree", "error"), [(3, 8.8e-5), (4, 3.0e-6), (6, 1.3e-7)])
    def test_polynomials_have_the_documented_error(self, degree, error):
        x = torch.linspace(-100, 20, 100_001)
        y = exp2(Tile(x, Ledger()), degree).x.double()
        assert (y / x.double().exp2() - 1).abs().max() <= error

    def test_exp2_of_minus_infinity_is_zero(self):
        x = torch.tensor([-math.inf, -1000.0, -127.0])
        assert all((exp2(Tile(x, Ledger()), degree).x == 0).all() for degree in POLYNOMIALS)

    def test_few_accumulators_are_rescaled(self):
        q, k, v = ot.make_qkv(1, 128, 4096, dtype=torch.bfloat16)
        books = {}
        for kernel in ("paper_v2", "paper_v4"):
            with ledger(tiles=(128, 64)) as books[kernel]:
                onchip.attention(q, k, v, kernel=kernel)
        first_tile_of_each_row = 2 * 128
        assert books["paper_v2"].rescales == first_tile_of_each_row * 4096 // 64
        assert books["paper_v4"].rescales == first_tile_of_each_row

    def test_a_maximum_past_the_threshold_is_updated(self):
        q, k, v = ot.make_qkv(1, 33, 512, dtype=torch.bfloat16)
        k[:, 200:210] *= 20
        attention = lambda *qkv, **o: onchip.attention(*qkv, kernel="paper_v4", return_lse=True)
        with ledger(tiles=(33, 64)) as book:
            ot.assert_accurate(attention, q, k, v, grad=True)
        assert 2 * 33 < book.rescales < 2 * 33 * 8

    def test_an_unknown_degree_is_refused(self):
        q, k, v = ot.make_qkv(1, 5)
        with (
            ledger(arithmetic=PUBLISHED._replace(degree=7)),
            pytest.raises(ValueError, match=r"degree=7 is not None or one of \[3, 4, 6\]"),
        ):
            onchip.attention(q, k, v, kernel="paper_v4")

    def test_without_a_polynomial_only_rescaling_is_lazy(self):
        q, k, v = ot.make_qkv(1, 33, 512)
        attention = lambda *qkv: onchip.attention(*qkv, kernel="paper_v4", return_lse=True)
        with ledger(tiles=(33, 64), arithmetic=PUBLISHED._replace(degree=None)) as book:
            ot.assert_accurate(attention, q, k, v, grad=True)
        assert book.exps > 0 and book.rescales < 2 * 33 * 8

    def test_the_published_degree_is_accurate_for_out_but_not_for_lse(self):
        q, k, v = ot.make_qkv(2, 256, dtype=torch.bfloat16)
        exact = ot.oracle(q, k, v, window_size=(3, 0))
        with ledger(arithmetic=PUBLISHED):
            out = onchip.attention(q, k, v, window_size=(3, 0), kernel="paper_v4")
            lse = onchip.attention(q, k, v, window_size=(3, 0), kernel="paper_v4", return_lse=True)[
                1
            ]
        ot.assert_accurate(out, q, k, v, window_size=(3, 0))
        assert 1e-5 < ot.max_error(lse, exact.lse) < 9e-5


class TestSteps:
    """The visits that `watch` receives."""

    @pytest.mark.parametrize("kernel", PAPERS[1:])
    def test_the_last_state_of_a_row_is_its_result(self, kernel):
        q, k, v = ot.make_qkv(2, 63, 111, num_heads=4, num_kv_heads=2, head_dim=16)
        visits = []
        watch = lambda step: visits.append(step.row(1, 2, 40))
        with ledger(tiles=(16, 32), watch=watch):
            out, lse = onchip.attention(q, k, v, return_lse=True, kernel=kernel)
        states = [state for state in visits if state is not None]
        m, l, acc = states[-1]
        assert len(states) == 4 and m + math.log(l) == pytest.approx(float(lse[1, 2, 40]), abs=1e-5)
        scale = 1.0 if kernel == "paper_v1" else l
        torch.testing.assert_close(torch.tensor(acc) / scale, out[1, 40, 2], rtol=1e-4, atol=1e-5)

    def test_v1_walks_down_columns_and_v2_along_rows(self):
        q, k, v = ot.make_qkv(1, 64, 96, num_heads=1, head_dim=16)
        order = {}
        for kernel in ("paper_v1", "paper_v2"):
            tiles = order[kernel] = []
            with ledger(tiles=(32, 32), watch=lambda s, t=tiles: t.append((s.rows[0], s.keys[0]))):
                onchip.attention(q, k, v, kernel=kernel, causal=True)
        assert order["paper_v1"] == [(i, j) for j in (0, 32, 64) for i in (0, 32)]
        assert order["paper_v2"] == [(0, 0), (0, 32), (32, 0), (32, 32), (32, 64)]

    def test_empty_blocks_are_not_visited(self):
        q, k, v = ot.make_qkv(1, 256, num_heads=1, head_dim=16)
        for kernel in PAPERS[1:]:
            tiles = []
            with ledger(tiles=(64, 128), watch=lambda s, t=tiles: t.append((s.rows, s.keys))):
                onchip.attention(q, k, v, kernel=kernel, mask=masks.causal())
            assert ((0, 64), (128, 256)) not in tiles and len(tiles) == 6

    def test_bytes_grow_with_every_visit_up_to_the_ledgers_total(self):
        q, k, v = ot.make_qkv(1, 64, num_heads=1, head_dim=16)
        totals = []
        watch = lambda step: totals.append((step.read_bytes, step.write_bytes))
        with ledger(tiles=(32, 32), watch=watch) as book:
            onchip.attention(q, k, v, kernel="paper_v1")
        assert totals == sorted(totals) and totals[-1] == (book.read_bytes, book.write_bytes)
