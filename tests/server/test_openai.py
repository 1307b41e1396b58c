"""The official OpenAI client completes, streams and cancels."""

import pytest

openai = pytest.importorskip("openai")
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(stream):
    chunks = list(stream)
    return "".join(c.choices[0].text for c in chunks if c.choices), chunks


class TestCompletions:
    def test_a_whole_response(self, client):
        done = client.completions.create(model="fake", prompt="abc", max_tokens=7)
        (choice,) = done.choices
        assert (choice.text, choice.finish_reason, choice.index) == ("abcabca", "length", 0)
        assert done.object == "text_completion" and done.id.startswith("cmpl-")
        usage = done.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)
        assert usage.prompt_tokens_details.cached_tokens == 2

    def test_prompts_and_samples_are_numbered_in_order(self, client):
        done = client.completions.create(model="fake", prompt=["ab", "xyz"], n=2, max_tokens=3)
        assert [(c.index, c.text) for c in done.choices] == [
            *((0, "aba"), (1, "bab"), (2, "xyz"), (3, "yzx"))
        ]
        assert done.usage.prompt_tokens == 5 and done.usage.completion_tokens == 12

    @pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]]])
    def test_token_ids_are_a_prompt(self, client, prompt):
        assert client.completions.create(model="fake", prompt=prompt).choices[0].text[:2] == "ab"

    def test_a_stream_adds_up_to_the_whole_response(self, client):
        options = {"model": "fake", "prompt": "héllo", "max_tokens": 11, "n": 2}
        whole = client.completions.create(**options)
        texts = {0: "", 1: ""}
        reasons = {}
        for chunk in client.completions.create(**options, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
            assert chunk.usage is None
        assert [texts[c.index] for c in whole.choices] == [c.text for c in whole.choices]
        for given in reasons.values():
            assert given[-1] == "length" and not any(given[:-1])

    def test_a_stream_ends_with_its_usage_if_requested(self, client):
        options = {"model": "fake", "prompt": "abc", "max_tokens": 5, "stream": True}
        _, chunks = text_of(
            client.completions.create(**options, stream_options={"include_usage": True})
        )
        assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 5
        assert all(c.usage is None for c in chunks[:-1])

    def test_every_chunk_has_the_usage_so_far_if_requested(self, client):
        """Of all choices; the counts only grow, and end at the counts of the whole."""
        reports = {"include_usage": True, "continuous_usage_stats": True}
        options = {"model": "fake", "prompt": ["abc", "xy"], "max_tokens": 9, "n": 2}
        _, chunks = text_of(
            client.completions.create(**options, stream=True, stream_options=reports)
        )
        usages = [chunk.usage for chunk in chunks]
        assert not chunks[-1].choices and usages[-1] == usages[-2]
        assert {usage.prompt_tokens for usage in usages} == {5}
        made = [usage.completion_tokens for usage in usages]
        assert made == sorted(made) and made[0] < made[-1] == 36 and len(set(made)) > 2
        assert all(u.total_tokens == u.prompt_tokens + u.completion_tokens for u in usages)
        assert usages[-1].prompt_tokens_details.cached_tokens == 4

    def test_chunks_that_only_score_count_no_tokens(self, client):
        reports = {"include_usage": True, "continuous_usage_stats": True}
        options = {"model": "fake", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
        _, chunks = text_of(
            client.completions.create(**options, stream=True, stream_options=reports)
        )
        assert {(c.usage.prompt_tokens, c.usage.completion_tokens) for c in chunks} == {(3, 0)}

    def test_a_stop_text_ends_it_and_is_not_shown(self, client):
        options = {"model": "fake", "prompt": "abcdef", "stop": ["de", "zz"], "max_tokens": 30}
        done = client.completions.create(**options)
        (choice,) = done.choices
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("abc", "stop", "de")

    def test_logprobs_come_as_lists(self, client):
        options = {"model": "fake", "prompt": "abc", "max_tokens": 2, "logprobs": 2}
        given = client.completions.create(**options).choices[0].logprobs
        assert given.tokens == ["a", "b"] and given.token_logprobs == [-0.5, -0.5]
        assert given.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}]
        assert given.text_offset == [0, 1]

    def test_streamed_logprobs_equal_the_whole_response(self, client):
        options = {"model": "fake", "prompt": "abc", "max_tokens": 9, "logprobs": 0, "echo": True}
        whole = client.completions.create(**options).choices[0].logprobs
        parts = [
            c.choices[0].logprobs
            for c in client.completions.create(**options, stream=True)
            if c.choices[0].logprobs
        ]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert sum((getattr(p, name) for p in parts), []) == getattr(whole, name)

    def test_echo_puts_the_prompt_first(self, client):
        options = {"model": "fake", "prompt": ["abc", [120, 121]], "max_tokens": 2, "echo": True}
        done = client.completions.create(**{**options, "prompt": "abc"})
        assert done.choices[0].text == "abcab"
        streamed, _ = text_of(
            client.completions.create(**{**options, "prompt": [120, 121]}, stream=True)
        )
        assert streamed == "xyxy"

    def test_max_tokens_0_scores_the_prompt(self, client):
        options = {"model": "fake", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
        done = client.completions.create(**options)
        (choice,) = done.choices
        assert choice.text == "abc" and choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == [None, -0.25, -0.25]
        assert done.usage.completion_tokens == 0

    def test_fields_unknown_to_the_client_are_sent_as_extra_body(self, client):
        extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "priority": 3, "deadline_s": 30}
        done = client.completions.create(model="fake", prompt="a", extra_body=extra)
        assert done.choices[0].text


