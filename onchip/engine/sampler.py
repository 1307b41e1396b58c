"""Draws the next token of every row of a batch, on the device, without sorting and without waiting.

Probabilities are integers here: the weight exp(s - max s) of a token is rounded to a multiple of
2^-40. Sums of integers do not depend on the order of their terms, so a row keeps and draws the same
tokens whatever else is in the batch. The smallest set of top tokens that holds a mass (top_p) or a
count (top_k) is found by three histograms over the bits of the weights instead of a sort; tokens of
equal weight stay or go together. The draw itself is one uniform number per row, a hash of the
request's seed, the sample and the position, looked up in the running sum.

Order of things, as vLLM's: bias, penalties, minimum length; temperature; min_p; top_k; top_p.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from onchip.engine.request import Drawn, Sample

_UNIT = 2.0**40  # 2^18 tokens of weight 1 still fit into 63 bits
_DIGITS = (
    (20, 11),
    (10, 10),
    (0, 10),
)  # (shift, bits): the 31 bits of a float that is not negative


@dataclass(frozen=True)
class Edits:
    """Changes to single logits. add: (rows, tokens, values). repeat: (rows, tokens, factors), of
    tokens that were seen before: positive logits are divided, negative ones multiplied.
    """

    add: tuple[Tensor, Tensor, Tensor] | None
    repeat: tuple[Tensor, Tensor, Tensor] | None

    def apply(self, logits: Tensor) -> Tensor:
        """The logits with the changes; no (row, token) is named twice in one list."""
        if self.repeat is None and self.add is None:
            return logits
        logits = logits.clone()
        if self.repeat is not None:
            rows, tokens, factors = self.repeat
            seen = logits[rows, tokens]
            logits[rows, tokens] = torch.where(seen > 0, seen / factors, seen * factors)
        if self.add is not None:
            rows, tokens, values = self.add
            logits[rows, tokens] += values
        return logits


@dataclass(frozen=True)
class Rows:
    """How to draw from each row of a batch of logits: tensors on the device, made by `rows_of`.

    random: rows that are drawn from, the others are greedy; temperature, min_p, top_k, top_p,
    uniform: for these rows alone, None where no row asks for it. num_top: how many of the most
    probable tokens to report, None if no row asks. beam_temperature: of all rows, 1 for those that
    do not search.
    """

    edits: Edits
    random: Tensor | None
    temperature: Tensor
    uniform: Tensor
    min_p: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    num_top: int | None = None
    beam_temperature: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """(rows,) token, logprob and rank (from 1; 0: not asked for); (rows, num_top) top_tokens and
    top_logprobs. Log probabilities are the model's: before temperature, penalties and truncation.
    """

    token: Tensor
    logprob: Tensor
    rank: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    def drawn(self, samples: Sequence[Sample]) -> list[Drawn]:
        """For `Scheduler.update`. Waits for the device."""
        columns = (self.token, self.logprob, self.rank, self.top_tokens, self.top_logprobs)
        rows = zip(samples, *(column.tolist() for column in columns), strict=True)
        return [
            Drawn(
                token,
                logprob,
                rank or None,
                tuple(zip(ids, tops, strict=True))[: num_top(one) or 0],
            )
            for one, token, logprob, rank, ids, tops in rows
        ]


def num_top(sample: Sample) -> int | None:
    """How many of the most probable tokens a sample wants to know; None: nothing about them."""
    beams = sample.request.beams
    return 2 * beams.beam_width if beams else sample.request.params.logprobs


def uniform(sample: Sample) -> float:
    """The number in [0, 1) that draws this sample's next token: 53 bits of a hash."""
    words = (sample.request.draw_seed, sample.index, sample.num_tokens)
    data = b"".join(word.to_bytes(9, "little", signed=True) for word in words)
    bits = int.from_bytes(blake2b(data, digest_size=8, person=b"onchip.draw").digest(), "little")
    return (bits >> 11) * 2.0**-53


def rows_of(samples: Sequence[Sample], device: torch.device | str) -> Rows:
    """One row for each sample, in order."""
    device = torch.device(device)
    random = [i for i, s in enumerate(samples) if not (s.request.params.greedy or s.request.beams)]
    drawn = [samples[i] for i in random]
    params = [s.request.params for s in drawn]
    return Rows(
        _edits(samples, device),
        _to(random, torch.int64, device) if random else None,
        _to([p.temperature for p in params], torch.float32, device),
        _to([uniform(s) for s in drawn], torch.float64, device),
        _column([p.min_p for p in params], 0, torch.float32, device),
        _column([p.top_k if p.top_k > 0 else 0 for p in params], 0, torch.int64, device),
        _column([p.top_p for p in params], 1, torch.float64, device),
        max((k for k in map(num_top, samples) if k is not None), default=None),
        _column([_beam_temperature(s) for s in samples], 1, torch.float32, device),
    )


def sample(logits: Tensor, rows: Rows) -> Sampled:
    """logits: (rows, vocab_size), any float type, not changed."""
    raw = logits.float()
    if rows.beam_temperature is not None:
        raw = raw / rows.beam_temperature[:, None]
    return report(raw, _choose(rows.edits.apply(raw), rows), rows.num_top)


