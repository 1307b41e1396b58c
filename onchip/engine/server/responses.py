"""Outputs of the engine as answers of the OpenAI API: whole, or piece by piece.

A piece is what is new of one choice since the last one; a whole answer is the piece since nothing.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from onchip.engine.request import CompletionOutput, Logprob, RequestOutput

from . import protocol
from .codec import Token, offsets
from .errors import Refusal

ReadToken = Callable[[int], Token]
Table = dict[int, Logprob]
Tokens = tuple[tuple[int, Table | None], ...]


@dataclass(frozen=True)
class Piece:
    """tokens: (id, what was probable there: None if nobody asked, or for the very first one).
    offset: characters that came before.
    """

    index: int
    text: str
    tokens: Tokens
    offset: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class Echo:
    """The texts of the prompts, to stand before each choice. scores_only: nothing else is shown."""

    texts: Sequence[str]
    scores_only: bool = False


@dataclass
class _Sent:
    """How much of a choice is on its way."""

    chars: int = 0
    tokens: int = 0
    begun: bool = False
    finished: bool = False


@dataclass
class Reader:
    """Reads the outputs of one caller's requests; n: choices of each."""

    n: int
    echo: Echo | None = None
    _sent: dict[tuple[int, int], _Sent] = field(default_factory=dict)

    def news(self, outputs: Sequence[RequestOutput | None]) -> Iterator[Piece]:
        """What is new, by choice: those of a request are numbered as they stand."""
        for place, output in enumerate(outputs):
            for i, choice in enumerate(output.outputs if output else ()):
                sent = self._sent.setdefault((place, i), _Sent())
                piece = self._piece(place * self.n + i, sent, choice)
                piece = self._after_echo(piece, sent, place, output)
                if choice.finished and not sent.finished:
                    sent.finished = True
                    yield self._last(piece, choice)
                elif piece.text or piece.tokens:
                    sent.begun = True
                    yield piece

    def _piece(self, index: int, sent: _Sent, choice: CompletionOutput) -> Piece:
        if self._scores_only:
            return Piece(index, "", (), 0)
        text, ids, tables = choice.since(sent.chars, sent.tokens)
        tokens = () if tables is None else tuple(zip(ids, tables, strict=True))
        offset, sent.chars = sent.chars, sent.chars + len(text)
        sent.tokens += len(ids)
        return Piece(index, text, tokens, offset)

    def _last(self, piece: Piece, choice: CompletionOutput) -> Piece:
        reason = "length" if self._scores_only else choice.finish_reason
        return replace(piece, finish_reason=reason, stop_reason=choice.stop_reason)

    def _after_echo(self, piece: Piece, sent: _Sent, place: int, output: RequestOutput) -> Piece:
        if self.echo is None:
            return piece
        ahead = self.echo.texts[place]
        if sent.begun or sent.finished:
            return replace(piece, offset=piece.offset + len(ahead))
        return replace(piece, text=ahead + piece.text, tokens=(*_scored(output), *piece.tokens))

    @property
    def _scores_only(self) -> bool:
        return self.echo is not None and self.echo.scores_only


def _scored(output: RequestOutput) -> Tokens:
    return tuple(zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False))


def usage(outputs: Sequence[RequestOutput | None], scores_only: bool = False) -> protocol.Usage:
    """Every prompt counts once, every choice for itself."""
    known = [o for o in outputs if o]
    prompt = sum(len(o.prompt_token_ids) for o in known)
    made = 0 if scores_only else sum(len(c.token_ids) for o in known for c in o.outputs)
    return protocol.Usage(
        prompt_tokens=prompt,
        completion_tokens=made,
        total_tokens=prompt + made,
        prompt_tokens_details=protocol.CachedTokens(
            cached_tokens=sum(o.num_cached_tokens for o in known)
        ),
    )


def failure_of(outputs: Sequence[RequestOutput | None], late: Refusal | None) -> Refusal | None:
    """Why there will be no answer: a choice was cut off or failed. late: what to say if its
    deadline has passed.
    """
    for choice in (c for o in outputs if o for c in o.outputs):
        if choice.finish_reason == "error":
            return Refusal(500, f"the model failed: {choice.stop_reason or 'no reason is known'}")
        if choice.finish_reason == "abort":
            return late or Refusal(503, "the request was cancelled", code="cancelled")
    return None


