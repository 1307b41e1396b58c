"""Request ids, and one log line per request, without prompts or keys.

    POST /v1/completions 200 in=26 out=16 first=0.034s total=0.512s id=4f0c...

Probes arrive every few seconds, so they are logged at level DEBUG.
"""

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onchip.engine.request import RequestOutput

from .errors import CLIENT_GONE, APIError, error_response
from .protocol import Usage

LOG = logging.getLogger("onchip.serve")
HEADER = "x-request-id"
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/stats"})
MAX_PATH_CHARS = 200
_NAME = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


@dataclass
class RequestRecord:
    """The log entry of one request. status: None until the response begins. first_token_s: on the
    clock of started_s.
    """

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    status: int | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    first_token_s: float | None = None

    def count(self, outputs: Sequence[RequestOutput | None], usage: Usage) -> None:
        self.tokens_in, self.tokens_out = usage.prompt_tokens, usage.completion_tokens
        times = [output.metrics.first_token_s for output in outputs if output]
        self.first_token_s = min((t for t in times if t is not None), default=None)

    def line(self, method: str, path: str) -> str:
        words = [method, path, str(self.status)]
        if self.tokens_in is not None:
            words += [f"in={self.tokens_in}", f"out={self.tokens_out}"]
        if self.first_token_s is not None:
            words.append(f"first={self.first_token_s - self.started_s:.3f}s")
        words += [f"total={time.monotonic() - self.started_s:.3f}s", f"id={self.request_id}"]
        return " ".join(words)


def get_record(scope: Scope) -> RequestRecord:
    """The record that RequestLog made, or one that is not logged."""
    return scope.get("state", {}).get("record") or RequestRecord("-")


class FailureCounter(Protocol):
    def count_failure(self, status: int) -> None: ...

    def count_disconnect(self) -> None: ...


@dataclass(frozen=True)
class RequestLog:
    """ASGI middleware around the whole application: the header X-Request-Id, the log line, and the
    response to unexpected errors.
    """

    app: ASGIApp
    metrics: FailureCounter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if record.status is None:
                    record.status = message["status"]
                name = (HEADER.encode(), record.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            self.metrics.count_disconnect()
            record.status = CLIENT_GONE
        except Exception:
            await self._fail(record, scope, receive, send_with_id)
        finally:
            _write(scope, record)

    async def _fail(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        LOG.exception("the server failed at request %s", record.request_id)
        error = APIError(500, "the server failed at this request")
        self.metrics.count_failure(error.status)
        if record.status is None:
            await error_response(error)(scope, receive, send)


def _request_id(scope: Scope) -> str:
    """The client's own id if it is safe in a log line, otherwise a new one."""
    client_id = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
    return client_id if _NAME.fullmatch(client_id) else uuid.uuid4().hex


def _write(scope: Scope, record: RequestRecord) -> None:
    level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
    if LOG.isEnabledFor(level):
        path = quote(scope["path"])[:MAX_PATH_CHARS]  # without spaces and line breaks
        LOG.log(level, record.line(scope["method"], path))
