"""The Hopper kernels, compiled without a Hopper GPU: registers, spills and waits in ptxas's output.

Each variant is a real call. Its launches are recorded instead of run, so that host code, tile
tables and signatures are tested together. A new variant is one line of FORWARD, DECODE or BACKWARD.
"""

import math
import re
import subprocess
from collections import Counter
from itertools import product, takewhile
from pathlib import Path
from typing import NamedTuple

import networkx  # torch needs it too
import pytest
import torch

import onchip.testing as ot
from benchmarks import footprint
from benchmarks.footprint import HANDED_OVER, HANDED_OVER_BACKWARD, Footprint
from onchip import masks
from onchip.core import paged
from onchip.core.device import DeviceInfo
from onchip.core.problem import Options, Problem, SMPartition, Tensors
from onchip.core.validation import describe
from onchip.kernels import tiles
from onchip.kernels.hopper import entry
from onchip.kernels.tiles import hopper_width
from tests.kv8 import FORMS, quantise_pages

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreting and compiling cannot share a process", allow_module_level=True)

TARGET = GPUTarget("cuda", 90, 32)
HOPPER = DeviceInfo("cuda", "NVIDIA H200", (9, 0))
SHARED_BYTES = 232448
FIRST_NAMED_BARRIER = 8  # of barriers: onchip/kernels/hopper/pipeline.py
MATRIX_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "HMMA")  # of 16 bits, FP8 and integers
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
BF16, FP16 = torch.bfloat16, torch.float16
WINDOW, PACKED = {"window_size": (255, 7)}, {"packed": True, "causal": True}
PAGED = {"causal": True, "num_kv_heads": 1}
LEVEL = {"num_kv_heads": 1, "out_dtype": torch.float32}  # of a cascade
FIRST, SECOND = (
    {"sm_partition": SMPartition(80, second=False)},
    {"sm_partition": SMPartition(48, second=True)},
)

FEW, SOME = (0.02, 0.06), (0.04, 0.11)


class Variant(NamedTuple):
    """One call. Of `options`, dtype, head_dim_v, num_kv_heads, lengths, packed, sinks, mask and
    page_size shape the tensors. spills: how much of a hot loop may be spills, with Triton 3.6 and
    with later ones: what was measured (2026-11-15), so that it cannot grow unseen.
    """

    head_dim: int
    options: dict
    spills: tuple[float, float] = (0.0, 0.0)


