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
from .protocol import CompletionLogprobs, Usage, UsageReports
from .responses import (
    ChoiceDelta,
    DeltaReader,
    ResponseBuilder,
    count_generated,
    find_failure,
    make_usage,
)
from .service import Service

T = TypeVar("T")
PING_S = 15.0  # interval of comments in an idle stream: they keep proxies open, detect dead clients
GRACE_S = 5.0  # the engine ends a late request at its deadline; this much later the server does
INLINE_ENTRIES = 512  # tokens and logprobs that are encoded on the loop: a few ms
SLICE = 64  # tokens with logprobs that are encoded at a time


@dataclass(frozen=True)
class AcceptedCall:
    """One accepted call. deadline_s: a time of time.monotonic(); deadline_error: the error once it
    has passed. workers: executor that builds large responses, None for the loop's default.
    generates: False if its tokens are not shown and do not count.
    """

    service: Service
    pending: PendingCall
    deadline_s: float
    deadline_error: APIError
    workers: Executor | None = None
    generates: bool = True

    @property
    def usage(self) -> Usage:
        return self.usage_after(count_generated(self.pending.outputs) if self.generates else 0)

    def usage_after(self, num_generated: int) -> Usage:
        """The usage after this many generated tokens."""
        return make_usage(self.pending.num_prompt_tokens, num_generated, self.pending.outputs)

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


@dataclass(frozen=True)
class ChoiceWriter:
    """How the outputs of a call become choices. num_choices: of all its prompts."""

    builder: ResponseBuilder
    reader: DeltaReader
    num_choices: int
    reports: UsageReports = UsageReports()


class CallResponse(Response):
    """Base class of all responses; subclasses implement `respond`."""

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


class WholeResponse(CallResponse):
    """Waits for the end of the call, then sends one JSON value; subclasses implement
    `encode_all`.
    """

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.call
        while not call.is_done:
            await call.wait_for_change()
        if failure := self.failure():
            await error_response(failure)(scope, receive, send)
            return
        parts = await self.encode_all()
        length = str(sum(map(len, parts))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await _send(send, part)
        await _send(send, b"", more=False)

    async def encode_all(self) -> Sequence[bytes]:
        """The parts of the body."""
        raise NotImplementedError


class FullResponse(WholeResponse):
    """All choices, complete."""

    def __init__(self, call: AcceptedCall, metrics: Metrics, writer: ChoiceWriter):
        super().__init__(call, metrics)
        self.writer = writer

    async def encode_all(self) -> Sequence[bytes]:
        deltas = list(self.writer.reader.read_new(self.call.pending.outputs))
        return await self.build(deltas, self._encode)

    def _encode(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        """The whole response: its head, then choice by choice."""
        build_full, counted = self.writer.builder.build_full, self.call.usage
        head, opening, tail = build_full([], counted).model_dump_json().encode().partition(_CHOICES)
        choice_of = lambda delta: build_full([delta], counted).choices[0]
        choices = [
            encode_with_logprobs(choice_of(replace(delta, tokens=())), delta, choice_of)
            for delta in deltas
        ]
        return [head + opening, *_with_commas(choices), tail]


class EventStream(CallResponse):
    """Server-sent events: an opening, the new part of each choice while it grows, and an ending.
    Subclasses encode them. A failure after the start is an event, too.
    """

    reader: DeltaReader

    def __init__(self, call: AcceptedCall, metrics: Metrics, reader: DeltaReader):
        super().__init__(call, metrics)
        self.reader = reader

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.call
        await send(_STREAM_START)
        await _send_some(send, self.encode_opening())
        is_done = False
        while not is_done:
            await self._wait(send)
            is_done = call.is_done  # read before sending: more may arrive meanwhile
            # After a failure no more text is sent.
            deltas = [] if call.failure else list(self.reader.read_new(call.pending.outputs))
            await _send_some(send, await self.build(deltas, self.encode_deltas))
        await _send(send, self.encode_ending(self.failure()), more=False)

    def encode_opening(self) -> bytes:
        raise NotImplementedError

    def encode_deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        raise NotImplementedError

    def encode_ending(self, failure: APIError | None) -> bytes:
        raise NotImplementedError

    async def _wait(self, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    return await self.call.wait_for_change()
            except TimeoutError:
                await _send(send, b": waiting\n\n")


class SSEResponse(EventStream):
    """Chunks of choices, `data: {...}` each, and `data: [DONE]` at the end. A failure is an event
    with an `error`.
    """

    def __init__(self, call: AcceptedCall, metrics: Metrics, writer: ChoiceWriter):
        super().__init__(call, metrics, writer.reader)
        self.writer = writer

    def encode_opening(self) -> bytes:
        opening = self.writer.builder.build_opening(self.writer.num_choices, self._usage_after(0))
        return b"".join(map(self._event, opening))

    def encode_deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join(map(self._chunk, deltas))

    def encode_ending(self, failure: APIError | None) -> bytes:
        last = b""
        if failure:
            last = encode_event(JSONResponse(failure.body).body)
        elif self.writer.reports.at_end:
            last = self._event(self.writer.builder.build_usage_chunk(self.call.usage))
        return last + encode_event(b"[DONE]")

    def _chunk(self, delta: ChoiceDelta) -> bytes:
        chunk = self.writer.builder.build_chunk
        choice_of = lambda part: chunk(part).choices[0]
        bare = chunk(replace(delta, tokens=()), self._usage_after(delta.num_generated))
        return encode_event(encode_with_logprobs(bare, delta, choice_of, self._excluded))

    def _usage_after(self, num_generated: int) -> Usage | None:
        return self.call.usage_after(num_generated) if self.writer.reports.in_chunks else None

    @property
    def _excluded(self) -> set[str] | None:
        return None if self.writer.reports.at_end else {"usage"}

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
