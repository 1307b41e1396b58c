"""Cases: the same call on ranks and on one device, compared. A case refers to layouts and masks by
name, so that it can be sent to a process.
"""

from dataclasses import dataclass, field, replace

import torch

import onchip
from onchip import masks
from onchip.parallel import context_parallel_attention
from onchip.parallel.comm import run_ranks
from onchip.parallel.rounds import GlobalMask
from onchip.parallel.sharding import balanced, contiguous, striped, visible_cells, zigzag
from tests.masks.cases import PRESETS, make

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
MASKS = {
    "causal": masks.causal(),
    "prefix": masks.prefix_lm(20),
    "planes": masks.mod(lambda b, h, q, k: (q + 3 * k + b) % (h + 2) < 2),
    "holes": masks.mod(lambda b, h, q, k: (q // 7) % 3 != 0) & masks.causal(),
    **{name: make(name) for name in PRESETS},
    "dense": lambda n: torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.4,
}
LAYOUTS = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "blocks": lambda size: zigzag(size, 128),
    "balanced": lambda size: balanced(size, masks.causal()),
}

DROPOUT = {"dropout_p": 0.3, "dropout_seed": 2**40 + 17}
CU = (0, 1, 40, 40, 57, 120, 143)
OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "sinks": True, "softcap": 4.0},
    {"window_size": (17, 0)},
    {"window_size": (9, 5), "alibi": True},
    {"causal": True, **DROPOUT},
    {"window_size": (None, 3), "alibi": True, "sinks": True, "softmax_scale": 0.3, **DROPOUT},
    {"mask": "causal"},
    {"mask": "prefix", **DROPOUT},
    {"mask": "planes"},
    {"mask": "longformer", "alibi": True},
    {"mask": "dilated"},
    {"mask": "dense", "causal": True},
]
PACKED = [o for o in OPTIONS if "mask" not in o]


def count_pairs(round):
    """Visible (query, key) pairs of one head in a round of the ring."""
    if round.mask is not None:
        return int(visible_cells(round.mask).sum())
    rows, keys = (s.stop - s.start for s in (round.rows, round.keys))
    mask = GlobalMask(keys, round.causal, round.window_size)
    lo, hi = mask.key_ranges(torch.arange(rows) + keys - rows)
    return int((hi - lo).clamp(min=0).sum())


