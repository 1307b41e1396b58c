"""Compile the portable Triton kernels for GPUs that are not here, and read what they take.

A call of the host code runs on the CPU as if its tensors were on the GPU. Its launches are recorded
instead of run, and each is compiled by Triton and ptxas, or by LLVM for AMD. So the host code, the
tile tables and the signatures of the kernels are covered together.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

import onchip.testing as ot
from onchip import masks
from onchip.core import paged
from onchip.core.backend import Tangents
from onchip.core.device import DeviceInfo
from onchip.core.problem import Options, Problem, Tensors
from onchip.core.validation import describe
from onchip.cost.hardware import H200
from onchip.kernels.triton.backward import backward
from onchip.kernels.triton.forward import forward
from onchip.kernels.triton.second import tangent_gradients
from onchip.kernels.triton.tangent import tangents
from onchip.quant.kv8 import quantise

ARCHITECTURES = (
    *("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"),
    *("gfx942", "gfx950"),
)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


class Launch(NamedTuple):
    """A launch of a Triton kernel that was recorded instead of run."""

    kernel: JITFunction
    args: tuple
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


def capability_of(arch: str) -> tuple[int, int] | None:
    """(8, 6) of sm_86; None for AMD."""
    name, _, number = arch.partition("_")
    return divmod(int(number), 10) if name == "sm" else None


def device_of(arch: str) -> DeviceInfo:
    capability = capability_of(arch)
    return DeviceInfo("hip", arch) if capability is None else DeviceInfo("cuda", arch, capability)


def target_of(arch: str) -> GPUTarget:
    if capability_of(arch) is None:
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Every launch of a Triton kernel in the block. The launches are not run. The GPU that the host
    code sees has 132 SMs.
    """
    recorded: list[Launch] = []
    run = lambda self, *args, grid, warmup, **kwargs: recorded.append(Launch(self, args, kwargs))
    gpu = SimpleNamespace(multi_processor_count=132)
    with (
        patch.object(torch.cuda, "get_device_properties", lambda device: gpu),
        patch.object(JITFunction, "run", run),
    ):
        yield recorded


@contextmanager
def as_if_on(arch: str) -> Iterator[None]:
    """The host code of the portable kernels sees a device of this architecture."""
    device_info = lambda device: device_of(arch)
    with (
        patch("onchip.kernels.triton.launch.device_info", device_info),
        patch("onchip.kernels.llm.pointwise.device_info", device_info),
        patch("onchip.kernels.llm.products.device_info", device_info),
        patch("onchip.kernels.llm.products.machine", lambda device: H200),
        patch("onchip.kernels.llm.fixed_order.device_info", device_info),
        patch("onchip.kernels.llm.fixed_order.machine", lambda device: H200),
        patch("onchip.kernels.llm.fused_moe.device_info", device_info),
        patch("onchip.kernels.llm.fused_moe.machine", lambda device: H200),
    ):
        yield


def attend(dtype: torch.dtype, sizes: dict, options: dict, with_backward: bool = True) -> None:
    """One call of the portable attention kernels. Of `options`, lengths, page_size, form (the dtype
    of 8-bit pages), packed, mask, sinks, alibi and bias shape the tensors; score_mod is a ScoreMod.
    """
    problem, x = _make_call(dtype, sizes, options)
    out, lse, _ = forward(problem, x)
    if with_backward:
        backward(problem, x, out, lse, out, None)


def differentiate(
    dtype: torch.dtype, sizes: dict, options: dict, of: tuple[str, ...] = Tangents._fields
) -> None:
    """The tangents of one call in the direction of its inputs `of`, and the gradients of these
    tangents. Options as in `attend`.
    """
    problem, x = _make_call(dtype, sizes, options)
    dx = Tangents(**{name: getattr(x, name) for name in of})
    dout, dlse = tangents(problem, x, dx)
    tangent_gradients(problem, x, dx, dout, dlse)


def _make_call(dtype: torch.dtype, sizes: dict, options: dict) -> tuple[Problem, Tensors]:
    options = dict(options)
    lengths = options.pop("lengths", (160, 200))
    page_size, form = options.pop("page_size", 0), options.pop("form", None)
    q, k, v = ot.make_qkv(1, *lengths, dtype=dtype, **sizes)
    extras, scalars, max_seqlens = _extras(options, q, k)
    if max_seqlens:
        q, k, v = q[0], k[0], v[0]
    x = Tensors(q, k, v, **extras)
    if page_size:
        x = _in_pages(x, page_size, form)
        return paged.describe(x, Options(**scalars)), x
    return describe(x, Options(**scalars), max_seqlens), x


