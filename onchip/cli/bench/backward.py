"""`onchip bench backward`: the whole backward pass (dq, dk, dv) against the peers of the same run.

What is timed is `torch.autograd.grad` of a forward that ran before: everything between dout and
the three gradients, preprocessing and casts included. "deterministic" rows compare a call that is
equal bit by bit from run to run with the plain one. A row without FlashAttention-4 as a peer does
not count. --groups and --head-dims measure further cells, which have thresholds of their own.
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
from onchip.cli.bench.scores import Scores
from onchip.core.dispatch import plan
from onchip.core.explain import Explanation
from onchip.testing import MODEL_MIN_ELEMENTS, Report, Verdict, max_error, rmse, ulp

SDPA = ("cudnn", "fa2")
CHUNK_ELEMENTS = 1 << 27  # of fp64 scores at once: 1 GiB
NAMES = ("dq", "dk", "dv")


def _counts(row: Row) -> bool:
    return row["bench"] == "backward" and gpu.counts(row)


def _plain(row: Row) -> bool:
    return _counts(row) and gpu.is_of_papers(row)


def _of(*head_dims: int) -> Callable[[Row], bool]:
    return lambda row: _plain(row) and row["head_dim"] in head_dims


THRESHOLDS = (
    Threshold("backward, head_dim 64", _of(64), at_least=1.0),
    Threshold("backward, head_dim 128", _of(128), at_least=1.0),
    worst_cell("backward, head_dim 64 and 128, worst cell", _of(64, 128), 0.95),
    Threshold("backward, head_dim 256", _of(256), at_least=1.15),
    worst_cell(
        "deterministic over plain, worst cell", lambda row: row["bench"] == "deterministic", 0.85
    ),
    Threshold(
        "RMSE over cuDNN's",
        lambda row: row["bench"] == "backward" and gpu.has_cudnn(row),
        at_most=1.02,
        measure=partial(gpu.worst_error, distributions=("normal",)),  # see rounding_model on dk
        unit="x",
    ),
    gpu.OVER_FLEX,
    *gpu.other_cells("backward", _counts, groups=(1.0, 0.93), head_dims=(0.97, 0.92)),
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
    return backward_kernel(explained)


def backward_kernel(explained: Explanation) -> str:
    return plan(explained.problem, explained.device, backward=True).kernel


class Problem64(NamedTuple):
    """One problem in fp64 and heads first, with what the exact backward needs of every row. k and v
    are repeated for every query head of their group.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor  # (batch, heads, seqlen)
    delta: Tensor  # rowsum(out * dout), (batch, heads, seqlen)
    scores: Scores
    num_kv_heads: int

    @property
    def softmax_scale(self) -> float:
        return self.scores.scale(self.q)

    def pick_rows(self, at: Tensor) -> "Problem64":
        rows = {name: getattr(self, name)[:, :, at] for name in ("q", "dout", "lse", "delta")}
        return self._replace(**rows, scores=self.scores.pick(rows=at))

    def pick_keys(self, at: Tensor) -> "Problem64":
        keys = {"k": self.k[:, :, at], "v": self.v[:, :, at]}
        return self._replace(**keys, scores=self.scores.pick(keys=at))

    def sum_groups(self, x: Tensor) -> Tensor:
        """(batch, heads, ...) summed over the query heads of each key head."""
        return x.unflatten(1, (self.num_kv_heads, -1)).sum(2)


