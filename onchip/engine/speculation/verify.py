"""Which drafts of a step are accepted.

    drafts    d e f g    parents -1 -1 0 0     known token c
    sampled   d . . g x                        at c: d, at d: g, at g: x
    result    d g x                            path 0 3: the slots of d and g are kept

Row i of a chunk with drafts has the logits of the model after the i-th draft. The sampler samples
every row as it would in a step of its own: with the random number of its position, with the
penalties of the tokens before it, and with the tokens that a grammar allows after them. A row that
samples none of the drafts after it ends the chunk: all rows below follow a token that is not there.

This is rejection sampling (Leviathan et al. 2023, Chen et al. 2023) for drafts without
probabilities. With the target's probabilities p, draft d is accepted with probability p(d); a
rejected draft is replaced by a token distributed as p without d, normalised. The random number of a
position is that of decoding, so a seed samples the same tokens with and without drafts.
"""

from collections.abc import Sequence
from itertools import islice

from onchip.engine.request import Sample, SampledToken
from onchip.engine.speculation.tree import find_path
from onchip.engine.step import Chunk, ScheduledStep

# What a step gives to a sample: (chunk, sample, its new tokens, the indices of the accepted drafts,
# which are all of these tokens but the last). A plain tuple: no call for each sample of a step.
Verified = tuple[Chunk, Sample, Sequence[SampledToken], Sequence[int]]


def rows_for_sampler(step: ScheduledStep) -> list[Sample]:
    """The sample of each row of logits. In the row of a draft, the drafts so far are tokens."""
    if not step.num_drafts:
        return [sample for _, sample in step.rows_to_sample]
    return [row for chunk in step.chunks for row in (*chunk.sampled_by, *_draft_rows(chunk))]


def _draft_rows(chunk: Chunk) -> list[Sample]:
    drafts, parents = chunk.drafts, chunk.parents
    if not parents:
        return [chunk.sample.row_after(drafts[: i + 1]) for i in range(len(drafts))]
    paths = [find_path(parents, i) for i in range(len(drafts))]
    return [chunk.sample.row_after([drafts[i] for i in path]) for path in paths]


def accept(
    drafts: Sequence[int], sampled: Sequence[SampledToken], parents: Sequence[int] = ()
) -> list[int]:
    """The accepted drafts of a chunk, from the tokens of its 1 + len(drafts) rows: the path that
    the sampled tokens follow from the known token on.
    """
    path, last = [], -1
    for i, draft in enumerate(drafts):
        parent = parents[i] if parents else i - 1
        if parent == last and sampled[last + 1].token == draft:
            path.append(i)
            last = i
    return path


def split_rows(step: ScheduledStep, sampled: Sequence[SampledToken]) -> list[Verified]:
    """For each sample that the step samples."""
    if not step.num_drafts:  # one token for each: nothing is called per sample
        rows = zip(step.rows_to_sample, sampled, strict=True)
        return [(step.chunks[i], sample, (token,), ()) for (i, sample), token in rows]
    tokens = iter(sampled)
    return [
        _verify(chunk, sample, list(islice(tokens, 1 + len(chunk.drafts))))
        for chunk in step.chunks
        for sample in chunk.sampled_by
    ]


def _verify(chunk: Chunk, sample: Sample, sampled: Sequence[SampledToken]) -> Verified:
    path = accept(chunk.drafts, sampled, chunk.parents)
    rows = (0, *(i + 1 for i in path))
    return chunk, sample, [sampled[row] for row in rows], path


def count_accepted(step: ScheduledStep, sampled: Sequence[SampledToken]) -> int:
    """New tokens of all samples of a step."""
    if not step.num_drafts:
        return len(sampled)
    return sum(len(tokens) for _, _, tokens, _ in split_rows(step, sampled))
