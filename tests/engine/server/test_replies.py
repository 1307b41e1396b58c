"""How an answer reaches a client, on an ASGI connection that does what it is told."""

import asyncio
import json
import time

from onchip.engine import SamplingParams
from onchip.engine.server.answers import CompletionFormat, Reader
from onchip.engine.server.metrics import Metrics
from onchip.engine.server.refusal import Refusal
from onchip.engine.server.replies import Order, StreamReply
from onchip.engine.server.service import Service
from onchip.engine.server.tickets import Ask


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
        form, late = CompletionFormat("m", bytes.decode), Refusal(504, "late")
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
