"""`onchip bench backward`: the whole backward pass (dq, dk, dv) against the peers of the same run.

What is timed is `torch.autograd.grad` of a forward that ran before: everything between dout and
the three gradients, preprocessing and casts included. "deterministic" rows compare a call that is
equal bit by bit from run to run with the plain one. A row without FlashAttention-4 as a peer does
not count.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.forward import fa4_rivals, flex_rivals, our_specs, sdpa_rivals
from onchip.cli.bench.gpu import GpuCandidate, Inputs, RowSpec, Sampled
from onchip.cli.bench.harness import Case, Inaccurate, Row, Rows, Session, Threshold, worst_cell
from onchip.core.dispatch import plan
from onchip.testing import Report, Verdict, max_error, rmse, ulp

SDPA = ("cudnn", "fa2")
CHUNK_ELEMENTS = 1 << 27  # of fp64 scores at once: 1 GiB
NAMES = ("dq", "dk", "dv")


def _plain(row: Row) -> bool:
    return row["bench"] == "backward" and gpu.counts(row)


def _share_ahead(rows: list[Row]) -> float:
    """The share of cells with a ratio of at least 1.00, or with a band that reaches 1.00."""
    return sum(r["ratio"] >= 1.0 or r["band"][1] >= 1.0 for r in rows) / len(rows)


THRESHOLDS = (
    Threshold("backward", _plain, at_least=1.05),
    worst_cell("backward, worst cell", _plain, 0.93),
    Threshold(
        "backward, share of cells ahead", _plain, at_least=30 / 36, measure=_share_ahead, unit=""
    ),
    worst_cell(
        "deterministic over plain, worst cell", lambda row: row["bench"] == "deterministic", 0.75
    ),
    Threshold(
        "RMSE over cuDNN's",
        lambda row: row["bench"] == "backward" and gpu.has_cudnn(row),
        at_most=1.02,
        measure=partial(gpu.worst_error, distributions=("normal",)),  # see rounding_model on dk
        unit="x",
    ),
    gpu.OVER_FLEX,
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    for case in gpu.grid(session, "backward", backward=True):
        yield str(case), partial(measure, session, case)


def measure(session: Session, case: Case) -> list[Row]:
    pattern = patterns.plain(case.seqlen, case.mask)
    sets = gpu.draw_sets(case, session.device)
    samples = {"normal": sets[0], "outlier": gpu.draw(case, session.device, "outlier")}
    check = GradientCheck(samples, pattern.visible)
    rivals = sdpa_rivals(case, sets, check, SDPA)
    rivals += fa4_rivals(session, case, sets, check) + flex_rivals(session, case, sets, check)
    specs = our_specs("backward", pattern, sets, check, rivals, kernel_of(sets[0], pattern.options))
    same = GpuCandidate(
        "deterministic",
        partial(onchip.attention, deterministic=True, **pattern.options),
        sets,
        check,
        ours=True,
    )
    kernel = kernel_of(sets[0], {**pattern.options, "deterministic": True})
    specs.append(RowSpec("deterministic", kernel, same, [specs[0].ours]))
    return gpu.contest(session, case, specs, gpu.tflops(case), required=("fa4",))


def kernel_of(inputs: Inputs, options: dict) -> str:
    """The kernel that runs the backward of a plain call. It may differ from the kernel of the
    forward.
    """
    explained = onchip.explain(*(x.detach().requires_grad_() for x in inputs[:3]), **options)
    return plan(explained.problem, explained.device, backward=True).kernel


class Problem64(NamedTuple):
    """One problem in fp64 and heads first, with what the exact backward needs of every row."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor  # (batch, heads, seqlen)
    delta: Tensor  # rowsum(out * dout), (batch, heads, seqlen)

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5


