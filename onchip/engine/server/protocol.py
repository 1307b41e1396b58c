"""The OpenAI API as types: what may be asked, and what is answered.

Types are strict and unknown fields are refused, as OpenAI does. A field that this server cannot
honour takes only the value that means "not wanted"; one that changes no answer is accepted and
unused. The bounds stand here for the schema; SamplingParams has the last word. A long list stops at
its first error (`fail_fast`): pydantic would write an error for each of its values.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from onchip.engine import params as bounds
from onchip.engine.params import SamplingParams
from onchip.engine.request import MAX_PRIORITY

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_DEADLINE_S = 86_400.0

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=bounds.MAX_STOP_CHARS)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class Sampling(Strict):
    """What completions and chats have in common. Beyond OpenAI's: top_k, min_p,
    repetition_penalty, min_tokens, ignore_eos, stop_token_ids as vLLM names them; priority (0 to
    100, more is less urgent) and deadline_s (seconds from now).
    """

    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=bounds.MAX_SAMPLES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=bounds.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=bounds.MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=bounds.MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=bounds.MAX_BIASES),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """As the engine takes it; ValueError if fields contradict one another."""
        asked = {name: getattr(self, name) for name in _PASSED_ON}
        asked["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        asked = {name: value for name, value in (asked | more).items() if value is not None}
        return SamplingParams(**asked, max_tokens=max_tokens)


_PASSED_ON = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
)


class CompletionRequest(Sampling):
    """POST /v1/completions. max_tokens 0 with echo scores the prompt. use_beam_search and
    length_penalty as vLLM names them.
    """

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    best_of: Annotated[int, Field(ge=1, le=bounds.MAX_SAMPLES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=bounds.MAX_LOGPROBS)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        several = not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # pyright: ignore

    @property
    def scores_only(self) -> bool:
        """Nothing is to be generated."""
        return self.max_tokens == 0

    def params(self) -> SamplingParams:
        if self.scores_only and not self.echo:
            raise ValueError("max_tokens=0 needs echo: otherwise there is nothing to answer")
        if self.echo and self.use_beam_search:
            raise ValueError("echo has no meaning for use_beam_search")
        return self.sampling(
            # The prompt is scored by computing it, and that draws one token, which is not shown.
            1 if self.scores_only else self.max_tokens,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            use_beam_search=self.use_beam_search,
            length_penalty=self.length_penalty,
        )


class TextPart(Strict):
    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    name: Annotated[str, Field(max_length=256)] | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates take it; most know no developer, which is the new name of system."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class TextFormat(Strict):
    type: Literal["text"]


class ChatRequest(Sampling):
    """POST /v1/chat/completions: text alone, no tools."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=bounds.MAX_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self.sampling(self._max_tokens(), logprobs=self._num_logprobs())

    def _max_tokens(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is the old name of max_completion_tokens: give one")
        return self.max_completion_tokens or self.max_tokens

    def _num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """Of /v1/completions: a list for each thing to know; None where a first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


class Completion(BaseModel):
    """Whole, or a piece of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Reply(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: Reply
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None


class Chat(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


class ChatChunk(BaseModel):
    """A piece of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "onchip"
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail
