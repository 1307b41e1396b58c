"""`python -m benchmarks peak`: the most memory that a call holds beyond its inputs, 1k to 1M
tokens.

Standard attention is measured as the peer as long as it fits. Beyond that its memory is
extrapolated by the square: the bytes measured at the longest length that fitted, times the square
of the lengths' ratio (`peer_measured` is false). A result that breaks the accuracy rule has no row.
Query rows are sampled, and in a backward pass only they have a gradient: otherwise the reference
would need N x N scores.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.harness import Case, Row, Session, Threshold, hold
from onchip.cli.bench.measure import available_bytes, peak_extra_bytes, sample_rows
from onchip.cli.bench.peers import Attend, standard
from onchip.testing import oracle, rmse

LENGTHS = tuple(1 << i for i in range(10, 21))
QUICK_LENGTHS = (1024, 4096)
FROM = 16384  # where fixed costs are noise
SAMPLED_ROWS = 16
NUM_HEADS, HEAD_DIM = 4, 128
MB = 1e6


def per_token_growth(rows: list[Row]) -> float:
    """Bytes per token at the longest length over those at the shortest, the worse of the passes."""
    growth = []
    for name in {row["pass"] for row in rows}:
        each = {r["seqlen"]: r["value"] / r["seqlen"] for r in rows if r["pass"] == name}
        growth.append(each[max(each)] / each[min(each)])
    return max(growth)


THRESHOLDS = (
    Threshold(
        "peak memory per token, 1M over 16k tokens",
        lambda row: row["bench"] == "peak" and row["seqlen"] >= FROM,
        at_most=1.05,
        measure=per_token_growth,
        unit="x",
    ),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    lengths = session.seqlens or (QUICK_LENGTHS if session.quick else LENGTHS)
    for backward in (False, True):
        rival = Rival()
        for n in sorted(lengths):
            head_dim = next(iter(session.head_dims), HEAD_DIM)
            sizes = (head_dim, n, 1, NUM_HEADS)
            case = Case("peak", "causal", torch.bfloat16, *sizes, backward=backward)
            yield str(case), partial(measure, session, case, rival)


@dataclass
class Rival:
    """Standard attention, measured while it fits; lengths must come in rising order."""

    measured: dict[int, int] = field(default_factory=dict)

    def bytes(self, case: Case, inputs: gpu.Inputs, device: torch.device) -> int:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later would not count as available
        if self.extrapolate(case.seqlen) < 0.9 * available_bytes(device):
            try:
                found, _ = peak_extra_bytes(call(standard, inputs, case.backward), device)
            except torch.OutOfMemoryError:
                return self.extrapolate(case.seqlen)
            self.measured[case.seqlen] = found or 0
        return self.measured.get(case.seqlen) or self.extrapolate(case.seqlen)

    def extrapolate(self, n: int) -> int:
        """What the longest measured length predicts; 0 before anything was measured."""
        longest = max(self.measured, default=0)
        return round(self.measured[longest] * (n / longest) ** 2) if longest else 0


def measure(session: Session, case: Case, rival: Rival) -> list[Row]:
    inputs = gpu.draw(case, session.device)
    attend = partial(onchip.attention, causal=True)
    error = check_accuracy(attend, inputs, case.backward)
    ours, _ = peak_extra_bytes(call(attend, inputs, case.backward), session.device)
    theirs = rival.bytes(case, inputs, session.device)
    kernel = onchip.explain(*inputs[:3], causal=True).plan.kernel
    peers = {"standard": theirs / MB}
    ratio = theirs / ours if ours else None
    row = case.row(kernel, (ours or 0) / MB, "MB", peers=peers, best_peer="standard", ratio=ratio)
    columns = {"error": error, "peer_measured": case.seqlen in rival.measured, "doubts": []}
    return [row | columns]


def call(attend: Attend, inputs: gpu.Inputs, backward: bool) -> Callable[[], object]:
    """A forward pass, or one with its backward; nothing is kept from one to the next."""
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs[:3])
    if not backward:
        return partial(attend, q, k, v)
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), inputs[3])


def check_accuracy(
    attend: Attend, inputs: gpu.Inputs, backward: bool, pattern: str = "causal"
) -> float:
    """The RMSE of out at sampled rows; Inaccurate if they, or the gradients through them, break the
    accuracy rule.
    """
    q, k, v = inputs[:3]
    rows = sample_rows(q.shape[1], SAMPLED_ROWS).to(q.device)
    mask = patterns.plain(k.shape[1], pattern).visible(rows)

    def sampled(chosen: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return attend(q.index_copy(1, rows, chosen), k, v)[:, rows]

    hold(sampled, q[:, rows], k, v, grad=backward, mask=mask)
    with torch.no_grad():
        return rmse(sampled(q[:, rows], k, v), oracle(q[:, rows], k, v, mask=mask).out)
