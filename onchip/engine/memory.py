"""How many pages fit: on the device beside the model and its steps, and on the host."""

import os
from dataclasses import replace

import torch

from onchip.engine.engine import Engine, Pace
from onchip.engine.params import SamplingParams
from onchip.engine.step import Limits
from onchip.kvcache import Spec
from onchip.models import Model

_HOST_SHARE = 0.25  # of the memory that is free where the CPU computes: it belongs to others too


def device_pages(model: Model, limits: Limits, page_size: int, utilization: float) -> int:
    """Pages for a cache: what a GPU has left of `utilization` of its memory, or a quarter of what
    the host has free; never more than max_num_seqs sequences of max_model_len can hold.
    """
    spec = model.cache_spec(page_size)
    most = 1 + limits.max_num_seqs * -(-limits.max_model_len // page_size)
    if model.device.type == "cuda":
        room = _room_on_gpu(model, limits, page_size, utilization)
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


def _room_on_gpu(model: Model, limits: Limits, page_size: int, utilization: float) -> int:
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={utilization} must lie above 0, and at most at 1")
    device = model.device
    working = _step_bytes(model, limits, page_size)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - working


def _step_bytes(model: Model, limits: Limits, page_size: int) -> int:
    """What the largest step needs beside weights and pages, measured: as many prompts as may run,
    together as long as a step, and draws that use every part of the sampler.
    """
    device, count = model.device, limits.max_num_seqs
    length = max(1, min(limits.max_num_batched_tokens // count, limits.max_model_len - 2))
    pages = 2 + count * -(-(length + 2) // page_size)
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.7, top_p=0.9, top_k=50)
    limits = replace(limits, max_queued_requests=count, max_queued_tokens=count * length)
    options = {"page_size": page_size, "prefix_caching": False, "pace": Pace(graphs=False)}
    with Engine(model, None, limits=limits, num_pages=pages, **options) as engine:
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for i in range(count):
            engine.add([i % 2] * length, params)
        while engine.has_work:
            engine.step()
        return torch.cuda.max_memory_allocated(device) - held
