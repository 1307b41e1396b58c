"""The portable kernels on a real GPU: the contract at odd lengths, and properties that only a GPU
shows.
"""

import math

import pytest
import torch
from torch import Tensor

import onchip
import onchip.testing as ot
from onchip import masks

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = ((1, 1), (1, 799), (63, 111), (799, 1023), (1023, 799), (2049, 2049))
GQA64 = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16}
EVERYTHING = {"causal": True, "softcap": 5.0, "alibi": True, "bias": (0, 1, 1), "sinks": True}
EVERYTHING |= {"dropout_p": 0.2, "dropout_seed": 2**40 + 17, "return_stats": True}
DOCUMENT = "document"

# Every row is one set of compiled kernels: lengths and values change below, variants do not.
CALLS = {
    "causal": (GQA64, {"causal": True}),
    "dense": ({"num_heads": 2, "head_dim": 128, "dtype": BF16}, {}),
    "window": (
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 96, "head_dim_v": 72, "dtype": FP16},
        {"window_size": (100, 7), "sinks": True},
    ),
    "wide": ({"num_heads": 2, "head_dim": 256, "dtype": BF16}, {"causal": True}),
    "widest": (
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 512, "dtype": BF16},
        {"causal": True},
    ),
    "320 and 264": (
        {"num_heads": 2, "head_dim": 320, "head_dim_v": 264, "dtype": FP16},
        {"window_size": (100, 7), "sinks": True, "softcap": 5.0, "bias": (0, 1, 1)},
    ),
    "fp32": ({"num_heads": 2, "head_dim": 64, "dtype": FP32}, {"causal": True}),
    "mask": (GQA64, {"mask": DOCUMENT, "causal": True}),
    "everything": ({"num_heads": 2, "head_dim": 64, "dtype": FP16}, EVERYTHING),
}


