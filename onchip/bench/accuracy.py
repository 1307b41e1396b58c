"""`onchip bench accuracy`: how far every kernel is from fp64, by type and by what it is given.

Rows "forward", "sink" and "long": errors of out (and of lse), one row for each kernel, type and
family of inputs. "accumulator": the same of FP8 products that are added in fewer bits. "cache":
what a model says over a key/value cache of 8 bits. "backward": errors of dq, dk and dv; "delta":
the same where the roundings of out add up. "precision" and "sums": what a ring of ranks adds up, as
`onchip bench ring` measures it. "exp2": polynomials in place of the exponential unit.

`value` is the RMSE against fp64 of the very tensors that the kernel got. Columns beyond the
schema's: `family`; `kind` (onchip, peer, emulated, floor); `on` (cpu, cuda); `tensor`; those of
`accuracy_cases.Errors`; `drawn_rmse`, the RMSE against fp64 of the fp32 numbers that were drawn, so
that rounding the inputs counts; `lse_error`, the largest; `queries`; `peers`, RMSEs of the same
question. On a machine with a GPU its kernels are added.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from onchip.bench import cache_accuracy, delta_accuracy, exponentials, ring_ranks
from onchip.bench.accuracy_cases import (
    FAMILIES,
    GAPS,
    LONG_TOKENS,
    ONE_SIGN,
    Errors,
    Family,
    Inputs,
    Shape,
    errors,
    long_row,
    sink,
)
from onchip.bench.accuracy_kernels import (
    CAST,
    FA3_FP8,
    LABELS,
    OURS,
    SLOW,
    Kernel,
    Unserved,
    cast_kernels,
    emulated,
    kernels,
    narrow_kernels,
)
from onchip.bench.gpu import sentence
from onchip.bench.harness import SHORT, Bar, Case, Row, Session
from onchip.quant import recipes
from onchip.quant.accumulator import Accumulator
from onchip.testing import Oracle, max_error, oracle, rmse

PARTS = ("forward", "sink", "long", "accumulator", "cache", "backward", "delta", "ring", "exp2")
PUBLISHED, FORWARD = Shape(4, 2048, 2048, 128), Shape(4, 512, 2048, 128)
SINK, BACKWARD = Shape(2, 256, 2048, 128), Shape(2, 1024, 1024, 64)
ACCUMULATED, QUICK = Shape(1, 64, 4096, 128), Shape(2, 192, 256, 64)
QUICK_BACKWARD, QUICK_ACCUMULATED = Shape(2, 64, 64, 32), Shape(1, 32, 128, 64)
WIDE, HALF = (torch.float32, torch.float16, torch.bfloat16), torch.bfloat16
LONG_VALUES = (1.0, 0.1)
BITS, PROMOTED = 14, (32, 128, None)
# RMSE of logits, whose own RMS is 5, and per cent of perplexity: what 8-bit caches may change
CACHED = {"fp8": (0.2, 1.0), "int8": (0.05, 0.2)}
RANKS, SUMMED = (2, 8, 64), (8, 64)
YARDSTICKS = ("unfused", "rounding model")
Step = tuple[str, Callable[[], Row | list[Row]]]


def run(session: Session) -> None:
    if session.seqlens or session.head_dims or session.flex:
        raise ValueError("--seqlens, --head-dims and --flex are for the benchmarks of a GPU")
    torch.set_num_threads(session.threads)
    if torch.cuda.is_available():
        session.where = {"device": torch.cuda.get_device_name(), "clocks": {}}
    start = time.perf_counter()
    asked = session.only or PARTS
    steps = [step for part in PARTS if part in asked for step in STEPS[part](session)]
    session.run([*steps, ("seconds", lambda: elapsed_row(start))])


@dataclass(frozen=True)
class Question:
    """One family of inputs in one type and size."""

    bench: str
    family: Family
    shape: Shape
    dtype: torch.dtype

    @cached_property
    def inputs(self) -> Inputs:
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
def _drawn_exact(family: Family, shape: Shape) -> Tensor:
    return oracle(*family.draw(shape)[:3]).out


def _row(case: Case, kernel: Kernel, found: Errors) -> Row:
    named = {name: x for name, x in found._asdict().items() if name != "rmse"}
    kind = {"kind": kernel.kind, "tensor": "out", "on": kernel.device}
    return case.row(kernel.name, found.rmse, "RMSE", **kind, **named)


def served(
    session: Session, ask: Callable[[Kernel], list[Row]], candidates: Iterable[Kernel]
) -> list[Row]:
    """Rows of every kernel that serves, with the yardsticks' values beside them. One that fails is
    refused, and costs no other its row.
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
            question = Question("forward", family, QUICK if session.quick else shape, dtype)
            yield f"{name}, {_name(dtype)}", partial(forward_rows, session, question)


