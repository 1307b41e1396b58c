"""The Triton backend as dispatch sees it. Triton is imported by the first call that runs here,
never before.

TRITON_INTERPRET=1 runs the same kernels on the CPU, slowly: for tests and for reading along.
"""

import os
from collections.abc import Sequence, Set
from importlib.util import find_spec

import torch
from torch import Tensor

from onchip.core.backend import Backend, Grads, KeySplits, Result, Tangents, lacks
from onchip.core.device import MIN_CAPABILITY, DeviceInfo
from onchip.core.problem import Problem, Tensors
from onchip.cost.hardware import Hardware
from onchip.kernels.runtime.launcher import on_device
from onchip.kernels.tiles import TRITON_COLUMNS
from onchip.kernels.triton.indices import has_any_order, refuse_tensors

OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic", "return_stats"),
    *("softcap", "score_mod", "has_alibi", "has_bias", "has_sinks"),
    *("dropout_p", "has_positions", "first_head", "wide_grads"),
    *("page_size", "page_dtype", "has_tree_mask", "reproducible"),
}
REPRODUCIBLE_OPTIONS = {
    *("causal", "window_size", "packed", "softcap", "has_sinks", "deterministic"),
    *("page_size", "reproducible"),
}

TANGENT_OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic"),
    *("softcap", "has_alibi", "has_bias", "has_sinks"),
}
MIN_SHARED_WIDE = 131_072  # second_dkdv: eight tiles of 16 rows of 1,024 bytes


class TritonBackend(Backend):
    options: Set[str] = OPTIONS

    def supports(self, problem: Problem, device: DeviceInfo) -> str | None:
        interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        if device.type not in ("cuda", "hip") and not interpreted:
            return f"needs a GPU (or TRITON_INTERPRET=1), found {device.type}"
        if device.capability is not None and device.capability < MIN_CAPABILITY:
            return "needs compute capability 8.0 or later, found {}.{}".format(*device.capability)
        if problem.dtype == torch.float64:
            return "float64 is served on the CPU by tiled"
        stored = problem.page_dtype or problem.dtype
        most = TRITON_COLUMNS[stored.itemsize]
        # Latent pages: the columns of keys behind the last tile are multiplied on their own.
        has_rest = problem.page_size > 0 and stored.itemsize == 2 and problem.head_dim_v <= most
        if problem.widest > most and not has_rest:
            dims = f"{problem.head_dim} and {problem.head_dim_v}"
            name = str(stored).removeprefix("torch.")
            return f"has tiles of up to {most} columns of {name}, not for head dims {dims}"
        if problem.page_dtype is not None and (problem.head_dim % 2 or problem.head_dim_v % 2):
            dims = f"{problem.head_dim} and {problem.head_dim_v}"
            return f"reads 8-bit pages by pairs of elements, not head_dim {dims}"
        if problem.reproducible and (reason := _refuse_reproducible(problem, device)):
            return f"{reason} with reproducible=True"
        if problem.score_mod is not None and (reason := refuse_tensors(problem.score_mod)):
            return reason
        if not device.has_triton:
            return "triton is not installed"
        return None

    def supports_backward(self, problem: Problem, device: DeviceInfo) -> str | None:
        text = None if problem.captured_is_constant else problem.score_mod
        if text is not None and problem.deterministic and has_any_order(text):
            return (
                "sums the gradient of a tensor that score_mod indexes by computed indices in any"
                " order, which deterministic=True excludes"
            )
        return None

    def forward(self, problem: Problem, x: Tensors) -> Result:
        from onchip.kernels.triton.forward import forward

        with on_device(x.q):
            return forward(problem, x)

    def backward(
        self,
        problem: Problem,
        x: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> Grads:
        from onchip.kernels.triton.backward import backward

        with on_device(x.q):
            return backward(problem, x, out, lse, dout, dlse)

    def supports_tangents(self, problem: Problem, device: DeviceInfo) -> str | None:
        is_wide = problem.widest * problem.dtype.itemsize > 512
        if is_wide and device.capability and device.shared_bytes < MIN_SHARED_WIDE:
            dims = f"{problem.head_dim} and {problem.head_dim_v}"
            size = f"{device.shared_bytes // 1024} kB of shared memory"
            return f"has no tangents of head dims {dims} with {size}"
        return lacks(problem, TANGENT_OPTIONS)

    def tangents(self, problem: Problem, x: Tensors, dx: Tangents) -> tuple[Tensor, Tensor]:
        from onchip.kernels.triton.tangent import tangents

        with on_device(x.q):
            return tangents(problem, x, dx)

    def tangent_gradients(
        self, problem: Problem, x: Tensors, dx: Tangents, dout: Tensor, dlse: Tensor | None
    ) -> Grads:
        from onchip.kernels.triton.second import tangent_gradients

        with on_device(x.q):
            return tangent_gradients(problem, x, dx, dout, dlse)

    def describe_launch(self, problem: Problem, hardware: Hardware) -> str | None:
        """None where the keys are split, which has lines of its own."""
        if find_spec("triton") is None:
            return None
        from onchip.kernels.triton.forward import describe_tiles

        return describe_tiles(problem, hardware.as_device)

    def plan_splits(
        self,
        problem: Problem,
        x: Tensors,
        lengths: Sequence[tuple[int, int]],
        hardware: Hardware | None = None,
    ) -> KeySplits | None:
        """None also where Triton is not installed: its kernels make the plan."""
        if find_spec("triton") is None:
            return None
        from onchip.kernels.triton.key_splits import plan_splits

        return plan_splits(problem, x, lengths, hardware)


def _refuse_reproducible(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type == "hip":
        return "is not tested on AMD GPUs"
    if problem.widest > 256:
        return f"has no head dims {problem.head_dim} and {problem.head_dim_v}"
    return lacks(problem, REPRODUCIBLE_OPTIONS)


backend: TritonBackend = TritonBackend()


def split(out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """backend.split of a contiguous fp32 out, which is not changed."""
    from onchip.kernels.triton.residual import split

    with on_device(out):
        return split(out, dtype)


def with_residual(dlse: Tensor | None, residual: Tensor, dout: Tensor) -> Tensor:
    """backend.with_residual, in one launch."""
    from onchip.kernels.triton.residual import with_residual

    with on_device(dout):
        return with_residual(dlse, residual, dout)


def merge(
    own: tuple[Tensor, Tensor],
    parts: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of states over disjoint keys. own is (total_q, heads, head_dim_v) and (heads,
    total_q). Each of parts is a stack of states, (states, rows, heads, head_dim_v) and (states,
    heads, rows) with lse contiguous in its rows, and an int32 (total_q,) with the row of each
    query, -1 for none; None: row i belongs to query i.
    """
    from onchip.kernels.triton.merge import merge

    with on_device(own[0]):
        return merge(own, parts, out_dtype)


def fold(
    own: tuple[Tensor, Tensor], parts: Sequence[tuple[int, Tensor, Tensor]], fresh: bool = False
) -> None:
    """Fold states that cover some tokens into one that covers all, in place. own is (batch, seqlen,
    heads, head_dim_v) in fp32 and (batch, heads, seqlen) in fp64, contiguous. Each of parts, at
    most four, is (first token, out, lse) in the same layout, in fp32. fresh: own is empty and need
    not be initialised.
    """
    from onchip.kernels.triton.merge import fold

    with on_device(own[0]):
        fold(own, parts, fresh)
