"""The invariants of the algebra: any split, any order, empty segments, huge and tiny logits."""

from functools import reduce
from itertools import pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import merge_states
from onchip.core.state import (
    EMPTY,
    DualState,
    State,
    add_sink,
    add_sink_dual,
    finalize,
    finalize_dual,
    lift,
    lift_dual,
    merge,
    merge_dual,
    resume,
)
from onchip.fold import fold

ROWS, KEYS, DIM = 3, 12, 4


def softmax_attention(s, v):
    """The textbook formula in fp64, with out = 0 and lse = -inf for rows without keys."""
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -inf, 0.0)[..., None])
    return p @ v, lse


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@st.composite
def scores(draw):
    """Scores from -1e4 to 1e4, some masked, sometimes whole rows; values; and a split of the keys
    in a random order.
    """
    seed = draw(st.integers(0, 2**31))
    scale = draw(st.sampled_from([1e-6, 1.0, 30.0, 1e4]))
    hidden = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    g = torch.Generator().manual_seed(seed)
    s = torch.randn(ROWS, KEYS, generator=g, dtype=torch.float64) * scale
    s[torch.rand(ROWS, KEYS, generator=g) < hidden] = -inf
    v = torch.randn(KEYS, DIM, generator=g, dtype=torch.float64)
    cuts = sorted(draw(st.lists(st.integers(0, KEYS), max_size=5)))
    segments = list(pairwise([0, *cuts, KEYS]))
    return s, v, draw(st.permutations(segments))


@settings(max_examples=200, deadline=None)
@given(scores())
def test_any_split_in_any_order(case):
    s, v, segments = case
    states = [lift(s[:, a:b], v[a:b]) for a, b in segments]
    assert_same(finalize(reduce(merge, states)), softmax_attention(s, v))


@settings(max_examples=100, deadline=None)
@given(scores())
def test_any_grouping(case):
    s, v, segments = case
    states = [lift(s[:, a:b], v[a:b]) for a, b in segments]
    left = reduce(merge, states)
    right = reduce(lambda acc, x: merge(x, acc), reversed(states))
    assert_same(finalize(left), finalize(right))


@settings(max_examples=50, deadline=None)
@given(scores())
def test_empty_is_the_identity(case):
    s, v, _ = case
    state = lift(s, v)
    for merged in (merge(EMPTY, state), merge(state, EMPTY)):
        assert_same(finalize(merged), finalize(state))


@settings(max_examples=100, deadline=None)
@given(scores())
def test_resume_inverts_finalize(case):
    s, v, segments = case
    states = [resume(*finalize(lift(s[:, a:b], v[a:b]))) for a, b in segments]
    assert_same(finalize(reduce(merge, states)), softmax_attention(s, v))


@settings(max_examples=100, deadline=None)
@given(scores())
def test_n_way_merge_equals_the_fold(case):
    s, v, segments = case
    parts = [finalize(lift(s[:, a:b], v[a:b])) for a, b in segments]
    outs = [out[:, None] for out, _ in parts]  # (seqlen, heads=1, dim)
    lses = [lse[None] for _, lse in parts]
    out, lse = merge_states(outs, lses)
    assert_same((out[:, 0], lse[0]), softmax_attention(s, v))


def softmax_tangent(s, ds, v, dv):
    """The tangents of softmax_attention by hand, with zeros for rows without keys."""
    out, lse = softmax_attention(s, v)
    p = torch.exp(s - lse.masked_fill(lse == -inf, 0.0)[..., None])
    dlse = (p * ds).sum(-1)
    return (p * (ds - dlse[..., None])) @ v + p @ dv, dlse


def draw_tangents(s, v):
    g = torch.Generator().manual_seed(1)
    return (torch.randn(x.shape, generator=g, dtype=x.dtype) for x in (s, v))


def lift_segments(s, ds, v, dv, segments):
    cuts = [(a, b) for a, b in segments if a < b]
    return [lift_dual(s[:, a:b], ds[:, a:b], v[a:b], dv[a:b]) for a, b in cuts]


@settings(max_examples=200, deadline=None)
@given(scores())
def test_tangents_merge_in_any_split_and_order(case):
    s, v, segments = case
    ds, dv = draw_tangents(s, v)
    state = reduce(merge_dual, lift_segments(s, ds, v, dv, segments))
    assert_same(finalize(state.value), softmax_attention(s, v))
    assert_same(finalize_dual(state), softmax_tangent(s, ds, v, dv))
    assert torch.equal(state.value.m, state.tangent.m)


@settings(max_examples=100, deadline=None)
@given(scores())
def test_tangents_merge_in_any_grouping(case):
    s, v, segments = case
    ds, dv = draw_tangents(s, v)
    states = lift_segments(s, ds, v, dv, segments)
    empty = DualState(EMPTY, EMPTY)
    left = reduce(merge_dual, states, empty)
    right = reduce(lambda acc, x: merge_dual(x, acc), reversed(states), empty)
    assert_same(finalize_dual(left), finalize_dual(right))


