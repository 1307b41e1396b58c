"""What the live page shows: the pool page by page, who holds what, the queue."""

import time
from typing import Any, NamedTuple

from .pending import Standing
from .service import Service

MAX_SHOWN = 100  # requests that are listed; the others are counted
MAX_MAPPED = 4096  # pages that are drawn one by one
FRESH_S = 0.2  # however many watch, the engine is looked at so often
PATIENCE_S = 0.2  # how long a look may wait for the step that is under way
BLANK, CACHED = -2, -1


class Look(NamedTuple):
    """The engine between two steps."""

    page_size: int | None = None  # tokens of a page
    tokens: dict[str, int] = {}  # generated so far, of each request
    owners: list[tuple[str | int, int]] | None = None


class Watch:
    """Looks at a service for everybody who watches."""

    def __init__(self, service: Service, model: str):
        self._service, self._model = service, model
        self._looked_s, self._seen = 0.0, Look()

    @property
    def last_step_age_s(self) -> float | None:
        ended = self._service.stats.last_step_at
        return round(time.monotonic() - ended, 3) if self._service.num_steps else None

    async def look(self) -> dict[str, Any]:
        """Requests, pages and tokens. holders: requests that hold pages, then those that wait.
        map: for each page who holds it, as a place in holders, -1 if it is free and caches a
        prefix, -2 if it is blank; shared: pages that are held more than once. None if there are too
        many pages, or the engine is busy with a long step.
        """
        now, stats = time.monotonic(), self._service.stats
        if now - self._looked_s > FRESH_S:
            self._looked_s = now
            self._seen = await self._service.ask(look_at, PATIENCE_S) or Look(self._seen.page_size)
        standings = {s.request_id: s for s in self._service.standings}
        holders = _listed(stats.request_pages, standings)
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
            "page_size": self._seen.page_size,
            **_counts(stats),
            "holders": [self._row(standings[name], pages, now) for name, pages in holders],
            "map": self._map([name for name, _ in holders]),
        }

    def _map(self, names: list[str]) -> dict[str, list[int]] | None:
        """Those who are not listed any more are numbered behind the list."""
        owners = self._seen.owners
        if owners is None:
            return None
        places = {name: place for place, name in enumerate(names)}
        cells = [
            owner if isinstance(owner, int) else places.setdefault(owner, len(places))
            for owner, _ in owners
        ]
        return {
            "cells": cells,
            "shared": [page for page, (_, refs) in enumerate(owners) if refs > 1],
        }

    def _row(self, standing: Standing, pages: int, now: float) -> dict[str, Any]:
        """A request that does not stream has no outputs yet: the engine has its tokens."""
        tokens = standing.tokens
        if tokens is None:
            tokens = self._seen.tokens.get(standing.request_id)
        return {
            "id": standing.request_id,
            "pages": pages,
            "prompt_tokens": standing.prompt_tokens,
            "samples": standing.samples,
            "tokens": tokens,
            "age_s": round(now - standing.since_s, 2),
        }


def _counts(stats: Any) -> dict[str, Any]:
    return {
        "pages": {
            "total": stats.pages_total,
            "used": stats.pages_total - stats.pages_free,
            "cached": stats.pages_cached,
            "saved": stats.pages_shared,
        },
        "tokens": {
            "generated": stats.tokens_generated,
            "prefilled": stats.tokens_prefilled,
            "cached": stats.tokens_cached,
        },
        "preempted": stats.preempted_by_swap + stats.preempted_by_recompute,
        "steps": stats.steps,
        "last_step_s": round(stats.last_step_s, 6),
    }


def look_at(engine: Any) -> Look:
    """Runs between two steps."""
    cache = getattr(engine, "cache", None)
    if cache is None:
        return Look()
    requests = (*engine.scheduler.running, *engine.scheduler.waiting)
    tokens = {r.request_id: sum(len(s.token_ids) for s in r.samples) for r in requests}
    return Look(cache.spec.page_size, tokens, owners_of_pages(engine))


def owners_of_pages(engine: Any) -> list[tuple[str | int, int]] | None:
    """(who holds it, how often) for each page but the null page; None: too many to draw."""
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


def _listed(pages: dict[str, int], standings: dict[str, Standing]) -> list[tuple[str, int]]:
    """(name, pages it holds), those that run first, as they came."""
    running = [name for name in standings if name in pages]
    waiting = [name for name in standings if name not in pages]
    return [(name, pages.get(name, 0)) for name in (*running, *waiting)[:MAX_SHOWN]]