class Format(Protocol):
    """One of the two dialects."""

    def whole(
        self, pieces: Sequence[Piece], counted: protocol.Usage
    ) -> protocol.Completion | protocol.Chat: ...

    def opening(self, num_choices: int) -> Iterator[protocol.Completion | protocol.ChatChunk]:
        """What a stream begins with."""
        ...

    def chunk(self, piece: Piece) -> protocol.Completion | protocol.ChatChunk: ...

    def closing(self, counted: protocol.Usage) -> protocol.Completion | protocol.ChatChunk: ...


class _Names:
    """What stands at the top of each answer."""

    def __init__(self, prefix: str, model: str, read_token: ReadToken):
        self.head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self.read_token = read_token


class CompletionFormat(_Names):
    """/v1/completions."""

    def __init__(self, model: str, read_token: ReadToken):
        super().__init__("cmpl", model, read_token)

    def whole(self, pieces: Sequence[Piece], counted: protocol.Usage) -> protocol.Completion:
        choices = [self._choice(piece) for piece in pieces]
        return protocol.Completion(**self.head, choices=choices, usage=counted)

    def opening(self, num_choices: int) -> Iterator[protocol.Completion]:
        return iter(())

    def chunk(self, piece: Piece) -> protocol.Completion:
        return protocol.Completion(**self.head, choices=[self._choice(piece)])

    def closing(self, counted: protocol.Usage) -> protocol.Completion:
        return protocol.Completion(**self.head, choices=[], usage=counted)

    def _choice(self, piece: Piece) -> protocol.CompletionChoice:
        return protocol.CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs(piece) if piece.tokens else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )

    def _logprobs(self, piece: Piece) -> protocol.CompletionLogprobs:
        tokens = [self.read_token(token) for token, _ in piece.tokens]
        return protocol.CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[t and t[token].logprob for token, t in piece.tokens],
            top_logprobs=[t and self._by_text(t) for _, t in piece.tokens],
            text_offset=offsets(tokens, piece.offset),
        )

    def _by_text(self, table: Table) -> dict[str, float]:
        """Two tokens may write the same text: the less probable one goes by its id."""
        named: dict[str, float] = {}
        for token, entry in sorted(table.items(), key=lambda item: -item[1].logprob):
            text = self.read_token(token).text
            named[f"token_id:{token}" if text in named else text] = entry.logprob
        return named


class ChatFormat(_Names):
    """/v1/chat/completions; top: how many alternatives of a token are shown."""

    def __init__(self, model: str, read_token: ReadToken, top: int = 0):
        super().__init__("chatcmpl", model, read_token)
        self.top = top

    def whole(self, pieces: Sequence[Piece], counted: protocol.Usage) -> protocol.Chat:
        choices = [
            protocol.ChatChoice(message=protocol.Reply(content=piece.text), **self._rest(piece))
            for piece in pieces
        ]
        return protocol.Chat(**self.head, choices=choices, usage=counted)

    def opening(self, num_choices: int) -> Iterator[protocol.ChatChunk]:
        for index in range(num_choices):
            delta = protocol.Delta(role="assistant", content="")
            choice = protocol.ChunkChoice(index=index, delta=delta, finish_reason=None)
            yield protocol.ChatChunk(**self.head, choices=[choice])

    def chunk(self, piece: Piece) -> protocol.ChatChunk:
        delta = protocol.Delta(content=piece.text) if piece.text else protocol.Delta()
        choice = protocol.ChunkChoice(delta=delta, **self._rest(piece))
        return protocol.ChatChunk(**self.head, choices=[choice])

    def closing(self, counted: protocol.Usage) -> protocol.ChatChunk:
        return protocol.ChatChunk(**self.head, choices=[], usage=counted)

    def _rest(self, piece: Piece) -> dict:
        return {
            "index": piece.index,
            "logprobs": self._logprobs(piece) if piece.tokens else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(self, piece: Piece) -> protocol.ChatLogprobs:
        return protocol.ChatLogprobs(
            content=[self._token(token, table) for token, table in piece.tokens if table]
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
