"""Responses on an ASGI connection that the test controls."""

import asyncio
import json
import time

import pytest

from onchip.engine import CompletionOutput, Logprob, RequestOutput, SamplingParams
from onchip.engine.request import Request, RequestMetrics, SampledToken, Status
from onchip.server.codec import TokenText
from onchip.server.errors import APIError
from onchip.server.metrics import Metrics
from onchip.server.pending import EngineRequest
from onchip.server.responses import ChatBuilder, CompletionBuilder, DeltaReader
from onchip.server.service import Service
from onchip.server.streaming import (
    AcceptedCall,
    ChoiceWriter,
    FullResponse,
    SSEResponse,
    run_until,
)


def test_a_choice_can_end_before_its_request(fake):
    """One of two samples meets its stop text after 2 tokens, the other after 3."""
    engine = fake()
    params = SamplingParams(n=2, max_tokens=9, stop=["bc"])
    engine.add(b"abcdefghijkl", params, request_id="r")
    reader, ends = DeltaReader(2), {}
    while engine.has_work:
        for output in engine.step():
            for delta in reader.read_new([output]):
                assert delta.index not in ends, "nothing follows the end of a choice"
                if delta.finish_reason:
                    ends[delta.index] = engine.steps, delta.finish_reason, delta.stop_reason
    assert ends == {1: (2, "stop", "bc"), 0: (3, "stop", "bc")}


def test_work_is_watched_after_a_watcher_has_returned():
    async def fail():
        await asyncio.sleep(0.01)
        raise APIError(503, "closing")

    with pytest.raises(APIError, match="closing"):
        asyncio.run(run_until(asyncio.sleep(60), asyncio.sleep(0), fail()))


def test_a_slow_reader_gets_fewer_and_larger_chunks(fake):
    """While a client reads nothing, its request is computed to the end; one chunk has the rest."""

    async def scene():
        engine, sent, taken = fake(), [], asyncio.Event()
        service = Service(engine)
        service.start()

        async def send(message):
            sent.append(message.get("body", b""))
            if len(sent) == 2:
                await taken.wait()

        pending = await service.submit([EngineRequest(b"abc", SamplingParams(max_tokens=500))])
        builder, late = CompletionBuilder("m", read_token), APIError(504, "late")
        call = AcceptedCall(service, pending, time.monotonic() + 9, late)
        response = SSEResponse(call, Metrics(), ChoiceWriter(builder, DeltaReader(1), 1))
        reply = asyncio.ensure_future(response({}, asyncio.Event().wait, send))
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


def test_usage_in_chunks_reads_no_more_than_the_chunks():
    """Reading `token_ids` of an output copies all of them: a stream would cost quadratic time."""
    request = Request("r", [1, 2], SamplingParams(max_tokens=9))
    sample, reader, counts = request.samples[0], DeltaReader(1), []
    for token in range(5):
        sample.append(SampledToken(token))
        output = request.output()
        counts += [delta.num_generated for delta in reader.read_new([output])]
        assert "token_ids" not in vars(output.outputs[0])
    sample.append(SampledToken(7))
    sample.finish(Status.FINISHED_LENGTH)
    counts += [delta.num_generated for delta in reader.read_new([request.output()])]
    assert counts == [6]  # without a tokenizer there is no text: one delta, at the end


def answer_of(samples, tokens, tops):
    """A finished output with logprobs of every token."""
    table = {i: Logprob(-float(i), i, f'"{i}') for i in range(tops)}
    choice = lambda i: CompletionOutput(
        i, "x" * tokens, (0,) * tokens, -0.5, [table] * tokens, "length"
    )
    choices = [choice(i) for i in range(samples)]
    return RequestOutput("r", None, (1, 2), None, choices, True, RequestMetrics(0.0), 0)


class Answered:
    """A finished PendingCall."""

    failure, is_done, unfinished, num_prompt_tokens = None, True, (), 2

    def __init__(self, output):
        self.outputs = [output]

    async def wait_for_change(self):
        pass


class Nowhere:
    def release(self, pending):
        pass


async def reply_to(kind, builder, output, turns=None):
    """The bytes that a client gets; turns: gets an entry each time the loop is free."""
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    async def watch():
        while True:
            await asyncio.sleep(0.002)
            turns.append(time.monotonic())

    watching = asyncio.ensure_future(watch()) if turns is not None else None
    samples = len(output.outputs)
    call = AcceptedCall(Nowhere(), Answered(output), time.monotonic() + 99, None)
    writer = ChoiceWriter(builder, DeltaReader(samples), samples)
    await kind(call, Metrics(), writer)({}, asyncio.Event().wait, send)
    if watching:
        watching.cancel()
    return b"".join(sent)


def read_token(token):
    return TokenText(f'"{token}', b'"%d' % token)


BUILDERS = [lambda: CompletionBuilder("m", read_token), lambda: ChatBuilder("m", read_token, 20)]


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(("samples", "tokens"), [(1, 0), (1, 3), (3, 200), (2, 128)])
def test_an_encoded_response_equals_the_model_dump(builder, samples, tokens):
    builder, output = builder(), answer_of(samples, tokens, 5)
    sent = asyncio.run(reply_to(FullResponse, builder, output))
    pieces = list(DeltaReader(samples).read_new([output]))
    counted = json.loads(sent)["usage"]
    assert counted["completion_tokens"] == samples * tokens
    assert sent.decode() == builder.build_full(pieces, counted).model_dump_json()


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_large_chunk_of_a_stream_is_complete(builder):
    builder, output = builder(), answer_of(2, 130, 5)
    events = asyncio.run(reply_to(SSEResponse, builder, output)).decode().split("\n\n")
    sent = [json.loads(event.removeprefix("data: ")) for event in events[-4:-2]]
    pieces = DeltaReader(2).read_new([output])
    wanted = [
        builder.build_chunk(delta).model_dump(mode="json", exclude={"usage"}) for delta in pieces
    ]
    assert sent == wanted


@pytest.mark.parametrize("kind", [FullResponse, SSEResponse])
def test_a_large_response_is_built_off_the_loop(kind):
    """20,000 logprobs per choice: the loop keeps running. Built on the loop, it would
    block once.
    """
    turns = []
    sent = asyncio.run(
        reply_to(kind, ChatBuilder("m", read_token, 20), answer_of(2, 1000, 20), turns)
    )
    assert len(sent) > 1_000_000 and len(turns) > 15
