"""The value of `precise_delta`: gradients with and without it, on N(0,1) and on inputs that make
rounding errors add up.

delta = rowsum(out * dout) is one number for a whole row of dS. If values have one sign and dout has
a mean other than zero, the roundings of a row of out do not cancel in delta. If keys tie at the row
maximum, so that p is exactly 1, the roundings can all have one sign (Qiu and Yao 2025,
arXiv:2510.04212; in their runs this made training diverge).

All keys end in the same number, so that the last column of dq is proportional to the row sums of
dS. The exact sums are 0: the result of a kernel is minus the error of its delta.

  python -m benchmarks.delta_accuracy    # tables; with a GPU's kernels where there is one
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
from onchip.cli.bench.harness import Case, Row
from onchip.cli.bench.measure import alternate, peak_extra_bytes
from onchip.core.backend import split
from onchip.testing import oracle, rounding_model

TIES = 8
SHAPE = (1, 512, 4, 64)
TIMED = {"cpu": (1, 1024, 8, 64), "cuda": (4, 4096, 16, 128)}
ON_CPU, ON_GPU = ("aten_cpu", "tiled"), ("hopper", "triton")
Attend = Callable[..., Any]


class DeltaInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def to(self, where: torch.dtype | str) -> "DeltaInputs":
        return DeltaInputs(*(t.to(where) for t in self))


def normal(shape: tuple[int, int, int, int] = SHAPE) -> DeltaInputs:
    """N(0, 1), the same numbers every time, in fp32; the last column of k is 1."""
    generator = torch.Generator().manual_seed(0)
    inputs = DeltaInputs(*(torch.randn(shape, generator=generator) for _ in DeltaInputs._fields))
    inputs.k[..., -1] = 1.0
    return inputs


def ties(shape: tuple[int, int, int, int] = SHAPE) -> DeltaInputs:
    """The first keys are one key: rows that see it best have TIES probabilities of exactly 1 before
    the division. Values are N(-2, 1), dout is N(0.01, 0.01^2).
    """
    q, k, v, dout = normal(shape)
    k[:, :TIES] = k[:, :1]
    return DeltaInputs(q, k, v - 2.0, 0.01 * (dout + 1.0))


def winning_ties(shape: tuple[int, int, int, int] = SHAPE) -> DeltaInputs:
    """The same, and every query looks for that key: dS is small, and delta's error is not."""
    inputs = ties(shape)
    return inputs._replace(q=inputs.q + inputs.k[:, :1])


def biased_ties(shape: tuple[int, int, int, int] = SHAPE) -> DeltaInputs:
    """Two keys have nearly all the weight of every row, and their values are neighbours in bf16, so
    that out is halfway between two bf16 numbers. The other values are larger in magnitude: their
    small weight always rounds out away from zero.
    """
    q, k, v, dout = normal(shape)
    k[:, 1] = k[:, 0]
    even = torch.randint(31, shape[2:], generator=torch.Generator().manual_seed(1)) * 2**-5
    v[:, 0], v[:, 1], v[:, 2:] = -2.0 - even, -2.0 - even - 2**-6, v[:, 2:] - 8.0
    return DeltaInputs(q + 3.0 * k[:, :1], k, v, 0.01 * (dout + 1.0))


FAMILIES = {
    "N(0,1)": normal,
    "ties": ties,
    "winning ties": winning_ties,
    "biased ties": biased_ties,
}


def gradients(attend: Attend, inputs: DeltaInputs) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))


