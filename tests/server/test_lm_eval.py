"""The protocol of `local-completions` of the LM Evaluation Harness (lm_eval 0.4.13): the bodies
that it sends, and what it reads from the responses. The package itself is not needed.
"""

from operator import itemgetter

import pytest
import torch

from onchip.engine.llm import LLM
from tests.server.conftest import serve

PATH = "/v1/completions"
PAIRS = [
    ("And God said, Let there be", " light"),
    ("the children of", " Israel"),
    ("the children of", " zqxvk"),
    ("a", "b"),
    ("hé", "llo €"),
]
TASKS = [(list(context.encode()), list(after.encode())) for context, after in PAIRS]


@pytest.fixture(scope="module")
def real():
    llm = LLM("tiny", num_pages=600, max_num_seqs=16, swap_space=0)
    with serve(llm.engine) as (url, _):
        yield url, llm.engine.model


def score_body(prompt):
    """The body of a loglikelihood: one token is generated and ignored."""
    fixed = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return {"model": "fake", "prompt": prompt, **fixed}


def read_scores(answer, context_lengths):
    """(sum of logprobs, whether every token is the most probable) of each continuation."""
    scores = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, start in zip(choices, context_lengths, strict=True):
        given = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        pairs = zip(given, tops, strict=True)
        scores.append((sum(given), all(p == max(top.values()) for p, top in pairs)))
    return scores


def expected(model, context, after):
    """By definition, without pages, engine and server."""
    ids = torch.tensor([*context, *after])
    logprobs = model.logits(model.full(ids[None])[0]).log_softmax(-1)[len(context) - 1 : -1]
    tokens = ids[len(context) :]
    total = logprobs.gather(1, tokens[:, None]).sum().item()
    return total, torch.equal(logprobs.argmax(-1), tokens)


def check(model, tasks, answer):
    scores = read_scores(answer, [len(context) for context, _ in tasks])
    for (context, after), (total, is_greedy) in zip(tasks, scores, strict=True):
        wanted, best = expected(model, context, after)
        assert total == pytest.approx(wanted, abs=1e-3) and is_greedy == best


def test_scores_of_one_prompt_at_a_time(real, ask):
    """A batch of one is a list of one list of ids; without token ids it is a text."""
    url, model = real
    for context, after in TASKS:
        prompt = [context + after]
        status, answer, _ = ask(url, PATH, score_body(prompt))
        assert status == 200, answer
        check(model, [(context, after)], answer)
        status, answer, _ = ask(url, PATH, score_body(bytes(prompt[0]).decode()))
        check(model, [(context, after)], answer)


def test_scores_of_a_batch(real, ask):
    """As often as it is sent: scores do not depend on what the cache holds."""
    url, model = real
    for _ in range(2):
        answer = ask(url, PATH, score_body([a + b for a, b in TASKS]))[1]
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(TASKS)))
        check(model, TASKS, answer)
    texts = [bytes(a + b).decode() for a, b in TASKS]
    check(model, TASKS, ask(url, PATH, score_body(texts))[1])


def test_a_generated_end_token_is_in_the_lists(ask):
    """The last entry of the lists is always the generated token, which is dropped."""
    llm = LLM("tiny", num_pages=100, max_num_seqs=4, swap_space=0)
    llm.engine.eos_token_ids = tuple(range(257))
    with serve(llm.engine) as (url, _):
        answer = ask(url, PATH, score_body([TASKS[0][0] + TASKS[0][1]]))[1]
        check(llm.engine.model, TASKS[:1], answer)
        (choice,) = answer["choices"]
        count = len(TASKS[0][0] + TASKS[0][1])
        assert choice["finish_reason"] == "stop"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(choice["logprobs"][name]) == count + 1
        assert choice["logprobs"]["token_logprobs"][0] is None


def test_a_prompt_of_the_longest_length_is_scored(real, ask):
    """The harness cuts prompts to max_length - 1 tokens: one more is generated."""
    url, _ = real
    limit = ask(url, "/v1/models")[1]["data"][0]["max_model_len"]
    status, answer, _ = ask(url, PATH, score_body([[97] * (limit - 1)]))
    assert status == 200 and len(answer["choices"][0]["logprobs"]["tokens"]) == limit
    status, answer, _ = ask(url, PATH, score_body([[97] * limit]))
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_scoring_without_a_generated_token_has_the_same_scores(real, ask):
    """max_tokens 0, as some clients send; lists are then as long as the prompt."""
    url, model = real
    prompts = [a + b for a, b in TASKS]
    answer = ask(url, PATH, score_body(prompts) | {"max_tokens": 0})[1]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(prompt)
        for name in ("token_logprobs", "top_logprobs"):
            choice["logprobs"][name].append(None)  # the place of the generated token
    check(model, TASKS, answer)


def test_generations_of_a_batch(real, ask):
    """The body of generate_until; texts are read by the index of their choice."""
    url, _ = real
    rest = {"max_tokens": 12, "temperature": 0, "stop": ["\n", ".", "<|endoftext|>"], "seed": 1234}
    prompts = [list(b"And it came to pass in those"), list(b"In the beginning God created the")]
    answer = ask(url, PATH, {"prompt": prompts, "model": "fake", **rest})[1]
    texts = [""] * len(answer["choices"])
    for choice in answer["choices"]:
        texts[choice["index"]] = choice["text"]
    assert texts[0].startswith(" days") and texts[1] and not any("\n" in t for t in texts)
