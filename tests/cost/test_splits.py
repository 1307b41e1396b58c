"""The cost model of split-KV: against measurements of an H200, and its choices."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onchip.cost import make_problem
from onchip.cost.hardware import A100, H200, HOST, TABLE
from onchip.cost.splits import (
    SplitTiles,
    TileWork,
    choose,
    choose_for_unknown_lengths,
    even_splits,
    predict_seconds,
    seconds,
    split_evenly,
    units_for_waves,
)
from onchip.kernels.tiles import HOPPER_DECODE_KEYS, SPLIT_KEYS, SPLIT_WAVES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TILE_N, LEAST = 64, SPLIT_KEYS // 64  # keys of a tile, tiles of a split at least


def tiles(num_kv_heads=8, group_size=4, head_dim=128, dtype=torch.bfloat16):
    heads = {"num_heads": num_kv_heads * group_size, "num_kv_heads": num_kv_heads}
    return TileWork.of(make_problem(1, 4096, **heads, head_dim=head_dim, dtype=dtype), 16, TILE_N)


def measured(kernel):
    """(cell, microseconds) of the decoding rows, from the bytes of their keys and values."""
    rows = json.loads((RESULTS / "h200-paged.json").read_text())["rows"]
    for r in rows:
        if r["bench"].startswith("decode") and r["kernel"] == kernel and r["unit"] == "TB/s":
            size = r["batch"] * r["seqlen"] * r["num_kv_heads"] * 4 * r["head_dim"]
            yield r, size / r["value"] / 1e6


def test_decoding_on_an_h200_takes_as_long_as_predicted():
    """Ranges of the Hopper kernel, merged in the same launch: within a tenth. Without a page table
    keys arrive some 2 us earlier (docs/notebook.md), which short calls show.
    """
    cells = [cell for cell in measured("hopper") if "skewed" not in cell[0]["bench"]]
    assert len(cells) == 10
    for r, us in cells:
        total = r["batch"] * -(-r["seqlen"] // TILE_N)
        ranges = units_for_waves(1, r["num_kv_heads"], H200.processors)
        assert total // (HOPPER_DECODE_KEYS // TILE_N) > ranges
        predicted_us = 1e6 * seconds(tiles(), [SplitTiles(1, total, ranges)], H200, merged=False)
        earlier = 0.0 if r.get("page_size") else 2.0
        assert predicted_us - earlier == pytest.approx(us, rel=0.10), (r["batch"], r["seqlen"])


def test_the_portable_kernel_on_an_h200_takes_as_long_as_predicted():
    """64 sequences of 32 heads with 2,048 keys: whole, though a merge is launched. 15.5 programs to
    a processor count as 16, which alone is 3 % too long.
    """
    ((r, us),) = measured("triton")
    part = SplitTiles(r["batch"], r["seqlen"] // TILE_N)
    work = tiles(r["num_kv_heads"], 1)
    units = choose_for_unknown_lengths(work, part, LEAST, H200)
    assert split_evenly(part, units, LEAST).splits == 1
    assert 1e6 * predict_seconds(work, part, units, LEAST, H200) == pytest.approx(us, rel=0.07)


# Splits of a sequence on an H200, 32 heads over 8, head_dim 128: with two programs for every
# processor whatever that gives, as it was, and as chosen.
GRID = {
    # Two splits of 256 keys save 4 us and cost a merge of 5.
    (1, 512): (2, 1),
    (16, 512): (2, 1),
    (1, 1024): (4, 4),
    (1, 4096): (16, 16),
    (1, 16384): (32, 32),
    (1, 131072): (33, 33),
    (4, 4096): (8, 8),
    (8, 4096): (4, 4),
    # 320 programs, so that some processors have three of 52 tiles; now 512, four of 32.
    (8, 16384): (5, 8),
    # 128 programs for 132 processors: nothing to gain, and a merge to lose.
    (16, 4096): (2, 1),
    (16, 16384): (3, 1),
    # 272 programs: three of 32 tiles; now 544, five of 16.
    (17, 4096): (2, 4),
    (33, 4096): (1, 1),
    (64, 4096): (1, 1),
    (128, 8192): (1, 1),
}


@pytest.mark.parametrize(("cell", "splits"), GRID.items())
def test_choices_for_known_cells(cell, splits):
    batch, keys = cell
    part, fill = SplitTiles(batch, keys // TILE_N), units_for_waves(SPLIT_WAVES, 8, 132)
    units = choose(tiles(), part, LEAST, H200)
    assert tuple(split_evenly(part, n, LEAST).splits for n in (fill, units)) == splits
    times = [predict_seconds(tiles(), part, n, LEAST, H200) for n in (fill, units)]
    assert times[1] < times[0] or splits[0] == splits[1]


@given(
    st.integers(1, 300),
    st.integers(1, 3000),
    st.sampled_from([1, 2, 5, 8, 32, 200]),
    st.sampled_from([*TABLE, HOST]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_no_choice_is_predicted_slower_than_one_split_or_a_full_device(
    number, length, num_kv_heads, hardware, dtype
):
    work, part = tiles(num_kv_heads, 4, 128, dtype), SplitTiles(number, length)
    time = lambda n, p=part: predict_seconds(work, p, n, LEAST, hardware)
    fill = units_for_waves(SPLIT_WAVES, num_kv_heads, hardware.processors)
    assert time(choose(work, part, LEAST, hardware)) <= min(time(None), time(fill))
    unseen, one = choose_for_unknown_lengths(work, part, LEAST, hardware), part._replace(number=1)
    assert unseen in (None, fill) and time(unseen, one) == min(time(None, one), time(fill, one))


@given(st.integers(1, 300), st.integers(1, 3000), st.sampled_from([1, 3, 8, 132]))
def test_no_splits_for_unknown_lengths_costs_little(number, length, num_kv_heads):
    """If splits do not pay for one sequence, they do not pay for many, except for one more wave of
    short ones, which is as long as a merge.
    """
    work, part = tiles(num_kv_heads), SplitTiles(number, length)
    if choose_for_unknown_lengths(work, part, LEAST, H200) is None:
        best = choose(work, part, LEAST, H200)
        lost = predict_seconds(work, part, None, LEAST, H200) - predict_seconds(
            work, part, best, LEAST, H200
        )
        assert lost <= H200.merge_s


@given(st.integers(0, 5000), st.integers(1, 500))
def test_even_splits_are_short_enough_and_as_few_as_possible(length, most):
    count = even_splits(length, most)
    each = SplitTiles(1, length, count).longest
    assert each <= most and (count - 1) * each <= max(0, length - 1)
    assert count == 1 or -(-length // most) == -(-length // each)


def test_a_merge_costs_its_launch_and_the_states():
    part = SplitTiles(1, 256, 32)
    apart, together = (seconds(tiles(), [part], H200, merged) for merged in (True, False))
    states = 2 * 32 * 8 * 4 * 4 * 129  # splits, kv heads, rows of fp32 with their lse
    assert apart - together == pytest.approx(H200.merge_s + states / H200.memory_bytes_s)
    step = tiles().key_bytes * 132 / H200.memory_bytes_s
    assert together == pytest.approx(H200.call_s + 2 * 8 * step)  # 256 programs, two of 8 tiles


def test_programs_of_different_lengths_fill_the_gaps():
    """The longest alone, or all work spread over the processors plus half of the longest."""
    alone = seconds(tiles(), [SplitTiles(1, 500), SplitTiles(3, 2)], H200, False) - H200.call_s
    assert alone == pytest.approx(500 * tiles().step_s(H200))
    many = seconds(tiles(), [SplitTiles(600, 50), SplitTiles(600, 10)], H200, False) - H200.call_s
    assert many == pytest.approx((600 * 60 * 8 / 132 + 25) * tiles().step_s(H200))


def test_products_are_the_limit_with_many_queries():
    few = TileWork.of(
        make_problem(1, 4096, num_heads=8, head_dim=128, dtype=torch.bfloat16), 16, 64
    )
    many = few._replace(flops=40 * few.flops)
    assert few.step_s(A100) == few.key_bytes * 108 / A100.memory_bytes_s
    assert many.step_s(A100) == many.flops / 2048 / A100.clock_hz
    assert many.step_s(HOST) == many.key_bytes / HOST.memory_bytes_s  # nothing known but its memory
