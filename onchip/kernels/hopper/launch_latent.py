"""From a call over latent pages to the launches of its kernel and of the merge of split keys."""

from functools import cache

from onchip.core.backend import Result, empty_result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.latent import ALIGN, HALF, REST, TILE_N, latent_kernel
from onchip.kernels.hopper.tensors import (
    fill_without_keys,
    page_stride,
    paged_descriptor,
    softmax_scales,
    with_contiguous_rows,
)
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import HOPPER_LATENT_TILE, HOPPER_LATENT_WAVES, batch_bucket

_latent_kernel = CachedLauncher(latent_kernel)


def attend(problem: Problem, x: Tensors) -> Result:
    from onchip.kernels.triton import decode  # its plan of splits, and the merge
    from onchip.kernels.triton.launch import LaunchArgs, make_contiguous

    out, lse = empty_result(problem, x)
    if not out.numel() or not problem.batch:
        return Result(out, lse)
    if not x.k.numel():
        return fill_without_keys(out, lse, x.sinks)
    total_q = out.shape[-3]
    problem = problem._replace(latent=True)  # a key is its value, and is read once
    hardware = decode.machine(out.device)
    launch = decode.plan_launch(problem, total_q, HOPPER_LATENT_TILE, hardware, HOPPER_LATENT_WAVES)
    scratch = decode.make_scratch(launch, problem, out)
    part = min(TILE_N.value, problem.page_size)
    left, right = problem.window
    right = None if problem.seqlen_q == 1 else right  # a single query sees all keys
    table = with_contiguous_rows(x.page_table)
    units, least, _ = launch.cut
    sinks = make_contiguous(x.sinks)
    strides = x.q.stride()[:3] if x.q.dim() == 4 else (0, *x.q.stride()[:2])
    _latent_kernel[(launch.num_units * problem.num_kv_heads,)](
        x.q, paged_descriptor(x.k, part, HALF.value), paged_descriptor(x.k, part, REST.value),
        lse if x.cu_seqlens_q is None else x.cu_seqlens_q.contiguous(), table,
        x.cache_seqlens.contiguous(), lse if sinks is None else sinks, out, lse,
        *(lse if t is None else t for t in scratch),
        *(stride // ALIGN.value for stride in strides), table.stride(0), table.shape[1],
        x.k.shape[0], page_stride(x.k), total_q, problem.seqlen_k, problem.batch,
        problem.num_heads, left or 0, right or 0, units or 0, least or 0, launch.num_units,
        launch.part_rows, *softmax_scales(problem),
        GROUP=problem.group_size, PAGE_SIZE=problem.page_size, PACKED=problem.packed,
        HAS_LEFT=left is not None, HAS_RIGHT=right is not None, HAS_SINKS=x.sinks is not None,
        SOFTCAP=problem.softcap != 0, SPLIT=units is not None,
        BATCH=batch_bucket(problem.batch), **_constants(),
    )  # fmt: skip
    result = Result(out, lse)
    decode.merge_splits(LaunchArgs.of(problem, x), launch, scratch, sinks, result)
    return result


@cache
def _constants() -> dict:
    """The registers of an SM: two consumers of 240, and a producer."""
    return {
        "CONSUMER_REGS": 240,
        "PRODUCER_REGS": 24,
        "num_warps": 4,
        "maxnreg": 168,
        "enable_fp_fusion": True,
        "launch_pdl": True,
    }
