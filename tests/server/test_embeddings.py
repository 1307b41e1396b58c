"""/v1/embeddings, by the official client and by raw bodies: a fake engine, then the real one."""

import base64
import struct
import time

import pytest
import torch

from onchip.engine.llm import LLM
from onchip.server import embeddings

openai = pytest.importorskip("openai")

PATH = "/v1/embeddings"
LONG = "And it came to pass in those days, that there went out a decree. "


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("sent", "prompts"),
    [
        ("abc", [b"abc"]),
        (["abc", "x"], [b"abc", b"x"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_every_form_of_input(client, sent, prompts, encoding):
    """Without encoding_format the client asks for base64 and decodes it."""
    options = {} if encoding is None else {"encoding_format": encoding}
    done = client.embeddings.create(model="fake", input=sent, **options)
    assert done.object == "list" and done.model == "fake"
    assert [entry.index for entry in done.data] == list(range(len(prompts)))
    for entry, prompt in zip(done.data, prompts, strict=True):
        vector = entry.embedding
        if encoding == "base64":
            vector = list(struct.unpack("<6f", base64.b64decode(vector)))
        assert list(vector) == ([0.0, len(prompt), *prompt] + [0.0] * 6)[:6]
    count = sum(map(len, prompts))
    assert (done.usage.prompt_tokens, done.usage.total_tokens) == (count, count)


def test_the_pooling_is_a_field(client):
    done = client.embeddings.create(model="fake", input="a", extra_body={"pooling": "mean"})
    assert done.data[0].embedding[0] == 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input is missing"),
        ({"input": ""}, "a list of up to 2048 of either"),
        ({"input": []}, "a list of up to 2048 of either"),
        ({"input": [[]]}, "a list of up to 2048 of either"),
        ({"input": ["a", 1]}, "a list of up to 2048 of either"),
        ({"input": ["a"] * 2049}, "a list of up to 2048 of either"),
        ({"input": "a", "dimensions": 3}, "the embeddings of this model have 6 numbers"),
        ({"input": "a", "dimensions": 0}, "at least 1"),
        ({"input": "a", "encoding_format": "int8"}, "'float' or 'base64'"),
        ({"input": "a", "pooling": "cls"}, "'last' or 'mean'"),
        ({"input": "a", "model": "other"}, "there is no model 'other'"),
        ({"input": "a", "inputs": "a"}, "did you mean input?"),
        ({"input": [1] * 4097}, "4097 tokens"),
        ({"input": "a" * 4097}, "4097"),
        ({"input": [999]}, "token 999"),
    ],
)
def test_what_is_not_served_is_refused_in_a_sentence(shared, ask, body, message):
    status, answer, _ = ask(shared, PATH, body)
    assert status in (400, 404) and message in answer["error"]["message"], answer


def test_the_size_of_a_response_is_bounded(shared, ask, monkeypatch):
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 12)
    assert ask(shared, PATH, {"input": ["a", "b"], "dimensions": 6})[0] == 200
    status, answer, _ = ask(shared, PATH, {"input": ["a", "b", "c"]})
    assert status == 400 and "send at most 2 inputs" in answer["error"]["message"]


def test_more_inputs_than_a_server_takes_are_refused_for_good(serving, fake, ask):
    with serving(fake(), max_open=5) as (url, _):
        status, answer, headers = ask(url, PATH, {"input": ["a"] * 6})
        assert status == 400 and "retry-after" not in headers, answer
        assert ask(url, PATH, {"input": ["a"] * 5})[0] == 200


def test_a_failure_fails_the_call_and_a_deadline_ends_it(serving, fake, ask):
    with serving(fake(step_s=0.05)) as (url, _):
        assert ask(url, PATH, {"input": ["a", "fail"]})[0] == 500
        status, answer, _ = ask(url, PATH, {"input": "a", "deadline_s": 0.01})
        assert status == 408 and answer["error"]["code"] == "deadline"


def test_a_client_that_leaves_cancels_its_requests(serving, fake, connect, until):
    engine = fake(step_s=0.02, max_running=1)
    with serving(engine) as (url, _):
        connection = connect(url)
        headers = {"content-type": "application/json"}
        connection.request("POST", PATH, b'{"input": ["a", "b", "c", "d"]}', headers)
        until(lambda: len(engine.requests) == 4)
        connection.close()
        until(lambda: not engine.requests)
        assert len(engine.cancelled) >= 3


def test_steps_run_while_many_inputs_are_added(serving, fake, ask, until):
    """Adding takes 10 ms each here: 20 ms of it at a time, then a step. One that the engine
    refuses takes the others back.
    """
    engine = fake(max_running=1)
    add, at = engine.add, []

    def slow_add(*args, **kwargs):
        time.sleep(0.01)
        at.append(engine.steps)
        return add(*args, **kwargs)

    engine.add = slow_add
    with serving(engine) as (url, _):
        assert ask(url, PATH, {"input": ["a"] * 30})[0] == 200
        assert len(at) == 30 and at[-1] > 5 and at == sorted(at)
        status, answer, _ = ask(url, PATH, {"input": [*[[97]] * 30, [999]]})
        assert status == 400 and "token 999" in answer["error"]["message"]
        until(lambda: not engine.requests)


def test_a_model_without_hidden_states_refuses(serving, fake, ask):
    engine = fake()
    engine.embedding_size = None
    with serving(engine) as (url, _):
        status, answer, _ = ask(url, PATH, {"input": "a"})
    assert status == 400 and "this model has no embeddings" in answer["error"]["message"]


@pytest.fixture(scope="module")
def real():
    from tests.server.conftest import serve

    llm = LLM("tiny", num_pages=300, max_num_seqs=16, swap_space=0)
    with serve(llm.engine) as (url, _):
        yield url, llm.engine.model


def expected(model, text, pooling):
    hidden = model.full(torch.tensor([list(text.encode())]))[0].double()
    vector = hidden[-1] if pooling == "last" else hidden.mean(0)
    return vector / vector.norm()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_vectors_are_hidden_states_of_the_model(real, ask, pooling):
    """Also while another request generates, and with a cached prefix."""
    url, model = real
    texts, answer = [LONG, LONG + "from", "x"], {}
    for _ in range(2):
        status, answer, _ = ask(url, PATH, {"input": texts, "pooling": pooling})
        assert status == 200, answer
        for text, entry in zip(texts, answer["data"], strict=True):
            vector = torch.tensor(entry["embedding"], dtype=torch.float64)
            assert torch.allclose(vector, expected(model, text, pooling), atol=1e-5, rtol=0)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    metrics = ask(url, "/metrics")[1]
    assert "onchip_tokens_generated_total 0.0" in metrics


def test_many_inputs_delay_no_stream(real, ask, open_stream):
    """700 inputs at once, beside a stream; the server stays ready."""
    url, _ = real
    stream = open_stream(url, max_tokens=60, ignore_eos=True)
    started = time.monotonic()
    status, answer, _ = ask(url, PATH, {"input": ["a word"] * 700, "encoding_format": "base64"})
    assert status == 200 and len(answer["data"]) == 700, answer
    assert stream.getresponse().read().count(b"data: ") > 30
    assert time.monotonic() - started < 60
