"""Statistics of an engine."""

import time
from dataclasses import dataclass, field, replace

from onchip.engine.request import Request
from onchip.engine.scheduler import Scheduler
from onchip.engine.speculation.speculator import SpeculationStats
from onchip.engine.step import ScheduledStep
from onchip.kvcache import KVCache

_REFRESH_S = 0.2  # maximum age of statistics that visit all requests


@dataclass(frozen=True)
class EngineStats:
    """An engine at the end of a step. page_bytes: of one page, all layers. pages_free: available
    pages, of which pages_cached hold a prefix; pages_shared: pages saved by sharing. request_pages:
    pages by running request. The last two visit all requests and are up to 0.2 s old while there is
    work. pages_offloaded: pages of long requests in host memory, which has pages_offloadable.
    pages_streamed: such pages that all steps read. tokens_*: since the start; prefilled tokens are
    those without a sampled row, counted each time they are computed. cascade_steps: steps that read
    shared pages once; tokens_unread: keys that each layer of these did not read again.
    tokens_prefilled_8bit: prefilled tokens whose attention was computed in 8 bits. waited_s: total
    time spent waiting for the device. last_step_s: its duration; last_step_at: its end, by
    time.monotonic(). speculation: None without drafts.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    page_bytes: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_shared: int = 0
    request_pages: dict[str, int] = field(default_factory=dict)
    pages_offloadable: int = 0
    pages_offloaded: int = 0
    pages_streamed: int = 0
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    preempted_by_swap: int = 0
    preempted_by_recompute: int = 0
    steps: int = 0
    cascade_steps: int = 0
    tokens_unread: int = 0
    tokens_prefilled_8bit: int = 0
    waited_s: float = 0.0
    last_step_s: float = 0.0
    last_step_at: float = 0.0
    speculation: SpeculationStats | None = None


class StatsRecorder:
    """Replaces `latest` and never changes it, so any thread can read it at any time."""

    latest: EngineStats

    def __init__(self, cache: KVCache, page_bytes: int):
        self._refreshed_at = 0.0
        self.latest = EngineStats(
            pages_total=cache.pool.capacity,
            page_bytes=page_bytes,
            pages_free=cache.pool.num_free,
            pages_offloadable=cache.offload_pages,
        )

    def count_step(
        self,
        step: ScheduledStep,
        num_generated: int,
        waited_s: float,
        unread_tokens: int = 0,
        tokens_8bit: int = 0,
    ) -> None:
        """Count a collected step, its new tokens, the time spent waiting for it, the keys that it
        did not read again, and the tokens whose attention was computed in 8 bits.
        """
        old, num_sampled = self.latest, sum([bool(chunk.sampled_by) for chunk in step.chunks])
        self.latest = replace(
            old,
            tokens_generated=old.tokens_generated + num_generated,
            tokens_prefilled=old.tokens_prefilled + step.num_tokens - step.num_drafts - num_sampled,
            steps=old.steps + 1,
            cascade_steps=old.cascade_steps + (unread_tokens > 0),
            tokens_unread=old.tokens_unread + unread_tokens,
            tokens_prefilled_8bit=old.tokens_prefilled_8bit + tokens_8bit,
            pages_streamed=old.pages_streamed + step.streamed_pages,
            waited_s=old.waited_s + waited_s,
        )

    def record_turn(self, scheduler: Scheduler, cache: KVCache, started_at: float) -> None:
        """Record the state at the end of an `Engine.step` that began at started_at."""
        now, pool = time.monotonic(), cache.pool
        self.latest = replace(
            self.latest,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_offloaded=cache.num_offloaded,
            tokens_cached=scheduler.num_cached_tokens,
            preempted_by_swap=scheduler.totals["swapped_out"],
            preempted_by_recompute=scheduler.totals["recomputed"],
            last_step_s=now - started_at,
            last_step_at=now,
            speculation=scheduler.speculation,
        )
        if now - self._refreshed_at > _REFRESH_S or not scheduler.has_work:
            self._refreshed_at = now
            pages = {request.request_id: _num_pages(request) for request in scheduler.running}
            shared = pool.num_shared
            self.latest = replace(self.latest, pages_shared=shared, request_pages=pages)


def _num_pages(request: Request) -> int:
    """Pages that its samples hold, each counted once."""
    tables = [sample.sequence.table for sample in request.resident]
    return len(tables[0]) if len(tables) == 1 else len({p for t in tables for p in t.pages})
