"""`python -m benchmarks accuracy`: the distance of every kernel from fp64, by type and by family of
inputs.

Rows "forward", "sink" and "long": errors of out (and of lse), one row for each kernel, type and
family of inputs. "accumulator": the same for FP8 products that are added in fewer bits. "cache":
the output of a model over an 8-bit key/value cache. "backward": errors of dq, dk and dv; "delta":
the same on inputs where the roundings of out add up. "precision" and "sums": the sums of a ring of
ranks, as `python -m benchmarks ring` measures them. "exp2": polynomials in place of the exponential
unit. "fp4" and "fp4 sink": errors of out with operands of 4 bits, emulated; only on request
(`--only fp4`), because they have a file of their own.

`value` is the RMSE against fp64 of the tensors that the kernel received. Columns beyond the
schema's: `family`; `kind` (onchip, peer, emulated, floor); `on` (cpu, cuda); `tensor`; the fields
of `accuracy_cases.Errors`; `drawn_rmse`, the RMSE against fp64 of the fp32 numbers before rounding,
so that rounding the inputs counts; `lse_error`, the largest; `queries`; `peers`, RMSEs of the same
cell. A GPU's kernels are included if there is one.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from benchmarks import accuracy_thresholds, cache_accuracy, delta_accuracy, exponentials, ring_ranks
from benchmarks.accuracy_cases import (
    FAMILIES,
    GAPS,
    LONG_TOKENS,
    ONE_SIGN,
    AccuracyInputs,
    Errors,
    InputFamily,
    Shape,
    errors,
    long_row,
    sink,
)
from benchmarks.accuracy_kernels import (
    SLOW,
    Kernel,
    Unserved,
    cast_kernels,
    emulated,
    fp4_kernels,
    kernels,
    low_precision_kernels,
)
from onchip.cli.bench.gpu import sentence
from onchip.cli.bench.harness import SHORT, Case, Row, Session
from onchip.quant import recipes
from onchip.quant.accumulator import Accumulator
from onchip.testing import Oracle, max_error, oracle, rmse

THRESHOLDS = (*accuracy_thresholds.THRESHOLDS, *accuracy_thresholds.FP4_THRESHOLDS)
DEFAULT = ("forward", "sink", "long", "accumulator", "cache", "backward", "delta", "ring", "exp2")
PARTS = (*DEFAULT, "fp4")
PUBLISHED, FORWARD = Shape(4, 2048, 2048, 128), Shape(4, 512, 2048, 128)
SINK, BACKWARD = Shape(2, 256, 2048, 128), Shape(2, 1024, 1024, 64)
ACCUMULATED, QUICK = Shape(1, 64, 4096, 128), Shape(2, 192, 256, 64)
QUICK_BACKWARD, QUICK_ACCUMULATED = Shape(2, 64, 64, 32), Shape(1, 32, 128, 64)
WIDE, HALF = (torch.float32, torch.float16, torch.bfloat16), torch.bfloat16
LONG_VALUES = (1.0, 0.1)
BITS, PROMOTED = 14, (32, 128, None)
RANKS, SUMMED = (2, 8, 64), (8, 64)
YARDSTICKS = ("unfused", "rounding model")
Step = tuple[str, Callable[[], Row | list[Row]]]


def run(session: Session) -> None:
    if session.seqlens or session.head_dims or session.flex:
        raise ValueError("--seqlens, --head-dims and --flex are for the benchmarks of a GPU")
    torch.set_num_threads(session.threads)
    if torch.cuda.is_available():
        session.where = {"device": torch.cuda.get_device_name(), "clocks": {}}
    if session.only:
        session.where |= {"flags": f"--only {' '.join(session.only)}"}
    start = time.perf_counter()
    parts = session.only or DEFAULT
    steps = [step for part in PARTS if part in parts for step in STEPS[part](session)]
    session.run([*steps, ("seconds", lambda: elapsed_row(start))])


@dataclass(frozen=True)
class AccuracyCell:
    """One family of inputs in one type and size."""

    bench: str
    family: InputFamily
    shape: Shape
    dtype: torch.dtype

    @cached_property
    def inputs(self) -> AccuracyInputs:
        return self.family.draw(self.shape).to(self.dtype)

    @cached_property
    def exact(self) -> Oracle:
        return oracle(*self.inputs[:3])

    @property
    def drawn_exact(self) -> Tensor:
        return _drawn_exact(self.family, self.shape)

    def case(self, kernel: Kernel, way: str = "forward") -> Case:
        heads, _, keys, head_dim = self.shape
        dtype = kernel.dtype or self.dtype
        return Case(self.bench, "none", dtype, head_dim, keys, num_heads=heads, way=way)

    def rows(self, kernel: Kernel) -> list[Row]:
        """The errors of out; Unserved if the kernel refuses."""
        out, lse = kernel(self.inputs)
        found = errors(out, self.exact.out, self.dtype)
        more = {
            "drawn_rmse": rmse(out, self.drawn_exact),
            "lse_error": None if lse is None else max_error(lse, self.exact.lse),
            "queries": self.shape.seqlen_q,
        }
        return [_row(self.case(kernel), kernel, found) | {"family": self.family.name, **more}]


@cache
def _drawn_exact(family: InputFamily, shape: Shape) -> Tensor:
    return oracle(*family.draw(shape)[:3]).out


def _row(case: Case, kernel: Kernel, found: Errors) -> Row:
    named = {name: x for name, x in found._asdict().items() if name != "rmse"}
    kind = {"kind": kernel.kind, "tensor": "out", "on": kernel.device}
    return case.row(kernel.name, found.rmse, "RMSE", **kind, **named)


def served(
    session: Session, ask: Callable[[Kernel], list[Row]], candidates: Iterable[Kernel]
) -> list[Row]:
    """Rows of every kernel that serves the case, with the values of the yardsticks as peers. A
    kernel that fails is refused; the other rows are kept.
    """
    rows = []
    for kernel in candidates:
        try:
            rows += ask(kernel)
        except Unserved:
            continue
        except Exception as error:
            session.refused.append(f"{kernel.name}: {sentence(error)}")
    known = {(r["kernel"], r["tensor"]): r["value"] for r in rows}
    named = lambda tensor: {n: known[n, tensor] for n in YARDSTICKS if (n, tensor) in known}
    return [row | {"peers": named(row["tensor"])} for row in rows]


def forward_steps(session: Session) -> Iterator[Step]:
    """The published figures' shape where they are, fewer queries of it elsewhere."""
    for name, family in FAMILIES.items():
        shape = PUBLISHED if name == "outliers" else FORWARD
        for dtype in WIDE:
            cell = AccuracyCell("forward", family, QUICK if session.quick else shape, dtype)
            yield f"{name}, {_name(dtype)}", partial(forward_rows, session, cell)


