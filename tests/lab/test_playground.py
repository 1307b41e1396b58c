"""The playground keeps the invariants of the pool, and its port to JavaScript is the same, page for
page, after each of 1,000 random operations.
"""

import json
import random

import pytest

from onchip.lab.playground import (
    DRAWN,
    MAX_SEQUENCES,
    MAX_WORDS,
    OPENING,
    OPERATIONS,
    STORY,
    Playground,
)

WEIGHTS = {"add": 5, "generate": 4, "fork": 2, "beam": 3, "truncate": 3, "free": 4, "reset": 0.1}
CONFUSED = DRAWN[:3]  # so few words that prompts often begin alike


def operation(rng, play):
    """One that may be refused: the pool is small."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    who = rng.choice([*play.sequences, "Z9"])
    if name == "add":
        return {"do": name, "text": " ".join(rng.choices(CONFUSED, k=rng.randint(1, 19)))}
    if name == "generate":
        return {"do": name, "name": rng.choice([None, who])}
    if name == "truncate":
        return {"do": name, "name": who, "count": rng.randint(0, 9)}
    return {"do": name, "name": who}


def life(seed, count):
    """(operation, answer, state after it) of a random life, checked after each step."""
    rng, play = random.Random(seed), Playground()
    for _ in range(count):
        what = operation(rng, play)
        answer = play.do(what)
        play.pool.check()
        play.index.check()
        for s in play.sequences.values():
            assert play.read(s) == play.words(s), (what, answer)
        yield what, answer, play.state()


def test_pages_of_a_table_hold_its_words_after_forks_and_copies():
    steps = list(life(1, 1_000))
    done = {what["do"] for what, answer, _ in steps if answer["ok"]}
    assert done == set(OPERATIONS)
    assert any(state["copies"] for _, _, state in steps) and any(s["shared"] for _, _, s in steps)
    sentences = " ".join(answer["say"] for _, answer, _ in steps)
    for words in ("free a sequence", "is partly cached", "dropped"):
        assert words in sentences


def test_the_port_to_javascript_holds_the_same_pages_after_each_of_1000_operations(tab):
    operations, answers, states = zip(*life(7, 1_000), strict=True)
    script = """(operations) => {
      const play = new lab.localPool.Playground(lab.data.pages);
      return JSON.stringify(operations.map((one) => [play.do(one), play.state()]));
    }"""
    in_browser = json.loads(tab.evaluate(script, list(operations)))
    for i, (answer, state) in enumerate(in_browser):
        assert (answer, state) == (answers[i], states[i]), (i, operations[i])


def test_a_repeated_prompt_is_found_in_free_pages():
    play = Playground()
    play.do({"do": "add", "text": "a b c d e f g h i"})
    play.do({"do": "free", "name": "A"})
    assert play.state()["cached"] == 3
    answer = play.do({"do": "add", "text": "a b c d e f g h x"})
    assert answer["say"] == "B is partly cached: 2 pages shared. Only the rest is computed."


def test_what_a_visitor_sees_first_and_the_story_can_all_be_done():
    play = Playground()
    answers = [play.do(what) for what in (*OPENING, *STORY)]
    assert all(answer["ok"] for answer in answers), answers
    assert "copied to" in " ".join(a["say"] for a in answers) and "shared" in answers[-2]["say"]


def test_refused_operations_change_nothing():
    play = Playground()
    for _ in range(MAX_SEQUENCES):
        play.do({"do": "add", "text": "a b c d e f g"})
    for bad in (
        {"do": "fork", "name": "A"},
        {"do": "add", "text": "b"},
        {"do": "beam", "name": "A"},
    ):
        before = play.state()
        answer = play.do(bad)
        assert answer == {"ok": False, "say": "12 sequences are the most: free one."}
        assert play.state() == {**before, "copies": []}


def test_a_full_pool_and_the_longest_sequence_are_refused():
    play = Playground()
    words = [str(i) for i in range(2 * MAX_WORDS)]
    for half in (words[:MAX_WORDS], words[MAX_WORDS:]):
        assert play.do({"do": "add", "text": " ".join(half)})["ok"]
    answer = play.do({"do": "add", "text": "one more"})
    assert answer["say"].startswith("That needs 1 page and 0 are free")
    assert play.do({"do": "generate", "name": None})["say"].startswith("A has 48 words")


def test_words_are_not_gathered_for_ever(monkeypatch):
    monkeypatch.setattr("onchip.lab.playground.MAX_VOCABULARY", 3)
    play = Playground()
    assert play.do({"do": "add", "text": "a b c d"})["ok"]
    answer = play.do({"do": "add", "text": "a"})
    assert answer == {"ok": False, "say": "More than 3 words were used: start over."}
    play.do({"do": "reset"})
    assert play.do({"do": "add", "text": "a"})["ok"]


@pytest.mark.parametrize(
    "bad", [{}, {"do": "__init__"}, {"do": "add"}, {"do": "add", "text": 3}, {"do": ["add"]}]
)
def test_invalid_operations_raise(bad):
    with pytest.raises(ValueError, match="must be"):
        Playground().do(bad)
