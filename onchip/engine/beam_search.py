"""Beam search: which continuations of which beams survive."""

from collections.abc import Sequence
from typing import NamedTuple

from onchip.engine.kv_manager import KVManager
from onchip.engine.request import Request, Sample, Status
from onchip.engine.sampling_params import BeamSearchParams


class Branch(NamedTuple):
    """A beam and one more token."""

    parent: Sample
    token: int
    cumulative_logprob: float


class Choice(NamedTuple):
    """Branches that continue, best first, and branches that ended."""

    alive: list[Branch]
    ended: list[Branch]


def advance_beams(request: Request, kv: KVManager) -> Status | None:
    """One step of the search, once every beam has its candidates. Return the final status, or None
    if the search continues. A beam's sequence continues as its first branch, so sequences never
    outnumber beams.
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
        request.error = "no free row to fork a sequence: the cache is used from elsewhere"
        return Status.FINISHED_ERROR
    request.samples = grown + select_best(ended, width)
    return _end(request, grown, kv)


def _grow(beam: Sample, branches: list[Branch], kv: KVManager) -> list[Sample]:
    """Samples for all branches of one beam; the first is the beam itself. Return [] if a fork finds
    no free row. All new samples belong to the request, which releases them.
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
    for beam in grown:  # none can still enter the best
        kv.release(beam)
    request.samples = [s for s in request.samples if s.finished]
    return Status.FINISHED_STOPPED


def choose(beams: Sequence[Sample], width: int, ends: frozenset[int]) -> Choice:
    """The `width` most probable branches that continue, and the branches that ended among the 2 *
    width most probable. Every beam has 2 * width candidates: no more can end or win.
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
    """No unfinished beam can still enter the best: its logprob only falls, and for a fixed logprob
    the score is monotone in the length, so its best score is at the next length or the last one.
    """
    beams = request.beams
    ended = sorted((score_of(s) for s in request.samples if s.finished), reverse=True)
    if len(ended) < beams.beam_width:
        return False
    best_possible = max(
        score(sample.cumulative_logprob, length, beams)
        for sample in request.unfinished
        for length in (len(sample.token_ids) + 1, request.max_tokens)
    )
    return best_possible <= ended[beams.beam_width - 1]


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
    """The `width` samples with the highest score, best first, renumbered."""
    ranked = sorted(samples, key=score_of, reverse=True)[:width]
    for index, sample in enumerate(ranked):
        sample.index = index
    return ranked


def _copy_beam(beam: Sample) -> Sample:
    """A copy of the continuation, without a sequence."""
    return Sample(beam.request, beam.index, beam.token_ids.copy(), beam.cumulative_logprob)


def _extend(sample: Sample, branch: Branch) -> None:
    sample.token_ids.append(branch.token)
    sample.cumulative_logprob = branch.cumulative_logprob
    sample.candidates = ()
