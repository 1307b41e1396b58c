"""Bodies as agents and libraries send them: defaults are accepted, other values rejected in a
sentence.

The fake engine repeats its prompt, so a response shows what the template wrote.
"""

import json

import pytest

from onchip.engine.tokenizer import ByteTokenizer
from onchip.server.protocol import ChatRequest, CompletionRequest

openai = pytest.importorskip("openai")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
# An agent's history: a call without a text, and its result.
CALL = {"name": "weather", "arguments": '{"city": "Köln"}'}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "7 C"},
]
JSON = {"type": "json_object"}
ROBOT, SILENT = {"role": "robot", "content": "a"}, {"role": "user", "content": None}
FIVE, IMAGE = {"role": "user", "content": 5}, {"role": "user", "content": [{"type": "image_url"}]}
# What each program sends besides messages, with its own names and defaults.
BODIES = {
    "openai": {
        **{"model": "fake", "n": 1, "temperature": 1.0, "top_p": 1.0, "seed": 7, "stop": None},
        **{"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False},
        **{"top_logprobs": 0, "max_completion_tokens": 8, "response_format": {"type": "text"}},
        **{"modalities": ["text"], "tools": [], "tool_choice": "none", "functions": []},
        **{"function_call": "none", "parallel_tool_calls": True, "store": False, "audio": None},
        **{"metadata": {"run": "1"}, "service_tier": "auto", "user": "u-1", "verbosity": "medium"},
        **{"prediction": None, "reasoning_effort": "medium", "prompt_cache_key": "k"},
        **{"prompt_cache_retention": "24h", "safety_identifier": "s", "web_search_options": None},
        **{"stream": False, "stream_options": None},
    },
    "cline": {
        **{"model": "fake", "temperature": 0, "max_tokens": 8, "stream": True},
        **{"stream_options": {"include_usage": True}, "reasoning_effort": "low"},
    },
    "opencode": {
        **{"model": "fake", "max_tokens": 8, "top_p": 0.9, "temperature": 0.5, "stream": True},
        **{"stream_options": {"include_usage": True}, "tool_choice": "auto"},
    },
    "langchain": {
        **{
            "model": "fake",
            "stream": False,
            "n": 1,
            "temperature": 0.7,
            "max_completion_tokens": 8,
        },
        **{"parallel_tool_calls": False, "stop": ["zzz"]},
    },
    "litellm": {
        **{"model": "fake", "max_tokens": 8, "user": "u", "metadata": {"tags": ["a"], "n": 1}},
        **{"stream": False},
    },
    "vllm": {
        **{"model": "fake", "max_tokens": 8, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True},
        **{"spaces_between_special_tokens": True, "add_generation_prompt": True},
        **{"continue_final_message": False, "add_special_tokens": False, "cache_salt": "tenant"},
        **{"chat_template_kwargs": {"enable_thinking": False}, "include_reasoning": True},
        **{"include_stop_str_in_output": False, "bad_words": [], "allowed_token_ids": None},
        **{"structured_outputs": None, "return_token_ids": False, "request_id": "r"},
    },
}


def text_of(reply):
    """The text of a whole response, or of a stream."""
    if isinstance(reply, dict):
        return reply["choices"][0]["message"]["content"]
    events = [e.removeprefix("data: ") for e in reply.split("\n\n") if e][:-1]
    choices = [json.loads(event)["choices"] for event in events]
    return "".join(c[0]["delta"].get("content", "") for c in choices if c)


@pytest.mark.parametrize("messages", [HELLO, HISTORY], ids=["one", "history"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_common_clients_are_served(shared, ask, name, messages):
    status, answer, _ = ask(shared, CHATS, BODIES[name] | {"messages": messages})
    assert status == 200, answer
    assert text_of(answer) == ("user: he" if messages is HELLO else "system: ")


def test_every_parameter_of_the_openai_client_is_known():
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    for params, ours in (
        (chats.CompletionCreateParamsBase, ChatRequest),
        (completions.CompletionCreateParamsBase, CompletionRequest),
    ):
        assert set(params.__annotations__) <= set(ours.model_fields)


def test_a_response_message_can_be_sent_back(shared):
    with openai.OpenAI(base_url=f"{shared}/v1", api_key="none", max_retries=0) as client:
        done = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=4)
        back = [*HELLO, done.choices[0].message.model_dump(), *HELLO]
        again = client.chat.completions.create(model="fake", messages=back, max_tokens=40)
    assert again.choices[0].message.content.startswith("user: hello\nassistant: user\nuser: hello")


@pytest.fixture(scope="module")
def echoing(shared_engine):
    """A tokenizer with a template that writes all template variables."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        "{{ messages | tojson }}|{{ tools | tojson }}|{{ enable_thinking }}|{{ reasoning_effort }}"
        "|{{ add_generation_prompt }}"
    )
    return tokenizer


@pytest.fixture
def seen(serving, fake, ask, echoing):
    """seen(body): the variables that the template saw."""

    def send(**body):
        engine = fake()
        engine.tokenizer = echoing
        with serving(engine) as (url, _):
            status, answer, _ = ask(url, "/tokenize", body)
            assert status == 200, answer
            text = ask(url, "/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]
            return text.split("|")

    return send


def test_the_whole_history_reaches_the_template(seen):
    messages, tools, *_ = seen(messages=HISTORY, tools=[WEATHER])
    messages = json.loads(messages)
    assert messages[1] == {"role": "user", "content": "Weather?"}
    (call,) = messages[2]["tool_calls"]
    assert messages[2]["content"] == "" and call["function"]["arguments"] == {"city": "Köln"}
    assert messages[3] == {"role": "tool", "content": "7 C", "tool_call_id": "call_1"}
    assert json.loads(tools) == [WEATHER]


def test_variables_reach_the_template(seen):
    *_, thinking, effort, prompted = seen(
        messages=HELLO, chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False
    )
    assert (thinking, effort, prompted) == ("False", "", "False")


def test_reasoning_effort_is_a_variable():
    body = ChatRequest(messages=HELLO, reasoning_effort="high")
    assert body.variables()["reasoning_effort"] == "high"
    body = ChatRequest(
        messages=HELLO, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "x"}
    )
    assert body.variables()["reasoning_effort"] == "x"  # the more special one


def test_the_last_message_is_continued(shared, ask):
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 40}
    status, answer, _ = ask(shared, CHATS, body)
    assert status == 200 and text_of(answer).startswith("user: hello\nassistant: Well, Iuser:")


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_tools_are_shown_to_the_model(shared, ask, choice):
    body = {"messages": HELLO, "tools": [WEATHER], "max_tokens": 2} | choice
    status, answer, _ = ask(shared, CHATS, body)
    assert status == 200 and text_of(answer) == "us"


def test_a_cache_salt_separates_prefixes_within_a_key(serving, fake, ask):
    engine = fake()
    with serving(engine, keys=["key-one-1", "key-two-2"]) as (url, _):
        for key in ("key-one-1", "key-two-2"):
            for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
                body = {"prompt": "abc", "max_tokens": 1, **salt}
                assert ask(url, COMPLETIONS, body, authorization=f"Bearer {key}")[0] == 200
    assert len(set(engine.salts)) == 6 and engine.salts[1] == engine.salts[3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tool_choice": "always"}, "tool_choice='always' is not served: send \"none\""),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"response_format": {"type": "xml"}}, "an object of type text, json_object or json_sch"),
        ({"store": True}, "store=true is not served: send false, or leave it out"),
        ({"service_tier": "flex"}, "service_tier='flex' is not served: send \"auto\""),
        ({"verbosity": "low"}, "verbosity='low' is not served"),
        ({"web_search_options": {"a": 1}}, "web_search_options=an object of 1 fields is not"),
        ({"guided_json": 5}, "guided_json=5 is not served: send a JSON schema"),
        ({"guided_json": JSON, "guided_regex": "a"}, "one kind of structured output"),
        ({"functions": [{"name": "f"}]}, "functions=a list of 1 entries is not served"),
        ({"modalities": ["audio"]}, "modalities.0='audio' is not served: send [\"text\"]"),
        ({"temperature": "hot"}, "temperature='hot' is not served: send a number"),
        ({"temperature": 9}, "temperature=9 is not served: send a number of at most 2"),
        ({"n": 0}, "n=0 is not served: send a number of at least 1"),
        ({"stream": "yes"}, "stream='yes' is not served: send true or false"),
        ({"stream_options": {"x": 1}}, "Unrecognized request argument supplied: stream_options.x"),
        ({"max_token": 5}, "supplied: max_token; did you mean max_tokens?"),
        ({"seed": 1.5}, "seed=1.5 is not served: send an integer"),
        ({"user": ["u"]}, "user=a list of 1 entries is not served: send a text"),
        ({"stop": "x" * 1000}, "stop=a text of 1000 characters is not served"),
        ({"stop": 5}, "stop=5 is not served: send a text of 1 to 256"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x='x' is not served: send an object"),
        ({"cache_salt": ""}, "cache_salt='' is not served"),
        ({"reasoning_effort": "huge"}, "reasoning_effort='huge' is not served: send 'none',"),
        ({"messages": "hi"}, "messages='hi' is not served: send a list of 1 to 4096 messages"),
        ({"messages": []}, "messages=a list of 0 entries is not served: send a list of 1 to 4096"),
        ({"messages": [{"content": "a"}]}, "messages.0.role is missing"),
        ({"messages": [ROBOT]}, "messages.0.role='robot' is not served: send \"system\""),
        ({"messages": [FIVE]}, "messages.0.content=5 is not served: send a text, or a list of"),
        ({"messages": [IMAGE]}, "content.0.type='image_url' is not served: send \"text\": images"),
        ({"messages": [SILENT]}, "a message of role user has no content"),
        ({"messages": [{"role": "tool", "content": "7"}]}, "needs tool_call_id"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs cannot set messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template='{{ 1 }}' is not served: send null"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "give one"),
        ({"top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
    ],
)  # fmt: skip
def test_other_values_are_rejected_with_a_message(shared, ask, change, sentence):
    status, answer, _ = ask(shared, CHATS, {"messages": HELLO} | change)
    message = answer["error"]["message"]
    assert status == 400 and sentence in message, message
    assert "Input should" not in message and "pydantic" not in message


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "prompt is missing: it must be given"),
        ({"prompt": 5}, "prompt=5 is not served: send a text, a list of token ids"),
        ({"prompt": [1, "a"]}, "is not served: send a text, a list of token ids"),
        ({"prompt": "a", "suffix": "b"}, "suffix='b' is not served: send \"\", or leave it out"),
        ([1], "the body is not a request"),
        ("text", "the body is not a request"),
    ],
)
def test_invalid_completions_are_rejected_with_a_message(shared, ask, body, sentence):
    status, answer, _ = ask(shared, COMPLETIONS, body)
    assert status == 400 and sentence in answer["error"]["message"], answer


class TestTokenize:
    def test_a_prompt(self, shared, ask):
        status, answer, _ = ask(shared, "/tokenize", {"model": "fake", "prompt": "hé"})
        tokens = list("hé".encode())
        assert status == 200 and answer == {
            **{"count": 3, "max_model_len": 4096, "tokens": tokens, "token_strs": None}
        }
        assert ask(shared, "/detokenize", {"tokens": tokens})[1] == {"prompt": "hé"}

    def test_a_conversation(self, shared, ask):
        body = {"messages": HELLO, "return_token_strs": True, "add_generation_prompt": False}
        answer = ask(shared, "/tokenize", body)[1]
        assert "".join(answer["token_strs"]) == "user: hello\n" and answer["count"] == 12

    def test_texts_longer_than_a_prompt_are_tokenized(self, shared, ask):
        assert ask(shared, "/tokenize", {"prompt": "a" * 10_000})[1]["count"] == 10_000

    @pytest.mark.parametrize(
        ("path", "body", "sentence"),
        [
            ("/tokenize", {}, "give prompt, a text, or messages"),
            ("/tokenize", {"prompt": "a", "messages": HELLO}, "one of them"),
            ("/tokenize", {"prompt": [1]}, "prompt=a list of 1 entries is not served: send a text"),
            ("/tokenize", {"prompt": "a", "model": "x"}, "no model 'x'"),
            ("/detokenize", {"tokens": [-1]}, "tokens.0=-1 is not served"),
            ("/detokenize", {}, "tokens is missing"),
        ],
    )
    def test_invalid_tokenize_bodies_are_rejected(self, shared, ask, path, body, sentence):
        status, answer, _ = ask(shared, path, body)
        assert status in (400, 404) and sentence in answer["error"]["message"], answer