# `make test` compiles the first variant of FORWARD and DECODE, `make triton36` the first of every
# table.
FORWARD = [
    Variant(128, {"causal": True}),
    Variant(64, {}),
    Variant(64, {"causal": True}),
    Variant(64, {"causal": True, "lengths": (200, 4000)}),  # not a short row of the tile table
    Variant(128, {}),
    Variant(256, {}),
    Variant(256, {"causal": True}),
    Variant(128, {"dtype": FP16, **WINDOW}),
    Variant(64, {**PACKED, "sinks": True, "softcap": 5.0}),
    Variant(128, {**PACKED, "sinks": True, "softcap": 5.0}, (0.0, 0.005)),
    Variant(256, {**PACKED, "sinks": True, "softcap": 5.0}),
    Variant(80, {}),  # a tile of 64 columns and a tail of 16
    Variant(80, {"causal": True}),
    Variant(96, {}),
    Variant(96, {"causal": True}),
    Variant(80, {"lengths": (200, 2000)}),  # three consumers
    Variant(96, {"lengths": (200, 2000)}),
    Variant(32, {"lengths": (200, 4000)}),
    Variant(32, {"causal": True, "lengths": (200, 4000)}),
    Variant(32, {"causal": True}),
    Variant(160, {}),
    Variant(160, {"causal": True}),
    Variant(192, {}),
    Variant(192, {"causal": True}),
    Variant(192, {"head_dim_v": 128}),
    Variant(192, {"head_dim_v": 128, "causal": True, "num_kv_heads": 2}),
    Variant(192, {**PACKED, "head_dim_v": 128, "sinks": True, "softcap": 5.0}),
    Variant(72, {**PACKED, "head_dim_v": 88, "sinks": True, "softcap": 5.0}),
    Variant(96, {"dtype": FP16, **WINDOW}),
    Variant(80, {"causal": True, "num_kv_heads": 1, "lengths": (17, 300)}),  # heads share a tile
    Variant(80, {"mask": True}),
    Variant(160, {"mask": True}),
    Variant(32, {"mask": True, "lengths": (200, 4000)}),  # strips
    Variant(96, {"out_dtype": torch.float32}),
    Variant(96, {"out_dtype": torch.float32, "lengths": (200, 2000), "num_kv_heads": 1}),
    Variant(192, {"out_dtype": torch.float32, "causal": True}),
    Variant(64, {"mask": True}),
    Variant(64, {"mask": True, "lengths": (200, 4000)}),  # strips
    Variant(128, {"mask": True, "causal": True}),
    Variant(256, {"mask": True}),
    Variant(128, {"out_dtype": torch.float32}),
    Variant(256, {"out_dtype": torch.float32, "causal": True}),
    Variant(128, {"causal": True, "num_kv_heads": 1, "lengths": (17, 300)}),  # heads share a tile
    Variant(64, {**PAGED, "page_size": 64}),
    Variant(128, {**PAGED, "page_size": 16}, (0.0, 0.006)),
    Variant(128, {**PAGED, **PACKED, **WINDOW, "page_size": 256, "sinks": True, "softcap": 5.0}),
    Variant(256, {**PAGED, "page_size": 32}),
    Variant(128, {**LEVEL, "page_size": 16}),
    Variant(64, {**LEVEL, **SECOND, "page_size": 32}),
    Variant(128, {**LEVEL, **SECOND, "page_size": 16}),
    Variant(256, {**LEVEL, **SECOND, "page_size": 64}),
    Variant(128, {**PAGED, **PACKED, "page_size": 16, "out_dtype": torch.float32}),
]
MERGE = [
    Variant(128, {"out_dtype": torch.float32, "causal": True}),
    Variant(128, {"out_dtype": torch.float32}),
    Variant(64, {"out_dtype": torch.float32}),
    Variant(128, {"out_dtype": torch.float32, "mask": True}, (0.0, 0.003)),
    Variant(80, {"out_dtype": torch.float32}),
    Variant(96, {"out_dtype": torch.float32, "causal": True}),
    Variant(32, {"out_dtype": torch.float32}),
]
KV8 = [
    Variant(128, {"precision": "fp8", "causal": True}, (0.003, 0.0)),
    Variant(64, {"precision": "fp8"}),
    Variant(64, {"precision": "fp8", **PACKED, "num_kv_heads": 2, "sinks": True}),
    Variant(128, {"precision": "fp8"}),
    Variant(128, {"precision": "fp8", **WINDOW, "dtype": FP16}),
    Variant(128, {"precision": "fp8", **PACKED, "num_kv_heads": 1}),
    Variant(128, {"precision": "fp8", **PAGED, "page_size": 16}, (0.003, 0.0)),
    Variant(64, {"precision": "fp8", **PAGED, "page_size": 4, "form": FORMS[0]}),
    Variant(256, {"precision": "fp8", **PAGED, **WINDOW, "page_size": 32, "form": FORMS[1]}),
    Variant(128, {"precision": "int8", **PAGED, "page_size": 16, "sinks": True}),
    Variant(128, {"precision": "fp8", "out_dtype": torch.float32}),
    Variant(256, {"precision": "fp8"}, (0.0, 0.002)),
    Variant(256, {"precision": "fp8", "causal": True}),
    Variant(256, {"precision": "fp8", **WINDOW}),
    Variant(192, {"precision": "fp8", "head_dim_v": 128, **PACKED}),
    Variant(64, {"precision": "int8", "causal": True}),
    Variant(128, {"precision": "int8"}),
    Variant(128, {"precision": "int8", **PACKED, "num_kv_heads": 1}),
    Variant(256, {"precision": "int8", "causal": True}, (0.003, 0.01)),
    Variant(64, {"precision": "int8_pv16", **WINDOW}),
    Variant(128, {"precision": "int8_pv16", "causal": True, "dtype": FP16}),
    Variant(128, {"precision": "int8_pv16", **PACKED, "num_kv_heads": 1}),
]
DECODE = [
    Variant(128, {**PAGED, "page_size": 16}),
    Variant(64, {**PAGED, "page_size": 64}),
    Variant(256, {**PAGED, "page_size": 32}, (0.05, 0.07)),
    Variant(128, {"num_kv_heads": 1}),
    Variant(128, {**WINDOW, "num_kv_heads": 1, "page_size": 256, "sinks": True, "softcap": 5.0}),
    Variant(128, {**PAGED, **FIRST, "page_size": 16, "out_dtype": torch.float32}),
    Variant(256, {**PAGED, **FIRST, "page_size": 16, "out_dtype": torch.float32}, (0.05, 0.07)),
    Variant(128, {**PAGED, "page_size": 16, "form": FORMS[0]}),
    Variant(128, {**PAGED, "page_size": 64, "form": FORMS[1], "dtype": FP16}),
    Variant(128, {**WINDOW, "num_kv_heads": 1, "page_size": 32, "sinks": True, "form": FORMS[1]}),
]
BACKWARD = [
    Variant(128, {"causal": True}, FEW),
    Variant(64, {}, (0.0, 0.01)),
    Variant(64, {"causal": True}, (0.0, 0.01)),
    Variant(64, {**PACKED, "sinks": True, "softcap": 5.0}, (0.0, 0.01)),
    Variant(128, {}, (0.0, 0.06)),
    Variant(128, {"dtype": FP16, **WINDOW}, FEW),
    Variant(128, PACKED, FEW),
    Variant(128, {"causal": True, "softcap": 5.0}, (0.045, SOME[1])),
    Variant(64, {"mask": True}, (0.0, 0.01)),
    Variant(128, {"mask": True}, (0.02, 0.08)),
    Variant(256, {}),
    Variant(256, {"causal": True}, (0.0, 0.02)),
    Variant(256, {"mask": True}, FEW),
    Variant(64, {"deterministic": True, "causal": True}, (0.0, 0.01)),
    Variant(128, {"deterministic": True, "causal": True}, FEW),
    Variant(128, {"deterministic": True, **PACKED, "softcap": 5.0}, (0.05, 0.11)),
]
# Widths that are no powers of two, and 32.
BACKWARD_WIDTHS = [
    Variant(96, {"causal": True}),  # a tile of 64 columns and a tail of 32
    Variant(96, {}),
    Variant(80, {"causal": True}),
    Variant(80, {}),
    Variant(32, {"causal": True}),
    Variant(32, {}),
    Variant(160, {"causal": True}),
    Variant(160, {}),
    Variant(192, {"causal": True}),
    Variant(192, {}),
    Variant(192, {"head_dim_v": 128, "causal": True, "num_kv_heads": 2}),
    Variant(192, {"head_dim_v": 128}),
    Variant(72, {**PACKED, "head_dim_v": 88, "sinks": True, "softcap": 5.0}),
    Variant(96, {"dtype": FP16, **WINDOW}),
    Variant(160, {**PACKED, "sinks": True, "softcap": 5.0}),
    Variant(80, {"mask": True}, (0.0, 0.002)),
    Variant(96, {"mask": True}, (0.002, 0.008)),
    Variant(32, {"mask": True}),
    Variant(192, {"mask": True, "head_dim_v": 128}),
    Variant(96, {"deterministic": True, "causal": True}),
    Variant(80, {"deterministic": True, **PACKED, "softcap": 5.0}),
    Variant(32, {"deterministic": True}),
]
WIDE_GRADS_WIDTHS = [
    Variant(80, {"causal": True}),
    Variant(96, PACKED),
    Variant(192, {"causal": True}),
    Variant(192, {"head_dim_v": 128}),
    Variant(32, {"deterministic": True}),
]
WIDE_GRADS = [
    Variant(64, {"causal": True}, (0.0, 0.01)),
    Variant(128, {}, (0.0, 0.06)),
    Variant(128, {"causal": True}, FEW),
    Variant(128, PACKED, FEW),
    Variant(128, {"dtype": FP16, "mask": True}, (0.02, 0.08)),
    Variant(256, {"causal": True}, (0.0, 0.02)),
    Variant(256, PACKED, (0.0, 0.02)),
    Variant(64, {"mask": True, "head_dim_v": 40}, (0.0, 0.01)),
    Variant(64, {"deterministic": True, "causal": True}, (0.0, 0.01)),
    Variant(128, {"deterministic": True, "causal": True, "softcap": 5.0}, (0.05, 0.11)),
]
ADDING = [
    Variant(128, {"causal": True}, FEW),
    Variant(128, {}, (0.0, 0.06)),
    Variant(64, {"causal": True}, (0.0, 0.01)),
    Variant(128, {"mask": True, "num_kv_heads": 2, "head_dim_v": 72}, (0.02, 0.08)),
]


