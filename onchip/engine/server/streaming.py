"""How an answer reaches a client, and how its absence is noticed.

Both kinds of reply watch the connection while they wait: a client that hangs up has its request
cancelled before the next step. A stream writes what is newest whenever the client takes it: a slow
reader gets fewer and larger pieces, and keeps nobody waiting. What is large is built off the event
loop, choice by choice.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .errors import Refusal, refuse
from .log import record_of
from .metrics import Metrics
from .pending import Ticket
from .protocol import CompletionLogprobs, Usage
from .responses import Format, Piece, Reader, failure_of, usage
from .service import Service

T = TypeVar("T")
PING_S = 15.0  # a comment in a silent stream: proxies keep it, and a dead client is noticed
GRACE_S = 5.0  # past its deadline a request is cut off by the engine; past this, without it
INLINE_ENTRIES = 512  # tokens and logprobs that are written on the loop: a few ms
SLICE = 64  # tokens whose logprobs are written in one go


@dataclass(frozen=True)
class Order:
    """Everything about one accepted request. num_choices: of all its prompts. late: what to say
    when its deadline has passed, a time of time.monotonic(). workers: where large answers are
    built, None for the loop's own.
    """

    service: Service
    ticket: Ticket
    format: Format
    reader: Reader
    num_choices: int
    deadline_s: float
    late: Refusal
    include_usage: bool = False
    workers: Executor | None = None

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
            await unless(self.respond(scope, receive, send), client_gone(receive))
        finally:
            self.order.service.release(self.order.ticket)
            record_of(scope).count(self.order.ticket.outputs, self.order.usage)

    async def build(self, pieces: Sequence[Piece], work: Callable[[Sequence[Piece]], T]) -> T:
        """What `work` makes of the pieces, on the loop if that is little."""
        if (
            sum(1 + len(table or ()) for piece in pieces for _, table in piece.tokens)
            < INLINE_ENTRIES
        ):
            return work(pieces)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.order.workers, work, pieces)

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
        parts = await self.build(list(order.reader.news(order.ticket.outputs)), self._encode)
        length = str(sum(map(len, parts))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await _send(send, part)
        await _send(send, b"", more=False)

    def _encode(self, pieces: Sequence[Piece]) -> list[bytes]:
        """The whole answer: its head, then choice by choice."""
        whole, counted = self.order.format.whole, self.order.usage
        head, opening, tail = whole([], counted).model_dump_json().encode().partition(_CHOICES)
        choice_of = lambda piece: whole([piece], counted).choices[0]
        choices = [
            with_logprobs(choice_of(replace(piece, tokens=())), piece, choice_of)
            for piece in pieces
        ]
        return [head + opening, *_separate(choices), tail]


class StreamReply(OrderReply):
    """Server-sent events: `data: {...}` each, `data: [DONE]` at the end. What fails after the
    beginning is an event with an `error`.
    """

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = self.order
        await send(_STREAM_START)
        opening = order.format.opening(order.num_choices)
        await _send_some(send, b"".join(map(self._event, opening)))
        settled = False
        while not settled:
            await self._wait(send)
            settled = order.settled  # more may come while this is written
            # Of what has failed nothing more is shown.
            pieces = [] if order.failure else list(order.reader.news(order.ticket.outputs))
            await _send_some(send, await self.build(pieces, self._chunks))
        if failure := self.failure():
            await _send(send, _event(JSONResponse(failure.body).body))
        elif order.include_usage:
            await _send(send, self._event(order.format.closing(order.usage)))
        await _send(send, _event(b"[DONE]"), more=False)

    def _chunks(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(map(self._chunk, pieces))

    def _chunk(self, piece: Piece) -> bytes:
        chunk = self.order.format.chunk
        choice_of = lambda part: chunk(part).choices[0]
        return _event(
            with_logprobs(chunk(replace(piece, tokens=())), piece, choice_of, self._left_out)
        )

    @property
    def _left_out(self) -> set[str] | None:
        return None if self.order.include_usage else {"usage"}

    async def _wait(self, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    return await self.order.changed()
            except TimeoutError:
                await _send(send, b": waiting\n\n")

    def _event(self, chunk: BaseModel) -> bytes:
        return _event(chunk.model_dump_json(exclude=self._left_out).encode())


def with_logprobs(
    bare: BaseModel,
    piece: Piece,
    choice_of: Callable[[Piece], Any],
    left_out: set[str] | None = None,
) -> bytes:
    """JSON of a model that has one choice, or is one. bare: without the piece's tokens, which are
    written SLICE at a time. Otherwise all threads would wait: for what is written in one go, and
    for the garbage collector, which looks at every object that lives for long.
    """
    text = bare.model_dump_json(exclude=left_out).encode()
    if not piece.tokens:
        return text
    head, _, tail = text.partition(_NO_LOGPROBS)  # in a string its quotes would be escaped
    columns: dict[str, list[bytes]] = {}
    offset = piece.offset
    for start in range(0, len(piece.tokens), SLICE):
        part = replace(piece, tokens=piece.tokens[start : start + SLICE], offset=offset)
        logprobs = choice_of(part).logprobs
        if isinstance(logprobs, CompletionLogprobs):
            offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        for name in type(logprobs).model_fields:
            value = to_json(getattr(logprobs, name), inf_nan_mode="null")
            columns.setdefault(name, []).append(value)
    fields = [b'"%s":%s' % (name.encode(), _joined(parts)) for name, parts in columns.items()]
    return b"".join([head, b'"logprobs":{', *_separate(fields), b"}", tail])


def _joined(parts: list[bytes]) -> bytes:
    """Lists as one list; anything else is the same in all parts."""
    if parts[0][:1] != b"[":
        return parts[0]
    return b"[" + b",".join([part[1:-1] for part in parts if part != b"[]"]) + b"]"


def _separate(parts: Sequence[bytes]) -> Iterator[bytes]:
    for place, part in enumerate(parts):
        yield b"," + part if place else part


async def unless(work: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, None]) -> T:
    """The result of the work, which is cancelled as soon as one of `ends` raises."""
    worker, watchers = asyncio.ensure_future(work), [asyncio.ensure_future(one) for one in ends]
    try:
        done, _ = await asyncio.wait([worker, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if worker not in done:
            for watcher in done:
                watcher.result()
        return await worker
    finally:
        for task in (worker, *watchers):
            task.cancel()
        await asyncio.gather(worker, *watchers, return_exceptions=True)


async def client_gone(receive: Receive) -> None:
    """Raises when the client hangs up; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_some(send: Send, body: bytes) -> None:
    if body:
        await _send(send, body)


def _loop_time(monotonic_s: float) -> float:
    """A time of time.monotonic() on the loop's clock."""
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()


_CHOICES, _NO_LOGPROBS = b'"choices":[', b'"logprobs":null'
_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
