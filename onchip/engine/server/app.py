"""The HTTP application: routes, and what each of them asks of the service."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
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
from .answers import ChatFormat, CompletionFormat, Echo, Format, Reader
from .bodies import BodyMemory, Intake, body_route, invalid
from .guard import Guard
from .keys import Keyring
from .live import Watch
from .log import RequestLog
from .metrics import Metrics
from .protocol import ChatRequest, CompletionRequest, Sampling
from .refusal import Refusal, refuse
from .replies import Order, StreamReply, WholeReply
from .service import Engine, Service, State
from .texts import Texts
from .tickets import Ask

T = TypeVar("T")
R = TypeVar("R")

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


class Server:
    """One engine behind one application. `app` is ASGI; it starts the engine's thread when it
    starts, and closes the engine when it ends.
    """

    def __init__(self, engine: Engine, options: Options, keys: Keyring | None = None):
        self.options, self.keys = options, keys or Keyring()
        self.texts, self.limits = Texts(engine.tokenizer), engine.limits
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
            yield
        finally:
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
        params, prompts = _checked(body.params), body.prompts
        self._check_lengths(prompts)
        if body.stream and (body.use_beam_search or (body.best_of or 1) > (body.n or 1)):
            raise Refusal(
                400, "which choices are best is known at the end: they cannot be streamed"
            )
        echo = None
        if body.echo:
            texts = [await self._beside(self._text, prompt) for prompt in prompts]
            echo = Echo(texts, body.scores_only)
        form = CompletionFormat(self.options.model, self.texts.decode)
        question = Question(params, prompts, form, Reader(params.n, echo))
        return await self._serve(body, request, question)

    async def _chats(self, body: ChatRequest, request: Request) -> Response:
        params = _checked(body.params)
        prompt = await self._beside(self.texts.chat, [message.plain for message in body.messages])
        form = ChatFormat(self.options.model, self.texts.decode, body.top_logprobs or 0)
        question = Question(params, [prompt], form, Reader(params.n))
        return await self._serve(body, request, question)

    async def _serve(self, body: Sampling, request: Request, question: Question) -> Response:
        self._check_model(body.model)
        question.check_width()
        allowed_s = min(body.deadline_s or self.options.max_request_s, self.options.max_request_s)
        tokens = [await self._encode(prompt) for prompt in question.prompts]
        salt, arrival = request.state.salt, request.state.arrival
        rest = (question.params, body.priority or 0, allowed_s, salt, bool(body.stream))
        deadline_s = time.monotonic() + allowed_s  # a little before the engine's own
        order = Order(
            self.service,
            await self.service.submit([Ask(one, *rest) for one in tokens], arrival),
            question.form,
            question.reader,
            question.num_choices,
            deadline_s,
            _late(allowed_s, body.deadline_s),
            body.include_usage,
            self._builders,
        )
        return (StreamReply if body.stream else WholeReply)(order, self.metrics)

    async def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return await self._beside(self.texts.encode, prompt) if isinstance(prompt, str) else prompt

    async def _beside(self, work: Callable[[T], R], what: T) -> R:
        """Neither on the loop nor in the engine's thread: a long text keeps nobody waiting."""
        try:
            return await asyncio.to_thread(work, what)
        except ValueError as error:
            raise Refusal(400, str(error)) from None

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self.texts.decode(prompt)

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


def _late(allowed_s: float, asked_s: float | None) -> Refusal:
    """Whose fault it is depends on who set the deadline."""
    status = 408 if asked_s == allowed_s else 504
    return Refusal(status, f"not done within {allowed_s:g} s", code="deadline")


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
        first = error.errors()[0]
        return invalid(first["type"], first["loc"][1:], first["msg"])
    raise error


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