ADDING_WIDTHS = [
    Variant(96, {"causal": True}),
    Variant(80, {"causal": True, "num_kv_heads": 2, "head_dim_v": 72}),
    Variant(32, {"mask": True}),
]


def variants(table: list[Variant]) -> list:
    """The table as parameters: all but the first line are slow, and every second one of these is
    marked `all`.
    """
    named = lambda options: "-".join(f"{name}={value}" for name, value in options.items())
    slow, more = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.all]
    marks = lambda i: [] if i == 0 else slow if i % 2 else more
    return [
        pytest.param(v, id=f"{v.head_dim}-{named(v.options)}", marks=marks(i))
        for i, v in enumerate(table)
    ]


def _pose(variant: Variant) -> tuple[Problem, Tensors]:
    options = dict(variant.options)
    lengths = options.pop("lengths", (200, 300))
    take = lambda *names: {name: options.pop(name) for name in names if name in options}
    shape = {"num_heads": 4, "head_dim": variant.head_dim, "dtype": BF16}
    shape |= take("dtype", "head_dim_v", "num_kv_heads")
    q, k, v = ot.make_qkv(1, *lengths, **shape)
    extras, max_seqlens, page_size = {}, (), options.pop("page_size", 0)
    form = options.pop("form", None)
    if options.pop("sinks", False):
        extras["sinks"] = torch.zeros(4)
    if options.pop("mask", False):
        rule = masks.mod(lambda b, h, q, k: (q + k) % 3 != 0)
        extras["mask"] = masks.build(rule, 1, 4, *lengths)
    if options.pop("packed", False):
        cu_seqlens = (torch.tensor([0, n], dtype=torch.int32) for n in lengths)
        q, k, v, max_seqlens = q[0], k[0], v[0], lengths
        extras |= zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True)
    x = Tensors(q, k, v, **extras)
    if page_size:
        return _pose_paged(x, page_size, form, Options(**options), max_seqlens)
    return describe(x, Options(**options), max_seqlens), x


def _pose_paged(
    x: Tensors,
    page_size: int,
    form: torch.dtype | None,
    options: Options,
    max_seqlens: tuple[int, ...],
) -> tuple[Problem, Tensors]:
    """form: of 8-bit pages."""
    keys = (x.k, x.v) if max_seqlens else (x.k[0], x.v[0])
    offsets = torch.tensor([0, len(keys[0])], dtype=torch.int32)
    names = ("k", "v", "page_table", "cache_seqlens")
    pages = dict(zip(names, ot.make_pages(*keys, offsets, page_size), strict=True))
    x = x._replace(**pages, cu_seqlens_k=None)
    if form is not None:
        (k, v), scales = quantise_pages(x.k, x.v, form)
        x = x._replace(k=k, v=v, **scales)
    return paged.describe(x, options, max_seqlens[0] if max_seqlens else None), x


class Machine(NamedTuple):
    """A compiled kernel: registers of a thread at entry, bytes of shared memory, bytes that the
    kernel itself allocates, its SASS, the names of all instructions, and of each hot loop, and the
    bytes of copies that its barriers expect.
    """

    registers: int
    shared: int
    allocated: int
    sass: str
    code: list[str]
    loops: list[list[str]]
    expects: set[int]

    def has(self, *names: str) -> bool:
        return any(name.startswith(names) for name in self.code)


def _compile(kernel, args, kwargs, folder: Path) -> Machine:
    backend = make_backend(TARGET)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    packed = kernel._pack_args(backend, kwargs, bound, specialization, options)
    options, signature, constexprs, attrs = packed
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = triton.compile(
        source(kernel, signature, constexprs, attrs), target=TARGET, options=options.__dict__
    )
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    (registers,) = re.findall(r"REG:(\d+)", _tool("-res-usage", cubin))
    sass = _tool("-sass", cubin)
    code, loops = _instructions(sass)
    allocated = _allocated(compiled.asm["ttgir"])
    opened, closed = (compiled.asm["ptx"].count(f"mbarrier.{x}.") for x in ("init", "inval"))
    assert opened == closed, "memory of a barrier that is never closed is given to tiles"
    numbers = re.findall(r"\bbar(?:rier)?\.sync\s+(\d+)", compiled.asm["ptx"])
    assert all(int(n) < FIRST_NAMED_BARRIER for n in numbers), (
        "the compiler uses our named barriers"
    )
    expects = set(map(int, re.findall(r"barrier_expect %\w+, (\d+)", compiled.asm["ttgir"])))
    return Machine(int(registers), compiled.metadata.shared, allocated, sass, code, loops, expects)


