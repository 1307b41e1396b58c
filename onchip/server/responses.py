"""Outputs of the engine as responses of the OpenAI API, whole or streamed.

    RequestOutput (cumulative) -> DeltaReader -> ChoiceDelta -> CompletionBuilder or ChatBuilder

A delta is the new part of one choice since the last delta. A whole response is built from one delta
per choice.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from onchip.engine.request import CompletionOutput, Logprob, RequestOutput

from . import protocol
from .codec import TokenText, text_offsets
from .errors import APIError
from .tools import CallDelta, ToolCallParser

ReadToken = Callable[[int], TokenText]
Table = dict[int, Logprob]
Tokens = tuple[tuple[int, Table | None], ...]


@dataclass(frozen=True)
class ChoiceDelta:
    """tokens: (id, logprobs at its position; None if not requested, or for the first token of a
    prompt). offset: characters before this delta. calls: parts of calls of tools, which are not in
    the text. num_generated: tokens of all choices of the call, up to the end of this delta.
    """

    index: int
    text: str
    tokens: Tokens
    offset: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    calls: tuple[CallDelta, ...] = ()
    num_generated: int = 0


@dataclass(frozen=True)
class Echo:
    """The texts of the prompts, put before each choice. scores_only: nothing is generated."""

    texts: Sequence[str]
    scores_only: bool = False


@dataclass
class _SentCounts:
    """How much of a choice was sent."""

    chars: int = 0
    tokens: int = 0
    begun: bool = False
    finished: bool = False


@dataclass
class DeltaReader:
    """Reads the outputs of one call; n: choices per prompt."""

    n: int
    echo: Echo | None = None
    _sent: dict[tuple[int, int], _SentCounts] = field(default_factory=dict)
    _num_generated: int = 0

    def read_new(self, outputs: Sequence[RequestOutput | None]) -> Iterator[ChoiceDelta]:
        """The new part of each choice, if there is any."""
        for prompt_index, output in enumerate(outputs):
            for i, choice in enumerate(output.outputs if output else ()):
                sent = self._sent.setdefault((prompt_index, i), _SentCounts())
                delta = self._read_delta(prompt_index * self.n + i, sent, choice)
                delta = self._prepend_echo(delta, sent, prompt_index, output)
                if choice.finished and not sent.finished:
                    sent.finished = True
                    yield self._mark_finished(delta, choice)
                elif delta.text or delta.tokens:
                    sent.begun = True
                    yield delta

    def _read_delta(self, index: int, sent: _SentCounts, choice: CompletionOutput) -> ChoiceDelta:
        if self.scores_only:
            return ChoiceDelta(index, "", (), 0)
        text, ids, tables = choice.since(sent.chars, sent.tokens)
        tokens = () if tables is None else tuple(zip(ids, tables, strict=True))
        offset, sent.chars = sent.chars, sent.chars + len(text)
        sent.tokens += len(ids)
        self._num_generated += len(ids)
        return ChoiceDelta(index, text, tokens, offset, num_generated=self._num_generated)

    def _mark_finished(self, delta: ChoiceDelta, choice: CompletionOutput) -> ChoiceDelta:
        reason = "length" if self.scores_only else choice.finish_reason
        return replace(delta, finish_reason=reason, stop_reason=choice.stop_reason)

    def _prepend_echo(
        self, delta: ChoiceDelta, sent: _SentCounts, prompt_index: int, output: RequestOutput
    ) -> ChoiceDelta:
        if self.echo is None:
            return delta
        ahead = self.echo.texts[prompt_index]
        if sent.begun or sent.finished:
            return replace(delta, offset=delta.offset + len(ahead))
        return replace(
            delta, text=ahead + delta.text, tokens=(*_prompt_tokens(output), *delta.tokens)
        )

    @property
    def scores_only(self) -> bool:
        return self.echo is not None and self.echo.scores_only


@dataclass
class ToolDeltaReader(DeltaReader):
    """A DeltaReader that finds calls of tools in the texts. make_parser: for a choice that
    streams, or for a whole one.
    """

    make_parser: Callable[[bool], ToolCallParser] = field(kw_only=True)
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)

    def read_new(self, outputs: Sequence[RequestOutput | None]) -> Iterator[ChoiceDelta]:
        for delta in super().read_new(outputs):
            delta = self._find_calls(delta)
            if delta.text or delta.tokens or delta.calls or delta.finish_reason:
                yield delta

    def _find_calls(self, delta: ChoiceDelta) -> ChoiceDelta:
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self.make_parser(delta.finish_reason is None)
        content, calls = parser.push(delta.text)
        reason = delta.finish_reason
        if reason is not None:
            rest = parser.finish()
            content, calls = content + rest.content, calls + rest.calls
            reason = "tool_calls" if parser.num_calls and reason == "stop" else reason
        return replace(delta, text=content, calls=calls, finish_reason=reason)


def _prompt_tokens(output: RequestOutput) -> Tokens:
    return tuple(zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False))


def count_generated(outputs: Sequence[RequestOutput | None]) -> int:
    """Tokens of all choices. This copies the token ids of outputs that still grow."""
    return sum(len(choice.token_ids) for o in outputs if o for choice in o.outputs)


def make_usage(
    num_prompt_tokens: int, num_generated: int, outputs: Sequence[RequestOutput | None]
) -> protocol.Usage:
    """Each prompt counts once, each choice separately. outputs: for the number of cached tokens."""
    cached = sum(o.num_cached_tokens for o in outputs if o)
    return protocol.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_generated,
        total_tokens=num_prompt_tokens + num_generated,
        prompt_tokens_details=protocol.CachedTokens(cached_tokens=cached),
    )


def find_failure(
    outputs: Sequence[RequestOutput | None], deadline_error: APIError | None
) -> APIError | None:
    """The error of a choice that failed or was cut off. deadline_error: returned if its deadline
    passed.
    """
    for choice in (c for o in outputs if o for c in o.outputs):
        if choice.finish_reason == "error":
            return APIError(500, f"the model failed: {choice.stop_reason or 'no reason is known'}")
        if choice.finish_reason == "abort":
            return deadline_error or APIError(503, "the request was cancelled", code="cancelled")
    return None


class _Builder:
    """Fields that every response has."""

    head: dict[str, str | int]

    def __init__(self, prefix: str, model: str, read_token: ReadToken):
        name = f"{prefix}-{uuid.uuid4().hex}"
        self.head = {"id": name, "created": int(time.time()), "model": model}
        self.read_token = read_token


class CompletionBuilder(_Builder):
    """/v1/completions."""

    def __init__(self, model: str, read_token: ReadToken):
        super().__init__("cmpl", model, read_token)

    def build_full(
        self, deltas: Sequence[ChoiceDelta], usage: protocol.Usage
    ) -> protocol.Completion:
        choices = [self._choice(delta) for delta in deltas]
        return protocol.Completion(**self.head, choices=choices, usage=usage)

    def build_opening(
        self, num_choices: int, usage: protocol.Usage | None = None
    ) -> Iterator[protocol.Completion]:
        """The first chunks of a stream: none."""
        return iter(())

    def build_chunk(
        self, delta: ChoiceDelta, usage: protocol.Usage | None = None
    ) -> protocol.Completion:
        return protocol.Completion(**self.head, choices=[self._choice(delta)], usage=usage)

    def build_usage_chunk(self, usage: protocol.Usage) -> protocol.Completion:
        return protocol.Completion(**self.head, choices=[], usage=usage)

    def _choice(self, delta: ChoiceDelta) -> protocol.CompletionChoice:
        return protocol.CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=self._logprobs(delta) if delta.tokens else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _logprobs(self, delta: ChoiceDelta) -> protocol.CompletionLogprobs:
        tokens = [self.read_token(token) for token, _ in delta.tokens]
        return protocol.CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[t and t[token].logprob for token, t in delta.tokens],
            top_logprobs=[t and self._by_text(t) for _, t in delta.tokens],
            text_offset=text_offsets(tokens, delta.offset),
        )

    def _by_text(self, table: Table) -> dict[str, float]:
        """Two tokens may have the same text: the less probable one is named by its id."""
        named: dict[str, float] = {}
        for token, entry in sorted(table.items(), key=lambda item: -item[1].logprob):
            text = self.read_token(token).text
            named[f"token_id:{token}" if text in named else text] = entry.logprob
        return named


class ChatBuilder(_Builder):
    """/v1/chat/completions; top: number of alternatives shown per token."""

    def __init__(self, model: str, read_token: ReadToken, top: int = 0):
        super().__init__("chatcmpl", model, read_token)
        self.top = top

    def build_full(
        self, deltas: Sequence[ChoiceDelta], usage: protocol.Usage
    ) -> protocol.ChatCompletion:
        choices = [
            protocol.ChatChoice(message=_message(delta), **self._rest(delta)) for delta in deltas
        ]
        return protocol.ChatCompletion(**self.head, choices=choices, usage=usage)

    def build_opening(
        self, num_choices: int, usage: protocol.Usage | None = None
    ) -> Iterator[protocol.ChatCompletionChunk]:
        for index in range(num_choices):
            delta = protocol.Delta(role="assistant", content="")
            choice = protocol.ChunkChoice(index=index, delta=delta, finish_reason=None)
            yield protocol.ChatCompletionChunk(**self.head, choices=[choice], usage=usage)

    def build_chunk(
        self, delta: ChoiceDelta, usage: protocol.Usage | None = None
    ) -> protocol.ChatCompletionChunk:
        new = protocol.Delta(content=delta.text) if delta.text else protocol.Delta()
        if delta.calls:
            new["tool_calls"] = [_call_part(call) for call in delta.calls]
        choice = protocol.ChunkChoice(delta=new, **self._rest(delta))
        return protocol.ChatCompletionChunk(**self.head, choices=[choice], usage=usage)

    def build_usage_chunk(self, usage: protocol.Usage) -> protocol.ChatCompletionChunk:
        return protocol.ChatCompletionChunk(**self.head, choices=[], usage=usage)

    def _rest(self, delta: ChoiceDelta) -> dict:
        return {
            "index": delta.index,
            "logprobs": self._logprobs(delta) if delta.tokens else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, delta: ChoiceDelta) -> protocol.ChatLogprobs:
        return protocol.ChatLogprobs(
            content=[self._token(token, table) for token, table in delta.tokens if table]
        )

    def _token(self, token: int, table: Table) -> protocol.TokenLogprob:
        ranked = sorted(table.items(), key=lambda entry: -entry[1].logprob)[: self.top]
        return protocol.TokenLogprob(
            **self._entry(token, table[token]),
            top_logprobs=[protocol.TopLogprob(**self._entry(i, e)) for i, e in ranked],
        )

    def _entry(self, token: int, entry: Logprob) -> dict:
        read = self.read_token(token)
        return {"token": read.text, "logprob": entry.logprob, "bytes": list(read.data)}


def _message(delta: ChoiceDelta) -> protocol.AssistantMessage:
    """A whole message. Its calls have their parts together, and no index."""
    content = None if delta.calls and not delta.text else delta.text
    message = protocol.AssistantMessage(role="assistant", content=content, refusal=None)
    if delta.calls:
        message["tool_calls"] = _join_calls(delta.calls)
    return message


def _join_calls(parts: Sequence[CallDelta]) -> list[protocol.ToolCallPart]:
    """Whole calls: the first part of each has its id and name, the others its arguments."""
    calls = []
    for first in (part for part in parts if part.id is not None):
        arguments = "".join(part.arguments for part in parts if part.index == first.index)
        call = _call_part(replace(first, arguments=arguments))
        call.pop("index")
        calls.append(call)
    return calls


def _call_part(part: CallDelta) -> protocol.ToolCallPart:
    if part.name is None or part.id is None:
        function = protocol.CalledFunction(arguments=part.arguments)
        return protocol.ToolCallPart(index=part.index, function=function)
    function = protocol.CalledFunction(name=part.name, arguments=part.arguments)
    return protocol.ToolCallPart(index=part.index, id=part.id, type="function", function=function)


ResponseBuilder = CompletionBuilder | ChatBuilder
