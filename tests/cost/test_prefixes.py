"""The prices of reading a shared prefix once, against cells measured on an H200."""

import json
from pathlib import Path

import pytest
import torch

from onchip.cost.hardware import A100, B200, H200, HOST
from onchip.cost.prefixes import costs, moved
from onchip.fold import cascade

PAGE = 16
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def model_of(num_kv_heads=8, num_heads=32, head_dim=128, dtype=torch.bfloat16, device="meta"):
    q = torch.empty(64, 1, num_heads, head_dim, dtype=dtype, device=device)
    pages = torch.empty(1, PAGE, num_kv_heads, head_dim, dtype=dtype, device=device)
    return costs(q, pages, pages)


def plan(batch, shared, own, model):
    width, run = (shared + own) // PAGE, shared // PAGE
    table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
    table[:, :run] = table[0, :run]
    return cascade.plan(table, [shared + own] * batch, PAGE, model)


def in_turn(model):
    return model._replace(occupancy=model.occupancy._replace(own_queries=0))


def times(batch, shared, own, model):
    """Microseconds of one call, and of a level followed by a call."""
    pages, distinct = batch * (shared + own) // PAGE, (shared + batch * own) // PAGE
    one = model.one_call(pages, distinct)
    forced = plan(batch, shared, own, in_turn(model)._replace(level=0.0))
    assert len(forced.levels) == 1
    return 1e6 * one, 1e6 * (one - forced.saved + model.level)


# 32 heads over 8, head_dim 128, bf16, H200, 2026-11-16, microseconds: single calls are from
# benchmarks/results/h200-paged.json, a level followed by a call was timed by hand.
ONE_CALL = {(8, 2048, 64): 16.0, (64, 8192, 256): 258.9, (64, 32768, 256): 1030}
IN_TURN = {(64, 8192, 256): 54.3}


@pytest.mark.parametrize(("cell", "us"), ONE_CALL.items())
def test_single_calls_on_an_h200_within_a_tenth(cell, us):
    assert times(*cell, model_of())[0] == pytest.approx(us, rel=0.10)


@pytest.mark.parametrize(("cell", "us"), IN_TURN.items())
def test_a_level_on_an_h200_within_a_tenth_and_the_right_choice(cell, us):
    model = model_of()
    assert times(*cell, model)[1] == pytest.approx(us, rel=0.10) and us < ONE_CALL[cell]
    assert plan(*cell, in_turn(model)).levels and not plan(8, 2048, 64, model).levels


# The shortest prefix, of 16, 32, 64, ... keys, that a level is made for. Keys read again come from
# the L2 at 1.9 times the memory's rate, and a level takes 15 us: it has to save 129 MB.
BREAK_EVEN = {
    (8, 32, 128): {2: 32768, 4: 16384, 8: 8192, 64: 1024, 512: 128},
    (32, 32, 128): {2: 8192, 4: 4096, 8: 2048, 64: 256, 512: 32},
    (8, 64, 64): {2: 131072, 4: 32768, 8: 16384, 64: 2048, 512: 256},
}


def test_single_calls_equal_the_results_file():
    rows = json.loads((RESULTS / "h200-paged.json").read_text())["rows"]
    cascades = [row for row in rows if row["bench"] == "cascade"]
    cells = {(row["batch"], row["seqlen"]): row["peers"]["one call"] for row in cascades}
    assert cells == {
        (batch, shared + own): pytest.approx(one, rel=0.02)
        for (batch, shared, own), one in ONE_CALL.items()
    }


def shortest(batch, model):
    return next(n for n in (PAGE << i for i in range(16)) if plan(batch, n, 64, model).levels)


@pytest.mark.parametrize("shape", BREAK_EVEN, ids=str)
def test_break_even(shape):
    model = model_of(*shape)
    assert {batch: shortest(batch, model) for batch in BREAK_EVEN[shape]} == BREAK_EVEN[shape]


def test_a_cascade_is_not_chosen_for_long_chunks():
    """8 sequences of 512 queries each are bound by products with and without a level. Bytes alone
    chose one: 235 MB of keys less to read.
    """
    table = torch.arange(8 * 544, dtype=torch.int32).view(8, 544)
    table[:, :512] = table[0, :512]
    ask = lambda n: cascade.plan(table, [8704] * 8, PAGE, model_of(), seqlen_q=n)
    assert not ask(512).levels and 7 * 512 * moved_by_a_page() > 210e6 and ask(1).levels


def moved_by_a_page():
    return PAGE * 8 * 2 * 128 * 2


def test_the_break_even_of_a_level():
    """The break-even in pages of two sequences: the price of a level over a repeated page."""
    model = model_of()
    least = (model.level + 2 * (model.query + model.partial)) / model.page
    assert not plan(2, PAGE * int(least), 16, model).levels
    assert plan(2, PAGE * (int(least) + 1), 16, model).levels


def test_bytes_of_a_page_and_a_query():
    q, k, v = torch.empty(3, 1, 6, 24), torch.empty(2, 4, 2, 24), torch.empty(2, 4, 2, 40)
    page, query, partial, segment = moved(q, k, v)
    assert page == (k[0].numel() + v[0].numel()) * 4
    assert partial == 2 * 4 * (6 * 40 + 6)  # out and lse, written and read
    assert query == partial + 3 * 4 * 6 * 24  # q gathered (read, written) and read
    assert segment == partial + 2 * 4 * 6 * 24  # q written once more, and read
    model = costs(q, k, v)
    assert model.occupancy.num_programs == 1  # the CPU: nothing is cut
    assert model.page == model.first == page / HOST.memory_bytes_s and model.products == 0
    assert model.level == model.call == HOST.call_s


