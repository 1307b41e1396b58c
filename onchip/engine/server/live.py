"""What the live page shows: the pool, who holds what of it, the queue."""

import time
from typing import Any

from .service import Engine, Service


class Watch:
    """Looks at a service for the page; never touches what belongs to the engine's thread."""

    def __init__(self, service: Service, engine: Engine, model: str):
        self._service, self._engine, self._model = service, engine, model

    @property
    def last_step_age_s(self) -> float | None:
        ended = self._service.stats.last_step_at
        return round(time.monotonic() - ended, 3) if self._service.num_steps else None

    async def look(self) -> dict[str, Any]:
        """Counts of requests, pages and tokens."""
        stats = self._service.stats
        return {
            "model": self._model,
            "state": self._service.state.value,
            "time_s": time.monotonic(),
            "requests": {
                "open": self._service.num_open,
                "running": stats.running,
                "waiting": stats.waiting,
            },
        }