def _name(dtype: torch.dtype) -> str:
    return SHORT[str(dtype).removeprefix("torch.")]


def forward_rows(session: Session, question: Question) -> list[Row]:
    """8-bit kernels are given bf16."""
    narrow = narrow_kernels() if question.dtype == HALF else ()
    return served(session, question.rows, (*kernels(question.dtype), *narrow))


def sink_steps(session: Session) -> Iterator[Step]:
    for gap in GAPS[::3] if session.quick else GAPS:
        yield f"a sink, {gap} above the others", partial(sink_rows, session, gap)


def sink_rows(session: Session, gap: int) -> list[Row]:
    family = Family(f"sink, gap {gap}", partial(sink, gap=gap))
    question = Question("sink", family, QUICK if session.quick else SINK, HALF)
    wide = (kernel for kernel in kernels(HALF) if kernel.name not in SLOW)
    rows = served(session, question.rows, (*wide, *narrow_kernels(), *cast_kernels()))
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
        found = errors(kernel(inputs)[0], exact, HALF)
        return [_row(case, kernel, found) | {"family": f"V = {value}", "queries": queries}]

    return served(session, ask, (kernel for kernel in kernels(HALF) if kernel.name not in SLOW))


def accumulator_steps(session: Session) -> Iterator[Step]:
    shape = QUICK_ACCUMULATED if session.quick else ACCUMULATED
    for family in (FAMILIES["N(0,1)"], ONE_SIGN):
        question = Question("accumulator", family, shape, HALF)
        ask = partial(served, session, question.rows, list(short_sums()))
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
            question = Question("backward", FAMILIES[name], shape, dtype)
            yield f"gradients, {name}, {_name(dtype)}", partial(backward_rows, session, question)


def backward_rows(session: Session, question: Question) -> list[Row]:
    exact = exact_gradients(question.inputs)
    ask = lambda kernel: gradient_rows(question, kernel, exact)
    return served(session, ask, kernels(question.dtype))


def exact_gradients(inputs: Inputs) -> dict[str, Tensor]:
    in_fp64 = lambda q, k, v: oracle(q, k, v).out
    return Kernel("fp64", "floor", in_fp64).gradients(inputs.to(torch.float64))


def gradient_rows(question: Question, kernel: Kernel, exact: dict[str, Tensor]) -> list[Row]:
    case = question.case(kernel, "backward")
    rows = []
    for name, got in kernel.gradients(question.inputs).items():
        found = errors(got, exact[name], question.dtype)
        more = {"tensor": name, "family": question.family.name}
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
}


def select(bench: str, **columns: object) -> Callable[[Row], bool]:
    """Rows of a bench whose columns are these."""
    asked = {"bench": bench, **columns}
    return lambda row: all(row.get(name) == value for name, value in asked.items())


def over(peer: str) -> Callable[[list[Row]], float]:
    """The largest RMSE over a yardstick's on the same question."""
    return lambda rows: max(row["value"] / row["peers"][peer] for row in rows)


def largest(column: str, factor: float = 1.0) -> Callable[[list[Row]], float]:
    return lambda rows: max(factor * row[column] for row in rows)


def _half(row: Row) -> bool:
    ours = row["bench"] == "forward" and row.get("kind") == "onchip"
    return ours and row["dtype"] in ("bfloat16", "float16")


def _ruled(row: Row) -> bool:
    """In 16 bits, on the inputs that the accuracy rule is stated for."""
    return _half(row) and row["family"] in ("N(0,1)", "outliers")


