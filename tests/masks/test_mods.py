"""Every mask, alone and combined, equals the brute-force rule, by cells and by blocks."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import masks
from tests.masks.cases import PRESETS, make

BATCH, HEADS = 2, 3
LENGTHS = (1, 63, 111, 128, 129, 257, 384, 799)


class Case(NamedTuple):
    """A mask and its rule on (b, h, q, k, p) index tensors."""

    mask: masks.Mask
    rule: object


def dense_rule(rule, seqlen_q, seqlen_k):
    b, h = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    q, k = torch.arange(seqlen_q).view(-1, 1), torch.arange(seqlen_k)
    visible = rule(b, h, q, k, q + seqlen_k - seqlen_q)
    return torch.as_tensor(visible).expand(BATCH, HEADS, seqlen_q, seqlen_k)


def block_counts(dense):
    """Brute-force number of FULL and PARTIAL blocks."""
    full = partial = 0
    for rows in dense.split(128, dim=-2):
        for block in rows.split(128, dim=-1):
            some, every = block.flatten(2).any(2), block.flatten(2).all(2)
            full += int(every.sum())
            partial += int((some & ~every).sum())
    return full, partial


def assert_is(built, dense):
    """`built` is exactly `dense` (batch, heads, seqlen_q, seqlen_k)."""
    assert torch.equal(built.to_dense().expand(dense.shape), dense)
    planes = dense[: built.shape[0], : built.shape[1]]
    assert (built.num_full, built.num_partial) == block_counts(planes)
    assert len(torch.unique(built.tiles.flatten(1), dim=0)) == built.num_tiles
    assert built.num_tiles <= built.num_partial


def cu_seqlens(cuts, seqlen):
    inner = sorted(min(cut, seqlen) for cut in cuts)
    return torch.tensor([0, *inner, seqlen], dtype=torch.int32)


def document_case(cuts_q, cuts_k, seqlen_q, seqlen_k):
    cu_q, cu_k = cu_seqlens(cuts_q, seqlen_q), cu_seqlens(cuts_k, seqlen_k)

    def rule(b, h, q, k, p):
        doc_q = torch.searchsorted(cu_q[1:].contiguous(), q.int(), right=True)
        doc_k = torch.searchsorted(cu_k[1:].contiguous(), k.int(), right=True)
        return doc_q == doc_k

    return Case(masks.document(cu_q, cu_k), rule)


def window_case(left, right):
    def rule(b, h, q, k, p):
        visible = torch.ones_like(p - k, dtype=torch.bool)
        if left is not None:
            visible = visible & (p - left <= k)
        return visible if right is None else visible & (k <= p + right)

    return Case(masks.window(left, right), rule)


def table_case(shape, seed):
    table = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    return Case(masks.dense(table), lambda b, h, q, k, p: table)


def prefix_case(value):
    per_batch = torch.tensor([value, value // 2])
    rule = lambda b, h, q, k, p: (k <= p) | (k < per_batch[b])
    return Case(masks.prefix_lm(per_batch), rule)


def padding_case(value):
    lengths = torch.tensor([value // 3, value])
    return Case(masks.padding(lengths), lambda b, h, q, k, p: k < lengths[b])


def spans_case(batch, seqlen_q, seqlen_k, seed):
    """Bounds that may exceed the last key, or have an end below the start."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(seqlen_k + 9, (batch, 1, seqlen_q, 2), generator=generator).int()
    lo, hi = bounds[..., 0], bounds[..., 1]
    rule = lambda b, h, q, k, p: (lo[b % batch, 0, q] <= k) & (k < hi[b % batch, 0, q])
    return Case(masks.spans(bounds), rule)


