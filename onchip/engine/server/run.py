"""The process of a server: its socket, its signals, its end."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol  # it bounds the size of headers

from .app import Server
from .guard import LOCAL_NAMES

FLUSH_S = 5.0  # for answers that are on their way when everything is done
STUCK_CLIENT_MS = 60_000  # a client that takes nothing for so long is gone
MAX_HEADER_BYTES = 64 << 10
HEADER_S = 10.0
BACKLOG = 2048


@dataclass(frozen=True)
class Address:
    """Port 0: any that is free."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def local(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that a client of a local server calls it by."""
        return LOCAL_NAMES | {self.host} if self.local else None

    def bind(self) -> socket.socket:
        """Before the minutes of loading, not after; it listens when the server starts."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # handed on to every connection
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


class Connection(H11Protocol):
    """Closes unless the head of a request arrives in time: neither silence nor a byte now and then
    keeps a connection open.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()  # or it keeps the connection in memory until it rings

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expect_request(self) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(HEADER_S, self._close_unless_asked, self.cycle)

    def _close_unless_asked(self, last: object) -> None:
        if self.cycle is last and (last is None or self.cycle.response_complete):
            self.transport.close()


class Process(uvicorn.Server):
    """A first SIGTERM or SIGINT drains: nothing new is taken, what runs may finish for drain_s,
    what is left is answered with a sentence. A second one does not wait. announce: called once it
    listens.
    """

    def __init__(self, server: Server, drain_s: float, announce: Callable[[], None] | None = None):
        self.server, self.drain_s, self._announce = server, drain_s, announce
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                server.app,
                http=Connection,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="none",
                lifespan="on",
                backlog=BACKLOG,
                log_level=logging.WARNING,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_S,
            )
        )

    def handle_exit(self, sig: int = 0, frame: FrameType | None = None) -> None:
        """What a signal does; from any thread."""
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
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._announce:
            self._announce()

    async def _end(self, drain_s: float) -> None:
        await self.server.service.drain(drain_s)
        self.should_exit = True


def raise_file_limit() -> None:
    """A connection is a file; many systems allow 1,024 of them until asked for more."""
    try:
        import resource
    except ImportError:  # not a Unix: there is no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Background:
    """A server in a thread of this process, as a block; installs no signal handlers.

    with Background(server) as url: ...
    """

    def __init__(self, server: Server, address: Address | None = None, drain_s: float = 5.0):
        self.process = Process(server, drain_s)
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
