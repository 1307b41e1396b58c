"""The OpenAI API as types: requests and responses.

Types are strict and unknown fields are rejected, as OpenAI does. A field that this server cannot
honour accepts only the value that means "off"; a field that changes no response is accepted and
ignored. The bounds here are for the schema; SamplingParams checks them again. A long list stops at
its first error (`fail_fast`): pydantic would write an error for each of its values.

The description of a field completes the sentence of validation_errors.py, "x=5 is not served: send
...".
"""

import json
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from onchip.engine import sampling_params as bounds
from onchip.engine.chat_template import RESERVED
from onchip.engine.request import MAX_PRIORITY
from onchip.engine.sampling_params import SamplingParams

from .structured_fields import StructuredFields, has_structure
from .tools import DIALECTS, Dialect
from .tools.choice import ToolChoice, read_choice

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_DEADLINE_S = 86_400.0
MAX_TOOL_CALLS = 128
MAX_VARIABLES = 64
MAX_DETOKENIZED = 1 << 20

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=bounds.MAX_STOP_CHARS)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=bounds.MAX_BIASES),
]
ToolName = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
Label = Annotated[str, Field(max_length=1024)]  # accepted and ignored
Nothing = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)]
Absent = Annotated[Nothing | None, Field(description="null, or leave it out")]
Off = Annotated[Literal[False] | None, Field(description="false, or leave it out")]


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(StrictModel):
    """continuous_usage_stats: as in vLLM, every chunk has the usage so far, and so has the last."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    def check(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage: true")


class UsageReports(NamedTuple):
    """The usage in a stream. at_end: a last chunk has it. in_chunks: so has every chunk."""

    at_end: bool = False
    in_chunks: bool = False


class CallFields(StrictModel):
    """Fields of every call of the engine. Beyond OpenAI's: cache_salt as in vLLM; priority (0 to
    100, more is less urgent) and deadline_s (seconds from now).
    """

    model: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = None
    user: Label | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    def derive_salt(self, salt: bytes) -> bytes:
        """The salt of the request's pages: from the caller's key and from cache_salt."""
        return salt + sha256(self.cache_salt.encode()).digest() if self.cache_salt else salt


class SamplingFields(CallFields, StructuredFields):
    """Fields of both completions and chats. Beyond OpenAI's: top_k, min_p, repetition_penalty,
    min_tokens, ignore_eos, stop_token_ids as in vLLM.
    """

    n: Annotated[int, Field(ge=1, le=bounds.MAX_SAMPLES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=bounds.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=bounds.MAX_STOPS)] | None,
        Field(description="a text of 1 to 256 characters, or a list of up to 16 of them"),
    ] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=bounds.MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logit_bias: Annotated[
        Biases | None,
        Field(description='an object of up to 300 entries as "50256": -100, of -100 to 100'),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Label | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # for Python tokenizers only
    add_special_tokens: bool | None = None
    include_stop_str_in_output: Off = None
    return_token_ids: Off = None
    return_tokens_as_token_ids: Off = None
    allowed_token_ids: Absent = None
    bad_words: Absent = None
    logits_processors: Absent = None
    truncate_prompt_tokens: Absent = None
    kv_transfer_params: Absent = None
    vllm_xargs: Absent = None

    @property
    def usage_reports(self) -> UsageReports:
        options = self.stream_options or StreamOptions()
        return UsageReports(options.include_usage, bool(options.continuous_usage_stats))

    def make_params(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """Convert to the engine's parameters. ValueError: fields contradict one another."""
        if self.stream_options is not None:
            self.stream_options.check()
        fields = {name: getattr(self, name) for name in _PASSED_ON}
        fields["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        fields |= self.structure()
        fields = {name: value for name, value in (fields | more).items() if value is not None}
        return SamplingParams(**fields, max_tokens=max_tokens)


_PASSED_ON = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    "skip_special_tokens",
)