def _name(dtype: torch.dtype) -> str:
    return SHORT[str(dtype).removeprefix("torch.")]


def forward_rows(session: Session, cell: AccuracyCell) -> list[Row]:
    """8-bit kernels are given bf16."""
    cell = replace(cell)  # frees the cached properties with the copy
    narrow = low_precision_kernels() if cell.dtype == HALF else ()
    return served(session, cell.rows, (*kernels(cell.dtype), *narrow))


def sink_steps(session: Session) -> Iterator[Step]:
    for gap in GAPS[::3] if session.quick else GAPS:
        yield f"a sink, {gap} above the others", partial(sink_rows, session, gap)


def sink_rows(session: Session, gap: int) -> list[Row]:
    family = InputFamily(f"sink, gap {gap}", partial(sink, gap=gap))
    cell = AccuracyCell("sink", family, QUICK if session.quick else SINK, HALF)
    wide = (kernel for kernel in kernels(HALF) if kernel.name not in SLOW)
    rows = served(session, cell.rows, (*wide, *low_precision_kernels(), *cast_kernels()))
    return [row | {"gap": gap} for row in rows]


def long_steps(session: Session) -> Iterator[Step]:
    tokens = LONG_TOKENS >> 8 if session.quick else LONG_TOKENS
    for value in LONG_VALUES:
        yield f"{tokens:,} keys, V = {value}", partial(long_rows, session, value, tokens)


def long_rows(session: Session, value: float, tokens: int) -> list[Row]:
    """All values are the same number of the type, and so is every weighted mean of them."""
    inputs = long_row(value, tokens).to(HALF)
    _, queries, heads, head_dim = inputs.q.shape
    exact = torch.full_like(inputs.q, value)
    case = Case("long", "none", HALF, head_dim, tokens, num_heads=heads)

    def ask(kernel: Kernel) -> list[Row]:
        found = errors(kernel._replace(lse=None)(inputs)[0], exact, HALF)
        return [_row(case, kernel, found) | {"family": f"V = {value}", "queries": queries}]

    return served(session, ask, (kernel for kernel in kernels(HALF) if kernel.name not in SLOW))


def accumulator_steps(session: Session) -> Iterator[Step]:
    shape = QUICK_ACCUMULATED if session.quick else ACCUMULATED
    for family in (FAMILIES["N(0,1)"], ONE_SIGN):
        cell = AccuracyCell("accumulator", family, shape, HALF)
        ask = partial(served, session, cell.rows, list(short_sums()))
        yield f"short sums, {family.name}", ask


