"""The HTTP application: routes, and what each of them asks of the service."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

import onchip
from onchip.engine.params import SamplingParams

from . import protocol
from .auth import Guard
from .bodies import BodyMemory, Intake, body_route
from .codec import Texts
from .errors import Refusal, refuse
from .invalid import explain
from .keys import Keyring
from .live import Watch
from .log import RequestLog
from .metrics import Metrics
from .pending import Ask
from .protocol import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from .responses import ChatFormat, CompletionFormat, Echo, Format, Reader
from .service import Engine, Service, State
from .streaming import Order, StreamReply, WholeReply

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
    "4XX": {"model": protocol.Error, "description": "The request is at fault"},
    "5XX": {"model": protocol.Error, "description": "The server is"},
}
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@dataclass(frozen=True)
class Options:
    """model: the name it is served under. max_bodies_bytes: of all bodies that are being read.
    max_request_s: no request may take longer. max_stall_s: a step older than this makes the server
    not ready. hosts: as of Guard.
    """

    model: str
    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 64 << 20
    max_request_s: float = 600.0
    max_stall_s: float = 30.0
    max_open: int = 16384
    hosts: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_bodies_bytes",
            "max_request_s",
            "max_stall_s",
            "max_open",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes={self.max_bodies_bytes} must be at least"
                f" max_body_bytes={self.max_body_bytes}"
            )


@dataclass(frozen=True)
class Question:
    """What a body asks, however it was put."""

    params: SamplingParams
    prompts: Sequence[str | Sequence[int]]
    form: Format
    reader: Reader

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def check_width(self) -> None:
        prompts, samples = len(self.prompts), self.params.num_samples
        if prompts * samples > MAX_CHOICES:
            raise Refusal(400, f"{prompts} prompts x {samples} samples exceed {MAX_CHOICES}")


@dataclass(frozen=True)
class Deadline:
    """Until when a request may take, from its arrival on. asked_s: what the client set, if it did.
    at_s: a time of time.monotonic.
    """

    allowed_s: float
    asked_s: float | None
    at_s: float

    @property
    def left_s(self) -> float:
        return max(1e-3, self.at_s - time.monotonic())

    @property
    def refusal(self) -> Refusal:
        """Whose fault it is depends on who set the deadline."""
        status = 408 if self.asked_s == self.allowed_s else 504
        return Refusal(status, f"not done within {self.allowed_s:g} s", code="deadline")

    async def keep(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except TimeoutError:
            raise self.refusal from None


class Server:
    """One engine behind one application. `app` is ASGI; it starts the engine's thread when it
    starts, and closes the engine when it ends.
    """

    def __init__(self, engine: Engine, options: Options, keys: Keyring | None = None):
        self.options, self.keys = options, keys or Keyring()
        self.limits = engine.limits
        self.texts = Texts(engine.tokenizer, engine.limits.max_model_len)
        self.metrics = Metrics()
        self.service = Service(engine, max_open=options.max_open, on_output=self.metrics.observe)
        self.watch = Watch(self.service, options.model)
        self._started = int(time.time())
        # One thread each: bodies and answers take their turns, and none waits for the other kind.
        self._parsers = ThreadPoolExecutor(1, "onchip-bodies")
        self._builders = ThreadPoolExecutor(1, "onchip-answers")
        self.app = self._application()

    def _application(self) -> FastAPI:
        app = FastAPI(
            title="onchip",
            version=onchip.__version__,
            lifespan=self._lifespan,
            docs_url=None,  # its page loads scripts from elsewhere
            redoc_url=None,
        )
        app.include_router(self._api())
        app.include_router(self._probes())
        for path, (file, kind) in _PAGE.items():
            app.add_api_route(path, _static(file, kind), include_in_schema=False)
        app.add_middleware(Guard, keys=self.keys, hosts=self.options.hosts)
        app.add_middleware(RequestLog, metrics=self.metrics)  # the last one is the outermost
        for kind in (Refusal, HTTPException, RequestValidationError):
            app.add_exception_handler(kind, self._failed)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.service.start()
        try:
            await asyncio.to_thread(self.texts.start)
            yield
        finally:
            self.texts.close()
            await self.service.close()
            for pool in (self._parsers, self._builders):
                pool.shutdown(wait=False, cancel_futures=True)

    def _api(self) -> APIRouter:
        intake = Intake(
            self.options.max_body_bytes,
            BodyMemory(self.options.max_bodies_bytes),
            self.service.arriving,
            self._parsers,
        )
        router = APIRouter(route_class=body_route(intake), responses=_ERRORS)
        streams = {200: {"content": _STREAM}}
        router.post("/v1/completions", response_model=protocol.Completion, responses=streams)(
            self._completions
        )
        router.post("/v1/chat/completions", response_model=protocol.Chat, responses=streams)(
            self._chats
        )
        router.post("/tokenize", response_model=protocol.Tokenized)(self._tokenize)
        router.post("/detokenize", response_model=protocol.Detokenized)(self._detokenize)
        router.get("/v1/models", response_model=protocol.Models)(self._models)
        router.get("/v1/models/{model:path}", response_model=protocol.Model)(self._model)
        return router

    def _probes(self) -> APIRouter:
        router = APIRouter(responses=_ERRORS)
        router.get("/health")(self._health)
        router.get("/ready")(self._ready)
        router.get("/stats")(self.watch.look)
        router.get("/metrics", response_class=Response)(self._metrics)
        return router

    async def _completions(self, body: CompletionRequest, request: Request) -> Response:
        deadline = self._begin(body)
        params, prompts = _checked(body.params), body.prompts
        self._check_lengths(prompts)
        if body.stream and (body.use_beam_search or (body.best_of or 1) > (body.n or 1)):
            raise Refusal(
                400, "which choices are best is known at the end: they cannot be streamed"
            )
        echo = None
        if body.echo:
            texts = [await deadline.keep(self._text(prompt, deadline)) for prompt in prompts]
            echo = Echo(texts, body.scores_only)
        form = CompletionFormat(self.options.model, self.texts.token)
        question = Question(params, prompts, form, Reader(params.n, echo))
        return await self._serve(body, request, question, deadline)

    async def _chats(self, body: ChatRequest, request: Request) -> Response:
        deadline = self._begin(body)
        params = _checked(body.params)
        prompt = await self._encode_chat(body, bool(body.add_special_tokens), deadline)
        form = ChatFormat(self.options.model, self.texts.token, body.top_logprobs or 0)
        question = Question(params, [prompt], form, Reader(params.n))
        return await self._serve(body, request, question, deadline)

    async def _serve(
        self, body: Sampling, request: Request, question: Question, deadline: Deadline
    ) -> Response:
        question.check_width()
        special = body.add_special_tokens is not False
        tokens = [await self._encode(one, special, deadline) for one in question.prompts]
        salt, arrival = body.salted(request.state.salt), request.state.arrival
        rest = (question.params, body.priority or 0, deadline.left_s, salt, bool(body.stream))
        order = Order(
            self.service,
            await self.service.submit([Ask(one, *rest) for one in tokens], arrival),
            question.form,
            question.reader,
            question.num_choices,
            deadline.at_s,  # a little before the engine's own
            deadline.refusal,
            body.include_usage,
            self._builders,
        )
        return (StreamReply if body.stream else WholeReply)(order, self.metrics)

    async def _tokenize(self, body: TokenizeRequest) -> protocol.Tokenized:
        self._check_model(body.model)
        deadline, chat = self._deadline(None), _checked(lambda: body.conversation)
        if chat is None:
            special = body.add_special_tokens is not False
            work = self.texts.encode(body.prompt, deadline.at_s, special, bounded=False)
            tokens = await deadline.keep(work)
        else:
            tokens = await self._encode_chat(chat, bool(body.add_special_tokens), deadline)
        texts = [self.texts.token(i).text for i in tokens] if body.return_token_strs else None
        return protocol.Tokenized(
            count=len(tokens),
            max_model_len=self.limits.max_model_len,
            tokens=tokens,
            token_strs=texts,
        )

    async def _detokenize(self, body: DetokenizeRequest) -> protocol.Detokenized:
        self._check_model(body.model)
        deadline = self._deadline(None)
        return protocol.Detokenized(prompt=await deadline.keep(self._text(body.tokens, deadline)))

    def _begin(self, body: Sampling) -> Deadline:
        """The clock of a request starts before its template and its tokenizer."""
        self._check_model(body.model)
        return self._deadline(body.deadline_s)

    def _deadline(self, asked_s: float | None) -> Deadline:
        allowed_s = min(asked_s or self.options.max_request_s, self.options.max_request_s)
        return Deadline(allowed_s, asked_s, time.monotonic() + allowed_s)

    async def _encode_chat(
        self, body: Conversation, special: bool, deadline: Deadline
    ) -> Sequence[int]:
        messages, options = _checked(lambda: body.plain_messages), _checked(body.variables)
        text = await deadline.keep(self.texts.render(messages, options, deadline.at_s))
        return await self._encode(text, special, deadline)  # most templates write special tokens

    async def _encode(
        self, prompt: str | Sequence[int], special: bool, deadline: Deadline
    ) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return await deadline.keep(self.texts.encode(prompt, deadline.at_s, special))

    async def _text(self, prompt: str | Sequence[int], deadline: Deadline) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self.texts.decode_prompt(prompt, deadline.at_s)

    def _check_lengths(self, prompts: Sequence[str | Sequence[int]]) -> None:
        """Token ids that can never fit, before anything is done with them."""
        longest = max((len(p) for p in prompts if not isinstance(p, str)), default=0)
        if longest > self.limits.max_model_len:
            raise Refusal(
                400,
                f"the prompt has {longest} tokens, the model takes {self.limits.max_model_len}",
                code="context_length_exceeded",
                param="prompt",
            )

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.options.model):
            raise Refusal(
                404,
                f"there is no model {name[:100]!r} here, only {self.options.model!r}",
                code="model_not_found",
                param="model",
            )

    async def _models(self) -> protocol.Models:
        return protocol.Models(data=[self._card()])

    async def _model(self, model: str) -> protocol.Model:
        self._check_model(model)
        return self._card()

    def _card(self) -> protocol.Model:
        return protocol.Model(
            id=self.options.model, created=self._started, max_model_len=self.limits.max_model_len
        )

    async def _health(self) -> Response:
        """503 when the engine has died: nothing but a restart helps."""
        dead = self.service.state is State.DEAD
        body = {"status": "dead" if dead else "ok", "reason": self.service.death}
        return JSONResponse(body, 503 if dead else 200)

    async def _ready(self) -> Response:
        """200 while requests are taken and steps are made. last_step_age_s: since the last step
        ended, None before the first; step_age_s: of the one under way, 0 if none is.
        """
        state, age = self.service.state, self.service.step_age_s
        stalled = age > self.options.max_stall_s
        body = {
            "status": "stalled" if stalled and state is State.READY else state.value,
            "step_age_s": round(age, 3),
            "last_step_age_s": self.watch.last_step_age_s,
            "max_step_age_s": self.options.max_stall_s,
        }
        return JSONResponse(body, 200 if body["status"] == "ready" else 503)

    async def _metrics(self) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.render(self.service), media_type=kind)

    async def _failed(self, request: Request, error: Exception) -> Response:
        refusal = refusal_of(error)
        self.metrics.refused(refusal.status)
        reply = refuse(refusal)
        reply.headers.update(getattr(error, "headers", None) or {})
        return reply


def _checked(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise Refusal(400, str(error)) from None


def refusal_of(error: Exception) -> Refusal:
    """Whatever goes wrong, in the API's words."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):
        return explain(_located(error), error.body, {})
    raise error


def _located(error: RequestValidationError) -> list[dict[str, Any]]:
    """FastAPI's errors, which begin with "body": of bodies that are not application/json."""
    return [one | {"loc": one["loc"][1:]} for one in error.errors()]


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
