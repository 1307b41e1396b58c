"""A request on its way: what was asked, how far each of its samples is, and what is handed back."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from onchip.engine.params import BeamSearchParams, SamplingParams
from onchip.engine.text import Text
from onchip.kvcache.prefix import pack_token_ids

MAX_PRIORITY = 100


class Status(Enum):
    """Where a request or a sample is; finish_reason: as vLLM names it, None while it lives."""

    WAITING = ("waiting", None)
    RUNNING = ("running", None)
    SWAPPED = ("preempted, its pages are on the host", None)
    RECOMPUTE = ("preempted, to be computed again", None)
    FINISHED_STOPPED = ("stopped", "stop")
    FINISHED_LENGTH = ("as long as it may be", "length")
    FINISHED_ABORTED = ("cancelled", "abort")
    FINISHED_EXPIRED = ("not done before its deadline", "abort")
    FINISHED_ERROR = ("failed", "error")

    def __init__(self, meaning: str, finish_reason: str | None):
        self.meaning = meaning
        self.finish_reason = finish_reason
        self.finished = finish_reason is not None


class Logprob(NamedTuple):
    """Of one token at one place: its logarithmic probability, and its rank (1: most probable)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Drawn(NamedTuple):
    """What one row of logits gave: a token with its logprob, and the most probable ones if asked
    for, best first. A row that holds NaN or inf gives a logprob that is not finite: its sample
    fails alone.
    """

    token: int
    logprob: float = 0.0
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()

    def logprobs(self) -> dict[int, Logprob]:
        table = {token: Logprob(p, i + 1) for i, (token, p) in enumerate(self.top)}
        return table | {self.token: Logprob(self.logprob, self.rank)}


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. Fields as vLLM's: finish_reason is stop, length, abort, error, or None
    while it grows; stop_reason the text or token that stopped it, None for eos.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def since(self, chars: int, tokens: int) -> "News":
        """What is new for somebody who has seen so many characters and tokens."""
        tables = None if self.logprobs is None else self.logprobs[tokens:]
        return News(self.text[chars:], self.token_ids[tokens:], tables)