def exact_gradients(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    """The gradients of the rounded inputs, in fp64."""
    return gradients(lambda q, k, v: oracle(q, k, v).out, inputs.to(torch.float64))


def relative_error(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact|, of whole tensors."""
    exact = exact.to("cpu")
    return float((got.double().cpu() - exact).norm() / exact.norm())


def drift(dq: Tensor, exact_out: Tensor, dout: Tensor) -> float:
    """The mean error of delta, with its sign, over the mean of |delta|: what does not average out.
    dq's last column is softmax_scale * rowsum(dS).
    """
    error = -dq[..., -1].double().cpu().mean() * dq.shape[-1] ** 0.5
    return float(error / (exact_out * dout.double()).sum(-1).abs().mean())


def kernels(dtype: torch.dtype) -> Iterator[tuple[str, str, Callable[[bool], Attend]]]:
    """(name, device, precise_delta -> attend) of all that runs here. The rounding model is what a
    GPU kernel cannot avoid: it rounds P, too, which CPU kernels do not.
    """
    for name in (*ON_CPU, *(ON_GPU if torch.cuda.is_available() else ())):
        device = "cuda" if name in ON_GPU else "cpu"
        if name == "hopper" and torch.cuda.get_device_capability()[0] != 9:
            continue
        yield name, device, lambda precise, name=name: _attend(name, precise)
    yield "rounding model", "cpu", lambda precise: _model(dtype, precise)


def _attend(kernel: str, precise: bool) -> Attend:
    return lambda q, k, v: onchip.attention(q, k, v, precise_delta=precise, kernel=kernel)


def _model(dtype: torch.dtype, precise: bool) -> Attend:
    if not precise:
        return lambda q, k, v: rounding_model(q, k, v, dtype=dtype)[0]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            out = rounding_model(q, k, v, dtype=dtype, out_dtype=torch.float32)[0]
        high, low = split(out.float(), dtype)
        saved_out = high.double() + low.double()
        return rounding_model(q, k, v, dtype=dtype, saved_out=saved_out)[0]

    return attend


def backward_rows(dtype: torch.dtype = torch.bfloat16) -> list[Row]:
    """A row for every family, kernel and precise_delta: the relative error of dq against fp64, the
    errors of dk and dv, and the mean signed error of delta.
    """
    return [row for name in FAMILIES for row in family_rows(name, dtype)]


def family_rows(family: str, dtype: torch.dtype) -> list[Row]:
    inputs = FAMILIES[family]().to(dtype)
    exact = exact_gradients(inputs)
    batch, seqlen, heads, head_dim = inputs.q.shape
    case = Case("delta", "none", dtype, head_dim, seqlen, batch, heads, way="backward")
    rows = []
    for kernel, device, attend in kernels(dtype):
        for precise in (False, True):
            operands = inputs.to(torch.float64) if kernel == "rounding model" else inputs.to(device)
            got = tuple(t.to(dtype) for t in gradients(attend(precise), operands)[1:])
            found = errors(got, exact) | {"drift": drift(got[0], exact[0], inputs.dout)}
            columns = {"family": family, "precise_delta": precise, "on": device, "tensor": "dq"}
            rows.append(case.row(kernel, found.pop("dq"), "relative error", **columns, **found))
    return rows


def errors(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
    """Relative errors of dq, but for its last column, dk and dv; exact is (out, dq, dk, dv)."""
    named = zip(("dq", "dk", "dv"), got, exact[1:], strict=True)
    cut = lambda name, t: t[..., :-1] if name == "dq" else t
    return {name: relative_error(cut(name, a), cut(name, b)) for name, a, b in named}


def cost_row(dtype: torch.dtype = torch.bfloat16) -> Row:
    """Milliseconds of a forward and a backward with precise_delta, with the plain call as the peer;
    the bytes that each keeps for its backward, and its peak memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = normal(TIMED[device.type]).to(dtype).to(device.type)
    calls = {"plain": onchip.attention, "precise": partial(onchip.attention, precise_delta=True)}
    steps = {name: partial(gradients, attend, inputs) for name, attend in calls.items()}
    ms = {name: 1e3 * x for name, x in alternate(steps, device, rounds=11).items()}
    more = {"on": device.type}
    for name, attend in calls.items():
        more[f"{name}_kept_bytes"] = kept_bytes(attend, inputs)
        more[f"{name}_peak_bytes"] = peak_extra_bytes(steps[name], device)[0]
    batch, seqlen, heads, head_dim = inputs.q.shape
    case = Case("delta cost", "none", dtype, head_dim, seqlen, batch, heads, backward=True)
    plain, precise = ms["plain"], ms["precise"]
    beside = {"peers": {"plain": plain}, "best_peer": "plain", "ratio": plain / precise}
    return case.row("onchip", precise, "ms", **beside, **more)


def kept_bytes(attend: Attend, inputs: DeltaInputs) -> int:
    """Of the tensors that autograd keeps of a forward, its inputs included."""
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attend(*(t.detach().requires_grad_() for t in inputs[:3]))
    return sum(t.numel() * t.element_size() for t in kept.values())


def cost_line(row: Row) -> str:
    size = f"{row['batch']} x {row['seqlen']:,} tokens, {row['num_heads']} x {row['head_dim']}"
    time = f"{row['value']:.3g} ms for {row['peers']['plain']:.3g} ms"
    kept = "{:.3g} MB kept for {:.3g} MB".format(
        *(row[f"{name}_kept_bytes"] / 1e6 for name in ("precise", "plain"))
    )
    return f"forward and backward, {size} on {row['on']}: {time}; {kept}"


def table(rows: list[Row]) -> str:
    """As printed by the command of this module."""
    lines = [
        f"{'family':<14}{'kernel':<16}{'precise':<9}{'dq':>10}{'dk':>10}{'dv':>10}{'drift':>11}"
    ]
    for row in rows:
        name = f"{row['family']:<14}{row['kernel']:<16}{row['precise_delta']!s:<9}"
        found = (f"{row[x]:>10.2e}" for x in ("value", "dk", "dv"))
        lines.append(f"{name}{''.join(found)}{row['drift']:>11.1e}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(backward_rows()))
    print(cost_line(cost_row()))