class TestChats:
    def test_a_whole_response(self, client):
        done = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5)
        (choice,) = done.choices
        assert choice.message.role == "assistant" and choice.message.content == "user:"
        assert done.object == "chat.completion" and choice.finish_reason == "length"

    def test_a_stream_opens_with_the_role(self, client):
        stream = client.chat.completions.create(
            model="fake", messages=HELLO, max_completion_tokens=6, n=2, stream=True
        )
        chunks = list(stream)
        assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", "assistant"]
        texts = {0: "", 1: ""}
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == {0: "user: ", 1: "ser: h"}

    def test_every_chunk_has_the_usage_so_far_if_requested(self, client):
        reports = {"include_usage": True, "continuous_usage_stats": True}
        stream = client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=6, stream=True, stream_options=reports
        )
        usages = [chunk.usage for chunk in stream]
        assert (usages[0].prompt_tokens, usages[0].completion_tokens) == (22, 0)
        assert usages[-1].completion_tokens == 6 and usages[-1] == usages[-2]

    def test_continuous_usage_needs_usage(self, client):
        options = {"model": "fake", "messages": HELLO, "stream": True}
        with pytest.raises(openai.BadRequestError, match="needs include_usage"):
            client.chat.completions.create(
                **options, stream_options={"continuous_usage_stats": True}
            )

    def test_parts_of_text_are_one_text(self, client):
        parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
        options = {
            "model": "fake",
            "max_tokens": 30,
            "messages": [{"role": "user", "content": parts}],
        }
        done = client.chat.completions.create(**options)
        assert done.choices[0].message.content.startswith("user: hello")

    def test_a_developer_is_the_system(self, client):
        messages = [{"role": "developer", "content": "be brief"}]
        done = client.chat.completions.create(model="fake", messages=messages, max_tokens=7)
        assert done.choices[0].message.content == "system:"

    def test_logprobs_come_with_bytes(self, client):
        done = client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=1
        )
        first, _ = done.choices[0].logprobs.content
        assert (first.token, first.logprob, first.bytes) == ("u", -0.5, [117])
        assert [t.token for t in first.top_logprobs] == ["u"]

    def test_without_max_tokens_the_model_limit_applies(self, client):
        done = client.chat.completions.create(model="fake", messages=HELLO, stop=" hel")
        assert done.choices[0].finish_reason == "stop" and done.usage.completion_tokens > 4


class TestEnds:
    def test_a_stream_that_is_closed_is_cancelled(self, client, shared_engine, until):
        shared_engine.step_s = 0.005
        options = {"model": "fake", "prompt": "abc", "max_tokens": 4000, "stream": True}
        with client.completions.create(**options) as stream:
            next(iter(stream))
            assert shared_engine.requests
        until(lambda: not shared_engine.requests)
        assert shared_engine.cancelled
        shared_engine.step_s = 0.0

    def test_errors_raise_the_exceptions_of_the_client(self, client):
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
            client.completions.create(model="gpt-4", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="fake", prompt="a", temperature=9)
        with pytest.raises(openai.BadRequestError, match="too many"):
            client.completions.create(model="fake", prompt="a" * 5000)

    def test_the_models_are_listed(self, client):
        assert [m.id for m in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").max_model_len == 4096
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/other")