class GradientCheck(Sampled):
    """dq at sampled query rows, dk and dv at sampled keys, of the very backward that is timed.

    dq_i needs row i of the scores; dk_j and dv_j need column j, and of every row only lse_i and
    delta_i, which one fp64 pass over chunks of rows provides. So the reference is exact for the
    full dout at the full length, and nothing N x N is stored.

    The rule is that of `onchip.testing` for gradients: RMSE at most 1.10 times that of the rounding
    model (fp64 in which only P, dS, the saved out and the result are rounded to the dtype), and no
    error above the model's largest by more than one ulp at max|ref|. The errors reported are RMSEs
    over all gradients together: of dq, dk and dv, of bias at the sampled rows, of sinks.
    """

    @cached_property
    def columns_seen(self) -> Tensor:
        """bool (seqlen_q, sampled keys)."""
        n = next(iter(self.samples.values()))[0].shape[1]
        chunks = torch.arange(n, device=self.rows.device).split(1024)
        return torch.cat([self.visible(chunk)[:, self.keys] for chunk in chunks])

    @cached_property
    def problems(self) -> dict[str, Problem64]:
        return {n: exact_rows(x, self.visible, self.scores) for n, x in self.samples.items()}

    @cached_property
    def exact(self) -> dict[str, Inputs]:
        return {name: self.strips(p, lambda x: x) for name, p in self.problems.items()}

    @torch.no_grad()
    def strips(self, p: Problem64, rounded: Callable[[Tensor], Tensor]) -> Inputs:
        """dq at the rows, dk and dv at the keys, (batch, sampled, heads, head_dim), then the
        gradients of the parameters, which `rounded` leaves alone.

        P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q,
        with P, dS and the results through `rounded`. With a softcap dQ and dK take dS times the
        slope of the score.
        """
        _, ds, dproduct = _scores_backward(p.pick_rows(self.rows), self.visible(self.rows))
        dq = p.softmax_scale * rounded(dproduct) @ p.k
        others = p.scores.sum_gradients(ds, p.lse, p.delta)
        probabilities, _, dproduct = _scores_backward(p.pick_keys(self.keys), self.columns_seen)
        dk = p.softmax_scale * p.sum_groups(rounded(dproduct).mT @ p.q)
        dv = p.sum_groups(rounded(probabilities).mT @ p.dout)
        return (*(rounded(x.transpose(1, 2)) for x in (dq, dk, dv)), *others)

    def sample(self, gradients: Inputs) -> Inputs:
        """What `strips` has of whole gradients."""
        dq, dk, dv, *others = gradients
        named = zip(self.scores.parameters, others, strict=True)
        picked = (x[:, :, self.rows] if name == "bias" else x for name, x in named)
        return dq[:, self.rows], dk[:, self.keys], dv[:, self.keys], *picked

    def __call__(self, candidate: GpuCandidate, strict: bool) -> dict[str, float]:
        errors = {}
        for name, inputs in self.samples.items():
            out, gradients = candidate.differentiate(tuple(map(candidate.layout, inputs)))
            got = self.sample(gradients())
            if strict:
                self._hold(name, got, out.detach())
            pooled = lambda tensors: torch.cat([x.double().flatten() for x in tensors])
            errors[name] = rmse(pooled(got), pooled(self.exact[name]))
        return errors

    def _hold(self, name: str, got: Inputs, out: Tensor) -> None:
        p, dtype = self.problems[name], out.dtype
        delta = (out.double().transpose(1, 2) * p.dout).sum(-1)
        model = self.strips(p._replace(delta=delta), lambda x: x.to(dtype).to(x.dtype))
        model = [x.to(g.dtype).to(x.dtype) for x, g in zip(model, got, strict=True)]
        names = (*NAMES, *(f"d{parameter}" for parameter in self.scores.parameters))
        triples = zip(names, got, self.exact[name], model, strict=True)
        report = Report(x for triple in triples for x in verdicts(*triple))
        if not report.ok:
            raise Inaccurate(f"outside the accuracy rule ({name}):\n{report}")


def verdicts(name: str, got: Tensor, want: Tensor, model: Tensor) -> Iterator[Verdict]:
    """The accuracy rule for one gradient in 16 bits; of few numbers, as of sinks, the RMSE is too
    noisy to be bounded.
    """
    if name in NAMES or want.numel() >= MODEL_MIN_ELEMENTS:
        ratio = rmse(got, want) / max(rmse(model, want), torch.finfo(torch.float64).tiny)
        yield Verdict(name, "RMSE / rounding model", ratio, 1.10)
    allowed = max_error(model, want) + ulp(got.dtype, want.abs().max().item())
    yield Verdict(name, "max error", max_error(got, want), allowed)


@torch.no_grad()
def exact_rows(inputs: Inputs, visible: Rows, scores: Scores) -> Problem64:
    """lse and delta of every row, some rows at a time."""
    num_kv_heads, group = inputs[1].shape[2], inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v, dout = (x.double().transpose(1, 2).contiguous() for x in inputs)
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    chunk = max(1, CHUNK_ELEMENTS // (q.shape[0] * q.shape[1] * k.shape[2]))
    lses, deltas = [], []
    for rows in torch.arange(q.shape[2], device=q.device).split(chunk):
        picked = scores.pick(rows)
        s = picked.finish(picked.multiply(q[:, :, rows], k))
        s.masked_fill_(~visible(rows), -torch.inf)
        lse = picked.add_sinks(torch.logsumexp(s, -1))
        out = s.sub_(lse[..., None]).exp_() @ v
        lses.append(lse)
        deltas.append((out * dout[:, :, rows]).sum(-1))
    lse, delta = torch.cat(lses, -1), torch.cat(deltas, -1)
    return Problem64(q, k, v, dout, lse, delta, scores, num_kv_heads)


def _scores_backward(p: Problem64, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P, dS and the gradient of the scaled product, of a strip of the scores; seen: bool, which of
    its cells are visible.
    """
    product = p.scores.multiply(p.q, p.k)
    s = p.scores.finish(product)
    probabilities = torch.exp(s - p.lse[..., None]).masked_fill(~seen, 0.0)
    ds = probabilities * (p.dout @ p.v.mT - p.delta[..., None])
    return probabilities, ds, ds * p.scores.slope(product)
