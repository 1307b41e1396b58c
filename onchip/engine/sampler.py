"""Sample the next token of every row of a batch on the device, without sorting or synchronizing. On
a GPU with Triton the same takes two or three launches: kernels/llm/sampling.py.

    logits -> bias, penalties, min_tokens -> grammar -> temperature -> min_p -> top_k -> top_p
                                                               -> token   (order as in vLLM)

Probabilities are integers: the weight exp(s - max s) of a token is rounded to a multiple of 2^-40.
Integer sums do not depend on the order of their terms, so a row keeps and samples the same tokens
in any batch. The smallest set of top tokens that holds a mass (top_p) or a count (top_k) is found
by three histograms over the bits of the weights instead of a sort; tokens of equal weight are kept
or dropped together. One uniform number per row, derived from the request's seed, the sample and the
position, is looked up in the running sum.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import ModuleType

import torch
from torch import Tensor

from onchip.core.device import device_info
from onchip.engine.request import Request, Sample, SampledToken
from onchip.engine.sampling_params import SamplingParams
from onchip.engine.structure.bitmask import TokenBitmask, fill_bitmask
from onchip.models import Model
from onchip.models.reproducible import in_whole_vectors, is_reproducible

_WARM_UP_PARAMS = SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)
_WARM_UP_ROWS = 16, 8, 4, 2, 1
_UNIT = 2.0**40  # 2^18 tokens of weight 1 still fit into 63 bits
_GOLDEN, _MIX = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_DIGITS = (
    (20, 11),
    (10, 10),
    (0, 10),
)  # (shift, bits): the 31 bits of a non-negative float


@dataclass(frozen=True)
class LogitEdits:
    """Changes to single logits. add: (rows, tokens, values). repeat: (rows, tokens, factors) for
    tokens that occurred before: positive logits are divided, negative ones multiplied. bitmask:
    tokens that grammars allow.
    """

    add: tuple[Tensor, Tensor, Tensor] | None
    repeat: tuple[Tensor, Tensor, Tensor] | None
    bitmask: TokenBitmask | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The edited logits in fp32, or the input itself if there are no edits. No (row, token)
        occurs twice in one list.
        """
        if self.repeat is None and self.add is None and self.bitmask is None:
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self.repeat is not None:
            rows, tokens, factors = self.repeat
            old = logits[rows, tokens]
            logits[rows, tokens] = torch.where(old > 0, old / factors, old * factors)
        if self.add is not None:
            rows, tokens, values = self.add
            logits[rows, tokens] += values
        if self.bitmask is not None:
            self.bitmask.apply_(logits)
        return logits


@dataclass(frozen=True)
class SamplingMetadata:
    """How to sample each row of a batch of logits: tensors on the device, made by
    `make_sampling_metadata`.

    random: rows that are sampled; the others are greedy. temperature, min_p, top_k, top_p, uniform:
    for the random rows only; None if no row uses the option. num_top: how many of the most probable
    tokens to report; None if no row reports any. beam_temperature: of all rows, 1 for rows without
    a search.
    """

    edits: LogitEdits
    random: Tensor | None
    temperature: Tensor
    uniform: Tensor
    min_p: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    num_top: int | None = None
    beam_temperature: Tensor | None = None


@dataclass(frozen=True)
class SamplerOutput:
    """(rows,) token, logprob and rank (from 1; 0: not computed); (rows, num_top) top_tokens and
    top_logprobs. Log probabilities are the model's: before temperature, penalties and truncation.
    """

    token: Tensor
    logprob: Tensor
    rank: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    def to_tokens(self, samples: Sequence[Sample]) -> list[SampledToken]:
        """The rows for `Scheduler.apply_tokens`. Waits for the device."""
        requests = [s.request for s in samples]
        if not any([r.beams or r.params.logprobs is not None for r in requests]):
            return list(map(SampledToken, self.token.tolist(), self.logprob.tolist()))
        columns = (self.token, self.logprob, self.rank, self.top_tokens, self.top_logprobs)
        counts = [num_top(r) or 0 for r in requests]
        rows = zip(counts, *(column.tolist() for column in columns), strict=True)
        return [
            SampledToken(token, logprob, rank or None, tuple(zip(ids, tops, strict=True))[:count])
            for count, token, logprob, rank, ids, tops in rows
        ]


def num_top(request: Request) -> int | None:
    """How many of the most probable tokens a request reports; None: neither tokens nor ranks."""
    beams = request.beams
    return 2 * beams.beam_width if beams else request.params.logprobs


