"""The application in front of the replicas. It checks key, host and body as a single server does,
finds the keys of the prompt, and passes the messages of the replica's response on.

If a replica dies, its unfinished requests end in an error that a client may retry: status 503 with
Retry-After, or an `error` event in a stream that has begun. Requests of other replicas go on.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from onchip.server.api_keys import Keyring
from onchip.server.app import ServerOptions, respond_to_error
from onchip.server.auth import AuthMiddleware
from onchip.server.bodies import INLINE_BYTES, BodyMemory, BodyReader, load
from onchip.server.errors import APIError
from onchip.server.log import RequestLog, get_record
from onchip.server.metrics import MEDIA_TYPE
from onchip.server.pending import IncomingRequest, track_request
from onchip.server.service import RETRY_AFTER_S, closing_error
from onchip.server.streaming import GRACE_S, run_until, watch_disconnect

from .metrics import GatewayMetrics
from .prompts import PROMPT_PATHS, prompt_keys
from .relay import RelayedResponse
from .request import ReplicaRequest, forwarded_scope

BROADCAST_S = 5.0  # for the results of all replicas
PROBE_S = 1.0  # /ready needs no key: it calls the replicas at most this often
MAX_UNSENT_BYTES = 64 << 20  # of all streams together, without the first 16 KiB of each


class ReplicaDied(Exception):
    """The replica of a request died before the response was complete."""


class ReplicasBusy(Exception):
    """All replicas have as many requests as they take."""


class ReplicaCalls(Protocol):
    """Calls of replicas; see cluster.RayReplicas."""

    def respond(self, request: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """The messages of a response. Closing the iterator cancels the request."""
        ...

    async def broadcast(self, method: str, timeout_s: float) -> dict[str, Any]:
        """The results of a method that arrive in time, by name of the replica."""
        ...


class Gateway:
    """`app` is the application. options: limits of bodies, of open requests and of hosts."""

    options: ServerOptions
    keys: Keyring
    metrics: GatewayMetrics
    app: Starlette

    def __init__(self, replicas: ReplicaCalls, options: ServerOptions, keys: Keyring):
        self.options, self.keys, self.metrics = options, keys, GatewayMetrics()
        self._replicas = replicas
        self._open: set[IncomingRequest] = set()
        self._is_draining = False
        self._probe: asyncio.Future[dict[str, Any]] | None = None
        self._probed_at = 0.0
        self._unsent = BodyMemory(MAX_UNSENT_BYTES)
        self._workers = ThreadPoolExecutor(1, "onchip-prompts")
        memory = BodyMemory(options.max_bodies_bytes)
        self._reader = BodyReader(options.max_body_bytes, memory, self._track, self._workers)
        routes = [Route(f"/{name}", getattr(self, f"_{name}")) for name in _OWN_PATHS]
        self.app = Starlette(
            routes=[*routes, Mount("/", app=self._forward)],
            middleware=[
                Middleware(RequestLog, metrics=self.metrics),
                Middleware(AuthMiddleware, keys=keys, hosts=options.hosts),
            ],
            exception_handlers={HTTPException: self._respond_to_error},
        )

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests and finish the open ones; after timeout_s they fail."""
        self._is_draining = True
        end = time.monotonic() + timeout_s
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for request in self._open:
            request.fail(closing_error())

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ray holds the body until the response is complete, so its bytes count until then."""
        response = RelayedResponse(send, self._unsent)
        try:
            with self._admit(scope) as incoming, self._reader.memory.reserve() as reservation:
                work = self._reader.read(Request(scope, receive), reservation)
                body = await run_until(work, incoming.wait_for_failure())
                request = await self._address(scope, body)
                await run_until(
                    response.send_all(),
                    self._collect(request, response),
                    incoming.wait_for_failure(),
                    watch_disconnect(receive),
                )
        except APIError as error:
            if not response.is_stream:
                raise
            self.metrics.count_failure(error.status)
            await response.fail(error)

    def _admit(self, scope: Scope) -> AbstractContextManager[IncomingRequest]:
        """As in a single server, reading the live page or a list of models opens no request."""
        return self._track() if scope["method"] == "POST" else nullcontext(IncomingRequest())

    async def _address(self, scope: Scope, body: bytes) -> ReplicaRequest:
        salt = scope["state"]["salt"] or b""
        keys: list[bytes] = []
        if scope["path"] in PROMPT_PATHS:
            keys = await self._hash_prompt(body, salt, scope["path"])
        head = forwarded_scope(scope, salt, get_record(scope).request_id)
        return ReplicaRequest(head, body, keys)

    async def _hash_prompt(self, body: bytes, salt: bytes, path: str) -> list[bytes]:
        if len(body) <= INLINE_BYTES:
            return _find_keys(body, salt, path)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, _find_keys, body, salt, path)

    async def _collect(self, request: ReplicaRequest, response: RelayedResponse) -> None:
        """Take the messages of the replica as they come, however slowly the client reads. The
        replica enforces the time limit of a request; the limit here is for requests that wait for a
        replica.
        """
        limit_s = self.options.max_request_s + 2 * GRACE_S
        try:
            async with (
                asyncio.timeout(limit_s),
                aclosing(self._replicas.respond(request)) as messages,
            ):
                async for message in messages:
                    response.put(message)
            if not response.end():
                raise ReplicaDied("the response is not complete")
        except TimeoutError:
            raise APIError(504, f"not done within {limit_s:g} s", code="deadline") from None
        except ReplicaDied:
            self.metrics.count_lost()
            raise _lost_error() from None
        except ReplicasBusy as error:
            message = f"no replica takes more requests: {error}"
            raise APIError(429, message, code="queue_full", retry_after_s=RETRY_AFTER_S) from None

    def _track(self) -> AbstractContextManager[IncomingRequest]:
        if self._is_draining:
            raise closing_error()
        if self.num_open >= self.options.max_open:
            message = f"{self.num_open} requests are open, at most {self.options.max_open} may be"
            raise APIError(429, message, code="queue_full", retry_after_s=RETRY_AFTER_S)
        return track_request(self._open)

    async def _health(self, request: Request) -> Response:
        """Of the gateway itself: Ray Serve restarts replicas."""
        return JSONResponse({"status": "ok", "reason": None})

    async def _ready(self, request: Request) -> Response:
        """200 while at least one replica is ready."""
        states = await self._probe_replicas()
        num_ready = sum(states.values())
        status = "ready" if num_ready else "no replica is ready"
        if self._is_draining:
            status = "draining"
        body = {"status": status, "replicas": len(states), "replicas_ready": num_ready}
        return JSONResponse(body, 200 if status == "ready" else 503)

    async def _probe_replicas(self) -> dict[str, bool]:
        """Whether each replica is ready. Probes that arrive together share one call."""
        if self._probe is None or time.monotonic() - self._probed_at >= PROBE_S:
            self._probe = asyncio.ensure_future(self._replicas.broadcast("is_ready", BROADCAST_S))
            self._probed_at = time.monotonic()
        return await asyncio.shield(self._probe)

    async def _metrics(self, request: Request) -> Response:
        pages = await self._replicas.broadcast("render_metrics", BROADCAST_S)
        return Response(self.metrics.render(pages, self.num_open), media_type=MEDIA_TYPE)

    async def _respond_to_error(self, request: Request, error: Exception) -> Response:
        return respond_to_error(error, self.metrics)


_OWN_PATHS = ("health", "ready", "metrics")  # all others are the replicas'


def _find_keys(body: bytes, salt: bytes, path: str) -> list[bytes]:
    try:
        return prompt_keys(load(body), salt, path)
    except APIError:  # the replica names the error
        return []


def _lost_error() -> APIError:
    return APIError(
        503,
        "the replica of this request died before it was done: send it again",
        code="replica_died",
        retry_after_s=RETRY_AFTER_S,
    )
