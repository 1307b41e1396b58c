"""FlashAttention v3 on Hopper, in Gluon: TMA, warpgroup products, warp specialisation."""

from onchip.kernels.configs import (
    DECODE_ROWS,
    FEW_KEYS,
    HOPPER_DECODE_BATCH,
    HOPPER_DECODE_ROWS,
    HOPPER_FEW,
    HOPPER_FP8_KEYS,
    HOPPER_PAGE_SIZES,
    HOPPER_PAGED_ROWS,
    HOPPER_TILE_ROWS,
)
from onchip.kernels.handles import on_device
from onchip.kernels.protocol import lacks
from onchip.problem import LOW_PRECISIONS, DeviceInfo, Problem

READS_PAGES = True
PRECISIONS = (None, *LOW_PRECISIONS)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type != "cuda" or device.capability != (9, 0):
        return f"needs a Hopper GPU (sm_90), not {device.name or device.type}"
    if not device.has_triton:
        return "triton is not installed"
    if problem.dtype.itemsize != 2:
        return f"takes bfloat16 and float16, not {problem.dtype}"
    if problem.precision is not None:
        return _supports_low_precision(problem)
    if problem.page_dtype is not None and not _decodes_kv8(problem):
        return "reads 8-bit pages for few queries alone, of head_dim 80, 96, 112 or 128"
    if problem.head_dim % 8 or problem.head_dim_v % 8 or not problem.aligned:
        apart = ", and pages whole slots apart" if problem.page_size else ""
        return f"TMA needs 16-byte aligned rows, strides and base addresses{apart}"
    if problem.page_size not in (0, *HOPPER_PAGE_SIZES):
        sizes = ", ".join(map(str, HOPPER_PAGE_SIZES))
        return f"copies page by page, of {sizes} slots, not of {problem.page_size}"
    return _missing(problem)


def _supports_low_precision(problem: Problem) -> str | None:
    """Operands of 8 bits are made of tensors in any layout: out alone is stored by TMA."""
    if problem.head_dim_v % 8:
        return f"TMA needs 16-byte aligned rows of out, not of head_dim_v={problem.head_dim_v}"
    if problem.precision == "int8_pv16" and not problem.aligned:
        return "TMA needs 16-byte aligned rows, strides and base addresses"
    if problem.precision == "int8_pv16" and max(problem.head_dim, problem.head_dim_v) > 128:
        return "in precision='int8_pv16' has no room for head_dim > 128 on the chip"
    options = {"mask": problem.has_mask, "pages": problem.page_size, "softcap": problem.softcap}
    reason = _missing(problem, options)
    return None if reason is None else f"in precision={problem.precision!r} {reason}"