@settings(max_examples=50, deadline=None)
@given(scores())
def test_the_tangent_of_a_merge_is_the_jvp_of_finalize(case):
    """torch differentiates finalize(merge(lift, lift)), with its maxima, to the same tangents."""
    s, v, segments = case
    ds, dv = draw_tangents(s, v)

    def fold_segments(s, v):
        out, lse = finalize(reduce(merge, [lift(s[:, a:b], v[a:b]) for a, b in segments]))
        return out, lse.masked_fill(lse == -inf, 0.0)

    exact = torch.func.jvp(fold_segments, (s, v), (ds, dv))[1]
    seen = (s > -inf).any(-1)  # torch's tangent of amax over -inf alone is arbitrary, times 0
    got = finalize_dual(reduce(merge_dual, lift_segments(s, ds, v, dv, segments)))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a[seen], b[seen], rtol=1e-9, atol=1e-9)


def test_the_tangent_of_a_sink_is_that_of_a_key_without_a_value():
    s = torch.tensor([[0.0, 1.0], [-inf, -inf]], dtype=torch.float64)
    v = torch.randn(2, DIM, dtype=torch.float64)
    ds, dv = draw_tangents(s, v)
    sink, dsink = (torch.tensor(x, dtype=torch.float64) for x in (0.5, -2.0))
    got = finalize_dual(add_sink_dual(lift_dual(s, ds, v, dv), sink, dsink))
    column = lambda s, sink: torch.cat([s, sink.expand(2, 1)], 1)
    zero = torch.zeros(1, DIM, dtype=torch.float64)
    keys = column(s, sink), column(ds, dsink), torch.cat([v, zero]), torch.cat([dv, zero])
    assert_same(got, softmax_tangent(*keys))
    assert got[0][1].eq(0).all() and got[1][1] == dsink


def test_a_sink_is_a_logit_without_a_value():
    s = torch.tensor([[0.0, 1.0], [-inf, -inf]], dtype=torch.float64)
    v = torch.randn(2, DIM, dtype=torch.float64)
    sink = torch.tensor(0.5, dtype=torch.float64)
    out, lse = finalize(add_sink(lift(s, v), sink))
    with_sink = torch.cat([s, sink.expand(2, 1)], 1)
    exact, exact_lse = softmax_attention(with_sink, torch.cat([v, torch.zeros(1, DIM)]))
    assert_same((out, lse), (exact, exact_lse))
    assert out[1].eq(0).all() and lse[1] == sink


def test_fold_holds_one_segment_at_a_time():
    q = torch.randn(1, 5, 2, 8)
    k, v = torch.randn(2, 1, 9, 2, 8)
    segments = []

    def attend(q, segment):
        segments.append(segment)
        k, v = segment()
        s = torch.einsum("bqhd,bkhd->bhqk", q, k)
        out, lse = finalize(lift(s, v.transpose(1, 2)))
        return out.transpose(1, 2), lse

    lazily = [lambda a=a, b=b: (k[:, a:b], v[:, a:b]) for a, b in ((0, 4), (4, 4), (4, 9))]
    out, lse = fold(q, iter(lazily), attend)
    whole, whole_lse = attend(q, lambda: (k, v))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    assert len(segments) == 4


class TestMergeStates:
    def test_gradients_in_out_and_lse(self):
        outs = [torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        lses = [torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        fn = lambda *x: merge_states(x[:3], x[3:])
        assert torch.autograd.gradcheck(fn, (*outs, *lses))

    def test_empty_rows_have_zero_gradients(self):
        out = torch.zeros(1, 2, 1, 4, requires_grad=True)
        lse = torch.tensor([[[-inf, 0.0]]], requires_grad=True)
        merged, merged_lse = merge_states([out, out], [lse, lse])
        (merged.sum() + merged_lse[..., 1].sum()).backward()
        assert merged_lse[0, 0, 0] == -inf and not merged.isnan().any()
        assert not out.grad.isnan().any() and not lse.grad.isnan().any()
        assert lse.grad[0, 0, 0] == 0

    def test_keeps_the_dtype_of_out_and_merges_in_fp32(self):
        outs = [torch.randn(1, 4, 2, 8).bfloat16() for _ in range(2)]
        out, lse = merge_states(outs, [torch.zeros(1, 2, 4)] * 2)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        exact = (outs[0].float() + outs[1].float()) / 2
        torch.testing.assert_close(out, exact.bfloat16(), rtol=0, atol=0)

    @pytest.mark.parametrize(
        "outs, lses",
        [
            ([], []),
            ([torch.zeros(2, 3, 4)], []),
            ([torch.zeros(2, 3, 4)], [torch.zeros(2, 3)]),
            ([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)], [torch.zeros(3, 2)] * 2),
        ],
    )
    def test_shapes_that_do_not_fit_are_refused(self, outs, lses):
        with pytest.raises(ValueError):
            merge_states(outs, lses)


def test_state_is_three_tensors():
    assert State._fields == ("m", "l", "acc")
