"""The presets equal the rules in their docstrings, for any pair of lengths."""

import inspect
import itertools
from pathlib import Path

import pytest
import torch

import onchip
from onchip import masks
from onchip.masks import presets
from onchip.masks.diagonals import Diagonals
from onchip.masks.nodes import EMPTY, FULL, Grid
from tests.masks.cases import CALLS, PRESETS, make

SEQLENS = [(1, 1), (799, 799), (1024, 1024), (257, 1024), (300, 130), (63, 640)]
PAGE = Path(__file__).parents[2] / "docs" / "masks.md"


def evaluate(name, call, seqlen_q, seqlen_k):
    """The cells by the rule."""
    p, k = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    return PRESETS[name].rule(p, k, **call).expand(seqlen_q, seqlen_k)


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize(("name", "call"), CALLS, ids=str)
def test_a_preset_equals_its_rule(name, call, seqlens):
    built = make(name, call).build(2, 2, *seqlens)
    assert torch.equal(built.to_dense()[0, 0], evaluate(name, call, *seqlens))


@pytest.mark.parametrize(("name", "call"), CALLS, ids=str)
def test_the_cells_of_a_node_equal_its_blocks(name, call):
    """A graph reads the cells, a call outside of a graph the blocks."""
    cells = make(name, call).node(2, 2, 257, 640, "cpu").cells()
    assert torch.equal(cells.expand(2, 2, -1, -1)[1, 1], evaluate(name, call, 257, 640))


def test_every_preset_has_cases_and_a_row_and_a_picture_in_the_page():
    functions = dict(inspect.getmembers(presets, inspect.isfunction))
    own = {name for name, fn in functions.items() if fn.__module__ == presets.__name__}
    assert {name for name in own if not name.startswith("_")} == set(PRESETS) <= set(masks.__all__)
    page = PAGE.read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        parameters = list(inspect.signature(getattr(masks, name)).parameters)
        assert list(preset.least) == parameters
        assert f"| `{name}({', '.join(parameters)})` | " in page
        assert f"masks.{name}(" in page


def test_bigbird_draws_different_blocks_per_row_from_its_seed():
    grid = masks.bigbird(0, 4, 0, seed=3).build(1, 1, 2048, 2048).status()
    assert set(grid.sum(1).tolist()) <= {2 * 4, 2 * 5}  # four drawn blocks, and the diagonal
    again = masks.bigbird(0, 4, 0, seed=3).build(1, 1, 2048, 2048).status()
    other = masks.bigbird(0, 4, 0, seed=4).build(1, 1, 2048, 2048).status()
    assert torch.equal(grid, again) and not torch.equal(grid, other)


def test_bigbird_draws_for_positions_not_for_query_indices():
    whole = masks.bigbird(seed=1).build(1, 1, 1024, 1024).to_dense()
    tail = masks.bigbird(seed=1).build(1, 1, 300, 1024).to_dense()
    assert torch.equal(whole[:, :, -300:], tail)


def test_aligned_block_presets_have_no_partial_block():
    for mask in (masks.butterfly(), masks.bigbird(), masks.block_local(256)):
        assert mask.build(1, 1, 4096, 4096).num_partial == 0


def test_butterfly_has_one_block_per_binary_digit():
    grid = masks.butterfly().build(1, 1, 4096, 4096).status()
    assert set((grid == 2).sum(1).tolist()) == {1 + 5}


DISTANCES = {
    "dilated": lambda d: (d.abs() <= 600) & (d % 300 == 0),
    "far": lambda d: d > 333,
    "near and behind": lambda d: (d.abs() < 9) | (d == -200),
    "nothing": lambda d: d > 10**9,
    "everything": lambda d: d < 10**9,
}


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("name", DISTANCES)
def test_diagonals_decide_empty_and_full_blocks_exactly(name, seqlens):
    """Otherwise a build evaluates tiles of blocks that are EMPTY or FULL."""
    node = Diagonals(Grid(1, 2, *seqlens, torch.device("cpu")), DISTANCES[name])
    dense = masks.dense(node.cells()[0, 0]).build(1, 1, *seqlens).status().flatten().repeat(2)
    assert torch.equal(node.status(torch.arange(node.grid.num_blocks)), dense)
    candidates = node.candidates()
    assert torch.equal(candidates, candidates.unique())
    assert set((dense != EMPTY).nonzero().flatten().tolist()) <= set(candidates.tolist())
    if name == "everything":
        assert set(dense.tolist()) == {FULL}


def test_dilated_needs_few_blocks_and_tiles():
    built = masks.dilated(8, 1000).build(1, 1, 16384, 16384)
    assert built.num_tiles <= 125  # 8,000 is the least multiple of 128 and 1,000: 125 diagonals
    far = masks.dilated(2, 5000).node(1, 1, 16384, 16384, "cpu").candidates()
    assert len(far) < 5 * 2 * 128  # two diagonals of blocks for each of five distances


def test_sizes_that_no_distance_reaches():
    itself = torch.eye(300, dtype=torch.bool)
    for dilation in (300, 2**31, 2**70):
        found = masks.dilated(2**70, dilation).build(1, 1, 300, 300).to_dense()
        assert torch.equal(found[0, 0], itself)


def test_a_preset_within_documents_equals_the_preset_in_each_sequence():
    """The form that replaces varlen_attention(mask=...)."""
    q, k, v = torch.randn(3, 1, 333, 2, 16, dtype=torch.float64)
    offsets = [0, 100, 101, 333]
    mask = masks.dilated(9, 5) & masks.causal()
    packed = onchip.attention(q, k, v, mask=masks.document(offsets) & mask)
    for start, end in itertools.pairwise(offsets):
        alone = onchip.attention(*(x[:, start:end] for x in (q, k, v)), mask=mask)
        torch.testing.assert_close(packed[:, start:end], alone)
