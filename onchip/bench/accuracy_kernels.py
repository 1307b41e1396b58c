"""Who computes attention in `onchip bench accuracy`: each kernel of onchip's that serves the case,
unfused attention, the rounding model, torch's SDPA by backend, FlashAttention-3.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
from onchip.bench import peers
from onchip.bench.accuracy_cases import Inputs
from onchip.bench.harness import SHORT
from onchip.dispatch import KERNELS
from onchip.problem import UnsupportedError
from onchip.testing import rounding_model, unfused

GPU_ALONE = ("hopper", "triton")  # the others' rows are those of the CPU
LEAN = "N x N"  # the kernels that keep every score at once: not for very long rows
MATERIALISE = ("reference", "paper_v0")
FP8 = torch.float8_e4m3fn
Answer = Tensor | tuple[Tensor, Tensor | None]


class Unserved(Exception):
    """This kernel does not serve the case; it has no row."""


class Kernel(NamedTuple):
    """attend(q, k, v) -> out or (out, lse). kind: onchip, peer, emulated, or floor (what must be
    rounded). lean: it never holds queries x keys numbers.
    """

    name: str
    kind: str
    attend: Callable[..., Answer]
    device: str = "cpu"
    lean: bool = True

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None) on the CPU; Unserved if the kernel refuses."""
        with refusals(), torch.no_grad():
            answer = self.attend(*inputs.to(self.device)[:3])
        out, lse = answer if isinstance(answer, tuple) else (answer, None)
        return out.cpu(), None if lse is None else lse.cpu()

    def gradients(self, inputs: Inputs) -> dict[str, Tensor]:
        """dq, dk, dv for dout, on the CPU; Unserved if there is no backward."""
        *qkv, dout = inputs.to(self.device)
        leaves = [x.detach().requires_grad_() for x in qkv]
        with refusals():
            answer = self.attend(*leaves)
            out = answer[0] if isinstance(answer, tuple) else answer
            if not out.requires_grad:
                raise Unserved
            grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
        return {f"d{name}": x.cpu() for name, x in zip("qkv", grads, strict=True)}


class refusals:
    """What a kernel says when it does not serve a case, as Unserved."""

    def __enter__(self) -> None:
        self._quiet = warnings.catch_warnings()
        self._quiet.__enter__()
        warnings.simplefilter("ignore")  # SDPA lists its reasons as warnings

    def __exit__(self, kind: type | None, error: Any, trace: Any) -> None:
        self._quiet.__exit__(kind, error, trace)
        refused = isinstance(error, UnsupportedError)
        unavailable = isinstance(error, RuntimeError) and "No available kernel" in str(error)
        if refused or unavailable:
            raise Unserved(str(error)) from error


def kernels(dtype: torch.dtype) -> Iterator[Kernel]:
    """All that may serve a case in dtype here, onchip's first."""
    yield from _ours()
    yield Kernel("unfused", "peer", unfused, lean=False)
    if dtype.itemsize == 2:
        yield Kernel("rounding model", "floor", rounding_model, lean=False)
    for name, backend in (("sdpa flash", "fa2"), ("sdpa math", "math")):
        yield Kernel(name, "peer", peers.backend(backend), lean=backend != "math")
    if torch.cuda.is_available():
        yield from gpu_kernels(dtype)


def _ours() -> Iterator[Kernel]:
    for name in KERNELS:
        if name not in GPU_ALONE:
            attend = partial(onchip.attention, kernel=name, return_lse=True)
            yield Kernel(name, "onchip", attend, lean=name not in MATERIALISE)


def gpu_kernels(dtype: torch.dtype) -> Iterator[Kernel]:
    """What a CUDA device adds."""
    for name in GPU_ALONE:
        yield Kernel(name, "onchip", partial(onchip.attention, kernel=name, return_lse=True), "cuda")
    yield Kernel("unfused, GPU", "peer", unfused, "cuda", lean=False)
    for name in peers.BACKENDS:
        attend = peers.backend(name)
        yield Kernel(f"sdpa {name}, GPU", "peer", attend, "cuda", lean=name != "math")
    try:
        fa3 = peers.fa3()
    except ImportError:
        return
    if dtype.itemsize == 2:
        yield Kernel("FA3", "peer", fa3, "cuda")


def fa3_fp8() -> Kernel | None:
    """FlashAttention-3 in FP8 as it is released: scales by (batch, head), nothing rotated."""
    try:
        function = peers.fa3_function()
    except ImportError:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q, q_descale), (k, k_descale), (v, v_descale) = map(_per_head, (q, k, v))
        scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        out = function(q, k, v, **scales)
        return out[0] if isinstance(out, tuple) else out

    return Kernel("FA3 FP8", "peer", attend, "cuda")


def _per_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values, fp32 scales (batch, heads)): x ~ values * scales."""
    largest = torch.finfo(FP8).max
    scales = x.abs().amax((1, 3)).float().clamp(min=1e-12) / largest
    return (x / scales[:, None, :, None]).clamp(-largest, largest).to(FP8), scales


def short(dtype: torch.dtype) -> str:
    return SHORT[str(dtype).removeprefix("torch.")]
