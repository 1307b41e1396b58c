"""The backend `hopper`: FlashAttention v3 in Gluon, with TMA, WGMMA and warp specialisation.

This file decides; it imports Triton at the first call that runs here:

    precision "fp8", "int8" ...   launch_8bit
    latent pages                  launch_latent   keys of 576 columns, 512 of which are the values
    few queries, many keys        launch_decode   the keys are split over programs
    everything else               launch          forward, and forward_into for a ring's rounds
    gradients                     launch_backward
"""

from collections.abc import Sequence
from functools import partial

from onchip.core.backend import AccumulateFn, Backend, KeySplits, MergeFn, lacks
from onchip.core.device import DeviceInfo
from onchip.core.problem import EIGHT_BIT_PRECISIONS, Problem, Tensors
from onchip.cost.hardware import Hardware, planned_for
from onchip.kernels.hopper.tile_plan import describe_tiles
from onchip.kernels.runtime.launcher import on_device
from onchip.kernels.tiles import (
    DECODE_ROWS,
    FEW_KEYS,
    HOPPER_DECODE_BATCH,
    HOPPER_DECODE_ROWS,
    HOPPER_FEW,
    HOPPER_FP8_KEYS,
    HOPPER_LATENT,
    HOPPER_LATENT_TILE,
    HOPPER_LATENT_WAVES,
    HOPPER_PAGE_SIZES,
    HOPPER_PAGED_ROWS,
    HOPPER_TILE_ROWS,
    HOPPER_WIDTHS,
)

OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic", "softcap", "has_sinks"),
    *("page_size", "page_dtype", "wide_grads"),
    *("has_positions", "first_head"),  # they change ALiBi and dropout alone, which it lacks
}
PRECISION_OPTIONS = {
    *("causal", "window_size", "packed", "deterministic", "has_sinks", "page_size", "page_dtype"),
    *("has_positions", "first_head", "wide_grads"),
}


