"""How an answer reaches a client, and how its absence is noticed.

Both kinds of reply watch the connection while they wait: a client that hangs up has its request
cancelled before the next step. A stream writes what is newest whenever the client takes it: a slow
reader gets fewer and larger pieces, and keeps nobody waiting.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .answers import Format, Reader, failure_of, usage
from .metrics import Metrics
from .protocol import Usage
from .refusal import Refusal
from .service import Service
from .tickets import Ticket

PING_S = 15.0  # a comment in a silent stream: proxies keep it, and a dead client is noticed
GRACE_S = 5.0  # past its deadline a request is cut off by the engine; past this, without it


@dataclass(frozen=True)
class Order:
    """Everything about one accepted request. num_choices: of all its prompts. late: what to say
    when its deadline has passed, a time of time.monotonic().
    """

    service: Service
    ticket: Ticket
    format: Format
    reader: Reader
    num_choices: int
    deadline_s: float
    late: Refusal
    include_usage: bool = False

    @property
    def usage(self) -> Usage:
        echo = self.reader.echo
        return usage(self.ticket.outputs, echo is not None and echo.scores_only)

    @property
    def settled(self) -> bool:
        """Nothing more will come, or nothing more is wanted: one choice failed, so all do."""
        return self.ticket.settled or self.failure is not None

    @property
    def failure(self) -> Refusal | None:
        if self.ticket.failure:
            return self.ticket.failure
        expired = time.monotonic() >= self.deadline_s
        return failure_of(self.ticket.outputs, self.late if expired else None)

    async def changed(self) -> None:
        """Until there is news, or the engine is so late that it will not cut the request off."""
        try:
            async with asyncio.timeout_at(_loop_time(self.deadline_s + GRACE_S)):
                await self.ticket.changed()
        except TimeoutError:
            self.ticket.fail(self.late)


class OrderReply(Response):
    """A response that serves an order; `respond` is what the two kinds differ in."""

    def __init__(self, order: Order, metrics: Metrics):
        super().__init__()
        self.order, self.metrics = order, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await unless_gone(receive, self.respond(scope, receive, send)):
                self.metrics.hung_up()
        finally:
            self.order.service.release(self.order.ticket)

    def failure(self) -> Refusal | None:
        """Counted."""
        failure = self.order.failure
        if failure:
            self.metrics.refused(failure.status)
        return failure

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeReply(OrderReply):
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = self.order
        while not order.settled:
            await order.changed()
        if failure := self.failure():
            await refuse(failure)(scope, receive, send)
            return
        pieces = list(order.reader.news(order.ticket.outputs))
        await json_reply(order.format.whole(pieces, order.usage))(scope, receive, send)


class StreamReply(OrderReply):
    """Server-sent events: `data: {...}` each, `data: [DONE]` at the end. What fails after the
    beginning is an event with an `error`.
    """

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = self.order
        await send(_STREAM_START)
        await self._write(send, list(order.format.opening(order.num_choices)))
        settled = False
        while not settled:
            await self._wait(send)
            settled = order.settled  # more may come while this is written
            await self._write(send, self._chunks())
        if failure := self.failure():
            await _send(send, _event(JSONResponse(failure.body).body))
        elif order.include_usage:
            await self._write(send, [order.format.closing(order.usage)])
        await _send(send, _event(b"[DONE]"), more=False)

    def _chunks(self) -> list[BaseModel]:
        """Of what has failed nothing more is shown."""
        order = self.order
        if order.failure:
            return []
        return [order.format.chunk(piece) for piece in order.reader.news(order.ticket.outputs)]

    async def _wait(self, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    return await self.order.changed()
            except TimeoutError:
                await _send(send, b": waiting\n\n")

    async def _write(self, send: Send, chunks: list[BaseModel]) -> None:
        left_out = None if self.order.include_usage else {"usage"}
        events = [_event(chunk.model_dump_json(exclude=left_out).encode()) for chunk in chunks]
        if events:
            await _send(send, b"".join(events))


def refuse(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


def json_reply(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, or as much of it as is done when the client hangs up. Whether all is done."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([worker, watcher], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
        return worker.done()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _loop_time(monotonic_s: float) -> float:
    """A time of time.monotonic() on the loop's clock."""
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()


_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
