"""FlashAttention v3 on Hopper, in Gluon: TMA, warpgroup products, warp specialisation."""

from onchip.kernels.configs import DECODE_ROWS, FEW_KEYS
from onchip.kernels.handles import on_device
from onchip.problem import DeviceInfo, Problem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type != "cuda" or device.capability != (9, 0):
        return f"needs a Hopper GPU (sm_90), not {device.name or device.type}"
    if not device.has_triton:
        return "triton is not installed"
    if problem.dtype.itemsize != 2:
        return f"takes bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim % 8 or problem.head_dim_v % 8 or not problem.aligned:
        return "TMA needs 16-byte aligned rows, strides and base addresses"
    return _missing(problem)


def defers(problem: Problem) -> str | None:
    """Few queries leave most processors idle here: triton splits the keys over programs."""
    few = problem.seqlen_q * problem.group_size <= DECODE_ROWS and not problem.has_mask
    if few and problem.seqlen_k >= FEW_KEYS * problem.seqlen_q:
        return f"leaves seqlen_q={problem.seqlen_q} to triton, which splits the keys over programs"
    return None


def _missing(problem: Problem) -> str | None:
    options = {
        "pages": problem.page_size,
        "alibi_slopes": problem.has_alibi,
        "bias": problem.has_bias,
        "dropout": problem.dropout_p,
        "return_stats": problem.return_stats,
        "softmax_scale <= 0": problem.softmax_scale <= 0,
    }
    missing = [name for name, wanted in options.items() if wanted]
    return f"has no {' and no '.join(missing)}" if missing else None


def forward(problem, x):
    from onchip.kernels.hopper.launch import forward as launch

    with on_device(x.q):
        return launch(problem, x)


def backward(problem, x, out, lse, dout, dlse):
    from onchip.kernels.hopper.launch_backward import backward as launch

    with on_device(x.q):
        return launch(problem, x, out, lse, dout, dlse)
