"""The process of a server: socket, connections, signals, shutdown."""

import asyncio
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol  # h11 bounds the size of headers

from .auth import LOCAL_NAMES, MAX_HEAD_BYTES
from .errors import APIError

LOG = logging.getLogger("onchip.serve")

FLUSH_S = 5.0  # time to send the last responses at shutdown
STUCK_CLIENT_MS = 60_000  # a client that acknowledges no data for so long is disconnected
HEADER_S = 10.0
BACKLOG = 2048
MAX_CONNECTIONS = 8192
SPARE_FILES = 64  # open files reserved for other uses than connections


@dataclass(frozen=True)
class Address:
    """Port 0: any free port."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def is_local(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def hosts(self) -> frozenset[str] | None:
        """The Host names of a local server."""
        return LOCAL_NAMES | {self.host} if self.is_local else None

    def bind(self) -> socket.socket:
        """Bind before the model loads, which may take minutes; the server listens once it
        starts.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by every connection
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_CLIENT_MS)
        try:
            sock.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            sock.close()
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot serve on {self.host}:{self.port}: {why}") from None
        return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass
class ConnectionPool:
    """All connections of a server, at most `limit`. idle: connections without a request, longest
    idle first.
    """

    limit: int
    idle: "dict[Connection, None]" = field(default_factory=dict)


class Connection(H11Protocol):
    """Closes unless the head of a request arrives in time: neither silence nor single bytes keep a
    connection open. If there are too many connections, the longest idle one is closed, so silent
    clients cannot shut others out.
    """

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, pool: ConnectionPool, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._pool = pool

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > self._pool.limit:
            self._close_longest_idle()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._pool.idle.pop(self, None)

    def on_response_complete(self) -> None:
        self._expect_request()  # first: the next request may have arrived already
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._pool.idle.pop(self, None)
        self._cancel_timer()  # otherwise it keeps the connection in memory until it fires

    def send_400_response(self, msg: str) -> None:
        self._respond_error(
            APIError(400, f"not HTTP, or a head of more than {MAX_HEAD_BYTES} bytes")
        )

    def _respond_error(self, error: APIError) -> None:
        """Respond instead of the application, unless its response has begun, and close the
        connection.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = {**(error.headers or {}), "content-type": "application/json"}
            headers |= {"content-length": str(len(body)), "connection": "close"}
            start = h11.Response(status_code=error.status, headers=list(headers.items()))
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _close_longest_idle(self) -> None:
        longest = next(iter(self._pool.idle))
        self._pool.idle.pop(longest)
        self.connections.discard(longest)  # now: connection_lost runs later on the loop
        if longest is self:
            self._respond_error(APIError(503, "all connections are in use", retry_after_s=1))
        else:
            longest.transport.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expect_request(self) -> None:
        self._pool.idle.pop(self, None)
        self._pool.idle[self] = None
        self._cancel_timer()
        self._timer = self.loop.call_later(HEADER_S, self._close_without_request, self.cycle)

    def _close_without_request(self, last: object) -> None:
        if self.cycle is last and (last is None or self.cycle.response_complete):
            self.transport.close()


class Drainable(Protocol):
    """A Server, or the gateway of several."""

    @property
    def app(self) -> ASGIApp: ...

    async def drain(self, timeout_s: float) -> None: ...


class ServerProcess(uvicorn.Server):
    """A first SIGTERM or SIGINT drains the server: it accepts no new requests, open ones may finish
    for drain_s, then they fail. A second signal ends it at once. announce: called once it listens.
    max_connections: limit of connections at a time. was_interrupted: whether SIGINT came.
    """

    server: Drainable
    drain_s: float
    should_exit: bool

    def __init__(
        self,
        server: Drainable,
        drain_s: float,
        announce: Callable[[], None] | None = None,
        max_connections: int | None = None,
    ):
        self.server, self.drain_s, self._announce = server, drain_s, announce
        pool = ConnectionPool(max_connections or default_max_connections())
        self.was_interrupted = False
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                server.app,
                http=partial(Connection, pool=pool),  # pyright: ignore (called, nothing else)
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                lifespan="on",
                backlog=1,  # in asyncio, connections to accept at a time; see startup
                log_config=None,
                log_level=logging.ERROR,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=2 * FLUSH_S,
            )
        )

    def handle_exit(self, sig: int = 0, frame: FrameType | None = None) -> None:
        """Handle a signal; callable from any thread."""
        self.was_interrupted |= sig == signal.SIGINT
        if self._loop is None:
            self.should_exit = True
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._end(self.drain_s))
        else:
            self._drain.cancel()
            self._drain = asyncio.ensure_future(self._end(0.0))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """At the limit of open files, asyncio logs a line for each connection of its backlog and
        retries all of them after a second. A backlog of 1 leads to one line, which `_log_failure`
        writes.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_log_failure)
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)
        if self._announce:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """A client that does not take its response in time loses its connection, which ends its
        task as usual.
        """
        timer = asyncio.get_running_loop().call_later(FLUSH_S, self._abort_connections)
        await super().shutdown(sockets)
        timer.cancel()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # pyright: ignore (all are of class Connection)

    async def _end(self, drain_s: float) -> None:
        await self.server.drain(drain_s)
        self.should_exit = True


def _log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if "accept" in context["message"]:
        LOG.error("connections cannot be accepted: %s", context.get("exception"))
    else:
        loop.default_exception_handler(context)


def raise_file_limit() -> None:
    """A connection is a file; many systems allow 1,024 of them by default."""
    try:
        import resource
    except ImportError:  # not Unix: no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def default_max_connections() -> int:
    """The limit of open files, minus some for other uses."""
    try:
        import resource
    except ImportError:
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - SPARE_FILES))


class BackgroundServer:
    """A server in a thread of this process, as a context manager; installs no signal handlers.

    with BackgroundServer(server) as url: ...
    """

    process: ServerProcess
    url: str

    def __init__(
        self,
        server: Drainable,
        address: Address | None = None,
        drain_s: float = 5.0,
        max_connections: int | None = None,
    ):
        self.process = ServerProcess(server, drain_s, max_connections=max_connections)
        self._socket = (address or Address(port=0)).bind()
        self.url = url_of(self._socket)
        self._thread = threading.Thread(target=self.process.run, args=([self._socket],))

    def __enter__(self) -> str:
        self._thread.start()
        while not self.process.started and self._thread.is_alive():
            self._thread.join(0.01)
        if not self.process.started:
            raise RuntimeError("the server did not start; its log says why")
        return self.url

    def __exit__(self, *exc: object) -> None:
        self.process.handle_exit()
        self._thread.join()
