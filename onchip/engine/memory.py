"""How many pages fit: on the device beside the model and its steps, and on the host."""

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from onchip.engine.engine import Engine, Pace
from onchip.engine.params import MAX_LOGPROBS, SamplingParams
from onchip.engine.step import Limits
from onchip.kvcache import Spec
from onchip.kvcache.swap import CHUNK_BYTES
from onchip.models import Model

_HOST_SHARE = 0.25  # of the memory that is free where the CPU computes: it belongs to others too
_TRIAL_TOKENS = 4096  # of a sequence: as long as it takes for kernels to use all their scratch
_EVERYTHING = SamplingParams(
    max_tokens=2,
    ignore_eos=True,
    temperature=0.7,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    logprobs=MAX_LOGPROBS,
)


class Paging(NamedTuple):
    """What is asked of pages: see `Engine`."""

    page_size: int = 16
    kv_dtype: str | None = None


def device_pages(
    model: Model, limits: Limits, paging: Paging, utilization: float, *, graphs: bool = True
) -> int:
    """Pages for a cache: what a GPU has left of `utilization` of its memory, or a quarter of what
    the host has free; never more than max_num_seqs sequences of max_model_len can hold. graphs:
    whether steps will be recorded.
    """
    spec = model.cache_spec(*paging)
    most = 1 + limits.max_num_seqs * -(-limits.max_model_len // paging.page_size)
    if model.device.type == "cuda":
        room = _room_on_gpu(model, limits, paging, utilization, graphs)
    else:
        room = int(_HOST_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    pages = min(most, spec.pages_in(max(0, room)))
    if pages < 2:
        raise ValueError(
            f"there is no room for pages of {spec.page_bytes:,} bytes on {spec.device}: of what it"
            f" may use, {max(0, room):,} bytes are left"
        )
    return pages


def host_pages(spec: Spec, swap_space: float, num_pages: int) -> int:
    """Pages in swap_space GiB, at most as many as the device has."""
    if not swap_space >= 0:
        raise ValueError(f"{swap_space=} must be a number of GiB from 0 on")
    return min(spec.pages_in(int(swap_space * 2**30)), num_pages)


def _room_on_gpu(
    model: Model, limits: Limits, paging: Paging, utilization: float, graphs: bool
) -> int:
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={utilization} must lie above 0, and at most at 1")
    fixed = _step_bytes(model, limits, paging) + _staging_bytes(model, paging)
    if graphs:
        fixed += _graph_bytes(model, limits, paging)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * utilization) - (total - free) - fixed


def _step_bytes(model: Model, limits: Limits, paging: Paging) -> int:
    """What the largest step needs beside weights and pages, measured with all that torch takes for
    it: as many prompts as may run, together as long as a step, one of which is asked about itself,
    and draws that use every part of the sampler.
    """
    device, count = model.device, limits.max_num_seqs
    length = max(1, min(limits.max_num_batched_tokens // count, limits.max_model_len - 2))
    pages = 2 + count * -(-(length + 2) // paging.page_size)
    limits = replace(limits, max_queued_requests=count, max_queued_tokens=count * length)
    options = {**paging._asdict(), "prefix_caching": False, "pace": Pace(graphs=False)}
    torch.cuda.empty_cache()
    with Engine(model, None, limits=limits, num_pages=pages, **options) as engine:
        held = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        engine.add([0] * length, replace(_EVERYTHING, prompt_logprobs=MAX_LOGPROBS))
        for i in range(1, count):
            engine.add([i % 2] * length, _EVERYTHING)
        while engine.has_work:
            engine.step()
        return torch.cuda.max_memory_reserved(device) - held


def _graph_bytes(model: Model, limits: Limits, paging: Paging) -> int:
    """The graphs, and the page table that they share."""
    width = -(-limits.max_model_len // paging.page_size)
    pages = 1 + min(width, -(-_TRIAL_TOKENS // paging.page_size))
    with Engine(model, None, limits=limits, num_pages=pages, **paging._asdict()) as engine:
        return engine.graph_bytes() + 4 * limits.max_num_seqs * width


def _staging_bytes(model: Model, paging: Paging) -> int:
    """Where pages are packed on their way to the host and back: see kvcache/swap.py."""
    return 2 * max(CHUNK_BYTES, model.cache_spec(*paging).page_bytes)
