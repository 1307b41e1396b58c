"""A call and tangents of all its inputs, for tests of forward mode and second derivatives: the same
call in fp64, which `tiled` computes, is the yardstick.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import onchip.testing as ot
from onchip import masks
from onchip.core import torch_op
from onchip.core.backend import Backend, Tangents
from onchip.core.dispatch import get_backend
from onchip.core.functional import prepare_attention
from onchip.core.problem import Options, Problem, Tensors
from tests.interpreted import DEVICE

GQA = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "head_dim_v": 24}
MQA = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 40, "head_dim_v": 16}
MOD = masks.mod(lambda b, h, q, k: (q + 2 * k + 3 * h + 5 * b) % 4 != 0)
NO_KEYS = masks.mod(lambda b, h, q, k: (q % 5 != 2) & (k != 3))  # rows without keys, a hidden key
LEARNED = ("alibi_slopes", "bias", "sinks")  # of these, options have the shape
ALL = {"causal": True, "window_size": (40, None), "softcap": 0.8, "mask": MOD}
# Lengths, sizes, options and the batch; lists: packed sequences. Every option of a GPU's tangents
# is here.
CASES = {
    "plain": ((33, 50), GQA, {}),
    "one": ((1, 1), GQA, {"causal": True, "deterministic": True}),
    "causal": ((63, 111), GQA, {"causal": True}),
    "rows above the keys": ((50, 33), MQA, {"causal": True}),
    "window": ((63, 111), MQA, {"window_size": (16, 3)}),
    "softcap": ((40, 50), GQA, {"softcap": 0.8, "softmax_scale": -0.7}),
    "alibi": ((40, 50), GQA, {"alibi_slopes": (2, 2)}, 2),
    "bias": ((40, 50), GQA, {"bias": (1, 2, 40, 50)}, 2),
    "bias of keys": ((40, 50), GQA, {"bias": (2, 1, 1, 50), "softcap": 0.8}, 2),
    "sinks": ((40, 50), GQA, {"sinks": (2,)}),
    "rows without keys": ((40, 50), GQA, {"mask": NO_KEYS}),
    "rows of a sink alone": ((40, 50), GQA, {"mask": NO_KEYS, "sinks": (2,)}),
    "all": (
        (63, 70),
        GQA,
        {**ALL, "alibi_slopes": (2,), "bias": (1, 1, 63, 70), "sinks": (2,)},
    ),
    "packed": (([33, 1, 0, 20], [40, 1, 5, 9]), GQA, {"causal": True}),
    "packed, all": (
        ([5, 30, 1, 7], [0, 63, 50, 3]),
        MQA,
        {"window_size": (16, 2), "softcap": 0.8, "alibi_slopes": (4, 3), "sinks": (3,)},
    ),
}


def draw(shape, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Call(NamedTuple):
    """What the hooks of a backend get."""

    problem: Problem
    x: Tensors
    dx: Tangents
    dout: Tensor
    dlse: Tensor

    @classmethod
    def of(cls, name: str, dtype: torch.dtype = torch.float32) -> "Call":
        return cls.make(*CASES[name], dtype=dtype)

    @classmethod
    def make(cls, lengths, sizes, options, batch=1, *, dtype) -> "Call":
        """All tensors are numbers of `dtype`."""
        options, more, longest = dict(options), {}, ()
        if isinstance(lengths[0], list):
            tensors = ot.make_packed(*lengths, dtype=dtype, device=DEVICE, **sizes)
            q, k, v, *offsets = tensors
            more = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
            longest = tuple(map(max, lengths))
        else:
            q, k, v = ot.make_qkv(batch, *lengths, dtype=dtype, device=DEVICE, **sizes)
        for i, learned in enumerate(LEARNED):
            if learned in options:
                more[learned] = draw(options.pop(learned), i).to(DEVICE, torch.float32)
        mask = options.pop("mask", None)
        scale = options.pop("softmax_scale", None)
        options = Options(**options, softmax_scale=scale)
        prepared, x = prepare_attention(Tensors(q, k, v, **more), options, longest, mask=mask)
        x = torch_op._build_mask(x)
        named = {n: getattr(x, n) for n in Tangents._fields}
        dx = {n: draw(t.shape, 7).to(t) for n, t in named.items() if t is not None}
        *entries, seqlen, heads, _ = q.shape
        dout = draw((*entries, seqlen, heads, v.shape[-1]), 8).to(q)
        dlse = draw((*entries, heads, seqlen), 9).to(DEVICE, torch.float32)
        return cls(prepared.problem, x, Tangents(**dx), dout, dlse)

    @property
    def in_fp64(self) -> "Call":
        """The same call on the CPU."""

        def wide(t):
            t = None if t is None else t.to("cpu")
            return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

        problem = self.problem._replace(dtype=torch.float64, out_dtype=torch.float64)
        x, dx = self.x._make(map(wide, self.x)), self.dx._make(map(wide, self.dx))
        return Call(problem, x, dx, wide(self.dout), wide(self.dlse))

    def tangents(self, backend: Backend) -> tuple[Tensor, Tensor]:
        return backend.tangents(self.problem, self.x, self.dx)

    def gradients(self, backend: Backend) -> list[Tensor]:
        grads = backend.tangent_gradients(*self)
        return [g for g in grads if g is not None]


def assert_near(got, expected, tolerance: float) -> None:
    """Every error is at most `tolerance` times the largest number of its tensor; of all tensors
    where the exact one is zero. Its terms cancel then (of one key: its weight is always 1), and
    theirs are the rounding errors.
    """
    over_all = max(b.abs().max().item() for b in expected if b.numel())
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        largest = (b.abs().max().item() if b.numel() else 0.0) or over_all
        torch.testing.assert_close(a.double().cpu(), b, rtol=0, atol=tolerance * max(largest, 1e-3))


def tiled() -> Backend:
    return get_backend("tiled")