def _allocated(ttgir: str) -> int:
    """Bytes of all buffers: `ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, ...`."""
    total = 0
    alloc = r"local_alloc[^\n]*-> !ttg.memdesc<([\dx]+)x[a-z]+(\d+)(?:E4M3FN)?,"
    for shape, bits in re.findall(alloc, ttgir):
        total += math.prod(map(int, shape.split("x"))) * int(bits) // 8
    return total


def _tool(option: str, cubin: Path) -> str:
    command = [TOOLS / "cuobjdump", option, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Instruction(NamedTuple):
    at: int
    predicate: str | None
    name: str
    operands: str


def _flow(sass: str) -> tuple[list[Instruction], networkx.DiGraph]:
    """All instructions, and which of them may follow one another, but for computed jumps."""
    pattern = r"/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);"
    matches = re.finditer(pattern, sass)
    instructions = [Instruction(int(m[1], 16), m[2], m[3], m[4]) for m in matches]
    place = {at: i for i, (at, *_) in enumerate(instructions)}
    flow = networkx.DiGraph()
    flow.add_nodes_from(range(len(instructions)))
    for i, (_, predicate, name, operands) in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if target:
            flow.add_edge(i, place[int(target[1], 16)])
        leaves = name.startswith(("BRA", "BRX", "EXIT", "RET"))
        if (predicate or not leaves) and i + 1 < len(instructions):
            flow.add_edge(i, i + 1)
    return instructions, flow


def _instructions(sass: str) -> tuple[list[str], list[list[str]]]:
    """Names of all instructions, and by innermost loop that
    multiplies matrices, the shortest loop first."""
    instructions, flow = _flow(sass)
    names = [x.name for x in instructions]
    loops = [[names[i] for i in loop] for loop in _hot_loops(flow, names)]
    return names, sorted(loops, key=len)


def _hot_loops(flow: networkx.DiGraph, names: list[str]) -> list[list[int]]:
    """Instructions that reach one another are a loop; without its entries, the loops inside."""
    hot = []
    for loop in networkx.strongly_connected_components(flow):
        if len(loop) > 1 and any(names[i].startswith(MATRIX_PRODUCTS) for i in loop):
            entries = {i for i in loop if any(j not in loop for j in flow.predecessors(i))}
            hot += _hot_loops(flow.subgraph(loop - entries), names) or [sorted(loop)]
    return hot


def _doubtful_addresses(sass: str) -> list[str]:
    """Matrix products with an operand in shared memory at an address that more than one instruction
    may have set: four uniform registers from gdesc[] on; the first two do not matter if the left
    operand is in registers. ptxas assumed in a second loop that the first one had computed an
    address, though the first may have no iteration: any value in the registers was then an address.
    """
    instructions, flow = _flow(sass)
    jumps = [i for i, x in enumerate(instructions) if x.name.startswith("BRX")]
    starts = [i for i in flow if i and not flow.pred[i]]
    flow.add_edges_from((i, start) for i in jumps for start in starts)
    doubtful = []
    for i, x in enumerate(instructions):
        first = re.search(r"gdesc\[UR(\d+)\]", x.operands) if "GMMA" in x.name else None
        if first:
            skipped = 2 if re.match(r"\s*R\d+, R\d+", x.operands) else 0
            registers = range(int(first[1]) + skipped, int(first[1]) + 4)
            if any(len(_origins(instructions, flow, i, register)) != 1 for register in registers):
                doubtful.append(f"{x.at:x} {x.name}{x.operands}")
    return doubtful


def _origins(
    instructions: list[Instruction], flow: networkx.DiGraph, at: int, register: int
) -> set[int | None]:
    """The instructions that may have set a uniform register last, None if there may be none."""
    origins, seen, ahead = set(), set(), [at]
    while ahead:
        i = ahead.pop()
        if i == 0:
            origins.add(None)
        for before in flow.pred[i]:
            sets = register in _sets(instructions[before])
            if sets:
                origins.add(before)
            if before not in seen and (instructions[before].predicate or not sets):
                seen.add(before)
                ahead.append(before)
    return origins


def _sets(x: Instruction) -> range:
    """Uniform registers that an instruction sets."""
    first = re.match(r"\s*(?:U?P\w+, )*UR(\d+)\b", x.operands)
    if not first or not x.name.startswith(("U", "R2UR", "S2UR", "REDUX")):
        return range(0)
    wide = ".64" in x.name or "WIDE" in x.name
    return range(int(first[1]), int(first[1]) + 1 + wide)


def _late_reads(sass: str) -> list[Instruction]:
    """Loads of shared memory that some warps may not have executed when others start the producer.
    Triton passes arguments in shared memory that may still have the result of a reduction.
    """
    instructions, flow = _flow(sass)
    late: set[int] = set()
    ahead = [i for i in flow if _is_start(instructions, i)]
    while ahead:
        for before in flow.pred[ahead.pop()]:
            if before not in late and not instructions[before].name.startswith("BAR.SYNC"):
                late.add(before)
                ahead.append(before)
    return [instructions[i] for i in late if instructions[i].name.startswith("LDS")]


def _is_start(instructions: list[Instruction], at: int) -> bool:
    """Whether waiting warps are started here: arguments stored, a barrier, registers reassigned."""
    barrier = instructions[at]
    wakes = barrier.name.startswith("BAR.SYNC") and barrier.operands.strip() == "0x1"
    stored = any(x.name.startswith("STS") for x in instructions[max(at - 4, 0) : at])
    after = takewhile(lambda x: x.name != "EXIT", instructions[at : at + 5])
    return wakes and stored and any(x.name.startswith("USETMAXREG") for x in after)


def _spills(loop: list[str]) -> int:
    return sum(name.startswith(("LDL", "STL")) for name in loop)


def _one_by_one(loop: list[str]) -> bool:
    """Whether ptxas gave up on asynchronous products: it then puts an arrival before each of their
    instructions, of which a product has several.
    """
    instructions = sum(name.startswith(MATRIX_PRODUCTS[:3]) for name in loop)
    return 0 < instructions <= loop.count("WARPGROUP.ARRIVE")


def _check(machine: Machine, variant: Variant, most_registers: int) -> None:
    _check_loops(machine, variant.spills)
    assert machine.shared <= SHARED_BYTES
    assert machine.registers <= most_registers
    assert machine.has(*MATRIX_PRODUCTS[:3]) and machine.has("UTMALDG")
    stores = ("STG",) if "out_dtype" in variant.options else ("UTMASTG", "UTMAREDG")
    assert machine.has(*stores)


def _check_loops(machine: Machine, spills: tuple[float, float]) -> None:
    """spills: see Variant."""
    allowed = spills[0 if triton.__version__.startswith("3.6") else 1]
    for loop in machine.loops:
        spilled = _spills(loop)
        assert spilled <= allowed * len(loop), f"{spilled} of {len(loop)} instructions are spills"
        assert not _one_by_one(loop), "each instruction of a product waits for the last"
    assert len(machine.loops) >= 2  # every consumer has one


def _starts_early(machine: Machine, options: dict) -> None:
    """The kernel starts while the previous one ends, waits for it, and lets the next one start."""
    assert options["launch_pdl"] and machine.has("ACQBULK") and machine.has("PREEXIT")


def _holds(
    machine: Machine, expected: Footprint, passing: int = 0, handed_over: int = HANDED_OVER
) -> None:
    """The footprint model predicts every buffer and the registers. passing: bytes of shared memory
    that the compiler uses to move values between threads.
    """
    assert machine.allocated == expected.shared_bytes
    assert 0 <= machine.shared - expected.shared_bytes <= handed_over + passing
    assert machine.registers <= expected.registers
    pool = expected.threads * expected.registers
    assert sum(threads * each for threads, each in expected.roles) <= pool <= 65536


def _gradient(problem: Problem, constants: dict) -> Footprint:
    """Of a kernel that launch_backward starts, by the constants it is compiled with."""
    widths, dynamic = tiles.hopper_backward_widths(problem), constants["DYNAMIC"]
    width = max(widths)
    if "DQ" in constants:
        config = tiles.hopper_backward_config(width)
        return footprint.hopper_backward(config, width, constants["DQ"], dynamic)
    config, values = tiles.hopper_split_config(width), constants["VALUES"]
    if values:
        config = config._replace(b1_stages=2)
    return footprint.hopper_backward_split(config, *widths, constants["KEYS"], values, dynamic)


@pytest.mark.parametrize("variant", variants(FORWARD))
def test_forward_stays_in_registers(launches, tmp_path, variant):
    _check_forward(launches, tmp_path, variant)


def _check_forward(launches: list, tmp_path: Path, variant: Variant) -> None:
    """Compile the launch of a forward: registers, shared memory, copies and products."""
    from onchip.kernels.hopper.launch import forward

    problem, x = _pose(variant)
    assert entry.backend.supports(problem, HOPPER) is None
    forward(problem, x)
    ((kernel, args, kwargs),) = launches
    machine = _compile(kernel, args, kwargs, tmp_path)
    _check(machine, variant, kwargs["maxnreg"])
    widths = tiles.hopper_forward_widths(problem)
    wide, config = problem.out_dtype == torch.float32, tiles.hopper_forward_of(problem)
    more = wide, problem.page_size, problem.packed
    _holds(machine, footprint.hopper_forward(config, *widths, *more))
    if problem.page_size == 0:
        rows = 64, config.tile_n, config.tile_n
        boxes = zip(rows, (widths[0], *widths), strict=True)
        assert machine.expects == {2 * n * width for n, width in boxes}  # a tail under one barrier
    _check_products(machine, *widths, config)
    if wide and problem.sm_partition is None:
        assert not kwargs["launch_pdl"]
    else:
        _starts_early(machine, kwargs)


def _check_products(machine: Machine, width: int, width_v: int, config: tiles.HopperConfig) -> None:
    """Each hot loop has a QK product over all columns in steps of 16, and for each tile of columns
    of V a PV product over all keys in steps of 16: no product is over padding.
    """
    splits = [n for n in tiles.split_columns(width_v) if n]
    qk = Counter({config.tile_n: width // 16})
    want = qk + Counter({n: config.tile_n // 16 for n in splits})
    if config.tile_n in splits:
        want[config.tile_n] = width // 16 + config.tile_n // 16
    for loop in machine.loops:
        shapes = [re.match(r"HGMMA\.64x(\d+)x16", name) for name in loop]
        assert Counter(int(shape[1]) for shape in shapes if shape) == want


@pytest.mark.parametrize(
    ("dim", "dim_v", "boxes"),
    [
        (72, 24, ([(64, 64), (128, 64), (128, 32), (64, 32)], [(64, 16), (128, 16), None, None])),
        (96, 80, ([(64, 64), (128, 64), (128, 64), (64, 64)],
                  [(64, 32), (128, 32), (128, 16), (64, 16)])),
        (112, 112, ([(64, 128), (128, 128), (128, 128), (64, 128)], [None] * 4)),
        (192, 128, ([(64, 128), (128, 128), (128, 128), (64, 128)],
                    [(64, 64), (128, 64), None, None])),
        (184, 184, ([(64, 128), (64, 128), (64, 128), (64, 128)], [(64, 64)] * 4)),
    ],
)  # fmt: skip
def test_boxes_of_columns_and_of_their_tails(launches, dim, dim_v, boxes):
    """Swizzles are as wide as a row of the box, at most 128 bytes. Tensors are described with their
    own columns, so that TMA fills a box with zeros behind them and stores nothing there.
    """
    from onchip.kernels.hopper.launch import forward

    problem, x = _pose(Variant(dim, {"head_dim_v": dim_v}))
    forward(problem, x)
    ((_, args, _),) = launches
    for descriptors, expected in zip((args[:4], args[4:8]), boxes, strict=True):
        for desc, box, n in zip(descriptors, expected, (dim, dim, dim_v, dim_v), strict=True):
            assert (desc is None) == (box is None)
            if desc is not None:
                assert tuple(desc.block_shape[-2:]) == box and desc.shape[-1] == n
                assert desc.layout.swizzle_byte_width == min(128, 2 * box[1])


@pytest.mark.parametrize("rule, consumers", [("window", 3), ("some blocks", 3), ("few blocks", 2)])
def test_strips_are_used_if_their_rows_share_blocks(launches, rule, consumers):
    from onchip.kernels.hopper.launch import forward

    n = 4096
    draw = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    blocks = draw.repeat_interleave(128, 2).repeat_interleave(128, 3)
    rules = {"window": masks.window(300, 0)}
    rules |= {"some blocks": masks.dense(blocks < 0.15), "few blocks": masks.dense(blocks < 0.05)}
    x = Tensors(*ot.make_qkv(1, n, n, num_heads=1, head_dim=64, dtype=BF16))
    x = x._replace(mask=rules[rule].build(1, 1, n, n, "cpu"))
    forward(describe(x, Options()), x)
    ((_, _, kwargs),) = launches
    assert kwargs["CONSUMERS"] == consumers


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(MERGE))
def test_merging_stays_in_registers(launches, tmp_path, variant):
    from onchip.kernels.hopper.launch import forward_into

    problem, x = _pose(variant)
    assert entry.backend.supports(problem, HOPPER) is None
    assert entry.backend.get_merge_fn(problem, x) is not None
    out = torch.zeros(1, 250, 4, variant.head_dim)
    lse = torch.zeros(1, 4, 250, dtype=torch.float64)
    forward_into(problem, x, out[:, 50:], lse[:, :, 50:])
    ((kernel, args, kwargs),) = launches
    machine = _compile(kernel, args, kwargs, tmp_path)
    _check(machine, variant, kwargs["maxnreg"])
    assert machine.has("DADD") and not kwargs["launch_pdl"]


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(KV8))
def test_products_of_8_bits_stay_in_registers(launches, tmp_path, variant):
    problem, x = _pose(variant)
    assert entry.backend.supports(problem, HOPPER) is None
    entry.backend.forward(problem, x)
    kernel, args, kwargs = launches[-1]  # before it, operands are made: see below
    machine = _compile(kernel, args, kwargs, tmp_path)
    _check(machine, variant, kwargs["maxnreg"])
    _starts_early(machine, kwargs)
    assert not _doubtful_addresses(machine.sass), "an address that may not have been computed"
    products = {"fp8": ("QGMMA",), "int8": ("IGMMA", "QGMMA"), "int8_pv16": ("IGMMA", "HGMMA")}
    for name in MATRIX_PRODUCTS[:3]:
        assert machine.has(name) == (name in products[problem.precision])


def _grid(*values: list) -> list:
    """All combinations as parameters. Every second one, in all directions of the grid, is marked
    `all`: with three parameters, the others have every pair of values.
    """
    places = product(*(range(len(of)) for of in values))
    marks = lambda place: [pytest.mark.slow, *[pytest.mark.all] * (sum(place) % 2)]
    choose = lambda place: [of[i] for of, i in zip(values, place, strict=True)]
    return [pytest.param(*choose(place), marks=marks(place)) for place in places]


@pytest.mark.parametrize(
    ("dim", "precision", "packed"), _grid([64, 128, 256], ["fp8", "int8"], [False, True])
)
def test_operands_of_8_bits_stay_in_registers(launches, tmp_path, dim, precision, packed):
    from onchip.kernels.triton.quantise import prepare

    problem, x = _pose(Variant(dim, {"precision": precision, "packed": packed}))
    prepare(problem, x, torch.zeros(4, 200))
    _check_operands(launches, tmp_path)


def _check_operands(launches, folder):
    """The five launches that quantise q, k and v."""
    assert len(launches) == 5
    for launch in launches:
        machine = _compile(*launch, folder)
        few = 0.035 * len(machine.code)
        assert machine.shared <= SHARED_BYTES and _spills(machine.code) <= few


@pytest.mark.parametrize(("dim", "form"), _grid([64, 128, 256], [None, *FORMS]), ids=str)
def test_operands_from_pages_stay_in_registers(launches, tmp_path, dim, form):
    from onchip.kernels.triton.quantise import prepare

    options = {"precision": "fp8", **PAGED, "page_size": 16, "form": form}
    problem, x = _pose(Variant(dim, options))
    prepare(problem, x, torch.zeros(4, 200))
    _check_operands(launches, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_queries_of_a_prefill_stay_in_registers(launches, tmp_path, dim):
    """Normed, rotated and quantised in one launch."""
    from onchip.kernels.llm import prefill_8bit
    from onchip.kernels.triton import quantise

    problem, x = _pose(Variant(dim, {"precision": "fp8", **PAGED, "page_size": 16}))
    qkv, half = torch.zeros(200, 6 * dim, dtype=BF16), torch.zeros(200, 1, dim // 2)
    rotation = quantise.get_rotation(dim, BF16, qkv.device)
    side = quantise.OperandSizes(200, 200, 4, None, 1)
    weight, mean = (torch.zeros(dim, dtype=BF16), 1e-6, 0.0), torch.zeros(dim)
    shift = torch.zeros(4, 200)
    prefill_8bit.quantise_queries(qkv, (half, half), weight, side, mean, shift, rotation, problem)
    (launch,) = launches
    machine = _compile(*launch, tmp_path)
    assert machine.shared <= SHARED_BYTES and not _spills(machine.code)


@pytest.mark.parametrize("variant", variants(DECODE))
def test_decode_stays_in_registers(launches, tmp_path, variant):
    from onchip.kernels.hopper.launch_decode import decode

    problem, x = _pose(variant._replace(options={**variant.options, "lengths": (1, 300)}))
    assert entry.backend.supports(problem, HOPPER) is None and entry.splits_keys(problem)
    decode(problem, x)
    ((kernel, args, kwargs),) = launches
    machine = _compile(kernel, args, kwargs, tmp_path)
    allowed = variant.spills[0 if triton.__version__.startswith("3.6") else 1]
    (loop,) = machine.loops
    assert _spills(loop) <= allowed * len(loop)
    assert machine.shared <= SHARED_BYTES and machine.has("LDSM") and machine.has("UTMALDG")
    assert not _late_reads(machine.sass)
    kv8 = problem.page_dtype is not None
    width = hopper_width(problem.head_dim)
    halves = 2 * 16 * width // 2 if kv8 else 0  # of queries, on their way to all warps
    _holds(machine, footprint.hopper_decode(width, problem.page_size, kv8), halves)


@pytest.mark.grid
@pytest.mark.parametrize("form", [None, FORMS[0]])
@pytest.mark.parametrize("batch", [256, pytest.param(2048, marks=pytest.mark.slow)])
def test_warps_synchronise_before_the_producer_starts(launches, tmp_path, batch, form):
    from onchip.kernels.hopper.launch_decode import decode

    options = {**PAGED, "page_size": 16, "lengths": (1, 300), "form": form}
    problem, x = _pose(Variant(128, options))
    decode(problem, x)
    ((kernel, args, kwargs),) = launches
    machine = _compile(kernel, args, kwargs | {"BATCH": batch}, tmp_path)
    instructions, _ = _flow(machine.sass)
    assert sum(_is_start(instructions, i) for i in range(len(instructions))) == 1
    assert not _late_reads(machine.sass)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_lengths_of_the_largest_batch_fit_in_shared_memory(width):
    few = footprint.hopper_decode(width, page_size=16)
    more = 4 * tiles.HOPPER_DECODE_BATCH - few.buffers["lengths"]
    assert few.shared_bytes + more + HANDED_OVER <= SHARED_BYTES


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(BACKWARD))
def test_backward_stays_in_registers(launches, tmp_path, variant):
    problem, x = _pose(variant)
    _check_backward(problem, x, launches, tmp_path, variant)


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(WIDE_GRADS))
def test_unrounded_gradients_stay_in_registers(launches, tmp_path, variant):
    problem, x = _pose(variant)
    _check_backward(problem._replace(wide_grads=True), x, launches, tmp_path, variant)


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(ADDING))
def test_adding_gradients_stays_in_registers(launches, tmp_path, variant):
    """Into tokens of longer sums: dk and dv by reductions of TMA alone, or, where a group of heads
    is divided, as shares that another kernel adds.
    """
    problem, x = _pose(variant)
    assert entry.backend.supports(problem, HOPPER) is None
    out = x.q.new_zeros(*x.q.shape[:-1], problem.head_dim_v)
    lse = torch.zeros(out.shape[:-1]).transpose(-1, -2).contiguous()
    dq, dk, dv = (torch.zeros(1, 400, *t.shape[2:]) for t in x[:3])
    start = entry.backend.get_accumulate_fn(problem)
    queries = start(problem, x, out, lse, out, None)
    assert queries.add(problem, x, (dk[:, 60:360], dv[:, 60:360])) is None
    queries.finish(dq[:, 50:250])
    _, (kernel, args, kwargs), *others = launches
    machine = _compile(kernel, args, kwargs, tmp_path)
    _check(machine, variant, kwargs["maxnreg"])
    _holds(machine, _gradient(problem, kwargs), handed_over=HANDED_OVER_BACKWARD)
    divided = len(others) == 2
    assert machine.has("UTMAREDG") and machine.has("UTMASTG") == divided
    assert divided == (problem.num_kv_heads < problem.num_heads)
    assert not any(_spills(_compile(*launch, tmp_path).code) for launch in others)


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(BACKWARD_WIDTHS))
def test_backward_of_every_width_stays_in_registers(launches, tmp_path, variant):
    problem, x = _pose(variant)
    _check_backward(problem, x, launches, tmp_path, variant)


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(WIDE_GRADS_WIDTHS))
def test_unrounded_gradients_of_every_width(launches, tmp_path, variant):
    problem, x = _pose(variant)
    _check_backward(problem._replace(wide_grads=True), x, launches, tmp_path, variant)


