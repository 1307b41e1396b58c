"""What the live page shows: the pool page by page, who holds what, the queue."""

import time
from typing import Any

from .service import Service
from .tickets import Standing

MAX_SHOWN = 100  # requests that are listed; the others are counted
MAX_MAPPED = 4096  # pages that are drawn one by one
FRESH_S = 0.2  # however many watch, the engine is looked at so often
PATIENCE_S = 0.2  # how long a look may wait for the step that is under way
BLANK, CACHED = -2, -1


class Watch:
    """Looks at a service for everybody who watches."""

    def __init__(self, service: Service, model: str):
        self._service, self._model = service, model
        self._looked_s, self._owners = 0.0, None

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
            self._owners = await self._service.ask(owners_of_pages, PATIENCE_S)
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
            **_counts(stats),
            "holders": [_row(name, pages, standings, now) for name, pages in holders],
            "map": self._map([name for name, _ in holders]),
        }

    def _map(self, names: list[str]) -> dict[str, list[int]] | None:
        """Those who are not listed any more are numbered behind the list."""
        if self._owners is None:
            return None
        places = {name: place for place, name in enumerate(names)}
        cells = [
            owner if isinstance(owner, int) else places.setdefault(owner, len(places))
            for owner, _ in self._owners
        ]
        return {
            "cells": cells,
            "shared": [page for page, (_, refs) in enumerate(self._owners) if refs > 1],
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


def owners_of_pages(engine: Any) -> list[tuple[str | int, int]] | None:
    """(who holds it, how often) for each page but the null page; between two steps."""
    cache = getattr(engine, "cache", None)
    if cache is None or cache.pool.capacity > MAX_MAPPED:
        return None
    pool = cache.pool
    pages = range(1, pool.num_pages)
    owners: list[tuple[str | int, int]] = [(CACHED if pool.filled(p) else BLANK, 0) for p in pages]
    for request in engine.scheduler.running:
        for sample in request.rooted:
            for page in sample.sequence.table.pages:
                owners[page - 1] = (request.request_id, pool.refs(page))
    return owners


def _listed(pages: dict[str, int], standings: dict[str, Standing]) -> list[tuple[str, int]]:
    """(name, pages it holds), those that run first, as they came."""
    running = [name for name in standings if name in pages]
    waiting = [name for name in standings if name not in pages]
    return [(name, pages.get(name, 0)) for name in (*running, *waiting)[:MAX_SHOWN]]


def _row(name: str, pages: int, standings: dict[str, Standing], now: float) -> dict[str, Any]:
    standing = standings[name]
    return {
        "id": name,
        "pages": pages,
        "prompt_tokens": standing.prompt_tokens,
        "samples": standing.samples,
        "tokens": standing.tokens,
        "age_s": round(now - standing.since_s, 2),
    }
