"""The door: who is let in, and how much they may bring.

A pure ASGI middleware around everything, so that no route can be forgotten: what is not on the
short list of open paths needs a key, if there are keys.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Receive, Scope, Send

from .keys import Keyring
from .refusal import Refusal
from .replies import refuse

# The page is the same for everybody and holds no data; probes are answered to anybody.
OPEN_PATHS = frozenset({"/", "/live.css", "/live.js", "/health", "/ready"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
BODY_TIMEOUT_S = 30.0
PATIENCE = 8  # times the largest body


@dataclass(frozen=True)
class Guard:
    """hosts: names under which this server may be called, None for any. A server on the loopback
    without keys trusts whoever reaches it, so a page in a browser must not reach it under a name of
    its own (DNS rebinding).
    """

    app: ASGIApp
    keys: Keyring
    hosts: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Refusal as refusal:
                await refuse(refusal)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if self.hosts is not None and host not in self.hosts:
            raise Refusal(421, f"this server is not {host[:100]!r}", code="unknown_host")
        salt = self.keys.salt(headers.get(b"authorization"))
        if salt is None and scope["path"] not in OPEN_PATHS:
            raise Refusal(401, "send a key: Authorization: Bearer KEY", code="invalid_api_key")
        scope.setdefault("state", {})["salt"] = salt


def _name(host: str) -> str:
    """Without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def bounded_route(
    max_bytes: int, arriving: Callable[[], AbstractContextManager[None]]
) -> type[APIRoute]:
    """Routes whose bodies are at most so large, arrive in time, and are JSON to the letter: depth
    is bounded by the parser, NaN and Infinity are no JSON. arriving: a block around what is done
    with a request that has a body; it refuses whoever is one too many before the body is read.
    """

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                with arriving() if request.method == "POST" else nullcontext():
                    return await handle(_Bounded(request.scope, request.receive, max_bytes))

            return bounded

    return BoundedRoute


class _Bounded(Request):
    def __init__(self, scope: Scope, receive: Receive, max_bytes: int):
        super().__init__(scope, receive)
        self._max_bytes = max_bytes

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    self._body = await self._read()
            except TimeoutError:
                raise _closing(408, f"the body did not arrive in {BODY_TIMEOUT_S:.0f} s") from None
        return self._body

    async def json(self) -> Any:
        try:
            # Of its texts the parser remembers names of fields alone, nobody's prompts.
            return from_json(await self.body(), allow_inf_nan=False, cache_strings="keys")
        except ValueError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None

    async def _read(self) -> bytes:
        """A body that is somewhat too large is read and dropped, because who is still sending does
        not listen; with a much larger one the connection ends.
        """
        if int(self.headers.get("content-length", "0")) > PATIENCE * self._max_bytes:
            raise self._too_large()
        chunks, total = [], 0
        async for chunk in self.stream():
            total += len(chunk)
            if total > PATIENCE * self._max_bytes:
                break
            if total <= self._max_bytes:
                chunks.append(chunk)
        if total > self._max_bytes:
            raise self._too_large()
        return b"".join(chunks)

    def _too_large(self) -> HTTPException:
        return _closing(413, f"the body is larger than {self._max_bytes} bytes")


def _closing(status: int, message: str) -> HTTPException:
    """The rest of the body is not wanted: the connection ends with the answer."""
    return HTTPException(status, message, {"connection": "close"})