@dataclass(frozen=True)
class Case:
    """options: of the call, except that mask is a name, and alibi and sinks are True."""

    layout: str = "zigzag"
    seqlen: int = 111
    batch: int = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 24)
    dtype: torch.dtype = torch.float64
    cu_seqlens: tuple[int, ...] | None = None
    strategy: str = "ring"
    options: dict = field(default_factory=dict)

    def layout_of(self, size):
        return LAYOUTS[self.layout](size)

    @property
    def dim(self):
        """The dimension of positions in q, k, v and out."""
        return 1 if self.cu_seqlens is None else 0

    def tensors(self):
        """q, k, v, dout, dlse and the tensors among the options, of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seqlen)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        rows = (self.seqlen,) if self.dim == 0 else (self.batch, self.seqlen)
        num_heads, num_kv_heads = self.heads
        head_dim, head_dim_v = self.dims
        shapes = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim_v))
        q, k, v = (draw(*rows, *shape).to(self.dtype) for shape in shapes)
        dout = draw(*rows, num_heads, head_dim_v).to(self.dtype)
        dlse = draw(*rows[:-1], num_heads, self.seqlen).to(wide)
        extras = {}
        if self.options.get("alibi"):
            extras["alibi_slopes"] = draw(num_heads).abs().to(wide) / 8
        if self.options.get("sinks"):
            extras["sinks"] = draw(num_heads).to(wide)
        return (q, k, v, dout, dlse), extras

    def arguments(self, extras):
        options = {k: v for k, v in self.options.items() if k not in ("alibi", "sinks", "mask")}
        if "mask" in self.options:
            mask = MASKS[self.options["mask"]]
            options["mask"] = mask if isinstance(mask, masks.Mask) else mask(self.seqlen)
        return options | extras | {"return_lse": True}

    @property
    def cu(self):
        return None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens).int()


def differentiate(attend, leaves, dout, dlse, extras):
    """{"out", "lse", "dq", ...}; a row that sees nothing has lse = -inf, which has no gradient."""
    leaves = [t.clone().requires_grad_() for t in leaves]
    extras = {n: t.clone().requires_grad_() if n == "sinks" else t for n, t in extras.items()}
    out, lse = attend(*leaves, extras)
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0)
    torch.autograd.backward((out, finite_lse), (dout.to(out.dtype), dlse))
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {"d" + n: t.grad for n, t in zip("qkv", leaves, strict=True)}
    if "sinks" in extras:
        results["dsinks"] = extras["sinks"].grad
    return results


def on_one_device(case):
    (q, k, v, dout, dlse), extras = case.tensors()

    def attend(q, k, v, extras):
        if case.cu is None:
            return onchip.attention(q, k, v, **case.arguments(extras))
        lengths = (case.cu, case.cu, case.seqlen, case.seqlen)
        return onchip.varlen_attention(q, k, v, *lengths, **case.arguments(extras))

    return differentiate(attend, (q, k, v), dout, dlse, extras)


def on_rank(comm, *cases, group=None):
    """The results of this rank, for each case. group: comm by default."""
    return [_on_rank(comm, case, group or comm) for case in cases]


def _on_rank(comm, case, group):
    (q, k, v, dout, dlse), extras = case.tensors()
    layout = case.layout_of(comm.size)
    mine = lambda t, dim=case.dim: layout.shard(t, comm.rank, dim).contiguous()

    def attend(q, k, v, extras):
        where = {"strategy": case.strategy, "layout": layout, "seqlen": case.seqlen}
        options = case.arguments(extras) | where
        return context_parallel_attention(q, k, v, group, cu_seqlens=case.cu, **options)

    return differentiate(attend, map(mine, (q, k, v)), mine(dout), mine(dlse, -1), extras)


def unshard_results(case, parts):
    """The results of all ranks, put together as on one device."""
    layout = case.layout_of(len(parts))
    dims = {name: case.dim for name in ("out", "dq", "dk", "dv")} | {"lse": -1}
    results = {n: layout.unshard([part[n] for part in parts], dim) for n, dim in dims.items()}
    if "dsinks" in parts[0]:
        results["dsinks"] = sum(part["dsinks"] for part in parts)
    return results


def check_case(case, parts, expected=None):
    """Compare each result with one device: errors relative to max |one device|."""
    expected = on_one_device(case) if expected is None else expected
    results = unshard_results(case, parts)
    assert results.keys() == expected.keys()
    for name, want in expected.items():
        size = terms_of_sinks(case, expected) if name == "dsinks" else None
        near(results[name], want, TOLERANCE[case.dtype], f"{name} of {case}", size)


def terms_of_sinks(case, expected):
    """The sum of |p delta|. dsinks is a sum of -p delta over all rows, positive and negative, so
    its error is relative to this.
    """
    (*_, dout, dlse), extras = case.tensors()
    delta = (expected["out"] * dout).sum(-1).transpose(-1, -2) - dlse
    terms = torch.exp(extras["sinks"][:, None] - expected["lse"]) * delta.abs()
    return terms.sum(-1).max()


def near(got, want, tolerance, what, size=None):
    """size: the scale of the error; max |want| by default."""
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), what
    if finite.any():
        size = want[finite].abs().max() if size is None else size
        error = (got - want)[finite].abs().max() / size.clamp(min=1e-30)
        assert error <= tolerance, f"{what}: {float(error):.1e}"


def check_in_process(case, size):
    """Compare the case on ranks that are threads."""
    parts = run_ranks(size, on_rank, case)
    check_case(case, [part[0] for part in parts])


def rmse(got, exact):
    return {n: float((got[n].double() - exact[n]).square().mean().sqrt()) for n in exact}


def check_rmse(case, size):
    """RMSE against fp64 of result and gradients, at most 1.02 times that of one device. (lse is
    fp32: 1.25, as everywhere.)
    """
    wide = replace(case, dtype=torch.float64)
    (q, k, v, dout, dlse), _ = case.tensors()
    attend = lambda q, k, v, extras: onchip.attention(q, k, v, **wide.arguments({}))
    inputs = [t.double() for t in (q, k, v)]
    exact = differentiate(attend, inputs, dout.double(), dlse.double(), {})
    one = rmse(on_one_device(case), exact)
    many = rmse(unshard_results(case, [part[0] for part in run_ranks(size, on_rank, case)]), exact)
    for name, error in many.items():
        most = 1.25 if name == "lse" else 1.02
        assert error <= most * one[name], f"{name}: {error:.3e} on {size}, {one[name]:.3e} on one"
