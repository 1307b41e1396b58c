"""`python -m benchmarks models`: the attention calls of real models, as the models make them.

A row is one pass of one kind of layer: "forward" (training, or a prefill in one piece), "backward",
"prefill" (the last quarter of each prompt over pages) and "decode" (one query a sequence). Shapes
come from published configs (benchmarks/model_shapes.py); --only chooses models by name. Further
columns of a row: `model`, `layer`, `source`; `page_size`; `roofline`, the least time by
the rates of the device over the measured one. A peer that cannot run a call is named in `refusals`.
A row does not count if a peer is not installed.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from benchmarks import model_peers
from benchmarks.model_calls import ModelCall
from benchmarks.model_shapes import MODELS, NAMES, ModelLayer
from onchip.cli.bench import gpu
from onchip.cli.bench.backward import GradientCheck, backward_kernel
from onchip.cli.bench.gpu import GpuAccuracyCheck, GpuCandidate, Inputs, OutputCheck, RowSpec
from onchip.cli.bench.harness import Row, Session, Threshold, worst_cell
from onchip.cli.bench.paged import CHECKED
from onchip.core.explain import Explanation

PARTS = NAMES  # of --only
QUICK_TOKENS = 512


def _counts(row: Row) -> bool:
    return row["bench"] == "models" and gpu.counts(row)


THRESHOLDS = (
    Threshold("models", _counts, at_least=1.05),
    worst_cell("models, worst row", _counts, 0.95),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    """--seqlens and --head-dims choose among the calls by number of queries and head_dim."""
    for call in calls(session, MODELS):
        yield f"{call.layer.title}, {call.call.way}", partial(measure, session, call)


def calls(session: Session, layers: tuple[ModelLayer, ...]) -> Iterator[ModelCall]:
    for layer in layers:
        small = layer.shrink(QUICK_TOKENS) if session.quick else layer
        for call in small.calls if layer.name in (session.only or NAMES) else ():
            wanted = call.seqlen_q in (session.seqlens or (call.seqlen_q,))
            if wanted and layer.head_dim in (session.head_dims or (layer.head_dim,)):
                yield ModelCall(small, call, session.device)


def measure(session: Session, call: ModelCall) -> list[Row]:
    sets = gpu.draw_sets(call.case, session.device)
    check = make_check(call, sets[0])
    ours = our_candidate(call, sets, check)
    explained = call.explain(ours.sets[0])
    rivals, missing = model_peers.find(session, call, sets, check)
    kernel = backward_kernel(explained) if call.backward else explained.plan.kernel
    spec = RowSpec("models", kernel, ours, rivals)
    rows = gpu.contest(session, call.case, [spec], gpu.MICROSECONDS, required=missing)
    return [row | _columns(call, explained, row["value"]) for row in rows]


class OwnSetCheck(OutputCheck):
    """Each candidate computes its own first set, which holds the numbers of the sample in a form of
    its own, such as pages. Only the first sequences are compared.
    """

    def compute(self, candidate: GpuCandidate, inputs: Inputs) -> Tensor:
        return candidate.forward(candidate.sets[0])[: len(inputs[0])]


def make_check(call: ModelCall, inputs: Inputs) -> GpuAccuracyCheck:
    if call.backward:
        return GradientCheck({"normal": inputs}, call.visible, call.scores)
    few = tuple(x[:CHECKED] for x in inputs)
    return OwnSetCheck({"normal": few}, call.visible, call.scores.first(CHECKED))


def our_candidate(call: ModelCall, sets: list[Inputs], check: GpuAccuracyCheck) -> GpuCandidate:
    parameters = tuple(call.scores.parameters.values())
    if call.call.page_size:
        sets = [call.in_pages(inputs) for inputs in sets]
    return GpuCandidate("onchip", call.ours(), sets, check, ours=True, parameters=parameters)


def _columns(call: ModelCall, explained: Explanation, us: float) -> Row:
    least = call.least_seconds(explained)
    layer = call.layer
    return {
        "model": layer.name,
        "layer": layer.kind,
        "source": layer.source,
        "page_size": call.call.page_size or None,
        "roofline": None if least is None else least * 1e6 / us,
    }
