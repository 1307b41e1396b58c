"""The invariants of the algebra: any split, any order, empty segments, huge and tiny logits."""

from functools import reduce
from itertools import pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import merge_states
from onchip.core.state import EMPTY, State, add_sink, finalize, lift, merge, resume
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
