"""Part `prefill` of `python -m benchmarks serving`: the time to the first token of one long prompt,
with attention in 16 bits and in FP8 (prefill_precision="fp8").

    prompt   8,192, 16,384 and 32,768 tokens in steps of 8,192, the same requests both ways
    value    milliseconds from `add` to the first token; the fastest of several prompts
    ratio    time in 16 bits over the time in FP8

predicted_ratio: by `predict_s`, from rates of benchmarks/results and the sizes of the model. It was
written before the first run on a GPU.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onchip.cli.bench.harness import Case, Row, RowRefused, Session
from onchip.cost.hardware import H200
from onchip.engine import LLM, Engine, Request, SamplingParams
from onchip.models import Decoder, ModelConfig

ROUNDS = 5  # each has other tokens, so that no prompt is cached
WAYS = {"fp8": "fp8", "16 bits": None}  # name: prefill_precision
RESULTS = Path(__file__).parent / "results" / "h200-forward8.json"
PRODUCTS_SHARE = 0.7  # of the tensor cores' peak that products with weights reach: assumed
QUANTISE_SHARE = 0.5  # of the memory's bandwidth that quantisation reaches: H200, 2026-11-16
MEASURED_DIMS = (64, 128, 256)


class PrefillLoad(NamedTuple):
    prompts: tuple[int, ...] = (8192, 16_384, 32_768)
    step_tokens: int = 8192

    @property
    def max_model_len(self) -> int:
        return max(self.prompts) + 16


QUICK = PrefillLoad((2100,), 2100)


class AttentionRates(NamedTuple):
    """Operations per second of causal calls and of calls in which every query sees all keys."""

    causal: float
    full: float


def measure(
    session: Session, name: str, model: Decoder, kv_dtype: str | None, load: PrefillLoad
) -> list[Row]:
    """A row for each length and way, in the same run."""
    times = {
        way: dict(_measure_way(session, model, kv_dtype, load, precision))
        for way, precision in WAYS.items()
    }
    rows = []
    for length in load.prompts:
        plain_s, fast_s = times["16 bits"][length], times["fp8"][length]
        predicted = None
        if model.config.head_dim in MEASURED_DIMS:
            predicted = predict_ratio(model.config, length, load.step_tokens)
        for way in WAYS:
            seconds = times[way][length]
            row = _case(name, model, length).row(way, 1e3 * seconds, "ms", failed=0)
            row["num_kv_heads"] = model.config.num_kv_heads
            if way == "fp8":
                row["ratio"], row["predicted_ratio"] = plain_s / fast_s, predicted
                row["peers"], row["best_peer"] = {"16 bits": 1e3 * plain_s}, "16 bits"
            rows.append(row)
        session.say(
            f"{name}: the first token of {length:,} after {1e3 * fast_s:,.1f} ms in FP8,"
            f" {1e3 * plain_s:,.1f} in 16 bits: {plain_s / fast_s:.2f}x"
            + (f", predicted {predicted:.2f}x" if predicted else "")
        )
    return rows


def _case(name: str, model: Decoder, length: int) -> Case:
    config = model.config
    return Case(
        "prefill", name, model.dtype, config.head_dim, length, 1, config.num_heads, way="serve"
    )


def _measure_way(
    session: Session,
    model: Decoder,
    kv_dtype: str | None,
    load: PrefillLoad,
    precision: str | None,
) -> Iterator[tuple[int, float]]:
    """(prompt tokens, seconds to the first token)."""
    pages = 2 + -(-load.max_model_len // model.cache_spec().page_size)
    options: dict[str, Any] = {"max_num_seqs": 4, "kv_dtype": kv_dtype, "num_pages": pages}
    options |= {"max_model_len": load.max_model_len, "max_num_batched_tokens": load.step_tokens}
    with LLM(model, prefill_precision=precision, **options) as llm:
        for length in load.prompts:
            first_token_s(llm.engine, length, seed=0)  # compiles kernels
            before = llm.stats().tokens_prefilled_8bit
            runs = [first_token_s(llm.engine, length, seed=1 + i) for i in range(ROUNDS)]
            tokens = llm.stats().tokens_prefilled_8bit - before
            if (tokens > 0) != (precision is not None):
                raise RowRefused(f"{tokens} tokens of {length:,} were computed in 8 bits")
            yield length, min(runs)


def first_token_s(
    engine: Engine, length: int, seed: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds until one prompt has its first token. RowRefused if it does not run."""
    draw, vocab = random.Random(seed), min(10_001, engine.model.config.vocab_size)
    prompt = [draw.randrange(vocab) for _ in range(length)]
    start = clock()
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    if not isinstance(request, Request):
        raise RowRefused(f"the prompt was refused: {request.reason}")
    while engine.has_work:
        engine.step()
    return clock() - start


def predict_ratio(config: ModelConfig, length: int, step_tokens: int) -> float:
    """Predicted time in 16 bits over the time in FP8, on an H200."""
    return predict_s(config, length, step_tokens, None) / predict_s(
        config, length, step_tokens, "fp8"
    )


def predict_s(config: ModelConfig, length: int, step_tokens: int, precision: str | None) -> float:
    """Predicted seconds of a prompt on an H200: products with weights, attention at the rates that
    were measured for calls without pages, and what quantisation moves.
    """
    rates = read_rates(config, precision)
    weights = _layer_weights(config) * config.num_layers
    seconds = 2 * weights * length / (PRODUCTS_SHARE * H200.flops(torch.bfloat16))
    for start in range(0, length, step_tokens):
        new = min(step_tokens, length - start)
        seconds += config.num_layers * _attention_s(config, start, new, rates)
        if precision is not None:
            moved = quantised_bytes(config, start + new)
            seconds += config.num_layers * moved / (QUANTISE_SHARE * H200.memory_bytes_s)
    return seconds


def quantised_bytes(config: ModelConfig, num_keys: int) -> int:
    """Bytes that quantisation moves in a layer, besides those that a step in 16 bits moves, too:
    keys are read twice, values once, both are written in 8 bits. Queries are quantised where
    they would be written in 16 bits.
    """
    return num_keys * config.num_kv_heads * config.head_dim * (2 + 2 + 1 + 2 + 1)


def read_rates(config: ModelConfig, precision: str | None) -> AttentionRates:
    """Of 16,384 tokens and the head_dim of the model, measured on an H200."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    sizes = {"bench": "forward fp8", "seqlen": 16_384, "head_dim": config.head_dim}
    rates = {
        row["mask"]: row["value"] if precision else row["peers"]["forward bf16"]
        for row in rows
        if sizes.items() <= row.items()
    }
    return AttentionRates(1e12 * rates["causal"], 1e12 * rates["none"])


def _attention_s(config: ModelConfig, start: int, new: int, rates: AttentionRates) -> float:
    """A chunk of `new` tokens after `start` others."""
    pair = 4 * config.num_heads * config.head_dim
    return pair * new * (new / 2 / rates.causal + start / rates.full)


def _layer_weights(config: ModelConfig) -> int:
    width, heads = config.hidden_size, 2 * (config.num_heads + config.num_kv_heads)
    return width * (heads * config.head_dim + 3 * config.intermediate_size)
