"""What only many runs, huge tensors or hostile memory show of the GPU kernels."""

import gc
import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import onchip
import onchip.testing as ot
from onchip import kernels
from onchip.kernels.runtime.launcher import CachedLauncher
from tests.kernels.gpu import each_kernel

BF16, FP16 = torch.bfloat16, torch.float16
GQA = {"num_heads": 4, "num_kv_heads": 2}
REPEATS = 1000


@pytest.fixture(autouse=True)
def _free_memory():
    """Some of these fill half of the card: leave nothing behind."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def inputs(seqlen_q, seqlen_k=None, head_dim=64, dtype=BF16, batch=2, **others):
    shape = GQA | {"head_dim": head_dim, "dtype": dtype} | others
    return ot.make_qkv(batch, seqlen_q, seqlen_k, device="cuda", **shape)


def backward_refusal(kernel: str, qkv: tuple[Tensor, ...], **options) -> str | None:
    """Why this kernel has no backward for such a call, or None if it has."""
    from onchip.core.dispatch import plan

    explained = onchip.explain(
        *(x.detach().requires_grad_() for x in qkv), kernel=kernel, **options
    )
    try:
        plan(explained.problem, explained.device, kernel, backward=True)
    except onchip.UnsupportedError as error:
        return str(error)
    return None


def results(qkv, dout: Tensor | None, **options) -> dict[str, Tensor]:
    """out and lse, and the gradients if there is a dout."""
    leaves = [x.detach().requires_grad_(dout is not None) for x in qkv]
    out, lse = onchip.attention(*leaves, return_lse=True, **options)
    grads = () if dout is None else torch.autograd.grad(out, leaves, dout)
    tensors = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=False))}
    return {name: x.detach() for name, x in tensors.items()}


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


@each_kernel
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_thousand_runs_give_the_same_bits(kernel, head_dim, deterministic):
    """out, lse, dk and dv always; dq where it is not summed in the order tiles finish."""
    qkv = inputs(777, 1111, head_dim)
    options = {"causal": True, "kernel": kernel, "deterministic": deterministic}
    refusal = backward_refusal(qkv=qkv, **options)
    if refusal and deterministic:
        pytest.skip(refusal)
    dout = None if refusal else torch.randn_like(qkv[0])
    first = results(qkv, dout, **options)
    judged = [name for name in first if name != "dq" or deterministic or kernel == "triton"]
    differs = torch.zeros(len(judged), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        again = results(qkv, dout, **options)
        differs += torch.stack([(bits(again[n]) != bits(first[n])).any() for n in judged])
    assert dict(zip(judged, differs.tolist(), strict=True)) == dict.fromkeys(judged, 0)


def lost_to_fp32(q, k, v) -> tuple[Tensor, Tensor]:
    """(exact causal out, how far each element may be from it): scores off by 8 roundings of fp32 at
    the size of their sums of absolute products shift weights between keys, by first order; weights
    and out are rounded to the dtype. A ratio to some other fp32 program would say little: of 2,664
    rows, the three nearest to a tie have 91 to 100 % of its squared error, and what they get is
    luck.
    """
    dtype = q.dtype
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    visible = visible.tril(seqlen_k - seqlen_q)
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).masked_fill(~visible, -math.inf).softmax(-1)
    out = p @ v
    size = (q.abs() @ k.abs().mT * scale).masked_fill(~visible, 0.0).amax(-1, keepdim=True)
    columns = zip(v.unbind(-1), out.unbind(-1), strict=True)
    spread = [(p * (x[..., None, :] - y[..., None]).abs()).sum(-1) for x, y in columns]
    shifted = 2 * 8 * 2.0**-24 * size * torch.stack(spread, -1)
    rounded = torch.finfo(dtype).eps * (p @ v.abs() + out.abs())
    return out.transpose(1, 2), (shifted + rounded).transpose(1, 2)


@each_kernel
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scores", ["of either sign", "positive", "negative"])
def test_huge_scores(kernel, dtype, head_dim, scores):
    """Scores of 1e4 and more: what fp32 scores cannot resolve is lost, and nothing else; no NaN."""
    q, k, v = inputs(333, 444, head_dim, dtype)
    if scores != "of either sign":
        q, k = q.abs(), k.abs() if scores == "positive" else -k.abs()
    q, k = q * 100, k * 100
    grads = backward_refusal(kernel, (q, k, v), causal=True) is None
    dout = torch.randn_like(q) if grads else None
    ours = results((q, k, v), dout, causal=True, kernel=kernel)
    assert all(x.isfinite().all() for x in ours.values())
    exact, allowed = lost_to_fp32(q, k, v)
    assert ((ours["out"] - exact).abs() / allowed).max() <= 1.0


@pytest.fixture
def poisoned(monkeypatch):
    """Unwritten memory is NaN; unwritten integers are far out of range."""

    def fill(x: Tensor) -> Tensor:
        return x.fill_(math.nan if x.is_floating_point() else 2**30) if x.is_cuda else x

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        made = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, made=made, **kwargs: fill(made(*args, **kwargs))
        )


@each_kernel
@pytest.mark.parametrize("lengths", [(1, 1), (63, 111), (129, 799), (799, 1023)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 7)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_result_is_written(poisoned, kernel, lengths, options, head_dim):
    q, k, v = inputs(*lengths, head_dim)
    assert torch.empty(3, device="cuda").isnan().all() and q.new_empty(3).isnan().all()
    grad = backward_refusal(kernel, (q, k, v), **options) is None
    attend = lambda q, k, v, **o: onchip.attention(q, k, v, kernel=kernel, return_lse=True, **o)
    ot.assert_accurate(attend, q, k, v, grad=grad, **options)


@each_kernel
def test_every_result_of_a_packed_call_is_written(poisoned, kernel):
    shape = GQA | {"head_dim": 128, "dtype": BF16, "device": "cuda"}
    x = ot.make_packed([63, 1, 0, 799, 111], [70, 5, 3, 799, 0], **shape)
    attend = lambda *qkv, **o: onchip.varlen_attention(*qkv, kernel=kernel, return_lse=True, **o)
    ot.assert_accurate(attend, *x[:3], grad=True, causal=True, **x.options)


@each_kernel
@pytest.mark.parametrize("seqlen_q", [1, 3, 129])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_a_million_keys(kernel, seqlen_q, head_dim):
    q, k, v = inputs(seqlen_q, 2**20 + 7, head_dim, batch=1, num_heads=2, num_kv_heads=1)
    out, lse = onchip.attention(q, k, v, return_lse=True, kernel=kernel)
    rows = torch.tensor(sorted({0, seqlen_q // 2, seqlen_q - 1}), device="cuda")
    ot.assert_accurate((out[:, rows], lse[:, :, rows]), q[:, rows], k, v)


@each_kernel
def test_a_million_tokens_see_a_million_keys(kernel):
    """The last rows of a causal call of one head, the longest that there are."""
    n = 2**20 + 7
    q, k, v = inputs(n, n, 64, batch=1, num_heads=1, num_kv_heads=1)
    out, lse = onchip.attention(q, k, v, causal=True, return_lse=True, kernel=kernel)
    last = slice(n - 3, n)
    ot.assert_accurate((out[:, last], lse[:, :, last]), q[:, last], k, v, causal=True)


PAST = 2**20 + 4096  # rows of 16 heads of 128: the last 4096 lie past 2^31 elements
LEFT = 300


def huge(*shape: int) -> Tensor:
    x = torch.empty(*shape, 16, 128, device="cuda", dtype=BF16).normal_()
    assert x.numel() > 2**31
    return x


@pytest.mark.alone
@each_kernel
def test_a_sequence_past_two_billion_elements(kernel):
    """The first and the last rows of q, k, v, out and their gradients equal a short call's."""
    window = {"window_size": (LEFT, 0), "kernel": kernel}
    q, k, v, dout = (huge(1, PAST) for _ in range(4))
    ours = results((q, k, v), dout, **window)
    for part, kept in (
        (slice(None, 700), slice(None, 350)),
        (slice(-700, None), slice(-350, None)),
    ):
        short = results(tuple(x[:, part] for x in (q, k, v)), dout[:, part], **window)
        for name in ("out", "dq", "dk", "dv"):
            near, far = short[name][:, kept], ours[name][:, part][:, kept]
            assert difference(far, near) < 0.01, (name, part)


