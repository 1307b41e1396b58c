"""Prometheus metrics. The registry belongs to one server: nothing is global."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from onchip.engine.request import RequestOutput
from onchip.engine.speculation.speculator import SpeculationStats
from onchip.engine.stats import EngineStats

from .service import Service, ServiceState

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)

# metric: (description, function that reads it from EngineStats)
_GAUGES = {
    "requests_running": ("Requests that have pages", lambda s: s.running),
    "requests_waiting": ("Requests in the queue", lambda s: s.waiting),
    "pages": ("Pages of the cache", lambda s: s.pages_total),
    "page_bytes": ("Bytes of a page, with the scales of an 8-bit one", lambda s: s.page_bytes),
    "pages_used": ("Pages that running requests hold", lambda s: s.pages_total - s.pages_free),
    "pages_cached": ("Free pages that still hold a prefix", lambda s: s.pages_cached),
    "pages_offloaded": ("Pages of long requests in host memory", lambda s: s.pages_offloaded),
    "pages_offloadable": ("Pages of host memory for them", lambda s: s.pages_offloadable),
    "pages_saved": ("Pages that sharing saves", lambda s: s.pages_shared),
    "last_step_seconds": ("How long the last step took", lambda s: s.last_step_s),
    "spec_decode_acceptance_length": (
        "Mean number of tokens of a chunk with drafts, NaN before the first",
        lambda s: _drafts(s).mean_acceptance_length,
    ),
    "spec_decode_failed": (
        "1 if proposing drafts failed, which ends them",
        lambda s: _drafts(s).failure is not None,
    ),
}
_COUNTERS = {
    "tokens_generated": ("Tokens sampled", lambda s: s.tokens_generated),
    "tokens_prefilled": ("Prompt tokens computed", lambda s: s.tokens_prefilled),
    "tokens_cached": ("Prompt tokens found in the cache", lambda s: s.tokens_cached),
    "pages_streamed": ("Pages read from host memory", lambda s: s.pages_streamed),
    "preempted_by_swap": ("Preemptions to the host", lambda s: s.preempted_by_swap),
    "preempted_by_recompute": (
        "Preemptions by recomputation",
        lambda s: s.preempted_by_recompute,
    ),
    "steps": ("Steps computed", lambda s: s.steps),
    "cascade_steps": ("Steps that read shared pages once", lambda s: s.cascade_steps),
    "tokens_unread": (
        "Keys that a layer of these steps did not read again",
        lambda s: s.tokens_unread,
    ),
    "tokens_prefilled_8bit": (
        "Prompt tokens with attention in 8 bits",
        lambda s: s.tokens_prefilled_8bit,
    ),
    "spec_decode_num_drafts": ("Chunks with drafts", lambda s: _drafts(s).num_drafts),
    "spec_decode_num_draft_tokens": ("Drafts", lambda s: _drafts(s).num_draft_tokens),
    "spec_decode_num_accepted_tokens": (
        "Drafts that were accepted",
        lambda s: _drafts(s).num_accepted_tokens,
    ),
}
_NO_DRAFTS = SpeculationStats()


def _drafts(stats: EngineStats) -> SpeculationStats:
    return stats.speculation or _NO_DRAFTS


class Metrics:
    """`observe` counts outputs, `count_failure` errors; `render` writes the page."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges = {
            name: self._gauge(name, description) for name, (description, _) in _GAUGES.items()
        }
        self._counters = {
            name: self._counter(name, description) for name, (description, _) in _COUNTERS.items()
        }
        self._before: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their position in the chunk",
            "position",
        )
        self._accepted_before: tuple[int, ...] = ()
        self._state = self._gauge("state", "1 for the current state of the server", "state")
        self._open = self._gauge("requests_open", "Requests with a waiting client")
        self._step_age = self._gauge("step_age_seconds", "Age of the current step, 0 between steps")
        self._ended = self._counter("choices", "Choices that ended", "finish_reason")
        self._failed = self._counter("responses_failed", "Failed requests", "status")
        self._gone = self._counter(
            "clients_gone", "Clients that disconnected before their response"
        )
        self._first = self._histogram("time_to_first_token_seconds", _SECONDS)
        self._queue = self._histogram("queue_seconds", _SECONDS)
        self._whole = self._histogram("request_seconds", _SECONDS)
        self._token = self._histogram("time_per_output_token_seconds", _TOKEN_SECONDS)

    def observe(self, output: RequestOutput) -> None:
        """Times are complete when a request has ended."""
        if not output.finished:
            return
        times = output.metrics
        for choice in output.outputs:
            self._ended.labels(choice.finish_reason).inc()
        if times.first_scheduled_s is not None:
            self._queue.observe(times.first_scheduled_s - times.arrival_s)
        if times.finished_s is not None:
            self._whole.observe(times.finished_s - times.arrival_s)
        if times.first_token_s is not None:
            self._first.observe(times.first_token_s - times.arrival_s)
            self._observe_tokens(output, times.first_token_s, times.finished_s)

    def _observe_tokens(
        self, output: RequestOutput, first_s: float, finished_s: float | None
    ) -> None:
        steps = max(len(choice.token_ids) for choice in output.outputs) - 1
        if steps > 0 and finished_s is not None:
            self._token.observe((finished_s - first_s) / steps)

    def count_failure(self, status: int) -> None:
        self._failed.labels(str(status)).inc()

    def count_disconnect(self) -> None:
        self._gone.inc()

    def render(self, service: Service) -> bytes:
        stats = service.stats
        for name, (_, read) in _GAUGES.items():
            self._gauges[name].set(read(stats))
        for name, (_, read) in _COUNTERS.items():
            self._advance(name, read(stats))
        self._advance_positions(_drafts(stats).num_accepted_tokens_per_pos)
        for state in ServiceState:
            self._state.labels(state.value).set(state is service.state)
        self._open.set(service.num_open)
        self._step_age.set(service.step_age_s)
        return generate_latest(self._registry)

    def _advance(self, name: str, total: float) -> None:
        self._counters[name].inc(max(0.0, total - self._before[name]))
        self._before[name] = total

    def _advance_positions(self, totals: tuple[int, ...]) -> None:
        before = self._accepted_before or (0,) * len(totals)
        for position, (old, new) in enumerate(zip(before, totals, strict=True)):
            self._accepted.labels(str(position)).inc(max(0, new - old))
        self._accepted_before = totals

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(f"onchip_{name}", description, labels, registry=self._registry)

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"onchip_{name}", description, labels, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        description = name.removesuffix("_seconds").replace("_", " ").capitalize() + ", by request"
        return Histogram(f"onchip_{name}", description, buckets=buckets, registry=self._registry)
