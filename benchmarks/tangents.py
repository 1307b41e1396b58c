"""The part "jvp" of `python -m benchmarks score_mods`: forward mode and second derivatives.

"jvp" rows: torch.func.jvp of a call with tangents of q, k and v, against the forward alone:
"forward" is the plain call, "forward triton" the same by name where a plain call runs another
kernel. The inverse of a ratio is the time of the jvp in forwards. Column `kernel` is that of the
forward.

"MeanFlow" rows: a training step whose loss |u + du/dt - v|^2 has the output u of attention, its
tangent du/dt and a target v, with the gradients of q, k and v, against SDPA's math backend, the
only one of torch with tangents. In "step" du/dt is a constant, as in MeanFlow; in "second order"
the gradient goes through it, too (jvp under grad). "MeanFlow memory" rows: what one such step holds
beyond its inputs.

The RMSE of the tangent at sampled query rows ("tangent" of `errors`) and of the gradients of a step
("normal") is at most 1.1 times that of the textbook formula in the same dtype.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

import onchip
from benchmarks.peak import MB, per_token_growth
from onchip.cli.bench import gpu, patterns, peers
from onchip.cli.bench.gpu import GpuCandidate, Inputs, OutputCheck, RowSpec
from onchip.cli.bench.harness import Case, Inaccurate, Row, Session, Threshold
from onchip.cli.bench.measure import peak_extra_bytes
from onchip.testing import rmse

HEAD_DIMS, LENGTHS = (64, 128), (4096, 8192)
STEP_LENGTH, STEP_HEADS, QUICK_HEADS, STEP_DIM = 4096, 16, 2, 64
MEMORY_LENGTHS = (1024, 2048, 4096, 8192)
QUICK_LENGTH, QUICK_MEMORY_LENGTHS = 256, (128, 256)
WAYS = ("step", "second order")
MOST_FORWARDS, GROWTH = 2.2, 1.05
TEXTBOOK = 1.1  # as for gradients in the accuracy rule; both round dout and the tangent of out
FROM = 2048  # where fixed costs are noise


def _forwards(rows: list[Row]) -> float:
    """The longest jvp in forwards of the same cell."""
    return max(1 / row["ratios"]["forward"][0] for row in rows)


THRESHOLDS = (
    Threshold(
        "jvp over a forward, worst cell",
        lambda row: row["bench"] == "jvp" and gpu.counts(row),
        at_most=MOST_FORWARDS,
        measure=_forwards,
        unit="x",
    ),
    Threshold(
        "memory per token of a MeanFlow step, 8k over 2k tokens",
        lambda row: row["bench"] == "MeanFlow memory" and row["seqlen"] >= FROM,
        at_most=GROWTH,
        measure=per_token_growth,
        unit="x",
    ),
)


@dataclass(frozen=True)
class TangentCandidate(GpuCandidate):
    """A job is a jvp: (out, its tangent). Sets are (q, k, v, and their tangents)."""

    def jobs(self, backward: bool) -> list[Callable[[], object]]:
        stored = [tuple(map(self.layout, inputs)) for inputs in self.sets]
        return [partial(self.push, inputs) for inputs in stored]

    @torch.no_grad()
    def push(self, inputs: Inputs) -> Sequence[Tensor]:
        return torch.func.jvp(self.attend, inputs[:3], inputs[3:6])


@dataclass(frozen=True)
class StepCandidate(GpuCandidate):
    """A job is a MeanFlow step: (dq, dk, dv). Sets are (q, k, v, their tangents, target)."""

    differentiates_tangent: bool = False

    def jobs(self, backward: bool) -> list[Callable[[], object]]:
        stored = [tuple(map(self.layout, inputs)) for inputs in self.sets]
        return [partial(self.step, inputs) for inputs in stored]

    def step(self, inputs: Inputs) -> Inputs:
        return step_gradients(self.attend, inputs, self.differentiates_tangent)


@torch.enable_grad()
def step_gradients(attend: peers.Attend, inputs: Inputs, differentiates_tangent: bool) -> Inputs:
    """The gradients of |u + du - target|^2 by q, k and v, u = attend(q, k, v), du its tangent."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
    u, du = torch.func.jvp(attend, leaves, inputs[3:6])[:2]
    du = du if differentiates_tangent else du.detach()
    return torch.autograd.grad((u + du - inputs[6]).square().sum(), leaves)


