"""Beam search: which continuations of which beams survive."""

from collections.abc import Sequence
from typing import NamedTuple

from onchip.engine.kv_manager import KVManager
from onchip.engine.params import BeamSearchParams
from onchip.engine.request import Request, Sample, Status


class Branch(NamedTuple):
    """A beam and one token more."""

    parent: Sample
    token: int
    cumulative_logprob: float


class Choice(NamedTuple):
    """What goes on, best first, and what has ended."""

    alive: list[Branch]
    ended: list[Branch]


def advance_beams(request: Request, kv: KVManager) -> Status | None:
    """One step of the search, when every beam has its candidates: how the request ends by it, None
    if it goes on. A beam's sequence goes on as the first of its branches, so there are never more
    sequences than beams.
    """
    width = request.beams.beam_width
    choice = choose(request.unfinished, width, request.end_token_ids)
    ended = [s for s in request.samples if s.finished] + _finish(choice.ended, request)
    branches_of: dict[Sample, list[Branch]] = {beam: [] for beam in request.unfinished}
    for branch in choice.alive:
        branches_of[branch.parent].append(branch)
    for beam in [beam for beam, branches in branches_of.items() if not branches]:
        kv.release(beam)
        del branches_of[beam]
    grown = [sample for item in branches_of.items() for sample in _grow(*item, kv)]
    if len(grown) < len(choice.alive):
        request.error = "no room to fork a sequence: the cache is used from elsewhere"
        return Status.FINISHED_ERROR
    request.samples = grown + select_best(ended, width)
    return _end(request, grown, kv)


def _grow(beam: Sample, branches: list[Branch], kv: KVManager) -> list[Sample]:
    """Samples for all branches of one beam, the first is the beam itself; fewer if there is no row
    for one. All are among the request's, which releases them.
    """
    grown = [beam]
    for _ in branches[1:]:
        child = _copy_beam(beam)
        beam.request.samples.append(child)
        if not kv.fork(beam, child):
            return []
        grown.append(child)
    for sample, branch in zip(grown, branches, strict=True):
        _extend(sample, branch)
    return grown


def _end(request: Request, grown: list[Sample], kv: KVManager) -> Status | None:
    if grown and len(grown[0].token_ids) == request.max_tokens:
        return Status.FINISHED_LENGTH
    if grown and not can_stop(request):
        return None
    for beam in grown:  # it cannot be among the best any more
        kv.release(beam)
    request.samples = [s for s in request.samples if s.finished]
    return Status.FINISHED_STOPPED


def choose(beams: Sequence[Sample], width: int, ends: frozenset[int]) -> Choice:
    """The `width` most probable continuations that go on, and those that ended among the 2 * width
    most probable of all. Every beam has its 2 * width candidates: as many as can end or win.
    """
    branches = [
        Branch(beam, token, beam.cumulative_logprob + logprob)
        for beam in beams
        for token, logprob in beam.candidates[: 2 * width]
    ]
    branches.sort(key=lambda b: (-b.cumulative_logprob, b.parent.index, b.token))
    ended = [b for b in branches[: 2 * width] if b.token in ends]
    return Choice([b for b in branches if b.token not in ends][:width], ended)


def score(cumulative_logprob: float, num_tokens: int, beams: BeamSearchParams) -> float:
    return cumulative_logprob / max(1, num_tokens) ** beams.length_penalty


def score_of(sample: Sample) -> float:
    return score(sample.cumulative_logprob, len(sample.token_ids), sample.request.beams)


def can_stop(request: Request) -> bool:
    """No live beam can still enter the best: its logprob only falls, and for a given logprob the
    score is monotone in the length, so the next length or the last one is the best it can have.
    """
    beams = request.beams
    ended = sorted((score_of(s) for s in request.samples if s.finished), reverse=True)
    if len(ended) < beams.beam_width:
        return False
    reach = max(
        score(sample.cumulative_logprob, length, beams)
        for sample in request.unfinished
        for length in (len(sample.token_ids) + 1, request.max_tokens)
    )
    return reach <= ended[beams.beam_width - 1]


def _finish(branches: Sequence[Branch], request: Request) -> list[Sample]:
    """Samples for branches that ended."""
    done = []
    for branch in branches:
        sample = _copy_beam(branch.parent)
        _extend(sample, branch)
        sample.end = Status.FINISHED_STOPPED
        sample.stop_reason = None if branch.token in request.eos_token_ids else branch.token
        done.append(sample)
    return done


def select_best(samples: Sequence[Sample], width: int) -> list[Sample]:
    """The `width` of the highest score, best first, numbered so."""
    ranked = sorted(samples, key=score_of, reverse=True)[:width]
    for index, sample in enumerate(ranked):
        sample.index = index
    return ranked


def _copy_beam(beam: Sample) -> Sample:
    """The same continuation once more, without a sequence."""
    return Sample(beam.request, beam.index, beam.token_ids.copy(), beam.cumulative_logprob)


def _extend(sample: Sample, branch: Branch) -> None:
    sample.token_ids.append(branch.token)
    sample.cumulative_logprob = branch.cumulative_logprob
    sample.candidates = ()
