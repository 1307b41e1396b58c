"""Parameters of a request. All are checked when the object is made: every value can be served as it
is, and no number is clipped, rounded or ignored.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from onchip.engine.structure.grammar import Grammar, StructuredOutputsParams, parse_grammar

MAX_SAMPLES = 128  # n, best_of, beam_width: each sample holds pages and a row of the batch
MAX_STOPS = 16  # each is searched for in every new piece of text
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 128
MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_TEMPERATURE = 2.0
POOLINGS = ("last", "mean")
MIN_TEMPERATURE = 1e-20  # smaller values could underflow in fp32; 0 is greedy


@dataclass(frozen=True)
class BeamSearchParams:
    """Search for the most probable continuations, beam_width at a time.

    The score of a continuation is cumulative_logprob / (generated tokens ** length_penalty).
    temperature divides the logits (0 as 1: the model's own probabilities).
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_integer("beam_width", self.beam_width, 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        _check_flag("ignore_eos", self.ignore_eos)
        _check_temperature(self.temperature)
        _check_number("length_penalty", self.length_penalty, -10, 10)


@dataclass(frozen=True)
class PoolingParams:
    """A request for the embedding of its prompt: nothing is sampled. pooling: "last", the hidden
    state of the last token, or "mean", of all tokens; the vector has the norm 1.
    """

    pooling: str = "last"

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"pooling={_shorten(self.pooling)} is not one of {', '.join(POOLINGS)}"
            )

    @property
    def num_samples(self) -> int:
        return 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, and when a request ends. Names and meanings are vLLM's.

    best_of: sample this many continuations and return the n most probable. use_beam_search: search
    with best_of (or n) beams instead of sampling. temperature 0 is greedy. top_k 0 or -1, top_p 1
    and min_p 0 are off. max_tokens None: up to the model's limit. stop_token_ids end a sample as
    eos does; ignore_eos ignores eos but not them; before min_tokens neither is sampled. logprobs k:
    of the k most probable tokens and of the sampled one. logit_bias: added to the logits of these
    token ids. seed: the same tokens for the same seed, in any batch. skip_special_tokens: False
    writes special tokens into the text. response_format (OpenAI's) or structured_outputs (vLLM's;
    an object or its fields): every text that ends by itself follows this format.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    use_beam_search: bool = False
    length_penalty: float = 1.0
    skip_special_tokens: bool = True
    response_format: Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_shape_of_distribution()
        self._check_ends()
        self._check_bias()
        self._check_structure()
        if self.use_beam_search:
            self._check_beams()

    @property
    def num_samples(self) -> int:
        return self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Earlier tokens change the logits."""
        counted = self.presence_penalty or self.frequency_penalty
        return bool(counted or self.repetition_penalty != 1)

    @cached_property
    def edits_logits(self) -> bool:
        """Single logits may be changed."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens or self.grammar)

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the text must follow; None: it is free."""
        return parse_grammar(self.response_format, self.structured_outputs)

    @property
    def beams(self) -> BeamSearchParams | None:
        """The parameters of the search if use_beam_search is set."""
        if not self.use_beam_search:
            return None
        return BeamSearchParams(
            self.num_samples, self.max_tokens, self.ignore_eos, 0.0, self.length_penalty
        )

    def check_vocab(self, vocab_size: int) -> None:
        """Every token id must be in the vocabulary."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise ValueError(f"{name} names token {token}; {vocab_size=}")

    def _check_counts(self) -> None:
        _check_integer("n", self.n, 1, MAX_SAMPLES)
        if self.best_of is not None:
            _check_integer("best_of", self.best_of, self.n, MAX_SAMPLES)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_shape_of_distribution(self) -> None:
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_temperature(self.temperature)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p=0 keeps no token: it must be above 0, and at most 1")
        _check_integer("top_k", self.top_k, -1)
        _check_number("min_p", self.min_p, 0, 1)

    def _check_ends(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        _check_max_entries("stop", stop, MAX_STOPS)
        for text in stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise ValueError(
                    f"every stop must be a text of 1 to {MAX_STOP_CHARS} characters, one is"
                    f" {_shorten(text)}"
                )
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        _check_max_entries("stop_token_ids", ids, MAX_STOP_TOKENS)
        for token in ids:
            _check_integer("a token id of stop_token_ids", token, 0)
        _check_flag("ignore_eos", self.ignore_eos)
        _check_flag("skip_special_tokens", self.skip_special_tokens)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias or {}, Mapping):
            raise ValueError(
                f"logit_bias={_shorten(self.logit_bias)} must map token ids to numbers"
            )
        bias = dict(self.logit_bias or {})
        object.__setattr__(self, "logit_bias", bias)
        _check_max_entries("logit_bias", bias, MAX_BIASES)
        for token, value in bias.items():
            _check_integer("a token id of logit_bias", token, 0)
            _check_number(f"logit_bias[{token}]", value, -100, 100)

    def _check_structure(self) -> None:
        """A grammar decides where a text may end."""
        if self.grammar is None:
            return
        for name in ("ignore_eos", "min_tokens", "use_beam_search"):
            if getattr(self, name):
                raise ValueError(f"{name} is not served with structured output: leave one out")

    def _check_beams(self) -> None:
        _check_number("length_penalty", self.length_penalty, -10, 10)
        plain = SamplingParams()
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value != getattr(plain, name):
                raise ValueError(
                    f"use_beam_search follows the model's own probabilities: {name}={value} has"
                    " no meaning for it"
                )
        if self.temperature not in (0, 1):
            raise ValueError(
                f"use_beam_search takes temperature 0 or 1, not {self.temperature}; see"
                " BeamSearchParams"
            )


_NOT_WITH_BEAMS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "stop",
)


def _check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}={_shorten(value)} must be a whole number, {bounds}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not low <= value <= high:  # NaN fails too: all comparisons are False
        raise ValueError(f"{name}={_shorten(value)} must be a number from {low} to {high}")


def _check_temperature(value: Any) -> None:
    _check_number("temperature", value, 0, MAX_TEMPERATURE)
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"temperature={value} must be 0 (greedy) or at least {MIN_TEMPERATURE}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={_shorten(value)} must be True or False")


def _as_tuple(name: str, value: object) -> tuple:
    """None becomes an empty tuple."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={_shorten(value)} must be a list")
    return tuple(value)


def _check_max_entries(name: str, entries: Sequence | Mapping, max_entries: int) -> None:
    if len(entries) > max_entries:
        raise ValueError(f"{name} has {len(entries)} entries, at most {max_entries} are served")


def _shorten(value: object) -> str:
    """A value for an error message: a client may have sent megabytes."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"(a number of {value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
