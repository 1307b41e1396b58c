"""Attention with reproducible=True: a row has the same bits in every call that computes it."""

import random

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import find_refusal, get_backend
from onchip.core.problem import Problem

SINKS = torch.linspace(-2, 2, 6)
OPTIONS = {
    "plain": {},
    "window": {"window_size": (70, 0)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": SINKS},
    "all": {"window_size": (9, 0), "softcap": 5.0, "sinks": SINKS, "softmax_scale": 0.3},
}
LENGTHS = (1, 63, 64, 65, 150, 200)
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 40}


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attend(packed, **options):
    """(out, lse) of each sequence, from one packed call."""
    options = {"return_lse": True, "reproducible": True, "causal": True} | options
    out, lse = onchip.varlen_attention(*packed[:3], **packed.options, **options)
    sizes = packed.cu_seqlens_q.diff().tolist()
    return list(zip(out.split(sizes), lse.T.split(sizes), strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_accuracy_rule(dtype, options):
    queries, keys = (1, 63, 0, 64, 11), (150, 63, 5, 64, 0)
    packed = ot.make_packed(queries, keys, dtype=dtype, **SIZES)
    for causal in (False, True):
        call = {"causal": causal, "reproducible": True, **options}
        got = onchip.varlen_attention(*packed[:3], **packed.options, **call, return_lse=True)
        ot.assert_accurate(got, *packed[:3], causal=causal, **options, **packed.options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_the_call(dtype, options, threads):
    """Dense, packed, alone, in chunks, over pages of several sizes, decoded one by one."""
    draw = random.Random(3)
    packed = ot.make_packed(LENGTHS, LENGTHS, dtype=dtype, **SIZES)
    call = {"return_lse": True, "reproducible": True, **options}
    laid = [ot.make_pages(*packed[1:3], packed.cu_seqlens_k, size) for size in (1, 16, 37)]
    for i, (out, lse) in enumerate(attend(packed, **options)):
        rows = slice(*packed.cu_seqlens_k[i : i + 2].tolist())
        q, k, v = (t[None, rows] for t in packed[:3])
        alone, alone_lse = onchip.attention(q, k, v, causal=True, **call)
        assert torch.equal(alone[0], out) and torch.equal(alone_lse[0].T, lse)
        stop = draw.randrange(1, LENGTHS[i] + 1)
        start = draw.choice((stop - 1, draw.randrange(stop)))
        *pages, table, _ = draw.choice(laid)
        tables = table[i : i + 1], torch.tensor([stop], dtype=torch.int32)
        part, part_lse = onchip.paged_attention(q[:, start:stop], *pages, *tables, **call)
        assert torch.equal(part[0], out[start:stop])
        assert torch.equal(part_lse[0].T, lse[start:stop])


def test_the_default_does_depend_on_the_call():
    """Otherwise the test above could not fail."""
    packed = ot.make_packed(LENGTHS, LENGTHS, **SIZES)
    whole = attend(packed, reproducible=False)[-1][0]
    start = sum(LENGTHS[:-1])
    q, k, v = (t[None, start:] for t in packed[:3])
    last = [onchip.attention(q[:, n - 1 : n], k[:, :n], v[:, :n])[0, 0] for n in range(1, 201)]
    assert not torch.equal(torch.stack(last), whole)


def test_gradients_are_ordinary():
    """They equal the default's; recording them changes no bit of the forward."""
    q, k, v = (t.requires_grad_() for t in ot.make_qkv(2, 150, dtype=torch.float64, **SIZES))
    sinks = SINKS.double().requires_grad_()
    inputs = q, k, v, sinks

    def run(reproducible):
        call = {"causal": True, "sinks": sinks, "reproducible": reproducible}
        out = onchip.attention(q, k, v, **call)
        with torch.no_grad():
            assert torch.equal(onchip.attention(q, k, v, **call), out)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    for ours, usual in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, usual, rtol=0, atol=1e-12)


MASK = onchip.masks.mod(lambda b, h, q, k: q >= k)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"mask": MASK}, "has no mask with reproducible=True"),
        ({"bias": torch.zeros(1, 1, 1, 8)}, "has no bias with"),
        ({"alibi_slopes": torch.ones(6)}, "has no alibi_slopes with"),
        ({"dropout_p": 0.1}, "has no dropout_p with"),
        ({"return_stats": True}, "has no return_stats with"),
        ({"precision": "int8"}, "computes with q, k and v as they come"),
    ],
)
def test_other_options_are_refused(options, refusal):
    with pytest.raises(onchip.UnsupportedError, match=f"tiled: {refusal}"):
        onchip.attention(*ot.make_qkv(1, 8, **SIZES), reproducible=True, **options)


def test_drafts_that_branch_and_8_bit_pages_are_refused():
    tiled, usual = get_backend("tiled"), (torch.float32, torch.float32, 0.1)
    problem = Problem(1, 4, 64, 2, 2, 64, 64, *usual, page_size=16, reproducible=True)
    assert find_refusal(tiled, problem, DeviceInfo("cpu")) is None
    for change, why in (({"has_tree_mask": True}, "tree_mask"), ({"page_dtype": torch.int8}, "8")):
        assert why in find_refusal(tiled, problem._replace(**change), DeviceInfo("cpu"))


def test_a_gpu_is_served_by_triton_alone():
    problem = Problem(1, 64, 64, 2, 2, 64, 64, torch.float32, torch.float32, 0.1, reproducible=True)
    served = {DeviceInfo("cuda", "H200", (9, 0)): ["triton"], DeviceInfo("mps"): []}
    for device, kernels in served.items():
        refusals = {
            name: find_refusal(get_backend(name), problem, device)
            for name in onchip.core.dispatch.backend_names()
        }
        assert [name for name, refusal in refusals.items() if refusal is None] == kernels
    refusal = find_refusal(get_backend("tiled"), problem, DeviceInfo("mps"))
    assert refusal == "computes with reproducible=True on the CPU only, not on mps"
