"""The response of a replica on its way to the client.

    replica -> put -> chunks that the client has not taken, joined -> send_all -> client

Ray keeps every message that is not read, without a limit. The gateway therefore reads all messages
at once, and limits the bytes that wait here.
"""

import asyncio

from starlette.responses import JSONResponse
from starlette.types import Message, Send

from onchip.server.bodies import BodyMemory, BodyReservation
from onchip.server.errors import APIError
from onchip.server.log import HEADER
from onchip.server.service import RETRY_AFTER_S
from onchip.server.streaming import encode_event


class RelayedResponse:
    """A slow reader gets fewer, larger chunks. memory: of the chunks of streams that wait. Other
    responses are short, or complete when they begin.
    """

    def __init__(self, send: Send, memory: BodyMemory):
        self._send, self._unsent = send, BodyReservation(memory)
        self._start: Message | None = None
        self._body = bytearray()
        self._has_begun = self._has_events = self._has_last = self._has_ended = False
        self._changed = asyncio.Event()

    @property
    def is_stream(self) -> bool:
        """Server-sent events have begun, so an error is one more event."""
        return self._has_begun and self._has_events

    def put(self, message: Message) -> None:
        """A message of the replica. APIError: clients that read too slowly fill the memory."""
        if message["type"] == "http.response.start":
            # RequestLog of the gateway adds the same header.
            headers = [pair for pair in message["headers"] if pair[0] != HEADER.encode()]
            kind = dict(headers).get(b"content-type", b"")
            self._has_events = kind.startswith(b"text/event-stream")
            self._start = {**message, "headers": headers}
        else:
            self._body += message.get("body", b"")
            self._has_last = not message.get("more_body")
            if self._has_events and not self._unsent.grow(len(self._body)):
                raise _unread_error(self._unsent.memory.max_bytes)
        self._changed.set()

    def end(self) -> bool:
        """The replica's call has ended. Return False if the response is not complete."""
        self._has_ended = self._has_last
        self._changed.set()
        return self._has_ended

    async def send_all(self) -> None:
        """Send what was put, until `end`. The last message is sent after it: then the connection
        looks disconnected, and the replica's call would be cancelled before it has ended.
        """
        is_last = False
        while not is_last:
            await self._changed.wait()
            self._changed.clear()
            is_last = self._has_ended  # read before sending: more may arrive meanwhile
            if not self._has_begun and self._start is not None:
                await self._send(self._start)
                self._has_begun = True
            body, self._body = bytes(self._body), bytearray()
            self._unsent.clear()
            if body or is_last:
                await self._send_body(body, more=not is_last)

    async def fail(self, error: APIError) -> None:
        """End a stream with an error."""
        self._unsent.clear()
        event = encode_event(JSONResponse(error.body).body)
        await self._send_body(event + encode_event(b"[DONE]"), more=False)

    async def _send_body(self, body: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _unread_error(max_bytes: int) -> APIError:
    message = f"chunks that clients have not read fill the {max_bytes} bytes for all of them"
    return APIError(503, message, code="streams_full", retry_after_s=RETRY_AFTER_S)