def draw_uniforms(samples: Sequence[Sample]) -> Tensor:
    """The numbers in [0, 1), fp64, with which each sample samples its next token: 53 bits of
    SplitMix64 (Steele, Lea, Flood 2014), seeded by a hash of seed and sample and advanced by
    tokens.
    """
    keys = _int64_tensor([s.rng_key or _make_rng_key(s) for s in samples])
    z = keys + (_int64_tensor([s.num_tokens for s in samples]) + 1) * _GOLDEN  # modulo 2^64
    z = (z ^ _shift_right(z, 30)) * _MIX[0]
    z = (z ^ _shift_right(z, 27)) * _MIX[1]
    return _shift_right(z ^ _shift_right(z, 31), 11).double() * 2.0**-53


def _make_rng_key(sample: Sample) -> int:
    words = (sample.request.rng_seed, sample.index)
    data = b"".join(word.to_bytes(9, "little", signed=True) for word in words)
    digest = blake2b(data, digest_size=8, person=b"onchip.draw").digest()
    sample.rng_key = int.from_bytes(digest, "little", signed=True)
    return sample.rng_key


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift, ignoring the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _int64_tensor(values: Sequence[int]) -> Tensor:
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def make_sampling_metadata(
    samples: Sequence[Sample], device: torch.device | str
) -> SamplingMetadata:
    """One row for each sample, in order."""
    device = torch.device(device)
    requests = [s.request for s in samples]
    random = [i for i, r in enumerate(requests) if r.params.temperature and not r.beams]
    params = [requests[i].params for i in random]
    has_beams = any([r.beams for r in requests])
    tops = {num_top(r) for r in requests if r.beams or r.params.logprobs is not None}
    return SamplingMetadata(
        _make_edits(samples, device),
        _make_tensor(random, torch.int64, device) if random else None,
        _make_tensor([p.temperature for p in params], torch.float32, device),
        _copy_to_device(
            draw_uniforms([samples[i] for i in random]) if random else torch.zeros(0), device
        ),
        _make_column([p.min_p for p in params], 0, torch.float32, device),
        _make_column([p.top_k if p.top_k > 0 else 0 for p in params], 0, torch.int64, device),
        _make_column([p.top_p for p in params], 1, torch.float64, device),
        max(tops, default=None),
        _make_tensor(list(map(_beam_temperature, requests)), torch.float32, device)
        if has_beams
        else None,
    )


class SamplingMetadataCache:
    """`make_sampling_metadata` for consecutive batches: while the same samples continue, only their
    uniform numbers change.
    """

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._samples: Sequence[Sample] = ()
        self._metadata: SamplingMetadata | None = None
        self._random: list[Sample] = []

    def make(self, samples: Sequence[Sample]) -> SamplingMetadata:
        if self._metadata is not None and samples == self._samples:
            if not self._random:
                return self._metadata
            return replace(
                self._metadata, uniform=_copy_to_device(draw_uniforms(self._random), self._device)
            )
        metadata = make_sampling_metadata(samples, self._device)
        edited = any([s.request.params.edits_logits for s in samples])
        self._samples, self._metadata = samples, None if edited else metadata
        sampled = [s for s in samples if not s.request.beams]
        self._random = [s for s in sampled if not s.request.params.is_greedy]
        return metadata


def compile_sampler(model: Model) -> None:
    """Compile the kernels that compute logits of few rows and sample from them; nothing on the CPU.
    Products of few rows have a kernel for each of _WARM_UP_ROWS (kernels/tiles.py).
    """
    if model.device.type == "cpu":
        return
    hidden = torch.zeros(max(_WARM_UP_ROWS), model.width, dtype=model.dtype, device=model.device)
    all_logits = [model.logits(hidden[:rows], wide=False) for rows in _WARM_UP_ROWS]
    for params in _WARM_UP_PARAMS:
        metadata = make_sampling_metadata([Request("", [0], params).samples[0]], model.device)
        sample(all_logits[-1], metadata)


