"""Visibility of a tile of queries equals brute force over every cell."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import masks
from onchip.masks import Visibility

LENGTHS = (1, 63, 111, 129, 257, 799)


def brute_force(v):
    p = torch.arange(v.seqlen_q)[:, None] + v.seqlen_k - v.seqlen_q
    k = torch.arange(v.seqlen_k)
    left, right = v.window_size
    visible = torch.ones(v.seqlen_q, v.seqlen_k, dtype=torch.bool)
    if v.causal:
        visible &= k <= p
    if left is not None:
        visible &= k >= p - left
    if right is not None:
        visible &= k <= p + right
    return visible if v.mask is None else visible & v.mask.to_dense()[v.b, v.h]


def some_mask(kind, seqlen_q, seqlen_k):
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    table = torch.rand(2, 2, seqlen_q, seqlen_k, generator=generator) < 2e-5
    kinds = {
        "sparse": masks.dense(table),
        "window": masks.window(100, 20),
        "blocks": masks.butterfly() | masks.dense(table),
        "inverse": ~masks.window(200, 150),
    }
    return kinds[kind].build(2, 2, seqlen_q, seqlen_k)


@st.composite
def views(draw):
    seqlen_q, seqlen_k = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    kind = draw(st.sampled_from(["none", "sparse", "window", "blocks", "inverse"]))
    mask = some_mask(kind, seqlen_q, seqlen_k)
    planes = (1, 1) if mask is None else mask.shape[:2]
    size = st.none() | st.integers(0, 300)
    return Visibility(
        seqlen_q,
        seqlen_k,
        draw(st.booleans()),
        (draw(size), draw(size)),
        mask,
        draw(st.integers(0, planes[0] - 1)),
        draw(st.integers(0, planes[1] - 1)),
    )


def cut(draw, length):
    begin = draw(st.integers(0, length - 1))
    return begin, draw(st.integers(begin + 1, length))


@settings(max_examples=200, deadline=None)
@given(views(), st.data())
def test_spans_cover_every_visible_key_in_order(view, data):
    q0, q1 = cut(data.draw, view.seqlen_q)
    spans = view.spans(q0, q1)
    outside = brute_force(view)[q0:q1].any(0)
    end = -1
    for k0, k1 in spans:
        assert end < k0 < k1 <= view.seqlen_k
        end = k1
        outside[k0:k1] = False
    assert not outside.any()


@settings(max_examples=200, deadline=None)
@given(views(), st.data())
def test_a_tile_equals_the_brute_force_slice(view, data):
    (q0, q1), (k0, k1) = cut(data.draw, view.seqlen_q), cut(data.draw, view.seqlen_k)
    tile = view.tile(q0, q1, k0, k1, "cpu")
    expected = brute_force(view)[q0:q1, k0:k1]
    assert expected.all() if tile is None else torch.equal(tile, expected)


def test_spans_skip_empty_blocks():
    cu = torch.tensor([0, 256, 512, 1024], dtype=torch.int32)
    mask = (masks.document(cu) | masks.window(0, 0)).build(1, 1, 1024, 1024)
    view = Visibility(1024, 1024, mask=mask)
    assert view.spans(256, 384) == [(256, 512)]
    assert view.spans(128, 384) == [(0, 512)]
    assert view._replace(causal=True).spans(256, 384) == [(256, 384)]
    assert view._replace(window_size=(10, 0)).spans(600, 610) == [(590, 610)]


def test_spans_with_gaps():
    mask = masks.butterfly().build(1, 1, 1024, 1024)
    view = Visibility(1024, 1024, mask=mask)
    assert view.spans(0, 128) == [(0, 384), (512, 640)]
    assert view.spans(0, 256) == [(0, 768)]


def test_a_tile_of_full_blocks_needs_no_mask():
    mask = masks.causal().build(1, 1, 1024, 1024)
    view = Visibility(1024, 1024, mask=mask)
    assert view.tile(512, 640, 0, 512) is None
    assert Visibility(1024, 1024, causal=True).tile(512, 640, 0, 512) is None
    assert Visibility(1024, 1024).tile(0, 1024, 0, 1024) is None


def test_no_visible_key_gives_no_span():
    assert Visibility(300, 100, causal=True).spans(0, 128) == []
    assert Visibility(300, 0).spans(0, 128) == []
    nothing = (~masks.full()).build(1, 1, 300, 300)
    assert Visibility(300, 300, mask=nothing).spans(0, 300) == []


@pytest.mark.parametrize("rows", [(0, 9), (2, 5), (8, 9)])
@pytest.mark.parametrize("keys", [(0, 12), (3, 7), (11, 12)])
@pytest.mark.parametrize("window_size", [(None, None), (3, None), (None, 2), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_restricted_rule_equals_the_whole_on_its_range(rows, keys, window_size, causal):
    whole = Visibility(9, 12, causal, window_size)
    part = whole.restrict(rows, keys)
    cells = lambda rule, *at: torch.ones(1) if (t := rule.tile(*at)) is None else t
    size = rows[1] - rows[0], keys[1] - keys[0]
    want = cells(whole, *rows, *keys).expand(size).bool()
    assert torch.equal(cells(part, 0, size[0], 0, size[1]).expand(size).bool(), want)
    visible = torch.zeros(size[1], dtype=torch.bool)
    for lo, hi in part.spans(0, size[0]):
        visible[lo:hi] = True
    assert not want[:, ~visible].any()