class HopperBackend(Backend):
    options = OPTIONS
    precisions = (None, *EIGHT_BIT_PRECISIONS)

    def supports(self, problem: Problem, device: DeviceInfo) -> str | None:
        if device.type != "cuda" or device.capability != (9, 0):
            return f"needs a Hopper GPU (sm_90), not {device.name or device.type}"
        if not device.has_triton:
            return "triton is not installed"
        if problem.dtype.itemsize != 2:
            return f"takes bfloat16 and float16, not {problem.dtype}"
        if problem.softmax_scale <= 0:
            return "has no softmax_scale <= 0"
        if problem.widest > HOPPER_WIDTHS[-1] and not is_latent(problem):
            dims = f"{problem.head_dim} and {problem.head_dim_v}"
            return f"has tiles of up to {HOPPER_WIDTHS[-1]} columns, not for head dims {dims}"
        if problem.precision is not None:
            return _supports_precision(problem)
        if problem.page_dtype is not None and not _decodes_kv8(problem):
            return "reads 8-bit pages for few queries alone, of head_dim 80, 96, 112 or 128"
        if problem.head_dim % 8 or problem.head_dim_v % 8 or not problem.aligned:
            apart = ", and pages whole slots apart" if problem.page_size else ""
            return f"TMA needs 16-byte aligned rows, strides and base addresses{apart}"
        if problem.page_size not in (0, *HOPPER_PAGE_SIZES):
            sizes = ", ".join(map(str, HOPPER_PAGE_SIZES))
            return f"copies page by page, of {sizes} slots, not of {problem.page_size}"
        return None

    def defers(self, problem: Problem) -> str | None:
        """Few queries leave most SMs idle here unless the keys are split, and few tokens leave a
        tile half empty.
        """
        if (
            is_latent(problem)
            or splits_keys(problem)
            or problem.sm_partition is not None
            or problem.precision is not None
        ):
            return None
        if problem.page_size:
            return _defers_pages(problem)
        longest = max(problem.seqlen_q, problem.seqlen_k)
        if longest <= HOPPER_FEW and problem.group_size == 1 and not problem.has_mask:
            return f"leaves sequences of {longest} tokens to triton, which has smaller tiles"
        few = problem.seqlen_q * problem.group_size <= DECODE_ROWS and not problem.has_mask
        if few and problem.seqlen_k >= FEW_KEYS * problem.seqlen_q:
            return (
                f"leaves seqlen_q={problem.seqlen_q} to triton, which splits the keys over programs"
            )
        return None

    def forward(self, problem, x):
        if problem.precision is not None:
            from onchip.kernels.hopper.launch_8bit import forward as launch
        elif problem.widest > HOPPER_WIDTHS[-1]:  # supports() admits no others
            from onchip.kernels.hopper.launch_latent import attend as launch
        elif splits_keys(problem):
            from onchip.kernels.hopper.launch_decode import decode as launch
        else:
            from onchip.kernels.hopper.launch import forward as launch

        with on_device(x.q):
            return launch(problem, x)

    def backward(self, problem, x, out, lse, dout, dlse):
        from onchip.kernels.hopper.launch_backward import backward as launch

        with on_device(x.q):
            return launch(problem, x, out, lse, dout, dlse)

    def resolve_precision(self, problem: Problem) -> str | None:
        """ "fp8" where products of 8 bits save more time than the quantisation of q, k and v costs,
        by the keys that a query sees on average.
        """
        keys = problem.seqlen_k - (problem.seqlen_q // 2 if problem.causal else 0)
        left, _ = problem.window_size
        seen = keys if left is None else min(keys, left)
        return "fp8" if seen >= HOPPER_FP8_KEYS else None

    def get_merge_fn(self, problem: Problem, x: Tensors) -> MergeFn | None:
        """Up to head_dim 128: the accumulator and the state that it is merged into must both fit
        into the registers.
        """
        fits = problem.widest <= 128
        special = problem.packed or problem.page_size or problem.return_stats or problem.precision
        if not fits or special or splits_keys(problem):
            return None
        return partial(_forward_into, problem, x)

    def get_accumulate_fn(self, problem: Problem) -> AccumulateFn | None:
        """Where one kernel computes all gradients."""
        fits = problem.widest <= 128
        is_dense = not (problem.packed or problem.has_sinks)
        is_empty = not (problem.batch and problem.seqlen_q and problem.seqlen_k)
        if not fits or not is_dense or is_empty or problem.deterministic:
            return None
        return _start_accumulation

    def can_partition_sms(self, first: Problem, second: Problem) -> bool:
        """A decode call, which splits its keys, and then a call with many queries."""
        from onchip.kernels.hopper.launch import is_second

        return splits_keys(first) and not splits_keys(second) and is_second(second)

    def describe_launch(self, problem: Problem, hardware: Hardware) -> str | None:
        """None for the other kernels. The tiles of a mask depend on its strips."""
        splits = splits_keys(problem) or is_latent(problem)
        if splits or problem.has_mask or problem.precision is not None:
            return None
        return describe_tiles(problem, hardware.processors)

    def plan_splits(
        self,
        problem: Problem,
        x: Tensors,
        lengths: Sequence[tuple[int, int]],
        hardware: Hardware | None = None,
    ) -> KeySplits | None:
        hardware = hardware or planned_for(x.q.device)
        if is_latent(problem):
            from onchip.kernels.triton.key_splits import describe_splits

            tile, waves = HOPPER_LATENT_TILE, HOPPER_LATENT_WAVES
            return describe_splits(problem, tile, x.q.shape[-3], lengths, hardware, waves)
        if not splits_keys(problem):
            return None
        from onchip.kernels.hopper.key_splits import plan_ranges

        return plan_ranges(problem, lengths, hardware)


backend = HopperBackend()


def is_latent(problem: Problem) -> bool:
    """Whether keys of 576 columns hold values of 512 in the same memory, as in multi-head latent
    attention. Deterministic calls go to triton: see splits_keys.
    """
    dims = problem.head_dim, problem.head_dim_v
    special = problem.deterministic or problem.precision or problem.page_dtype
    return problem.latent and dims == HOPPER_LATENT and not special


def splits_keys(problem: Problem) -> bool:
    """Whether the queries are so few, and the keys so many, that the keys are split over programs.
    Deterministic calls go to triton, where splits do not depend on the batch.
    """
    rows = problem.seqlen_q * problem.group_size
    special = problem.packed or problem.has_mask or problem.deterministic or problem.precision
    alike = problem.head_dim == problem.head_dim_v and problem.batch <= HOPPER_DECODE_BATCH
    many = problem.seqlen_k >= FEW_KEYS * problem.seqlen_q
    return not special and alike and many and rows <= HOPPER_DECODE_ROWS


def _supports_precision(problem: Problem) -> str | None:
    """q, k and v of any layout, and keys in any pages, are quantised into new tensors: TMA stores
    out alone.
    """
    if problem.head_dim_v % 8:
        return f"TMA needs 16-byte aligned rows of out, not of head_dim_v={problem.head_dim_v}"
    if problem.precision == "int8_pv16" and not problem.aligned:
        return "TMA needs 16-byte aligned rows, strides and base addresses"
    if problem.precision == "int8_pv16" and problem.widest > 128:
        return "in precision='int8_pv16' has no room for head_dim > 128 on the chip"
    reason = lacks(problem, PRECISION_OPTIONS)
    if problem.page_size and reason is None:
        reason = _lacks_pages_of(problem)
    return None if reason is None else f"in precision={problem.precision!r} {reason}"


def _lacks_pages_of(problem: Problem) -> str | None:
    """Blocks of pages are laid out for queries of one length. How many keys are summed at a time,
    to subtract their mean, depends on the longest row of the page table.
    """
    if problem.precision == "int8_pv16":
        return "has no pages: it reads v in 16 bits as it is"
    if problem.packed:
        return "reads pages for dense queries alone, not for packed ones"
    if problem.deterministic:
        return "reads no pages with deterministic: a mean depends on the width of the page table"
    return None


def _decodes_kv8(problem: Problem) -> bool:
    """Whether the decode kernel reads these 8-bit pages: TMA must be able to copy their rows."""
    fits = 64 < problem.head_dim <= 128 and problem.head_dim % 16 == 0
    return splits_keys(problem) and fits


def _defers_pages(problem: Problem) -> str | None:
    """A packed Problem has the longest length alone, unless the lengths are uniform."""
    if problem.deterministic:
        return "leaves deterministic calls over pages to triton: one kernel for all lengths"
    fills_tiles = (
        problem.uniform_lengths and problem.seqlen_q * problem.group_size >= HOPPER_TILE_ROWS
    )
    sequences = problem.batch if fills_tiles or not problem.packed else 1
    if sequences * problem.seqlen_q * problem.num_heads < HOPPER_PAGED_ROWS:
        return f"leaves seqlen_q={problem.seqlen_q} to triton, which splits the keys over programs"
    return None


def _forward_into(problem, x, out, lse):
    from onchip.kernels.hopper.launch import forward_into as launch

    with on_device(x.q):
        launch(problem, x, out, lse)


def _start_accumulation(problem, x, out, lse, dout, dlse):
    from onchip.kernels.hopper.launch_backward import GradAccumulation

    with on_device(x.q):
        return GradAccumulation.of(problem, x, out, lse, dout, dlse)
