"""Strips of 192 queries: the lists that a forward with three warpgroups walks."""

import gc
from itertools import product

import pytest
import torch

from onchip import masks
from onchip.kernels.strips import _CACHE, BIT_TILE, CUT, FAR, UNSEEN, strips_of
from onchip.masks.bits import unpack

EMPTY, PARTIAL, FULL = range(3)
ROWS = 192
SIZES = [(799, 799), (128, 300), (1, 1), (192, 5000), (1500, 1111), (300, 1280), (3000, 3000)]


def some_blocks(seqlen_q, seqlen_k, seed=0):
    """Two batch entries, three heads: a third of the blocks each EMPTY, FULL and PARTIAL."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.rand(2, 3, -(-seqlen_q // 128), -(-seqlen_k // 128), generator=draw)
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :seqlen_q, :seqlen_k]
    bits = torch.rand(kinds.shape, generator=draw) < 0.5
    return masks.dense((bits & (kinds < 0.66)) | (kinds < 0.33))


def build(rule, seqlen_q, seqlen_k):
    return rule.build(2, 3, seqlen_q, seqlen_k, "cpu")


def walks(mask):
    """For each side of each strip: (blocks of status(), its entries, counts, the side); an entry is
    (block, its value in the side's row).
    """
    heads, entries, _ = strips_of(mask)
    planes_b, planes_h, seqlen_q, _ = mask.shape
    for b, h, strip in product(range(planes_b), range(planes_h), range(-(-seqlen_q // ROWS))):
        status = mask.status(b, h)
        first, *counts = heads[b, h, strip].tolist()
        stored = entries[first : first + sum(counts)].tolist()
        for side in range(2):
            row = 3 * strip // 2 + side
            blocks = status[row] if row < len(status) else torch.zeros_like(status[0])
            yield blocks, [(n, parts[side]) for n, *parts in stored], counts, side


@pytest.mark.parametrize("lengths", SIZES, ids=str)
@pytest.mark.parametrize(
    "make", [some_blocks, lambda *_: masks.causal(), lambda *_: masks.window(200, 0)],
    ids=["blocks", "causal", "window"],
)  # fmt: skip
def test_both_sides_list_their_rows(lengths, make):
    mask = build(make(*lengths), *lengths)
    for blocks, pairs, _, _ in walks(mask):
        visible = [(n, part) for n, part in pairs if part != UNSEEN]
        assert sorted(n for n, _ in visible) == (blocks != EMPTY).nonzero().flatten().tolist()
        for n, part in visible:
            assert blocks[n] == (PARTIAL if part >= BIT_TILE else FULL)
            assert bool(part & CUT) == (128 * (n + 1) > lengths[1])


def test_entries_have_the_bit_tiles_of_their_blocks():
    n, compared = 700, 0
    mask = build(some_blocks(n, n), n, n)
    dense = torch.nn.functional.pad(mask.to_dense(), (0, 68, 0, 68))
    tiles = unpack(mask.tiles)
    heads, entries, _ = strips_of(mask)
    for b, h, strip, side in product(range(2), range(3), range(-(-n // ROWS)), range(2)):
        first, *counts = heads[b, h, strip].tolist()
        row = 3 * strip // 2 + side
        for block, *parts in entries[first : first + sum(counts)].tolist():
            if parts[side] >= BIT_TILE:
                cells = dense[b, h, 128 * row :, 128 * block :][:128, :128]
                assert torch.equal(tiles[parts[side] // BIT_TILE - 1], cells)
                compared += 1
    assert compared > 50


@pytest.mark.parametrize("lengths", SIZES, ids=str)
def test_the_order_of_entries_lets_no_warpgroup_wait_for_ever(lengths):
    """The kernel relies on the formula of a side's first and last entry, on FAR for the steps
    between them, and on at most one entry of the other side between two of its own and, from the
    last entry to the first, after them. A warpgroup that skips more entries while it holds a tile,
    or before it takes the next strip, would deadlock.
    """
    mask = build(some_blocks(*lengths), *lengths)
    for _, pairs, (both, *alone), side in walks(mask):
        own = [e for e, (_, part) in enumerate(pairs) if part != UNSEEN]
        others = alone[1 - side]
        assert own == [j + max(min(j - both + side, others), 0) for j in range(len(own))]
        assert len(own) == both + alone[side]
        for before, e in zip(own, own[1:], strict=False):
            assert e - before == 1 + (pairs[e][1] & FAR)
        assert not own or own[0] == pairs[own[0]][1] & FAR


def test_strips_are_built_once_and_freed_with_their_mask():
    mask = build(masks.causal(), 500, 500)
    before = len(_CACHE)
    assert strips_of(mask) is strips_of(mask)
    again = type(mask).from_tensors(mask.tensors(), 500, 500)
    assert strips_of(again) is strips_of(mask)
    assert len(_CACHE) == before + 1
    del mask, again
    gc.collect()
    assert len(_CACHE) == before


def test_strips_of_a_modified_mask_are_built_again():
    mask = build(some_blocks(500, 500), 500, 500)
    before = strips_of(mask)
    mask.rows.partial_tiles.copy_(mask.rows.partial_tiles.flip(0))
    after = strips_of(mask)
    assert after is not before and not torch.equal(after.entries, before.entries)
    rows = mask.rows._replace(partial_tiles=mask.rows.partial_tiles.flip(0))
    other = type(mask)(500, 500, rows, mask.cols, mask.tiles)
    assert torch.equal(strips_of(other).entries, before.entries)


def test_the_shared_fraction_of_a_strip():
    """Neighbouring rows of a window see the same keys, rows of random blocks do not."""
    n = 128 * 60
    draw = torch.rand(1, 1, 60, 60, generator=torch.Generator().manual_seed(0))
    few = (draw < 0.1).repeat_interleave(128, 2).repeat_interleave(128, 3)
    shared = lambda rule: strips_of(rule.build(1, 1, n, n, "cpu")).shared
    assert shared(masks.dense(few)) == pytest.approx(1 / 1.9, abs=0.02)
    assert 0.8 < shared(masks.window(1023, 0)) < 1.0 and shared(masks.causal()) > 0.95


def test_an_empty_mask():
    mask = build(masks.dense(torch.zeros(1, 1, 300, 300, dtype=torch.bool)), 300, 300)
    heads, entries, _ = strips_of(mask)
    assert heads[..., 1:].sum() == 0 and len(entries) == 1