class GradientCheck(Sampled):
    """dq at sampled query rows, dk and dv at sampled keys, of the very backward that is timed.

    dq_i needs row i of the scores; dk_j and dv_j need column j, and of every row only lse_i and
    delta_i, which one fp64 pass over chunks of rows provides. So the reference is exact for the
    full dout at the full length, and nothing N x N is stored.

    The rule is that of `onchip.testing` for gradients: RMSE at most 1.10 times that of the rounding
    model (fp64 in which only P, dS, the saved out and the result are rounded to the dtype), and no
    error above the model's largest by more than one ulp at max|ref|. The errors reported are RMSEs
    over dq, dk and dv together.
    """

    @cached_property
    def columns_seen(self) -> Tensor:
        """bool (seqlen_q, sampled keys)."""
        n = next(iter(self.samples.values()))[0].shape[1]
        chunks = torch.arange(n, device=self.rows.device).split(1024)
        return torch.cat([self.visible(chunk)[:, self.rows] for chunk in chunks])

    @cached_property
    def problems(self) -> dict[str, Problem64]:
        return {name: exact_rows(x, self.visible) for name, x in self.samples.items()}

    @cached_property
    def exact(self) -> dict[str, Inputs]:
        return {name: self.strips(p, lambda x: x) for name, p in self.problems.items()}

    def strips(self, p: Problem64, rounded: Callable[[Tensor], Tensor]) -> Inputs:
        """dq at the rows, dk and dv at the keys, (batch, sampled, heads, head_dim).

        P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q,
        with P, dS and the results through `rounded`.
        """
        at = self.rows
        picked = p._replace(q=p.q[:, :, at], dout=p.dout[:, :, at])
        picked = picked._replace(lse=p.lse[:, :, at], delta=p.delta[:, :, at])
        _, ds = _scores_backward(picked, self.visible(at))
        dq = p.softmax_scale * rounded(ds) @ p.k
        across = p._replace(k=p.k[:, :, at], v=p.v[:, :, at])
        probabilities, ds = _scores_backward(across, self.columns_seen)
        dk = p.softmax_scale * rounded(ds).mT @ p.q
        dv = rounded(probabilities).mT @ p.dout
        dq, dk, dv = (rounded(x.transpose(1, 2)) for x in (dq, dk, dv))
        return dq, dk, dv

    def __call__(self, candidate: GpuCandidate, strict: bool) -> dict[str, float]:
        errors = {}
        for name, inputs in self.samples.items():
            out, gradients = candidate.differentiate(tuple(map(candidate.layout, inputs)))
            got = tuple(x[:, self.rows] for x in gradients())
            if strict:
                self._hold(name, got, out.detach())
            pooled = lambda tensors: torch.cat([x.double().flatten() for x in tensors])
            errors[name] = rmse(pooled(got), pooled(self.exact[name]))
        return errors

    def _hold(self, name: str, got: Inputs, out: Tensor) -> None:
        p, dtype = self.problems[name], out.dtype
        delta = (out.double().transpose(1, 2) * p.dout).sum(-1)
        model = self.strips(p._replace(delta=delta), lambda x: x.to(dtype).to(x.dtype))
        triples = zip(NAMES, got, self.exact[name], model, strict=True)
        report = Report(x for triple in triples for x in verdicts(*triple))
        if not report.ok:
            raise Inaccurate(f"outside the accuracy rule ({name}):\n{report}")


def verdicts(name: str, got: Tensor, want: Tensor, model: Tensor) -> Iterator[Verdict]:
    """The accuracy rule for one gradient in 16 bits."""
    ratio = rmse(got, want) / max(rmse(model, want), torch.finfo(torch.float64).tiny)
    yield Verdict(name, "RMSE / rounding model", ratio, 1.10)
    allowed = max_error(model, want) + ulp(got.dtype, want.abs().max().item())
    yield Verdict(name, "max error", max_error(got, want), allowed)


def exact_rows(inputs: Inputs, visible: Rows) -> Problem64:
    """lse and delta of every row, some rows at a time."""
    q, k, v, dout = (x.double().transpose(1, 2).contiguous() for x in inputs)
    n = q.shape[2]
    chunk = max(1, CHUNK_ELEMENTS // (q.shape[0] * q.shape[1] * n))
    lses, deltas = [], []
    for rows in torch.arange(n, device=q.device).split(chunk):
        s = (q[:, :, rows] @ k.mT).mul_(q.shape[-1] ** -0.5)
        s.masked_fill_(~visible(rows), -torch.inf)
        lse = torch.logsumexp(s, -1)
        out = s.sub_(lse[..., None]).exp_() @ v
        lses.append(lse)
        deltas.append((out * dout[:, :, rows]).sum(-1))
    return Problem64(q, k, v, dout, torch.cat(lses, -1), torch.cat(deltas, -1))


def _scores_backward(p: Problem64, seen: Tensor) -> tuple[Tensor, Tensor]:
    """P and dS of a strip of the scores; seen: bool, which of its cells are visible."""
    s = (p.q @ p.k.mT) * p.softmax_scale
    probabilities = torch.exp(s - p.lse[..., None]).masked_fill(~seen, 0.0)
    return probabilities, probabilities * (p.dout @ p.v.mT - p.delta[..., None])
