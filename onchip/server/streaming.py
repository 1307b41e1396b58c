"""Responses on their way to the client, and detection of disconnected clients.

Both kinds of response watch the connection while they wait: if a client hangs up, its requests are
cancelled before the next step. A stream sends the newest output whenever the client can take it: a
slow reader gets fewer, larger chunks and delays no other client. Large responses are built off the
event loop, choice by choice.
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

from .errors import APIError, error_response
from .log import get_record
from .metrics import Metrics
from .pending import PendingCall
from .protocol import CompletionLogprobs, Usage
from .responses import ChoiceDelta, DeltaReader, ResponseBuilder, count_usage, find_failure
from .service import Service

T = TypeVar("T")
PING_S = 15.0  # interval of comments in an idle stream: they keep proxies open, detect dead clients
GRACE_S = 5.0  # the engine ends a late request at its deadline; this much later the server does
INLINE_ENTRIES = 512  # tokens and logprobs that are encoded on the loop: a few ms
SLICE = 64  # tokens with logprobs that are encoded at a time


@dataclass(frozen=True)
class AcceptedCall:
    """Everything about one accepted call. num_choices: of all its prompts. deadline_s: a time of
    time.monotonic(); deadline_error: the error once it has passed. workers: executor that builds
    large responses, None for the loop's default.
    """

    service: Service
    pending: PendingCall
    builder: ResponseBuilder
    reader: DeltaReader
    num_choices: int
    deadline_s: float
    deadline_error: APIError
    include_usage: bool = False
    workers: Executor | None = None

    @property
    def usage(self) -> Usage:
        echo = self.reader.echo
        return count_usage(self.pending.outputs, echo is not None and echo.scores_only)

    @property
    def is_done(self) -> bool:
        """No more output follows, or one choice failed: then the whole call fails."""
        return self.pending.is_done or self.failure is not None

    @property
    def failure(self) -> APIError | None:
        if self.pending.failure:
            return self.pending.failure
        expired = time.monotonic() >= self.deadline_s
        return find_failure(self.pending.outputs, self.deadline_error if expired else None)

    async def wait_for_change(self) -> None:
        """Wait for new output. If the engine misses the deadline by GRACE_S, fail the call here."""
        try:
            async with asyncio.timeout_at(_loop_time(self.deadline_s + GRACE_S)):
                await self.pending.wait_for_change()
        except TimeoutError:
            self.pending.fail(self.deadline_error)


class CallResponse(Response):
    """Base class of both responses; subclasses implement `respond`."""

    call: AcceptedCall
    metrics: Metrics

    def __init__(self, call: AcceptedCall, metrics: Metrics):
        super().__init__()
        self.call, self.metrics = call, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until(self.respond(scope, receive, send), watch_disconnect(receive))
        finally:
            self.call.service.release(self.call.pending)
            get_record(scope).count(self.call.pending.outputs, self.call.usage)

    async def build(
        self, deltas: Sequence[ChoiceDelta], work: Callable[[Sequence[ChoiceDelta]], T]
    ) -> T:
        """Run `work` on the deltas: on the loop if there are few tokens, otherwise in the
        executor.
        """
        if (
            sum(1 + len(table or ()) for delta in deltas for _, table in delta.tokens)
            < INLINE_ENTRIES
        ):
            return work(deltas)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.call.workers, work, deltas)

    def failure(self) -> APIError | None:
        """The call's error, which is also counted."""
        failure = self.call.failure
        if failure:
            self.metrics.count_failure(failure.status)
        return failure

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class FullResponse(CallResponse):
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.call
        while not call.is_done:
            await call.wait_for_change()
        if failure := self.failure():
            await error_response(failure)(scope, receive, send)
            return
        parts = await self.build(list(call.reader.read_new(call.pending.outputs)), self._encode)
        length = str(sum(map(len, parts))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await _send(send, part)
        await _send(send, b"", more=False)

    def _encode(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        """The whole response: its head, then choice by choice."""
        build_full, counted = self.call.builder.build_full, self.call.usage
        head, opening, tail = build_full([], counted).model_dump_json().encode().partition(_CHOICES)
        choice_of = lambda delta: build_full([delta], counted).choices[0]
        choices = [
            encode_with_logprobs(choice_of(replace(delta, tokens=())), delta, choice_of)
            for delta in deltas
        ]
        return [head + opening, *_with_commas(choices), tail]


class SSEResponse(CallResponse):
    """Server-sent events: `data: {...}` each, `data: [DONE]` at the end. A failure after the start
    is an event with an `error`.
    """

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.call
        await send(_STREAM_START)
        opening = call.builder.build_opening(call.num_choices)
        await _send_some(send, b"".join(map(self._event, opening)))
        is_done = False
        while not is_done:
            await self._wait(send)
            is_done = call.is_done  # read before sending: more may arrive meanwhile
            # After a failure no more text is sent.
            deltas = [] if call.failure else list(call.reader.read_new(call.pending.outputs))
            await _send_some(send, await self.build(deltas, self._chunks))
        if failure := self.failure():
            await _send(send, encode_event(JSONResponse(failure.body).body))
        elif call.include_usage:
            await _send(send, self._event(call.builder.build_usage_chunk(call.usage)))
        await _send(send, encode_event(b"[DONE]"), more=False)

    def _chunks(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join(map(self._chunk, deltas))

    def _chunk(self, delta: ChoiceDelta) -> bytes:
        chunk = self.call.builder.build_chunk
        choice_of = lambda part: chunk(part).choices[0]
        return encode_event(
            encode_with_logprobs(chunk(replace(delta, tokens=())), delta, choice_of, self._excluded)
        )

    @property
    def _excluded(self) -> set[str] | None:
        return None if self.call.include_usage else {"usage"}

    async def _wait(self, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    return await self.call.wait_for_change()
            except TimeoutError:
                await _send(send, b": waiting\n\n")

    def _event(self, chunk: BaseModel) -> bytes:
        return encode_event(chunk.model_dump_json(exclude=self._excluded).encode())


def encode_with_logprobs(
    bare: BaseModel,
    delta: ChoiceDelta,
    choice_of: Callable[[ChoiceDelta], Any],
    excluded: set[str] | None = None,
) -> bytes:
    """JSON of a model that has one choice, or is one. bare: the model without the delta's tokens,
    which are encoded SLICE at a time. Encoded in one piece, a long response would block all
    threads, and so would the garbage collector, which visits every long-lived object.
    """
    text = bare.model_dump_json(exclude=excluded).encode()
    if not delta.tokens:
        return text
    head, _, tail = text.partition(_NO_LOGPROBS)  # inside a string the quotes would be escaped
    columns: dict[str, list[bytes]] = {}
    offset = delta.offset
    for start in range(0, len(delta.tokens), SLICE):
        part = replace(delta, tokens=delta.tokens[start : start + SLICE], offset=offset)
        logprobs = choice_of(part).logprobs
        if isinstance(logprobs, CompletionLogprobs):
            offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        for name in type(logprobs).model_fields:
            value = to_json(getattr(logprobs, name), inf_nan_mode="null")
            columns.setdefault(name, []).append(value)
    fields = [b'"%s":%s' % (name.encode(), _join_lists(parts)) for name, parts in columns.items()]
    return b"".join([head, b'"logprobs":{', *_with_commas(fields), b"}", tail])


def _join_lists(parts: list[bytes]) -> bytes:
    """Concatenate JSON lists; any other value is the same in all parts."""
    if parts[0][:1] != b"[":
        return parts[0]
    return b"[" + b",".join([part[1:-1] for part in parts if part != b"[]"]) + b"]"


def _with_commas(parts: Sequence[bytes]) -> Iterator[bytes]:
    for index, part in enumerate(parts):
        yield b"," + part if index else part


async def run_until(work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, None]) -> T:
    """The result of the work, which is cancelled as soon as one of the watchers raises."""
    worker = asyncio.ensure_future(work)
    tasks = [worker, *map(asyncio.ensure_future, watchers)]
    pending = set(tasks)
    try:
        while not worker.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if worker not in done:
                for watcher in done:
                    watcher.result()
        return await worker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watch_disconnect(receive: Receive) -> None:
    """Raise when the client hangs up. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


def encode_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_some(send: Send, body: bytes) -> None:
    if body:
        await _send(send, body)


def _loop_time(monotonic_s: float) -> float:
    """Convert a time of time.monotonic() to the loop's clock."""
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
