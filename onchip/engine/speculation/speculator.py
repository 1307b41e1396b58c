"""Which samples get drafts in a step, and how many. No tensors here.

Drafts cost little while a step waits for memory: weights and cached keys are read once, however
many tokens are multiplied with them. `free_tokens` is the number of tokens at which the products
take as long as the reads (cost/decoding.py). Drafts never exceed it, so a large batch gets none.

A sample whose drafts fail is tried less often: its period doubles, from every step to every 16th,
and returns to 1 with the first accepted draft. Periods are powers of two on one counter of steps:
samples are due in the same steps, and the steps between them still overlap.

In a step with a chunk of more than 64 tokens, the drafts of a tree are its first path alone: the
mask of such a step has a row and a column for each token of the longest chunk.

Drafts are never needed. If the proposer fails, requests continue without drafts from then on.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from onchip.engine.request import Sample
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.tree import MAX_CHUNK_TOKENS, DraftTree
from onchip.engine.step import Chunk

LOG = logging.getLogger("onchip")
_MAX_PERIOD = 16  # steps; a step in vain then costs 1/16 of one


class Proposer(Protocol):
    """A source of drafts."""

    def propose(
        self, wanted: Sequence[tuple[Sample, int]]
    ) -> Sequence[DraftTree] | Sequence[Sequence[int]]:
        """For each (sample, limit) at most `limit` tokens that may follow its known tokens: a tree,
        or a chain.
        """
        ...


@dataclass(frozen=True)
class SpeculationStats:
    """Since the start; names as in vLLM. num_drafts: chunks with drafts.
    num_accepted_tokens_per_pos: how often a draft of depth 1, 2 ... was accepted.
    failure: why there are no more drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    failure: str | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of all drafts; NaN without drafts."""
        drafted = self.num_draft_tokens
        return self.num_accepted_tokens / drafted if drafted else math.nan

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a chunk with drafts: the accepted ones, and the one after them."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else math.nan

    def __str__(self) -> str:
        ending = "" if self.failure is None else f", none since {self.failure}"
        if not self.num_drafts:
            return f"no drafts{ending}"
        return (
            f"{self.num_accepted_tokens} of {self.num_draft_tokens} drafts accepted,"
            f" {self.mean_acceptance_length:.2f} tokens a step with drafts{ending}"
        )


class Speculator:
    """Adds drafts to steps and counts how many are accepted. free_tokens: from the number of cached
    tokens that a step reads to the number of tokens that it may compute.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        free_tokens: Callable[[int], float] = lambda cached: math.inf,
    ):
        self.config, self._proposer, self._free_tokens = config, proposer, free_tokens
        self._turn = 0
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * config.shape.depth
        self._failure: str | None = None

    def stats(self) -> SpeculationStats:
        accepted = tuple(self._accepted)
        counts = (self._num_drafts, self._num_draft_tokens, sum(accepted), accepted)
        return SpeculationStats(*counts, self._failure)

    def propose(self, chunks: Sequence[Chunk], budget: int) -> list[tuple[Chunk, DraftTree]]:
        """Drafts for some chunks of a step, at most `budget` tokens in all. Call it once a step."""
        self._turn += 1
        room = int(min(budget, self._count_free(chunks, sum([c.num_tokens for c in chunks]))))
        if room < 1:
            return []
        due = [c for c in chunks if _is_decode(c) and self._turn % c.sample.draft_period == 0]
        share = min(self.config.num_speculative_tokens, max(1, room // max(1, len(due))))
        wanted = []
        for chunk in due:
            sample = chunk.sample  # the token after its last draft may be its last one
            limit = min(share, room, sample.request.max_tokens - sample.num_tokens - 1)
            if limit > 0:
                wanted.append((chunk, limit))
                room -= limit
        proposed = self._propose(wanted)
        if max([chunk.num_tokens for chunk in chunks], default=0) <= MAX_CHUNK_TOKENS:
            return proposed
        return [(chunk, tree.first_path()) for chunk, tree in proposed]

    def _propose(self, wanted: Sequence[tuple[Chunk, int]]) -> list[tuple[Chunk, DraftTree]]:
        samples = [(chunk.sample, limit) for chunk, limit in wanted]
        try:
            proposals = self._proposer.propose(samples)
        except Exception as error:  # whatever a model raises: its drafts can be left out
            self._turn_off(error)
            return []
        proposed = []
        for (chunk, limit), drafts in zip(wanted, proposals, strict=True):
            is_tree = isinstance(drafts, DraftTree)
            tokens, parents = drafts if is_tree else (tuple(drafts), ())
            if tokens:
                proposed.append((chunk, DraftTree(tokens[:limit], parents[:limit])))
            else:
                _wait_longer(chunk.sample)
        return proposed

    def needs_tokens(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the sampled tokens of this step must be known before the next one is scheduled:
        some of its samples have drafts, or may get drafts then.
        """
        if any([chunk.drafts for chunk in chunks]):
            return True
        samples = [sample for chunk in chunks for sample in chunk.sampled_by]
        if self._count_free(chunks, len(samples)) < 1:
            return False
        turn = self._turn + 1
        return any([turn % s.draft_period == 0 and s.request.takes_drafts for s in samples])

    def observe(self, sample: Sample, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a chunk."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for i in range(num_accepted):
            self._accepted[i] += 1
        if num_accepted:
            sample.draft_period = 1
        else:
            _wait_longer(sample)

    def _turn_off(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}".removesuffix(": ")
        message = "requests continue without drafts: proposing them failed: %s"
        LOG.warning(message, self._failure, exc_info=error)

    def _count_free(self, chunks: Sequence[Chunk], num_tokens: int) -> float:
        """Tokens left for drafts in a step of num_tokens tokens with these samples."""
        if self._failure is not None:
            return 0
        most = self.config.disable_by_batch_size
        if most is not None and sum([len(chunk.sampled_by) for chunk in chunks]) > most:
            return 0
        return self._free_tokens(sum([chunk.stop for chunk in chunks])) - num_tokens


def _is_decode(chunk: Chunk) -> bool:
    """The chunk computes the last generated token of its sample, which is known."""
    sample, request = chunk.sample, chunk.sample.request
    is_last = chunk.num_tokens == 1 and chunk.sampled_by == (sample,)
    after_prompt = chunk.start >= len(request.prompt_token_ids)
    return is_last and after_prompt and not sample.pending and request.takes_drafts


def _wait_longer(sample: Sample) -> None:
    sample.draft_period = min(_MAX_PERIOD, 2 * sample.draft_period)
