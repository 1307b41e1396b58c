"""Layouts: every position has one owner, whatever the length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import masks
from onchip.parallel.sharding import (
    IGNORE_INDEX,
    as_layout,
    balanced,
    contiguous,
    striped,
    visible_cells,
    zigzag,
)

CAUSAL = masks.causal()
MAKERS = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "contiguous of blocks": lambda size: contiguous(size, 128),
    "zigzag of blocks": lambda size: zigzag(size, 128),
    "balanced": lambda size: balanced(size, CAUSAL),
}
layouts = st.builds(
    lambda name, size: MAKERS[name](size), st.sampled_from([*MAKERS]), st.integers(1, 9)
)
lengths = st.one_of(st.integers(0, 40), st.integers(0, 1100))


@given(layouts, lengths)
@settings(max_examples=200, deadline=None)
def test_every_position_has_one_owner_and_ranks_ascend(layout, seqlen):
    parts = [layout.positions(rank, seqlen) for rank in range(layout.size)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(seqlen))
    assert all(bool((part.diff() > 0).all()) for part in parts)
    assert layout.lengths(seqlen) == [len(part) for part in parts]


@given(layouts, lengths)
@settings(max_examples=100, deadline=None)
def test_unshard_is_the_inverse_of_shard(layout, seqlen):
    for x, dim in ((torch.arange(3 * seqlen).view(3, seqlen, 1), 1), (torch.arange(seqlen), -1)):
        parts = [layout.shard(x, rank, dim) for rank in range(layout.size)]
        assert torch.equal(layout.unshard(parts, dim), x)
        for rank, part in enumerate(parts):
            assert torch.equal(part, x.index_select(dim, layout.positions(rank, seqlen)))


@pytest.mark.parametrize("make", [contiguous, zigzag, striped])
@pytest.mark.parametrize("seqlen", [63, 64, 65, 799, 1023])
def test_lengths_differ_by_at_most_two_positions(make, seqlen):
    held = make(8).lengths(seqlen)
    assert max(held) - min(held) <= 2


@st.composite
def packings(draw):
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8))
    return torch.tensor([0, *sizes]).cumsum(0).int()


@given(layouts, packings())
@settings(max_examples=100, deadline=None)
def test_documents_keep_their_positions_labels_and_offsets(layout, cu):
    seqlen = int(cu[-1])
    position, document, label = [], [], []
    for d in range(len(cu) - 1):
        size = int(cu[d + 1] - cu[d])
        position += range(size)
        document += [d] * size
        label += [*range(int(cu[d]) + 1, int(cu[d + 1])), IGNORE_INDEX][-size:] if size else []
    for rank in range(layout.size):
        at = layout.positions(rank, seqlen)
        assert torch.equal(layout.position_ids(rank, seqlen, cu), torch.tensor(position).long()[at])
        tokens = torch.arange(seqlen)
        assert torch.equal(layout.labels(tokens, rank, 0, cu), torch.tensor(label).long()[at])
        own = layout.cu_seqlens(rank, cu)
        assert own.dtype == torch.int32
        counts = torch.bincount(torch.tensor(document).long()[at], minlength=len(cu) - 1)
        assert torch.equal(own.diff().long(), counts)


def test_labels_of_one_sequence_ignore_its_last_token_only():
    tokens = torch.arange(11).view(1, 11)
    parts = [zigzag(3).labels(tokens, rank) for rank in range(3)]
    assert zigzag(3).unshard(parts).tolist() == [[*range(1, 11), IGNORE_INDEX]]


def causal_work(layout, seqlen):
    return torch.tensor(
        [float((layout.positions(r, seqlen) + 1).sum()) for r in range(layout.size)]
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_even_under_zigzag_and_two_minus_one_over_p_without(size):
    seqlen = 256 * size
    spread = lambda layout: float((w := causal_work(layout, seqlen)).max() / w.mean())
    assert spread(contiguous(size)) == pytest.approx(2 - 1 / size, rel=1e-2)
    assert spread(zigzag(size)) == pytest.approx(1.0, abs=1e-6)
    assert spread(striped(size)) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        masks.document(torch.tensor([0, 700, 750, 1900, 4096], dtype=torch.int32)) & CAUSAL,
        masks.prefix_lm(1500),
        masks.window(300, 0),
    ],
    ids=str,
)
def test_balanced_evens_out_any_mask(mask):
    size, seqlen = 4, 4096
    layout, dense = balanced(size, mask), mask.build(1, 1, seqlen, seqlen).to_dense()[0, 0]
    spread = lambda layout: max(w := work(layout)) / (sum(w) / size)
    work = lambda layout: [int(dense[layout.positions(r, seqlen)].sum()) for r in range(size)]
    assert set(layout.lengths(seqlen)) == {seqlen // size}
    assert spread(layout) < 1.05
    assert spread(layout) <= spread(contiguous(size))


@pytest.mark.parametrize("seqlen", [1, 127, 128, 300])
def test_visible_cells_count_every_plane(seqlen):
    mask = masks.mod(lambda b, h, q, k: (q + b * k) % (h + 2) == 0).build(2, 3, seqlen, seqlen)
    blocks = mask.to_dense().sum((0, 1, 3)).split(128)
    assert visible_cells(mask).tolist() == [int(block.sum()) for block in blocks]


def test_wrong_layout_arguments_are_refused():
    with pytest.raises(ValueError, match="size=0 must be an int of at least 1"):
        zigzag(0)
    with pytest.raises(ValueError, match="'contiguous', 'zigzag', 'striped'"):
        as_layout("spiral", 2)
    with pytest.raises(ValueError, match="for 2 ranks, the group has 3"):
        as_layout(zigzag(2), 3)
    with pytest.raises(ValueError, match="rank=2 is not one of the layout's 2 ranks"):
        zigzag(2).shard(torch.zeros(1, 4), 2)
    with pytest.raises(ValueError, match="rank 0 holds 3 of 6 positions, its part has 4"):
        contiguous(2).unshard([torch.zeros(1, 4), torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="2 ranks, got the parts of 1"):
        contiguous(2).unshard([torch.zeros(1, 4)])
    with pytest.raises(ValueError, match="must end at seqlen=7, got 6"):
        zigzag(2).position_ids(0, 7, torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match="must start at 0 and never fall"):
        zigzag(2).cu_seqlens(0, torch.tensor([0, 3, 2]))
    with pytest.raises(ValueError, match="a Mask or a BlockMask, got function"):
        balanced(2, lambda b, h, q, k: q >= k)
