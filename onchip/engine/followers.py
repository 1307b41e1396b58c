"""One engine on several ranks: rank 0 takes the calls, the other ranks repeat them.

    rank 0: LeaderEngine                               other ranks: follow
    add, cancel    run at once, and noted
    step           message: notes, time, state ----->  the same adds and cancels; compare states
                   engine.step()   <- all-reduces ->   engine.step()
    close          message ------------------------->  return

All ranks must schedule alike, so a message has everything that a decision may depend on: requests
with their parameters, and the time, which the clocks of all ranks show until the next message.
Only accepted requests travel. A grammar is compiled within the limits of rank 0 alone: on another
rank the same limit could be exceeded.

Messages are JSON. Prompts and texts come from clients: no object is unpickled.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol

from onchip.engine import sampling_params
from onchip.engine.engine import Engine
from onchip.engine.ranks import RankClock
from onchip.engine.request import Request, RequestOutput
from onchip.engine.sampling_params import SamplingParams
from onchip.engine.stats import EngineStats
from onchip.engine.step import Limits, RejectedRequest
from onchip.engine.structure.compiler import PendingGrammar
from onchip.engine.structure.grammar import Grammar
from onchip.engine.tokenizer import Tokenizer
from onchip.parallel.comm_base import ParallelError
from onchip.parallel.consistency import digest_of, encode_fields, find_difference

LOG = logging.getLogger("onchip")
MAX_NOTES_BYTES = 8 << 20  # of one message, unless a single request has more
_PARAMS: dict[str, Any] = {
    name: kind
    for name, kind in vars(sampling_params).items()
    if name.endswith("Params") and is_dataclass(kind)
}
_OF_GRAMMARS = ("response_format", "structured_outputs")


class Sender(Protocol):
    """Messages of bytes to all other ranks; see onchip.parallel.message_channel."""

    def send(self, message: bytes) -> None: ...


class Receiver(Protocol):
    def receive(self) -> bytes: ...


class LeaderEngine:
    """The engine of rank 0 for one thread, as onchip.engine.Engine. on_failure: called when a step
    has failed, after which the ranks cannot continue. has_ended_others: the other ranks have got
    their last message.
    """

    tokenizer: Tokenizer | None
    limits: Limits
    has_ended_others: bool

    def __init__(
        self, engine: Engine, channel: Sender, on_failure: Callable[[], None] = lambda: None
    ):
        self._engine, self._channel, self._clock = engine, channel, _clock_of(engine)
        self.tokenizer, self.limits = engine.tokenizer, engine.limits
        self.on_failure = on_failure
        self._notes: list[str] = []
        self._notes_bytes = 0
        self._has_failed = self.has_ended_others = False

    def __getattr__(self, name: str) -> Any:
        """Everything else that is only read: the model, the cache, the scheduler."""
        return getattr(self._engine, name)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def compile_grammar(self, params: SamplingParams) -> PendingGrammar | None:
        """On rank 0 alone: the others compile the grammars of accepted requests."""
        return self._engine.compile_grammar(params)

    def add(
        self,
        prompt: str | Sequence[int],
        params: Any = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: bytes = b"",
        stream: bool = True,
    ) -> Request | RejectedRequest:
        params = params or SamplingParams()
        encoded = encode_params(params)
        now = self._set_time()
        added = self._engine.add(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            salt=salt,
            stream=stream,
        )
        if isinstance(added, RejectedRequest):
            return added
        note = {
            "at": now,
            "add": added.request_id,
            "prompt": added.prompt_token_ids,
            "params": encoded,
            "priority": priority,
            "deadline_s": deadline_s,
            "salt": salt.decode("latin-1"),
            "stream": stream,
        }
        self._note(note)
        return added

    def cancel(self, request_id: str) -> bool:
        now = self._set_time()
        is_cancelled = self._engine.cancel(request_id)
        if is_cancelled:
            self._note({"at": now, "cancel": request_id})
        return is_cancelled

    def step(self) -> list[RequestOutput]:
        try:
            self._send("step", _describe_state(self._engine))
            return self._engine.step()
        except BaseException:
            self._has_failed = True
            self.on_failure()
            raise

    def close(self) -> None:
        """End the other ranks, then this engine. After a failed step the launcher ends them: a rank
        inside of a step reads no message.
        """
        try:
            if not self._has_failed:
                self._send("close")
                self.has_ended_others = True
        except ParallelError as error:
            LOG.error("the other ranks did not get their last message: %s", error)
        finally:
            self._engine.close()

    def _set_time(self) -> float:
        now = time.monotonic()
        self._clock.set(now)
        return now

    def _note(self, note: Mapping[str, Any]) -> None:
        text = json.dumps(note, separators=(",", ":"))
        if self._notes_bytes + len(text) > MAX_NOTES_BYTES and self._notes:
            self._send("wait")
        self._notes.append(text)
        self._notes_bytes += len(text)

    def _send(self, do: str, state: Mapping[str, Any] | None = None) -> None:
        """Send the notes, and what follows them: step, wait (for more notes) or close."""
        head = {"do": do, "at": self._set_time(), "state": state}
        text = f'{{"head":{json.dumps(head)},"notes":[{",".join(self._notes)}]}}'
        self._notes, self._notes_bytes = [], 0
        self._channel.send(text.encode())


def follow(engine: Engine, channel: Receiver, rank: int) -> None:
    """Repeat the calls of rank 0 until it closes its engine. ParallelError: rank 0 is lost, or this
    rank differs from it.
    """
    engine.trust_grammars()
    clock = _clock_of(engine)
    while True:
        message = json.loads(channel.receive())
        head = message["head"]
        for note in message["notes"]:
            clock.set(note["at"])
            _repeat(engine, note)
        clock.set(head["at"])
        if head["do"] == "close":
            return
        if head["do"] == "step":
            own = _describe_state(engine)
            if own != head["state"]:
                texts = {0: encode_fields(head["state"]), rank: encode_fields(own)}
                raise find_difference(texts) or ParallelError("the ranks do not agree", rank)
            engine.step()


def _repeat(engine: Engine, note: Mapping[str, Any]) -> None:
    if "cancel" in note:
        engine.cancel(note["cancel"])
        return
    try:
        added = engine.add(
            note["prompt"],
            decode_params(note["params"]),
            request_id=note["add"],
            priority=note["priority"],
            deadline_s=note["deadline_s"],
            salt=note["salt"].encode("latin-1"),
            stream=note["stream"],
        )
        reason = added.reason if isinstance(added, RejectedRequest) else None
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        raise ParallelError(f"rank 0 has accepted a request, this rank has not: {reason}")


def encode_params(params: Any) -> dict[str, Any]:
    """Parameters of a request as JSON's types. A grammar travels in its parsed form, which has a
    bounded size. ValueError: this kind of parameters is not served on several ranks.
    """
    kind = type(params).__name__
    if _PARAMS.get(kind) is not type(params):
        raise ValueError(f"{kind} is not served with tensor parallelism")
    values = {name: value for name, value in vars(params).items() if name in _fields(params)}
    if isinstance(params, SamplingParams):
        values |= dict.fromkeys(_OF_GRAMMARS)
        values["logit_bias"] = list(params.logit_bias.items())
        values["grammar"] = params.grammar
    return {"kind": kind, "values": values}


def decode_params(encoded: Mapping[str, Any]) -> Any:
    kind, values = _PARAMS[encoded["kind"]], dict(encoded["values"])
    if kind is SamplingParams:
        values["logit_bias"] = dict(values["logit_bias"])
        grammar = values.pop("grammar")
        if grammar is not None:
            values["structured_outputs"] = _as_structured_outputs(Grammar(*grammar))
    return kind(**values)


def _as_structured_outputs(grammar: Grammar) -> dict[str, Any]:
    """The field of vLLM that is parsed to this grammar again."""
    value = json.loads(grammar.text) if grammar.kind == "choice" else grammar.text
    return {grammar.kind: value}


def _fields(params: Any) -> tuple[str, ...]:
    """Its fields, without cached properties."""
    return tuple(params.__dataclass_fields__)


def _clock_of(engine: Engine) -> RankClock:
    clock = engine.scheduler.clock
    if not isinstance(clock, RankClock):
        raise ValueError("the engine has a clock of its own: load the model with Ranks")
    return clock


def _describe_state(engine: Engine) -> dict[str, Any]:
    """The fields that ranks compare before each step: requests, the newest token of each sample,
    free pages. The tokens are compared by a digest, so that a message does not grow with the batch.
    """
    scheduler = engine.scheduler
    running = [
        (r.request_id, r.status.name, [(len(s.token_ids), s.token_ids[-1:]) for s in r.samples])
        for r in scheduler.running
    ]
    return {
        "running": len(running),
        "waiting": len(scheduler.waiting),
        "tokens": digest_of(repr(running).encode()).hex(),
        "free pages": engine.cache.pool.num_free,
    }