def sample(logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Sample one token per row. logits: (rows, vocab_size), any float type, not modified."""
    raw = logits
    if metadata.beam_temperature is not None:
        raw = logits.float() / metadata.beam_temperature[:, None]
    if (kernel := _find_kernel(raw)) and len(raw):
        if is_reproducible():
            token = _draw_with_kernel(kernel, raw, metadata)[0]
            return compute_logprobs(raw, token, metadata.num_top)
        return _sample_with_kernel(kernel, raw, metadata)
    raw = raw.float()
    return compute_logprobs(
        raw, _choose_tokens(metadata.edits.apply(raw), metadata), metadata.num_top
    )


def compute_logprobs(logits: Tensor, token: Tensor, num_top: int | None) -> SamplerOutput:
    """Log probabilities of these tokens, (rows,), and of the num_top most probable ones; None: no
    ranks. Also used for the rows of a prompt and the tokens that follow them.
    """
    logits = logits.float()
    if is_reproducible():  # the bits of log_softmax, with which a trainer computes them
        logprobs = logits.log_softmax(-1)
        return _gather_logprobs(logprobs, token, logits.new_zeros(len(logits)), num_top)
    return _gather_logprobs(logits, token, logits.logsumexp(-1), num_top)


def _gather_logprobs(
    logits: Tensor, token: Tensor, lse: Tensor, num_top: int | None
) -> SamplerOutput:
    chosen, norm = logits.gather(1, token[:, None]), lse[:, None]
    rank = torch.zeros_like(token) if num_top is None else (logits > chosen).sum(-1) + 1
    top, ids = logits.topk(min(num_top or 0, logits.shape[-1]), -1)
    return SamplerOutput(token, (chosen - norm)[:, 0], rank, ids, top - norm)


def _sample_with_kernel(
    kernel: ModuleType, raw: Tensor, metadata: SamplingMetadata
) -> SamplerOutput:
    """`sample` in one pass over the logits in their own dtype."""
    token, logprob, lse = _draw_with_kernel(kernel, raw, metadata)
    if metadata.num_top is not None:
        return _gather_logprobs(raw.float(), token, lse, metadata.num_top)
    nothing = token.new_empty(len(raw), 0)
    return SamplerOutput(token, logprob, torch.zeros_like(token), nothing, nothing.float())


def _draw_with_kernel(
    kernel: ModuleType, raw: Tensor, metadata: SamplingMetadata
) -> tuple[Tensor, Tensor, Tensor]:
    """A token for each row, its log probability, and the logsumexp of the row."""
    raw = raw if raw.stride(-1) == 1 else raw.contiguous()
    logits = metadata.edits.apply(raw)
    unedited = None if logits is raw else raw
    return kernel.draw(logits, unedited, *_kernel_columns(metadata, len(raw), raw.device))


def _kernel_columns(
    metadata: SamplingMetadata, count: int, device: torch.device
) -> list[Tensor | None]:
    """temperature, uniform, min_p, top_k and top_p of all rows. Greedy rows have temperature 0 and
    keep all tokens.
    """
    if metadata.random is None:
        zeros = torch.zeros(count, dtype=torch.float64, device=device)
        return [zeros.float(), zeros, None, None, None]
    values = [metadata.temperature, metadata.uniform]
    values += [metadata.min_p, metadata.top_k, metadata.top_p]
    if len(metadata.random) == count:
        return values
    spread = lambda t, off: t.new_full((count,), off).index_copy_(0, metadata.random, t)
    pairs = zip(values, (0, 0, 0, 0, 1), strict=True)
    return [None if t is None else spread(t, off) for t, off in pairs]


def _find_kernel(logits: Tensor) -> ModuleType | None:
    """The Triton module that samples in few launches, if it runs here."""
    device = logits.device
    if device.type != "cuda" or logits.dtype == torch.float64 or not device_info(device).has_triton:
        return None
    from onchip.kernels.llm import sampling

    return sampling


def _choose_tokens(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """A token for each row. Each pass reads rows x vocab_size numbers, so passes that no row needs
    are skipped.
    """
    if metadata.random is None:
        return logits.argmax(-1)
    if len(metadata.random) == len(logits):
        return pick(compute_masses(logits, metadata), metadata.uniform)
    sampled = pick(compute_masses(logits[metadata.random], metadata), metadata.uniform)
    return logits.argmax(-1).index_copy_(0, metadata.random, sampled)


def compute_masses(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Integer probabilities of the tokens that may be sampled, 0 for the others, (rows, vocab).
    logits: of the random rows.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    weights = in_whole_vectors(torch.exp_, logits.div_(metadata.temperature[:, None]))
    keys = weights.view(torch.int32)  # of non-negative floats: the same order
    masses = (weights * _UNIT).round_().long()  # a power of two: exact
    if metadata.min_p is not None:
        masses.masked_fill_(weights < metadata.min_p[:, None], 0)
    if metadata.top_k is not None:
        count = torch.where(metadata.top_k > 0, metadata.top_k, logits.shape[-1])
        floor = find_threshold(keys, torch.ones_like(masses), count)
        masses.masked_fill_(keys < floor[:, None], 0)
    if metadata.top_p is not None:
        wanted = (masses.sum(-1) * metadata.top_p).ceil().long()
        floor = find_threshold(keys, masses, wanted)
        masses.masked_fill_(keys < floor[:, None], 0)
    return masses


def pick(masses: Tensor, uniform: Tensor) -> Tensor:
    """The token at the fraction `uniform` of the running sum of integer masses, (rows, vocab)."""
    running = masses.cumsum(-1)
    place = (running[:, -1] * uniform).long()  # below the total, as uniform is at most 1 - 2^-53
    token = torch.searchsorted(running, place[:, None], right=True)[:, 0]
    return token.clamp_(max=masses.shape[-1] - 1)  # a row of NaN finds no token


def find_threshold(keys: Tensor, masses: Tensor, wanted: Tensor) -> Tensor:
    """The largest key, per row, such that the masses of all keys from it on add up to `wanted` (or
    to the total). keys: int32 (rows, n), not negative; masses: int64.
    """
    wanted = wanted.clamp(max=masses.sum(-1))
    key_prefix = torch.zeros_like(wanted)
    for shift, bits in _DIGITS:
        digit = keys >> shift
        inside = (digit >> bits) == key_prefix[:, None]
        digit = (digit & ((1 << bits) - 1)).long()
        held = masses.new_zeros(len(keys), 1 << bits)
        held.scatter_add_(1, digit, masses * inside)
        from_here = held.flip(1).cumsum(1).flip(1)
        best = ((from_here >= wanted[:, None]).sum(1) - 1).clamp_(min=0)
        at = best[:, None]
        wanted = wanted - (from_here - held).gather(1, at)[:, 0]
        key_prefix = (key_prefix << bits) | best
    return key_prefix


def _make_edits(samples: Sequence[Sample], device: torch.device) -> LogitEdits:
    add: dict[tuple[int, int], float] = {}
    repeat: dict[tuple[int, int], float] = {}
    edited = [(row, s) for row, s in enumerate(samples) if s.request.params.edits_logits]
    for row, row_sample in edited:
        request, params = row_sample.request, row_sample.request.params
        values: Counter[int] = Counter(params.logit_bias)
        if params.presence_penalty or params.frequency_penalty:
            for token, count in Counter(row_sample.token_ids).items():
                values[token] -= params.presence_penalty + params.frequency_penalty * count
        if row_sample.num_tokens < params.min_tokens:
            values.update(dict.fromkeys(request.end_token_ids, float("-inf")))
        add |= {(row, token): value for token, value in values.items()}
        if params.repetition_penalty != 1:
            seen_tokens = {*request.prompt_token_ids, *row_sample.token_ids}
            repeat |= {(row, token): params.repetition_penalty for token in seen_tokens}
    bitmask = _make_bitmask(samples, device) if edited else None
    return LogitEdits(_edit_tensors(add, device), _edit_tensors(repeat, device), bitmask)


def _make_bitmask(samples: Sequence[Sample], device: torch.device) -> TokenBitmask | None:
    """The tokens that the samples' grammars allow next; None if no sample has one."""
    rows = [row for row, s in enumerate(samples) if s.matcher is not None]
    if not rows:
        return None
    words = _copy_to_device(fill_bitmask([samples[row].matcher for row in rows]), device)
    every = len(rows) == len(samples)
    return TokenBitmask(words, None if every else _make_tensor(rows, torch.int64, device))


def _edit_tensors(
    values: dict[tuple[int, int], float], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    if not values:
        return None
    rows, tokens = zip(*values, strict=True)
    return (
        _make_tensor(rows, torch.int64, device),
        _make_tensor(tokens, torch.int64, device),
        _make_tensor(list(values.values()), torch.float32, device),
    )


def _beam_temperature(request: Request) -> float:
    return (request.beams.temperature or 1.0) if request.beams else 1.0


def _make_column(
    values: list, off: float, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """None if no row uses the option."""
    return None if values.count(off) == len(values) else _make_tensor(values, dtype, device)


def _make_tensor(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _copy_to_device(torch.tensor(values, dtype=dtype), device)


def _copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy asynchronously from pinned memory, behind the work queued on the device."""
    staged = values.pin_memory() if device.type == "cuda" else values
    return staged.to(device, non_blocking=True)
