"""The HTTP application: its routes and their handlers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

import onchip
from onchip.engine.sampling_params import PoolingParams, SamplingParams
from onchip.engine.step import Limits

from . import protocol
from .api_keys import Keyring
from .auth import AuthMiddleware
from .bodies import BodyMemory, BodyReader, body_route
from .codec import Codec
from .embeddings import EmbeddingList, EmbeddingRequest, EmbeddingResponse
from .errors import APIError, error_response
from .live import LiveView
from .log import FailureCounter, RequestLog
from .metrics import MEDIA_TYPE, Metrics
from .pending import EngineRequest, PendingCall
from .protocol import (
    CallFields,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from .response_events import FullResponseObject, ResponseEventStream, ResponseWriter
from .response_items import ResponseObject, ResponsesRequest
from .responses import (
    ChatBuilder,
    CompletionBuilder,
    DeltaReader,
    Echo,
    ResponseBuilder,
    ToolDeltaReader,
)
from .service import EngineProtocol, Service, ServiceState
from .streaming import AcceptedCall, ChoiceWriter, FullResponse, SSEResponse
from .tools import DIALECTS, Dialect, find_dialect
from .validation_errors import explain_errors

T = TypeVar("T")

MAX_CHOICES = 512  # of one request: prompts times samples
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE = {
    "/": ("live.html", "text/html"),
    "/live.css": ("live.css", "text/css"),
    "/live.js": ("live.js", "text/javascript"),
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": protocol.ErrorResponse, "description": "An error of the request"},
    "5XX": {"model": protocol.ErrorResponse, "description": "An error of the server"},
}
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@dataclass(frozen=True)
class ServerOptions:
    """model: the served name. max_bodies_bytes: limit for all bodies that are being read together.
    max_request_s: time limit of any request. max_stall_s: a step older than this makes the server
    not ready. hosts: as for AuthMiddleware. tool_call_parser: how the model writes calls of tools;
    "auto" decides by its chat template and model_type.
    """

    model: str
    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 64 << 20
    max_request_s: float = 600.0
    max_stall_s: float = 30.0
    max_open: int = 16384
    hosts: frozenset[str] | None = None
    tool_call_parser: str = "auto"
    model_type: str = ""

    def __post_init__(self) -> None:
        if self.tool_call_parser not in ("auto", *DIALECTS):
            raise ValueError(
                f"tool_call_parser={self.tool_call_parser!r} is not one of auto,"
                f" {', '.join(DIALECTS)}"
            )
        for name, value in vars(self).items():
            if name.startswith("max_") and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes={self.max_bodies_bytes} must be at least"
                f" max_body_bytes={self.max_body_bytes}"
            )


@dataclass(frozen=True)
class GenerationInput:
    """A completion or chat request after parsing."""

    params: SamplingParams
    prompts: Sequence[str | Sequence[int]]
    builder: ResponseBuilder
    reader: DeltaReader

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def check_num_choices(self) -> None:
        prompts, samples = len(self.prompts), self.params.num_samples
        if prompts * samples > MAX_CHOICES:
            raise APIError(400, f"{prompts} prompts x {samples} samples exceed {MAX_CHOICES}")


@dataclass(frozen=True)
class Deadline:
    """Time limit of a request, from its arrival on. client_s: the client's own limit, if it set
    one. at_s: a time of time.monotonic.
    """

    allowed_s: float
    client_s: float | None
    at_s: float

    @property
    def left_s(self) -> float:
        return max(1e-3, self.at_s - time.monotonic())

    @property
    def error(self) -> APIError:
        """408 if the client set the deadline, 504 if the server did."""
        status = 408 if self.client_s == self.allowed_s else 504
        return APIError(status, f"not done within {self.allowed_s:g} s", code="deadline")

    async def enforce(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except TimeoutError:
            raise self.error from None


class Server:
    """One engine behind one ASGI application, `app`, which starts the engine's thread and closes
    the engine at the end.
    """

    options: ServerOptions
    keys: Keyring
    limits: Limits
    codec: Codec
    metrics: Metrics
    service: Service
    live_view: LiveView
    dialect: Dialect
    app: FastAPI

    def __init__(self, engine: EngineProtocol, options: ServerOptions, keys: Keyring | None = None):
        self.options, self.keys = options, keys or Keyring()
        self.limits, self._embedding_size = engine.limits, engine.embedding_size
        self.codec = Codec(engine.tokenizer, engine.limits.max_model_len)
        template = engine.tokenizer.chat_template if engine.tokenizer is not None else None
        self.dialect = find_dialect(options.tool_call_parser, template, options.model_type)
        self.metrics = Metrics()
        self.service = Service(engine, max_open=options.max_open, on_output=self.metrics.observe)
        self.live_view = LiveView(self.service, options.model)
        self._started = int(time.time())
        # One thread each, so that bodies and responses do not wait for one another.
        self._parsers = ThreadPoolExecutor(1, "onchip-bodies")
        self._builders = ThreadPoolExecutor(1, "onchip-answers")
        self.app = self._application()

    def _application(self) -> FastAPI:
        app = FastAPI(
            title="onchip",
            version=onchip.__version__,
            lifespan=self._lifespan,
            docs_url=None,  # its page would load scripts from another host
            redoc_url=None,
        )
        app.include_router(self._api())
        app.include_router(self._probes())
        for path, (file, kind) in _PAGE.items():
            app.add_api_route(path, _static(file, kind), include_in_schema=False)
        app.add_middleware(AuthMiddleware, keys=self.keys, hosts=self.options.hosts)
        app.add_middleware(RequestLog, metrics=self.metrics)  # added last: the outermost
        for kind in (APIError, HTTPException, RequestValidationError):
            app.add_exception_handler(kind, self._respond_to_error)
        return app

    @property
    def is_stalled(self) -> bool:
        """The current step has run longer than max_stall_s."""
        return self.service.step_age_s > self.options.max_stall_s

    async def drain(self, timeout_s: float) -> None:
        await self.service.drain(timeout_s)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.service.start()
        try:
            await asyncio.to_thread(self.codec.start)
            yield
        finally:
            self.codec.close()
            await self.service.close()
            for pool in (self._parsers, self._builders):
                pool.shutdown(wait=False, cancel_futures=True)

    def _api(self) -> APIRouter:
        reader = BodyReader(
            self.options.max_body_bytes,
            BodyMemory(self.options.max_bodies_bytes),
            self.service.track_incoming,
            self._parsers,
        )
        router = APIRouter(route_class=body_route(reader), responses=_ERRORS)
        streams = {200: {"content": _STREAM}}
        full, chat = protocol.Completion, protocol.ChatCompletion
        router.post("/v1/completions", response_model=full, responses=streams)(self._completions)
        router.post("/v1/chat/completions", response_model=chat, responses=streams)(self._chats)
        router.post("/v1/responses", response_model=ResponseObject, responses=streams)(
            self._responses
        )
        router.post("/v1/embeddings", response_model=EmbeddingList)(self._embeddings)
        router.post("/tokenize", response_model=protocol.Tokenized)(self._tokenize)
        router.post("/detokenize", response_model=protocol.Detokenized)(self._detokenize)
        router.get("/v1/models", response_model=protocol.ModelList)(self._models)
        router.get("/v1/models/{model:path}", response_model=protocol.ModelCard)(self._model)
        return router

    def _probes(self) -> APIRouter:
        router = APIRouter(responses=_ERRORS)
        router.get("/health")(self._health)
        router.get("/ready")(self._ready)
        router.get("/stats")(self.live_view.read_stats)
        router.get("/metrics", response_class=Response)(self._metrics)
        return router

    async def _completions(self, body: CompletionRequest, request: Request) -> Response:
        deadline = self._start_deadline(body)
        params, prompts = _or_400(body.params), body.prompts
        self._check_lengths(prompts)
        if body.stream and (body.use_beam_search or (body.best_of or 1) > (body.n or 1)):
            raise APIError(
                400, "the best choices are known only at the end: they cannot be streamed"
            )
        echo = None
        if body.echo:
            texts = [await deadline.enforce(self._text(prompt, deadline)) for prompt in prompts]
            echo = Echo(texts, body.scores_only)
        builder = CompletionBuilder(self.options.model, self.codec.token)
        generation = GenerationInput(params, prompts, builder, DeltaReader(params.n, echo))
        return await self._serve(body, request, generation, deadline)

    async def _chats(self, body: ChatRequest, request: Request) -> Response:
        deadline = self._start_deadline(body)
        reader, params = self._chat_reader(body), _or_400(lambda: body.params(self.dialect))
        prompt = await self._encode_chat(body, bool(body.add_special_tokens), deadline)
        builder = ChatBuilder(self.options.model, self.codec.token, body.top_logprobs or 0)
        generation = GenerationInput(params, [prompt], builder, reader)
        return await self._serve(body, request, generation, deadline)

    async def _responses(self, body: ResponsesRequest, request: Request) -> Response:
        deadline = self._start_deadline(body)
        chat = _or_400(body.make_chat)
        reader, params = self._chat_reader(chat), _or_400(lambda: chat.params(self.dialect))
        prompt = await self._encode_chat(chat, False, deadline)
        grammar = await deadline.enforce(self.service.compile_grammar(params, deadline.left_s))
        salt, stream = body.derive_salt(request.state.salt), bool(body.stream)
        rest = (body.priority or 0, deadline.left_s, salt, stream, grammar)
        pending = await self.service.submit(
            [EngineRequest(prompt, params, *rest)], request.state.incoming
        )
        writer = ResponseWriter(body, self.options.model)
        kind = ResponseEventStream if stream else FullResponseObject
        return kind(self._accept(pending, deadline), self.metrics, reader, writer)

    def _chat_reader(self, body: ChatRequest) -> DeltaReader:
        n, tools = body.n or 1, _or_400(body.read_tools)
        if tools is None:
            return DeltaReader(n)
        make_parser = partial(tools.make_parser, self.dialect, hidden=self.codec.end_texts)
        return ToolDeltaReader(n, make_parser=make_parser)

    async def _embeddings(self, body: EmbeddingRequest, request: Request) -> Response:
        deadline = self._start_deadline(body)
        _or_400(lambda: body.check(self._embedding_size))
        self._check_lengths(body.prompts, "input")
        special = body.add_special_tokens is not False
        tokens = [await self._encode(prompt, special, deadline) for prompt in body.prompts]
        params, salt = PoolingParams(body.pooling or "last"), body.derive_salt(request.state.salt)
        rest = (params, body.priority or 0, deadline.left_s, salt, False)
        requests = [EngineRequest(ids, *rest) for ids in tokens]
        pending = await self.service.submit(requests, request.state.incoming)
        call = self._accept(pending, deadline, generates=False)
        in_base64 = body.encoding_format == "base64"
        return EmbeddingResponse(call, self.metrics, self.options.model, in_base64)

    async def _serve(
        self,
        body: SamplingFields,
        request: Request,
        generation: GenerationInput,
        deadline: Deadline,
    ) -> Response:
        generation.check_num_choices()
        compiling = self.service.compile_grammar(generation.params, deadline.left_s)
        grammar = await deadline.enforce(compiling)
        special = body.add_special_tokens is not False
        tokens = [await self._encode(prompt, special, deadline) for prompt in generation.prompts]
        salt, incoming = body.derive_salt(request.state.salt), request.state.incoming
        rest = (body.priority or 0, deadline.left_s, salt, bool(body.stream), grammar)
        rest = (generation.params, *rest)
        pending = await self.service.submit([EngineRequest(ids, *rest) for ids in tokens], incoming)
        reader = generation.reader
        call = self._accept(pending, deadline, generates=not reader.scores_only)
        writer = ChoiceWriter(
            generation.builder, reader, generation.num_choices, body.usage_reports
        )
        return (SSEResponse if body.stream else FullResponse)(call, self.metrics, writer)

    def _accept(
        self, pending: PendingCall, deadline: Deadline, generates: bool = True
    ) -> AcceptedCall:
        """deadline: slightly before the engine's own."""
        return AcceptedCall(
            self.service, pending, deadline.at_s, deadline.error, self._builders, generates
        )

    async def _tokenize(self, body: TokenizeRequest) -> protocol.Tokenized:
        self._check_model(body.model)
        deadline, chat = self._deadline(None), _or_400(lambda: body.conversation)
        if chat is None:
            special = body.add_special_tokens is not False
            work = self.codec.encode(body.prompt, deadline.at_s, special, bounded=False)
            tokens = await deadline.enforce(work)
        else:
            tokens = await self._encode_chat(chat, bool(body.add_special_tokens), deadline)
        texts = [self.codec.token(i).text for i in tokens] if body.return_token_strs else None
        return protocol.Tokenized(
            count=len(tokens),
            max_model_len=self.limits.max_model_len,
            tokens=tokens,
            token_strs=texts,
        )

    async def _detokenize(self, body: DetokenizeRequest) -> protocol.Detokenized:
        self._check_model(body.model)
        deadline = self._deadline(None)
        return protocol.Detokenized(
            prompt=await deadline.enforce(self._text(body.tokens, deadline))
        )

    def _start_deadline(self, body: CallFields) -> Deadline:
        """The time limit includes the chat template and the tokenizer."""
        self._check_model(body.model)
        return self._deadline(body.deadline_s)

    def _deadline(self, client_s: float | None) -> Deadline:
        allowed_s = min(client_s or self.options.max_request_s, self.options.max_request_s)
        return Deadline(allowed_s, client_s, time.monotonic() + allowed_s)

    async def _encode_chat(
        self, body: Conversation, special: bool, deadline: Deadline
    ) -> Sequence[int]:
        messages, options = _or_400(lambda: body.plain_messages), _or_400(body.variables)
        text = await deadline.enforce(self.codec.render(messages, options, deadline.at_s))
        return await self._encode(text, special, deadline)  # most templates write special tokens

    async def _encode(
        self, prompt: str | Sequence[int], special: bool, deadline: Deadline
    ) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return await deadline.enforce(self.codec.encode(prompt, deadline.at_s, special))

    async def _text(self, prompt: str | Sequence[int], deadline: Deadline) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self.codec.decode_prompt(prompt, deadline.at_s)

    def _check_lengths(self, prompts: Sequence[str | Sequence[int]], field: str = "prompt") -> None:
        """Reject token ids that can never fit, before any other work."""
        longest = max((len(p) for p in prompts if not isinstance(p, str)), default=0)
        if longest > self.limits.max_model_len:
            raise APIError(
                400,
                f"the prompt has {longest} tokens, the model takes {self.limits.max_model_len}",
                code="context_length_exceeded",
                param=field,
            )

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.options.model):
            raise APIError(
                404,
                f"there is no model {name[:100]!r}, only {self.options.model!r}",
                code="model_not_found",
                param="model",
            )

    async def _models(self) -> protocol.ModelList:
        return protocol.ModelList(data=[self._model_card()])

    async def _model(self, model: str) -> protocol.ModelCard:
        self._check_model(model)
        return self._model_card()

    def _model_card(self) -> protocol.ModelCard:
        return protocol.ModelCard(
            id=self.options.model, created=self._started, max_model_len=self.limits.max_model_len
        )

    async def _health(self) -> Response:
        """503 once the engine has died: only a restart helps."""
        dead = self.service.state is ServiceState.DEAD
        body = {"status": "dead" if dead else "ok", "reason": self.service.death_cause}
        return JSONResponse(body, 503 if dead else 200)

    async def _ready(self) -> Response:
        """200 while requests are accepted and steps run. last_step_age_s: since the last step
        ended, None before the first; step_age_s: of the current step, 0 between steps.
        """
        state, age = self.service.state, self.service.step_age_s
        body = {
            "status": "stalled" if self.is_stalled and state is ServiceState.READY else state.value,
            "step_age_s": round(age, 3),
            "last_step_age_s": self.live_view.last_step_age_s,
            "max_step_age_s": self.options.max_stall_s,
        }
        return JSONResponse(body, 200 if body["status"] == "ready" else 503)

    async def _metrics(self) -> Response:
        return Response(self.metrics.render(self.service), media_type=MEDIA_TYPE)

    async def _respond_to_error(self, request: Request, error: Exception) -> Response:
        return respond_to_error(error, self.metrics)


def _or_400(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise APIError(400, str(error)) from None


def to_api_error(error: Exception) -> APIError:
    """Any error as an APIError."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):
        return explain_errors(_strip_body(error), error.body, {})
    raise error


def respond_to_error(error: Exception, metrics: FailureCounter) -> Response:
    """The response to any error, which is counted. Headers of the error, such as Allow, are
    kept.
    """
    api_error = to_api_error(error)
    metrics.count_failure(api_error.status)
    reply = error_response(api_error)
    reply.headers.update(getattr(error, "headers", None) or {})
    return reply


def _strip_body(error: RequestValidationError) -> list[dict[str, Any]]:
    """FastAPI's errors about bodies that are not application/json have locations that begin with
    "body".
    """
    return [entry | {"loc": entry["loc"][1:]} for entry in error.errors()]


def _static(file: str, kind: str) -> Callable[[], Any]:
    content = resources.files(__package__).joinpath("page", file).read_bytes()
    headers = {
        "content-security-policy": PAGE_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def page() -> Response:
        return Response(content, media_type=kind, headers=headers)

    return page