WIDE_BARS = (
    Bar(
        "16-bit kernels of onchip: RMSE over unfused attention's",
        _half,
        at_most=1.0,
        measure=over("unfused"),
        unit="x",
    ),
    Bar(
        "the same over the rounding model's, N(0,1) and outliers",
        _ruled,
        at_most=1.05,
        measure=over("rounding model"),
        unit="x",
    ),
    Bar(
        "a million keys, V = 1: largest error of onchip's",
        select("long", kind="onchip", family="V = 1.0"),
        at_most=0.0,
        measure=largest("max_error"),
        unit="",
    ),
    Bar(
        "a million keys, V = 0.1 (bf16): error of onchip's",
        select("long", kind="onchip", family="V = 0.1"),
        at_most=1.0,
        measure=largest("ulp_99"),
        unit="ulp",
    ),
    Bar(
        "RMSE of the ring in bf16, against one call",
        select("precision"),
        at_most=ring_ranks.ROUNDED,
        measure=over("one call"),
        unit="x",
    ),
    Bar(
        "2^0 by every polynomial, off by",
        select("exp2"),
        at_most=0.0,
        measure=lambda rows: max(abs(row["at_zero"] - 1) for row in rows),
        unit="",
    ),
    Bar(
        "onchip's cubic: results that differ in bf16",
        select("exp2", kernel="onchip's cubic (Hopper)"),
        at_most=1.5,
        measure=largest("differs_bf16", 100.0),
        unit="%",
    ),
    Bar(
        "precise_delta: dq of ties, relative error",
        select("delta", family="ties", precise_delta=True),
        at_most=4e-3,
    ),
    Bar(
        "precise_delta: mean error of delta, biased ties",
        select("delta", family="biased ties", precise_delta=True),
        at_most=1e-5,
        measure=lambda rows: max(abs(row["drift"]) for row in rows),
        unit="of |delta|",
    ),
)


def _computes(recipe: str) -> Callable[[Row], bool]:
    """Rows of a recipe, by its reference or by the kernel that computes it."""
    names = (LABELS[recipe], f"hopper {recipe}")
    return lambda row: row["bench"] == "forward" and row["kernel"] in names


def published(recipe: str, rmse: float) -> Bar:
    """RMSE on outliers, inputs as drawn: as the published figures are stated."""
    ours = _computes(recipe)
    chosen = lambda row: ours(row) and row["family"] == "outliers"
    return Bar(f"{recipe}: RMSE on outliers", chosen, at_most=rmse, measure=largest("drawn_rmse"))


def unbiased(recipe: str, column: str, what: str) -> Bar:
    """The error with biased channels over that without."""
    families, ours = ("N(0,1)", "channel bias"), _computes(recipe)

    def measure(rows: list[Row]) -> float:
        found = {(row["kernel"], row["family"]): row[column] for row in rows}
        names = dict.fromkeys(name for name, _ in found)
        return max(found[name, families[1]] / found[name, families[0]] for name in names)

    chosen = lambda row: ours(row) and row["family"] in families
    name = f"{recipe}: {what} with channel bias over without"
    return Bar(name, chosen, at_most=1.1, measure=measure, unit="x")


def _against_fa3(rows: list[Row]) -> float:
    """Ours over FlashAttention-3's, each measured where it runs, else emulated."""
    found = {row["kernel"]: row["drawn_rmse"] for row in rows}
    ours = found.get("hopper fp8", found[LABELS["fp8"]])
    return ours / found.get(FA3_FP8, found[LABELS["fa3_fp8"]])


def cached(kv_dtype: str, error: float, change: float) -> tuple[Bar, Bar]:
    """The built-in model over such a cache, against itself over fp32 pages."""
    chosen = select("cache", kv_dtype=kv_dtype)
    moved = lambda rows: max(100 * abs(row["perplexity_change"]) for row in rows)
    return (
        Bar(f"{kv_dtype} cache: RMSE of logits", chosen, None, error, largest("error"), "RMSE"),
        Bar(f"{kv_dtype} cache: perplexity changes by", chosen, None, change, moved, "%"),
    )


def with_sink(what: str, *kernels: str) -> Bar:
    """Relative RMSE with a key up to 12 above the others."""
    chosen = lambda row: row["bench"] == "sink" and row["kernel"] in kernels
    measure = largest("relative", 100.0)
    return Bar(f"{what}: relative RMSE with a sink", chosen, None, 3.0, measure, "%")


NARROW_BARS = (
    published("fp8", 9.1e-3),
    published("int8", 5.5e-3),
    published("int8_pv16", 2e-3),
    Bar(
        "fp8: RMSE on outliers over FA3's FP8",
        select("forward", family="outliers", dtype="float8_e4m3fn"),
        at_most=0.6,
        measure=_against_fa3,
        unit="x",
    ),
    with_sink("P in e4m3, all else exact", CAST),
    *(with_sink(name, LABELS[name], f"hopper {name}") for name in OURS),
    *(bar for name, bounds in CACHED.items() for bar in cached(name, *bounds)),
    *(unbiased(name, "value", "RMSE") for name in (*OURS, "fp8_smooth")),
    *(unbiased(name, "lse_error", "error of lse") for name in (*OURS, "fp8_smooth")),
)
BARS = (*WIDE_BARS, *NARROW_BARS)