def test_keys_that_were_just_read_have_the_bandwidth_of_l2():
    model, page = model_of(), moved_by_a_page()
    assert model.page == page / H200.again_bytes_s and model.first == page / H200.memory_bytes_s
    assert A100.repeated_bytes_s == A100.levels[1].bytes_s  # not measured, but published
    assert B200.repeated_bytes_s == B200.memory_bytes_s  # neither


def test_queries_pay_for_products_that_reading_does_not_hide():
    model = model_of()
    hidden = model.of_queries(32, 1, 100) - 32 * model.query
    shown = model.of_queries(33, 1, 100) - 33 * model.query
    assert hidden == pytest.approx(0) and model.products < model.first
    assert shown == pytest.approx(100 * (2 * model.products - model.first))
    flops = 2 * 128 * PAGE * 8 * 256  # 128 rows, all kv heads
    assert model.products > flops / H200.flops(torch.bfloat16)  # a pipeline is not perfect
    exact = model_of(dtype=torch.float32)
    assert exact.products == pytest.approx(flops / H200.flops(torch.float32))


@pytest.mark.parametrize(("dtype", "programs"), [(torch.float16, 132), (torch.float32, 1)])
def test_runs_are_segmented_if_the_kernel_does_not_split_keys(dtype, programs):
    occupancy = model_of(5, 40, 64, dtype).occupancy
    assert occupancy[:4] == (programs, 5, 128 // 8, 512 // PAGE)


def test_tensors_that_are_not_pages_are_refused():
    with pytest.raises(ValueError, match=r"pages have rank 4, got \[\(4, 32\), "):
        costs(torch.empty(4, 32), torch.empty(1, 16, 4, 32), torch.empty(1, 16, 4, 32))


# Of the same H200: microseconds of 64 sequences with 8,192 shared and 256 own keys, by the segments
# of the level that overlaps the own parts (2026-11-16, graph replay).
TOGETHER = {2: 69.8, 3: 55.5, 4: 49.9, 5: 58.9, 6: 73.6}


def test_overlapped_levels_within_a_sixth_and_the_best_is_chosen():
    model = model_of()
    plans = {n: model._together(64 * 256 // PAGE, 64, 8192 // PAGE, n) for n in TOGETHER}
    predicted = {n: 1e6 * plans[n].seconds for n in TOGETHER}
    assert predicted == pytest.approx(TOGETHER, rel=1 / 6)
    chosen = model.together(64 * 256 // PAGE, 64, 8192 // PAGE)
    assert chosen == plans[min(TOGETHER, key=TOGETHER.get)]
    assert chosen[:3] == (64, 64, 4)


@pytest.mark.parametrize("queries", [1, 31, 64, 200])
@pytest.mark.parametrize("own_pages", [0, 64, 5000])
def test_both_parts_have_programs_and_no_other_number_of_segments_is_faster(own_pages, queries):
    model, pages = model_of(), 700
    best = model.together(own_pages, queries, pages)
    tiles = -(-queries // 32)
    assert best.own_programs >= 8 and best.own_programs % 8 == 0
    assert best.level_programs == tiles * 8 * best.segments
    assert best.own_programs + best.level_programs <= 132
    others = (model._together(own_pages, queries, pages, n) for n in range(1, 23))
    assert all(best.seconds <= other.seconds for other in others if other is not None)


def test_no_overlap_without_enough_programs():
    assert model_of().together(64, 17 * 32, 512) is None  # 17 tiles of 8 kv heads


def test_segments_have_a_minimum_length():
    assert model_of().together(0, 8, 2 * 512 // PAGE + 1).segments == 2
    assert model_of().together(0, 8, 3).segments == 1


@pytest.mark.parametrize(
    ("own_queries", "shape"),
    [
        (4, {}),
        (2, {"num_heads": 64}),
        (16, {"num_heads": 8}),
        (0, {"num_heads": 24}),  # 64 rows of a tile are not whole groups of 3
        (0, {"dtype": torch.float32}),
        (0, {"device": "cpu"}),
    ],
    ids=str,
)
def test_own_queries_follow_the_decode_kernel(own_queries, shape):
    assert model_of(**shape).occupancy.own_queries == own_queries


def test_no_own_queries_for_pages_that_hopper_does_not_read():
    q = torch.empty(64, 1, 32, 128, dtype=torch.bfloat16, device="meta")
    pages = lambda size, dim=128: torch.empty(1, size, 8, dim, dtype=q.dtype, device="meta")
    own = lambda k, v: costs(q, k, v).occupancy.own_queries
    assert own(pages(64), pages(64)) == 4
    assert own(pages(8), pages(8)) == own(pages(16), pages(16, 64)) == 0


def test_wide_heads_have_no_kernel_that_needs_segments():
    """They do not run on the Hopper forward, whose pipeline the other prices describe."""
    wide, narrow = (
        costs(torch.empty(64, 1, 32, dim, dtype=torch.bfloat16), pages, pages, H200)
        for dim in (512, 256)
        for pages in [torch.empty(1, PAGE, 8, dim, dtype=torch.bfloat16, device="meta")]
    )
    assert (narrow.occupancy.num_programs, wide.occupancy.num_programs) == (H200.processors, 1)
    assert wide.occupancy.own_queries == 0 and wide.products > 0
