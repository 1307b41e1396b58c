"""A replica: the server's application in a process of Ray, whose methods Ray Serve calls."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from onchip.server.app import Server
from onchip.server.command import LOG_FORMAT, make_options, make_server
from onchip.server.process import Address
from onchip.server.service import ServiceState

from .request import GatewaySalts, ReplicaRequest


class Replica:
    """options: of `onchip serve`, by name. Ray Serve awaits the constructor on the event loop
    of all later calls.
    """

    server: Server

    async def __init__(self, options: dict[str, Any]):  # pyright: ignore
        args, keys = SimpleNamespace(**options), GatewaySalts()
        logging.basicConfig(format=LOG_FORMAT)
        # The gateway logs the requests; here, only what goes wrong.
        logging.getLogger("onchip").setLevel(logging.WARNING)
        await self.start(make_server(args, make_options(args, Address(), keys), keys))

    async def start(self, server: Server) -> None:
        self.server = server
        self._running: set[asyncio.Future[None]] = set()
        self._lifespan = server.app.router.lifespan_context(server.app)
        await self._lifespan.__aenter__()

    async def respond(self, request: ReplicaRequest) -> AsyncIterator[Message]:
        """The messages of the application's response. If the gateway cancels the call, the
        application sees that the client is gone, and frees the request's pages.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        work = asyncio.ensure_future(self._run(request, messages, gone))
        self._running.add(work)  # the loop itself holds tasks weakly
        work.add_done_callback(self._running.discard)
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()

    async def _run(
        self,
        request: ReplicaRequest,
        messages: "asyncio.Queue[Message | None]",
        gone: asyncio.Event,
    ) -> None:
        parts = iter([{"type": "http.request", "body": request.body, "more_body": False}])

        async def receive() -> Message:
            if (part := next(parts, None)) is not None:
                return part
            await gone.wait()
            return {"type": "http.disconnect"}

        try:
            await self.server.app({**request.scope, "state": {}}, receive, messages.put)
        finally:
            messages.put_nowait(None)

    async def check_health(self) -> None:
        """Ray Serve calls this from time to time, and replaces a replica that raises."""
        if self.server.service.state is ServiceState.DEAD:
            raise RuntimeError(f"the engine died ({self.server.service.death_cause})")
        if self.server.is_stalled:
            raise RuntimeError(f"a step has run for {self.server.service.step_age_s:.0f} s")

    async def is_ready(self) -> bool:
        return self.server.service.state is ServiceState.READY and not self.server.is_stalled

    async def render_metrics(self) -> str:
        return self.server.metrics.render(self.server.service).decode()


def derive_seed(seed: int, name: str) -> int:
    """The seed of one replica. Under a common seed, the n-th requests of all replicas would sample
    with the same random numbers.
    """
    return random.Random(f"{seed} {name}").getrandbits(62)
