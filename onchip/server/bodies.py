"""Request bodies: bounded in bytes and seconds, each and together; parsed and validated within
bounds of time and memory, off the event loop if they are large.

                 loop                           worker thread
    bytes -> BodyMemory -> whole body ----> structure, parse, names, validate
                                    small: the same on the loop

A body of 4 MiB can hold 1.4 million values, and pydantic writes an error for each. Values are
therefore counted before they are built: objects and names in the bytes, names of each object before
validation. Long lists of the schema stop at their first error (`fail_fast` in protocol.py).
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Receive, Scope

from .errors import APIError
from .pending import IncomingRequest
from .streaming import run_until, watch_disconnect
from .validation_errors import explain_errors

BODY_TIMEOUT_S = 30.0
MAX_DISCARD_FACTOR = 8  # a larger multiple of the largest body is not read to its end
SMALL_BYTES = 16 << 10  # not counted per body, so large uploads cannot shut out small requests
INLINE_BYTES = 64 << 10  # bodies up to this size are parsed on the loop: a few ms at worst
MAX_STRUCTURES = 65_536  # lists, objects and names of a body
MAX_NAMES = 512  # names of one object

# A list, an object or a name; or the text between them, with whole strings, at most 4,096 per
# match, because other threads run between two matches. Every position matches (an unterminated
# string extends to the end of the body), so a search takes linear time.
_STRUCTURE = re.compile(
    rb'([\[{:])|(?:[^"\[{:]++|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)){1,4096}+', re.DOTALL
)


class BodyMemory:
    """Bytes of several bodies together, at most max_bytes."""

    max_bytes: int
    used: int

    def __init__(self, max_bytes: int):
        self.max_bytes, self.used = max_bytes, 0

    @contextmanager
    def reserve(self) -> Iterator["BodyReservation"]:
        reservation = BodyReservation(self)
        try:
            yield reservation
        finally:
            reservation.clear()


@dataclass
class BodyReservation:
    """The share of one body."""

    memory: BodyMemory
    taken: int = 0

    def grow(self, size: int) -> bool:
        """Grow, or shrink, to a body of this size. Return False if the memory is full."""
        more = max(0, size - SMALL_BYTES) - self.taken
        if self.memory.used + more > self.memory.max_bytes:
            return False
        self.memory.used += more
        self.taken += more
        return True

    def clear(self) -> None:
        self.memory.used -= self.taken
        self.taken = 0


@dataclass(frozen=True)
class BodyReader:
    """Reads and parses bodies for the routes. track_incoming: a block around one request until it
    is submitted; raises an APIError before the body is read if too many requests are open. workers:
    executor for large bodies.
    """

    max_bytes: int
    memory: BodyMemory
    track_incoming: Callable[[], AbstractContextManager[IncomingRequest]]
    workers: Executor

    async def read(self, request: Request, reservation: BodyReservation) -> bytes:
        """A body that does not fit is read and discarded, because a client that is still sending
        does not read the response; for a much larger body the connection is closed.
        """
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(request, reservation)
        except TimeoutError:
            message = f"the body did not arrive in {BODY_TIMEOUT_S:.0f} s"
            raise APIError(408, message, closes=True) from None

    async def _read(self, request: Request, reservation: BodyReservation) -> bytes:
        too_large = APIError(413, f"the body is larger than {self.max_bytes} bytes", closes=True)
        if int(request.headers.get("content-length", "0")) > MAX_DISCARD_FACTOR * self.max_bytes:
            raise too_large
        body, total, error = bytearray(), 0, None
        async for chunk in request.stream():
            total += len(chunk)
            if total > self.max_bytes:
                error = too_large
            elif error is None and not reservation.grow(total):
                error = self._memory_error()
            if error is None:
                body += chunk
            else:
                body.clear()
                reservation.clear()
            if total > MAX_DISCARD_FACTOR * self.max_bytes:
                break
        if error is not None:
            raise error
        return bytes(body)

    def _memory_error(self) -> APIError:
        message = f"bodies of other requests fill the {self.memory.max_bytes} bytes for all of them"
        return APIError(503, message, code="bodies_full", retry_after_s=1, closes=True)

    async def parse(self, body: bytes, model: type[BaseModel]) -> BaseModel:
        if len(body) <= INLINE_BYTES:
            return parse(body, model)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.workers, parse, body, model)


def body_route(reader: BodyReader) -> type[APIRoute]:
    """A route class that reads bodies with this reader. The client is watched from then on: if it
    hangs up, the handler is cancelled wherever it waits.
    """

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            model = self.body_field.field_info.annotation

            async def bounded(request: Request) -> Response:
                with reader.track_incoming() as incoming, reader.memory.reserve() as reservation:
                    request.state.incoming = incoming
                    body = await run_until(
                        reader.read(request, reservation), incoming.wait_for_failure()
                    )
                    parsed = ParsedRequest(request.scope, request.receive, body, reader, model)
                    ends = incoming.wait_for_failure(), watch_disconnect(request.receive)
                    return await run_until(handle(parsed), *ends)

            return bounded

    return BodyRoute


class ParsedRequest(Request):
    """A request with JSON that is already an instance of its model, which FastAPI accepts
    as it is.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        body: bytes,
        reader: BodyReader,
        model: type[BaseModel],
    ):
        super().__init__(scope, receive)
        self._body, self._reader, self._model = body, reader, model

    async def json(self) -> BaseModel:
        return await self._reader.parse(self._body, self._model)


def parse(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse a body as a model. APIError: names the first error."""
    value = load(body)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise explain_errors(error.errors(include_url=False), value, model.model_fields) from None


def load(body: bytes) -> Any:
    """Strict JSON (no NaN or Infinity, bounded depth) with few enough values that validation is
    cheap.
    """
    check_structures(body)
    try:
        # The parser caches field names for the process, but no other strings.
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise APIError(400, f"the body is not JSON: {error}") from None
    if body.count(b":") > MAX_NAMES:
        check_names(value)
    return value


def check_structures(body: bytes) -> None:
    """An empty object takes 3 bytes here and 64 in memory. First count characters, including those
    in strings, which is fast and usually enough.
    """
    if sum(body.count(char) for char in (b"[", b"{", b":")) <= MAX_STRUCTURES:
        return
    matches = (match for match in _STRUCTURE.finditer(body) if match[1])
    if next(islice(matches, MAX_STRUCTURES, None), None):
        raise APIError(400, f"the JSON has more than {MAX_STRUCTURES} lists, objects and names")


def check_names(value: Any) -> None:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if len(value) > MAX_NAMES:
                message = f"an object of the body has {len(value)} names, at most {MAX_NAMES} fit"
                raise APIError(400, message)
            value = value.values()
        elif not isinstance(value, list):
            continue
        pending += [item for item in value if isinstance(item, (dict, list))]
