"""The schema of /v1/responses: its request, the items of input and output, and the response.

A request becomes a chat: instructions are its system message, and items of calls are messages with
tool_calls and of role tool. Nothing is stored, so a conversation is sent whole each time.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from onchip.engine import sampling_params as bounds

from .protocol import (
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_VARIABLES,
    Absent,
    CallFields,
    ChatMessage,
    ChatRequest,
    Effort,
    FunctionCall,
    FunctionDefinition,
    Label,
    NamedFunction,
    NamedTool,
    Off,
    StrictModel,
    Tool,
    ToolCall,
    ToolName,
)
from .structured_fields import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat

Name = Annotated[str, Field(max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ItemPart(StrictModel):
    """A text of a message or of the output of a call. annotations and logprobs are fields of
    responses that clients send back.
    """

    type: Annotated[
        Literal["input_text", "output_text"],
        Field(description='"input_text" or "output_text": images, files and refusals are not'),
    ]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


ItemParts = Annotated[list[ItemPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def _join(content: str | list[ItemPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        Field(description='"system", "developer", "user" or "assistant"'),
    ]
    content: Annotated[
        str | ItemParts,
        Field(description="a text, or a list of parts of type input_text or output_text"),
    ]
    id: Name | None = None
    status: ItemStatus | None = None
    phase: Name | None = None


class FunctionCallItem(StrictModel):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    status: ItemStatus | None = None
    caller: Absent = None
    namespace: Absent = None


class FunctionOutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: Name
    output: Annotated[
        str | ItemParts, Field(description="a text, or a list of parts of type input_text")
    ]
    id: Name | None = None
    status: ItemStatus | None = None
    caller: Absent = None
    name: Name | None = None
    namespace: Absent = None


def _type_of(item: Any) -> str:
    """A message may leave its type out."""
    given = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return given if isinstance(given, str) else ""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_type_of),
]


class SchemaFormat(JsonSchema):
    """A json_schema of chats, without the object around it."""

    type: Literal["json_schema"]


class TextConfig(StrictModel):
    format: Annotated[
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None,
        Field(description="an object of type text, json_object or json_schema"),
    ] = None
    verbosity: Annotated[
        Literal["medium"] | None, Field(description='"medium", or leave it out')
    ] = None


class ReasoningConfig(StrictModel):
    """effort: a variable of the chat template."""

    effort: Effort | None = None
    summary: Absent = None
    generate_summary: Absent = None


class FunctionTool(StrictModel):
    """As `Tool` of chats, without the object around the function."""

    type: Annotated[Literal["function"], Field(description='"function": other tools are not')]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Absent = None
    defer_loading: Off = None
    output_schema: Absent = None


class NamedFunctionTool(StrictModel):
    type: Literal["function"]
    name: Name


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None


class ResponsesRequest(CallFields):
    """POST /v1/responses: a text or tool calls. Beyond OpenAI's: seed, top_k and
    chat_template_kwargs as for chats.
    """

    input: Annotated[
        str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)],
        Field(
            description=f"a text, or a list of up to {MAX_MESSAGES} items of type message,"
            " function_call or function_call_output"
        ),
    ]
    instructions: Annotated[str | None, Field(description="a text, or leave it out")] = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=bounds.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    text: TextConfig | None = None
    tools: Annotated[
        Annotated[list[FunctionTool], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None,
        Field(description="a list of up to 128 tools of type function"),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunctionTool | None,
        Field(description='"none", "auto", "required", or an object that names a function'),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=MAX_VARIABLES)] | None = None
    metadata: Annotated[
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None,
        Field(description="an object of up to 16 texts of 512 characters"),
    ] = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: Label | None = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, Field(description='"auto", or leave it out')
    ] = None
    store: Annotated[
        Literal[False] | None,
        Field(description="false, or leave it out: nothing is stored"),
    ] = None
    truncation: Annotated[
        Literal["disabled"] | None, Field(description='"disabled", or leave it out')
    ] = None
    top_logprobs: Annotated[
        Literal[0] | None, Field(description="0, or leave it out: chats have logprobs")
    ] = None
    background: Off = None
    previous_response_id: Annotated[
        Absent, Field(description="null, and the whole conversation as input: nothing is stored")
    ] = None
    conversation: Annotated[
        Absent, Field(description="null, and the whole conversation as input: nothing is stored")
    ] = None
    include: Absent = None
    max_tool_calls: Absent = None
    prompt: Absent = None
    context_management: Absent = None
    moderation: Absent = None
    access_programs: Absent = None
    image: Absent = None

    def make_chat(self) -> ChatRequest:
        """The same request as a chat. Its parts are validated, so nothing is validated again."""
        effort = None if self.reasoning is None else self.reasoning.effort
        choice = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = NamedTool(function=NamedFunction(name=choice.name))
        return ChatRequest.model_construct(
            messages=list(self._messages()),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            response_format=self._make_format(),
            tools=[_as_chat_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _make_format(self) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
        chosen = None if self.text is None else self.text.format
        if not isinstance(chosen, SchemaFormat):
            return chosen
        schema = chosen.model_dump(exclude={"type"}, by_alias=True)
        return JsonSchemaFormat.model_validate({"type": "json_schema", "json_schema": schema})

    def _messages(self) -> Iterator[ChatMessage]:
        if self.instructions is not None:
            yield ChatMessage(role="system", content=self.instructions)
        if isinstance(self.input, str):
            yield ChatMessage(role="user", content=self.input)
            return
        if not self.input:
            raise ValueError("input has no items: send at least one")
        yield from _as_messages(self.input)


def _as_chat_tool(tool: FunctionTool) -> Tool:
    fields = {name: getattr(tool, name) for name in FunctionDefinition.model_fields}
    return Tool.model_construct(function=FunctionDefinition.model_construct(**fields))


def _as_messages(items: list[InputItem]) -> Iterator[ChatMessage]:
    """Calls that follow one another, or a message of the assistant, belong to one message: chat
    templates expect it.
    """
    calls: list[ToolCall] | None = None  # of the last message, if it may have more
    for item in items:
        if isinstance(item, FunctionCallItem):
            if calls is None:
                message, calls = _assistant("")
                yield message
            calls.append(_as_tool_call(item))
            continue
        calls = None
        if isinstance(item, FunctionOutputItem):
            yield ChatMessage(role="tool", content=_join(item.output), tool_call_id=item.call_id)
        elif item.role == "assistant":
            message, calls = _assistant(_join(item.content))
            yield message
        else:
            yield ChatMessage(role=item.role, content=_join(item.content))


def _assistant(content: str) -> tuple[ChatMessage, list[ToolCall]]:
    """A message, and the list of its calls."""
    message = ChatMessage(role="assistant", content=content)
    message.tool_calls = calls = []
    return message, calls


def _as_tool_call(item: FunctionCallItem) -> ToolCall:
    function = FunctionCall(name=item.name, arguments=item.arguments)
    return ToolCall(id=item.call_id, function=function)


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputFunctionCall(BaseModel):
    type: Literal["function_call"] = "function_call"
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputFunctionCall


class ResponseTokenDetails(BaseModel):
    cached_tokens: int


class OutputTokenDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: ResponseTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class ResponseObject(BaseModel):
    """What was asked, with the defaults that were used, and the output."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, str | None]
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
