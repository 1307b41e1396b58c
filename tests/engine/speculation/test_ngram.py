"""Prompt lookup finds the last earlier occurrence of the longest n-gram, as a plain search does."""

import random

import pytest

from onchip.engine import Request
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.ngram import NgramProposer


def proposer(most, least):
    return NgramProposer(SpeculativeConfig(8, prompt_lookup_max=most, prompt_lookup_min=least))


def propose(one, sample, limit):
    (drafts,) = one.propose([(sample, limit)])
    assert not drafts.parents
    return drafts.tokens


def search(tokens, most, least, limit):
    """By definition."""
    for n in range(most, least - 1, -1):
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at : at + n] == tokens[-n:]:
                grown = list(tokens)
                for i in range(limit):
                    grown.append(grown[at + n + i])
                return tuple(grown[len(tokens) :])
    return ()


@pytest.mark.parametrize("vocabulary", [(0, 1), (0, 1, 256, 65536, 16777216), range(50)])
def test_drafts_follow_the_last_occurrence_of_the_longest_ngram(vocabulary):
    """Ids such as 256 hold the bytes of other ids at other offsets."""
    draw, found = random.Random(1), 0
    for _ in range(300):
        tokens = draw.choices(vocabulary, k=draw.randrange(1, 30))
        most = draw.randrange(1, 5)
        least, limit = draw.randrange(1, most + 1), draw.randrange(1, 9)
        sample = Request("r", tokens).samples[0]
        drafts = propose(proposer(most, least), sample, limit)
        assert drafts == search(tokens, most, least, limit)
        found += bool(drafts)
    assert found > 30


def test_new_tokens_extend_the_search():
    sample, one = Request("r", [3, 4, 5]).samples[0], proposer(2, 2)
    assert propose(one, sample, 4) == ()
    sample.token_ids += [3, 4]
    assert propose(one, sample, 4) == (5, 3, 4, 5)
    assert propose(one, sample, 1) == (5,)
