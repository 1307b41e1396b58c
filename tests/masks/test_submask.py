"""A submask is the mask at some rows and columns."""

import pytest
import torch

from onchip import masks
from onchip.masks.mods import node_of
from onchip.masks.nodes import Interval, build
from tests.masks.cases import CALLS, PRESETS, make

SEQLEN = 700
CU = torch.tensor([0, 3, 130, 131, 500, 700], dtype=torch.int32)
DENSE = torch.rand(SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(0)) < 0.3
PER_PLANE = torch.rand(2, 3, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(1)) < 0.3
RULES = {
    "causal": masks.causal(),
    "window": masks.window(200, 30),
    "document": masks.document(CU) & masks.causal(),
    "prefix per entry": masks.prefix_lm(torch.tensor([5, 300])),
    "not": ~masks.document(CU),
    "or": masks.window(50, 0) | masks.prefix_lm(64),
    "mod": masks.mod(lambda b, h, q, k: (q - k) % (h + 2) == b),
    "mod and causal": masks.mod(lambda b, h, q, k: (q ^ k) & 8 == 0) & masks.causal(),
    "dense": masks.dense(DENSE),
    "dense per plane": masks.dense(PER_PLANE),
    **{f"{name} {call}": make(name, call) for name, call in CALLS},
}
PICKS = {
    "all": torch.arange(SEQLEN),
    "chunk": torch.arange(97, 431),
    "aligned chunk": torch.arange(128, 512),
    "zigzag": torch.cat([torch.arange(0, 111), torch.arange(589, 700)]),
    "striped": torch.arange(2, SEQLEN, 3),
    "one": torch.tensor([699]),
    "any": torch.randperm(SEQLEN, generator=torch.Generator().manual_seed(2))[:250].sort().values,
}
PAIRS = [("all", "all"), ("chunk", "zigzag"), ("aligned chunk", "aligned chunk"), ("any", "any")]
PAIRS += [("striped", "striped"), ("zigzag", "chunk"), ("one", "any"), ("aligned chunk", "chunk")]


@pytest.mark.parametrize("built", [False, True], ids=["rule", "data"])
@pytest.mark.parametrize("name", RULES)
def test_a_submask_has_the_cells_of_the_whole(name, built):
    planes, lengths = (2, 3), (SEQLEN, SEQLEN)
    whole = RULES[name].build(*planes, *lengths)
    dense = whole.to_dense()
    node = node_of(whole if built else RULES[name], planes, lengths, torch.device("cpu"))
    for rows, cols in PAIRS:
        rows, cols = PICKS[rows], PICKS[cols]
        cells = build(node.submask(rows, cols)).to_dense()
        assert torch.equal(cells, dense[:, :, rows][:, :, :, cols])


def test_intervals_stay_intervals():
    """Otherwise a ring round of causal documents would not be recognised as such."""
    node = node_of(RULES["document"], (1, 1), (SEQLEN, SEQLEN), torch.device("cpu"))
    assert isinstance(node.submask(PICKS["zigzag"], PICKS["any"]), Interval)


def identify(mask):
    parts = mask.node(1, 1, 400, 400, torch.device("cpu")).identity()
    return [part if isinstance(part, str) else part.tolist() for part in parts]


@pytest.mark.parametrize("name", PRESETS)
def test_masks_with_other_cells_have_another_identity(name):
    """Otherwise ranks with different masks would not notice."""
    known = make(name)
    cells = known.build(1, 1, 400, 400).to_dense()
    assert identify(known) == identify(make(name))
    for other in [*(make(name, call) for call in PRESETS[name].calls), ~known]:
        is_equal = torch.equal(cells, other.build(1, 1, 400, 400).to_dense())
        assert is_equal or identify(known) != identify(other)