def _in_pages(x: Tensors, page_size: int, form: torch.dtype | None) -> Tensors:
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    offsets = torch.tensor([0, seqlen_k], dtype=torch.int32)
    pages = ot.make_pages(x.k[0], x.v[0], offsets, page_size)
    tree = torch.ones(1, seqlen_q, seqlen_q, dtype=torch.bool) if 1 < seqlen_q < 16 else None
    names = ("k", "v", "page_table", "cache_seqlens")
    x = x._replace(**dict(zip(names, pages, strict=True)), tree_mask=tree)
    if form is None:
        return x
    (k, k_scales), (v, v_scales) = (quantise(t, form) for t in (x.k, x.v))
    return x._replace(k=k, v=v, k_scales=k_scales, v_scales=v_scales)


def _extras(options: dict, q: torch.Tensor, k: torch.Tensor):
    """Tensors, scalar options and the lengths of a packed call, from one dictionary."""
    scalars, extras = dict(options), {}
    heads, seqlen_q, seqlen_k = q.shape[2], q.shape[1], k.shape[1]
    packed = scalars.pop("packed", False)
    if packed:
        extras["cu_seqlens_q"] = torch.tensor([0, seqlen_q], dtype=torch.int32)
        extras["cu_seqlens_k"] = torch.tensor([0, seqlen_k], dtype=torch.int32)
    if scalars.pop("mask", False):
        mask = masks.mod(lambda b, h, q, k: (q + k) % 3 != 0)
        extras["mask"] = masks.build(mask, 1, heads, seqlen_q, seqlen_k)
    if scalars.pop("sinks", False):
        extras["sinks"] = torch.zeros(heads)
    if scalars.pop("alibi", False):
        extras["alibi_slopes"] = torch.zeros(heads)
    if scalars.pop("bias", False):
        extras["bias"] = torch.zeros(1, heads, seqlen_q, seqlen_k)
    if "score_mod" in scalars:
        extras["captured"], extras["captured_ints"] = scalars["score_mod"].flatten()
        scalars["score_mod"] = scalars["score_mod"].text
    if scalars.get("dropout_p"):
        extras["dropout_seed"] = torch.tensor(7)
    return extras, scalars, (seqlen_q, seqlen_k) if packed else None


def compile_launch(launch: Launch, arch: str) -> CompiledKernel:
    """Options of the launch itself, like programmatic dependent launch, do not change the code."""
    kernel, args, kwargs = launch
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    return triton.compile(_source(kernel, args, kwargs), target=target_of(arch), options=options)


def _source(kernel: JITFunction, args: tuple, kwargs: dict[str, Any]) -> ASTSource:
    """The variant that Triton would compile for these arguments."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, aligned = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        one = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or one:
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name], divisible = TYPES[value.dtype], True
        elif isinstance(value, float):
            signature[param.name], divisible = "fp32", False
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            divisible = value % 16 == 0 and not param.do_not_specialize
        if divisible:
            aligned[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, aligned)


class Resources(NamedTuple):
    """What one program of a compiled kernel takes. registers: 32-bit ones of a thread (AMD: vector
    registers, accumulation registers included). spills: instructions that store registers to local
    memory or load them back (AMD: spilled registers, vector and scalar).
    """

    registers: int
    spills: int
    shared_bytes: int
    threads: int


def read_resources(compiled: CompiledKernel) -> Resources:
    metadata = compiled.metadata
    threads = metadata.num_warps * metadata.target.warp_size
    if "cubin" in compiled.asm:
        text = run_cuobjdump(compiled, "-res-usage", "-sass")
        registers = int(re.findall(r"REG:(\d+)", text)[0])
        spills = len(re.findall(r"\b(?:STL|LDL)\b", text))
        return Resources(registers, spills, metadata.shared, threads)
    count = lambda field: int(re.findall(rf"\.{field}: +(\d+)", compiled.asm["amdgcn"])[0])
    spills = count("vgpr_spill_count") + count("sgpr_spill_count")
    return Resources(count("vgpr_count"), spills, metadata.shared, threads)


def disassemble(compiled: CompiledKernel) -> str:
    """SASS, the code of an NVIDIA GPU."""
    return run_cuobjdump(compiled, "-sass")


def run_cuobjdump(compiled: CompiledKernel, *options: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
