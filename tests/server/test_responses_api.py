"""/v1/responses, judged by the official client: its types, and its accumulator of events.

The fake engine repeats its prompt, so a response shows what the template wrote.
"""

import json
from importlib.util import find_spec

import pytest

from onchip.engine.llm import LLM
from onchip.server.protocol import CachedTokens, Usage
from onchip.server.response_events import ResponseWriter
from onchip.server.response_items import ResponsesRequest
from onchip.server.responses import ChoiceDelta
from onchip.server.tools import CallDelta
from tests.server.conftest import serve
from tests.server.tools.test_calls import (
    ARGUMENTS,
    PARAMETERS,
    TEXTS,
    ScriptedEngine,
    client_of,
)

openai = pytest.importorskip("openai")

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(client, **options):
    """What the template wrote: the fake engine says it."""
    return client.responses.create(model="fake", max_output_tokens=400, **options).output_text


def names(events):
    """The types of events, repeated deltas once."""
    seen = []
    for event in events:
        name = event.type.removeprefix("response.")
        if not (seen and name.endswith(".delta") and seen[-1] == name):
            seen.append(name)
    return seen


def test_a_whole_response(client):
    done = client.responses.create(model="fake", input="hello", max_output_tokens=9)
    (item,) = done.output
    assert done.object == "response" and done.id.startswith("resp_") and done.model == "fake"
    assert done.output_text == "user: hel" and item.type == "message" and item.id.startswith("msg_")
    assert (done.status, item.status) == ("incomplete", "incomplete")
    assert done.incomplete_details.reason == "max_output_tokens" and done.error is None
    usage = done.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (22, 9, 31)
    assert usage.input_tokens_details.cached_tokens == 2
    assert done.store is False and done.background is False and done.truncation == "disabled"


def test_a_response_that_stops_by_itself_is_completed():
    with client_of(ScriptedEngine("It is done."), "plain") as client:
        done = client.responses.create(model="fake", input="hello")
        events = list(client.responses.create(model="fake", input="hello", stream=True))
    assert (done.status, done.incomplete_details) == ("completed", None) and done.completed_at
    assert done.output_text == "It is done." and done.output[0].status == "completed"
    assert names(events) == ["created", "in_progress", *TEXT_EVENTS, *TEXT_END, "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress" and not events[0].response.output
    assert events[0].response.usage is None
    last = events[-1].response
    assert (
        last.output_text == "It is done." and last.usage.output_tokens == done.usage.output_tokens
    )
    assert last.id == events[0].response.id
    parts = [event.delta for event in events if event.type.endswith("output_text.delta")]
    assert len(parts) > 1 and "".join(parts) == "It is done."


def test_the_accumulator_of_the_client_follows_the_events():
    with (
        client_of(ScriptedEngine("It is döne."), "plain") as client,
        client.responses.stream(model="fake", input="hello") as stream,
    ):
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        done = stream.get_final_response()
    assert texts[-1] == done.output_text == "It is döne." and len(texts) > 1


def test_a_stream_is_plain_server_sent_events(shared, ask):
    """Each event has its name, and there is no [DONE]."""
    _, answer, headers = ask(shared, PATH, {"input": "a", "stream": True, "max_output_tokens": 2})
    assert headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.strip().split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_fields_of_the_request_are_in_the_response(client):
    sent = {"metadata": {"run": "1"}, "temperature": 0.5, "top_p": 0.9, "instructions": "Be brief."}
    sent |= {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}
    more = {"parallel_tool_calls": False, "tools": [TIME], "tool_choice": "none"}
    done = client.responses.create(model="fake", input="a", max_output_tokens=1, **sent, **more)
    assert {name: getattr(done, name) for name in sent} == sent
    assert done.parallel_tool_calls is False and done.tool_choice == "none"
    assert done.tools[0].name == "time" and done.text.format.type == "text"


class TestInput:
    def test_instructions_are_the_system_message(self, client):
        text = prompt_of(client, input="hello", instructions="Be brief.")
        assert text.startswith("system: Be brief.\nuser: hello")

    def test_messages_have_texts_or_parts(self, client):
        parts = [{"type": "input_text", "text": "he"}, {"type": "input_text", "text": "llo"}]
        items = [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
            {"role": "user", "content": "bye"},
        ]
        text = prompt_of(client, input=items)
        assert text.startswith("system: Be brief.\nuser: hello\nassistant: hi\nuser: bye")

    def test_an_output_can_be_sent_back(self, client):
        done = client.responses.create(model="fake", input="hello", max_output_tokens=4)
        for back in (done.output, [item.model_dump() for item in done.output]):
            items = [{"role": "user", "content": "hello"}, *back, {"role": "user", "content": "x"}]
            assert prompt_of(client, input=items).startswith(
                "user: hello\nassistant: user\nuser: x"
            )

    def test_calls_and_their_outputs_become_messages(self):
        items = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "One moment."},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "7 C"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "noon"}],
            },
            {"type": "function_call", "call_id": "c3", "name": "time", "arguments": "{}"},
        ]
        chat = ResponsesRequest.model_validate({"input": items}).make_chat()
        user, assistant, *outputs, last = chat.plain_messages
        assert user == {"role": "user", "content": "Weather?"}
        assert assistant["content"] == "One moment."
        assert [call["function"] for call in assistant["tool_calls"]] == [
            {"name": "weather", "arguments": {"a": 1}},
            {"name": "time", "arguments": {}},
        ]
        assert [(m["role"], m["tool_call_id"], m["content"]) for m in outputs] == [
            ("tool", "c1", "7 C"),
            ("tool", "c2", "noon"),
        ]
        assert [call["id"] for call in last["tool_calls"]] == ["c3"] and not last["content"]


