"""`transformers` on the requests of `python -m benchmarks serving`, random weights of the same
shape.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workload import TEMPERATURE, Workload
from onchip.cli.bench.harness import Session
from onchip.cli.bench.measure import synchronize

BLOCK = 256  # tokens of a block of its paged cache, its default
PATIENCE_S = 60  # for one more result
WARM_UP_REQUESTS = 8
Generate = Callable[[Any, Workload], float]  # seconds, from the first request to the last token


def tokens_per_s(
    session: Session, fields: dict[str, Any], workload: Workload, dtype: torch.dtype
) -> dict[str, float]:
    """Requested tokens a second by batching method. A method that fails is left out with a
    sentence; without transformers, all are.
    """
    try:
        model = build(fields, session.device, dtype)
    except ImportError as error:
        session.note(f"no peers: {error}")
        return {}
    rates = {}
    for name, generate in WAYS.items():
        try:
            rates[f"transformers {name}"] = _rate(model, generate, workload)
        except Exception as error:  # whatever a peer raises, our rows stand
            session.note(f"transformers {name} is left out: {type(error).__name__}: {error}")
    return rates


def build(fields: dict[str, Any], device: torch.device, dtype: torch.dtype):
    """A causal language model of this shape that was never trained."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it would look for kernels to download
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = AutoConfig.for_model(**fields)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _rate(model: Any, generate: Generate, workload: Workload) -> float:
    generate(model, workload.cut(WARM_UP_REQUESTS, 2))
    return workload.num_output_tokens / generate(model, workload)


def _drawn(most: int, **options: Any):
    """The engine's sampling: temperature alone, and no end before the requested length."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=most,
        min_new_tokens=most,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )


def static(model: Any, workload: Workload) -> float:
    """One batch, prompts padded on the left, until the longest output is done."""
    longest = max(len(prompt) for prompt, _ in workload.requests)
    pad = lambda prompt, value: [value] * (longest - len(prompt))
    ids = [pad(prompt, 0) + prompt for prompt, _ in workload.requests]
    seen = [pad(prompt, 0) + [1] * len(prompt) for prompt, _ in workload.requests]
    start = time.perf_counter()
    model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(seen, device=model.device),
        generation_config=_drawn(workload.steps),
    )
    synchronize(model.device)
    return time.perf_counter() - start


def continuous(model: Any, workload: Workload) -> float:
    """Its own scheduler and paged cache with pages for all requests; every request has its own
    length. The cache is allocated and its graphs are captured before the clock starts.
    """
    from transformers import ContinuousBatchingConfig

    blocks = sum(-(-(len(prompt) + n) // BLOCK) for prompt, n in workload.requests) + 16
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=8192)
    options = {"generation_config": _drawn(workload.steps), "continuous_batching_config": config}
    with model.continuous_batching_context_manager(**options) as manager:
        start = time.perf_counter()
        for prompt, count in workload.requests:
            manager.add_request(prompt, max_new_tokens=count)
        for _ in workload.requests:
            _check(manager.get_result(timeout=PATIENCE_S))
        return time.perf_counter() - start


def _check(got: Any) -> None:
    if got is None:
        raise TimeoutError(f"no result for {PATIENCE_S} s")
    if got.error:
        raise RuntimeError(f"a request failed: {got.error}")


WAYS: dict[str, Generate] = {"static": static, "continuous": continuous}
