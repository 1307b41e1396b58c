"""Prompts with a common beginning have their first keys in common."""

import pytest

from onchip.kvcache.prefix import chain_keys, pack_token_ids
from onchip.server.replicas.prompts import MAX_KEYS, prompt_keys


def common(a, b, salts=(b"", b"")):
    keys = [prompt_keys(body, salt) for body, salt in zip((a, b), salts, strict=True)]
    shared = 0
    while shared < min(map(len, keys)) and keys[0][shared] == keys[1][shared]:
        shared += 1
    assert not set(keys[0][shared:]) & set(keys[1][shared:])  # nothing in common later
    return shared


def test_texts():
    assert common({"prompt": "a" * 200 + "b" * 100}, {"prompt": "a" * 200 + "c" * 100}) == 3
    assert common({"prompt": "x" + "a" * 200}, {"prompt": "a" * 201}) == 0


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: [ids, [7]]])
def test_token_ids_have_the_pages_of_the_cache(wrap):
    a, b = [*range(40), 1, 2], [*range(40), 3]
    assert common({"prompt": wrap(a)}, {"prompt": wrap(b)}) == 2
    assert len(prompt_keys({"prompt": wrap(list(range(64)))})) == 4


def test_a_conversation_continues_its_turns():
    system = {"role": "system", "content": "Answer in rhymes. " * 20}
    first = {"messages": [system, {"role": "user", "content": "first question " * 20}]}
    answer = {"role": "assistant", "content": "answer " * 20}
    second = {"messages": [*first["messages"], answer]}
    other = {"messages": [system, {"role": "user", "content": "another"}]}
    assert common(first, second) == len(prompt_keys(first))
    assert 0 < common(first, other) < len(prompt_keys(first))
    assert common(first, {**first, "tools": [{"type": "function"}]}) == 0


def test_a_response_is_a_conversation():
    """Its instructions come first; a text is the first turn of a list of items."""
    path, question = "/v1/responses", "first question " * 20
    keys = lambda **body: prompt_keys(body, b"", path)
    one = keys(input=question)
    user, answer = {"role": "user", "content": question}, {"role": "assistant", "content": "a"}
    assert len(one) > 3 and keys(input=[user, answer])[: len(one)] == one
    assert prompt_keys({"messages": [user]}) == one  # pages of the same chat
    brief = keys(input=question, instructions="Be brief. " * 9)
    assert not set(brief) & set(one)
    assert brief[0] == keys(input="another", instructions="Be brief. " * 9)[0]
    assert not set(keys(input=question, tools=[{"type": "function"}])) & set(one)


def test_the_input_of_an_embedding_is_a_prompt():
    path = "/v1/embeddings"
    assert prompt_keys({"input": "a" * 200}, b"", path) == prompt_keys({"prompt": "a" * 200})
    ids = list(range(64))
    for sent in (ids, [ids, [7]]):
        assert prompt_keys({"input": sent}, b"", path) == prompt_keys({"prompt": ids})


def test_tenants_have_no_key_in_common():
    body = {"prompt": "a" * 640}
    assert common(body, body, (b"one", b"two")) == 0
    assert common(body, {**body, "cache_salt": "private"}) == 0
    assert common({**body, "cache_salt": "x"}, {**body, "cache_salt": "x"}) == 10


def test_texts_and_token_ids_do_not_meet():
    assert common({"prompt": "a" * 128}, {"prompt": [97] * 128}) == 0


def test_a_long_prompt_has_few_keys():
    assert len(prompt_keys({"prompt": "a" * (1 << 20)})) == MAX_KEYS


@pytest.mark.parametrize(
    "body",
    [
        *(None, 5, [], {}, {"prompt": None}, {"prompt": 5.5}, {"prompt": ["a", 3]}),
        *({"prompt": [2**70]}, {"prompt": [0.5]}, {"prompt": {}}, {"prompt": "short"}),
        *({"messages": 3}, {"messages": [None]}, {"prompt": "\ud800" * 9}),
        {"prompt": "p", "cache_salt": {}},
    ],
)
def test_a_body_without_a_valid_prompt_has_no_keys(body):
    assert prompt_keys(body) == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
@pytest.mark.parametrize("sent", [None, 5, {}, [], [None], [0.5], [2**70], "", {"input": "a"}])
def test_an_invalid_input_has_no_keys(path, sent):
    assert prompt_keys({"input": sent, "instructions": 5, "tools": 7}, b"", path) == []


def test_chains_are_those_of_the_cache():
    ids = pack_token_ids(range(50)).tobytes()
    keys = chain_keys(b"root", ids, 16 * 8, 100)
    assert len(keys) == len(set(keys)) == 3
    assert chain_keys(b"root", ids[: 2 * 16 * 8], 16 * 8, 100) == keys[:2]
    assert chain_keys(b"root", ids, 16 * 8, 1) == keys[:1]