class TestTools:
    @pytest.mark.parametrize("dialect", TEXTS)
    def test_four_dialects_whole_and_streamed(self, dialect):
        options = {"model": "fake", "input": "hello", "tools": [WEATHER, TIME]}
        with client_of(ScriptedEngine(TEXTS[dialect]), dialect) as client:
            done = client.responses.create(**options)
            events = list(client.responses.create(**options, stream=True))
            with client.responses.stream(**options) as stream:
                for _ in stream:
                    pass
                accumulated = stream.get_final_response()
        for response in (done, events[-1].response, accumulated):
            assert response.status == "completed"
            calls = [item for item in response.output if item.type == "function_call"]
            assert [(call.name, call.arguments) for call in calls] == [
                ("weather", ARGUMENTS),
                ("time", "{}"),
            ]
            assert all(call.call_id and call.id.startswith("fc_") for call in calls)
            texts = [item for item in response.output if item.type == "message"]
            assert bool(texts) == TEXTS[dialect].startswith("One.")
        one = ["output_item.added", "function_call_arguments.delta"]
        one += ["function_call_arguments.done", "output_item.done"]
        assert names(events)[-9:] == [*one, *one, "completed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))

    @pytest.mark.skipif(not find_spec("llguidance"), reason="the extra structured is not here")
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_named_function_is_forced(self, stream):
        llm = LLM("tiny", num_pages=300, max_num_seqs=8, swap_space=0)
        options = {"model": "fake", "input": "hello", "tools": [WEATHER, TIME], "temperature": 0}
        options |= {"tool_choice": {"type": "function", "name": "weather"}, "stream": stream}
        with client_of(llm.engine, "plain") as client:
            done = client.responses.create(**options, max_output_tokens=200)
            done = list(done)[-1].response if stream else done
        (call,) = done.output
        assert call.name == "weather" and set(json.loads(call.arguments)) == {"city", "days"}


@pytest.mark.skipif(not find_spec("llguidance"), reason="the extra structured is not here")
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_format_is_followed(kind):
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["x"], "additionalProperties": False}
    format = {"type": kind}
    if kind == "json_schema":
        format |= {"name": "point", "schema": schema, "strict": True}
    llm = LLM("tiny", num_pages=300, max_num_seqs=8, swap_space=0)
    options = {"model": "fake", "input": "A point:", "text": {"format": format}, "temperature": 0}
    with client_of(llm.engine, "plain") as client:
        done = client.responses.create(**options, max_output_tokens=300)
    assert done.text.format.type == kind
    if kind == "json_schema":
        assert set(json.loads(done.output_text)) == {"x"} and done.status == "completed"
        assert done.text.format.schema_ == schema
    else:
        assert done.output_text.startswith("{")


