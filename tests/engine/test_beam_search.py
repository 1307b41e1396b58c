"""Which continuations survive, and when the search may end."""

from onchip.engine import BeamSearchParams, Request, Sample, Status
from onchip.engine.beam_search import can_stop, choose, select_best


def searching(width, penalty, *beams):
    """A search with these beams: (number of tokens, cumulative logprob, ended)."""
    request = Request("r", (1,), BeamSearchParams(width, 10, length_penalty=penalty))
    request.samples = [
        Sample(request, i, [0] * n, total, end=Status.FINISHED_STOPPED if ended else None)
        for i, (n, total, ended) in enumerate(beams)
    ]
    return request


def test_the_most_probable_go_on_and_those_that_end_are_set_aside():
    request = searching(2, 1.0, (1, -1.0, False), (1, -2.0, False))
    a, b = request.samples
    a.candidates = ((5, -0.1), (7, -0.2), (6, -2.5), (8, -9.0))
    b.candidates = ((7, -0.1), (5, -0.3), (6, -0.4), (8, -9.0))
    choice = choose(request.unfinished, 2, frozenset({7}))
    assert [(x.parent, x.token) for x in choice.alive] == [(a, 5), (b, 5)]
    assert [(x.parent, x.token) for x in choice.ended] == [(a, 7), (b, 7)]


def test_an_end_that_is_not_among_the_best_does_not_count():
    request = searching(1, 1.0, (1, -1.0, False))
    request.samples[0].candidates = ((5, -0.1), (6, -0.2), (7, -0.3))
    assert choose(request.unfinished, 1, frozenset({7})).ended == []


def test_a_penalty_that_favours_length_keeps_the_search_open():
    """-1.2 / 3^2 is below the ended -0.1, but -1.2 / 10^2 would be above."""
    assert not can_stop(searching(1, 2.0, (1, -0.1, True), (2, -1.2, False)))
    assert can_stop(searching(1, 2.0, (1, -0.01, True), (2, -1.2, False)))


def test_a_penalty_that_favours_brevity_counts_the_next_length():
    """-1 * 3 is above the ended -4."""
    assert not can_stop(searching(1, -1.0, (4, -1.0, True), (2, -1.0, False)))
    assert can_stop(searching(1, -1.0, (2, -1.0, True), (2, -1.0, False)))


def test_as_many_must_have_ended_as_are_wanted():
    assert not can_stop(searching(2, 0.0, (1, -0.1, True), (2, -9.0, False)))


def test_the_best_are_numbered_by_score():
    request = searching(2, 1.0, (1, -1.0, True), (4, -1.2, True), (2, -0.2, True))
    assert [len(s.token_ids) for s in select_best(request.samples, 2)] == [2, 4]
    assert [s.index for s in select_best(request.samples, 2)] == [0, 1]
