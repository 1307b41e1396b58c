"""A request and its samples: parameters, progress, and outputs."""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from onchip.engine.detokenizer import GrowingText
from onchip.engine.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from onchip.engine.structure.automaton import TokenMatcher
from onchip.engine.structure.compiler import PendingGrammar
from onchip.kvcache.prefix import pack_token_ids

MAX_PRIORITY = 100


class Status(Enum):
    """State of a request or a sample. finish_reason: as in vLLM, None until it has ended."""

    finished: bool

    WAITING = ("waiting", None)
    RUNNING = ("running", None)
    SWAPPED = ("preempted, its pages are on the host", None)
    RECOMPUTE = ("preempted, to be recomputed", None)
    FINISHED_STOPPED = ("stopped", "stop")
    FINISHED_LENGTH = ("at its maximum length", "length")
    FINISHED_ABORTED = ("cancelled", "abort")
    FINISHED_EXPIRED = ("past its deadline", "abort")
    FINISHED_ERROR = ("failed", "error")

    def __init__(self, meaning: str, finish_reason: str | None):
        self.meaning = meaning
        self.finish_reason = finish_reason
        self.finished = finish_reason is not None


class Logprob(NamedTuple):
    """Log probability of a token at a position, and its rank (1: most probable)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class SampledToken(NamedTuple):
    """One row's sampled token with its logprob; top: the most probable tokens if requested, best
    first. Logits with NaN or inf give a logprob that is not finite, which fails this sample alone.
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
    """One continuation. Fields as in vLLM: finish_reason is stop, length, abort, error, or None
    while it grows; stop_reason is the text or token that stopped it, None for eos.
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

    def since(self, chars: int, tokens: int) -> "OutputDelta":
        """The part after this many characters and tokens."""
        tables = None if self.logprobs is None else self.logprobs[tokens:]
        return OutputDelta(self.text[chars:], self.token_ids[tokens:], tables)


class OutputDelta(NamedTuple):
    """The end of a CompletionOutput."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None


