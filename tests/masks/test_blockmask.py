"""BlockMask: lists, their transpose, and the cost of a build."""

import statistics
import time

import pytest
import torch

from onchip import masks
from onchip.masks import BlockMask

LONG = 131_072


def entries(offsets, indices, tiles=None):
    """{(b, h, row, index): tile} of compressed lists, checking that every row is ascending."""
    tile_of = {}
    for b, plane in enumerate(offsets.tolist()):
        for h, bounds in enumerate(plane):
            for row, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
                listed = indices[begin:end].tolist()
                assert listed == sorted(set(listed))
                for at, index in enumerate(listed):
                    tile_of[b, h, row, index] = 0 if tiles is None else int(tiles[begin + at])
    return tile_of


def random_mask():
    table = torch.rand(2, 3, 799, 500, generator=torch.Generator().manual_seed(1)) < 0.001
    return (masks.dense(table) | masks.window(40, 0)).build(2, 3, 799, 500)


@pytest.mark.parametrize("kind", ["random", "causal", "documents"])
def test_columns_are_the_transpose_of_rows(kind):
    cu = torch.tensor([0, 100, 100, 450, 799], dtype=torch.int32)
    mask = {
        "random": random_mask,
        "causal": lambda: masks.causal().build(1, 1, 257, 799),
        "documents": lambda: masks.document(cu).build(1, 1, 799, 799),
    }[kind]()
    r, c = mask.rows, mask.cols
    full = entries(r.full_offsets, r.full_indices)
    partial = entries(r.partial_offsets, r.partial_indices, r.partial_tiles)
    assert len(full) == mask.num_full and len(partial) == mask.num_partial
    assert not full.keys() & partial.keys()
    flipped = entries(c.full_offsets, c.full_indices)
    assert {(b, h, i, j) for b, h, j, i in flipped} == full.keys()
    flipped = entries(c.partial_offsets, c.partial_indices, c.partial_tiles)
    assert {(b, h, i, j): tile for (b, h, j, i), tile in flipped.items()} == partial


def test_tensors_are_int32_contiguous_and_round_trip():
    mask = random_mask()
    tensors = mask.tensors()
    assert len(tensors) == 11
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
    again = BlockMask.from_tensors(tensors, mask.seqlen_q, mask.seqlen_k)
    assert torch.equal(again.to_dense(), mask.to_dense()) and again.shape == (2, 3, 799, 500)


@pytest.mark.parametrize("lo, hi", [(0, 1), (1, 3), (2, 3), (0, 3)])
def test_heads_of_a_mask_are_a_mask(lo, hi):
    mask = random_mask()
    part = mask.of_heads(lo, hi)
    assert part.shape == (2, hi - lo, 799, 500) and part is mask.of_heads(lo, hi)
    assert torch.equal(part.to_dense(), mask.to_dense()[:, lo:hi])
    r, c = part.rows, part.cols
    full = entries(c.full_offsets, c.full_indices).keys()
    assert {(b, h, i, j) for b, h, j, i in full} == entries(r.full_offsets, r.full_indices).keys()
    assert part.host.run_offsets[-1] == len(part.host.run_starts)


def test_cells_outside_the_lengths_are_zero_in_the_tiles():
    mask = (~masks.mod(lambda b, h, q, k: (q + k) % 2 == 0)).build(1, 1, 1, 130)
    cells = masks.bits.unpack(mask.tiles)
    assert not cells[:, 1:].any()
    last = int(mask.rows.partial_tiles[1])
    assert not cells[last, 0, 2:].any()


def test_a_ragged_block_is_full_when_its_cells_inside_are_visible():
    mask = masks.full().build(1, 1, 130, 200)
    assert (mask.num_full, mask.num_partial, mask.num_tiles) == (4, 0, 0)


def test_status_and_density_and_repr():
    mask = masks.causal().build(1, 1, 384, 384)
    assert mask.status().tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    assert mask.density() == 6 / 9
    assert repr(mask) == (
        "BlockMask(1 x 1 x 384 x 384, full=3, partial=3, tiles=1, density=66.67%)"
    )


def test_moving_to_the_same_device_is_free():
    mask = masks.causal().build(1, 1, 384, 384)
    assert mask.to("cpu") is mask


def long_documents(ragged):
    if not ragged:
        return torch.arange(33, dtype=torch.int32) * (LONG // 32)
    cuts = torch.randperm(LONG - 1, generator=torch.Generator().manual_seed(0))[:31] + 1
    ends = torch.tensor([0, LONG])
    return torch.cat([ends, cuts]).sort().values.int()


@pytest.fixture
def one_thread():
    """One thread: several threads that wait for each other would measure other processes' load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("ragged", [False, True])
def test_documents_over_131072_tokens_are_built_in_milliseconds(ragged, one_thread):
    cu, times = long_documents(ragged), []
    for _ in range(5):
        start = time.perf_counter()
        mask = (masks.document(cu) & masks.causal()).build(1, 1, LONG, LONG)
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.1  # 5 to 10 ms on a quiet core
    if not ragged:
        assert (mask.num_full, mask.num_partial, mask.num_tiles) == (32 * 496, 1024, 1)


@pytest.mark.parametrize("ragged", [False, True])
def test_memory_is_proportional_to_the_blocks_that_are_not_empty(ragged):
    mask = (masks.document(long_documents(ragged)) & masks.causal()).build(1, 1, LONG, LONG)
    elements = sum(t.numel() for t in mask.tensors()) - mask.tiles.numel()
    assert elements == 2 * (mask.num_full + 2 * mask.num_partial) + 4 * (LONG // 128 + 1)
    assert mask.num_tiles <= 5 * 32  # a few per document, however long


def test_a_long_window_costs_its_blocks():
    mask = masks.window(1000, 0).build(1, 1, 1 << 20, 1 << 20)
    assert mask.num_full + mask.num_partial < 10 * 8192 and mask.num_tiles <= 3
