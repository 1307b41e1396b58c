"""Test the accuracy of an attention kernel: inputs, an fp64 oracle, a rounding model and one rule.

    import onchip.testing as ot
    q, k, v = ot.make_qkv(2, 799, num_heads=4, dtype=torch.bfloat16)
    print(ot.assert_accurate(my_attention, q, k, v, causal=True, grad=True))

Everything here materialises the N x N scores, is written to be read rather than to be fast, and
shares no code with the kernels under test. Options have the names and the meaning of
`onchip.attention`.

The rule, measured against fp64 and never tuned per test:

bf16, fp16  (a) tensors of at least 4,096 elements: RMSE <= 1.05x that of the rounding model,
                gradients <= 1.10x (stated for the "normal" and "outlier" inputs of `make_qkv`);
            (b) every tensor: max error <= unfused attention in the same dtype (or the rounding
                model, if its error is larger) + 1 ulp at max|ref|.
fp32        out of at least 4,096 elements: RMSE <= 1.25x unfused fp32; out and gradients: within
            1e-5 of max|ref|.
fp64        within 1e-12.
lse, stats  within 1e-5 of max(1, max|ref|), fp64 1e-12; infinities in the same places.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip import masks
from onchip.core.problem import LEARNED

INF = float("inf")
MODEL_MIN_ELEMENTS = 4096  # the RMSE of fewer elements is too noisy for a limit of 5 %
DISTRIBUTIONS = ("normal", "outlier", "sink", "biased")


def make_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    distribution: str = "normal",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v in `(batch, seqlen, heads, head_dim)`, the same numbers on every machine.

    distribution: "normal" N(0, 1); "outlier" N(0, 1) + N(0, 100) Bernoulli(0.001); "sink" the first
    key scores about 8 above the others and its value is small; "biased" k has a constant offset of
    standard deviation 10 in one channel of 16.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"{distribution=} must be one of {DISTRIBUTIONS}")
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    num_kv_heads = num_kv_heads or num_heads
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q = draw(batch, seqlen_q, num_heads, head_dim)
    k = draw(batch, seqlen_k, num_kv_heads, head_dim)
    v = draw(batch, seqlen_k, num_kv_heads, head_dim_v or head_dim)
    if distribution == "outlier":
        hit = lambda x: torch.rand(x.shape, generator=generator) < 0.001
        q, k, v = (x + 10 * draw(*x.shape) * hit(x) for x in (q, k, v))
    elif distribution == "sink" and seqlen_k:
        q = q + 1.0
        k[:, 0] = 8 / math.sqrt(head_dim)
        v[:, 0] *= 0.05
    elif distribution == "biased":
        k[..., ::16] += 10 * draw(num_kv_heads, len(range(0, head_dim, 16)))
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


class Packed(NamedTuple):
    """Packed sequences, `(total, heads, head_dim)`, with int32 cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments of `onchip.varlen_attention` and `oracle`."""
        longest = lambda cu: int(cu.diff().max()) if len(cu) > 1 else 0
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "max_seqlen_q": longest(self.cu_seqlens_q),
            "max_seqlen_k": longest(self.cu_seqlens_k),
        }


def make_packed(
    seqlens_q: list[int], seqlens_k: list[int] | None = None, *, seed: int = 0, **kwargs: Any
) -> Packed:
    """`make_qkv` for packed sequences of these lengths (0 is allowed); same keywords."""
    seqlens_k = seqlens_q if seqlens_k is None else seqlens_k
    drawn = [
        make_qkv(1, sq, sk, seed=seed + b, **kwargs)
        for b, (sq, sk) in enumerate(zip(seqlens_q, seqlens_k, strict=True))
    ]
    q, k, v = (torch.cat([x[0] for x in column]) for column in zip(*drawn, strict=True))
    bounds = lambda lengths: [0, *itertools.accumulate(lengths)]
    cu = lambda lengths: torch.tensor(bounds(lengths), dtype=torch.int32, device=q.device)
    return Packed(q, k, v, cu(seqlens_q), cu(seqlens_k))


class Pages(NamedTuple):
    """Keys and values as `onchip.paged_attention` takes them."""

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    cache_seqlens: Tensor


def make_pages(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, page_size: int, *, spare: int = 3, seed: int = 0
) -> Pages:
    """Copy packed keys and values into pages in random order. Slots after the end of a sequence and
    `spare` unused pages hold NaN, and the page table has one extra column of -1.
    """
    lengths = cu_seqlens_k.cpu().diff()
    used = -(-lengths // page_size)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(int(used.sum()) + spare, generator=generator, dtype=torch.int32)
    table = torch.full((len(lengths), int(used.max()) + 1), -1, dtype=torch.int32)
    taken = torch.arange(table.shape[1]) < used[:, None]
    table[taken] = order[: int(used.sum())]
    token = torch.arange(int(lengths.sum()))
    b = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    position = token - cu_seqlens_k.cpu()[b]
    slots = (table[b, position // page_size].long() * page_size + position % page_size).to(k.device)

    def lay(x: Tensor) -> Tensor:
        flat = x.new_full((len(order) * page_size, *x.shape[1:]), math.nan)
        flat[slots] = x
        return flat.unflatten(0, (len(order), page_size))

    return Pages(lay(k), lay(v), table.to(k.device), lengths.to(k.device, torch.int32))


def poison_neighbours(x: Tensor, pad: int = 8) -> Tensor:
    """A view equal to x inside a larger storage of NaN: `pad` elements before and after x in every
    dimension. A kernel that reads outside its tensor and uses the values returns NaN."""
    inside = torch.full([n + 2 * pad for n in x.shape], math.nan, dtype=x.dtype, device=x.device)
    for dim, n in enumerate(x.shape):
        inside = inside.narrow(dim, pad, n)
    return inside.copy_(x)


@dataclass(frozen=True)
class _Options:
    """The options that scores and softmax depend on; see `onchip.attention`."""

    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    mask: object = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    score_mod: Callable | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    sequence: int = 0  # the batch index of the first row, for dropout and score_mod
    saved_out: Tensor | None = None  # the saved out in the backward of the rounding model


# Options of a kernel that do not change the exact result
CARRIED = ("return_lse", "return_stats", "deterministic", "out_dtype", "precise_delta", "kernel")
CARRIED += ("max_seqlen_q", "max_seqlen_k")


def _visible(o: _Options, shape: torch.Size, device: torch.device) -> Tensor:
    """The visible pairs, bool, broadcastable to `shape = (batch, heads, seqlen_q, seqlen_k)`."""
    batch, heads, seqlen_q, seqlen_k = shape
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k, device=device)
    left, right = o.window_size
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if o.causal:
        visible &= keys <= diagonal
    if left is not None:
        visible &= keys >= diagonal - left
    if right is not None:
        visible &= keys <= diagonal + right
    if o.mask is None:
        return visible
    if isinstance(o.mask, Tensor) and o.mask.dtype == torch.bool:
        return visible & o.mask.to(device)
    built = masks.build(o.mask, batch, heads, seqlen_q, seqlen_k, str(device))
    return visible & built.to_dense()


def _scores(q: Tensor, k: Tensor, o: _Options, on_dscores: Callable | None) -> Tensor:
    """The masked scores `(batch, heads, seqlen_q, seqlen_k)` in q's dtype; -inf where invisible.

    q, k are `(batch, heads, seqlen, head_dim)`. on_dscores rewrites the gradient of the product.
    """
    scale = q.shape[-1] ** -0.5 if o.softmax_scale is None else o.softmax_scale
    s = (q @ k.mT) * scale
    if on_dscores is not None and s.requires_grad:
        s.register_hook(on_dscores)
    if o.softcap:
        s = o.softcap * torch.tanh(s / o.softcap)
    seqlen_q, seqlen_k = s.shape[-2:]
    if o.alibi_slopes is not None:
        rows = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        distance = (rows - torch.arange(seqlen_k, device=q.device)).abs().to(s.dtype)
        s = s - o.alibi_slopes.to(s)[..., None, None] * distance
    if o.bias is not None:
        s = s + o.bias.to(s)
    if o.score_mod is not None:
        s = _modify_scores(o.score_mod, s, o.sequence)
    return s.masked_fill(~_visible(o, s.shape, s.device), -INF)


def _modify_scores(score_mod: Callable, s: Tensor, first: int) -> Tensor:
    """score_mod(score, b, h, q, k) of every score as torch itself evaluates it: one score a call,
    mapped over the four dimensions as FlexAttention does.
    """
    if not s.numel():
        return s
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    indices = [torch.arange(n, device=s.device) for n in s.shape]
    indices[0] += first
    with TransformGetItemToIndex():
        for dim in (3, 2, 1, 0):
            in_dims = (0, *(0 if i == dim else None for i in range(4)))
            score_mod = torch.vmap(score_mod, in_dims)
        return score_mod(s, *indices).to(s.dtype)


def _philox4x32(counter: list, key: tuple[int, int]) -> list:
    """Philox-4x32-10 of four words (ints or int64 tensors holding 32 bits) and a two-word key."""
    low = 0xFFFFFFFF
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # int64 wraps: the 64 bits of the product are right
        x0, x1, x2, x3 = (b >> 32 & low) ^ x1 ^ k0, b & low, (a >> 32 & low) ^ x3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [x0, x1, x2, x3]


def philox_keep(
    seed: int | Tensor,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    p: float,
    first: int = 0,
) -> Tensor:
    """Which probabilities dropout keeps, bool `(batch, heads, seqlen_q, seqlen_k)`, on the CPU.

    Philox-4x32-10, key = seed (low, high 32 bits), counter = (k // 4, q, head, batch), lane k % 4;
    kept iff the word is below round((1 - p) 2^32). Batch indices count from `first`.
    """
    seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    groups = torch.arange(-(-seqlen_k // 4))
    rows = torch.arange(seqlen_q)[:, None]
    planes = torch.arange(heads)[:, None, None]
    sequences = torch.arange(first, first + batch)[:, None, None, None]
    words = _philox4x32([groups, rows, planes, sequences], (seed & 0xFFFFFFFF, seed >> 32))
    lanes = torch.stack(torch.broadcast_tensors(*words), dim=-1)
    return lanes.flatten(-2)[..., :seqlen_k] < round((1 - p) * 2**32)


def _kept(o: _Options, s: Tensor) -> Tensor | None:
    """The factor dropout puts on each probability, 0 or 1 / (1 - p), or None without dropout."""
    if not o.dropout_p:
        return None
    if o.dropout_seed is None:
        raise ValueError(f"dropout_p={o.dropout_p} needs a dropout_seed: the oracle draws none")
    batch, heads, seqlen_q, seqlen_k = s.shape
    keep = philox_keep(o.dropout_seed, batch, heads, seqlen_q, seqlen_k, o.dropout_p, o.sequence)
    return keep.to(s) / (1 - o.dropout_p)


class Oracle(NamedTuple):
    """`out` has the layout of q, the others `(batch, heads, seqlen_q)`, packed `(heads, total)`.

    max_logit: the largest score of a visible key, without the sink; -inf for an empty row. entropy:
    of the row's probabilities with the sink's, in nats; 0 for an empty row.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor


def oracle(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Oracle:
    """Attention in fp64, differentiable in q, k, v, bias and sinks, through out and through lse.

    `s = softcap tanh(softmax_scale q.k / softcap) - slope |i + seqlen_k - seqlen_q - j| + bias`,
    then score_mod, over the visible keys. A row without visible keys gives out 0, lse -inf (with a
    sink: the sink) and zero gradients. Keys that no row sees must be finite here: 0 x NaN is NaN.
    mask: a bool tensor broadcastable to the scores, or anything `onchip.masks.as_mask` takes.
    For fp64 gradients the leaves must be fp64: autograd rounds a gradient to its leaf's dtype.
    """
    return Oracle(*_answer(_exact, torch.float64, q, k, v, _Options(**options)))


def unfused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`out` of plain PyTorch: matmul, softmax, matmul, every result in q's dtype."""
    return _answer(_plain, q.dtype, q, k, v, _Options(**options))[0]


def rounding_model(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` in fp64, where only the inputs and the outputs of 16-bit matmuls are rounded.

    Forward: P (row maximum subtracted, unnormalised) to dtype and out to out_dtype. Backward, by
    autograd: P, dS and the saved out; the caller rounds the gradients of fp64 leaves to dtype.
    dtype defaults to q's, out_dtype to dtype. saved_out: the out of the kernel under test, so that
    both backwards start from the same out. The rounding of a row of out shifts its whole row of dS:
    where a few rows with sharp softmax carry the error, two correct roundings were measured 1.4x
    apart in dk, and 1.01x from the same out.
    """
    dtype = dtype or q.dtype
    core = lambda s, v, kept, saved: _Rounded.apply(s, v, kept, saved, dtype, out_dtype or dtype)
    on_dscores = lambda ds: _rounded(ds, dtype)
    out, lse = _answer(core, torch.float64, q, k, v, _Options(**options), on_dscores)
    return out, lse


def _answer(core, dtype, q, k, v, o: _Options, on_dscores=None) -> tuple[Tensor, ...]:
    """`core(logits, v, kept, saved_out) -> (out, ...)` of the scores, sequence by sequence."""
    if o.cu_seqlens_q is None or o.cu_seqlens_k is None:
        return _dense(core, dtype, q, k, v, o, on_dscores)
    if o.bias is not None:
        raise ValueError("bias is for dense calls: packed sequences share no score matrix")
    parts = []
    bounds_q, bounds_k = o.cu_seqlens_q.tolist(), o.cu_seqlens_k.tolist()
    for b in range(len(bounds_q) - 1):
        cut_q, cut_k = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        one = replace(o, cu_seqlens_q=None, cu_seqlens_k=None, sequence=b)
        if o.alibi_slopes is not None and o.alibi_slopes.ndim == 2:
            one = replace(one, alibi_slopes=o.alibi_slopes[b])
        if o.saved_out is not None:
            one = replace(one, saved_out=o.saved_out[None, cut_q])
        sequence = (q[None, cut_q], k[None, cut_k], v[None, cut_k])
        parts.append(_dense(core, dtype, *sequence, one, on_dscores))
    out, *rows = zip(*parts, strict=True)
    return torch.cat(out, 1)[0], *(torch.cat(x, 2)[0] for x in rows)


def _dense(core, dtype, q, k, v, o: _Options, on_dscores) -> tuple[Tensor, ...]:
    group_size = q.shape[2] // k.shape[2]
    q = q.to(dtype).transpose(1, 2)
    k, v = (x.to(dtype).transpose(1, 2).repeat_interleave(group_size, 1) for x in (k, v))
    s = _scores(q, k, o, on_dscores)
    sinks = s.new_full((s.shape[1],), -INF) if o.sinks is None else o.sinks.to(s)
    column = sinks[None, :, None, None].expand(*s.shape[:-1], 1)  # one more logit without a value
    saved_out = None if o.saved_out is None else o.saved_out.to(s).transpose(1, 2)
    out, *rows = core(torch.cat([s, column], -1), v, _kept(o, s), saved_out)
    return out.transpose(1, 2), *rows


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised p, its sum l (1 for an empty row) and lse (-inf for an empty row)."""
    m = logits.detach().amax(-1, keepdim=True)
    pivot = m.masked_fill(m == -INF, 0.0)  # an empty row: -inf - -inf would be NaN
    p = torch.exp(logits - pivot)
    l = p.sum(-1, keepdim=True)
    empty = l == 0
    l = l.masked_fill(empty, 1.0)
    return p, l, (torch.log(l) + pivot).masked_fill(empty, -INF).squeeze(-1)


def _exact(logits: Tensor, v: Tensor, kept: Tensor | None, _) -> tuple[Tensor, ...]:
    p, l, lse = _softmax(logits)
    p = p / l
    weights = p[..., :-1] if kept is None else p[..., :-1] * kept
    keys = logits.detach()[..., :-1]
    max_logit = keys.amax(-1) if keys.shape[-1] else torch.full_like(lse, -INF)
    return weights @ v, lse, max_logit, torch.special.entr(p.detach()).sum(-1)


def _plain(logits: Tensor, v: Tensor, kept: Tensor | None, _) -> tuple[Tensor, Tensor]:
    empty = (logits == -INF).all(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., :-1]
    lse = torch.logsumexp(logits.masked_fill(empty, 0.0), -1).masked_fill(empty[..., 0], -INF)
    return (p if kept is None else p * kept) @ v, lse


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


class _Rounded(torch.autograd.Function):
    """`_exact` with the roundings of `rounding_model`; backward as flash kernels compute it."""

    @staticmethod
    def forward(ctx, logits, v, kept, saved_out, dtype, out_dtype):
        p, l, lse = _softmax(logits)
        factor = 1.0 if kept is None else kept
        out = _rounded((_rounded(p[..., :-1], dtype) * factor) @ v / l, out_dtype)
        ctx.save_for_backward(p / l, v, kept, out if saved_out is None else saved_out)
        ctx.dtype = dtype
        return out, lse

    @staticmethod
    def backward(ctx, *grad_outputs):
        dout, dlse = grad_outputs
        p, v, kept, out = ctx.saved_tensors
        factor = 1.0 if kept is None else kept
        dv = (_rounded(p[..., :-1], ctx.dtype) * factor).mT @ dout
        dp = torch.nn.functional.pad((dout @ v.mT) * factor, (0, 1))  # the sink has no value
        delta = (out * dout).sum(-1, keepdim=True) - dlse[..., None]
        return p * (dp - delta), dv, None, None, None, None


class Verdict(NamedTuple):
    """One line of a report: an error of one tensor, and the limit of the rule."""

    tensor: str
    rule: str
    measured: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.measured <= self.allowed  # False for NaN


class Report(tuple[Verdict, ...]):
    """The verdicts of one call; prints as a table."""

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self)

    def __str__(self) -> str:
        lines = [f"{'tensor':<10} {'rule':<26} {'measured':>10} {'allowed':>10}"]
        for x in self:
            mark = "" if x.ok else "  <- FAILS"
            lines.append(
                f"{x.tensor:<10} {x.rule:<26} {x.measured:>10.3g} {x.allowed:>10.3g}{mark}"
            )
        return "\n".join(lines)


def _error(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| in fp64; 0 where both are the same infinity."""
    got, want = got.detach().double(), want.detach().double()
    return torch.where(got == want, 0.0, got - want).abs()


def max_error(got: Tensor, want: Tensor) -> float:
    """The largest absolute error."""
    return _error(got, want).max().item() if want.numel() else 0.0


def rmse(got: Tensor, want: Tensor) -> float:
    """The root of the mean squared error."""
    return _error(got, want).square().mean().sqrt().item() if want.numel() else 0.0


def ulp(dtype: torch.dtype, x: float) -> float:
    """The spacing of dtype's numbers at magnitude x."""
    tiny = torch.finfo(dtype).tiny
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(x, tiny)))


def _ratio(error: float, yardstick: float) -> float:
    return error / yardstick if yardstick else 0.0 if error == 0.0 else INF


def compare(out: Tensor, other: Tensor, exact: Tensor, allowed: float = 1.02) -> float:
    """The RMSE of out over that of another fused kernel; AssertionError if above `allowed`."""
    ratio = _ratio(rmse(out, exact), rmse(other, exact))
    if not ratio <= allowed:
        raise AssertionError(f"RMSE is {ratio:.3f}x the other's, {allowed}x is allowed")
    return ratio


class _Yardsticks(NamedTuple):
    """References by tensor name: exact (also lse and stats), rounding model, unfused in dtype, and
    the model of a kernel that rounds only its outputs, out and the gradients.
    """

    exact: dict[str, Tensor]
    model: dict[str, Tensor]
    plain: dict[str, Tensor]
    stored: Callable[[], dict[str, Tensor]]

    def noise(self, name: str) -> float:
        """fp32 round-off that no reference shows: a gradient that cancels to 0 is a difference of
        fp32 sums, which unfused attention happens to get exactly and the model computes in fp64."""
        size = lambda x: x.abs().max().item() if x.numel() else 0.0
        if name == "out":
            return 1.2e-7 * size(self.exact["out"])
        return 2e-6 * max(size(x) for key, x in self.exact.items() if key in ("dq", "dk", "dv"))


def assert_accurate(
    attention: Callable[..., Any] | Tensor | tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad: bool | Collection[str] = False,
    **options: Any,
) -> Report:
    """Test `attention(q, k, v, **options)` by the rule; AssertionError with the table if it fails.

    attention returns `out`, `(out, lse)`, `(out, lse, stats)` or `(out, stats)`; its result may be
    passed in its place. grad=True also tests dq, dk, dv (and dbias, dsinks if bias and sinks
    require a gradient) for a random dout, and a random dlse if the returned lse is differentiable.
    Names, such as ("k", "sinks"), choose the inputs that require a gradient.
    """
    leaves = _leaves(q, k, v, options, None, grad)
    if callable(attention):
        others = {**options, **{name: leaves[name] for name in leaves if name in options}}
        attention = attention(leaves["q"], leaves["k"], leaves["v"], **others)
    out, lse, rows = _unpack(attention)
    dout, dlse = _cotangents(out, lse, q.dtype) if out.requires_grad else (None, None)
    checked_options = {name: x for name, x in options.items() if name not in CARRIED}
    yardsticks = _yardsticks(q, k, v, checked_options, out, dout, dlse)
    got = {"out": out, **rows, **_gradients(leaves, out, lse, dout, dlse)}
    report = Report(x for name in got for x in _judge(name, got[name], yardsticks, q.dtype))
    if not report.ok:
        raise AssertionError(f"outside the accuracy rule:\n{report}")
    return report


def _leaves(
    q, k, v, options: dict, dtype: torch.dtype | None, grad: bool | Collection[str]
) -> dict[str, Tensor]:
    """q, k, v, and bias and sinks that require a gradient, detached with their strides, in dtype if
    one is given. The inputs that `grad` names require a gradient.
    """
    named = {"q": q, "k": k, "v": v}
    for name in LEARNED:
        if options.get(name) is not None and options[name].requires_grad:
            named[name] = options[name]
    wanted = grad if not isinstance(grad, bool) else tuple(named) if grad else ()
    detached = {name: x.detach().to(dtype or x.dtype) for name, x in named.items()}
    return {name: x.requires_grad_(name in wanted) for name, x in detached.items()}


def _unpack(result) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """out, lse or None, and the tensors with one number per row by name."""
    if isinstance(result, Tensor):
        return result, None, {}
    out, *rest = result
    lse = next((x for x in rest if isinstance(x, Tensor)), None)
    stats = next((x for x in rest if hasattr(x, "entropy")), None)
    rows = {} if lse is None else {"lse": lse}
    if stats is not None:
        rows |= {"max_logit": stats.max_logit, "entropy": stats.entropy}
    return out, lse, rows


def _cotangents(
    out: Tensor, lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Random dout and dlse. dout holds values of dtype, which a 16-bit matmul takes as they are."""
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(dtype).to(out)
    if lse is None or not lse.requires_grad:
        return dout, None
    return dout, torch.randn(lse.shape, generator=generator).to(lse)


def _gradients(leaves: dict, out: Tensor, lse: Tensor | None, dout, dlse) -> dict[str, Tensor]:
    """{"dq": ..., ...}; empty without a dout."""
    if dout is None:
        return {}
    outputs, cotangents = [out], [dout.to(out)]
    if dlse is not None:
        outputs, cotangents = [out, lse], [dout.to(out), dlse.to(lse)]
    inputs = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(outputs, list(inputs.values()), cotangents, materialize_grads=True)
    return {f"d{name}": x.detach() for name, x in zip(inputs, grads, strict=True)}


def _yardsticks(q, k, v, options: dict, out: Tensor, dout, dlse) -> _Yardsticks:
    """`out` is the result under test. The backward of the model starts from it as the saved out."""

    def answer(way: Callable, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = _leaves(q, k, v, options, dtype, dout is not None)
        result = way(**{**options, **leaves})
        named = result._asdict() if isinstance(result, Oracle) else {"out": result[0]}
        grads = _gradients(leaves, result[0], result[1], dout, dlse)
        return {name: x.detach() for name, x in named.items()} | grads

    def model(dtype: torch.dtype) -> dict[str, Tensor]:
        saved = {"out_dtype": out.dtype, "saved_out": out.detach(), "dtype": dtype}
        return round_gradients(answer(partial(rounding_model, **saved), torch.float64))

    def round_gradients(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Round as autograd does, to the dtypes of the inputs."""
        inputs = {"q": q, "k": k, "v": v} | {n: options.get(n) for n in LEARNED}
        dtypes = {f"d{n}": x.dtype for n, x in inputs.items() if f"d{n}" in gradients}
        half = {n: dtype for n, dtype in dtypes.items() if dtype.itemsize == 2}
        return gradients | {n: _rounded(gradients[n], dtype) for n, dtype in half.items()}

    def plain(q, k, v, **kwargs):
        return _answer(_plain, q.dtype, q, k, v, _Options(**kwargs))

    exact = answer(oracle, torch.float64)
    rounded = model(q.dtype) if q.dtype.itemsize == 2 else {}
    unfused = answer(plain, q.dtype) if q.dtype != torch.float64 else {}
    return _Yardsticks(exact, rounded, unfused, partial(model, torch.float64))


def _judge(name: str, got: Tensor, y: _Yardsticks, dtype: torch.dtype) -> Iterator[Verdict]:
    """The rule for one tensor."""
    want = y.exact[name]
    if got.shape != want.shape:
        raise AssertionError(f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    worst = max_error(got, want)
    size = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0
    large = int(want.count_nonzero()) >= MODEL_MIN_ELEMENTS  # zeros of empty rows do not count
    if dtype == torch.float64 or name in ("lse", "max_logit", "entropy"):
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        yield Verdict(name, "max error", worst, tolerance * max(1.0, size) + ulp(got.dtype, size))
    elif dtype == torch.float32:
        yield Verdict(name, "max error", worst, max(1e-5 * size, y.noise(name)))
        if large and name == "out":
            ratio = _ratio(rmse(got, want), max(rmse(y.plain[name], want), y.noise(name)))
            yield Verdict(name, "RMSE / unfused", ratio, 1.25)
    else:
        if large:
            ratio = _ratio(rmse(got, want), max(rmse(y.model[name], want), y.noise(name)))
            yield Verdict(name, "RMSE / rounding model", ratio, 1.05 if name == "out" else 1.10)
        errors = [max_error(x[name], want) for x in (y.plain, y.model)]
        if worst > max(errors):  # rare, so the third model is seldom computed
            errors.append(max_error(y.stored()[name], want))
        allowed = max(e for e in errors if math.isfinite(e)) + ulp(dtype, size)
        yield Verdict(name, "max error", worst, max(allowed, y.noise(name)))
