"""Authentication: API key, Host header and size of the head of every request.

    request -> head <= 64 KiB, one body length -> Host is allowed -> key is known -> app
                 431, 400                           421                401

A pure ASGI middleware around the whole application, so no route can be left unprotected: every path
that is not in OPEN_PATHS needs a key, if there are keys.
"""

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from .api_keys import Keyring
from .errors import APIError, error_response

# The static page holds no data, and probes need no key.
OPEN_PATHS = frozenset({"/", "/live.css", "/live.js", "/health", "/ready"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class AuthMiddleware:
    """hosts: Host names that are accepted, None for all. A server on the loopback without keys
    trusts every client, so a web page must not reach it under a name of its own (DNS rebinding).
    """

    app: ASGIApp
    keys: Keyring
    hosts: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except APIError as error:
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        _check_head(scope, headers)
        host = _strip_port(headers.get(b"host", b"").decode("latin-1"))
        if self.hosts is not None and host not in self.hosts:
            raise APIError(421, f"this server is not {host[:100]!r}", code="unknown_host")
        salt = self.keys.find_salt(headers.get(b"authorization"))
        if salt is None and scope["path"] not in OPEN_PATHS:
            raise APIError(401, "send a key: Authorization: Bearer KEY", code="invalid_api_key")
        scope.setdefault("state", {})["salt"] = salt


def _check_head(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """h11 bounds a head only while it is incomplete, so a head that arrives in one read is checked
    here. A request with two body lengths (RFC 9112, 6.1) is rejected: a proxy in front might use
    the other length and see a second request in the body.
    """
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size + len(scope.get("raw_path", b"")) + len(scope["query_string"]) > MAX_HEAD_BYTES:
        raise APIError(431, f"the head is larger than {MAX_HEAD_BYTES} bytes", closes=True)
    if b"transfer-encoding" not in headers:
        return
    if b"content-length" in headers or scope["http_version"] == "1.0":
        both = "Content-Length" if b"content-length" in headers else "HTTP/1.0"
        raise APIError(400, f"Transfer-Encoding and {both} exclude one another", closes=True)


def _strip_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
