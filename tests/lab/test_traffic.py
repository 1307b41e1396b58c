"""traffic predicts the counts of the ledgers: every tensor, every byte, every operation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.cost import make_problem
from onchip.cost.prefixes import moved
from onchip.lab import traffic
from onchip.lab.published import ledger
from onchip.lab.traffic import Chip, Traffic

PAPERS = {
    "paper_v0": (traffic.standard, traffic.standard_backward),
    "paper_v1": (traffic.v1, traffic.v1_backward),
    "paper_v2": (traffic.v2, traffic.v2_backward),
}
COUNTS = ("reads", "writes", "flops", "exps", "other_ops")


def counts(book) -> dict:
    return {name: getattr(book, name) for name in COUNTS}


def checkers(b, h, q, k):
    """EMPTY, PARTIAL and FULL blocks, different in every plane."""
    whole = (q // 128 + k // 128 + b) % 2 == 0
    return whole & ((k // 128 == 1) | ((k // 64 + q // 50 + h) % 3 != 1))


MASKS = {
    "causal": masks.causal(),
    "checkers": masks.mod(checkers),
    "window": masks.window(40, 7),
    "nothing": masks.mod(lambda b, h, q, k: k < 0),
}


@st.composite
def cases(draw):
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    lengths = st.sampled_from([0, 1, 2, 31, 63, 129, 150, 257])
    sizes = {
        "batch": draw(st.sampled_from([1, 2])),
        "seqlen_q": draw(lengths),
        "seqlen_k": draw(lengths),
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([1, 5, 8, 16])),
        "head_dim_v": draw(st.sampled_from([1, 8, 12])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
    }
    options = {
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(None, None), (20, 3), (None, 9), (0, 0)])),
    }
    mask = draw(st.sampled_from([None, None, *MASKS]))
    cells = sizes["seqlen_q"] * sizes["seqlen_k"]  # tiles of one number of many would take minutes
    chip = Chip(
        draw(st.sampled_from([None, math.inf, 900, 5000, *((1, 2, 33) if cells < 70 else (400,))])),
        draw(st.sampled_from([None, sizes["dtype"]])),
        draw(st.sampled_from([None, None, (17, 40), (64, 128)])),
    )
    return sizes, options, mask, chip, draw(st.booleans())


@settings(max_examples=30)
@given(case=cases())
@pytest.mark.parametrize("kernel", PAPERS)
def test_traffic_equals_the_ledger(kernel, case):
    """Forward, then forward and backward, with and without a gradient through lse."""
    sizes, options, mask, chip, through_lse = case
    q, k, v = (x.requires_grad_() for x in ot.make_qkv(**sizes))
    if mask is not None:
        planes = sizes["batch"], sizes["num_heads"]
        mask = masks.build(MASKS[mask], *planes, sizes["seqlen_q"], sizes["seqlen_k"])
    problem = make_problem(**sizes, mask=mask, **options)
    forward, backward = PAPERS[kernel]
    want = forward(problem, chip, mask)
    with ledger(**chip._asdict()) as book:
        call = {"kernel": kernel, "return_lse": True, "mask": mask}
        out, lse = onchip.attention(q, k, v, **call, **options)
        assert counts(book) == counts(want)
        outputs = [out, lse] if through_lse else [out]
        torch.autograd.grad(outputs, (q, k, v), [torch.ones_like(x) for x in outputs])
    assert counts(book) == counts(want + backward(problem, chip, mask, dlse=through_lse))


@pytest.mark.parametrize("kernel", PAPERS)
def test_packed_sequences(kernel):
    packed = ot.make_packed([33, 0, 70], [40, 5, 11], num_heads=4, num_kv_heads=2, head_dim=8)
    leaves = [x.requires_grad_() for x in packed[:3]]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    problem = make_problem(70, 40, batch=3, causal=True, **sizes)._replace(packed=True)
    lengths = [(33, 40), (0, 5), (70, 11)]
    with ledger(sram=500) as book:
        out = onchip.varlen_attention(*leaves, **packed.options, causal=True, kernel=kernel)
        out.sum().backward()
    forward, backward = PAPERS[kernel]
    calls = (f(problem, Chip(sram=500), lengths=lengths) for f in (forward, backward))
    assert counts(book) == counts(sum(calls, Traffic()))


def test_v4_moves_the_same_bytes_as_v2():
    sizes = {"num_heads": 2, "head_dim": 16, "dtype": torch.bfloat16}
    q, k, v = ot.make_qkv(1, 150, 257, **sizes)
    with ledger(sram=4000) as book:
        onchip.attention(q, k, v, kernel="paper_v4", causal=True)
    want = traffic.v2(make_problem(150, 257, causal=True, **sizes), Chip(sram=4000))
    assert (book.reads, book.writes, book.flops) == (want.reads, want.writes, want.flops)
    assert book.exps == 0 and want.exps > 0


def test_the_counts_of_the_papers():
    """4 N^2 + 4 N d and 7 N^2 + 8 N d of Algorithms 0 and 3; 2 N d + 3 N d N / Bc of v1."""
    n, d, half = 1024, 64, torch.float16
    problem = make_problem(n, head_dim=d)
    whole = Chip(math.inf, half)
    forward, backward = traffic.standard(problem, whole), traffic.standard_backward(problem, whole)
    assert forward.hbm_bytes - forward.writes["lse"] == 2 * (4 * n * n + 4 * n * d)
    assert backward.hbm_bytes == 2 * (7 * n * n + 8 * n * d)
    v1 = traffic.v1(problem, Chip(None, half, (64, 128)))
    moved = sum((v1.reads + v1.writes)[name] for name in "qkvo")
    assert moved == 2 * (2 * n * d + 3 * n * d * n // 128)


def test_a_million_tokens_take_no_time():
    problem = make_problem(1 << 20, num_heads=32, head_dim=128, causal=True)
    tiles = Chip(tiles=(128, 128))
    assert traffic.v2(problem, tiles).flops == pytest.approx(problem.flops, rel=2e-4)


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda p: traffic.v1(p, Chip(sram=0)), "Chip.sram"),
        (lambda p: traffic.v2(p, Chip(tiles=(64, 0))), "Chip.tiles"),
        (lambda p: traffic.split_kv(p, 0), "num_splits"),
        (lambda p: traffic.ring(p, 0), "num_ranks"),
        (lambda p: traffic.paged(p, 0, [64]), "page_size"),
    ],
)
def test_impossible_arguments_are_refused(ask, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ask(make_problem(64))


def test_contradictory_arguments_are_refused():
    problem = make_problem(64)
    with pytest.raises(ValueError, match=r"problem.packed=False, but lengths=\[\(64, 64\)\]"):
        traffic.v2(problem, lengths=[(64, 64)])
    with pytest.raises(ValueError, match="problem.has_mask=False, but mask=BlockMask"):
        traffic.v2(problem, mask=masks.build(masks.causal(), 1, 1, 64, 64))
    short, long = (masks.build(masks.causal(), 1, 1, n, n) for n in (64, 256))
    with pytest.raises(ValueError, match=r"mask of shape \(1, 1, 64, 64\) does not fit scores"):
        traffic.v1(make_problem(256, mask=long), mask=short)
    for ask in (lambda p: traffic.paged(p, 16, [64]), lambda p: traffic.cascade(p, 9)):
        with pytest.raises(ValueError, match="without a block mask are counted, got has_mask=True"):
            ask(make_problem(64, mask=short))
    with pytest.raises(ValueError, match=r"lengths of 1 sequences, got \[3, 4\]"):
        traffic.paged(problem, 16, [3, 4])
    with pytest.raises(ValueError, match="prefix=-1 must be a number of keys"):
        traffic.cascade(problem, -1)


def test_the_planner_of_cascades_counts_like_the_ledger():
    """The saving of a level, except the queries that it gathers: read and written once more."""
    batch, prefix, own, size = 6, 640, 96, 16
    sizes = {"batch": batch, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "head_dim_v": 32}
    rows, pages = (torch.empty(1, batch, 8, 64), torch.empty(1, size, 2, 64))
    model = moved(rows.half(), pages.half(), pages[..., :32].half())
    whole, rest = (traffic.pack_heads(make_problem(1, n, **sizes)) for n in (prefix + own, own))
    tiles = Chip(tiles=(64, 64))
    saved = traffic.v2(whole, tiles).hbm_bytes - traffic.cascade(rest, prefix, tiles).hbm_bytes
    gathered = 2 * batch * 8 * 64 * 2
    added = model.of_queries(batch, 1) + batch * model.partial
    assert saved - gathered == (batch - 1) * prefix // size * model.page - added