REFUSED = [
    ({"previous_response_id": "resp_1"}, "nothing is stored"),
    ({"conversation": "conv_1"}, "nothing is stored"),
    ({"store": True}, "nothing is stored"),
    ({"background": True}, "false, or leave it out"),
    ({"truncation": "auto"}, '"disabled", or leave it out'),
    ({"include": ["message.output_text.logprobs"]}, "null, or leave it out"),
    ({"top_logprobs": 3}, "chats have logprobs"),
    ({"prompt": {"id": "p"}}, "null, or leave it out"),
    ({"tools": [{"type": "web_search"}]}, "other tools are not"),
    ({"tool_choice": {"type": "allowed_tools"}}, "not served"),
    ({"tool_choice": "required"}, "tool_choice needs tools"),
    ({"text": {"format": {"type": "grammar"}}}, "text, json_object or json_schema"),
    ({"text": {"verbosity": "high"}}, '"medium", or leave it out'),
    ({"reasoning": {"summary": "auto"}}, "null, or leave it out"),
    ({"metadata": {"a": 1}}, "up to 16 texts"),
    ({"metadata": {str(i): "" for i in range(17)}}, "up to 16 texts"),
    ({"input": []}, "send at least one"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "function_call_output"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "function_call_output"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "images, files"),
    ({"input": [{"role": "tool", "content": "a"}]}, '"system", "developer", "user"'),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "call_id is missing"),
    ({"max_output_tokens": 0}, "at least 1"),
    ({"temperature": 3}, "at most 2"),
    ({"messages": []}, "Unrecognized request argument supplied: messages"),
    ({"model": "other"}, "there is no model 'other'"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_served_is_refused_in_a_sentence(shared, ask, more, message):
    status, answer, _ = ask(shared, PATH, {"input": "a", **more})
    assert status in (400, 404) and message in answer["error"]["message"], answer


def test_defaults_are_accepted(client):
    """A client that sends every field at its default."""
    sent = {"store": False, "background": False, "truncation": "disabled", "include": []}
    sent |= {"previous_response_id": None, "service_tier": "auto", "top_logprobs": 0, "tools": []}
    sent |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "metadata": None}
    sent |= {"reasoning": {"effort": "low", "summary": None}, "tool_choice": "auto"}
    done = client.responses.create(model="fake", input="a", max_output_tokens=2, **sent)
    assert done.output_text == "us" and done.reasoning.effort == "low"


def test_every_parameter_of_the_openai_client_is_known():
    from openai.types.responses import response_create_params as params

    known = set(ResponsesRequest.model_fields)
    assert set(params.ResponseCreateParamsBase.__annotations__) <= known


def test_a_failure_in_a_stream_is_an_event(serving, fake, ask):
    """The engine fails this prompt after 3 tokens."""
    tokenizer = fake().tokenizer
    engine = fake(step_s=0.02)
    tokenizer.chat_template = "fail"
    engine.tokenizer = tokenizer
    with serving(engine) as (url, _):
        assert ask(url, PATH, {"input": "a"})[0] == 500
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            events = list(client.responses.create(model="fake", input="a", stream=True))
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error" and "failed" in last.response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (item,) = last.response.output
    assert item.status == "incomplete" and item.content[0].text == "fa"


def test_a_deadline_and_a_client_that_leaves_end_the_request(serving, fake, ask, connect, until):
    engine = fake(step_s=0.02)
    with serving(engine) as (url, _):
        status, answer, _ = ask(url, PATH, {"input": "a", "deadline_s": 0.1})
        assert status == 408 and answer["error"]["code"] == "deadline"
        connection = connect(url)
        headers = {"content-type": "application/json"}
        body = {"input": "a", "stream": True, "max_output_tokens": 3000}
        connection.request("POST", PATH, json.dumps(body), headers)
        until(lambda: engine.requests)
        connection.close()
        until(lambda: not engine.requests)


def test_a_prefix_of_a_chat_is_shared_with_it(ask):
    """The prompt is that of the chat with the same messages."""
    llm = LLM("tiny", num_pages=300, max_num_seqs=8, swap_space=0)
    with serve(llm.engine) as (url, _):
        messages = [{"role": "user", "content": "Only once is this computed. " * 4}]
        chat = {"messages": messages, "max_tokens": 1}
        usage = ask(url, "/v1/chat/completions", chat)[1]["usage"]
        done = ask(url, PATH, {"input": messages, "max_output_tokens": 1})[1]
    assert done["usage"]["input_tokens"] == usage["prompt_tokens"]
    cached = done["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == usage["prompt_tokens"] - 1


def test_a_delta_may_end_a_call_and_begin_a_text_and_a_call():
    """Arguments belong to the call before the text, whatever a delta joins."""
    writer = ResponseWriter(ResponsesRequest.model_validate({"input": "a"}), "fake")
    delta = lambda text, *calls: ChoiceDelta(0, text, [], 0, calls=calls)
    writer.push(delta("", CallDelta(0, "c1", "weather", '{"a": 1')))
    events = writer.push(
        delta("Done.", CallDelta(0, None, None, "23}"), CallDelta(1, "c2", "time", "{}"))
    )
    counts = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    writer.finish(Usage(**counts, prompt_tokens_details=CachedTokens(cached_tokens=0)))
    first, message, second = writer.response.output
    assert (first.name, first.arguments, first.status) == ("weather", '{"a": 123}', "completed")
    assert message.content[0].text == "Done." and (second.name, second.arguments) == ("time", "{}")
    assert events.index(b'"23}"') < events.index(b"Done.") < events.index(b'"c2"')
