"""A call on many ranks against the same call on one: what the tests of all strategies share."""

import torch

import onchip
from onchip import masks
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.sharding import as_layout
from onchip.testing import compare, make_qkv

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
CU = torch.tensor([0, 5, 5, 21, 37], dtype=torch.int32)
SLOPES = torch.tensor([2.0**-i for i in range(12)])


def per_head(b, h, q, k):
    return (q + 2 * k + h) % 5 != 0


def per_entry(b, h, q, k):
    return (q + k + b) % 3 != 0


# By name, because some of them cannot travel to another process. Sequences have 37 tokens.
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (9, None)},
    "band": {"window_size": (5, 3)},
    "documents": {"mask": masks.document(CU) & masks.causal()},
    "prefix": {"mask": masks.prefix_lm(11)},
    "heads": {"mask": per_head},
    "entries": {"mask": per_entry, "causal": True},
    "alibi": {"alibi_slopes": SLOPES, "causal": True, "softmax_scale": 0.4},
    "softcap": {"softcap": 3.0, "window_size": (None, 4)},
    "dropout": {"causal": True, "dropout_p": 0.3, "dropout_seed": 2**40 + 5},
    "dropout and heads": {"mask": per_head, "dropout_p": 0.4, "dropout_seed": 9},
}


def inputs(heads, *, seqlen=37, batch=2, dtype=torch.float64, sinks=True, **sizes):
    """q, k, v, dout, dlse and sinks, the same on every rank; heads: (num_heads, num_kv_heads)."""
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 8} | sizes
    q, k, v = make_qkv(batch, seqlen, **sizes)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(*q.shape[:3], v.shape[3], generator=generator)
    dlse = torch.randn(batch, heads[0], seqlen, generator=generator)
    given = [q, k, v, dout, dlse]
    if sinks:
        given.append(torch.randn(heads[0], generator=generator))
    return [t.to(dtype) for t in given]


def on_one(x, case):
    """out, lse, dq, dk, dv and dsinks of one device."""
    leaves = [t.clone().requires_grad_() for t in (*x[:3], *x[5:])]
    options = _options(case, leaves)
    return _differentiated(onchip.attention(*leaves[:3], return_lse=True, **options), leaves, x)


def on_rank(comm, x, layout, case, **options):
    """The same of one rank: its part of them."""
    layout = as_layout(layout, comm.size)
    mine = [layout.shard(t, comm.rank, 2 if i == 4 else 1) for i, t in enumerate(x[:5])] + x[5:]
    leaves = [t.clone().requires_grad_() for t in (*mine[:3], *mine[5:])]
    options = {"group": comm, "layout": layout, **_options(case, leaves), **options}
    seqlen = x[0].shape[1]
    found = context_parallel_attention(*leaves[:3], seqlen=seqlen, return_lse=True, **options)
    return _differentiated(found, leaves, mine)


def _options(case, leaves):
    options = dict(OPTIONS[case])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = SLOPES[: leaves[0].shape[2]].to(leaves[0].dtype)
    return options | ({"sinks": leaves[3]} if len(leaves) > 3 else {})


def _differentiated(found, leaves, x):
    given = [d.to(f.dtype) for d, f in zip(x[3:5], found, strict=True)]
    grads = torch.autograd.grad(found, leaves, given)
    return [t.detach() for t in (*found, *grads)]


def joined(layout, ranks):
    """The parts of all ranks as one device has them; a gradient of sinks is the sum of theirs."""
    layout = as_layout(layout, len(ranks))
    columns = [list(column) for column in zip(*ranks, strict=True)]
    whole = [layout.unshard(c, 2 if i == 1 else 1) for i, c in enumerate(columns[:5])]
    return whole + [sum(column) for column in columns[5:]]


def assert_as_accurate(got, one, exact):
    """RMSEs of out and of gradients against those of one device; lse is fp32 on both."""
    assert_close([got[1]], [exact[1]], 1e-5)
    for i in (0, 2, 3, 4):
        compare(got[i], one[i], exact[i])


def assert_close(got, want, tolerance):
    """Largest difference, as a share of the largest value."""
    for name, g, w in zip(NAMES, got, want, strict=False):
        assert torch.equal(g.isinf(), w.isinf()), name
        g, w = g.masked_fill(g.isinf(), 0).double(), w.masked_fill(w.isinf(), 0).double()
        error = float((g - w).abs().max() / w.abs().max())
        assert error <= tolerance, f"{name}: {error:.1e} of the largest value"