@pytest.mark.grid
@pytest.mark.parametrize("variant", variants(ADDING_WIDTHS))
def test_adding_gradients_of_every_width(launches, tmp_path, variant):
    test_adding_gradients_stays_in_registers(launches, tmp_path, variant)


def _check_backward(problem, x, launches, tmp_path, variant):
    from onchip.kernels.hopper.launch_backward import backward

    assert entry.backend.supports(problem, HOPPER) is None
    out = x.q.new_zeros(*x.q.shape[:-1], problem.head_dim_v)
    lse = torch.zeros(out.shape[:-1]).transpose(-1, -2).contiguous()
    backward(problem, x, out, lse, out, None)
    assert sum(kernel.is_gluon() for kernel, _, _ in launches) >= 1
    for kernel, args, kwargs in launches:
        machine = _compile(kernel, args, kwargs, tmp_path)
        _starts_early(machine, kwargs)
        if kernel.is_gluon():
            _check(machine, variant, kwargs["maxnreg"])
            _holds(machine, _gradient(problem, kwargs), handed_over=HANDED_OVER_BACKWARD)
            _check_gradient_products(machine, problem, kwargs)


def _check_gradient_products(machine: Machine, problem: Problem, constants: dict) -> None:
    """Products of the hot loops in steps of 16, over the columns of the call's widths and no
    others. One kernel for all gradients: s and dp of 64 x 64, dv and dk for each tile of columns,
    dq of all keys in two parts, which may differ. One for each: s, dp (not for dv), one sum.
    """
    widths = tiles.hopper_backward_widths(problem)
    products = _all_gradients if "DQ" in constants else _one_gradient
    wants, found = products(*widths, constants), [_product_columns(loop) for loop in machine.loops]
    assert all(counts in wants for counts in found) and all(want in found for want in wants)