@pytest.mark.alone
@each_kernel
def test_a_batch_past_two_billion_elements(kernel):
    q, k, v, dout = (huge(1030, 1024) for _ in range(4))
    ours = results((q, k, v), dout, causal=True, kernel=kernel)
    for b in (0, 1023, 1029):
        own = results(tuple(x[b : b + 1] for x in (q, k, v)), dout[b : b + 1], causal=True)
        for name in ("out", "dq", "dk", "dv"):
            assert difference(ours[name][b : b + 1], own[name]) < 0.01, (name, b)


@pytest.mark.alone
@each_kernel
def test_packed_sequences_past_two_billion_elements(kernel):
    q, k, v = (huge(PAST) for _ in range(3))
    cuts = torch.tensor([0, 700, PAST - 2049, PAST - 800, PAST], dtype=torch.int32, device="cuda")
    lengths = (cuts, cuts, PAST, PAST)
    options = {"window_size": (LEFT, 0), "kernel": kernel}
    out = onchip.varlen_attention(q, k, v, *lengths, **options)
    for start, end in ((0, 700), (PAST - 2049, PAST - 800), (PAST - 800, PAST)):
        own = onchip.attention(*(x[None, start:end] for x in (q, k, v)), **options)
        assert difference(out[start:end], own[0]) < 0.01, start


