"""A ring of any size equals one device: results, gradients and dropout, up to rounding. Messages,
work and memory are as the formulas say.
"""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onchip
from onchip import masks
from onchip.parallel import rounds
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import CountingComm, ParallelError, run_ranks
from onchip.parallel.rounds import GlobalMask, count_hops, plan_round, plan_rounds
from onchip.parallel.sharding import balanced, contiguous, striped, zigzag
from tests.grids import mark_all_after
from tests.parallel.cases import (
    CU,
    LAYOUTS,
    OPTIONS,
    PACKED,
    Case,
    check_case,
    check_in_process,
    check_rmse,
    count_pairs,
    on_rank,
)

CPU = torch.device("cpu")
F64, F32 = torch.float64, torch.float32


@st.composite
def cases(draw):
    """Any length, 0 included; documents of any lengths; every layout and option."""
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    layout = draw(st.sampled_from([*LAYOUTS]))
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=5))
        cu = tuple(torch.tensor([0, *sizes]).cumsum(0).tolist())
        options = draw(st.sampled_from(PACKED))
        return Case(layout, cu[-1], 1, heads, (8, 8), dtype, cu, options=options)
    options, seqlen = draw(st.sampled_from(OPTIONS)), draw(st.integers(0, 150))
    if options.get("mask") == "prefix":
        seqlen = max(seqlen, 20)
    return Case(layout, seqlen, draw(st.integers(1, 2)), heads, (8, 12), dtype, options=options)


