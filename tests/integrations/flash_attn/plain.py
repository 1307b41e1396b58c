"""flash_attn's documented semantics in plain torch, one sequence and one head at a time, in fp64.

Query i sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right, a negative
bound is none; causal is right = 0 at most; -slope * |i + seqlen_k - seqlen_q - j| is added; a row
of the mask that is all zero gives zero, and an lse of +inf.
"""

import torch


def attention(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """(seqlen_q, heads, dim), (seqlen_k, kv_heads, dim) -> out, lse (heads, seqlen_q)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for head in range(q.shape[1]):
        keys, values = k[:, head // group], v[:, head // group]
        s = q[:, head] @ keys.T * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = softcap * torch.tanh(s / softcap) if softcap > 0 else s
        ahead = _ahead(len(q), len(k))
        s = s if slopes is None else s - slopes[head].double() * ahead.abs()
        s = s.masked_fill(~_visible(ahead, causal, window), -torch.inf)
        empty = (s == -torch.inf).all(-1)
        safe = s.masked_fill(empty[:, None], 0.0)
        weights = torch.softmax(safe, -1).masked_fill(empty[:, None], 0.0)
        outs.append(weights @ values)
        lses.append(safe.logsumexp(-1).masked_fill(empty, torch.inf))
    return torch.stack(outs, 1), torch.stack(lses)


def _ahead(seqlen_q, seqlen_k):
    """The position of key j minus the position of query i."""
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    return j - (i + seqlen_k - seqlen_q)


def _visible(ahead, causal, window):
    left, right = window
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible & (ahead <= 0) if causal else visible


def batched(q, k, v, *, slopes=None, **options):
    """The same for (batch, seqlen, heads, dim) tensors; slopes (heads) or (batch, heads)."""
    own = lambda b: slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
    rows = [attention(q[b], k[b], v[b], slopes=own(b), **options) for b in range(len(q))]
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))


def packed(q, k, v, cu_q, cu_k, *, slopes=None, **options):
    """The same for packed tensors: out (total_q, heads, dim), lse (heads, total_q)."""
    own = lambda b: slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
    rows = []
    for b in range(len(cu_q) - 1):
        at, to = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        rows.append(attention(q[at], k[to], v[to], slopes=own(b), **options))
    outs, lses = zip(*rows, strict=True)
    return torch.cat(outs), torch.cat(lses, -1)


def rotated(x, positions, cos, sin, interleaved):
    """x (tokens, heads, dim) as complex numbers, multiplied by cos + i sin of their positions."""
    half = cos.shape[1]
    x, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    angle = torch.complex(cos.double(), sin.double())[positions][:, None]
    z = torch.complex(*(p.contiguous() for p in pairs)) * angle
    parts = [z.real, z.imag]
    flat = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([flat, rest], -1)
