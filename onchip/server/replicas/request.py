"""A request on its way from the gateway to a replica."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.types import Scope

from onchip.server.api_keys import Keyring
from onchip.server.log import HEADER

SCHEME = b"Salt "  # of the header Authorization between gateway and replica
_COPIED = ("type", "http_version", "method", "scheme", "path", "query_string", "client", "server")
# The gateway replaces the first two, and has read the body, whatever its encoding.
_REPLACED = (b"authorization", HEADER.encode(), b"content-length", b"transfer-encoding")


class ReplicaRequest(NamedTuple):
    """scope: of ASGI, with names and bytes alone. keys: of the prompt, for the router."""

    scope: dict[str, Any]
    body: bytes
    keys: Sequence[bytes] = ()


class GatewaySalts(Keyring):
    """The gateway has checked the key and sends its salt in the place of the key: replicas know no
    keys, and Ray stores none.
    """

    @property
    def is_open(self) -> bool:
        return False

    def find_salt(self, authorization: bytes | None) -> bytes | None:
        scheme, _, salt = (authorization or b"").partition(SCHEME)
        return None if authorization is None or scheme else bytes.fromhex(salt.decode("ascii"))


def forwarded_scope(scope: Scope, salt: bytes, request_id: str) -> dict[str, Any]:
    """The scope that a replica sees. salt: of the key that the gateway has checked."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
    headers.append((b"authorization", SCHEME + salt.hex().encode()))
    headers.append((HEADER.encode(), request_id.encode()))
    copied = {name: scope[name] for name in _COPIED if name in scope}
    return {**copied, "headers": headers, "root_path": "", "asgi": {"version": "3.0"}}
