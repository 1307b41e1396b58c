"""`python -m benchmarks score_mods`: functions of the score, and the derivatives of attention.

"score option": a score_mod against the built-in option of the same formula, on the kernel that
serves the score_mod, and on the one that serves the option by default; peers have the names of
these kernels. "score flex": ten functions against compiled FlexAttention with the same function,
forward, and forward and backward in one; "score bias": the backward with the gradient of a captured
(heads, N, N) bias. The part "jvp" is in tangents.py.

Every result is compared with fp64 at sampled query rows, every gradient for a dout of these rows.
Column `errors` has the RMSE of out, or of dq, dk and dv together ("normal"), and the RMSE of the
gradient of the captured tensor over the root of its mean square ("captured").

A run on a GPU first compiles all kernels, in one process for each function (warm_up.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
from benchmarks import tangents, warm_up
from benchmarks.score_functions import BIAS, FUNCTIONS, SOFTCAP, ScoreFunction, ScoreMod, ScoreSizes
from benchmarks.video import TrainingCandidate
from onchip.cli.bench import gpu, peers
from onchip.cli.bench.backward import kernel_of
from onchip.cli.bench.gpu import GpuCandidate, Inputs, RowSpec
from onchip.cli.bench.harness import (
    CHECKED_ROWS,
    Case,
    Inaccurate,
    Row,
    Session,
    Threshold,
    geomean,
    hold,
)
from onchip.cli.bench.measure import sample_rows
from onchip.testing import rmse

PARTS = ("options", "flex", "jvp")
HEAD_DIMS, QUICK_HEAD_DIMS = (64, 128), (64,)
SEQLEN, BIAS_SEQLEN, QUICK_SEQLEN = 4096, 2048, 256
BATCH_HEADS, QUICK_BATCH_HEADS = (2, 16), (1, 4)
# Of the gradient of a captured tensor. Sums of dS over rows cancel: the rounding of out alone is
# 2^-9 of terms that are some times larger than a sum, 3 % of two sums over 80 rows (2026-11-19).
CAPTURED_LIMIT = 0.1
QUICK_FUNCTIONS = ("softcap", "T5")


class ScoreCell(NamedTuple):
    """One row to measure. Cells of the same `group` have kernels in common."""

    case: Case
    function: ScoreFunction

    @property
    def group(self) -> str:
        return f"{self.case.bench} {self.case.mask} {self.case.head_dim} {self.case.seqlen}"

    def specs(self, session: Session) -> list[RowSpec]:
        problem = ScoreProblem(self.case, self.function, session.device)
        if self.case.bench == "score option":
            return [RowSpec(self.case.bench, problem.kernel, problem.ours, problem.built_in())]
        return [RowSpec(self.case.bench, problem.kernel, problem.ours, problem.flex(session))]

    def measure(self, session: Session) -> list[Row]:
        specs = self.specs(session)
        against = "flex" if self.case.bench != "score option" else specs[0].kernel
        return gpu.contest(session, self.case, specs, gpu.MILLISECONDS, required=(against,))


def _ratio_to(peer: Callable[[Row], str], bound: float) -> Callable[[list[Row]], float]:
    """The least ratio to a peer; a 10-90 % band around the bound counts as equal to it."""

    def least(rows: list[Row]) -> float:
        ratios = [row["ratios"][peer(row)] for row in rows]
        return min(bound if low <= bound <= high else ratio for ratio, low, high in ratios)

    return least


def _is(bench: str, name: str) -> Callable[[Row], bool]:
    return lambda row: row["bench"] == bench and row["pass"] == name and gpu.counts(row)


def _over_flex(rows: list[Row]) -> float:
    return geomean([row["ratios"]["flex"][0] for row in rows])


def _option_threshold(name: str, bound: float) -> Threshold:
    measure = _ratio_to(lambda row: row["kernel"], bound)
    return Threshold(
        f"score_mod over the built-in option, {name}, worst cell",
        _is("score option", name),
        at_least=bound,
        measure=measure,
    )


def _flex_threshold(title: str, bench: str, name: str, bound: float) -> Threshold:
    return Threshold(title, _is(bench, name), at_least=bound, measure=_over_flex)


THRESHOLDS = (
    _option_threshold("forward", 0.95),
    _option_threshold("backward", 0.90),
    _flex_threshold("forward over FlexAttention", "score flex", "forward", 1.3),
    _flex_threshold("forward+backward over FlexAttention", "score flex", "forward+backward", 1.1),
    _flex_threshold(
        "backward with the gradient of a bias over FlexAttention", "score bias", "backward", 1.5
    ),
    *tangents.THRESHOLDS,
)


def run(session: Session) -> None:
    gpu.run_or_quick(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    """The steps of all cells; meta of the results file has the refused rows."""
    session.where["refused"] = session.refused
    chosen = cells(session)
    if session.device.type == "cuda" and not session.quick:
        yield "compiling", partial(compile_all, session, chosen)
    for cell in chosen:
        yield str(cell.case), partial(cell.measure, session)


def compile_all(session: Session, chosen: Sequence[Any]) -> list[Row]:
    """Fill the caches of compilers on disk. No row."""
    groups = dict.fromkeys(cell.group for cell in chosen if cell.group is not None)
    selection = {name: getattr(session, name) for name in ("seqlens", "head_dims", "only")}
    warm_up.run_all(compile_group, [(group, selection) for group in groups], session.note)
    return []


def compile_group(group: str, selection: dict[str, Any]) -> None:
    """In a process of its own: run the candidates of a group once."""
    session = Session(device=gpu.device(), **selection)
    for cell in cells(session):
        if cell.group == group:
            warm_up.run_once(session, cell.specs(session), cell.case.backward)


def cells(session: Session) -> list[Any]:
    parts = session.only or PARTS
    found: list[Any] = []
    if "options" in parts:
        found += option_cells(session)
    if "flex" in parts:
        found += flex_cells(session)
    if "jvp" in parts:
        found += tangents.cells(session)
    return found


def option_cells(session: Session) -> list[ScoreCell]:
    functions = [x for x in (*FUNCTIONS, BIAS) if x.name in OPTIONS]
    ways = ("", "backward")
    grid = product(functions, _head_dims(session), _seqlens(session, SEQLEN), ways)
    return [_cell(session, "score option", f, d, n, way) for f, d, n, way in grid]


def flex_cells(session: Session) -> list[ScoreCell]:
    """Every function with one head_dim, 64 and 128 in turns; with --head-dims with all of them."""
    functions = [f for f in FUNCTIONS if not session.quick or f.name in QUICK_FUNCTIONS]
    dims = _head_dims(session)
    own = lambda i: dims if session.head_dims else (dims[i % len(dims)],)
    found = [
        _cell(session, "score flex", function, d, n, way)
        for i, function in enumerate(functions)
        for d, n, way in product(own(i), _seqlens(session, SEQLEN), ("", "forward+backward"))
    ]
    biased = product(dims, _seqlens(session, BIAS_SEQLEN))
    return found + [_cell(session, "score bias", BIAS, d, n, "backward") for d, n in biased]


def _head_dims(session: Session) -> Sequence[int]:
    return session.head_dims or (QUICK_HEAD_DIMS if session.quick else HEAD_DIMS)


def _seqlens(session: Session, seqlen: int) -> Sequence[int]:
    return session.seqlens or (QUICK_SEQLEN if session.quick else seqlen,)


def _cell(
    session: Session, bench: str, function: ScoreFunction, head_dim: int, n: int, way: str
) -> ScoreCell:
    sizes = (head_dim, n, *(QUICK_BATCH_HEADS if session.quick else BATCH_HEADS))
    dtype, backward = torch.bfloat16, bool(way)
    return ScoreCell(
        Case(bench, function.name, dtype, *sizes, backward=backward, way=way), function
    )


# The built-in option of a function, from its tensor.
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "softcap": lambda: {"softcap": SOFTCAP},
    "ALiBi": lambda slopes: {"alibi_slopes": slopes},
    "bias": lambda bias: {"bias": bias[None]},
}


class ScoreProblem:
    """The inputs of a cell, its score_mod, and its candidates."""

    def __init__(self, case: Case, function: ScoreFunction, device: torch.device):
        self.case, self.function, self.device = case, function, device
        self.sets = gpu.draw_sets(case, device)
        learned, fixed = function.draw(ScoreSizes(case.num_heads, case.seqlen), device)
        self.learned = [t.requires_grad_(case.backward) for t in learned]
        self.tensors = [*learned, *fixed]
        self.score_mod: ScoreMod = function.make(*self.tensors)
        self.check = ScoreCheck(self.sets[0], function, self.tensors, case.backward)

    @cached_property
    def kernel(self) -> str:
        return self.find_kernel({"score_mod": self.score_mod})

    def find_kernel(self, options: dict[str, Any]) -> str:
        """The kernel of the pass that is timed."""
        if self.case.backward:
            return kernel_of(self.sets[0], options)
        return onchip.explain(*self.sets[0][:3], **options).plan.kernel

    @cached_property
    def ours(self) -> GpuCandidate:
        return self.candidate("onchip", partial(onchip.attention, score_mod=self.score_mod))

    def built_in(self) -> list[GpuCandidate]:
        """The built-in option on the kernel of the score_mod, and on its own."""
        options = lambda: OPTIONS[self.function.name](*self.tensors)
        kernels = dict.fromkeys((self.kernel, self.find_kernel(options())))
        return [self.candidate(name, OptionCall(options, name)) for name in kernels]

    def flex(self, session: Session) -> list[GpuCandidate]:
        try:
            attend = peers.flex(self.case.seqlen, None, self.device, score_mod=self.score_mod)
        except Exception as error:
            session.note(f"flex is left out: {gpu.sentence(error)}")
            return []
        return [self.candidate("flex", attend, layout=peers.heads_first, ours=False)]

    def candidate(
        self, name: str, attend: peers.Attend, ours: bool = True, **options: Any
    ) -> GpuCandidate:
        is_both = self.case.way == "forward+backward"
        make = TrainingCandidate if is_both else GpuCandidate
        learned = tuple(self.learned) if self.case.backward else ()
        options |= {"ours": ours, "parameters": learned}
        return make(name, attend, self.sets, self.check, **options)


@dataclass(frozen=True)
class OptionCall:
    """onchip.attention with a built-in option on a kernel. The option is made in every call,
    because it may be a view of the tensor whose gradient is wanted.
    """

    options: Callable[[], dict[str, Any]]
    kernel: str

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return onchip.attention(q, k, v, kernel=self.kernel, **self.options())


class ScoreCheck:
    """fp64 at sampled query rows, by autograd of the dense formula. dout is zero at other rows, so
    that dk, dv and the gradient of the captured tensor depend on the sample alone.

    The rule of `onchip.testing` holds for out, dq, dk and dv. The gradient of the captured tensor
    must be within CAPTURED_LIMIT, FlexAttention's too.
    """

    def __init__(
        self, inputs: Inputs, function: ScoreFunction, tensors: Sequence[Tensor], backward: bool
    ):
        self.inputs, self.function = inputs, function
        self.tensors, self.backward = tensors, backward
        self.rows = sample_rows(inputs[0].shape[1], CHECKED_ROWS).to(inputs[0].device)

    @cached_property
    def exact(self) -> list[Tensor]:
        """out, or (dq, dk, dv) and the gradient of the learned tensor; out and dq at the rows."""
        q, k, v, *dout = (x.double() for x in self.inputs)
        tensors = [self._widen(t) for t in self.tensors]
        q, k, v = (x.requires_grad_(self.backward) for x in (q[:, self.rows], k, v))
        out = attend_dense(q, k, v, self.function.make(*tensors), self.rows)
        if not self.backward:
            return [out]
        learned = [t for t in tensors if t.requires_grad]
        return list(torch.autograd.grad(out, (q, k, v, *learned), dout[0][:, self.rows]))

    def _widen(self, t: Tensor) -> Tensor:
        wide = t.detach().double() if t.is_floating_point() else t
        return wide.requires_grad_(self.backward and t.requires_grad)

    def __call__(self, candidate: GpuCandidate, strict: bool) -> dict[str, float]:
        got = self._compute(candidate)
        if strict:
            self._hold(candidate)
        pooled = lambda tensors: torch.cat([x.double().flatten() for x in tensors])
        errors = {"normal": rmse(pooled(got[:3]), pooled(self.exact[:3]))}
        for gradient, exact in zip(got[3:], self.exact[3:], strict=True):
            errors["captured"] = rmse(gradient, exact) / exact.square().mean().sqrt().item()
            if not errors["captured"] <= CAPTURED_LIMIT:
                share = f"{errors['captured']:.3g} of its size"
                raise Inaccurate(f"the gradient of the captured tensor is off by {share}")
        return errors

    def _compute(self, candidate: GpuCandidate) -> list[Tensor]:
        """What `exact` has."""
        if not self.backward:
            return [candidate.forward(self.inputs)[:, self.rows]]
        dout = torch.zeros_like(self.inputs[3])
        dout[:, self.rows] = self.inputs[3][:, self.rows]
        inputs = tuple(map(candidate.layout, (*self.inputs[:3], dout)))
        dq, *others = candidate.differentiate(inputs)[1]()
        return [dq[:, self.rows], *others]

    def _hold(self, candidate: GpuCandidate) -> None:
        (q, k, v), rows = self.inputs[:3], self.rows
        score_mod = self.function.make(*(t.detach() for t in self.tensors))

        def sampled(chosen: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
            return candidate.attend(q.index_copy(1, rows, chosen), k, v)[:, rows]

        at_rows = lambda score, b, h, i, j: score_mod(score, b, h, rows[i], j)
        hold(sampled, q[:, rows], k, v, grad=self.backward, score_mod=at_rows)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod, rows: Tensor) -> Tensor:
    """Attention of the query rows `rows`, which are q, with all scores stored."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    index = partial(torch.arange, device=q.device)
    b, h = index(q.shape[0])[:, None, None, None], index(q.shape[1])[:, None, None]
    score = score_mod(q @ k.mT * q.shape[-1] ** -0.5, b, h, rows[:, None], index(k.shape[2]))
    return (torch.softmax(score, -1) @ v).transpose(1, 2)
