"""Attention with reproducible=True in Triton: a row has the same bits in every call that computes
it. Interpreted, and on a GPU; compiled for GPUs that are not here: test_compile.py.
"""

import random

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import find_refusal, get_backend
from onchip.core.problem import Problem
from tests.interpreted import DEVICE, INTERPRETED, interpreted_or_gpu

fixed_order = pytest.importorskip("onchip.kernels.triton.fixed_order")

SINKS = torch.linspace(-2, 2, 6)
OPTIONS = {
    "plain": {},
    "all": {"window_size": (40, 0), "softcap": 5.0, "sinks": SINKS, "softmax_scale": 0.3},
}
LENGTHS = (1, 65, 90) if INTERPRETED else (1, 63, 64, 65, 511, 512, 513, 1300, 4100)
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 40}
DTYPES = [torch.bfloat16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of one tile of 64 keys, so that short sequences have several."""
    if INTERPRETED:
        monkeypatch.setattr(fixed_order, "FIXED_ORDER_KEYS", 64)


def make_packed(lengths, dtype, **sizes):
    return ot.make_packed(lengths, lengths, dtype=dtype, device=DEVICE, **(SIZES | sizes))


def attend(packed, **options):
    """(out, lse) of each sequence, from one packed call."""
    options = {"return_lse": True, "reproducible": True, "causal": True} | options
    call = {"kernel": "triton"} | packed.options | _on_device(options)
    out, lse = onchip.varlen_attention(*packed[:3], **call)
    sizes = packed.cu_seqlens_q.diff().tolist()
    return list(zip(out.split(sizes), lse.T.split(sizes), strict=True))


def _on_device(options):
    return {n: t.to(DEVICE) if torch.is_tensor(t) else t for n, t in options.items()}


@interpreted_or_gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_accuracy_rule(dtype, options, short_splits):
    queries, keys = ((3, 0, 11), (70, 5, 0)) if INTERPRETED else ((1, 63, 0, 300), (1500, 63, 5, 0))
    packed = ot.make_packed(queries, keys, dtype=dtype, device=DEVICE, **SIZES)
    call = {"kernel": "triton", "reproducible": True, "return_lse": True, **_on_device(options)}
    for causal in (True,) if INTERPRETED else (False, True):
        got = onchip.varlen_attention(*packed[:3], **packed.options, **call, causal=causal)
        given = _on_device(options) | {"causal": causal}
        ot.assert_accurate(got, *packed[:3], **given, **packed.options)


@interpreted_or_gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_call(dtype, options, short_splits, monkeypatch):
    """Dense, packed, alone, in chunks, over pages of several sizes, decoded one by one, by one
    program or by several.
    """
    _check_calls(dtype, options, SIZES, LENGTHS, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (8, 8, 64), (8, 4, 256)], ids=str)
def test_bits_of_the_heads_of_models(heads, monkeypatch):
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    _check_calls(torch.bfloat16, {}, sizes, LENGTHS, monkeypatch)


def _check_calls(dtype, options, sizes, lengths, monkeypatch):
    draw = random.Random(3)
    packed = make_packed(lengths, dtype, **sizes)
    call = {"return_lse": True, "reproducible": True, "kernel": "triton", **_on_device(options)}
    laid = [ot.make_pages(*packed[1:3], packed.cu_seqlens_k, size) for size in (1, 16, 37)]
    for i, (out, lse) in enumerate(attend(packed, **options)):
        rows = slice(*packed.cu_seqlens_k[i : i + 2].tolist())
        q, k, v = (t[None, rows] for t in packed[:3])
        alone, alone_lse = onchip.attention(q, k, v, causal=True, **call)
        assert torch.equal(alone[0], out) and torch.equal(alone_lse[0].T, lse)
        for chunk in range(1 if INTERPRETED else 6):
            stop = draw.randrange(1, lengths[i] + 1)
            start = draw.choice((stop - 1, draw.randrange(stop)))
            limit = draw.choice((0, fixed_order.FIXED_ORDER_SCRATCH_BYTES))
            monkeypatch.setattr(fixed_order, "FIXED_ORDER_SCRATCH_BYTES", limit)
            *pages, table, _ = laid[(i + chunk) % 3]
            tables = table[i : i + 1], torch.tensor([stop], dtype=torch.int32, device=DEVICE)
            part, part_lse = onchip.paged_attention(q[:, start:stop], *pages, *tables, **call)
            assert torch.equal(part[0], out[start:stop]), (i, start, stop, limit)
            assert torch.equal(part_lse[0].T, lse[start:stop]), (i, start, stop, limit)
            monkeypatch.undo() if not INTERPRETED else None


@pytest.mark.gpu
def test_bits_in_a_mixed_batch_of_many():
    """Decodes and chunks of 150 sequences in one call over pages."""
    draw = random.Random(5)
    lengths = [draw.choice((1, 7, 64, 500, 777, 2000)) for _ in range(150)]
    packed = make_packed(lengths, torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128)
    whole = attend(packed)
    *pages, table, _ = ot.make_pages(*packed[1:3], packed.cu_seqlens_k, 16)
    stops = [draw.randrange(1, n + 1) for n in lengths]
    starts = [draw.choice((n - 1, n - 1, draw.randrange(n))) for n in stops]
    first = packed.cu_seqlens_q.tolist()
    rows = [torch.arange(a + s, a + e) for a, s, e in zip(first[:-1], starts, stops, strict=True)]
    counts = torch.tensor([0] + [len(r) for r in rows], device=DEVICE)
    out = onchip.paged_attention(
        packed[0][torch.cat(rows).to(DEVICE)], *pages, table,
        torch.tensor(stops, dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=counts.cumsum(0).int(), max_seqlen_q=int(counts.max()), reproducible=True,
    )  # fmt: skip
    expected = [o[s:e] for (o, _), s, e in zip(whole, starts, stops, strict=True)]
    assert torch.equal(out, torch.cat(expected))


@pytest.mark.gpu
def test_gradients_are_ordinary():
    """Recording them changes no bit of the forward."""
    q, k, v = ot.make_qkv(2, 700, dtype=torch.bfloat16, device="cuda", **(SIZES | {"head_dim": 64}))
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def run(reproducible):
        out = onchip.attention(q, k, v, causal=True, reproducible=reproducible)
        with torch.no_grad():
            again = onchip.attention(q, k, v, causal=True, reproducible=reproducible)
        assert torch.equal(again, out)
        return torch.autograd.grad(out.float().square().sum(), inputs)

    for ours, usual in zip(run(True), run(False), strict=True):
        error = (ours - usual).float().norm() / usual.float().norm()
        assert error < 0.01


def test_programs_share_the_splits_of_few_tiles():
    """One program for each tile where they fill the device, or their states would take too much
    memory.
    """
    dtypes = torch.bfloat16, torch.bfloat16
    problem = Problem(1, 1, 40_960, 32, 8, 128, 128, *dtypes, 0.1, page_size=16, reproducible=True)
    plan = lambda p: fixed_order.ProgramPlan.of(p, p.batch * p.seqlen_q, 64, 132)
    assert plan(problem) == (1, 33, 80, 4)
    assert plan(problem._replace(seqlen_k=512)) == (1, 1, 1, 4)
    assert plan(problem._replace(batch=64)) == (64, 1, 80, 4)
    assert plan(problem._replace(seqlen_q=500, seqlen_k=500_000)).programs == 1


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"has_mask": True}, "has no mask with reproducible=True"),
        ({"dropout_p": 0.1}, "has no dropout_p with"),
        ({"page_dtype": torch.int8, "page_size": 16}, "has no 8-bit pages with"),
        ({"head_dim": 320}, "has no head dims 320 and 64 with"),
    ],
    ids=str,
)
def test_other_calls_are_refused(change, refusal):
    dtypes = torch.bfloat16, torch.bfloat16
    problem = Problem(1, 64, 64, 2, 2, 64, 64, *dtypes, 0.1, reproducible=True)
    triton, device = get_backend("triton"), DeviceInfo("cuda", "H200", (9, 0))
    assert find_refusal(triton, problem, device) is None
    assert refusal in find_refusal(triton, problem._replace(**change), device)
    amd = find_refusal(triton, problem, DeviceInfo("hip", "gfx942"))
    assert amd == "is not tested on AMD GPUs with reproducible=True"
