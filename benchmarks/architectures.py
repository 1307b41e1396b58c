"""`python -m benchmarks architectures`: registers and memory of the portable kernels on every GPU.

Nothing runs: kernels are compiled for GPUs that are not here. Each case of CASES is a call of the
host code, whose launches cross_compile.py compiles. A row has the registers, spills, shared memory
and threads of one kernel. `--only sm_86 gfx942` chooses architectures, `--quick` the cases with the
largest tiles. Thresholds: every program fits.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.cross_compile import (
    ARCHITECTURES,
    Launch,
    as_if_on,
    attend,
    compile_launch,
    device_of,
    read_resources,
    record_launches,
)
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.core import paged
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.llm import kv_write, pointwise, prefill_8bit, sampling
from onchip.kernels.triton import merge, quantise, residual
from onchip.testing import make_qkv

PARTS = ARCHITECTURES
BF16, FP32 = torch.bfloat16, torch.float32
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
CAUSAL = {"causal": True}
# Long score arithmetic, and tiles of the bias in shared memory: the least room for tiles.
ALL_OPTIONS = CAUSAL | {"softcap": 5.0, "alibi": True, "bias": True, "sinks": True}
ALL_OPTIONS |= {"dropout_p": 0.1, "return_stats": True}
ONE, CHUNK = {"lengths": (1, 4000)}, {"lengths": (300, 4000), "causal": True}
HOPPER = ("sm_90",)  # its kernels alone multiply 8-bit operands
SMALL = ("delta_kernel", "merge_kernel")
HEADS, GROUPS, MANY = (2, 2), (4, 2), (32, 8)  # query heads, kv heads


class KernelCase(NamedTuple):
    """One call: `run` launches the kernels. archs: those that have such calls."""

    name: str
    head_dim: int
    dtype: torch.dtype
    run: Callable[[], None]
    archs: tuple[str, ...] = ARCHITECTURES

    @property
    def key(self) -> str:
        return f"{self.name}, {self.head_dim}"

    def launches(self, arch: str) -> list[Launch]:
        """The small kernels before and after attention are in the first cases alone."""
        with record_launches() as recorded, as_if_on(arch):
            self.run()
        return [x for x in recorded if self in LARGEST or x.name not in SMALL]


def _attention(name, dim, options, dtype=BF16, heads=HEADS, with_backward=True) -> KernelCase:
    sizes = {"head_dim": dim, "num_heads": heads[0], "num_kv_heads": heads[1]}
    call = partial(attend, dtype, sizes, options, with_backward=with_backward)
    return KernelCase(name, dim, dtype, call)


_decode = partial(_attention, with_backward=False)


def _write_pages() -> None:
    pages, new = torch.zeros(2, 4, 16, 8, 128, dtype=BF16), torch.zeros(3, 8, 128, dtype=BF16)
    kv_write.write(new, new, *pages, torch.zeros(3, dtype=torch.int32))
    kv_write.copy_pages(pages, torch.zeros(5, 2, dtype=torch.int32))


def _decoder_layer() -> None:
    """At the sizes of Qwen3-0.6B, with pages of int8."""
    x, weight, heads = (torch.zeros(*n, dtype=BF16) for n in ((3, 1024), (1024,), (128,)))
    qkv, slots = torch.zeros(3, 4096, dtype=BF16), torch.zeros(3, dtype=torch.int32)
    turn = torch.zeros(3, 1, 64), torch.zeros(3, 1, 64)
    pages = (*torch.zeros(2, 4, 16, 8, 128, dtype=INT8), *torch.zeros(2, 4, 16, 8))
    pointwise.place(qkv, 16, turn, (heads, heads), (1e-6, 0.0), pages, slots)
    pointwise.add_rms_norm(x, x, weight, 1e-6, 0.0)
    pointwise.gated_activation(torch.zeros(3, 6144, dtype=BF16), "silu")


def _sample() -> None:
    """With every sampling option, over the vocabulary of Qwen3."""
    logits, rows = torch.zeros(2, 151_936, dtype=BF16), torch.zeros(2)
    top_k, top_p = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    sampling.draw(logits, logits.float(), rows, top_p, rows, top_k, top_p)


def _merge_states() -> None:
    own = torch.zeros(64, 32, 128), torch.zeros(64, 32).t()
    stack = torch.zeros(40, 64, 32, 128), torch.zeros(40, 32, 64)
    merge.merge(own, [(*stack, torch.zeros(64, dtype=torch.int32))], BF16)
    own = torch.zeros(1, 64, 32, 128), torch.zeros(1, 32, 64, dtype=torch.float64)
    merge.fold(own, [(32, torch.zeros(1, 32, 32, 128), torch.zeros(1, 32, 32))] * 4, fresh=True)
    _, low = residual.split(torch.zeros(1, 33, 4, 128), BF16)
    residual.with_residual(torch.zeros(1, 4, 33), low, low)


def _quantise_operands(precision: str) -> None:
    x = Tensors(*make_qkv(1, 200, 300, num_heads=4, head_dim=128, dtype=BF16))
    problem = describe(x, Options(precision=precision), ())
    quantise.prepare(problem, x, torch.zeros(4, 200))


def _quantise_pages() -> None:
    """And queries from their projections."""
    q, k, v = make_qkv(1, 200, 320, num_heads=4, head_dim=128, dtype=BF16)
    table, seqlens = torch.zeros(1, 20, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    pages = (t.view(20, 16, 4, 128) for t in (k, v))
    x = Tensors(q, *pages, page_table=table, cache_seqlens=seqlens)
    problem = paged.describe(x, Options(precision="fp8"))
    quantise.prepare(problem, x, torch.zeros(4, 200))
    rotation = quantise.get_rotation(128, BF16, q.device)
    turn, weight = (torch.zeros(200, 1, 64),) * 2, (torch.zeros(128, dtype=BF16), 1e-6, 0.0)
    sizes, mean = quantise.OperandSizes(200, 200, 4, None, 1), torch.zeros(4, 128)
    prefill_8bit.quantise_queries(
        q.flatten(-2)[0], turn, weight, sizes, mean, torch.zeros(4, 200), rotation, problem
    )


# The largest tiles: `--quick`, and the tests of every architecture.
LARGEST = (
    _attention("attention", 128, CAUSAL),
    _decode("decode", 128, ONE | {"sinks": True}, heads=GROUPS),
)
CASES = (
    *LARGEST,
    _attention("attention", 256, CAUSAL),
    _decode("fp32 decode, 30 queries", 256, {"lengths": (30, 4000)}, FP32, (2, 1)),
    _decode("decode, 30 queries", 256, {"lengths": (30, 4000), "causal": True}, heads=(2, 1)),
    _decode("paged, many queries", 128, CHUNK | {"page_size": 16}, heads=GROUPS),
    _decode("paged, many queries", 256, CHUNK | {"page_size": 64}),
    _decode("paged e4m3", 128, ONE | {"page_size": 16, "form": E4M3}, heads=MANY),
    _decode("paged e4m3, many queries", 256, CHUNK | {"page_size": 64, "form": E4M3}),
    _decode("paged int8", 64, {"lengths": (5, 4000), "page_size": 1, "form": INT8}),
    KernelCase("pages", 128, BF16, _write_pages),
    KernelCase("decoder layer", 128, BF16, _decoder_layer),
    KernelCase("sampling", 0, BF16, _sample),
    KernelCase("states", 128, BF16, _merge_states),
    _attention("attention", 64, CAUSAL),
    _attention("mask", 128, {"mask": True}),
    _attention("all options", 256, ALL_OPTIONS),
    KernelCase("operands int8", 128, BF16, partial(_quantise_operands, "int8"), HOPPER),
    KernelCase("operands fp8", 128, BF16, partial(_quantise_operands, "fp8"), HOPPER),
    KernelCase("operands fp8 of pages", 128, BF16, _quantise_pages, HOPPER),
)


def run(session: Session) -> None:
    session.where = {"device": "cross-compiled"}
    archs = session.only or PARTS
    cases = LARGEST if session.quick else CASES
    session.run(
        (f"{arch}: {case.key}", partial(compile_case, case, arch))
        for arch in archs
        for case in cases
        if arch in case.archs
    )


def compile_case(case: KernelCase, arch: str) -> list[Row]:
    """A row per kernel of the case. Equal launches of one kernel make one row."""
    rows: dict[str, Row] = {}
    for launch in case.launches(arch):
        resources, name = read_resources(compile_launch(launch, arch)), name_of(launch)
        problem = Case(arch, case.name, case.dtype, case.head_dim, 0, way=name)
        columns = resources._asdict() | tile_of(launch)
        columns["limit_bytes"] = device_of(arch).shared_bytes
        shared_bytes = columns.pop("shared_bytes")
        rows[name] = problem.row("triton", shared_bytes, "B", **columns)
    return list(rows.values())


def name_of(launch: Launch) -> str:
    name = launch.name.removesuffix("_kernel")
    if name == "rotate":  # of queries, then of keys
        return "rotate keys" if launch.kwargs["KEYS"] else "rotate queries"
    return name


def tile_of(launch: Launch) -> dict[str, int]:
    tile = {field: launch.kwargs.get(field.upper(), 0) for field in ("tile_m", "tile_n")}
    return tile | {"num_stages": launch.kwargs["num_stages"]}


def _room_left(rows: list[Row]) -> float:
    return min(row["limit_bytes"] - row["value"] for row in rows)


THRESHOLDS = [
    Threshold(
        f"shared memory of {arch} that is left",
        lambda row, arch=arch: row["bench"] == arch,
        at_least=0,
        measure=_room_left,
        unit="B",
        optional=True,
    )
    for arch in PARTS
]