MODS = [
    lambda b, h, q, k: (q - k) % 3 == 0,
    lambda b, h, q, k: q >= k + 50 * h,
    lambda b, h, q, k: (b == 1) | (q // 100 == k // 100),
    lambda b, h, q, k: True,
]


def mod_case(fn):
    return Case(masks.mod(fn), lambda b, h, q, k, p: fn(b, h, q, k))


def leaves(seqlen_q, seqlen_k):
    """Strategy for every kind of leaf that fits the lengths."""
    size = st.none() | st.integers(0, 300)
    cuts = st.lists(st.integers(0, 800), min_size=3, max_size=3)
    shapes = st.sampled_from([(), (1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)])
    return st.one_of(
        st.just(Case(masks.causal(), lambda b, h, q, k, p: k <= p)),
        st.just(Case(masks.full(), lambda b, h, q, k, p: k >= 0)),
        st.builds(window_case, size, size),
        st.builds(document_case, cuts, cuts, st.just(seqlen_q), st.just(seqlen_k)),
        st.integers(0, seqlen_k).map(prefix_case),
        st.integers(0, seqlen_k).map(padding_case),
        st.builds(
            lambda b, x: spans_case(b, seqlen_q, seqlen_k, x),
            st.sampled_from([1, BATCH]),
            st.integers(0, 9),
        ),
        st.sampled_from(MODS).map(mod_case),
        st.builds(lambda s, x: table_case((*s, seqlen_q, seqlen_k), x), shapes, st.integers(0, 9)),
    )


def combine(parts):
    return st.one_of(
        st.builds(
            lambda x, y: Case(x.mask & y.mask, lambda *at: x.rule(*at) & y.rule(*at)), parts, parts
        ),
        st.builds(
            lambda x, y: Case(x.mask | y.mask, lambda *at: x.rule(*at) | y.rule(*at)), parts, parts
        ),
        parts.map(lambda x: Case(~x.mask, lambda *at: torch.as_tensor(x.rule(*at)).logical_not())),
    )


@st.composite
def expressions(draw):
    seqlen_q, seqlen_k = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    case = draw(st.recursive(leaves(seqlen_q, seqlen_k), combine, max_leaves=4))
    return case, seqlen_q, seqlen_k


@settings(max_examples=100, deadline=None)
@given(expressions())
def test_any_expression_equals_its_rule(drawn):
    case, seqlen_q, seqlen_k = drawn
    built = case.mask.build(BATCH, HEADS, seqlen_q, seqlen_k)
    assert_is(built, dense_rule(case.rule, seqlen_q, seqlen_k))


@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_intervals_at_odd_lengths(seqlen_q, seqlen_k):
    causal = Case(masks.causal(), lambda b, h, q, k, p: k <= p)
    documents = document_case([40, 40, 300], [10, 129, 129], seqlen_q, seqlen_k)
    for case in (causal, window_case(130, 5), documents, prefix_case(seqlen_k)):
        built = case.mask.build(BATCH, HEADS, seqlen_q, seqlen_k)
        assert_is(built, dense_rule(case.rule, seqlen_q, seqlen_k))
        inverse = (~case.mask).build(BATCH, HEADS, seqlen_q, seqlen_k)
        assert torch.equal(inverse.to_dense(), ~built.to_dense())


@pytest.mark.parametrize("seqlens", [(0, 0), (0, 200), (200, 0)])
def test_zero_lengths_give_a_mask_without_blocks(seqlens):
    cu_q, cu_k = cu_seqlens([], seqlens[0]), cu_seqlens([], seqlens[1])
    table = torch.ones(*seqlens, dtype=torch.bool)
    kinds = [masks.causal(), masks.document(cu_q, cu_k), masks.mod(MODS[1]), masks.dense(table)]
    for mask in [*kinds, ~kinds[0], kinds[0] & kinds[2], masks.bigbird(), *map(make, PRESETS)]:
        built = mask.build(BATCH, HEADS, *seqlens)
        assert built.shape[2:] == seqlens
        assert (built.num_full, built.num_partial, built.density()) == (0, 0, 0.0)
        assert built.to_dense().shape == built.shape


def test_planes_exist_only_if_the_rule_depends_on_them():
    flat = masks.causal() & masks.mod(MODS[0])
    per_head = masks.causal() | masks.mod(MODS[1])
    per_batch = ~masks.padding(torch.tensor([5, 7]))
    shapes = [m.build(BATCH, HEADS, 100, 100).shape[:2] for m in (flat, per_head, per_batch)]
    assert shapes == [(1, 1), (1, HEADS), (BATCH, 1)]
    assert (per_head & per_batch).build(BATCH, HEADS, 100, 100).shape[:2] == (BATCH, HEADS)


def test_a_mod_may_look_up_tables_by_index():
    document_of = torch.arange(200).div(70, rounding_mode="floor").expand(BATCH, -1).clone()
    document_of[1] = 0
    mask = masks.mod(lambda b, h, q, k: document_of[b][q] == document_of[b][k])
    built = mask.build(BATCH, HEADS, 200, 200)
    assert built.shape[:2] == (BATCH, 1)
    expected = document_of[:, None, :, None] == document_of[:, None, None, :]
    assert torch.equal(built.to_dense(), expected)


def test_a_mod_is_evaluated_on_open_blocks_only():
    cells = []

    def fn(b, h, q, k):
        return counted(q, k) >= 0

    def counted(q, k):
        cells.append(1)
        return q - k

    # vmap calls the function once per chunk of 64 blocks: 32 diagonal blocks are one chunk, plus
    # the runs on scalars that find the dependence on planes.
    mask = masks.block_local(128) & masks.mod(fn)
    built = mask.build(1, 1, 4096, 4096)
    assert built.num_partial == 32 and built.num_tiles == 1
    assert len(cells) == 4 + 1


def test_causal_needs_one_tile():
    for seqlen in (128, 1024, 4096):
        assert masks.causal().build(1, 1, seqlen, seqlen).num_tiles == 1
    assert masks.causal().build(1, 1, 1000, 1000).num_tiles <= 2
    assert masks.causal().build(1, 1, 1000, 1255).num_tiles <= 4


def test_builds_are_cached_and_bounded():
    mask = masks.causal()
    first = mask.build(2, 4, 200, 200)
    assert mask.build(8, 1, 200, 200) is first  # the same planes
    for seqlen in range(201, 210):
        mask.build(1, 1, seqlen, seqlen)
    assert mask.build(2, 4, 200, 200) is not first
    assert len(mask._built) <= 4


def test_tensors_are_copied_when_the_mask_is_made():
    cu = torch.tensor([0, 50, 100], dtype=torch.int32)
    table = torch.ones(100, 100, dtype=torch.bool)
    lengths = torch.tensor([60])
    bounds = torch.tensor([20, 70]).expand(1, 1, 100, 2).clone()
    made = masks.document(cu), masks.dense(table), masks.padding(lengths), masks.spans(bounds)
    before = [
        masks.document(cu.clone()),
        masks.dense(table.clone()),
        masks.padding(lengths.clone()),
        masks.spans(bounds.clone()),
    ]
    before = [m.build(1, 1, 100, 100).to_dense() for m in before]
    cu[1], table[:], lengths[0], bounds[:] = 10, False, 1, 0
    for mask, expected in zip(made, before, strict=True):
        assert torch.equal(mask.build(1, 1, 100, 100).to_dense(), expected)


def test_as_mask_accepts_every_documented_type():
    mask = masks.causal()
    built = mask.build(1, 1, 64, 64)
    table = built.to_dense()
    assert masks.as_mask(mask) is mask and masks.as_mask(built) is built
    hi = torch.arange(1, 65).view(1, 1, 64)
    spans = torch.stack([torch.zeros_like(hi), hi], -1)
    for given_ in (table, table[0, 0], lambda b, h, q, k: q >= k, mask, built, spans, spans.int()):
        assert torch.equal(masks.build(given_, 1, 1, 64, 64).to_dense(), table)


def test_raw_functions_and_tensors_combine_with_masks():
    table = torch.rand(64, 64) < 0.5
    expected = table.tril()
    fn = lambda b, h, q, k: q >= k
    for mask in (masks.causal() & table, table & masks.causal(), fn & masks.dense(table)):
        assert torch.equal(mask.build(1, 1, 64, 64).to_dense()[0, 0], expected)


def test_the_repr_of_a_mask_is_its_expression():
    mask = masks.document(cu_seqlens([4], 9)) & ~masks.window(3, None)
    assert repr(mask) == "(document(2 documents) & ~window(3, None))"


def cu(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


BAD = {
    "cu_seqlens must be integers": lambda: masks.document(cu(0, 64, dtype=torch.float32)),
    r"got torch.int32 \(1, 2\)": lambda: masks.document(cu(0, 64)[None]),
    r"got \[False, True\]": lambda: masks.document([False, True]),
    r"document\(\): cu_seqlens must be integers .*, got 'ab'": lambda: masks.document("ab"),
    r"must start at 0, got cu_seqlens\[0\]=1": lambda: masks.document(cu(1, 64)),
    "must not decrease, got 40 then 30 at index 1": lambda: masks.document(cu(0, 40, 30, 64)),
    r"end at seqlen_q=64, got cu_seqlens\[-1\]=63": lambda: masks.document(cu(0, 63)),
    "end at seqlen_k=64": lambda: masks.document(cu(0, 64), cu(0, 65)),
    "1 documents and cu_seqlens_k has 2": lambda: masks.document(cu(0, 64), cu(0, 1, 64)),
    "prefix_len must not be negative": lambda: masks.prefix_lm(torch.tensor([-1])),
    r"prefix_len=65 must not exceed seqlen_k=64": lambda: masks.prefix_lm(65),
    "prefix_len has 2 entries for batch=1": lambda: masks.prefix_lm(torch.tensor([1, 2])),
    r"lengths must be an integer tensor \(batch,\), got 3": lambda: masks.padding(3),
    r"padding\(\): lengths must be .*, got 'a'": lambda: masks.padding("a"),
    r"lengths=\[65\] must not exceed": lambda: masks.padding(torch.tensor([65])),
    "a bound of a span is negative": lambda: masks.spans(-torch.ones(1, 1, 64, 2).int()),
    r"got torch.float32 \(1, 1, 64, 2\)": lambda: masks.spans(torch.ones(1, 1, 64, 2)),
    r"spans of shape \(1, 1, 63, 64\) does not": lambda: masks.spans(torch.ones(1, 1, 63, 2).int()),
    "must be bool, got list": lambda: masks.dense([[True]]),
    "additive masks go in bias=": lambda: masks.as_mask(torch.zeros(64, 64)),
    r"got shape \(64,\)": lambda: masks.dense(torch.ones(64, dtype=torch.bool)),
    r"shape \(1, 1, 64, 63\) does not fit": lambda: masks.dense(torch.ones(64, 63) > 0),
    r"shape \(2, 1, 64, 64\) does not fit": lambda: masks.dense(torch.ones(2, 1, 64, 64) > 0),
    r"must accept \(b, h, q, k\)": lambda: masks.mod(lambda score, b, h, q, k: score),
    "bool scalar, got torch.int64": lambda: masks.mod(lambda b, h, q, k: q - k),
    "must not turn an index": lambda: masks.mod(lambda b, h, q, k: q >= k if h == 0 else q < k),
    "mask must be a Mask": lambda: masks.as_mask("causal"),
    "neither true nor false": lambda: masks.causal() and masks.full(),
    "combine masks, then build": lambda: masks.causal() & masks.full().build(1, 1, 64, 64),
    r"BlockMask of shape \(1, 1, 64, 63\)": lambda: masks.full().build(1, 1, 64, 63),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_values_are_refused(message):
    with pytest.raises(ValueError, match=message) as caught:
        masks.build(BAD[message](), 1, 1, 64, 64)
    assert "\n" not in str(caught.value)


# {rule: {parameter: its least value}}, and the rule's other arguments.
LEAST = {name: preset.least for name, preset in PRESETS.items()}
LEAST |= {"window": {"left": 0, "right": 0}, "prefix_lm": {"prefix_len": 0}}
SIZES = [(name, parameter) for name, least in LEAST.items() for parameter in least]
WRONG_TYPES = [2.5, 2.0, "a", True, [3], 3j, torch.tensor(2.5), np.float64(2), np.True_]


@pytest.mark.parametrize(("name", "parameter"), SIZES, ids=".".join)
def test_sizes_that_are_no_integers_or_too_small_are_refused(name, parameter):
    least = LEAST[name]
    wrong = [x for x in WRONG_TYPES if parameter != "prefix_len" or x != [3]]  # a list of lengths
    wrong += [least[parameter] - 1] + [None] * (name != "window")
    for value in wrong:
        with pytest.raises(ValueError, match="must be an int") as caught:
            getattr(masks, name)(**least | {parameter: value})
        message = str(caught.value)
        assert message.startswith(f"{name}(): {parameter}") and message.endswith(f"got {value!r}")


@pytest.mark.parametrize(("name", "parameter"), SIZES, ids=".".join)
def test_sizes_may_be_integers_of_numpy(name, parameter):
    sizes = LEAST[name] | {parameter: 3}
    mask = getattr(masks, name)(**sizes | {parameter: np.int32(3)})
    assert repr(mask) == repr(getattr(masks, name)(**sizes))
    assert torch.equal(
        mask.build(1, 1, 300, 300).to_dense(),
        getattr(masks, name)(**sizes).build(1, 1, 300, 300).to_dense(),
    )


@pytest.mark.parametrize("huge", [2**31 - 1, 2**31, 2**40])
def test_sizes_beyond_any_length_cover_everything(huge):
    full = masks.full().build(1, 1, 300, 300).to_dense()
    presets = masks.block_local(huge), masks.bigbird(huge, 0, 0), masks.bigbird(0, 0, huge)
    for mask in (masks.window(huge, huge), masks.longformer(0, huge), *presets):
        assert torch.equal(mask.build(1, 1, 300, 300).to_dense(), full)


@pytest.mark.parametrize(
    ("name", "parameter"), [size for size in SIZES if "prefix_lm" not in size], ids=".".join
)
def test_a_size_beyond_any_length_is_as_one_of_many_lengths(name, parameter):
    make = lambda size: getattr(masks, name)(**LEAST[name] | {parameter: size})
    long, huge = (make(size).build(1, 1, 300, 300).to_dense() for size in (1000, 2**40))
    assert torch.equal(long, huge)


def test_reducing_over_many_masks():
    parts = [masks.window(size, size) for size in (300, 200, 100)]
    merged = functools.reduce(lambda a, b: a & b, parts).build(1, 1, 799, 799)
    assert torch.equal(merged.to_dense(), masks.window(100, 100).build(1, 1, 799, 799).to_dense())
