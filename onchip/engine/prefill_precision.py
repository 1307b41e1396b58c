"""Which chunks of a step compute their attention in 8 bits.

    None     none
    "fp8"    every chunk of more than 2,048 tokens
    "auto"   those of them whose queries see 8,192 keys or more on average, where a GPU has the
             kernel: what precision="auto" means in `onchip.attention`

A step of up to 2,048 tokens replays a CUDA graph and computes in 16 bits. A longer chunk makes its
step longer than any graph, so the rule depends on the chunk alone and not on the rest of the step.
Quantising all keys so far also pays only for many queries.
"""

from collections.abc import Sequence

from onchip.core import dispatch
from onchip.core.device import DeviceInfo, device_info
from onchip.core.problem import Problem, UnsupportedError
from onchip.engine.cuda_graphs import MOST_GRAPH_TOKENS
from onchip.engine.layer_call import layer_call
from onchip.engine.step import Chunk
from onchip.kvcache import KVCache
from onchip.kvcache.prefill_chunks import PrefillChunk
from onchip.models import Decoder, Model

MODES = (None, "fp8", "auto")


class PrefillPlanner:
    """Finds the chunks. problem: a call of one layer; its lengths are ignored, and its precision is
    "fp8" or "auto". UnsupportedError: no kernel computes it in FP8.
    """

    precision = "fp8"
    kernel: str  # that computes it

    def __init__(self, problem: Problem, device: DeviceInfo):
        self._problem, self._device = problem, device
        self.kernel = dispatch.plan(problem._replace(precision=self.precision), device).kernel

    def plan(self, chunks: Sequence[Chunk]) -> tuple[PrefillChunk, ...]:
        """The chunks of a step in 8 bits, in their order."""
        found, start = [], 0
        for index, chunk in enumerate(chunks):
            stop = start + chunk.num_tokens
            if chunk.num_tokens > MOST_GRAPH_TOKENS and self._is_chosen(chunk):
                found.append(PrefillChunk(index, start, stop, chunk.stop))
            start = stop
        return tuple(found)

    def _is_chosen(self, chunk: Chunk) -> bool:
        problem = self._problem._replace(seqlen_q=chunk.num_tokens, seqlen_k=chunk.stop)
        if problem.precision != "auto":
            return True
        return dispatch.resolve_precision(problem, self._device) == self.precision


def make_prefill_planner(model: Model, cache: KVCache, mode: str | None) -> PrefillPlanner | None:
    """None if no chunk of this model can be computed in 8 bits: switched off, or "auto" where no
    kernel serves it. UnsupportedError: "fp8" where no kernel serves it.
    """
    if mode not in MODES:
        names = ", ".join(map(repr, MODES))
        raise ValueError(f"prefill_precision={mode!r:.60} must be one of {names}")
    if mode is None:
        return None
    try:
        problem = layer_call(_check_model(model), cache, MOST_GRAPH_TOKENS + 1)
        problem = problem._replace(precision=mode)
        return PrefillPlanner(problem, device_info(cache.device))
    except UnsupportedError as refusal:
        if mode == "auto":
            return None
        raise UnsupportedError(f"prefill_precision={mode!r} is not served: {refusal}") from refusal


def _check_model(model: Model) -> Decoder:
    if not isinstance(model, Decoder):
        raise UnsupportedError("the model runs through transformers, only native ones have 8 bits")
    if None not in model.windows:
        raise UnsupportedError("every layer of the model has a window, which takes 16 bits")
    return model
