"""Those who wait: what one caller asked, and what it has of it so far. All on the event loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from onchip.engine.params import SamplingParams
from onchip.engine.request import RequestOutput

from .errors import APIError


@dataclass(frozen=True)
class EngineRequest:
    """One prompt. deadline_s: seconds it may take. stream: every output is wanted, not only the
    last.
    """

    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    salt: bytes = b""
    stream: bool = True


class IncomingRequest:
    """A request that is being read, up to its `submit`."""

    def __init__(self) -> None:
        self._failure: APIError | None = None
        self._event = asyncio.Event()

    def fail(self, failure: APIError) -> None:
        self._failure = failure
        self._event.set()

    async def wait_for_failure(self) -> None:
        """Waits until the server ends it, and raises why."""
        await self._event.wait()
        if self._failure is not None:
            raise self._failure


class PendingCall:
    """What one caller holds: the newest output of each of its requests, or why there is none.
    taken: the engine's answer to the requests, None if it took them. released: the caller is gone.
    Lives on the event loop.
    """

    def __init__(self, request_ids: Sequence[str]):
        self.request_ids = tuple(request_ids)
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
        """Until something is new since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def put(self, index: int, output: RequestOutput) -> None:
        self.outputs[index] = output
        self._changed.set()

    def fail(self, failure: APIError) -> None:
        """The first failure counts; what is settled stays so."""
        if not self.is_done:
            self.failure = failure
            self._changed.set()
            if not self.accepted.done():  # the engine may be in a step that never ends
                self.accepted.set_result(failure)


@dataclass(frozen=True)
class OpenRequestInfo:
    """One open request. tokens: made so far, None if nobody looks before it is done."""

    request_id: str
    since_s: float
    prompt_tokens: int
    samples: int
    tokens: int | None


@dataclass(frozen=True)
class OpenRequest:
    """Which output of which ticket a request is."""

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
