"""Masks of images and videos equal their published definitions, cell by cell."""

import copy
import inspect
import itertools
import math
import pickle
import random
from pathlib import Path

import pytest
import torch

import onchip
from onchip import masks
from onchip.masks import video
from onchip.masks.nodes import build
from onchip.masks.order import coordinates

PAGE = (Path(__file__).parents[2] / "docs" / "masks.md").read_text(encoding="utf-8")


def evaluate(shape, sees):
    """Bool (tokens, tokens) from sees(query, key) of coordinates, in raster order."""
    tokens = list(itertools.product(*map(range, shape)))
    return torch.tensor([[sees(q, k) for k in tokens] for q in tokens])


def find_neighbours(length, window, dilation, stride, causal):
    """NATTEN's definition along one axis: for each query, the set of keys that it sees."""
    found = []
    for x in range(length):
        group = [y for y in range(length) if y % dilation == x % dilation]
        i = group.index(x)
        stride_group = [j for j in range(len(group)) if j // stride == i // stride]
        if causal:
            last = stride_group[-1] if len(stride_group) == stride else len(group) - 1
            found.append({group[j] for j in range(i + 1) if last - j < window})
            continue
        middle = min(stride_group[0] + stride // 2, len(group) - 1)
        start = middle - window // 2
        while start < 0:
            start += 1
        while start + window > len(group):
            start -= 1
        found.append(set(group[start : start + window]))
    return found


def natten(shape, window, dilation, causal, stride):
    neighbours = [
        find_neighbours(*axis) for axis in zip(shape, window, dilation, stride, causal, strict=True)
    ]
    sees = lambda q, k: all(k[a] in neighbours[a][q[a]] for a in range(len(shape)))
    return evaluate(shape, sees)


def draw_case(seed):
    """(shape, window, dilation, causal), stride and tile of a random call."""
    draw = random.Random(seed)
    longest = {1: 160, 2: 13, 3: 6}[axes := draw.randint(1, 3)]
    shape = tuple(draw.randint(1, longest) for _ in range(axes))
    window = tuple(draw.randint(1, n) for n in shape)
    dilation = tuple(draw.randint(1, n // w) for n, w in zip(shape, window, strict=True))
    causal = tuple(draw.random() < 0.3 for _ in shape)
    stride = tuple(draw.randint(1, w) if draw.random() < 0.3 else 1 for w in window)
    tile = tuple(draw.randint(1, 4) for _ in shape)
    return (shape, window, dilation, causal), stride, tile


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_neighborhood_equals_the_definition_of_natten(first):
    for seed in range(first, first + 20):
        call, stride, tile = draw_case(seed)
        expected = natten(*call, stride)
        tokens = len(expected)
        raster = masks.neighborhood(*call, stride=stride)
        assert torch.equal(raster.build(1, 1, tokens, tokens).to_dense()[0, 0], expected), seed
        order = masks.tile_order(call[0], tile, call[2]).permutation
        tiled = masks.neighborhood(*call, stride=stride, tile=tile)
        found = tiled.build(1, 1, tokens, tokens).to_dense()[0, 0]
        assert torch.equal(found, expected[order][:, order]), seed
        if all(s == 1 for s in stride) and not any(call[3]):
            assert set(expected.sum(1).tolist()) == {math.prod(call[1])}


@pytest.mark.parametrize("seed", range(3, 200, 20))
def test_values_under_a_neighborhood(seed):
    call, stride, tile = draw_case(seed)
    expected = natten(*call, stride)
    q, k, v = torch.randn(3, 1, len(expected), 2, 8, dtype=torch.float64)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
    p = scores.masked_fill(~expected, -math.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v)
    mask = masks.neighborhood(*call, stride=stride)
    torch.testing.assert_close(onchip.attention(q, k, v, mask=mask), out)
    order = masks.tile_order(call[0], tile, call[2])
    mask = masks.neighborhood(*call, stride=stride, tile=tile)
    arranged = onchip.attention(*map(order.arrange, (q, k, v)), mask=mask)
    torch.testing.assert_close(order.restore(arranged), out)


def sliding_tile(shape, tile, window):
    """The mask function of FastVideo, for tiles that fill the shape and odd windows."""
    count = [n // t for n, t in zip(shape, tile, strict=True)]

    def sees(q, k):
        for a, w in enumerate(window):
            centre = min(max(q[a] // tile[a], w // 2), count[a] - 1 - w // 2)
            if abs(centre - k[a] // tile[a]) > w // 2:
                return False
        return True

    return evaluate(shape, sees)


@pytest.mark.parametrize(
    ("shape", "tile", "window"),
    [
        ((6, 8, 8), (2, 2, 4), (1, 3, 1)),
        ((6, 4, 10), (2, 2, 2), (3, 1, 5)),
        ((12, 20), (4, 5), (1, 3)),
        ((300,), (10,), (7,)),
    ],
    ids=str,
)
def test_sliding_tile_equals_its_definition(shape, tile, window):
    order = masks.tile_order(shape, tile).permutation
    n = len(order)
    found = masks.sliding_tile(shape, tile, window).build(1, 1, n, n).to_dense()[0, 0]
    assert torch.equal(found, sliding_tile(shape, tile, window)[order][:, order])


def test_tiles_that_do_not_fill_the_shape_are_smaller_at_its_end():
    shape, tile = (7, 9, 5), (3, 4, 2)
    order = masks.tile_order(shape, tile).permutation
    tiles = torch.stack([x // t for x, t in zip(coordinates(shape), tile, strict=True)], 1)[order]
    found = masks.sliding_tile(shape, tile, 1).build(1, 1, 315, 315).to_dense()[0, 0]
    assert torch.equal(found, (tiles[:, None] == tiles).all(-1))


def test_even_windows_of_tiles_have_one_more_tile_before_the_query():
    found = masks.sliding_tile((40,), 4, 4).build(1, 1, 40, 40).to_dense()[0, 0]
    assert found[20].nonzero().flatten().tolist() == list(range(12, 28))


@pytest.mark.parametrize("decay", [1.0, 0.4])
@pytest.mark.parametrize("shape", [(9, 4, 5), (20, 3), (12, 1, 1), (1, 7)], ids=str)
def test_radial_equals_its_definition(shape, decay):
    """Few tokens in a frame, so that frames are thinned out as well."""
    s = decay * math.prod(shape[1:])
    places = list(itertools.product(*map(range, shape[1:])))

    def sees(q, k):
        distance = abs(q[0] - k[0])
        apart = abs(places.index(q[1:]) - places.index(k[1:]))
        near = 2 ** math.floor(math.log2(max(distance, 1)))
        inside = near <= s and apart + 1 <= s / near
        thinned = near > s and apart == 0 and distance % math.ceil(near / s) == 0
        return distance <= 1 or k[0] < 1 or inside or thinned

    n = math.prod(shape)
    found = masks.radial(shape, decay=decay).build(1, 1, n, n).to_dense()[0, 0]
    assert torch.equal(found, evaluate(shape, sees))


def test_the_heads_of_sparse_videogen_equal_their_definitions():
    shape, n = (8, 5, 6), 240
    frame, place = torch.arange(n) // 30, torch.arange(n) % 30
    near = lambda x, reach: (x[:, None] - x).abs() <= reach
    spatial = masks.spatial_head(shape, 2).build(1, 1, n, n).to_dense()[0, 0]
    assert torch.equal(spatial, near(frame, 2) | (frame < 1))
    temporal = masks.temporal_head(shape, 3, sink_frames=2).build(1, 1, n, n).to_dense()[0, 0]
    assert torch.equal(temporal, near(place, 3) | (frame < 2))


VIDEO = (6, 5, 7)
MASKS = {
    "neighborhood": lambda **options: masks.neighborhood(VIDEO, (3, 4, 3), **options),
    "dilated": lambda **options: masks.neighborhood(
        VIDEO, (3, 2, 3), (2, 2, 1), (True, False, False), tile=2, **options
    ),
    "sliding_tile": lambda **options: masks.sliding_tile(VIDEO, (3, 2, 4), (1, 3, 1), **options),
    "radial": lambda **options: masks.radial(VIDEO, **options),
    "spatial_head": lambda **options: masks.spatial_head(VIDEO, 1, **options),
    "temporal_head": lambda **options: masks.temporal_head(VIDEO, 4, **options),
}
N = math.prod(VIDEO)


@pytest.mark.parametrize("name", MASKS)
def test_tokens_of_a_text_see_all_and_are_seen_by_all(name):
    within = MASKS[name]().build(1, 1, N, N).to_dense()[0, 0]
    expected = torch.ones(N + 20, N + 20, dtype=torch.bool)
    expected[:N, :N] = within
    mask = MASKS[name](text=20)
    assert torch.equal(mask.build(1, 1, N + 20, N + 20).to_dense()[0, 0], expected)
    assert torch.equal(mask.build(1, 1, N, N + 20).to_dense()[0, 0], expected[:N])


@pytest.mark.parametrize("name", MASKS)
def test_nodes_keep_their_contract(name):
    mask, node = MASKS[name](), MASKS[name]().node(2, 2, N, N, "cpu")
    dense = mask.build(2, 2, N, N).to_dense()
    assert torch.equal(node.cells(), dense)
    rows, cols = torch.arange(7, 150), torch.arange(2, N, 3)
    assert torch.equal(build(node.submask(rows, cols)).to_dense(), dense[:, :, rows][..., cols])
    assert len(node.identity()) == len(mask.node(2, 2, N, N, "cpu").identity())
    assert torch.equal((mask & masks.causal()).build(1, 1, N, N).to_dense(), dense.tril())
    assert torch.equal((~mask).build(1, 1, N, N).to_dense(), ~dense)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert repr(other) == repr(mask) and torch.equal(other.build(1, 1, N, N).to_dense(), dense)


@pytest.mark.slow
def test_masks_are_made_inside_a_compiled_function():
    attend = lambda x: onchip.attention(*x, mask=masks.neighborhood(VIDEO, 3, tile=(2, 5, 7)))
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    x = torch.randn(3, 1, N, 2, 16)
    torch.testing.assert_close(compiled(x), attend(x))


def test_an_order_is_undone_and_leaves_the_text():
    order = masks.tile_order((4, 6), (2, 3))
    first = order.arrange(torch.arange(24), dim=0)[:6]
    assert first.tolist() == [0, 1, 2, 6, 7, 8]
    x = torch.randn(2, 30, 3)
    assert torch.equal(order.restore(order.arrange(x)), x)
    assert torch.equal(order.arrange(x)[:, 24:], x[:, 24:])
    assert torch.equal(masks.tile_order((4, 6)).permutation, torch.arange(24))
    assert torch.equal(masks.tile_order((4, 6), 2**40).permutation, torch.arange(24))


def test_an_order_with_a_dilation_has_group_after_group():
    order = masks.tile_order((8,), 2, dilation=2).permutation
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_aligned_tiles_have_full_blocks_alone():
    """At the size of a video of 115,200 tokens: 13 G cells, built without them."""
    mask = masks.sliding_tile((30, 48, 80), (6, 8, 8), (3, 3, 3)).build(1, 1, 115_200, 115_200)
    assert (mask.num_full, mask.num_partial) == (900 * 81, 0)
    assert mask.nbytes < 1 << 20


def test_equal_tiles_of_a_video_are_stored_once():
    shape, n = (8, 16, 32), 4096
    mask = masks.neighborhood(shape, (3, 5, 7), tile=(4, 4, 8)).build(1, 1, n, n)
    assert mask.num_tiles < mask.num_partial / 2


def test_any_order_has_the_same_neighbours():
    """Over several blocks, which tiles of 40 tokens do not fill."""
    shape, n = (6, 13, 17), 1326
    raster = masks.neighborhood(shape, (3, 6, 5), (2, 1, 3)).build(1, 1, n, n).to_dense()[0, 0]
    tiled = masks.neighborhood(shape, (3, 6, 5), (2, 1, 3), tile=(2, 4, 5)).build(1, 1, n, n)
    order = masks.tile_order(shape, (2, 4, 5), (2, 1, 3)).permutation
    assert torch.equal(tiled.to_dense()[0, 0], raster[order][:, order])


def test_every_mask_has_a_row_and_a_picture_in_the_page():
    functions = dict(inspect.getmembers(video, inspect.isfunction))
    own = {name for name, fn in functions.items() if fn.__module__ == video.__name__}
    public = {name for name in own if not name.startswith("_")}
    assert public == set(MASKS) - {"dilated"} <= set(masks.__all__)
    for name in public:
        assert f"| `{name}(shape, " in PAGE and f"masks.{name}(shape, " in PAGE


def test_explain_prints_the_blocks():
    q = torch.randn(1, N, 2, 16)
    assert "PARTIAL" in str(onchip.explain(q, q, q, mask=MASKS["neighborhood"]()))


BAD = {
    "shape must have 1, 2 or 3 lengths, got 5": lambda: masks.neighborhood(5, 3),
    r"got \(2, 3, 4, 5\)": lambda: masks.radial((2, 3, 4, 5)),
    r"a length of shape must be an int >= 1, got 0": lambda: masks.tile_order((0, 3)),
    "an order of 6 tokens does not fit 5": lambda: masks.tile_order((2, 3)).arrange(
        torch.ones(1, 5)
    ),
    r"window must have 2 values for shape=\(8, 8\), got \(3,\)": lambda: masks.neighborhood(
        (8, 8), (3,)
    ),
    r"window must be an int >= 1, got 2.5": lambda: masks.neighborhood((8, 8), 2.5),
    r"window=5 \* dilation=2 must not exceed the length 8": lambda: masks.neighborhood((8,), 5, 2),
    "nor stride=4 the window": lambda: masks.neighborhood((8,), 3, stride=4),
    "causal=1 must be True or False": lambda: masks.neighborhood((8,), 3, causal=1),
    "must have 1 flags": lambda: masks.neighborhood((8,), 3, causal=(True, False)),
    r"window=\(4, 1\) must not exceed the \(3, 2\) tiles": lambda: masks.sliding_tile(
        (8, 8), (3, 4), (4, 1)
    ),
    "decay must be above 0 and at most 1, got 2": lambda: masks.radial((8, 8), decay=2),
    r"radial\(\): text must be an int >= 0, got -1": lambda: masks.radial((8, 8), text=-1),
    r"radial\(\) of shape \(8, 8\) has 64 tokens and text=0, got seqlen_q=65": lambda: masks.radial(
        (8, 8)
    ).build(1, 1, 65, 65),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