class _Snapshot(CompletionOutput):
    """A sample's output at one moment, copied lazily. Texts and lists only grow, so their lengths
    identify the state. Reading everything costs the whole length, reading a delta only the delta: a
    stream costs time linear in its length. Pickles and copies are plain CompletionOutputs.
    """

    _grown: tuple[GrowingText, list[int], list[dict[int, Logprob]] | None]
    _lengths: tuple[int, int]  # of text and token_ids

    @classmethod
    def of(cls, sample: "Sample") -> "_Snapshot":
        self, has_logprobs = cls.__new__(cls), sample.request.params.logprobs is not None
        vars(self).update(
            index=sample.index,
            cumulative_logprob=sample.cumulative_logprob,
            finish_reason=sample.status.finish_reason,
            stop_reason=sample.stop_reason,
            _grown=(sample.text, sample.token_ids, sample.logprobs if has_logprobs else None),
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

    def since(self, chars: int, tokens: int) -> OutputDelta:
        text, ids, tables = self._grown
        new = slice(tokens, self._lengths[1])
        shown = text.part(chars, self._lengths[0])
        return OutputDelta(shown, tuple(ids[new]), None if tables is None else tables[new])

    def __reduce__(self) -> tuple:
        return CompletionOutput, tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class RequestMetrics:
    """Times on the scheduler's clock in seconds, and the number of preemptions."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A request and its continuations so far. Fields as in vLLM."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    embedding: array | None = None  # fp32, norm 1: of a finished request with PoolingParams


@dataclass(eq=False, slots=True)
class Sample:
    """One continuation of a request.

    sequence: its sequence in the cache; None while it waits, after its pages were freed, and until
    it forks from the first sample at the end of the prompt. candidates: next tokens of a beam that
    waits for the other beams. pending: tokens sampled but not known on the host yet; row: position
    of the last one among its step's rows. rng_key: key of its random numbers. detokenizer: builds
    `text` while tokens arrive; has_full_text: `text` is complete. matcher: its position in the
    request's grammar. Speculation: draft_period: steps from one attempt to the next; packed_tokens:
    bytes in which n-grams are looked up; accepted_logprobs: `cumulative_logprob` after each token
    of the last verified chunk.
    """

    request: "Request"
    index: int
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text: GrowingText = field(default_factory=GrowingText)
    stop_reason: int | str | None = None
    end: Status | None = None
    sequence: Any = None
    candidates: tuple[tuple[int, float], ...] = ()
    pending: int = 0
    row: int = 0
    rng_key: int = 0
    detokenizer: Any = None
    has_full_text: bool = False
    matcher: TokenMatcher | None = None
    draft_period: int = 1
    packed_tokens: bytearray = field(default_factory=bytearray)
    accepted_logprobs: list[float] = field(default_factory=list)

    def row_after(self, drafts: Sequence[int]) -> "Sample":
        """The sample as if these drafts were its last tokens, for the sampler. After a draft that
        its grammar does not allow, any token may follow: that draft is never accepted.
        """
        ids = [*self.token_ids, *drafts]
        matcher = None if self.matcher is None else self.matcher.after(drafts)
        return Sample(self.request, self.index, ids, rng_key=self.rng_key, matcher=matcher)

    @property
    def status(self) -> Status:
        return self.end or self.request.status

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation, including pending ones."""
        return len(self.token_ids) + self.pending

    @property
    def length(self) -> int:
        """All tokens, including the prompt and pending ones."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) + self.pending

    @property
    def target_length(self) -> int:
        """Tokens to compute. The last possible token is never computed: nothing follows it."""
        request = self.request
        count = min(len(self.token_ids) + self.pending, request.max_tokens - 1)
        return len(request.prompt_token_ids) + count

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens of prompt and continuation at positions start to stop - 1."""
        prompt = self.request.prompt_token_ids
        if start >= len(prompt):
            return self.token_ids[start - len(prompt) : stop - len(prompt)]
        return [*prompt[start:stop], *self.token_ids[: max(0, stop - len(prompt))]]

    def append(self, sampled: SampledToken) -> None:
        """Append a sampled token, and set `end` if it is the last one."""
        if self.pending:
            self.pending -= 1
        if not math.isfinite(sampled.logprob):
            self.finish(Status.FINISHED_ERROR, "the logits are not finite")
            return
        if self.matcher is not None:
            self.matcher.consume(sampled.token)
            if self.matcher.error is not None:
                self.finish(Status.FINISHED_ERROR, self.matcher.error)
                return
        request, token_ids = self.request, self.token_ids
        token_ids.append(sampled.token)
        self.cumulative_logprob += sampled.logprob
        if request.params.logprobs is not None:
            self.logprobs.append(sampled.logprobs())
        if sampled.token in request.end_token_ids or len(token_ids) == request.max_tokens:
            end, reason = request.find_end(self)
            if end is not None:
                self.finish(end, reason)

    def append_accepted(self, sampled: Sequence[SampledToken]) -> int:
        """Append the tokens of a verified chunk until the sample ends. Return their number."""
        before = len(self.token_ids)
        self.accepted_logprobs.clear()
        for token in sampled:
            self.append(token)
            if self.end is not Status.FINISHED_ERROR:
                self.accepted_logprobs.append(self.cumulative_logprob)
            if self.end is not None:
                break
        return len(self.token_ids) - before

    def drop_after(self, num_tokens: int) -> None:
        """Drop the tokens after the first num_tokens, which must be of the last verified chunk: a
        stop string ended before them.
        """
        if dropped := len(self.token_ids) - num_tokens:
            self.cumulative_logprob = self.accepted_logprobs[-1 - dropped]
            del self.token_ids[num_tokens:], self.logprobs[num_tokens:]

    def finish(self, end: Status, stop_reason: int | str | None = None) -> None:
        """Mark the sample as ended. Tokens still pending are dropped."""
        self.end, self.stop_reason, self.pending = end, stop_reason, 0

    def output(self) -> CompletionOutput:
        return _Snapshot.of(self)


class Request:
    """A prompt, its parameters, and its samples.

    priority: -100 to 100, lower is more urgent. deadline_s: time on the scheduler's clock at which
    the request is cut off. salt: prefixes are shared only between requests with the same salt.
    eos_token_ids: end a sample unless params.ignore_eos. rng_seed: used unless params.seed is set.
    needs_tokens: the next step depends on the values of sampled tokens (beams, penalties, a
    grammar). grammar: what its texts follow; until it is ready, the request waits. pooling: of a
    request that has an embedding and samples nothing; pooled: the sum of its hidden states, at
    the end the embedding; num_pooled: hidden states of steps launched so far that it consists of.
    """

    beams: BeamSearchParams | None
    pooling: PoolingParams | None
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    priority: int
    deadline_s: float | None
    salt: str
    eos_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    rng_seed: int
    needs_tokens: bool
    samples: list[Sample]
    single_sample: Sample | None
    max_tokens: int
    metrics: RequestMetrics

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        rng_seed: int = 0,
    ):
        params = params or SamplingParams()
        self.pooling = params if isinstance(params, PoolingParams) else None
        self.params = _as_sampling(params)
        self.beams = params if isinstance(params, BeamSearchParams) else self.params.beams
        self.request_id = request_id
        self.prompt_token_ids = tuple(pack_token_ids(prompt_token_ids))
        self.priority, self.deadline_s, self.salt = priority, deadline_s, salt
        self.eos_token_ids = frozenset(eos_token_ids)
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.end_token_ids = eos | frozenset(self.params.stop_token_ids)  # tokens that end a sample
        self.rng_seed = rng_seed if self.params.seed is None else self.params.seed
        self.needs_tokens = bool(self.beams or self.params.has_penalties or self.params.grammar)
        self.grammar: PendingGrammar | None = None
        self._check(vocab_size)
        self.status = Status.WAITING
        self.error: str | None = None
        self.samples = [
            Sample(self, i) for i in range(1 if self.beams else self.params.num_samples)
        ]
        self.single_sample = self.samples[0] if len(self.samples) == 1 and not self.beams else None
        self.max_tokens = self.params.max_tokens or 0  # 0: set by the scheduler
        self.host_group: Any = None  # its sequences on the host while SWAPPED
        self.offload_pages = 0  # to reserve in host memory; set by the scheduler
        self.order_key: tuple[float, int] = (0.0, 0)  # position in both queues, set once
        self.prompt: str | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0
        self.pooled: array | None = None
        self.num_pooled = 0
        self.metrics = RequestMetrics(0.0)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {len(self.samples)} samples)"

    @property
    def finished(self) -> bool:
        return self.status.finished

    @property
    def unfinished(self) -> list[Sample]:
        """Samples that have not ended."""
        return [s for s in self.samples if s.end is None]

    @property
    def resident(self) -> list[Sample]:
        """Unfinished samples that have a sequence."""
        return [s for s in self.samples if s.end is None and s.sequence is not None]

    @property
    def num_seqs(self) -> int:
        """Rows of a batch that it may take."""
        return self.beams.beam_width if self.beams else len(self.unfinished)

    @property
    def is_ranked_at_end(self) -> bool:
        """The returned samples are chosen when the request ends (beam search, best_of)."""
        return bool(self.beams) or len(self.samples) > self.params.n

    @property
    def takes_drafts(self) -> bool:
        """Its drafts can be verified: not those of a beam search, which samples nothing, nor those
        of a long request, which the cache of a draft model cannot hold.
        """
        return not self.beams and not self.is_long

    @property
    def is_long(self) -> bool:
        """It is longer than the pool, and reserves host memory."""
        return self.offload_pages > 0

    @property
    def max_length(self) -> int:
        """The most tokens of a sample, prompt included. An embedding adds none."""
        return len(self.prompt_token_ids) + (self.max_tokens if self.pooling is None else 0)

    @property
    def max_computed(self) -> int:
        """The most tokens that are computed: not the last one that is generated."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def max_seqs(self) -> int:
        """`num_seqs` at the start."""
        return self.beams.beam_width if self.beams else len(self.samples)

    def start_matchers(self) -> None:
        """Begin to follow the grammar, once it is ready. Preempted samples keep their matchers."""
        for sample in self.samples if self.grammar is not None else ():
            if sample.matcher is None:
                sample.matcher = self.grammar.make_matcher()

    def next_tokens(self, budget: int) -> Iterator[tuple[Sample, int]]:
        """(sample, number of tokens to compute next), at most budget tokens in total. While other
        samples wait to fork, the first sample stops at the end of the prompt.
        """
        resident = self.resident
        end = len(self.prompt_token_ids) if len(resident) < len(self.unfinished) else None
        for sample in resident:
            stop = sample.target_length if end is None else end
            count = min(stop - sample.sequence.computed, budget)
            if count > 0:
                budget -= count
                yield sample, count

    def find_end(self, sample: Sample) -> tuple[Status | None, int | None]:
        """(status, stop_reason) if the last token ends the sample, otherwise (None, None)."""
        last, count = sample.token_ids[-1], len(sample.token_ids)
        if last in self.end_token_ids and count >= self.params.min_tokens and not self.beams:
            silent = last in self.eos_token_ids and not self.params.ignore_eos
            return Status.FINISHED_STOPPED, None if silent else last
        return (Status.FINISHED_LENGTH, None) if count == self.max_tokens else (None, None)

    def pages(self, page_size: int, length: int) -> int:
        """The most pages that all samples can hold at this length. Full pages of the prompt are
        shared by all samples in every state: forked, swapped or recomputed.
        """
        shared = min(len(self.prompt_token_ids), length) // page_size
        return shared + self.num_seqs * (-(-length // page_size) - shared)

    def outputs(self) -> list[CompletionOutput]:
        """The n outputs; with best_of the most probable ones."""
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
            self.pooled if self.status is Status.FINISHED_STOPPED else None,
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


def _as_sampling(params: SamplingParams | BeamSearchParams | PoolingParams) -> SamplingParams:
    """Greedy sampling parameters for a beam search and for an embedding, which sample nothing."""
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, PoolingParams):
        return SamplingParams(temperature=0.0, max_tokens=1)
    return SamplingParams(
        n=params.beam_width,
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
    )