def narrow_pays(problem: Problem) -> bool:
    """Whether products of 8 bits save more than it costs to make their operands, by the keys that a
    query sees on average.
    """
    keys = problem.seqlen_k - (problem.seqlen_q // 2 if problem.causal else 0)
    left, _ = problem.window_size
    return (keys if left is None else min(keys, left)) >= HOPPER_FP8_KEYS


def splits_keys(problem: Problem) -> bool:
    """Whether the queries are so few, and the keys so many, that the keys are split over programs.
    Where the cuts must not depend on the batch, triton makes them.
    """
    rows = problem.seqlen_q * problem.group_size
    special = problem.packed or problem.has_mask or problem.deterministic or problem.precision
    alike = problem.head_dim == problem.head_dim_v and problem.batch <= HOPPER_DECODE_BATCH
    many = problem.seqlen_k >= FEW_KEYS * problem.seqlen_q
    return not special and alike and many and rows <= HOPPER_DECODE_ROWS


def _decodes_kv8(problem: Problem) -> bool:
    """Whether the kernel of few queries serves 8-bit pages: of one width alone, whose rows TMA
    copies.
    """
    fits = 64 < problem.head_dim <= 128 and problem.head_dim % 16 == 0
    return splits_keys(problem) and fits


def defers(problem: Problem) -> str | None:
    """Few queries leave most processors idle here unless keys are split, and few tokens a tile half
    empty.
    """
    if splits_keys(problem) or problem.beside is not None or problem.precision is not None:
        return None
    if problem.page_size:
        return _defers_pages(problem)
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest <= HOPPER_FEW and problem.group_size == 1 and not problem.has_mask:
        return f"leaves sequences of {longest} tokens to triton, whose tiles they fill"
    few = problem.seqlen_q * problem.group_size <= DECODE_ROWS and not problem.has_mask
    if few and problem.seqlen_k >= FEW_KEYS * problem.seqlen_q:
        return f"leaves seqlen_q={problem.seqlen_q} to triton, which splits the keys over programs"
    return None


def runs_beside(first: Problem, second: Problem) -> bool:
    """Whether a call of few queries and one of many, which this kernel serves, run at once: see
    problem.Beside.
    """
    from onchip.kernels.hopper.launch import is_second

    return splits_keys(first) and not splits_keys(second) and is_second(second)


def _defers_pages(problem: Problem) -> str | None:
    """Of packed queries no more is known than the longest sequence, unless most are as long."""
    if problem.deterministic:
        return "leaves deterministic calls over pages to triton: one kernel for all lengths"
    fills_tiles = problem.even and problem.seqlen_q * problem.group_size >= HOPPER_TILE_ROWS
    sequences = problem.batch if fills_tiles or not problem.packed else 1
    if sequences * problem.seqlen_q * problem.num_heads < HOPPER_PAGED_ROWS:
        return f"leaves seqlen_q={problem.seqlen_q} to triton, which splits the keys over programs"
    return None


def _missing(problem: Problem, more: dict[str, object] | None = None) -> str | None:
    options = (more or {}) | {
        "tree_mask": problem.has_tree_mask,
        "alibi_slopes": problem.has_alibi,
        "bias": problem.has_bias,
        "dropout": problem.dropout_p,
        "return_stats": problem.return_stats,
        "softmax_scale <= 0": problem.softmax_scale <= 0,
    }
    return lacks(options)


def forward(problem, x):
    if problem.precision is not None:
        from onchip.kernels.hopper.launch8 import forward as launch
    elif splits_keys(problem):
        from onchip.kernels.hopper.launch_decode import decode as launch
    else:
        from onchip.kernels.hopper.launch import forward as launch

    with on_device(x.q):
        return launch(problem, x)


def merges(problem: Problem) -> bool:
    """Whether forward_into serves a problem that `supports` admits: an accumulator and the state
    that it is merged into fit into the registers up to head_dim 128.
    """
    narrow = max(problem.head_dim, problem.head_dim_v) <= 128
    plain = not (problem.packed or problem.page_size or problem.return_stats or problem.precision)
    return narrow and plain and not splits_keys(problem)


def forward_into(problem, x, out, lse):
    from onchip.kernels.hopper.launch import forward_into as launch

    with on_device(x.q):
        launch(problem, x, out, lse)


def adds(problem: Problem) -> bool:
    """Whether `begin` serves a problem that `supports` admits: where all gradients come from one
    kernel.
    """
    narrow = max(problem.head_dim, problem.head_dim_v) <= 128
    dense = not (problem.packed or problem.has_sinks)
    some = problem.batch and problem.seqlen_q and problem.seqlen_k
    return bool(narrow and dense and some and not problem.deterministic)


def begin(problem, x, out, lse, dout, dlse):
    from onchip.kernels.hopper.launch_backward import Queries

    with on_device(x.q):
        return Queries.of(problem, x, out, lse, dout, dlse)


def backward(problem, x, out, lse, dout, dlse):
    from onchip.kernels.hopper.launch_backward import backward as launch

    with on_device(x.q):
        return launch(problem, x, out, lse, dout, dlse)
