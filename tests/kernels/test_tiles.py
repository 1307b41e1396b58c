"""Consistency of the tile tables."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from benchmarks import footprint
from benchmarks.footprint import HANDED_OVER
from onchip.cost import make_problem
from onchip.cost.hardware import H200
from onchip.kernels import tiles
from onchip.kernels.tiles import (
    HOPPER_BACKWARD,
    HOPPER_SPLIT,
    HOPPER_WIDTHS,
    TRITON_CHUNK,
    TRITON_DECODE,
    describe_hopper_row,
    dq_part_columns,
    hopper_backward_widths,
    hopper_forward_of,
    hopper_forward_width,
    hopper_forward_widths,
    hopper_splits_dq,
    hopper_width,
    paper_product_tiles,
    paper_sram,
    paper_v1_tiles,
    paper_v2_backward_tiles,
    paper_v2_tiles,
    split_columns,
)

THREE, TWO = 3, 2  # consumers of a tile at head_dim 64


@pytest.mark.parametrize(
    ("options", "seqlen", "consumers"),
    [
        ({}, 4096, THREE),
        ({"causal": True}, 1024, TWO),
        ({"causal": True}, 1025, THREE),
        ({"window_size": (300, 200)}, 4096, TWO),
        ({"window_size": (832, 0)}, 4096, TWO),  # a tile of 192 queries meets 1024 keys
        ({"window_size": (833, 0)}, 4096, THREE),
        ({"window_size": (500, None), "causal": True}, 4096, TWO),
        ({"window_size": (500, None)}, 4096, THREE),
        ({"window_size": (None, 10)}, 4096, THREE),
    ],
    ids=str,
)
def test_two_consumers_for_tiles_with_few_keys(options, seqlen, consumers):
    problem = make_problem(seqlen, num_heads=4, head_dim=64, dtype=torch.bfloat16, **options)
    assert hopper_forward_of(problem).consumers == consumers


@pytest.mark.parametrize("dim", [72, 80, 96])
@pytest.mark.parametrize(
    ("options", "seqlen", "consumers"),
    [
        ({}, 4096, 3),
        ({}, 1025, 3),
        ({}, 1024, 2),
        ({"causal": True}, 4096, 2),
        ({"window_size": (2000, 0)}, 4096, 2),
    ],
    ids=str,
)
def test_three_consumers_for_long_dense_calls(dim, options, seqlen, consumers):
    """They fit shared memory, also with unrounded results."""
    options = options | {"num_heads": 4, "head_dim": dim, "dtype": torch.bfloat16}
    problem = make_problem(seqlen, **options)
    assert hopper_forward_of(problem).consumers == consumers
    for dtype in (torch.bfloat16, torch.float32):
        row = hopper_forward_of(problem._replace(out_dtype=dtype))
        widths = tiles.hopper_forward_widths(problem)
        shared = footprint.hopper_forward(row, *widths, dtype == torch.float32).shared_bytes
        assert shared + HANDED_OVER <= H200.shared_bytes


def test_widths_are_powers_of_two_and_tails_of_whole_products():
    for width in HOPPER_WIDTHS:
        columns, tail = split_columns(width)
        assert columns + tail == width and columns.bit_count() == 1
        assert tail == 0 or (tail.bit_count() == 1 and tail % 16 == 0 and tail < columns)


@pytest.mark.parametrize(
    ("head_dim", "width"),
    [(8, 32), (32, 32), (40, 64), (72, 80), (80, 80), (88, 96), (104, 128), (112, 128), (136, 160),
     (168, 192), (192, 192), (200, 256), (256, 256)],
)  # fmt: skip
def test_a_head_dim_is_padded_to_the_next_width(head_dim, width):
    assert hopper_forward_width(head_dim) == width
    assert hopper_forward_width(head_dim, page_size=16) == hopper_width(head_dim)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_tiles_of_all_head_dims_fit_shared_memory(has_mask, causal, out_dtype):
    """Also where q and k have other columns than v."""
    options = {"causal": causal, "out_dtype": out_dtype, "dtype": torch.bfloat16}
    for d, dv in product(range(8, 257, 8), repeat=2):
        problem = make_problem(4096, head_dim=d, head_dim_v=dv, **options)
        problem = problem._replace(has_mask=has_mask)
        config, widths = hopper_forward_of(problem), hopper_forward_widths(problem)
        wide = out_dtype == torch.float32
        program = footprint.hopper_forward(config, *widths, wide, packed=True)
        assert program.shared_bytes + HANDED_OVER <= H200.shared_bytes, (d, dv)
        assert not (config.out_in_q and config.q_stages > 1)


def test_keys_of_192_columns_with_narrow_values_have_a_table_of_their_own():
    make = lambda **o: make_problem(4096, head_dim=192, dtype=torch.bfloat16, causal=True, **o)
    narrow, wide = make(head_dim_v=128), make()
    assert hopper_forward_of(narrow).tile_n == 128 and hopper_forward_of(wide).tile_n == 64
    assert "HOPPER_FORWARD_MLA[192]" in describe_hopper_row(narrow)
    assert "HOPPER_FORWARD[192]" in describe_hopper_row(wide)


@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD)
def test_the_kernels_of_the_hopper_backward_share_lse_and_delta(head_dim):
    """prepare_kernel writes them once, tile by tile, for both."""
    assert HOPPER_SPLIT[head_dim].tile == HOPPER_BACKWARD[head_dim].tile_m


@pytest.mark.parametrize("width", HOPPER_BACKWARD)
def test_dq_is_stored_in_one_part_per_consumer(width):
    tile_m = HOPPER_BACKWARD[width].tile_m
    parts = dq_part_columns(tile_m, *split_columns(width))
    assert 64 * sum(parts) == tile_m * width and set(parts) <= {16, 32, 64}


def make_dims(d, dv, **options):
    return make_problem(4096, head_dim=d, head_dim_v=dv, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize(
    ("dims", "widths"),
    [
        ((24, 24), (32, 32)),
        ((24, 72), (80, 80)),
        ((96, 40), (96, 96)),
        ((112, 80), (128, 128)),
        ((136, 136), (160, 160)),
        ((136, 64), (160, 160)),
        ((128, 192), (192, 192)),
        ((192, 128), (192, 128)),
        ((176, 64), (192, 128)),
        ((192, 136), (192, 192)),
        ((256, 192), (256, 256)),
    ],
    ids=str,
)
def test_widths_of_the_backward(dims, widths):
    assert hopper_backward_widths(make_dims(*dims)) == widths


def test_every_width_of_the_backward_has_rows():
    for dims in product(range(8, 257, 8), repeat=2):
        width = max(hopper_backward_widths(make_dims(*dims)))
        assert width in HOPPER_SPLIT and (width in HOPPER_BACKWARD) == (width <= 128)


def test_few_and_many_queries_have_rows_for_the_same_calls():
    assert TRITON_CHUNK.keys() == TRITON_DECODE.keys()


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (64, 64), (128, 24), (256, 256)])
@pytest.mark.parametrize("sram", [4096, 51_200, 10**6])
def test_tiles_of_the_papers_fit_on_the_chip(sram, d, dv):
    m, n = paper_v2_tiles(sram, d, dv)
    assert (m + n) * (d + dv) + m * n <= sram < (m + 1 + n) * (d + dv) + (m + 1) * n
    m, n = paper_v2_backward_tiles(sram, d, dv)
    used = lambda n: 2 * n * (d + dv) + m * (2 * d + dv) + 2 * m * n
    assert used(n) <= sram < used(n + 1)
    m, n, k = paper_product_tiles(sram, d)
    assert m * n + (m + n) * k <= sram


def test_tiles_of_v1_are_those_published():
    """Bc = ceil(M / 4d), Br = min(Bc, d); with Br = Bc nothing is left for S."""
    assert paper_v1_tiles(51_200, 64, 64) == (64, 200)
    assert paper_v1_tiles(51_200, 128, 128) == (100, 100) and 4 * 100 * 128 == 51_200
    assert paper_v1_tiles(51_201, 128, 128) == (101, 101)
    assert paper_sram(None, 2) == 51_200 and paper_sram(7, 2) == 7
    assert paper_v1_tiles(paper_sram(math.inf, 2), 64, 64).tile_n > 2**31


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({"seqlen": 512, "head_dim": 64, "causal": True}, True),
        ({"seqlen": 520, "head_dim": 64, "causal": True}, False),
        ({"seqlen": 1024, "head_dim": 128, "causal": True}, True),
        ({"seqlen": 1040, "head_dim": 96, "causal": True}, False),
        ({"seqlen": 512, "head_dim": 64}, False),
        ({"seqlen": 512, "head_dim": 128}, True),
        ({"seqlen": 9000, "head_dim": 128, "window_size": (300, 211)}, True),
        ({"seqlen": 9000, "head_dim": 128, "window_size": (300, 212)}, False),
        ({"seqlen": 9000, "head_dim": 128, "window_size": (300, None)}, False),
        ({"seqlen": 9000, "head_dim": 40, "deterministic": True}, True),
        ({"seqlen": 9000, "head_dim": 256}, True),
        ({"seqlen": 512, "head_dim": 128, "num_kv_heads": 4}, False),
        ({"seqlen": 512, "head_dim": 128, "softcap": 5.0}, False),
        ({"seqlen": 8192, "seqlen_k": 4096, "head_dim": 128, "causal": True}, False),
        ({"seqlen": 1024, "seqlen_k": 512, "head_dim": 128, "causal": True}, True),
    ],
    ids=str,
)
def test_dq_has_its_own_kernel_where_queries_see_few_keys(few_keys, options, splits):
    options = dict(options)
    replaced = {n: options.pop(n) for n in ("deterministic", "seqlen_k", "softcap") if n in options}
    seqlen = options.pop("seqlen")
    problem = make_problem(seqlen, num_heads=8, dtype=torch.bfloat16, **options)
    assert hopper_splits_dq(problem._replace(**replaced)) == splits


def test_few_tiles_have_one_kernel(monkeypatch):
    monkeypatch.setattr(tiles, "HOPPER_SPLIT_KEYS", {128: 512})
    make = partial(make_problem, 512, head_dim=128, dtype=torch.bfloat16, causal=True)
    assert hopper_splits_dq(make(batch=17, num_heads=8))
    assert not hopper_splits_dq(make(batch=16, num_heads=8))


WIDE = ("forward", "dkdv", "dq", "dbias", "decode", "short", "paged", "paged_full", "chunk")
WIDE += tiles.TANGENT_KERNELS


@pytest.mark.parametrize("kernel", WIDE)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0), None])
@pytest.mark.parametrize("has_mask, modified", [(False, False), (True, False), (True, True)])
def test_every_kernel_has_a_row_for_wide_heads(kernel, capability, has_mask, modified):
    use = tiles.TritonUse(512, 2, capability, has_mask, modified)
    row = tiles.triton_config(kernel, use)
    assert 16 <= row.tile_m <= tiles.DECODE_ROWS and row.num_stages == 1
    assert max(row.tile_m, row.tile_n) * 512 * 2 <= 64 * 1024  # of one operand