def report(logits: Tensor, token: Tensor, num_top: int | None) -> Sampled:
    """The log probabilities of these tokens, (rows,), and of the num_top most probable ones. None:
    nobody asks for ranks. Also for the rows of a prompt and the tokens that follow them.
    """
    chosen = logits.gather(1, token[:, None])
    norm = logits.logsumexp(-1, keepdim=True)
    rank = torch.zeros_like(token) if num_top is None else (logits > chosen).sum(-1) + 1
    top, ids = logits.topk(min(num_top or 0, logits.shape[-1]), -1)
    return Sampled(token, (chosen - norm)[:, 0], rank, ids, top - norm)


def _choose(logits: Tensor, rows: Rows) -> Tensor:
    """A token for each row. A pass reads rows x vocab_size numbers: only those that a row needs."""
    if rows.random is None:
        return logits.argmax(-1)
    if len(rows.random) == len(logits):
        return pick(masses_of(logits, rows), rows.uniform)
    drawn = pick(masses_of(logits[rows.random], rows), rows.uniform)
    return logits.argmax(-1).index_copy_(0, rows.random, drawn)


def masses_of(logits: Tensor, rows: Rows) -> Tensor:
    """The integer probabilities of the tokens that may be drawn, 0 for the others, (rows, vocab);
    logits: of the random rows.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    weights = logits.div_(rows.temperature[:, None]).exp_()
    keys = weights.view(torch.int32)  # of numbers that are not negative: the same order
    masses = (weights * _UNIT).round_().long()  # a power of two: exact
    if rows.min_p is not None:
        masses.masked_fill_(weights < rows.min_p[:, None], 0)
    if rows.top_k is not None:
        count = torch.where(rows.top_k > 0, rows.top_k, logits.shape[-1])
        floor = threshold(keys, torch.ones_like(masses), count)
        masses.masked_fill_(keys < floor[:, None], 0)
    if rows.top_p is not None:
        wanted = (masses.sum(-1) * rows.top_p).ceil().long()
        floor = threshold(keys, masses, wanted)
        masses.masked_fill_(keys < floor[:, None], 0)
    return masses


def pick(masses: Tensor, uniform: Tensor) -> Tensor:
    """The token at the fraction `uniform` of the running sum of integer masses, (rows, vocab)."""
    running = masses.cumsum(-1)
    place = (running[:, -1] * uniform).long()  # below the total, as uniform is at most 1 - 2^-53
    token = torch.searchsorted(running, place[:, None], right=True)[:, 0]
    return token.clamp_(max=masses.shape[-1] - 1)  # a row of NaN points nowhere


def threshold(keys: Tensor, masses: Tensor, wanted: Tensor) -> Tensor:
    """The largest key such that the masses of all keys from it on sum up to `wanted` (or to all
    there is), per row. keys: int32 (rows, n), not negative; masses: int64.
    """
    wanted = wanted.clamp(max=masses.sum(-1))
    found = torch.zeros_like(wanted)
    for shift, bits in _DIGITS:
        digit = keys >> shift
        inside = (digit >> bits) == found[:, None]
        digit = (digit & ((1 << bits) - 1)).long()
        held = masses.new_zeros(len(keys), 1 << bits)
        held.scatter_add_(1, digit, masses * inside)
        from_here = held.flip(1).cumsum(1).flip(1)
        best = ((from_here >= wanted[:, None]).sum(1) - 1).clamp_(min=0)
        at = best[:, None]
        wanted = wanted - (from_here - held).gather(1, at)[:, 0]
        found = (found << bits) | best
    return found


def _edits(samples: Sequence[Sample], device: torch.device) -> Edits:
    add: dict[tuple[int, int], float] = {}
    repeat: dict[tuple[int, int], float] = {}
    for row, one in enumerate(samples):
        params, request = one.request.params, one.request
        values: Counter[int] = Counter(params.logit_bias)
        if params.presence_penalty or params.frequency_penalty:
            for token, count in Counter(one.token_ids).items():
                values[token] -= params.presence_penalty + params.frequency_penalty * count
        if one.num_tokens < params.min_tokens:
            values.update(dict.fromkeys(request.ends, float("-inf")))
        add |= {(row, token): value for token, value in values.items()}
        if params.repetition_penalty != 1:
            seen = {*request.prompt_token_ids, *one.token_ids}
            repeat |= {(row, token): params.repetition_penalty for token in seen}
    return Edits(_cells(add, device), _cells(repeat, device))


def _cells(
    values: dict[tuple[int, int], float], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    if not values:
        return None
    rows, tokens = zip(*values, strict=True)
    return (
        _to(rows, torch.int64, device),
        _to(tokens, torch.int64, device),
        _to(list(values.values()), torch.float32, device),
    )


def _beam_temperature(sample: Sample) -> float:
    beams = sample.request.beams
    return (beams.temperature or 1.0) if beams else 1.0


def _column(values: list, off: float, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """None if no row asks for anything."""
    return None if all(v == off for v in values) else _to(values, dtype, device)


def _to(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device behind the work that is queued there: from pinned memory nobody waits."""
    staged = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return staged.to(device, non_blocking=True)
