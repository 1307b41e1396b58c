"""Which drafts of a step are accepted.

Row i of a chunk with drafts has the logits of the model after the i-th draft. The sampler samples
every row as it would in a step of its own: with the random number of its position, with the
penalties of the tokens before it, and with the tokens that a grammar allows after them. The first
row that samples another token than the next draft ends the chunk: all later rows follow a token
that is not there.

This is rejection sampling (Leviathan et al. 2023, Chen et al. 2023) for drafts without
probabilities. With the target's probabilities p, draft d is accepted with probability p(d); a
rejected draft is replaced by a token distributed as p without d, normalised. The random number of a
position is that of decoding, so a seed samples the same tokens with and without drafts.
"""

from collections.abc import Sequence
from itertools import islice

from onchip.engine.request import Sample, SampledToken
from onchip.engine.step import Chunk, ScheduledStep


def rows_for_sampler(step: ScheduledStep) -> list[Sample]:
    """The sample of each row of logits. In the row of a draft, the drafts so far are tokens."""
    if not step.num_drafts:
        return [sample for _, sample in step.rows_to_sample]
    return [row for chunk in step.chunks for row in (*chunk.sampled_by, *_draft_rows(chunk))]


def _draft_rows(chunk: Chunk) -> list[Sample]:
    drafts = chunk.drafts
    return [chunk.sample.row_after(drafts[: i + 1]) for i in range(len(drafts))]


def accept(drafts: Sequence[int], sampled: Sequence[SampledToken]) -> Sequence[SampledToken]:
    """The tokens of a chunk, from those of its 1 + len(drafts) rows: the accepted drafts, and the
    token that follows them.
    """
    for i, draft in enumerate(drafts):
        if sampled[i].token != draft:
            return sampled[: i + 1]
    return sampled


def split_rows(
    step: ScheduledStep, sampled: Sequence[SampledToken]
) -> list[tuple[Chunk, Sample, Sequence[SampledToken]]]:
    """(chunk, sample, its new tokens) for each sample that the step samples."""
    if not step.num_drafts:  # one token for each: nothing is called per sample
        rows = zip(step.rows_to_sample, sampled, strict=True)
        return [(step.chunks[i], sample, (token,)) for (i, sample), token in rows]
    tokens = iter(sampled)
    return [
        (chunk, sample, accept(chunk.drafts, list(islice(tokens, 1 + len(chunk.drafts)))))
        for chunk in step.chunks
        for sample in chunk.sampled_by
    ]


def count_accepted(step: ScheduledStep, sampled: Sequence[SampledToken]) -> int:
    """New tokens of all samples of a step."""
    if not step.num_drafts:
        return len(sampled)
    return sum(len(tokens) for _, _, tokens in split_rows(step, sampled))
