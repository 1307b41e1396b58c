"""The model of a short accumulator: exact if no bits are lost, and otherwise with the expected
loss.
"""

import pytest
import torch

from onchip.quant.accumulator import Accumulator, add_product
from onchip.quant.formats import E4M3, cast


def operands(rows=7, n=160, columns=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: cast(torch.randn(shape, generator=generator), E4M3).to(dtype)
    return draw(2, rows, n), draw(2, n, columns), draw(2, rows, columns)


@pytest.mark.parametrize("promote", [None, 32, 64, 128])
@pytest.mark.parametrize("n", [1, 32, 63, 160])
def test_with_many_bits_it_is_the_product(promote, n):
    a, b, acc = operands(n=n, dtype=torch.float64)
    got = add_product(acc, a, b, Accumulator(40, promote))
    assert torch.allclose(got, acc + a @ b, atol=1e-9)
    assert torch.allclose(add_product(acc, a, b, None), acc + a @ b, atol=1e-12)


def test_addends_below_the_last_bit_are_lost():
    """1 + 31 * 2^-14 in 14 bits: each addend is below the last bit of the largest."""
    a, b = torch.ones(1, 32), torch.full((32, 1), 2.0**-14)
    b[0] = 1.0
    assert add_product(torch.zeros(1, 1), a, b, Accumulator(14)).item() == 1.0
    assert add_product(torch.zeros(1, 1), a, b, Accumulator(15)).item() == 1 + 31 * 2.0**-14


def test_it_truncates_towards_zero():
    a, b = torch.ones(1, 32), torch.full((32, 1), 2.0**-14)
    b[0] = 1.0
    assert add_product(torch.zeros(1, 1), a, -b, Accumulator(14)).item() == -1.0


def test_a_long_sum_stops_growing_unless_promoted():
    """4,096 ones added to 2^14: each is below the last bit of the sum. With promotion the ones add
    up.
    """
    a, b, acc = torch.ones(1, 4096), torch.full((4096, 1), 0.5), torch.full((1, 1), 2.0**14)
    exact = acc + a @ b
    assert torch.equal(add_product(acc, a, b, Accumulator(14, None)), acc)
    assert torch.equal(add_product(acc, a, b, Accumulator(14, 128)), exact)


def test_more_bits_and_more_promotions_are_better():
    """Sums of one sign, which truncation makes too small."""
    a, b, acc = operands(n=512)
    a, b = a.abs(), b.abs()
    error = lambda model: (add_product(acc, a, b, model) - acc - a @ b).abs().mean().item()
    assert error(Accumulator(15, None)) < 0.7 * error(Accumulator(14, None))
    assert error(Accumulator(14, 128)) < 0.7 * error(Accumulator(14, None))
    assert error(Accumulator(14, 32)) < 0.7 * error(Accumulator(14, 128))


def test_refusals():
    with pytest.raises(ValueError, match="promote=100 must be a multiple of 32"):
        Accumulator(promote=100)


@pytest.mark.hopper
def test_tensor_cores_match_the_model():
    """cuBLAS without promotion, sums of 4,096 products of one sign: 6.6 % by the model."""
    generator = torch.Generator().manual_seed(0)
    a, b = (cast(torch.rand(2048, 4096, generator=generator), E4M3).cuda() for _ in range(2))
    one = torch.ones((), device="cuda")
    narrow = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.float32}
    out = torch._scaled_mm(narrow[0], narrow[1].t(), use_fast_accum=True, **options)[:64, :64]
    a, b = a[:64], b[:64].t()
    exact = a.double() @ b.double()
    lost = lambda got: ((exact - got) / exact).mean().item()
    model = add_product(torch.zeros_like(out), a, b, Accumulator(14, None))
    assert lost(out) == pytest.approx(lost(model), rel=0.3)