def difference(got: Tensor, want: Tensor) -> float:
    """RMSE over RMS: two roundings of one result are 0.003 apart, two results are not."""
    return ot.rmse(got, want.double()) / want.double().square().mean().sqrt().item()


def members() -> Iterator[tuple[str, object]]:
    """(name, value) of everything that the modules of the GPU kernels hold."""
    for package in ("triton", "hopper"):
        folder = importlib.import_module(f"{kernels.__name__}.{package}")
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                yield f"{package}.{name}", value


def jit_functions() -> dict[str, object]:
    """Every kernel of the package that has a cache of compiled variants."""
    return {name: value for name, value in members() if hasattr(value, "device_caches")}


def forget_variants() -> None:
    for function in jit_functions().values():
        function.device_caches.clear()
    for _, handle in members():
        if isinstance(handle, CachedLauncher):
            handle._signatures.clear()


def variants() -> Counter:
    sizes = {
        n: sum(len(c[0]) for c in f.device_caches.values()) for n, f in jit_functions().items()
    }
    return Counter({name: size for name, size in sizes.items() if size})


@each_kernel
@pytest.mark.parametrize("packed", [False, True])
def test_two_hundred_lengths_compile_two_variants(kernel, packed):
    """Forward and backward; and in the steady state nothing is compiled any more."""
    pytest.importorskip("triton")
    forget_variants()
    draw = torch.Generator().manual_seed(1)

    def call() -> None:
        seqlen_q, seqlen_k = torch.randint(1, 3000, (2,), generator=draw).tolist()
        batch = int(torch.randint(1, 4, (1,), generator=draw))
        shape = {"num_heads": 2, "head_dim": 64, "dtype": BF16, "device": "cuda"}
        if packed:
            x = ot.make_packed([seqlen_q] * batch, [seqlen_k] * batch, **shape)
            attend, tensors = onchip.varlen_attention, x[:3]
            options = x.options
        else:
            attend, tensors = onchip.attention, ot.make_qkv(batch, seqlen_q, seqlen_k, **shape)
            options = {}
        leaves = [t.requires_grad_() for t in tensors]
        out = attend(*leaves, causal=True, kernel=kernel, **options)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    for _ in range(200):
        call()
    after = variants()
    assert after and {name: n for name, n in after.items() if n > 2} == {}
    for _ in range(50):
        call()
    assert variants() == after
