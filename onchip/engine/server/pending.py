"""Those who wait: what one caller asked, and what it has of it so far. All on the event loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from onchip.engine.params import SamplingParams
from onchip.engine.request import RequestOutput

from .errors import Refusal


@dataclass(frozen=True)
class Ask:
    """One prompt. deadline_s: seconds it may take. stream: every output is wanted, not only the
    last.
    """

    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    salt: bytes = b""
    stream: bool = True


class Arrival:
    """A request that is being read, up to its `submit`."""

    def __init__(self) -> None:
        self._failure: Refusal | None = None
        self._event = asyncio.Event()

    def fail(self, failure: Refusal) -> None:
        self._failure = failure
        self._event.set()

    async def failed(self) -> None:
        """Waits until the server ends it, and raises why."""
        await self._event.wait()
        if self._failure is not None:
            raise self._failure


class Ticket:
    """What one caller holds: the newest output of each of its requests, or why there is none.
    taken: the engine's answer to the requests, None if it took them. released: the caller is gone.
    Lives on the event loop.
    """

    def __init__(self, request_ids: Sequence[str]):
        self.request_ids = tuple(request_ids)
        self.outputs: list[RequestOutput | None] = [None] * len(self.request_ids)
        self.failure: Refusal | None = None
        self.taken: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self.released = False
        self._news = asyncio.Event()

    @property
    def unfinished(self) -> list[str]:
        pairs = zip(self.request_ids, self.outputs, strict=True)
        return [name for name, output in pairs if output is None or not output.finished]

    @property
    def settled(self) -> bool:
        return self.failure is not None or not self.unfinished

    async def changed(self) -> None:
        """Until something is new since the last call."""
        await self._news.wait()
        self._news.clear()

    def put(self, place: int, output: RequestOutput) -> None:
        self.outputs[place] = output
        self._news.set()

    def fail(self, failure: Refusal) -> None:
        """The first failure counts; what is settled stays so."""
        if not self.settled:
            self.failure = failure
            self._news.set()
            if not self.taken.done():  # the engine may be in a step that never ends
                self.taken.set_result(failure)


@dataclass(frozen=True)
class Standing:
    """One open request. tokens: made so far, None if nobody looks before it is done."""

    request_id: str
    since_s: float
    prompt_tokens: int
    samples: int
    tokens: int | None


@dataclass(frozen=True)
class Place:
    """Which output of which ticket a request is."""

    ticket: Ticket
    place: int
    ask: Ask
    since_s: float

    @property
    def standing(self) -> Standing:
        output, params = self.ticket.outputs[self.place], self.ask.params
        made = sum(len(c.token_ids) for c in output.outputs) if output else 0
        return Standing(
            self.ticket.request_ids[self.place],
            self.since_s,
            len(self.ask.prompt),
            params.num_samples,
            made if self.ask.stream else None,
        )
