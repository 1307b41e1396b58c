"""How an answer reaches a client, on an ASGI connection that does what it is told."""

import asyncio
import json
import time

import pytest

from onchip.engine import CompletionOutput, Logprob, RequestOutput, SamplingParams
from onchip.engine.request import RequestMetrics
from onchip.engine.server.codec import Token
from onchip.engine.server.errors import Refusal
from onchip.engine.server.metrics import Metrics
from onchip.engine.server.pending import Ask
from onchip.engine.server.responses import ChatFormat, CompletionFormat, Reader
from onchip.engine.server.service import Service
from onchip.engine.server.streaming import Order, StreamReply, WholeReply


def test_a_choice_ends_when_it_ends_not_with_its_request(fake):
    """One of two samples meets its stop text after 2 tokens, the other after 3."""
    engine = fake()
    params = SamplingParams(n=2, max_tokens=9, stop=["bc"])
    engine.add(b"abcdefghijkl", params, request_id="r")
    reader, ends = Reader(2), {}
    while engine.has_work:
        for output in engine.step():
            for piece in reader.news([output]):
                assert piece.index not in ends, "nothing follows the end of a choice"
                if piece.finish_reason:
                    ends[piece.index] = engine.steps, piece.finish_reason, piece.stop_reason
    assert ends == {1: (2, "stop", "bc"), 0: (3, "stop", "bc")}


def test_a_slow_reader_gets_fewer_and_larger_pieces(fake):
    """While a client takes nothing its request is computed to the end; one piece has the rest."""

    async def scene():
        engine, sent, taken = fake(), [], asyncio.Event()
        service = Service(engine)
        service.start()

        async def send(message):
            sent.append(message.get("body", b""))
            if len(sent) == 2:
                await taken.wait()

        ticket = await service.submit([Ask(b"abc", SamplingParams(max_tokens=500))])
        form, late = CompletionFormat("m", read_token), Refusal(504, "late")
        order = Order(service, ticket, form, Reader(1), 1, time.monotonic() + 9, late)
        reply = asyncio.ensure_future(StreamReply(order, Metrics())({}, asyncio.Event().wait, send))
        while engine.requests or len(sent) < 2:
            await asyncio.sleep(0.01)
        taken.set()
        await reply
        await service.close()
        return b"".join(sent).decode()

    events = [e.removeprefix("data: ") for e in asyncio.run(scene()).split("\n\n") if e]
    texts = [json.loads(e)["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == ("abc" * 167)[:500]
    assert len(texts) == 2 and events[-1] == "[DONE]"


def answer_of(samples, tokens, tops):
    """An output that is done, with logprobs of every token."""
    table = {i: Logprob(-float(i), i, f'"{i}') for i in range(tops)}
    choice = lambda i: CompletionOutput(
        i, "x" * tokens, (0,) * tokens, -0.5, [table] * tokens, "length"
    )
    choices = [choice(i) for i in range(samples)]
    return RequestOutput("r", None, (1, 2), None, choices, True, RequestMetrics(0.0), 0)


class Answered:
    """A ticket whose answer is there."""

    failure, settled, unfinished = None, True, ()

    def __init__(self, output):
        self.outputs = [output]

    async def changed(self):
        pass


class Nowhere:
    def release(self, ticket):
        pass


async def reply_to(kind, form, output, turns=None):
    """What a client gets; turns: gets an entry whenever the loop has time for it."""
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    async def watch():
        while True:
            await asyncio.sleep(0.002)
            turns.append(time.monotonic())

    watching = asyncio.ensure_future(watch()) if turns is not None else None
    samples = len(output.outputs)
    order = Order(
        Nowhere(), Answered(output), form, Reader(samples), samples, time.monotonic() + 99, None
    )
    await kind(order, Metrics())({}, asyncio.Event().wait, send)
    if watching:
        watching.cancel()
    return b"".join(sent)


def read_token(token):
    return Token(f'"{token}', b'"%d' % token)


FORMATS = [lambda: CompletionFormat("m", read_token), lambda: ChatFormat("m", read_token, 20)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("samples", "tokens"), [(1, 0), (1, 3), (3, 200), (2, 128)])
def test_an_answer_in_parts_is_the_whole_answer(form, samples, tokens):
    form, output = form(), answer_of(samples, tokens, 5)
    sent = asyncio.run(reply_to(WholeReply, form, output))
    pieces = list(Reader(samples).news([output]))
    counted = json.loads(sent)["usage"]
    assert counted["completion_tokens"] == samples * tokens
    assert sent.decode() == form.whole(pieces, counted).model_dump_json()


@pytest.mark.parametrize("form", FORMATS)
def test_a_large_piece_of_a_stream_is_whole(form):
    form, output = form(), answer_of(2, 130, 5)
    events = asyncio.run(reply_to(StreamReply, form, output)).decode().split("\n\n")
    sent = [json.loads(event.removeprefix("data: ")) for event in events[-4:-2]]
    pieces = Reader(2).news([output])
    wanted = [form.chunk(piece).model_dump(mode="json", exclude={"usage"}) for piece in pieces]
    assert sent == wanted


@pytest.mark.parametrize("kind", [WholeReply, StreamReply])
def test_a_large_answer_is_built_off_the_loop(kind):
    """20,000 logprobs a choice: the loop goes round meanwhile. On the loop it would not, once."""
    turns = []
    sent = asyncio.run(
        reply_to(kind, ChatFormat("m", read_token, 20), answer_of(2, 1000, 20), turns)
    )
    assert len(sent) > 1_000_000 and len(turns) > 15
