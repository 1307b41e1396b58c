"""Part `samples` of `python -m benchmarks serving`: many samples of one long prompt, with the
cascade and without it.

    prompt   16,384 tokens, computed once, its pages shared by all samples
    step     64 samples, one token each: 64 x 16,384 keys read as one call, 16,384 with the cascade

A row has the tokens per second of the whole request (value), with its prompt, and of decoding alone
(decode_per_s), from the step after the first tokens on. ratio: value with the cascade against value
without it; decode_ratio likewise.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from onchip.cli.bench.harness import Case, Row, RowRefused, Session
from onchip.engine import LLM, Engine, Request, SamplingParams
from onchip.models import Decoder

ROUNDS = 3  # the fastest counts; each has other tokens, so that no prompt is cached
WAYS = {"cascade": False, "one call": True}  # name: disable_cascade_attn


@dataclass(frozen=True)
class SamplesLoad:
    num_samples: int = 64
    prompt_tokens: int = 16_384
    output_tokens: int = 512

    @property
    def max_model_len(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def num_pages(self, page_size: int) -> int:
        """The prompt once, and the outputs."""
        own = -(-self.output_tokens // page_size) + 1
        return 1 + -(-self.prompt_tokens // page_size) + self.num_samples * own


QUICK = SamplesLoad(32, 1024, 16)


class SamplesRun(NamedTuple):
    """tokens_per_s: of the whole request. decode_per_s: after its first tokens."""

    tokens_per_s: float
    decode_per_s: float
    first_token_s: float


def measure(
    session: Session, name: str, model: Decoder, kv_dtype: str | None, load: SamplesLoad
) -> list[Row]:
    """A row for each way, in the same run."""
    rows = [_measure_way(session, name, model, kv_dtype, load, way) for way in WAYS]
    shared, plain = rows
    shared["ratio"] = shared["value"] / plain["value"]
    shared["decode_ratio"] = shared["decode_per_s"] / plain["decode_per_s"]
    shared["peers"], shared["best_peer"] = {"one call": plain["value"]}, "one call"
    times = f"{shared['ratio']:.2f}x the tokens/s, {shared['decode_ratio']:.2f}x while decoding"
    session.say(f"{name}: with the cascade {times}")
    return rows


def _measure_way(
    session: Session,
    name: str,
    model: Decoder,
    kv_dtype: str | None,
    load: SamplesLoad,
    way: str,
) -> Row:
    page_size = model.cache_spec().page_size
    options: dict[str, Any] = {"max_num_seqs": load.num_samples, "kv_dtype": kv_dtype}
    options |= {"max_model_len": load.max_model_len, "num_pages": load.num_pages(page_size)}
    with LLM(model, disable_cascade_attn=WAYS[way], **options) as llm:
        serve_samples(llm.engine, load, seed=0)  # compiles kernels
        before = llm.stats()
        start = time.monotonic()
        runs = [serve_samples(llm.engine, load, seed=1 + i) for i in range(ROUNDS)]
        watched, after = session.watch(start), llm.stats()
    best = max(runs, key=lambda ran: ran.tokens_per_s)
    steps, with_cascade = after.steps - before.steps, after.cascade_steps - before.cascade_steps
    if (with_cascade > 0) != (way == "cascade"):
        raise RowRefused(f"{with_cascade} of {steps} steps of {way!r} had a cascade")
    config = model.config
    case = Case(
        "samples",
        name,
        model.dtype,
        config.head_dim,
        load.prompt_tokens,
        load.num_samples,
        config.num_heads,
        way="serve",
        num_kv_heads=config.num_kv_heads,
    )
    row = case.row(
        way,
        best.tokens_per_s,
        "tokens/s",
        failed=0,
        decode_per_s=best.decode_per_s,
        first_token_ms=1e3 * best.first_token_s,
        output_tokens=load.num_samples * load.output_tokens,
        steps=steps,
        cascade_steps=with_cascade,
        tokens_unread=after.tokens_unread - before.tokens_unread,
        **watched,
    )
    session.say(sentence(row))
    return row


def serve_samples(
    engine: Engine, load: SamplesLoad, seed: int, clock: Callable[[], float] = time.perf_counter
) -> SamplesRun:
    """One request with all samples. RowRefused if it does not run."""
    draw = random.Random(seed)
    vocab = min(10_001, engine.model.config.vocab_size)
    prompt = [draw.randrange(vocab) for _ in range(load.prompt_tokens)]
    params = SamplingParams(
        n=load.num_samples,
        temperature=0.6,
        seed=seed,
        ignore_eos=True,
        max_tokens=load.output_tokens,
    )
    start, first_s = clock(), None
    request = engine.add(prompt, params, stream=False)
    if not isinstance(request, Request):
        raise RowRefused(f"the request was refused: {request.reason}")
    while engine.has_work:
        engine.step()
        if first_s is None and all(sample.token_ids for sample in request.samples):
            first_s = clock() - start
    seconds, counts = clock() - start, [len(sample.token_ids) for sample in request.samples]
    if first_s is None or counts != [load.output_tokens] * load.num_samples:
        raise RowRefused(f"the samples have {min(counts)} to {max(counts)} tokens: {request.error}")
    decoded = load.num_samples * (load.output_tokens - 1)
    return SamplesRun(sum(counts) / seconds, decoded / (seconds - first_s), first_s)


def sentence(row: Row) -> str:
    """A row as a sentence."""
    return (
        f"{row['mask']} samples {row['kernel']}: {row['batch']} samples of {row['seqlen']:,}"
        f" tokens, {row['value']:,.0f} tokens/s, {row['decode_per_s']:,.0f} while decoding; first"
        f" tokens after {row['first_token_ms']:,.0f} ms; {row['cascade_steps']:,} of"
        f" {row['steps']:,} steps with a cascade, {row['tokens_unread']:,} keys not read again"
    )