def textbook(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention with all scores stored, every result in the dtype of q."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.mT
    s = s if mask is None else torch.where(mask, s, -torch.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


class TangentCheck(OutputCheck):
    """The accuracy rule for out; the tangent at the sampled rows against the textbook's."""

    @cached_property
    def exact_tangent(self) -> Tensor:
        return self._tangent(torch.float64)

    def _tangent(self, dtype: torch.dtype) -> Tensor:
        """Of the textbook formula in a dtype."""
        inputs = [x.to(dtype) for x in next(iter(self.samples.values()))]
        primals, tangents = inputs[:3], inputs[3:]
        for part in (primals, tangents):
            part[0] = part[0][:, self.rows]
        attend = partial(textbook, mask=self.visible(self.rows))
        return torch.func.jvp(attend, tuple(primals), tuple(tangents))[1]

    def __call__(self, candidate: GpuCandidate, strict: bool) -> dict[str, float]:
        errors = super().__call__(candidate, strict)
        if isinstance(candidate, TangentCandidate):
            inputs = next(iter(self.samples.values()))
            got = candidate.push(tuple(map(candidate.layout, inputs)))[1][:, self.rows]
            errors["tangent"] = rmse(got, self.exact_tangent)
            textbook_error = rmse(self._tangent(got.dtype), self.exact_tangent)
            _check_textbook(textbook_error, errors["tangent"], "the tangent")
        return errors


class StepCheck:
    """All gradients of a step against fp64, one head at a time."""

    def __init__(self, inputs: Inputs, differentiates_tangent: bool):
        self.inputs, self.differentiates_tangent = inputs, differentiates_tangent

    def _gradients(self, dtype: torch.dtype) -> Tensor:
        """Of the textbook formula in a dtype: (dq, dk, dv) of one head after another."""
        heads = (
            tuple(x[:, :, h : h + 1].to(dtype) for x in self.inputs)
            for h in range(self.inputs[0].shape[2])
        )
        way = self.differentiates_tangent
        return torch.cat([torch.stack(step_gradients(textbook, x, way)) for x in heads], 3)

    @cached_property
    def exact(self) -> Tensor:
        return self._gradients(torch.float64)

    @cached_property
    def textbook_error(self) -> float:
        return rmse(self._gradients(self.inputs[0].dtype), self.exact)

    def __call__(self, candidate: StepCandidate, strict: bool) -> dict[str, float]:
        got = torch.stack(candidate.step(tuple(map(candidate.layout, self.inputs))))
        error = rmse(got, self.exact)
        if strict:
            _check_textbook(self.textbook_error, error, "the gradients of the step")
        return {"normal": error}


def _check_textbook(textbook_error: float, error: float, name: str) -> None:
    if not error <= TEXTBOOK * textbook_error:
        raise Inaccurate(
            f"the RMSE of {name} is {error:.3g}, that of the textbook formula {textbook_error:.3g}"
        )


def draw_dual_sets(case: Case, device: torch.device) -> list[Inputs]:
    """Sets of (q, k, v) and their tangents; if the case has a backward, and a target."""
    sets = gpu.draw_sets(case, device)
    others = (gpu.draw(case, device, seed=1000 + i) for i in range(len(sets)))
    return [(*a[:3], *b[:3], *a[3:4]) for a, b in zip(sets, others, strict=True)]


class JvpCell(NamedTuple):
    case: Case

    @property
    def group(self) -> str:
        return f"jvp {self.case.mask} {self.case.head_dim}"

    def specs(self, session: Session) -> list[RowSpec]:
        case, sets = self.case, draw_dual_sets(self.case, session.device)
        pattern = patterns.plain(case.seqlen, case.mask)
        attend = partial(onchip.attention, **pattern.options)
        check = TangentCheck({"normal": sets[0]}, pattern.visible)
        kernel = onchip.explain(*sets[0][:3], **pattern.options).plan.kernel
        ours = TangentCandidate("onchip", attend, sets, check, ours=True)
        against = [GpuCandidate("forward", attend, sets, check, ours=True)]
        if kernel == "hopper":
            by_name = partial(attend, kernel="triton")
            against.append(GpuCandidate("forward triton", by_name, sets, check, ours=True))
        return [RowSpec(case.bench, kernel, ours, against)]

    def measure(self, session: Session) -> list[Row]:
        specs = self.specs(session)
        return gpu.contest(session, self.case, specs, gpu.MILLISECONDS, required=("forward",))


class StepCell(NamedTuple):
    case: Case

    @property
    def group(self) -> str:
        return f"MeanFlow {self.case.way}"

    def specs(self, session: Session) -> list[RowSpec]:
        sets = draw_dual_sets(self.case, session.device)
        kernel = onchip.explain(*sets[0][:3]).plan.kernel
        ours, math = self.candidates(sets)
        return [RowSpec(self.case.bench, kernel, ours, [math])]

    def candidates(self, sets: Sequence[Inputs]) -> Iterable[StepCandidate]:
        differentiates = self.case.way == "second order"
        check = StepCheck(sets[0], differentiates)
        attends = {"onchip": onchip.attention, "math": peers.backend("math")}
        for name, attend in attends.items():
            is_ours = name == "onchip"
            layout = (lambda x: x) if is_ours else peers.heads_first
            yield StepCandidate(name, attend, sets, check, layout, is_ours, (), 2.0, differentiates)

    def measure(self, session: Session) -> list[Row]:
        specs = self.specs(session)
        return gpu.contest(session, self.case, specs, gpu.MILLISECONDS, required=("math",))


class MemoryCell(NamedTuple):
    case: Case
    group: None = None  # it has the kernels of a StepCell

    def specs(self, session: Session) -> list[RowSpec]:
        return StepCell(self.case).specs(session)

    def measure(self, session: Session) -> list[Row]:
        (spec,) = self.specs(session)
        refusals: dict[str, str] = {}
        ours = self.peak_mb(spec.ours, session, refusals)
        math = self.peak_mb(spec.against[0], session, refusals)
        if ours is None:
            raise Inaccurate(refusals["onchip"])
        columns = {} if math is None else {"peers": {"math": math}, "best_peer": "math"}
        ratio = math / ours if math is not None and ours else None
        row = self.case.row(spec.kernel, ours, "MB", **columns, ratio=ratio)
        return [row | {"refusals": refusals, "doubts": []}]

    def peak_mb(
        self, candidate: GpuCandidate, session: Session, refusals: dict[str, str]
    ) -> float | None:
        """Of the second step: the first one allocates what libraries keep."""
        try:
            job = candidate.jobs(True)[0]
            job()
            return (peak_extra_bytes(job, session.device)[0] or 0) / MB
        except Exception as error:
            gpu.still_there(session.device)
            refusals[candidate.name] = gpu.sentence(error)
            return None


def cells(session: Session) -> list[JvpCell | StepCell | MemoryCell]:
    dims = session.head_dims or (HEAD_DIMS[:1] if session.quick else HEAD_DIMS)
    lengths = session.seqlens or ((QUICK_LENGTH,) if session.quick else LENGTHS)
    step = QUICK_LENGTH if session.quick else STEP_LENGTH
    memory = QUICK_MEMORY_LENGTHS if session.quick else MEMORY_LENGTHS
    found: list[JvpCell | StepCell | MemoryCell] = []
    for d, mask, n in product(dims, ("none", "causal"), lengths):
        tokens, hidden = (n, 4 * d) if session.quick else (gpu.TOKENS, gpu.HIDDEN)
        sizes = (d, n, max(1, tokens // n), hidden // d)
        found.append(JvpCell(Case("jvp", mask, torch.bfloat16, *sizes, way="jvp")))
    heads = QUICK_HEADS if session.quick else STEP_HEADS
    found += [StepCell(_step_case("MeanFlow", step, heads, way)) for way in WAYS]
    for way, n in product(WAYS, memory):
        found.append(MemoryCell(_step_case("MeanFlow memory", n, heads, way)))
    return found


def _step_case(bench: str, n: int, num_heads: int, way: str) -> Case:
    sizes = (STEP_DIM, n, 1, num_heads)
    return Case(bench, "none", torch.bfloat16, *sizes, backward=True, way=way)
