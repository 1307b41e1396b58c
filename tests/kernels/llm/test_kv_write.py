"""Keys and values into slots, and copies of pages: the kernels against plain indexing, by Triton's
interpreter on the CPU, and on a GPU where there is one.
"""

import pytest
import torch

from onchip.quant.kv8 import quantise
from tests.interpreted import DEVICE, interpreted_or_gpu
from tests.kv8 import FORMS

pytest.importorskip("triton")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def expected_write(pages, rows, slots):
    flat = pages.clone().flatten(0, 1)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if 0 <= slot < flat.shape[0]:
            flat[slot] = row
    return flat.unflatten(0, pages.shape[:2])


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 4, 40, 24), (8, 16, 64, 64)], ids=str)
def test_every_token_is_written_to_its_slot_and_nothing_else_changes(dtype, sizes):
    from onchip.kernels.llm import kv_write

    heads, page_size, dim, dim_v = sizes
    k_pages, v_pages = (randn(5, page_size, heads, d, dtype=dtype) for d in (dim, dim_v))
    fused = randn(4, heads, dim + dim_v, dtype=dtype)  # k and v are views with strides of their own
    k, v = fused[..., :dim], fused[..., dim:]
    slots = torch.randperm(5 * page_size)[:4].int()
    slots[1] = -1
    expected = [expected_write(p, x, slots) for p, x in ((k_pages, k), (v_pages, v))]
    kv_write.write(k, v, k_pages, v_pages, slots.to(DEVICE))
    assert torch.equal(k_pages, expected[0]) and torch.equal(v_pages, expected[1])


@interpreted_or_gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 4, 40, 24), (8, 16, 64, 64)], ids=str)
def test_8_bit_pages_equal_the_definition(form, dtype, sizes):
    """The same numbers, over rows of all magnitudes; scales of any strides."""
    from onchip.kernels.llm import kv_write

    heads, page_size, dim, dim_v = sizes
    pages = [torch.zeros(5, page_size, heads, d, dtype=form, device=DEVICE) for d in (dim, dim_v)]
    scales = [randn(5, heads, page_size).transpose(1, 2), randn(5, page_size, heads)]
    magnitude = torch.tensor([1.0, 1e-30, 1e4, 0.0], device=DEVICE)[:, None, None]
    k, v = ((randn(4, heads, d) * magnitude).to(dtype) for d in (dim, dim_v))
    slots = torch.randperm(5 * page_size)[:4].int()
    slots[1] = -1
    expected = []
    for x, p, s in zip((k, v), pages, scales, strict=True):
        values, rows = quantise(x, form)
        expected.append(expected_write(p.float(), values.float(), slots))
        expected.append(expected_write(s, rows, slots))
    kv_write.write(k, v, *pages, slots.to(DEVICE), *scales)
    got = [pages[0].float(), scales[0], pages[1].float(), scales[1]]
    assert all(map(torch.equal, got, expected))


@interpreted_or_gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_has_a_scale_of_nan(form, poison):
    from onchip.kernels.llm import kv_write

    pages, scales = torch.zeros(1, 4, 2, 16, dtype=form, device=DEVICE), randn(1, 4, 2)
    new = randn(2, 2, 16)
    new[1, 0, 3] = poison
    slots = torch.tensor([2, 3], dtype=torch.int32, device=DEVICE)
    kv_write.write(new, new, pages, pages.clone(), slots, scales, scales.clone())
    assert scales.isnan().nonzero().tolist() == [[0, 3, 0]]


@interpreted_or_gpu
def test_slots_out_of_range_write_nothing():
    from onchip.kernels.llm import kv_write

    pool = randn(9, 4, 2, 16)
    inner = pool[3:6]  # a write outside these pages would land in their neighbours
    before = pool.clone()
    slots = torch.tensor([-1, -5, 12, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    new = randn(4, 2, 16)
    kv_write.write(new, new, inner, inner, slots)
    assert torch.equal(pool, before)


@interpreted_or_gpu
def test_without_tokens_nothing_is_written():
    from onchip.kernels.llm import kv_write

    pages, none = randn(2, 4, 1, 8), randn(0, 1, 8)
    slots = torch.empty(0, dtype=torch.int32, device=DEVICE)
    kv_write.write(none, none, pages, pages.clone(), slots)


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 7, 16, 3, 72), (2, 7, 1, 1, 5), (3, 7, 4, 2)], ids=str)
def test_pages_are_copied_in_every_layer(dtype, shape):
    from onchip.kernels.llm import kv_write

    pages = randn(*shape, dtype=dtype)
    expected = pages.clone()
    expected[:, 5], expected[:, 0] = pages[:, 2], pages[:, 6]
    pairs = torch.tensor([[2, 5], [6, 0], [-1, 3], [1, 7], [2**31 - 1, 4]], dtype=torch.int32)
    kv_write.copy_pages(pages, pairs.to(DEVICE))
    assert torch.equal(pages, expected)


@interpreted_or_gpu
def test_pages_that_are_not_contiguous_are_refused():
    from onchip.kernels.llm import kv_write

    pages = randn(1, 4, 2, 8, 16).transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous one by one"):
        kv_write.copy_pages(pages, torch.zeros(1, 2, dtype=torch.int32, device=DEVICE))