class CompletionRequest(SamplingFields):
    """POST /v1/completions. max_tokens 0 with echo scores the prompt. use_beam_search and
    length_penalty as in vLLM.
    """

    prompt: Annotated[
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)],
        Field(description="a text, a list of token ids, or a list of up to 128 of either"),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    best_of: Annotated[int, Field(ge=1, le=bounds.MAX_SAMPLES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=bounds.MAX_LOGPROBS)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    suffix: Annotated[Literal[""] | None, Field(description='"", or leave it out')] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        several = not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # pyright: ignore

    @property
    def scores_only(self) -> bool:
        """Nothing is generated."""
        return self.max_tokens == 0

    def params(self) -> SamplingParams:
        if self.scores_only and not self.echo:
            raise ValueError("max_tokens=0 needs echo: otherwise the response would be empty")
        if self.echo and self.use_beam_search:
            raise ValueError("echo has no meaning for use_beam_search")
        return self.make_params(
            # Scoring computes the prompt and samples one token, which is not shown.
            1 if self.scores_only else self.max_tokens,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            use_beam_search=self.use_beam_search,
            length_penalty=self.length_penalty,
        )


class TextPart(StrictModel):
    type: Annotated[Literal["text"], Field(description='"text": images and audio are not')]
    text: str
    cache_control: dict[str, Any] | None = None  # for other servers; here all prefixes are cached
    prompt_cache_breakpoint: Any = None


class FunctionCall(StrictModel):
    name: Annotated[str, Field(max_length=256)]
    arguments: str

    @property
    def plain(self) -> dict[str, Any]:
        """Templates write arguments as JSON themselves, so they need an object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.arguments  # not JSON: keep the text
        return {"name": self.name, "arguments": arguments}


class ToolCall(StrictModel):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    @property
    def plain(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.plain}


Parts = Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ChatMessage(StrictModel):
    """Also accepts messages that clients send back from a response, with all fields of a
    response.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        Field(description='"system", "developer", "user", "assistant" or "tool"'),
    ]
    content: Annotated[
        str | Parts | None, Field(description="a text, or a list of parts of type text")
    ] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None
    audio: Absent = None
    function_call: Absent = None

    @property
    def plain(self) -> dict[str, Any]:
        """The message for chat templates. Most templates do not know the role developer, the new
        name of system. A null content becomes empty: a template would write "None".
        """
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.plain for call in self.tool_calls]
        return message

    def check(self) -> None:
        called = self.role == "assistant" and (self.tool_calls or self.refusal)
        if self.content is None and not called:
            raise ValueError(
                f"a message of role {self.role} has no content: only an assistant's that has"
                " tool_calls may be without"
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs tool_call_id, the call that it answers")


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class FunctionDefinition(StrictModel):
    """strict is accepted and has no effect: forced calls follow the schema, others may not."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(StrictModel):
    name: Annotated[str, Field(max_length=256)]


class NamedTool(StrictModel):
    type: Literal["function"] = "function"
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


class Conversation(StrictModel):
    """Input of a chat template. chat_template_kwargs: further template variables.
    add_generation_prompt: true unless continue_final_message is set, with which the model continues
    the last message.
    """

    messages: Annotated[
        Messages,
        Field(description=f"a list of 1 to {MAX_MESSAGES} messages with role and content"),
    ]
    tools: Annotated[
        Tools | None, Field(description="a list of up to 128 tools of type function")
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[dict[Annotated[str, Field(max_length=256)], Any], Field(max_length=MAX_VARIABLES)]
        | None
    ) = None
    chat_template: Absent = None
    mm_processor_kwargs: Absent = None

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        for message in self.messages:
            message.check()
        return [message.plain for message in self.messages]

    def variables(self) -> dict[str, Any]:
        """As for chat.render_template."""
        variables = dict(self.chat_template_kwargs or {})
        if taken := RESERVED & set(variables):
            raise ValueError(f"chat_template_kwargs cannot set {min(taken)}: it is a field")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt begins a message, continue_final_message continues the"
                " last: give one"
            )
        return variables | {
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": bool(self.continue_final_message),
        }


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingFields, Conversation):
    """POST /v1/chat/completions: text and tool calls."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=bounds.MAX_LOGPROBS)] | None = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None,
        Field(description='["text"], or leave it out'),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        Field(description='"none", "auto", "required", or an object that names a function'),
    ] = None
    parallel_tool_calls: bool | None = None
    functions: Absent = None
    function_call: Annotated[
        Literal["none"] | None, Field(description='"none", or leave it out')
    ] = None
    reasoning_effort: Effort | None = None
    verbosity: Annotated[
        Literal["medium"] | None, Field(description='"medium", or leave it out')
    ] = None
    metadata: dict[str, Any] | None = None
    store: Off = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, Field(description='"auto", or leave it out')
    ] = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: Label | None = None
    audio: Absent = None
    prediction: Absent = None
    moderation: Absent = None
    web_search_options: Absent = None
    echo: Off = None
    include_reasoning: Annotated[
        Literal[True] | None, Field(description="true, or leave it out")
    ] = None
    prompt_logprobs: Absent = None
    documents: Absent = None

    def variables(self) -> dict[str, Any]:
        """A template that does not use reasoning_effort ignores it."""
        variables = super().variables()
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables

    def read_tools(self) -> ToolChoice | None:
        """The tools that the model may call; None if it may call none."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = choice.model_dump()
        tools = [tool.function.model_dump() for tool in self.tools or ()]
        return read_choice(tools, choice, self.parallel_tool_calls)

    def params(self, dialect: Dialect = DIALECTS["plain"]) -> SamplingParams:
        """dialect: how the model writes calls of tools."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        more: dict[str, Any] = {"logprobs": self._num_logprobs()}
        if tools := self.read_tools():
            if has_structure(self.structure()):
                raise ValueError(
                    "tools and a format of the text are not served together: leave one out, or"
                    ' send tool_choice "none"'
                )
            if tools.is_forced:
                more["structured_outputs"] = {"grammar": tools.make_grammar(dialect)}
            elif dialect.shows_special:
                more["skip_special_tokens"] = False
        return self.make_params(self._max_tokens(), **more)

    def _max_tokens(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is the old name of max_completion_tokens: give one")
        return self.max_completion_tokens or self.max_tokens

    def _num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(StrictModel):
    """POST /tokenize, as in vLLM: a prompt, or a conversation as for chats."""

    model: Label | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @property
    def conversation(self) -> Conversation | None:
        """None if a prompt is given."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt, a text, or messages, a conversation: one of them")
        if self.messages is None:
            return None
        names = set(Conversation.model_fields) & set(TokenizeRequest.model_fields)
        return Conversation.model_construct(**{name: getattr(self, name) for name in names})


class DetokenizeRequest(StrictModel):
    """POST /detokenize, as in vLLM."""

    model: Label | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZED, fail_fast=True)]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """Logprobs of /v1/completions: one list per property; None where a first token has none."""

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
    """A whole completion, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CalledFunction(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallPart(TypedDict, total=False):
    """A call, or the next part of one in a stream."""

    index: int
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict, total=False):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallPart]


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    stop_reason: int | str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallPart]


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(BaseModel):
    """A chunk of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "onchip"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail
