"""The implementations of `python -m benchmarks accuracy`: each kernel of onchip that serves the
case, unfused attention, the rounding model, torch's SDPA by backend, FlashAttention-3; in 8 and 4
bits the recipes of onchip/quant, ours and published ones, emulated.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
import onchip.lab  # registers the kernels of the papers
from benchmarks.accuracy_cases import AccuracyInputs
from onchip.cli.bench import peers
from onchip.core.dispatch import backend_names
from onchip.core.problem import EIGHT_BIT_PRECISIONS, FOUR_BIT_PRECISIONS, UnsupportedError
from onchip.quant import emulation, formats, recipes
from onchip.quant.microscaling import BlockFormat
from onchip.quant.recipes import RECIPES, Recipe
from onchip.quant.schemes import Scheme, quantise
from onchip.testing import rounding_model, unfused

GPU_ALONE = ("hopper", "triton")  # other kernels have CPU rows
SLOW = ("paper_v1", "paper_v2", "paper_v4")  # loops in Python that count every byte
FP8, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
OURS = EIGHT_BIT_PRECISIONS
OURS_FP4 = FOUR_BIT_PRECISIONS
LABELS = {  # of recipes
    "fp8": "onchip fp8",
    "int8": "onchip int8",
    "int8_pv16": "onchip int8_pv16",
    "fp8_tensor": "FP8 per tensor",
    "fa3_paper": "FA3's paper",
    "fa3_fp8": "FA3 FP8",
    "sage1": "SageAttention 1",
    "sage2": "SageAttention 2",
}
FP4_LABELS = {  # of recipes in 4 bits
    "nvfp4": "onchip nvfp4",
    "nvfp4_pv8": "onchip nvfp4_pv8",
    "mxfp4": "onchip mxfp4",
    "nvfp4_random": "NVFP4 at random",
    "nvfp4_plain": "NVFP4 plain",
    "mxfp4_plain": "MXFP4 plain",
    "mxfp4_ceil": "MXFP4 ceil",
    "sage3": "SageAttention 3",
}
CAST, FA3_FP8 = "P alone, x 256", "FA3 FP8, GPU"
Answer = Tensor | tuple[Tensor, Tensor | None]


class Unserved(Exception):
    """This kernel does not serve the case; it has no row."""


class Kernel(NamedTuple):
    """attend(q, k, v) -> out or (out, lse); lse(q, k, v) -> (out, lse) where that is another call,
    computed otherwise. kind: onchip, peer, emulated, or floor (what must be rounded). dtype: of the
    products' operands, if not that of the inputs.
    """

    name: str
    kind: str
    attend: Callable[..., Answer]
    device: str = "cpu"
    dtype: torch.dtype | None = None
    lse: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __call__(self, inputs: AccuracyInputs) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None) on the CPU; Unserved if the kernel refuses."""
        qkv = inputs.to(self.device)[:3]
        with refusals(), torch.no_grad():
            answer = self.attend(*qkv)
            out, lse = answer if isinstance(answer, tuple) else (answer, None)
            lse = self.lse(*qkv)[1] if self.lse else lse
        return out.cpu(), None if lse is None else lse.cpu()

    def gradients(self, inputs: AccuracyInputs) -> dict[str, Tensor]:
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


@contextmanager
def refusals() -> Iterator[None]:
    """What a kernel says when it does not serve a case, as Unserved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SDPA lists its reasons as warnings
        try:
            yield
        except UnsupportedError as error:
            raise Unserved(str(error)) from error
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise Unserved(str(error)) from error


def kernels(dtype: torch.dtype) -> Iterator[Kernel]:
    """All that may serve a case in dtype here, onchip's first."""
    yield from _ours()
    yield Kernel("unfused", "peer", unfused)
    if dtype.itemsize == 2:
        yield Kernel("rounding model", "floor", rounding_model)
    for name, backend in (("sdpa flash", "fa2"), ("sdpa math", "math")):
        yield Kernel(name, "peer", peers.backend(backend))
    if torch.cuda.is_available():
        yield from gpu_kernels(dtype)


def _ours() -> Iterator[Kernel]:
    """A call that returns lse may be computed otherwise, so that out is that of one which does not;
    the papers have one way only.
    """
    for name in backend_names():
        attend = partial(onchip.attention, kernel=name)
        with_lse = partial(attend, return_lse=True)
        if name in SLOW:
            yield Kernel(name, "onchip", with_lse)
        elif name not in GPU_ALONE:
            yield Kernel(name, "onchip", attend, lse=with_lse)


