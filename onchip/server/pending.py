"""Calls that wait for the engine: their requests and newest outputs. Used on the event
loop only.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from onchip.engine.request import RequestOutput
from onchip.engine.sampling_params import PoolingParams, SamplingParams
from onchip.engine.structure.compiler import PendingGrammar

from .errors import APIError


@dataclass(frozen=True)
class EngineRequest:
    """One prompt. deadline_s: seconds it may take. stream: every output is needed, not only the
    last. grammar: keeps a compiled grammar until the engine has found it.
    """

    prompt: Sequence[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    deadline_s: float | None = None
    salt: bytes = b""
    stream: bool = True
    grammar: PendingGrammar | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `Engine.add`."""
        return {name: value for name, value in vars(self).items() if name != "grammar"}


class IncomingRequest:
    """An HTTP request that is being read, until `Service.submit`."""

    def __init__(self) -> None:
        self._failure: APIError | None = None
        self._event = asyncio.Event()

    def fail(self, failure: APIError) -> None:
        self._failure = failure
        self._event.set()

    async def wait_for_failure(self) -> None:
        """Wait until the server ends the request, and raise the error."""
        await self._event.wait()
        if self._failure is not None:
            raise self._failure


@contextmanager
def track_request(requests: set[IncomingRequest]) -> Iterator[IncomingRequest]:
    """A new request, which is in the set inside of the block."""
    incoming = IncomingRequest()
    requests.add(incoming)
    try:
        yield incoming
    finally:
        requests.discard(incoming)


class PendingCall:
    """One HTTP call: the newest output of each of its requests, or the error that ended it.
    num_prompt_tokens: of all requests. accepted: set to None when the engine accepts all requests,
    otherwise to the error. released: the caller is gone.
    """

    request_ids: tuple[str, ...]
    num_prompt_tokens: int

    def __init__(self, request_ids: Sequence[str], num_prompt_tokens: int = 0):
        self.request_ids, self.num_prompt_tokens = tuple(request_ids), num_prompt_tokens
        self.outputs: list[RequestOutput | None] = [None] * len(self.request_ids)
        self.failure: APIError | None = None
        self.accepted: asyncio.Future[APIError | None] = asyncio.get_running_loop().create_future()
        self.released = False
        self._changed = asyncio.Event()

    @property
    def unfinished(self) -> list[str]:
        pairs = zip(self.request_ids, self.outputs, strict=True)
        return [name for name, output in pairs if output is None or not output.finished]

    @property
    def is_done(self) -> bool:
        return self.failure is not None or not self.unfinished

    async def wait_for_change(self) -> None:
        """Wait until something has changed since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def put(self, index: int, output: RequestOutput) -> None:
        self.outputs[index] = output
        self._changed.set()

    def fail(self, failure: APIError) -> None:
        """Only the first failure counts, and only before the call is done."""
        if not self.is_done:
            self.failure = failure
            self._changed.set()
            if not self.accepted.done():  # the engine may hang in a step
                self.accepted.set_result(failure)


@dataclass(frozen=True)
class OpenRequestInfo:
    """One open request. tokens: generated so far; None if the request does not stream."""

    request_id: str
    since_s: float
    prompt_tokens: int
    samples: int
    tokens: int | None


@dataclass(frozen=True)
class OpenRequest:
    """A request, and the PendingCall and index that receive its outputs."""

    pending: PendingCall
    index: int
    request: EngineRequest
    since_s: float

    @property
    def info(self) -> OpenRequestInfo:
        output, params = self.pending.outputs[self.index], self.request.params
        made = sum(len(c.token_ids) for c in output.outputs) if output else 0
        return OpenRequestInfo(
            self.pending.request_ids[self.index],
            self.since_s,
            len(self.request.prompt),
            params.num_samples,
            made if self.request.stream else None,
        )