class News(NamedTuple):
    """The end of a CompletionOutput."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None


class _Snapshot(CompletionOutput):
    """A sample as it is now, copied when somebody looks: its text and its lists only ever grow, so
    lengths tell what they were. Who asks for all of it pays for all of it, who asks for what is new
    pays for that: a stream costs as much as it is long. A pickle or a copy is a CompletionOutput.
    """

    _grown: tuple[Text, list[int], list[dict[int, Logprob]] | None]
    _lengths: tuple[int, int]  # of text and token_ids

    @classmethod
    def of(cls, sample: "Sample") -> "_Snapshot":
        self, asked = cls.__new__(cls), sample.request.params.logprobs is not None
        vars(self).update(
            index=sample.index,
            cumulative_logprob=sample.cumulative_logprob,
            finish_reason=sample.status.finish_reason,
            stop_reason=sample.stop_reason,
            _grown=(sample.text, sample.token_ids, sample.logprobs if asked else None),
            _lengths=(len(sample.text), len(sample.token_ids)),
        )
        return self

    @cached_property
    def text(self) -> str:  # pyright: ignore
        return self.since(0, self._lengths[1]).text

    @cached_property
    def token_ids(self) -> tuple[int, ...]:  # pyright: ignore
        return tuple(self._grown[1][: self._lengths[1]])

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:  # pyright: ignore
        return self.since(self._lengths[0], 0).logprobs

    def since(self, chars: int, tokens: int) -> News:
        text, ids, tables = self._grown
        new = slice(tokens, self._lengths[1])
        shown = text.part(chars, self._lengths[0])
        return News(shown, tuple(ids[new]), None if tables is None else tables[new])

    def __reduce__(self) -> tuple:
        return CompletionOutput, tuple(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds of the scheduler's clock, and how often the request was preempted."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A request and its continuations so far. Fields as vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


@dataclass(eq=False, slots=True)
class Sample:
    """One continuation in the making.

    sequence: its handle in the cache, None while it has none: it waits, or its pages were given
    up, or it will fork from its request's first sample when the prompt is computed. candidates: of
    a beam that waits for the others of its request. pending: tokens that are drawn and not known
    yet; place: the last one is so far down in its step's draws. draw_key: makes the draws. reader:
    makes `text` of the tokens while they come; complete: it has all of it.
    """

    request: "Request"
    index: int
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text: Text = field(default_factory=Text)
    stop_reason: int | str | None = None
    end: Status | None = None
    sequence: Any = None
    candidates: tuple[tuple[int, float], ...] = ()
    pending: int = 0
    place: int = 0
    draw_key: int = 0
    reader: Any = None
    complete: bool = False

    @property
    def status(self) -> Status:
        return self.end or self.request.status

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation, known or not."""
        return len(self.token_ids) + self.pending

    @property
    def length(self) -> int:
        """Tokens in all, prompt included."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) + self.pending

    @property
    def goal(self) -> int:
        """Tokens to compute: all but the last one it may have, from which nothing follows."""
        request = self.request
        count = min(len(self.token_ids) + self.pending, request.max_tokens - 1)
        return len(request.prompt_token_ids) + count

    def tokens(self, start: int, stop: int) -> list[int]:
        """Of prompt and continuation, from position start to stop - 1, as far as they are known."""
        prompt = self.request.prompt_token_ids
        if start >= len(prompt):
            return self.token_ids[start - len(prompt) : stop - len(prompt)]
        return [*prompt[start:stop], *self.token_ids[: max(0, stop - len(prompt))]]

    def take(self, drawn: Drawn) -> None:
        """One more token is known; `end` is set if it is the last one."""
        if self.pending:
            self.pending -= 1
        if not math.isfinite(drawn.logprob):
            self.finish(Status.FINISHED_ERROR, "the logits are not finite")
            return
        request, token_ids = self.request, self.token_ids
        token_ids.append(drawn.token)
        self.cumulative_logprob += drawn.logprob
        if request.params.logprobs is not None:
            self.logprobs.append(drawn.logprobs())
        if drawn.token in request.ends or len(token_ids) == request.max_tokens:
            end, reason = request.end_of(self)
            if end is not None:
                self.finish(end, reason)

    def finish(self, end: Status, stop_reason: int | str | None = None) -> None:
        """It has ended; what was drawn beyond its end is dropped."""
        self.end, self.stop_reason, self.pending = end, stop_reason, 0

    def output(self) -> CompletionOutput:
        return _Snapshot.of(self)


class Request:
    """What is asked, and the samples that answer it.

    priority: less is more urgent, -100 to 100. deadline_s: on the scheduler's clock; what is not
    done by then is cut off. salt: only requests of the same salt find one another's prefixes.
    eos_token_ids: end a sample unless its params ignore them. draw_seed: makes the draws; the
    params' seed, or one the caller took from anywhere. needs_tokens: what is drawn next depends on
    the tokens before, so that they must be known.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        draw_seed: int = 0,
    ):
        params = params or SamplingParams()
        self.beams = params if isinstance(params, BeamSearchParams) else params.beams
        self.params = _as_sampling(params)
        self.request_id = request_id
        self.prompt_token_ids = tuple(pack_token_ids(prompt_token_ids))
        self.priority, self.deadline_s, self.salt = priority, deadline_s, salt
        self.eos_token_ids = frozenset(eos_token_ids)
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.ends = eos | frozenset(self.params.stop_token_ids)  # tokens that end a sample
        self.draw_seed = draw_seed if self.params.seed is None else self.params.seed
        self.needs_tokens = bool(self.beams or self.params.penalised)
        self._check(vocab_size)
        self.status = Status.WAITING
        self.error: str | None = None
        self.samples = [
            Sample(self, i) for i in range(1 if self.beams else self.params.num_samples)
        ]
        self.solo = self.samples[0] if len(self.samples) == 1 and not self.beams else None
        self.max_tokens = params.max_tokens or 0  # 0: until the scheduler knows the room
        self.family: Any = None  # of sequences on the host, while SWAPPED
        self.rank: tuple[float, int] = (0.0, 0)  # its place in every line, given once
        self.prompt: str | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(0.0)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {len(self.samples)} samples)"

    @property
    def finished(self) -> bool:
        return self.status.finished

    @property
    def live(self) -> list[Sample]:
        """Samples that grow."""
        return [s for s in self.samples if s.end is None]

    @property
    def rooted(self) -> list[Sample]:
        """Live samples that have a sequence."""
        return [s for s in self.samples if s.end is None and s.sequence is not None]

    @property
    def width(self) -> int:
        """Rows of a batch that it may take."""
        return self.beams.beam_width if self.beams else len(self.live)

    @property
    def chosen_last(self) -> bool:
        """Which samples are its outputs is known when it ends, not before."""
        return bool(self.beams) or len(self.samples) > self.params.n

    @property
    def widest(self) -> int:
        """`width` at its beginning."""
        return self.beams.beam_width if self.beams else len(self.samples)

    def chunks(self, budget: int) -> Iterator[tuple[Sample, int]]:
        """(sample, how many tokens it computes next), at most budget tokens in all. The first
        sample stops at the end of the prompt while others wait to fork from it there.
        """
        rooted = self.rooted
        end = len(self.prompt_token_ids) if len(rooted) < len(self.live) else None
        for sample in rooted:
            stop = sample.goal if end is None else end
            count = min(stop - sample.sequence.computed, budget)
            if count > 0:
                budget -= count
                yield sample, count

    def end_of(self, sample: Sample) -> tuple[Status | None, int | None]:
        """How the last token of a sample ends it: (status, stop_reason), (None, None) if not."""
        last, count = sample.token_ids[-1], len(sample.token_ids)
        if last in self.ends and count >= self.params.min_tokens and not self.beams:
            silent = last in self.eos_token_ids and not self.params.ignore_eos
            return Status.FINISHED_STOPPED, None if silent else last
        return (Status.FINISHED_LENGTH, None) if count == self.max_tokens else (None, None)

    def pages(self, page_size: int, length: int) -> int:
        """The most pages its samples can hold together when each is `length` long: full pages of
        the prompt are shared by all, whatever has been forked, swapped or computed again.
        """
        shared = min(len(self.prompt_token_ids), length) // page_size
        return shared + self.width * (-(-length // page_size) - shared)

    def outputs(self) -> list[CompletionOutput]:
        """The n that were asked for: the most probable ones if more are drawn."""
        wanted, samples = self.params.n, self.samples
        if self.finished and not self.beams and len(samples) > wanted:  # beams are in order
            samples = sorted(samples, key=lambda s: (-s.cumulative_logprob, s.index))
        return [s.output() for s in samples[:wanted]]

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            self.prompt_logprobs,
            self.outputs(),
            self.finished,
            self.metrics,
            self.num_cached_tokens,
        )

    def _check(self, vocab_size: int | None) -> None:
        if not self.prompt_token_ids:
            raise ValueError("the prompt is empty: at least one token is needed to continue from")
        for token in (min(self.prompt_token_ids), max(self.prompt_token_ids)):
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise ValueError(f"the prompt holds token {token}; {vocab_size=}")
        if vocab_size is not None:
            self.params.check_vocab(vocab_size)
        if not isinstance(self.priority, int) or abs(self.priority) > MAX_PRIORITY:
            raise ValueError(
                f"priority={self.priority!r:.60} must be a whole number, {-MAX_PRIORITY} to"
                f" {MAX_PRIORITY}"
            )
        late = self.deadline_s
        if late is not None and not (isinstance(late, (int, float)) and math.isfinite(late)):
            raise ValueError(f"deadline_s={late!r:.60} must be a time")


def _as_sampling(params: SamplingParams | BeamSearchParams) -> SamplingParams:
    """What the sampler needs to know of a search: nothing is drawn, so greedy."""
    if isinstance(params, SamplingParams):
        return params
    return SamplingParams(
        n=params.beam_width,
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
    )