def gpu_kernels(dtype: torch.dtype) -> Iterator[Kernel]:
    """What a CUDA device adds."""
    for name in GPU_ALONE:
        attend = partial(onchip.attention, kernel=name, return_lse=True)
        yield Kernel(name, "onchip", attend, "cuda")
    yield Kernel("unfused, GPU", "peer", unfused, "cuda")
    for name in peers.BACKENDS:
        yield Kernel(f"sdpa {name}, GPU", "peer", peers.backend(name), "cuda")
    if dtype.itemsize == 2:
        with suppress(ImportError):
            yield Kernel("FA3, GPU", "peer", peers.fa3(), "cuda")


def low_precision_kernels() -> Iterator[Kernel]:
    """Attention with 8-bit operands: recipes by their reference, and what a GPU adds."""
    for name, label in LABELS.items():
        yield emulated(label, RECIPES[name])
    if torch.cuda.is_available():
        yield from (in_8_bits(precision) for precision in OURS)
        with suppress(ImportError):
            yield Kernel(FA3_FP8, "peer", fa3_fp8(peers.fa3()), "cuda", dtype=FP8)


def in_8_bits(precision: str) -> Kernel:
    """The Hopper kernel of a recipe."""
    options: dict[str, Any] = {"kernel": "hopper", "precision": precision, "return_lse": True}
    attend, dtype = partial(onchip.attention, **options), FP8 if precision == "fp8" else torch.int8
    return Kernel(f"hopper {precision}", "onchip", attend, "cuda", dtype)


def emulated(name: str, recipe: Recipe) -> Kernel:
    """A recipe's executable reference; out is rounded to the type of q, as a kernel stores it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = emulation.attend(recipe, q, k, v)
        return out.to(q.dtype), lse

    return Kernel(name, "emulated", attend, dtype=_operands(recipe))


def _operands(recipe: Recipe) -> torch.dtype:
    """The dtype of the first quantised operand."""
    first = next(x for x in (recipe.q, recipe.k, recipe.v, recipe.p) if x is not None)
    if isinstance(first, BlockFormat):
        return FP4
    fmt = first.format if isinstance(first, Scheme) else first
    return torch.int8 if fmt == formats.INT8 else FP8


def cast_kernels() -> Iterator[Kernel]:
    """One operand in e4m3 and nothing else: P scaled or not, keys from last to first or first to
    last; V; q and k.
    """
    fp8, nothing = recipes.FP8, Recipe("nothing", None, None, pv_dtype=torch.float32)
    weights = replace(nothing, p=fp8.p, p_scale=fp8.p_scale)
    yield emulated(CAST, weights)
    yield emulated("P alone, x 1", replace(weights, p_scale=1.0))
    yield emulated("P alone, x 1, first key first", replace(weights, p_scale=1.0, backwards=False))
    yield emulated("V alone", replace(nothing, v=fp8.v))
    yield emulated("Q and K alone", replace(nothing, q=fp8.q, k=fp8.k, rotate=fp8.rotate))


def fp4_kernels() -> Iterator[Kernel]:
    """Recipes in 4 bits by their reference, after onchip's in 8 bits; one operand in NVFP4 and
    nothing else.
    """
    yield emulated(LABELS["fp8"], RECIPES["fp8"])
    for name, label in FP4_LABELS.items():
        yield emulated(label, RECIPES[name])
    fp4, nothing = recipes.NVFP4, Recipe("nothing", None, None, pv_dtype=torch.float32)
    yield emulated("P alone", replace(nothing, p=fp4.p, p_scale=fp4.p_scale))
    yield emulated("V alone", replace(nothing, v=fp4.v))
    yield emulated("Q and K alone", replace(nothing, q=fp4.q, k=fp4.k, rotate=fp4.rotate))


def fa3_fp8(function: Callable) -> Callable[..., Tensor]:
    """FlashAttention-3 in FP8 as it is released: scales by (batch, head), nothing rotated."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values, scales = fa3_operands(q, k, v)
        out = function(*values, **scales)
        return out[0] if isinstance(out, tuple) else out

    return attend


def fa3_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k and v as it takes them, and their scales by its names."""
    named = zip(("q_descale", "k_descale", "v_descale"), (q, k, v), strict=True)
    cast = {name: quantise(x, Scheme(formats.E4M3, "head")) for name, x in named}
    return [x.values for x in cast.values()], {name: x.scales for name, x in cast.items()}
