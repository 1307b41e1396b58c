"""Structured output over HTTP, by the official client, from the built-in model."""

import json
import re
import time

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

HELLO = [{"role": "user", "content": "hello"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
# As a text: a body has at most 512 names in an object.
EXPLODING = json.dumps({"type": "object", "properties": {f"{i:x}": {} for i in range(5000)}})
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def real():
    """The address of a server with the built-in model."""
    from onchip.engine import LLM
    from tests.server.conftest import serve

    with LLM(num_pages=513) as llm, serve(llm.engine) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(real):
    with openai.OpenAI(base_url=f"{real}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_follows_a_schema(client):
    options = {"model": "fake", "messages": HELLO, "max_tokens": 120, "response_format": FORMAT}
    done = client.chat.completions.create(**options, n=2, logprobs=True)
    for choice in done.choices:
        assert choice.finish_reason == "stop" and set(json.loads(choice.message.content)) == {"x"}
    chunks = list(client.chat.completions.create(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert 0 <= json.loads(text)["x"] <= 99


def test_a_chat_is_a_json_object(client):
    options = {"model": "fake", "messages": HELLO, "max_tokens": 60}
    done = client.chat.completions.create(**options, response_format={"type": "json_object"})
    choice = done.choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_json": POINT}, r"\{[^}]*\}"),
        ({"guided_json": json.dumps(POINT)}, r"\{[^}]*\}"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a"+ "b"'}, "a+b"),
        ({"structured_outputs": {"choice": ["left"]}}, "left"),
        ({"response_format": FORMAT}, r"\{[^}]*\}"),
    ],
)
def test_completions_take_the_names_of_vllm(client, extra, pattern):
    done = client.completions.create(
        model="fake", prompt="a", max_tokens=120, temperature=0.5, extra_body=extra
    )
    assert re.fullmatch(pattern, done.choices[0].text), done.choices[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"guided_json": {"type": "frob"}}, "Invalid type: frob"),
        ({"guided_json": "{"}, "is not JSON"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_regex": "(a{1000}){1000}"}, "repeats its parts"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "give one"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "one kind"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos is not served with"),
    ],
)
def test_other_values_are_rejected_with_a_message(real, ask, change, sentence):
    status, answer, _ = ask(real, CHATS, {"messages": HELLO, "stream": True} | change)
    assert status == 400 and sentence in answer["error"]["message"], answer


def test_a_schema_that_explodes_is_rejected_within_a_second(real, ask):
    ask(real, COMPLETIONS, {"prompt": "a", "guided_regex": "a"})  # the worker runs
    started = time.monotonic()
    status, answer, _ = ask(real, COMPLETIONS, {"prompt": "a", "guided_json": EXPLODING})
    assert status == 400 and "not served" in answer["error"]["message"], answer
    assert time.monotonic() - started < 3  # 1 s, and the machine may be busy
    assert ask(real, COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