def _all_gradients(width: int, _: int, constants: dict) -> list[Counter]:
    """The products of each consumer's loop over a tile of queries."""
    tile_m, columns = constants["TILE_M"], tiles.split_columns(width)
    wants = []
    for part in tiles.dq_part_columns(tile_m, *columns):
        want = Counter({64: tile_m // 64 * 2 * (width // 16)})
        for n in columns:
            want[n] += 2 * (tile_m // 16)
        if constants["DQ"]:
            want[part] += constants["TILE_N"] // 16
        wants.append(_without_padding(want))
    return wants


def _one_gradient(width: int, width_v: int, constants: dict) -> list[Counter]:
    """The products of a loop over one tile of the other side."""
    tile, values = constants["TILE"], constants["VALUES"]
    want = Counter({tile: (width if values else width + width_v) // 16})
    for n in tiles.split_columns(width_v if values else width):
        want[n] += tile // 16
    return [_without_padding(want)]


def _without_padding(want: Counter) -> Counter:
    """Without the tail of 0 columns."""
    return Counter({n: count for n, count in want.items() if n})


def _product_columns(loop: list[str]) -> Counter:
    """How many wgmma of 64 rows a loop has, by their columns."""
    shapes = (re.match(r"HGMMA\.64x(\d+)x16", name) for name in loop)
    return Counter(int(shape[1]) for shape in shapes if shape)


def test_a_wide_dout_is_rounded_for_the_products(launches):
    from onchip.kernels.hopper.launch_backward import backward

    problem, x = _pose(Variant(128, {"out_dtype": torch.float32}))
    out, lse = torch.zeros(x.q.shape), torch.zeros(1, 4, 200)
    backward(problem, x, out, lse, out, None)
    (_, given, _), (kernel, args, _), _ = launches
    assert given[1].dtype == torch.float32  # delta loses nothing
    assert args[kernel.arg_names.index("dout_desc")].base.dtype == BF16


def test_loops_are_found_by_their_flow():
    """The slow path of a wait is behind the code and jumps back: that is no loop."""
    lines = (
        (0, "MOV R1, R2"), (16, "@P0 BRA 0x60"), (32, "HGMMA.64x8x16 R4"), (48, "LDL R5"),
        (64, "@P1 BRA 0x20"), (80, "EXIT"), (96, "SYNCS.TRYWAIT P2"), (112, "@!P2 BRA 0x60"),
        (128, "BRA 0x20"),
    )  # fmt: skip
    names, loops = _instructions("\n".join(f"/*{at:04x}*/ {text} ;" for at, text in lines))
    assert len(names) == 9 and loops == [["HGMMA.64x8x16", "LDL", "BRA"]]


@pytest.mark.parametrize("skips, doubtful", [("0x30", []), ("0x40", ["0050"])])
def test_addresses_that_a_loop_without_iterations_does_not_set(skips, doubtful):
    """The first product's address must be set on every way there; of the second's, its left operand
    being in registers, that of the right one alone.
    """
    lines = (
        (0, "ULDC.64 UR6, c[0x0][0x208]"), (16, f"@!P0 BRA {skips}"), (32, "MOV R1, R2"),
        (48, "UIADD3.64 UR4, UR8, 0x2, URZ"), (64, "UMOV UR18, UR6"), (72, "UMOV UR19, UR7"),
        (80, "QGMMA.64x64x32.F32 R24, gdesc[UR4], R24"), (96, "@P1 BRA 0x50"),
        (112, "QGMMA.64x64x32.F32 R24, R8, gdesc[UR16], R24"), (128, "EXIT"),
    )  # fmt: skip
    addresses = _doubtful_addresses("\n".join(f"/*{at:04x}*/ {text} ;" for at, text in lines))
    assert [f"{x.split()[0]:>04}" for x in addresses] == doubtful


LATENT = [
    {"lengths": (1, 40000)},
    {"lengths": (1, 300)},
    {"lengths": (1, 300), "num_heads": 16, "page_size": 16},
    {"lengths": (3, 40000), "causal": True, "sinks": True, "softcap": 5.0, "dtype": FP16},
    {"lengths": (40, 900), "packed": True, "causal": True, "window_size": (255, 0)},
]


@pytest.mark.parametrize(
    "options",
    [pytest.param(x, id=str(i), marks=[pytest.mark.slow] * (i > 0)) for i, x in enumerate(LATENT)],
)
def test_latent_pages_stay_in_registers(launches, tmp_path, options):
    from onchip.kernels.hopper.launch_latent import attend

    problem, x = _pose_latent(**options)
    attend(problem, x)
    machine = _compile(*launches[0], tmp_path)
    _check_loops(machine, (0.0, 0.01))
    assert machine.shared <= SHARED_BYTES and machine.has("HGMMA") and machine.has("UTMALDG")


def _pose_latent(
    lengths, num_heads=128, page_size=64, dtype=BF16, packed=False, sinks=False, **options
):
    seqlen_q, seqlen_k = lengths
    q, k, _ = ot.make_qkv(2, seqlen_q, seqlen_k, num_heads=num_heads, num_kv_heads=1, head_dim=576,
                          head_dim_v=512, dtype=dtype)  # fmt: skip
    offsets = torch.tensor([0, seqlen_k, 2 * seqlen_k], dtype=torch.int32)
    keys = k.flatten(0, 1)
    k_pages, _, table, seqlens = ot.make_pages(keys, keys, offsets, page_size)
    x = Tensors(q, k_pages, k_pages[..., :512], page_table=table, cache_seqlens=seqlens)
    if sinks:
        x = x._replace(sinks=torch.zeros(num_heads))
    if packed:
        cu_seqlens = torch.tensor([0, seqlen_q, 2 * seqlen_q], dtype=torch.int32)
        x = x._replace(q=q.flatten(0, 1), cu_seqlens_q=cu_seqlens)
    return paged.describe(x, Options(**options), seqlen_q if packed else None), x
