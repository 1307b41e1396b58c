"""Data of the live page: the pool page by page, the requests that hold pages, the queue."""

import time
from typing import Any, NamedTuple

from .pending import OpenRequestInfo
from .service import Service

MAX_SHOWN = 100  # requests that are listed; the others are counted
MAX_MAPPED = 4096  # pages that are drawn one by one
REFRESH_S = 0.2  # least time between two snapshots, for any number of viewers
TIMEOUT_S = 0.2  # how long a snapshot may wait for the current step
BLANK, CACHED = -2, -1


class EngineSnapshot(NamedTuple):
    """The engine between two steps."""

    page_size: int | None = None  # tokens of a page
    tokens: dict[str, int] = {}  # generated so far, of each request
    owners: list[tuple[str | int, int]] | None = None


class LiveView:
    """Reads the service for all viewers of the live page."""

    def __init__(self, service: Service, model: str):
        self._service, self._model = service, model
        self._read_at_s, self._snapshot = 0.0, EngineSnapshot()

    @property
    def last_step_age_s(self) -> float | None:
        ended = self._service.stats.last_step_at
        return round(time.monotonic() - ended, 3) if self._service.num_steps else None

    async def read_stats(self) -> dict[str, Any]:
        """Requests, pages and tokens. holders: requests with pages, then waiting requests.
        map.cells: for each page the index of its holder, -1 if it is free and caches a prefix, -2
        if it is empty; map.shared: pages with several references. map is None if there are too many
        pages, or while a step takes long.
        """
        now, stats = time.monotonic(), self._service.stats
        if now - self._read_at_s > REFRESH_S:
            self._read_at_s = now
            self._snapshot = await self._service.inspect(
                take_snapshot, TIMEOUT_S
            ) or EngineSnapshot(self._snapshot.page_size)
        open_requests = {s.request_id: s for s in self._service.open_requests}
        holders = _list_holders(stats.request_pages, open_requests)
        return {
            "model": self._model,
            "state": self._service.state.value,
            "time_s": round(now, 3),
            "step_age_s": round(self._service.step_age_s, 3),
            "requests": {
                "open": self._service.num_open,
                "running": stats.running,
                "waiting": stats.waiting,
            },
            "page_size": self._snapshot.page_size,
            **_counts(stats),
            "holders": [self._row(open_requests[name], pages, now) for name, pages in holders],
            "map": self._map([name for name, _ in holders]),
        }

    def _map(self, names: list[str]) -> dict[str, list[int]] | None:
        """Requests that are no longer listed get indices after the list."""
        owners = self._snapshot.owners
        if owners is None:
            return None
        indices = {name: index for index, name in enumerate(names)}
        cells = [
            owner if isinstance(owner, int) else indices.setdefault(owner, len(indices))
            for owner, _ in owners
        ]
        return {
            "cells": cells,
            "shared": [page for page, (_, refs) in enumerate(owners) if refs > 1],
        }

    def _row(self, info: OpenRequestInfo, pages: int, now: float) -> dict[str, Any]:
        """A request that does not stream has no outputs yet; its token count comes from
        the engine.
        """
        tokens = info.tokens
        if tokens is None:
            tokens = self._snapshot.tokens.get(info.request_id)
        return {
            "id": info.request_id,
            "pages": pages,
            "prompt_tokens": info.prompt_tokens,
            "samples": info.samples,
            "tokens": tokens,
            "age_s": round(now - info.since_s, 2),
        }


def _counts(stats: Any) -> dict[str, Any]:
    return {
        "pages": {
            "total": stats.pages_total,
            "used": stats.pages_total - stats.pages_free,
            "cached": stats.pages_cached,
            "saved": stats.pages_shared,
            "offloaded": stats.pages_offloaded,
            "offloadable": stats.pages_offloadable,
        },
        "tokens": {
            "generated": stats.tokens_generated,
            "prefilled": stats.tokens_prefilled,
            "cached": stats.tokens_cached,
        },
        "preempted": stats.preempted_by_swap + stats.preempted_by_recompute,
        "steps": stats.steps,
        "speculation": _speculation(stats),
        "last_step_s": round(stats.last_step_s, 6),
    }


def _speculation(stats: Any) -> dict[str, Any] | None:
    """None before the first drafts, unless proposing them failed."""
    drafts = stats.speculation
    if drafts is None or not (drafts.num_drafts or drafts.failure):
        return None
    length = round(drafts.mean_acceptance_length, 3) if drafts.num_drafts else None
    return {
        "drafts": drafts.num_drafts,
        "draft_tokens": drafts.num_draft_tokens,
        "accepted_tokens": drafts.num_accepted_tokens,
        "accepted_per_position": drafts.num_accepted_tokens_per_pos,
        "mean_acceptance_length": length,
        "failed": drafts.failure is not None,  # the log has the reason
    }


def take_snapshot(engine: Any) -> EngineSnapshot:
    """Runs in the engine's thread between two steps."""
    cache = getattr(engine, "cache", None)
    if cache is None:
        return EngineSnapshot()
    requests = (*engine.scheduler.running, *engine.scheduler.waiting)
    tokens = {r.request_id: sum(len(s.token_ids) for s in r.samples) for r in requests}
    return EngineSnapshot(cache.spec.page_size, tokens, find_page_owners(engine))


def find_page_owners(engine: Any) -> list[tuple[str | int, int]] | None:
    """(request that holds it, references) for each page but the null page; None: too many
    to draw.
    """
    pool = engine.cache.pool
    if pool.capacity > MAX_MAPPED:
        return None
    pages = range(1, pool.num_pages)
    owners: list[tuple[str | int, int]] = [(CACHED if pool.filled(p) else BLANK, 0) for p in pages]
    for request in engine.scheduler.running:
        for sample in request.resident:
            for page in sample.sequence.table.pages:
                owners[page - 1] = (request.request_id, pool.refs(page))
    return owners


def _list_holders(
    pages: dict[str, int], open_requests: dict[str, OpenRequestInfo]
) -> list[tuple[str, int]]:
    """(request id, pages), running requests first, in order of arrival."""
    running = [name for name in open_requests if name in pages]
    waiting = [name for name in open_requests if name not in pages]
    return [(name, pages.get(name, 0)) for name in (*running, *waiting)[:MAX_SHOWN]]
