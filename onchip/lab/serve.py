"""The page on the loopback, with the Python pool behind its playground: the standard library's
server, few threads, short requests.
"""

import io
import json
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import BoundedSemaphore, Lock
from typing import Any, cast

from onchip.lab import page
from onchip.lab.playground import OPENING, Playground

MAX_BODY_BYTES = 4096
MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 64 << 10  # head and body
REQUEST_S = 10.0  # for a whole request, and for its answer
EVICT_S = 1.0  # to close an evicted connection


class LabServer(ThreadingHTTPServer):
    """Serves the page, and one playground that all clients share. Port 0: any free port."""

    daemon_threads = True

    def __init__(self, host: str, port: int, data: Mapping[str, Any]):
        self.page = page.assemble(data, live=True).encode()
        self.playground = Playground()
        for operation in OPENING:
            self.playground.do(operation)
        self.lock = Lock()
        self.connection_slots = BoundedSemaphore(MAX_CONNECTIONS)
        self.open_connections: dict[socket.socket, None] = {}  # the oldest first
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host}:{port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in a thread of its own. If all slots are taken, close the oldest
        connection: a request takes milliseconds, so the client of that one sends nothing, or only
        a byte now and then.
        """
        if not self.connection_slots.acquire(blocking=False):
            self._evict_oldest()
            if not self.connection_slots.acquire(timeout=EVICT_S):
                self.shutdown_request(request)
                return
        self.open_connections[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.open_connections.pop(request, None)
            self.connection_slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that the client or an eviction closed are not errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _evict_oldest(self) -> None:
        for oldest in list(self.open_connections)[:1]:
            self.open_connections.pop(oldest, None)
            with suppress(OSError):  # it may have ended meanwhile
                oldest.shutdown(socket.SHUT_RDWR)

    def play(self, operation: Mapping[str, Any] | None) -> dict[str, Any]:
        """Run an operation (None: none). Return its answer and the state after it."""
        with self.lock:
            answer = {"ok": True, "say": ""} if operation is None else self.playground.do(operation)
            return {**answer, "state": self.playground.state()}


class RequestReader(io.RawIOBase):
    """The bytes of one request, with REQUEST_S for all of them: a byte now and then does not keep a
    connection open.
    """

    def __init__(self, connection: socket.socket):
        super().__init__()
        self._connection, self._left = connection, MAX_REQUEST_BYTES
        self._end = time.monotonic() + REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._end - time.monotonic()
        if left_s <= 0 or self._left <= 0:
            raise TimeoutError("the request takes too long, or is too large")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._connection.settimeout(REQUEST_S)
        self._left -= count
        return count


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /pages the playground, POST /pages an operation on it."""

    timeout = REQUEST_S  # of an answer: Python counts it for all that one call sends

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(RequestReader(self.connection))

    @property
    def lab(self) -> LabServer:
        return cast(LabServer, self.server)

    def do_GET(self) -> None:
        if not self._is_addressed():
            return
        if self.path == "/":
            self._send(HTTPStatus.OK, self.lab.page, "text/html; charset=utf-8")
        elif self.path == "/pages":
            self._send_json(HTTPStatus.OK, self.lab.play(None))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path[:80]} here")

    def do_POST(self) -> None:
        if not self._is_addressed():
            return
        try:
            self._send_json(HTTPStatus.OK, self.lab.play(self._operation()))
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))

    def _is_addressed(self) -> bool:
        """Accept a Host header with the address or localhost only. Any other name could be a
        foreign site's that resolves to this address.
        """
        named, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if _is_number(named) and origin in (None, f"http://{named}"):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"this server is {self.lab.url}")
        return False

    def _operation(self) -> dict[str, Any]:
        if self.path != "/pages":
            raise ValueError(f"there is nothing to do at {self.path[:80]}")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise ValueError(f"Content-Length {length!r:.20} must be at most {MAX_BODY_BYTES}")
        try:
            operation = json.loads(self.rfile.read(int(length)))
        except RecursionError:
            raise ValueError("that is nested too deep") from None
        if not isinstance(operation, dict):
            raise ValueError("an operation is an object")
        return operation

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send_json(status, {"ok": False, "say": why})

    def _send_json(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(answer).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _is_number(named: str) -> bool:
    """Whether a Host header names an address by its number, or this machine."""
    host = named.rpartition(":")[0] or named
    try:
        return host == "localhost" or bool(ip_address(host.strip("[]")))
    except ValueError:
        return False
