"""The output of /v1/responses, whole or as OpenAI's events.

    response.created, response.in_progress
      response.output_item.added                     a message
        response.content_part.added
          response.output_text.delta ...
          response.output_text.done
        response.content_part.done
      response.output_item.done
      response.output_item.added                     a call of a function
        response.function_call_arguments.delta ...
        response.function_call_arguments.done
      response.output_item.done
    response.completed, response.incomplete (max_output_tokens) or response.failed

Every event has a sequence_number. A whole response is built by the same writer from one delta.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from .errors import APIError
from .metrics import Metrics
from .protocol import Usage
from .response_items import (
    IncompleteDetails,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokenDetails,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseTokenDetails,
    ResponseUsage,
)
from .responses import ChoiceDelta, DeltaReader
from .streaming import AcceptedCall, EventStream, WholeResponse
from .tools import CallDelta


class ResponseWriter:
    """Turns deltas into items and events. response: its state so far."""

    response: ResponseObject

    def __init__(self, request: ResponsesRequest, model: str):
        self.response = make_response(request, model)
        self._parts: list[str] = []  # of the text or the arguments of the open item
        self._is_open = False
        self._finish_reason: str | None = None
        self._num_events = 0

    def open(self) -> bytes:
        return self._report("created") + self._report("in_progress")

    def push(self, delta: ChoiceDelta) -> bytes:
        """The arguments of the open call precede the text of a delta, its new calls follow it."""
        is_new = [call.id is not None for call in delta.calls]
        split = is_new.index(True) if any(is_new) else len(is_new)
        events = b"".join(map(self._push_call, delta.calls[:split]))
        events += self._push_text(delta.text) if delta.text else b""
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events + b"".join(map(self._push_call, delta.calls[split:]))

    def finish(self, usage: Usage) -> bytes:
        """An output without a text and without calls is one empty message."""
        is_cut = self._finish_reason == "length"
        events = b"" if self.response.output else self._open_message()
        events += self._close("incomplete" if is_cut else "completed")
        response = self.response
        response.usage = _make_usage(usage)
        if is_cut:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            response.status, response.completed_at = "completed", int(time.time())
        return events + self._report(response.status)

    def fail(self, failure: APIError) -> bytes:
        """The items so far stay as they are."""
        self._keep_parts("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseFailure(message=failure.message)
        return self._report("failed")

    def _push_text(self, text: str) -> bytes:
        events = b""
        if not self._is_open or not isinstance(self._item, OutputMessage):
            events = self._close("completed") + self._open_message()
        self._parts.append(text)
        return events + self._event("output_text.delta", content_index=0, delta=text, logprobs=[])

    def _push_call(self, call: CallDelta) -> bytes:
        events = b""
        if call.id is not None and call.name is not None:
            item = OutputFunctionCall(
                id=_make_id("fc"),
                status="in_progress",
                call_id=call.id,
                name=call.name,
                arguments="",
            )
            events = self._close("completed") + self._open(item)
        if call.arguments:
            self._parts.append(call.arguments)
            events += self._event("function_call_arguments.delta", delta=call.arguments)
        return events

    def _open_message(self) -> bytes:
        item = OutputMessage(id=_make_id("msg"), status="in_progress", content=[])
        events = self._open(item)
        part = OutputText(text="")
        return events + self._event("content_part.added", content_index=0, part=part)

    def _open(self, item: OutputItem) -> bytes:
        self.response.output.append(item)
        self._parts, self._is_open = [], True
        return self._item_event("added")

    def _close(self, status: str) -> bytes:
        """Complete the open item, if there is one."""
        if not self._is_open:
            return b""
        self._keep_parts(status)
        item = self._item
        if isinstance(item, OutputFunctionCall):
            events = self._event("function_call_arguments.done", arguments=item.arguments)
        else:
            (part,) = item.content
            events = self._event(
                "output_text.done", content_index=0, text=part.text, logprobs=[]
            ) + self._event("content_part.done", content_index=0, part=part)
        return events + self._item_event("done")

    def _keep_parts(self, status: str) -> None:
        """Write what arrived into the open item, and close it."""
        if not self._is_open:
            return
        item, joined = self._item, "".join(self._parts)
        if isinstance(item, OutputFunctionCall):
            item.arguments = joined
        else:
            item.content = [OutputText(text=joined)]
        item.status = status  # pyright: ignore
        self._is_open = False

    @property
    def _item(self) -> OutputItem:
        return self.response.output[-1]

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _report(self, what: str) -> bytes:
        return self._encode(what, {"response": self.response})

    def _item_event(self, what: str) -> bytes:
        fields = {"output_index": self._index, "item": self._item}
        return self._encode(f"output_item.{what}", fields)

    def _event(self, what: str, **fields: Any) -> bytes:
        place = {"item_id": self._item.id, "output_index": self._index}
        return self._encode(what, place | fields)

    def _encode(self, what: str, fields: dict[str, Any]) -> bytes:
        name, number = f"response.{what}", self._num_events
        self._num_events += 1
        data = to_json({"type": name, "sequence_number": number, **fields}, by_alias=True)
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class FullResponseObject(WholeResponse):
    """The whole response."""

    def __init__(
        self, call: AcceptedCall, metrics: Metrics, reader: DeltaReader, writer: ResponseWriter
    ):
        super().__init__(call, metrics)
        self._reader, self._writer = reader, writer

    async def encode_all(self) -> Sequence[bytes]:
        for delta in self._reader.read_new(self.call.pending.outputs):
            self._writer.push(delta)
        self._writer.finish(self.call.usage)
        return [self._writer.response.model_dump_json().encode()]


class ResponseEventStream(EventStream):
    """The events of a response. They end with the last one: there is no [DONE]."""

    def __init__(
        self, call: AcceptedCall, metrics: Metrics, reader: DeltaReader, writer: ResponseWriter
    ):
        super().__init__(call, metrics, reader)
        self._writer = writer

    def encode_opening(self) -> bytes:
        return self._writer.open()

    def encode_deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join(map(self._writer.push, deltas))

    def encode_ending(self, failure: APIError | None) -> bytes:
        return self._writer.fail(failure) if failure else self._writer.finish(self.call.usage)


def make_response(request: ResponsesRequest, model: str) -> ResponseObject:
    """A response without output. Fields that were not sent have the values that are used."""
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    chosen = None if text is None else text.format
    return ResponseObject(
        id=_make_id("resp"),
        created_at=int(time.time()),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        safety_identifier=request.safety_identifier,
        temperature=1.0 if request.temperature is None else request.temperature,
        text={"format": _dump(chosen) if chosen is not None else {"type": "text"}},
        tool_choice=_dump(choice) if isinstance(choice, BaseModel) else choice or "auto",
        tools=[_dump(tool) for tool in request.tools or ()],
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )


def _dump(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_unset=True)


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _make_usage(usage: Usage) -> ResponseUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=ResponseTokenDetails(cached_tokens=cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokenDetails(),
        total_tokens=usage.total_tokens,
    )