def _tensors(options: dict, heads: int, lengths: tuple[int, int]) -> dict:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator).cuda()
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = draw(heads).requires_grad_()
    if options.pop("alibi", False):
        options["alibi_slopes"] = draw(heads).abs() / 64
    if "bias" in options:
        own = zip((1, heads, lengths[0]), options.pop("bias"), strict=True)
        options["bias"] = draw(*(n if mine else 1 for n, mine in own), lengths[1]).requires_grad_()
    if options.get("mask") == DOCUMENT:
        cuts = lambda n: torch.tensor([0, n // 3, n // 3, n // 2, n], dtype=torch.int32)
        options["mask"] = masks.document(cuts(lengths[0]), cuts(lengths[1]))
    return options


def _judge(name: str, lengths: tuple[int, int], layout=lambda x: x, **inputs) -> ot.Report:
    sizes, options = CALLS[name]
    q, k, v = map(layout, ot.make_qkv(1, *lengths, device="cuda", **sizes, **inputs))
    options = _tensors(options, q.shape[2], lengths)
    mask = options.pop("mask", None)
    if mask is not None:
        mask = masks.build(mask, 1, q.shape[2], *lengths, "cuda")
        options["mask"] = mask.to_dense()

    def attention(q, k, v, **options):
        options["mask"] = mask
        return onchip.attention(q, k, v, kernel="triton", return_lse=True, **options)

    return ot.assert_accurate(attention, q, k, v, grad=True, **options)


@pytest.fixture
def poisoned_memory():
    """Every torch.empty is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_odd_lengths(poisoned_memory, name, lengths):
    _judge(name, lengths)


@pytest.mark.parametrize("name", ("causal", "dense", "wide", "widest"))
def test_outliers(name):
    _judge(name, (1023, 1023), distribution="outlier")


@pytest.mark.parametrize("name", ("causal", "window", "mask", "320 and 264"))
def test_nan_around_the_tensors(name):
    _judge(name, (111, 799), layout=ot.poison_neighbours)


@pytest.mark.parametrize("head_dim", (128, 320, 512))
@pytest.mark.parametrize("lengths", ((1, 799), (1, 20000), (3, 2049)), ids=str)
def test_few_queries(lengths, head_dim):
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim, "dtype": BF16}
    q, k, v = ot.make_qkv(2, *lengths, device="cuda", **sizes)
    sinks = torch.randn(8, device="cuda")
    call = {"kernel": "triton", "return_lse": True}
    attention = lambda *qkv, **o: onchip.attention(*qkv, **call, **o)
    for deterministic in (False, True):
        options = {"causal": True, "sinks": sinks, "deterministic": deterministic}
        ot.assert_accurate(attention, q, k, v, **options)


def test_heads_first():
    _judge("causal", (799, 799), layout=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))


def _packed_call(seqlens: list[int]):
    packed = ot.make_packed(seqlens, device="cuda", **GQA64)
    call = {"causal": True, "return_lse": True, "kernel": "triton"}
    return packed, lambda *qkv, **o: onchip.varlen_attention(*qkv, **call, **o)


def test_packed(poisoned_memory):
    packed, attention = _packed_call([63, 1, 0, 799, 111, 1023])
    ot.assert_accurate(
        lambda *qkv, causal, **o: attention(*qkv, **o),
        *packed[:3],
        grad=True,
        causal=True,
        **packed.options,
    )


def _gradients(attention, tensors: tuple[Tensor, ...], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attention(*leaves)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("name", ("causal", "wide", "window"))
def test_every_run_gives_the_same_bits(name):
    sizes, options = CALLS[name]
    q, k, v = ot.make_qkv(2, 799, 1023, device="cuda", **sizes)
    options = _tensors(options, q.shape[2], (799, 1023))
    attention = lambda *qkv: onchip.attention(*qkv, kernel="triton", return_lse=True, **options)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device="cuda", dtype=q.dtype)
    first = _gradients(attention, (q, k, v), dout)
    for _ in range(20):
        assert all(map(torch.equal, first, _gradients(attention, (q, k, v), dout)))


def test_nan_in_a_neighbouring_sequence():
    packed, attention = _packed_call([333, 200, 470])
    call = lambda *qkv: attention(*qkv, **packed.options)
    dout = torch.randn_like(packed.q)
    clean = _gradients(call, packed[:3], dout)
    q, k, v = (x.clone() for x in packed[:3])
    k[333:533], v[333:533] = math.nan, math.nan
    others = [*range(333), *range(533, 1003)]
    for i, (a, b) in enumerate(zip(clean, _gradients(call, (q, k, v), dout), strict=True)):
        at = (slice(None), others) if i == 1 else others
        assert torch.equal(a[at], b[at])


def test_bad_offsets_give_wrong_rows_and_no_access_out_of_bounds():
    packed, attention = _packed_call([100, 100])
    bad = torch.tensor([-(10**6), 10**9, 3], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": bad, "cu_seqlens_k": bad, "max_seqlen_q": 4096, "max_seqlen_k": 4096}
    dout = torch.randn_like(packed.q)
    _gradients(lambda *qkv: attention(*qkv, **options), packed[:3], dout)
    torch.cuda.synchronize()


def test_random_lengths_compile_at_most_two_variants():
    from onchip.kernels.triton.forward import forward_kernel

    variants = lambda: sum(len(cache[0]) for cache in forward_kernel.device_caches.values())
    before = variants()
    for seqlen in torch.randint(1, 3000, (200,), generator=torch.Generator().manual_seed(1)):
        q, k, v = ot.make_qkv(1, 70, int(seqlen), device="cuda", head_dim=32, dtype=BF16)
        onchip.attention(q, k, v, kernel="triton")
    assert variants() - before <= 2


def test_no_synchronisation_and_capture_in_a_graph():
    q, k, v = (x.requires_grad_() for x in ot.make_qkv(1, 111, 111, device="cuda", **GQA64))
    call = lambda: onchip.attention(q, k, v, causal=True, kernel="triton")
    warm = call()
    torch.autograd.grad(warm, (q, k, v), torch.ones_like(warm))
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = call()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            captured = call()
        q.mul_(2)
        graph.replay()
        assert torch.equal(captured, call())


def test_a_million_keys():
    q, k, v = ot.make_qkv(1, 3, 2**20 + 7, device="cuda", num_heads=1, dtype=BF16)
    exact = ot.oracle(q, k, v)
    out, lse = onchip.attention(q, k, v, return_lse=True, kernel="triton")
    assert ot.max_error(lse, exact.lse) < 1e-4
    assert ot.rmse(out, exact.out) < 1e-2 * exact.out.square().mean().sqrt().item()


def test_tensors_past_two_billion_elements():
    """The last rows and keys of a long sequence equal a short one, forward and backward."""
    seqlen, last, sizes = 2**20 + 4096, 640, (16, 128)  # tiles begin at the same keys
    k = torch.empty(1, seqlen, *sizes, device="cuda", dtype=BF16).normal_()
    assert k.numel() > 2**31
    q, v = k[:, -200:].clone(), k.roll(1, -1)
    window = {"window_size": (300, 0), "kernel": "triton", "return_lse": True}
    attention = lambda *qkv: onchip.attention(*qkv, **window)
    dout = torch.randn_like(q)
    long = _gradients(attention, (q, k, v), dout)
    short = _gradients(attention, (q, k[:, -last:], v[:, -last:]), dout)
    for i, (a, b) in enumerate(zip(long, short, strict=True)):
        assert torch.equal(a[:, -last:] if i > 2 else a, b), i


def test_scores_far_beyond_the_range_of_exp():
    q, k, v = ot.make_qkv(1, 111, 799, device="cuda", **GQA64)
    exact = ot.oracle(100 * q, 100 * k, v, causal=True)
    out = onchip.attention(100 * q, 100 * k, v, causal=True, kernel="triton")
    assert ot.max_error(out, exact.out) < 0.1 and out.isfinite().all()