@given(cases(), st.integers(1, 6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_ring_equals_one_device(case, size):
    check_in_process(case, size)


@pytest.mark.slow
@given(cases(), st.integers(1, 9))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_ring_equals_one_device_many_examples(case, size):
    check_in_process(case, size)


def grid(dtype, layouts=("contiguous", "zigzag", "striped")):
    for i, layout in enumerate(layouts):
        for j, options in enumerate(OPTIONS):
            heads = ((4, 2), (2, 2), (3, 1))[(i + j) % 3]
            yield Case(layout, (111, 97)[j % 2], 1 + j % 2, heads, dtype=dtype, options=options)
        for options in PACKED:
            yield Case(layout, CU[-1], dtype=dtype, cu_seqlens=CU, options=options)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ranks_on_gloo_equal_one_device(pool, size, dtype):
    """Layouts x masks x GQA x uneven lengths x dropout. Each size and dtype tries some of them; the
    slow test tries all.
    """
    chosen = [*grid(dtype)][size // 2 % 3 + (dtype == torch.float32) :: 4]
    check_on_gloo(pool, size, chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "size"),
    mark_all_after(4, [(F64, 2), (F64, 4), (F64, 8), (F32, 4), (F32, 2), (F32, 8)]),
    ids=str,
)
def test_ranks_on_gloo_equal_one_device_in_every_case(pool, size, dtype):
    """The messages of a size do not depend on the dtype: fp32 has one size, and all with ALL=1."""
    check_on_gloo(pool, size, [*grid(dtype, LAYOUTS)])


def check_on_gloo(pool, size, chosen):
    results = pool.run(size, on_rank, *chosen, timeout_s=300.0)
    for i, case in enumerate(chosen):
        check_case(case, [result[i] for result in results])


@pytest.mark.parametrize("kernel", ["reference", "tiled", "aten_cpu"])
def test_any_kernel_can_be_used(kernel):
    """Also a kernel with a backward that would otherwise use an lse of its own."""
    options = {"causal": True, "sinks": True, "kernel": kernel}
    check_in_process(Case(seqlen=95, batch=2, options=options), 3)
    case = Case(seqlen=CU[-1], cu_seqlens=CU, options={"kernel": kernel, "window_size": (30, 0)})
    check_in_process(case, 3)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("cu", [None, CU])
def test_dropout_keeps_the_same_weights_as_one_device(name, cu):
    """Bit for bit: with equal scores and one-hot values, out shows the weights that were kept."""
    seqlen, heads = CU[-1], 3
    q = torch.zeros(seqlen, heads, 4, dtype=torch.float64)
    v = torch.eye(seqlen, dtype=torch.float64)[:, None].expand(-1, heads, -1).contiguous()
    options = {"dropout_p": 0.4, "dropout_seed": -(2**50) + 1}
    if cu is None:
        q, v = q[None], v[None]
        want = onchip.attention(q, q, v, **options)
    else:
        cu = torch.tensor(cu).int()
        want = onchip.varlen_attention(q, q, v, cu, cu, seqlen, seqlen, **options)
    dim = 1 if cu is None else 0

    def on_rank(comm, layout):
        mine = partial(layout.shard, rank=comm.rank, dim=dim)
        where = {"layout": layout, "seqlen": seqlen, "cu_seqlens": cu}
        return context_parallel_attention(mine(q), mine(q), mine(v), comm, **where, **options)

    layout = LAYOUTS[name](4)
    weights = layout.unshard(run_ranks(4, on_rank, layout), dim)
    assert torch.equal(weights != 0, want != 0)


def run_counted(comm, case):
    counting = CountingComm(comm)
    result = on_rank(counting, case)[0]
    return result, counting.messages, counting.bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_messages_and_bytes_are_as_the_formulas_say(size, name, dtype):
    """3 size - 2: forward size - 1 messages of K and V; backward as many, and size messages of
    gradients in fp32 or wider.
    """
    case = Case(name, 111, dtype=dtype, options={"causal": True})
    held = case.layout_of(size).lengths(case.seqlen)
    per_token = case.heads[1] * sum(case.dims) * dtype.itemsize
    for rank, (_, messages, sent) in enumerate(run_ranks(size, run_counted, case)):
        assert messages["shift"] == (3 * size - 2 if size > 1 else 0)
        others = [held[(rank - i) % size] for i in range(size - 1)]
        all_ = held if size > 1 else []
        assert sent["shift"] == per_token * (2 * sum(others) + sum(all_))
        assert sent.total() == sent["shift"]


def test_bf16_keys_travel_in_bf16_and_their_gradients_in_fp32():
    case = Case("contiguous", 64, dtype=torch.bfloat16)
    tokens, numbers = 16, case.heads[1] * sum(case.dims)
    for _, _, sent in run_ranks(4, run_counted, case):
        assert sent["shift"] == numbers * tokens * (2 * 3 * 2 + 4 * 4)


@pytest.mark.parametrize("window", [0, 1, 15, 16, 17, 40])
def test_keys_travel_no_further_than_a_window(window):
    size, seqlen = 8, 128
    case = Case("contiguous", seqlen, options={"window_size": (window, 0)})
    hops_needed = -(-window // (seqlen // size))
    results = run_ranks(size, run_counted, case)
    check_case(case, [result for result, *_ in results])
    for _, messages, _ in results:
        assert messages["shift"] == (3 * hops_needed + 1 if hops_needed else 0)


def test_keys_travel_no_further_than_documents():
    cu = (0, 30, 64, 128)  # the second is on ranks 0 and 1, the last on ranks 2 and 3
    case = Case("contiguous", 128, cu_seqlens=cu, options={"causal": True})
    for _, messages, _ in run_ranks(4, run_counted, case):
        assert messages["shift"] == 4


def sees_keys(layout, seen, rank, hop):
    rows, cols = (layout.positions(r % 4, len(seen)) for r in (rank, rank - hop))
    return bool(seen[rows][:, cols].any())


def test_hops_are_as_dense_masks_say():
    for make in (contiguous, zigzag, striped, lambda size: balanced(size, masks.causal())):
        for global_mask in (
            GlobalMask(300, True, (70, None)),
            GlobalMask(300, False, (3, 60)),
            GlobalMask(300, True),
        ):
            layout = make(4)
            lo, hi = global_mask.key_ranges(torch.arange(300))
            visible = (torch.arange(300) >= lo[:, None]) & (torch.arange(300) < hi[:, None])
            needed = max(h for h in range(4) for r in range(4) if sees_keys(layout, visible, r, h))
            assert count_hops(layout, global_mask) >= needed
            if make is contiguous:
                assert count_hops(layout, global_mask) == needed


def pairs_computed(monkeypatch, name, size, seqlen):
    """(query, key) pairs that the kernels of each rank computed."""
    case = Case(name, seqlen, heads=(1, 1), options={"causal": True})
    attend, done = rounds.attend, {}

    def counting(call, round, *qkv):
        me = threading.get_ident()
        done[me] = done.get(me, 0) + count_pairs(round)
        return attend(call, round, *qkv)

    monkeypatch.setattr(rounds, "attend", counting)
    ranks = run_ranks(size, lambda comm: (threading.get_ident(), on_rank(comm, case))[0])
    return torch.tensor([done[me] for me in ranks]).double()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_work_is_even_under_zigzag_and_two_minus_one_over_p_without(monkeypatch, size):
    seqlen = 64 * size
    spread = {}
    for name in ("contiguous", "zigzag", "striped"):
        work = pairs_computed(monkeypatch, name, size, seqlen)
        assert work.sum() == seqlen * (seqlen + 1) / 2
        spread[name] = float(work.max() / work.mean())
    assert spread["contiguous"] == pytest.approx(2 - 1 / size, rel=0.02)
    assert spread["zigzag"] == pytest.approx(1.0, abs=1e-3)
    assert spread["striped"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("make", [contiguous, zigzag, striped])
@pytest.mark.parametrize("seqlen", [512, 509])
def test_causal_rounds_need_no_mask(make, seqlen):
    """Causal and full calls are enough for the common layouts, also with uneven lengths."""
    for rank in range(4):
        plans = plan_rounds(make(4), GlobalMask(seqlen, True), rank, CPU).rounds
        assert all(round is None or round.mask is None for round in plans)


def test_windows_of_chunks_need_no_mask():
    for rank in range(4):
        plans = plan_rounds(contiguous(4), GlobalMask(509, False, (200, 30)), rank, CPU).rounds
        assert all(round is None or round.mask is None for round in plans)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_round_shows_the_cells_of_the_global_mask(data):
    """Any ascending positions: the round's causal, window and mask, expanded to cells."""
    seqlen = data.draw(st.integers(1, 60))
    window = data.draw(st.tuples(*[st.one_of(st.none(), st.integers(0, 20))] * 2))
    cut = sorted(data.draw(st.sets(st.integers(1, seqlen), max_size=3)) - {seqlen})
    documents = data.draw(st.sampled_from([None, (0, *cut, seqlen)]))
    global_mask = GlobalMask(seqlen, data.draw(st.booleans()), window, documents)
    picks = st.sets(st.integers(0, seqlen - 1), min_size=1)
    rows, cols = (torch.tensor(sorted(data.draw(picks))) for _ in range(2))
    lo, hi = global_mask.key_ranges(rows)
    want = (cols >= lo[:, None]) & (cols < hi[:, None])
    visible = torch.zeros_like(want)
    round = plan_round(global_mask, rows, cols, CPU)
    if round is not None:
        visible[round.rows, round.keys] = expanded(round)
        assert count_pairs(round) == int(want.sum())
    assert torch.equal(visible, want)


def expanded(round):
    if round.mask is not None:
        return round.mask.to_dense()[0, 0]
    lengths = [s.stop - s.start for s in (round.rows, round.keys)]
    visible = masks.Visibility(*lengths, round.causal, round.window_size).tile(
        0, lengths[0], 0, lengths[1]
    )
    return torch.ones(lengths, dtype=torch.bool) if visible is None else visible


SLOW_SIZES = [
    pytest.param(32, marks=pytest.mark.slow),
    pytest.param(64, marks=[pytest.mark.slow, pytest.mark.all]),
]


@pytest.mark.parametrize("size", [2, 8, *SLOW_SIZES])
def test_sixteen_bits_are_as_accurate_as_one_device(size):
    """RMSE against fp64 of result and gradients, at most 1.02 times that of one device. (lse is
    fp32: 1.25, as everywhere.)
    """
    case = Case("zigzag", 768, heads=(2, 1), dims=(64, 64), dtype=torch.bfloat16)
    case = replace(case, options={"causal": True, "kernel": "tiled"})  # keeps fp32 until the end
    check_rmse(case, size)


def test_rounded_partial_results_would_fail(monkeypatch):
    """The bound above is tight enough to detect rounded partial results."""
    attend = rounds.attend

    def rounding(*args):
        out, lse = attend(*args)
        return out.bfloat16().float(), lse

    monkeypatch.setattr(rounds, "attend", rounding)
    with pytest.raises(AssertionError, match="out: .* on 8"):
        test_sixteen_bits_are_as_accurate_as_one_device(8)


def test_a_compiled_caller_keeps_its_gradients():
    """The call itself is not compiled, the code around it is."""
    x = torch.randn(1, 24, 2, 8, dtype=torch.float64)

    def on_rank(comm, compiled):
        def step(x):
            return context_parallel_attention(x * 2, x, x + 1, comm, causal=True).sin()

        leaf = x.clone().requires_grad_()
        (torch.compile(step, backend="aot_eager") if compiled else step)(leaf).sum().backward()
        return leaf.grad

    eager, compiled = run_ranks(1, on_rank, False)[0], run_ranks(1, on_rank, True)[0]
    torch.testing.assert_close(eager, compiled, rtol=1e-12, atol=1e-12)


def test_autocast_casts_as_on_one_device():
    x = torch.randn(1, 24, 2, 8)

    def on_rank(comm):
        mine, leaf = zigzag(2).shard(x, comm.rank), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = context_parallel_attention(mine, mine, zigzag(2).shard(leaf, comm.rank), comm)
        out.sum().backward()
        return out, leaf.grad

    for out, grad in run_ranks(2, on_rank):
        assert out.dtype == torch.bfloat16
        assert grad.dtype == torch.float32


def test_a_default_seed_is_the_same_on_all_ranks():
    x = torch.randn(1, 32, 1, 8, dtype=torch.float64)
    layout = contiguous(4)

    def on_rank(comm):
        torch.manual_seed(comm.rank)
        mine = layout.shard(x, comm.rank)
        v = torch.eye(32, dtype=torch.float64).view(1, 32, 1, 32)
        v = layout.shard(v, comm.rank).contiguous()
        return context_parallel_attention(mine, mine, v, comm, layout=layout, dropout_p=0.5)

    kept = layout.unshard(run_ranks(4, on_rank)) != 0
    rows = kept[0, :, 0].int().tolist()
    assert len({tuple(row) for row in rows}) > 16  # no rank repeats another's draws
    assert 0.35 < kept.double().mean() < 0.65


X = torch.zeros(1, 6, 2, 8)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"seqlen": 14}, r"rank 0 holds 7 of seqlen=14 positions .* have 6: give seqlen="),
        ({"layout": "spiral"}, "layout='spiral' must be a Layout or one of 'contiguous'"),
        ({"layout": zigzag(3)}, "the layout is for 3 ranks, the group has 2"),
        ({"strategy": "telepathy"}, "strategy='telepathy' is not one of auto, ring"),
        ({"k": X[:, :5], "v": X[:, :5]}, "queries and keys must be of one sequence"),
        ({"window_size": (-1, 0)}, "window_size left=-1 must be None"),
        ({"cu_seqlens": torch.tensor([0, 12])}, "q must have rank 3"),
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "does not fit"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \(2,\)"),
        ({"dropout_p": 0.5, "dropout_seed": "x"}, "dropout_seed='x' must be a 64-bit int"),
    ],
)
def test_unsupported_arguments_are_refused(change, sentence):
    options = {"q": X, "k": X, "v": X, "layout": "contiguous"} | change
    with pytest.raises(ValueError, match=sentence):
        run_ranks(2, lambda comm: context_parallel_attention(group=comm, **options))


def test_documents_take_no_mask_and_no_slopes_per_entry():
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = {"q": X[0], "k": X[0], "v": X[0], "cu_seqlens": cu}
    for change in ({"mask": masks.causal()}, {"alibi_slopes": torch.ones(2, 2)}):
        call = partial(context_parallel_attention, **packed, **change)
        with pytest.raises(onchip.UnsupportedError, match="documents"):
            run_ranks(2, lambda comm, call=call: call(group=comm))


def test_ranks_with_different_calls_are_named():
    def on_rank(comm):
        return context_parallel_attention(X, X, X, comm, causal=comm.rank == 1)

    with pytest.raises(ParallelError, match="causal is false on rank 0, true on rank 1"):
        run_ranks(2, on_rank)
