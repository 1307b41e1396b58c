"""How many pages fit on the device, after the model and its largest step, and on the host."""

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from onchip.cost.prefixes import TILE_ROWS
from onchip.engine.cascade import EAGER_SLOTS, MOST_TOKENS
from onchip.engine.engine import Engine, ExecutionConfig
from onchip.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.draft import chunk_length
from onchip.engine.step import Limits
from onchip.kvcache import Spec
from onchip.kvcache.offload import PREFIX_SEGMENT_BYTES
from onchip.kvcache.swap import CHUNK_BYTES
from onchip.models import Model

_HOST_SHARE = 0.25  # of the free memory, if the CPU computes: other programs need memory, too
_TRIAL_TOKENS = 4096  # sequence length at which kernels use all of their scratch memory
# Of the tables of own and shared pages, for an entry of the page table: an int32 entry, the int64
# index that it is gathered by, and a quarter of these for the slots.
_CASCADE_ENTRY_BYTES = 16
_BLOCK = 128  # tokens of a block of quantised operands, which share a scale
_ALL_SAMPLING_OPTIONS = SamplingParams(
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
    """Page options; see `Engine`."""

    page_size: int = 16
    kv_dtype: str | None = None


def device_pages(
    model: Model,
    limits: Limits,
    paging: Paging,
    utilization: float,
    *,
    graphs: bool = True,
    speculation: SpeculativeConfig | None = None,
    draft: Model | None = None,
    offloads: bool = False,
    cascade: str = "off",
    prefill_precision: str | None = None,
    fused_decode: bool = True,
    fused_experts: bool = True,
) -> int:
    """Pages for a cache: the part of `utilization` of a GPU's memory that is left, or a quarter of
    the free host memory, but never more than max_num_seqs sequences of max_model_len can fill.
    graphs: whether steps will be recorded. speculation: with drafts, a sequence has several rows of
    logits in a step. draft: its model, whose cache has as many pages. offloads: pages will stream
    from host memory. cascade, prefill_precision, fused_decode, fused_experts: of `ExecutionConfig`.
    """
    spec = model.cache_spec(*paging)
    most = 1 + limits.max_num_seqs * -(-limits.max_model_len // paging.page_size)
    if model.device.type == "cuda":
        ways = {"fused_decode": fused_decode, "fused_experts": fused_experts}
        recorded = ExecutionConfig(cascade=cascade, **ways) if graphs else None
        free_bytes = _free_gpu_bytes(model, limits, paging, utilization, recorded, speculation)
        free_bytes -= _streaming_bytes(model, limits) if offloads else 0
        free_bytes -= _cascade_bytes(model, limits, paging) if cascade != "off" else 0
        free_bytes -= _prefill_bytes(model, limits) if prefill_precision is not None else 0
    else:
        free_bytes = int(_HOST_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if draft is not None:
        config = speculation if graphs else None
        free_bytes = _share_with_draft(free_bytes, spec, draft, limits, paging, config)
    pages = min(most, spec.pages_in(max(0, free_bytes)))
    if pages < 2:
        raise ValueError(
            f"no page of {spec.page_bytes:,} bytes fits on {spec.device}: of the memory it may use,"
            f" {max(0, free_bytes):,} bytes are left"
        )
    return pages


def _share_with_draft(
    free_bytes: int,
    spec: Spec,
    draft: Model,
    limits: Limits,
    paging: Paging,
    config: SpeculativeConfig | None,
) -> int:
    """The bytes that are left if the cache of the draft model has as many pages. config: of its
    graphs; None without any.
    """
    if draft.device.type == "cuda":
        own = Paging(paging.page_size)
        free_bytes -= _step_bytes(draft, limits, own)
        if config is not None and not config.enforce_eager:
            same = _with_equal_graphs(config)
            free_bytes -= _graph_bytes(draft, limits, own, ExecutionConfig(), same)
    draft_bytes = draft.cache_spec(paging.page_size).page_bytes
    return free_bytes * spec.page_bytes // (spec.page_bytes + draft_bytes)


def _with_equal_graphs(config: SpeculativeConfig) -> SpeculativeConfig:
    """Drafts whose verification has the graphs that a draft model has for drafts of this config."""
    count, tree = chunk_length(config.shape) - 1, None
    if config.shape.branches_late:
        tree = str([(rank,) for rank in range(count)])
    return SpeculativeConfig(count, enforce_eager=False, speculative_token_tree=tree)


def host_pages(spec: Spec, swap_space: float, num_pages: int) -> int:
    """Pages in swap_space GiB, at most as many as on the device."""
    if not swap_space >= 0:
        raise ValueError(f"{swap_space=} must be a number of GiB from 0 on")
    return min(spec.pages_in(int(swap_space * 2**30)), num_pages)


def offload_pages(spec: Spec, kv_offloading_size: float, num_pages: int) -> int:
    """Pages in kv_offloading_size GiB: none, or more than a cache of num_pages has. Only a request
    that is longer than the cache uses them, and it reserves them for all of its tokens.
    """
    if not kv_offloading_size >= 0:
        raise ValueError(f"{kv_offloading_size=} must be a number of GiB from 0 on")
    pages = spec.pages_in(int(kv_offloading_size * 2**30))
    if kv_offloading_size and pages < num_pages:
        raise ValueError(
            f"{kv_offloading_size=} GiB hold {pages:,} pages, but the cache has {num_pages - 1:,}:"
            f" a request longer than the cache needs more than {num_pages - 1:,} in host memory"
        )
    return pages


def _free_gpu_bytes(
    model: Model,
    limits: Limits,
    paging: Paging,
    utilization: float,
    recorded: ExecutionConfig | None,
    speculation: SpeculativeConfig | None = None,
) -> int:
    """recorded: how steps with graphs run; None without graphs."""
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={utilization} must be above 0 and at most 1")
    rows_per_seq = 1 + (speculation.num_speculative_tokens if speculation else 0)
    rows = min(limits.max_num_seqs * rows_per_seq, limits.max_num_batched_tokens)
    fixed = _step_bytes(model, replace(limits, max_num_seqs=rows), paging)
    fixed += _staging_bytes(model, paging)
    if recorded is not None:
        fixed += _graph_bytes(model, limits, paging, recorded, speculation)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * utilization) - (total - free) - fixed


def _step_bytes(model: Model, limits: Limits, paging: Paging) -> int:
    """Memory of the largest step besides weights and pages, measured with everything torch
    reserves. The step has max_num_seqs prompts that fill the token budget, one of them with prompt
    logprobs, and uses every option of the sampler. With latent pages it runs again in company of a
    sequence that began before: prompts then read their pages, which takes more or less memory.
    """
    device, count = model.device, limits.max_num_seqs
    length = max(1, min(limits.max_num_batched_tokens // count, limits.max_model_len - 2))
    pages = 3 + count * -(-(length + 2) // paging.page_size)
    limits = replace(
        limits,
        max_num_seqs=min(count + 1, limits.max_num_batched_tokens),
        max_queued_requests=count,
        max_queued_tokens=count * length,
    )
    options = {
        **paging._asdict(),
        "prefix_caching": False,
        "execution": ExecutionConfig(graphs=False),
    }
    torch.cuda.empty_cache()
    with Engine(model, None, limits=limits, num_pages=pages, **options) as engine:
        held = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        _run_prompts(engine, count, length)
        if model.cache_spec().latent:
            engine.add([0], _ALL_SAMPLING_OPTIONS)
            engine.step()
            _run_prompts(engine, count, length)
        return torch.cuda.max_memory_reserved(device) - held


def _run_prompts(engine: Engine, count: int, length: int) -> None:
    """Prompts of equal length to their end, the first with prompt logprobs."""
    for i in range(count):
        logprobs = MAX_LOGPROBS if i == 0 else None
        engine.add([i % 2] * length, replace(_ALL_SAMPLING_OPTIONS, prompt_logprobs=logprobs))
    while engine.has_work:
        engine.step()


def _streaming_bytes(model: Model, limits: Limits) -> int:
    """Memory of a step besides `_step_bytes` that streams pages from the host: two segments, and
    five tensors of unrounded outputs: over pages, over the host, and three while both are merged.
    """
    tokens, wide = limits.max_num_batched_tokens, torch.promote_types(model.dtype, torch.float32)
    num_outputs = tokens * model.config.num_heads * model.cache_spec().head_dim_v
    return 2 * PREFIX_SEGMENT_BYTES + 5 * num_outputs * wide.itemsize


def _cascade_bytes(model: Model, limits: Limits, paging: Paging) -> int:
    """Memory of an eager step besides `_step_bytes` that reads shared pages once: the unrounded
    outputs over own pages and the merged ones, then queries and outputs of every slot, then page
    tables.
    """
    tokens = min(limits.max_num_batched_tokens, MOST_TOKENS)
    heads, kv_heads = model.config.num_heads, model.config.num_kv_heads
    num_outputs = 2 * (tokens * heads + EAGER_SLOTS * TILE_ROWS * kv_heads)
    wide = torch.promote_types(model.dtype, torch.float32)
    output_bytes = num_outputs * model.cache_spec().head_dim_v * wide.itemsize
    return output_bytes + _CASCADE_ENTRY_BYTES * limits.max_num_seqs * _table_width(limits, paging)


def _prefill_bytes(model: Model, limits: Limits) -> int:
    """Memory of a step besides `_step_bytes` that computes attention in 8 bits: queries, keys and
    values of the longest sequence in 8 bits and whole blocks, and the outputs of its chunk, which
    are joined with those of the others.
    """
    tokens, spec = limits.max_num_batched_tokens, model.cache_spec()
    heads, kv_heads = model.config.num_heads, model.config.num_kv_heads
    width, width_v = (max(64, 1 << (n - 1).bit_length()) for n in (spec.head_dim, spec.head_dim_v))
    queries, keys = (-(-n // _BLOCK) * _BLOCK for n in (tokens, limits.max_model_len))
    quantised = queries * heads * width + keys * kv_heads * (width + width_v)
    return quantised + 2 * tokens * heads * spec.head_dim_v * model.dtype.itemsize


def _graph_bytes(
    model: Model,
    limits: Limits,
    paging: Paging,
    execution: ExecutionConfig,
    speculation: SpeculativeConfig | None = None,
) -> int:
    """Memory of the graphs, of their shared page table, and of the tables of a cascade."""
    width = _table_width(limits, paging)
    pages = 1 + min(width, -(-_TRIAL_TOKENS // paging.page_size))
    options = {**paging._asdict(), "execution": execution}
    if speculation is not None:  # the method changes no graph
        options["speculative_config"] = replace(speculation, method="ngram", model=None)
    entry_bytes = 4 + (0 if execution.cascade == "off" else _CASCADE_ENTRY_BYTES)
    with Engine(model, None, limits=limits, num_pages=pages, **options) as engine:
        return engine.graph_bytes() + entry_bytes * limits.max_num_seqs * width


def _table_width(limits: Limits, paging: Paging) -> int:
    """Pages of the longest sequence."""
    return -(-limits.max_model_len // paging.page_size)


def _staging_bytes(model: Model, paging: Paging) -> int:
    """Buffers in which pages are packed for copies to and from the host: see kvcache/swap.py."""
    return 2 * max(CHUNK_BYTES, model.cache_spec(*paging).page_bytes)
