"""The page on the loopback, with the Python pool behind its playground: the standard library's
server, few threads, short requests.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import BoundedSemaphore, Lock
from typing import Any, cast

from onchip.lab import page
from onchip.lab.playground import OPENING, Playground

MAX_BODY_BYTES = 4096
MAX_CONNECTIONS = 32
PATIENCE_S = 10.0  # for a client that says nothing


class LabServer(ThreadingHTTPServer):
    """One page and one playground for everybody; port 0 is any that is free."""

    daemon_threads = True

    def __init__(self, host: str, port: int, data: Mapping[str, Any]):
        self.page = page.assemble(data, live=True).encode()
        self.playground = Playground()
        for operation in OPENING:
            self.playground.do(operation)
        self.lock = Lock()
        self.seats = BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host}:{port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own if one is left; otherwise the connection is closed."""
        if self.seats.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.seats.release()

    def play(self, operation: Mapping[str, Any] | None) -> dict[str, Any]:
        """An operation (None: a look), its answer and what there is after it."""
        with self.lock:
            answer = {"ok": True, "say": ""} if operation is None else self.playground.do(operation)
            return {**answer, "state": self.playground.state()}


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /pages the playground, POST /pages an operation on it."""

    timeout = PATIENCE_S

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
        """By its number or as localhost, and by no other site: a name that leads here may be
        anybody's.
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
        """Who plays is not noted."""


def _is_number(named: str) -> bool:
    """Whether a Host header names an address by its number, or this machine."""
    host = named.rpartition(":")[0] or named
    try:
        return host == "localhost" or bool(ip_address(host.strip("[]")))
    except ValueError:
        return False