def short_sums() -> Iterator[Kernel]:
    """onchip's FP8 with the tensor cores' sums in fp32, or short and promoted now and then."""
    yield emulated("fp32", recipes.FP8)
    for promote in PROMOTED:
        name = f"{BITS} bits, {f'to fp32 every {promote}' if promote else 'never promoted'}"
        yield emulated(name, replace(recipes.FP8, accumulator=Accumulator(BITS, promote)))


def cache_steps(session: Session) -> Iterator[Step]:
    size = {"chapters": 1, "length": 200} if session.quick else {}
    yield "a cache of 8 bits", partial(cache_accuracy.rows, **size)


def backward_steps(session: Session) -> Iterator[Step]:
    shape = QUICK_BACKWARD if session.quick else BACKWARD
    for name in ("N(0,1)", "outliers"):
        for dtype in WIDE:
            cell = AccuracyCell("backward", FAMILIES[name], shape, dtype)
            yield f"gradients, {name}, {_name(dtype)}", partial(backward_rows, session, cell)


def backward_rows(session: Session, cell: AccuracyCell) -> list[Row]:
    cell = replace(cell)
    exact = exact_gradients(cell.inputs)
    ask = lambda kernel: gradient_rows(cell, kernel, exact)
    return served(session, ask, kernels(cell.dtype))


def exact_gradients(inputs: AccuracyInputs) -> dict[str, Tensor]:
    in_fp64 = lambda q, k, v: oracle(q, k, v).out
    return Kernel("fp64", "floor", in_fp64).gradients(inputs.to(torch.float64))


def gradient_rows(cell: AccuracyCell, kernel: Kernel, exact: dict[str, Tensor]) -> list[Row]:
    case = cell.case(kernel, "backward")
    rows = []
    for name, got in kernel.gradients(cell.inputs).items():
        found = errors(got, exact[name], cell.dtype)
        more = {"tensor": name, "family": cell.family.name}
        rows.append(_row(case, kernel, found) | more)
    return rows


def delta_steps(session: Session) -> Iterator[Step]:
    for family in list(delta_accuracy.FAMILIES)[: 1 if session.quick else None]:
        yield f"delta, {family}", partial(delta_accuracy.family_rows, family, HALF)


def ring_steps(session: Session) -> Iterator[Step]:
    for size in () if session.quick else RANKS:
        yield f"a ring of {size} ranks", partial(ring_ranks.precision_row, size, False)
    for size in SUMMED[:1] if session.quick else SUMMED:
        yield f"dk, a sum over {size} ranks", partial(ring_ranks.sums_row, size)


def exp2_steps(session: Session) -> Iterator[Step]:
    for name, exp2 in exponentials.variants().items():
        yield f"2^x, {name}", partial(exp2_row, name, exp2, session.quick)


def exp2_row(name: str, exp2: exponentials.Exp2, quick: bool) -> Row:
    coarse = {"stride": exponentials.FP32_STRIDE << 6, "step_log2": -8} if quick else {}
    found = exponentials.measure(exp2, **coarse)._asdict()
    case = Case("exp2", "none", torch.float32, 0, 0, num_heads=0, way="2^x")
    return case.row(name, found.pop("max_relative"), "max relative error", **found)


def fp4_steps(session: Session) -> Iterator[Step]:
    """Every family in the size of "forward", outliers too; sinks as in "sink"."""
    for family in (*FAMILIES.values(), ONE_SIGN):
        cell = AccuracyCell("fp4", family, QUICK if session.quick else FORWARD, HALF)
        yield f"4 bits, {family.name}", partial(fp4_rows, session, cell)
    for gap in GAPS[::3] if session.quick else GAPS:
        family = InputFamily(f"sink, gap {gap}", partial(sink, gap=gap))
        cell = AccuracyCell("fp4 sink", family, QUICK if session.quick else SINK, HALF)
        yield f"4 bits, {family.name}", partial(fp4_rows, session, cell, gap=gap)


def fp4_rows(session: Session, cell: AccuracyCell, **columns: object) -> list[Row]:
    cell = replace(cell)
    return [row | columns for row in served(session, cell.rows, fp4_kernels())]


def elapsed_row(start: float) -> Row:
    return Case("elapsed", "none", None, 0, 0).row("accuracy", time.perf_counter() - start, "s")


STEPS: dict[str, Callable[[Session], Iterator[Step]]] = {
    "forward": forward_steps,
    "sink": sink_steps,
    "long": long_steps,
    "accumulator": accumulator_steps,
    "cache": cache_steps,
    "backward": backward_steps,
    "delta": delta_steps,
    "ring": ring_steps,
    "exp2": exp2_steps,
    "fp4": fp4_steps,
}
