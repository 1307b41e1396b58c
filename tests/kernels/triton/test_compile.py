"""The portable kernels, cross-compiled for GPUs: the code that ptxas generates, and the number of
variants.

Each variant is a real call with launches that are recorded instead of run, so that the host code,
the tile tables and the signatures are tested together.

`make test` compiles the first variants of each test. Of the others .ci/run compiles every second
one with the newest Triton, and those between, marked `all`, with the oldest (`make triton36`);
ALL=1 compiles all of them with either.
"""

import re

import pytest
import torch

from benchmarks import footprint
from onchip.core.backend import Tangents
from onchip.kernels.tiles import TritonConfig

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from benchmarks.cross_compile import (  # noqa: E402
    as_if_on,
    attend,
    compile_launch,
    differentiate,
    disassemble,
    read_resources,
)

if triton.knobs.runtime.interpret:
    pytest.skip("interpreting and compiling cannot share a process", allow_module_level=True)

STREAMED = ("delta_kernel", "merge_kernel")
# sm_80 has 163 kB, and shares its tables with devices of 99 kB.
SHARED_BYTES = {"sm_90": 232448, "sm_100": 232448, "sm_80": 101376, "gfx942": 65536}


def _call(arch, dtype, sizes, options, lengths=None, backward=True):
    """Run one call of the contract as if on `arch`."""
    with as_if_on(arch):
        attend(dtype, sizes, ({"lengths": lengths} if lengths else {}) | options, backward)


def _hot_loop(sass: str) -> list[str]:
    """The instructions of the first loop with matrix products: the loop over unmasked tiles."""
    pattern = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);"
    code = [(int(m[1], 16), m[2], m[3]) for m in re.finditer(pattern, sass)]
    for here, name, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and int(target[1], 16) < here:
            body = [n for at, n, _ in code if int(target[1], 16) <= at <= here]
            if any(n.startswith(("HGMMA", "HMMA")) for n in body):
                return body
    return []


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LATENT = {"head_dim": 576, "head_dim_v": 512, "num_heads": 16, "num_kv_heads": 1}
D64, D128, D256, D512 = ({"head_dim": d, "num_heads": 2} for d in (64, 128, 256, 512))
GQA = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
MANY = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
EVERYTHING = {"causal": True, "softcap": 5.0, "alibi": True, "bias": True, "sinks": True}
EVERYTHING |= {"dropout_p": 0.1, "return_stats": True}
QUICK = [("sm_90", BF16, D128, {"causal": True})]
SLOW = [
    ("sm_90", BF16, D64, {"causal": True}),
    ("sm_90", BF16, D256, {"causal": True}),
    ("sm_90", BF16, GQA, {"packed": True, "window_size": (255, 0), "sinks": True}),
    ("sm_90", BF16, D128, {"mask": True}),
    ("sm_90", BF16, D128, EVERYTHING),
    ("sm_90", FP16, {"head_dim": 96, "head_dim_v": 40}, {"causal": True, "softcap": 30.0}),
    ("sm_90", FP32, D128, {"causal": True}),
    ("sm_90", FP32, D256, EVERYTHING),
    ("sm_80", BF16, D64, {"causal": True}),
    ("sm_80", BF16, GQA, {"causal": True, "packed": True}),
    ("sm_80", BF16, D256, {"mask": True}),
    ("sm_80", BF16, D256, EVERYTHING),
    ("sm_80", BF16, D512, EVERYTHING),
    ("sm_80", BF16, D512, {"causal": True}),
    ("sm_90", BF16, {"head_dim": 320, "head_dim_v": 512}, {"mask": True}),
    ("sm_90", BF16, D512 | {"num_kv_heads": 1}, {"page_size": 16, "lengths": (30, 4000)}),
    ("gfx942", BF16, D512 | {"num_kv_heads": 1}, {"page_size": 16, "lengths": (30, 4000)}),
    ("gfx942", BF16, D512, EVERYTHING),
    ("sm_80", BF16, LATENT, {"page_size": 16, "lengths": (30, 4000)}),
    ("sm_90", BF16, LATENT, {"page_size": 64, "lengths": (30, 4000)}),
    ("gfx942", BF16, LATENT, {"page_size": 16, "lengths": (30, 4000)}),
    ("sm_80", FP32, D64, {"causal": True}),
    ("sm_90", BF16, D128, {"lengths": (1, 4000), "sinks": True}),
    ("sm_90", BF16, D64, {"lengths": (64, 64), "causal": True}),
    ("sm_80", BF16, D256 | {"num_kv_heads": 1}, {"lengths": (30, 4000), "causal": True}),
    ("sm_90", FP32, D256 | {"num_kv_heads": 1}, {"lengths": (30, 4000), "softcap": 5.0}),
    ("sm_100", BF16, D128, {"causal": True}),
    ("gfx942", BF16, D128, {"causal": True}),
    ("sm_90", BF16, GQA, {"page_size": 16, "lengths": (1, 4000), "sinks": True}),
    ("sm_90", BF16, MANY, {"page_size": 16, "lengths": (1, 1000)}),
    ("sm_90", BF16, GQA, {"page_size": 16, "lengths": (300, 4000), "causal": True}),
    ("sm_90", BF16, D64, {"page_size": 1, "lengths": (5, 4000), "window_size": (999, 0)}),
    ("sm_90", FP32, D256, {"page_size": 3, "lengths": (300, 4000), "softcap": 5.0, "alibi": True}),
    ("sm_90", BF16, D256, {"page_size": 64, "lengths": (300, 4000), "return_stats": True}),
    ("sm_80", BF16, GQA, {"page_size": 16, "lengths": (1, 4000)}),
    (
        "sm_80",
        FP16,
        D256,
        {"page_size": 256, "lengths": (300, 4000), "causal": True, "softcap": 5.0},
    ),
    ("gfx942", BF16, GQA, {"page_size": 16, "lengths": (1, 4000)}),
    ("sm_90", BF16, MANY, {"page_size": 16, "lengths": (1, 1000), "form": E4M3}),
    ("sm_90", BF16, GQA, {"page_size": 16, "lengths": (300, 4000), "causal": True, "form": INT8}),
    (
        "sm_90",
        BF16,
        D64,
        {"page_size": 1, "lengths": (5, 4000), "window_size": (999, 0), "form": INT8},
    ),
    ("sm_90", FP16, D256, {"page_size": 64, "lengths": (300, 4000), "form": E4M3}),
    ("sm_80", BF16, GQA, {"page_size": 16, "lengths": (1, 4000), "form": E4M3}),
    ("gfx942", BF16, GQA, {"page_size": 16, "lengths": (1, 4000), "form": INT8}),
]
PLAIN = ({"causal": True}, SLOW[2][3])  # footprint.py predicts their shared memory


def variants(cases: list[tuple], quick: int, ids: bool = False) -> list:
    """The cases as parameters: the first ones, then alternately slow, and slow and `all`."""
    slow, more = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.all]
    marks = lambda i: [] if i < quick else more if (i - quick) % 2 else slow
    name = lambda i, case: f"{case[0]}-{i}" if ids else None
    return [pytest.param(*x, id=name(i, x), marks=marks(i)) for i, x in enumerate(cases)]


def _holds(compiled, name: str, kwargs: dict, head_dim: int) -> None:
    """Shared memory as in footprint.py, and registers that fit on a processor."""
    kernel = name.removesuffix("_kernel")
    if name in STREAMED:
        return
    metadata = compiled.metadata
    tiles = kwargs["TILE_M"], kwargs["TILE_N"], metadata.num_warps, metadata.num_stages
    expected = footprint.triton(kernel, TritonConfig(*tiles), head_dim)
    assert metadata.shared == expected.shared_bytes, kernel
    assert expected.register_bytes <= 4 * 65536


@pytest.mark.parametrize(
    ("arch", "dtype", "sizes", "options"), variants(QUICK + SLOW, quick=1, ids=True)
)
def test_compiles_within_the_chip(launches, arch, dtype, sizes, options):
    """Fits in shared memory, uses the tensor cores, and spills next to nothing in the hot loop."""
    train = (arch in ("sm_80", "sm_90") or sizes == D512) and "lengths" not in options
    _call(arch, dtype, sizes, options, backward=train)
    for launch in launches:
        name = launch.name
        if name == "delta_kernel" and (arch, dtype, sizes, options) != QUICK[0]:
            continue  # one of them is enough
        compiled = compile_launch(launch, arch)
        assert compiled.metadata.shared <= SHARED_BYTES[arch], name
        if arch == "sm_90" and dtype == BF16 and options in PLAIN:
            _holds(compiled, name, launch.kwargs, sizes["head_dim"])
        if "cubin" not in compiled.asm or dtype == FP32 or name in STREAMED:
            continue
        body = _hot_loop(disassemble(compiled))
        if arch in ("sm_80", "sm_90") and name != "dbias_kernel":
            spilled = sum(n.startswith(("STL", "LDL")) for n in body)
            allowed = len(body) // (10 if name == "dkdv_kernel" else 50)
            assert body and spilled <= allowed, f"{name}: {spilled} of {len(body)}"
        if arch == "sm_90" and options == {"causal": True}:
            assert any(n.startswith("HGMMA") for n in body), name


REPRODUCIBLE = [
    ("sm_90", BF16, MANY, {"causal": True, "packed": True}),
    ("sm_90", BF16, GQA, {"page_size": 16, "lengths": (1, 4000)}),
    ("sm_90", BF16, MANY, {"page_size": 16, "lengths": (512, 4000)}),
    ("sm_90", BF16, D64, {"causal": True}),
    ("sm_90", BF16, D256, {"page_size": 16, "lengths": (1, 4000)}),
    ("sm_90", BF16, MANY, {"causal": True, "softcap": 5.0, "sinks": True, "window_size": (99, 0)}),
    ("sm_90", FP32, D128, {"causal": True}),
    ("sm_80", BF16, MANY, {"causal": True}),
    ("sm_80", BF16, D256, {"page_size": 16, "lengths": (1, 4000)}),
]


@pytest.mark.parametrize(
    ("arch", "dtype", "sizes", "options"),
    [
        pytest.param(*case, marks=() if i < 2 else pytest.mark.slow)
        for i, case in enumerate(REPRODUCIBLE)
    ],
)
def test_reproducible_kernels_compile_within_the_chip(launches, arch, dtype, sizes, options):
    """One instruction of products, and no multiply-add that the source does not name: ptxas and
    LLVM may fuse none.
    """
    _call(arch, dtype, sizes, options | {"reproducible": True}, backward=False)
    names = [launch.name for launch in launches]
    has_parts = options.get("lengths", (0,))[0] == 1
    assert names == ["fixed_order_kernel", *["merge_splits_kernel"] * has_parts]
    for launch in launches:
        assert launch.kwargs["enable_fp_fusion"] is False
        compiled = compile_launch(launch, arch)
        resources = read_resources(compiled)
        assert compiled.metadata.shared <= SHARED_BYTES[arch]
        assert resources.registers * resources.threads <= 65_536
        sass = disassemble(compiled)
        products = set(re.findall(r"\b(?:HGMMA|HMMA)\.[0-9x]+", sass))
        if launch.name == "merge_splits_kernel" or dtype == FP32:
            assert resources.spills <= 4 and not products  # of the merge: not in its loop
            continue
        assert products and all(p.startswith("HGMMA") == (arch == "sm_90") for p in products)
        body = _hot_loop(sass)
        spilled = sum(n.startswith(("STL", "LDL")) for n in body)
        assert body and spilled <= len(body) // 50, f"{spilled} of {len(body)}"


@pytest.mark.parametrize(
    ("arch", "rows", "columns", "width", "dtype"),
    [
        ("sm_90", 1, 6144, 4096, BF16),
        ("sm_90", 8192, 4096, 4096, BF16),
        pytest.param("sm_90", 512, 4096, 4096, BF16, marks=pytest.mark.slow),
        pytest.param("sm_90", 1, 1024, 3000, BF16, marks=pytest.mark.slow),
        pytest.param("sm_90", 1, 28_672, 4096, BF16, marks=pytest.mark.slow),
        pytest.param("sm_90", 8, 1024, 1024, FP32, marks=pytest.mark.slow),
        pytest.param("sm_80", 1, 6144, 4096, BF16, marks=pytest.mark.slow),
        pytest.param("sm_80", 8192, 4096, 4096, BF16, marks=pytest.mark.slow),
    ],
)
def test_reproducible_products_compile_within_the_chip(launches, arch, rows, columns, width, dtype):
    """No spills, and products of a warpgroup on Hopper, for one row, too."""
    from onchip.kernels.llm import fixed_order

    x, weight = torch.zeros(rows, width, dtype=dtype), torch.zeros(columns, width, dtype=dtype)
    with as_if_on(arch):
        fixed_order.multiply(x, weight)
    (launch,) = launches
    compiled = compile_launch(launch, arch)
    resources, sass = read_resources(compiled), disassemble(compiled)
    assert resources.spills == 0 and resources.registers * resources.threads <= 65_536
    most = 163 * 1024 if arch == "sm_80" else SHARED_BYTES[arch]
    assert compiled.metadata.shared <= most
    assert ("HGMMA" in sass) == (arch == "sm_90" and dtype == BF16)
    assert ("HMMA" in sass) == (arch == "sm_80")


SCORES = {"causal": True, "softcap": 5.0, "alibi": True, "bias": True, "sinks": True, "mask": True}
TANGENT, SECOND = ("tangent_kernel",), ("second_dkdv_kernel", "second_dq_kernel")
DERIVATIVES = [
    ("sm_90", D128, {"causal": True}, TANGENT),
    ("sm_90", D128, {"causal": True}, SECOND),
    ("sm_90", D64, {"causal": True}, TANGENT + SECOND),
    ("sm_90", D128, {"mask": True}, TANGENT),
    ("sm_80", D64, {"causal": True}, TANGENT),
    ("sm_80", D128, {"causal": True}, TANGENT),
    ("sm_80", D128, SCORES, TANGENT),
    ("gfx942", D64, {"causal": True}, TANGENT),
    ("gfx942", D128, {"causal": True}, TANGENT + SECOND),
]


@pytest.mark.parametrize(("arch", "sizes", "options", "names"), variants(DERIVATIVES, quick=1))
def test_tangents_compile_within_the_chip(launches, arch, sizes, options, names):
    """Of the two variants of the tangent kernel, the first: the other differs at its end. The same
    bounds of spills in the hot loop as above, and none on AMD.
    """
    with as_if_on(arch):
        differentiate(BF16, sizes, options)
    by_name = {launch.name: launch for launch in reversed(launches)}
    assert by_name.keys() >= set(names)
    for name in names:
        compiled = compile_launch(by_name[name], arch)
        assert compiled.metadata.shared <= SHARED_BYTES[arch], name
        if "cubin" not in compiled.asm:
            assert read_resources(compiled).spills == 0, name
            continue
        body = _hot_loop(disassemble(compiled))
        spilled = sum(n.startswith(("STL", "LDL")) for n in body)
        allowed = len(body) // (10 if name == "second_dkdv_kernel" else 50)
        assert body and spilled <= allowed, f"{name}: {spilled} of {len(body)}"


@pytest.mark.slow
@pytest.mark.parametrize("of", [("q",), ("k",), ("v",), ("alibi_slopes",), ("bias", "sinks")])
def test_an_absent_tangent_generates_no_code(launches, of):
    """Triton 3.6 allows None in fewer places than 3.9."""
    lengths = []
    for inputs in (of, Tangents._fields[:6]):
        with as_if_on("sm_90"):
            differentiate(BF16, D64, SCORES, inputs)
        compiled = (compile_launch(x, "sm_90") for x in launches if x.name in TANGENT + SECOND)
        lengths.append(sum(len(c.asm["ptx"]) for c in compiled))
        launches.clear()
    assert lengths[0] < lengths[1]


def test_writes_and_copies_move_sixteen_bytes_at_a_time(launches):
    from onchip.kernels.llm import kv_write

    pages, new = torch.zeros(2, 4, 16, 8, 128, dtype=BF16), torch.zeros(3, 8, 128, dtype=BF16)
    kv_write.write(new, new, pages[0], pages[1], torch.zeros(3, dtype=torch.int32))
    kv_write.copy_pages(pages, torch.zeros(5, 2, dtype=torch.int32))
    for launch in launches:
        ptx = compile_launch(launch, "sm_90").asm["ptx"]
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx, launch.name


def _pointwise(arch):
    """Every kernel of pointwise.py, at the sizes of Qwen3-0.6B."""
    from onchip.kernels.llm import pointwise

    x, weight, heads = (torch.zeros(*n, dtype=BF16) for n in ((3, 1024), (1024,), (128,)))
    qkv, pages = torch.zeros(3, 4096, dtype=BF16), torch.zeros(2, 4, 16, 8, 128, dtype=BF16)
    turn, slots = (torch.zeros(3, 1, 64), torch.zeros(3, 1, 64)), torch.zeros(3, dtype=torch.int32)
    with as_if_on(arch):
        pointwise.add_rms_norm(x, x, weight, 1e-6, 0.0)
        pointwise.place(qkv, 16, turn, (heads, heads), (1e-6, 0.0), tuple(pages), slots)
        pointwise.gated_activation(torch.zeros(3, 6144, dtype=BF16), "silu")
        pointwise.clamped_swiglu(torch.zeros(3, 6144, dtype=BF16), 7.0, 1.702)


@pytest.mark.grid
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_pointwise_kernels_move_sixteen_bytes_at_a_time(launches, arch):
    _pointwise(arch)
    assert len(launches) == 4
    for launch in launches:
        compiled = compile_launch(launch, arch)
        ptx, sass = compiled.asm["ptx"], disassemble(compiled)
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx, launch.name
        assert not re.search(r"\b(STL|LDL)\b", sass), launch.name


PRODUCTS = {  # weight rows, columns; with a norm; with a gate
    "qkv": (4096, 1024, True, False),
    "out": (1024, 2048, False, False),
    "up": (6144, 1024, True, True),
    "down": (1024, 3072, False, False),
    "qkv 8B": (6144, 4096, True, False),
    "up 8B": (28_672, 4096, True, True),
    "down 8B": (4096, 14_336, False, False),
}


def _products(arch, rows, dtype=BF16, names=tuple(PRODUCTS)):
    """The products of a layer of Qwen3-0.6B and of an 8B model in shape, if a norm of so many rows
    is computed by its product.
    """
    from onchip.kernels.llm import products

    with as_if_on(arch):
        for num_columns, width, has_norm, is_gated in (PRODUCTS[name] for name in names):
            x, weight = torch.zeros(rows, width, dtype=dtype), torch.zeros(1, dtype=dtype)
            weight, norm = weight.expand(num_columns, width), torch.zeros(width, dtype=dtype)
            if has_norm and products.fuses_norm(x):
                gate = "silu" if is_gated else None
                products.norm_product(x, x, norm, (1e-6, 0.0), weight, None, gate)
            elif not has_norm:
                products.product(x, weight)


PRODUCT_VARIANTS = [
    ("sm_90", 1, BF16, ("qkv", "up", "down 8B")),
    ("sm_90", 8, BF16, ("qkv", "down")),
    *[("sm_90", rows, BF16, tuple(PRODUCTS)) for rows in (1, 4, 8, 16)],
    ("sm_90", 1, FP32, ("qkv", "out", "up")),
    ("sm_80", 1, BF16, ("qkv", "out", "up")),
    ("sm_80", 16, FP16, ("qkv", "out", "up")),
    ("sm_100", 8, BF16, ("qkv", "out", "up")),
    ("gfx942", 8, BF16, ("qkv", "out", "up")),
]


@pytest.mark.grid
@pytest.mark.parametrize(("arch", "rows", "dtype", "names"), variants(PRODUCT_VARIANTS, quick=2))
def test_products_request_weights_before_they_wait(launches, arch, rows, dtype, names):
    """No spills. On Hopper, before the wait for the previous kernel: the first tile of the weight,
    16 bytes at a time, and the norm weight, but not x, of which other launches compute the values.
    """
    _products(arch, rows, dtype, names)
    assert launches
    for launch in launches:
        compiled = compile_launch(launch, arch)
        resources = read_resources(compiled)
        assert resources.spills == 0 and resources.registers * resources.threads <= 65_536
        assert resources.shared_bytes <= SHARED_BYTES[arch]
        if arch != "sm_90":
            continue
        values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        bytes_per_load = 16 * resources.threads  # of all threads
        tile_bytes = values["TILE_N"] * values["TILE_K"] * dtype.itemsize
        least = tile_bytes * min(values["WIDTH"], values["TILE_K"]) // values["TILE_K"]
        first, rest = disassemble(compiled).split("ACQBULK")
        loads = re.findall(r"\bLDG\.[\w.]+", first)
        assert sum("128" in load for load in loads) >= least // bytes_per_load, loads
        has_norm = values["norm_ptr"] is not None
        assert len(loads) <= tile_bytes // bytes_per_load + has_norm, loads
        assert not re.search(r"\b(STG|RED|ATOMG|PREEXIT)\b", first)
        assert "PREEXIT" in rest and "LDG" in rest and "STG" in rest


EXPERTS = {  # experts, experts of a token, width, inner; biases and a clamped SwiGLU
    "8 x 1.5b": (8, 2, 1536, 8960, False),
    "gpt-oss": (32, 4, 2880, 2880, True),
    "odd": (8, 2, 1001, 499, True),
}


def _experts(arch, tokens, dtype, name):
    """The launches of a layer of experts, with a shared expert."""
    from onchip.kernels.llm import fused_moe

    num_experts, per_token, width, inner, is_gpt_oss = EXPERTS[name]
    x, weight = torch.zeros(tokens, width, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    up, down = (num_experts * 2 * inner, width), (num_experts * width, inner)
    biases = [weight[0].expand(n) if is_gpt_oss else None for n in (up[0], down[0])]
    chosen = torch.zeros(tokens, per_token, dtype=torch.int64)
    with as_if_on(arch):
        groups = fused_moe.group_rows(chosen, num_experts, dtype.itemsize)
        swiglu = (7.0, 1.702) if is_gpt_oss else None
        rows = fused_moe.up(x, weight.expand(up), biases[0], groups, "silu", swiglu)
        fused_moe.down(rows, weight.expand(down), biases[1], groups, chosen.float(), x)


EXPERT_VARIANTS = [
    ("sm_90", 1, BF16, "8 x 1.5b"),
    ("sm_90", 8192, BF16, "gpt-oss"),
    *[("sm_90", tokens, BF16, "gpt-oss") for tokens in (1, 32, 256, 512)],
    ("sm_90", 256, FP16, "odd"),
    *[("sm_80", tokens, BF16, "gpt-oss") for tokens in (1, 256, 512, 8192)],
    *[("gfx942", tokens, BF16, "gpt-oss") for tokens in (1, 256, 512, 8192)],
    *[("gfx942", tokens, BF16, "8 x 1.5b") for tokens in (1, 8192)],
    ("sm_100", 8192, BF16, "gpt-oss"),
    *[(arch, tokens, FP32, "odd") for arch in ("sm_80", "sm_90", "gfx942") for tokens in (1, 256)],
]


@pytest.mark.grid
@pytest.mark.parametrize(("arch", "tokens", "dtype", "name"), variants(EXPERT_VARIANTS, quick=2))
def test_experts_do_not_spill(launches, arch, tokens, dtype, name):
    """On NVIDIA weights and rows are copied to shared memory 16 bytes at a time. Widths that are no
    multiple of this, which models do not have, are loaded element by element, and may spill. On
    Hopper tiles of 64 rows and more are warpgroup products.
    """
    _experts(arch, tokens, dtype, name)
    names = ["group_kernel", "up_kernel", "down_kernel", "combine_kernel"]
    assert [launch.name for launch in launches] == names
    for launch in launches:
        compiled = compile_launch(launch, arch)
        resources = read_resources(compiled)
        assert resources.registers * resources.threads <= 65_536
        if resources.spills and name != "odd":  # Triton 3.6: twice at the end of down_kernel
            body = _hot_loop(disassemble(compiled))
            assert body and not any(n.startswith(("STL", "LDL")) for n in body)
        assert resources.spills <= (32 if name == "odd" else 2)
        assert resources.shared_bytes <= SHARED_BYTES[arch]
        if "ptx" not in compiled.asm or launch.name not in ("up_kernel", "down_kernel"):
            continue
        ptx = compiled.asm["ptx"]
        values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        assert ("cp.async.cg" in ptx) == (values["WIDTH"] % 8 == 0)
        has_warpgroups = arch == "sm_90" and values["TILE_M"] >= 64 and dtype != FP32
        assert ("wgmma" in ptx) == has_warpgroups


@pytest.mark.grid
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_sampling_fits_into_registers(launches, arch):
    """With all sampling options, and with none."""
    from onchip.kernels.llm import sampling

    logits, rows = torch.zeros(2, 151_936, dtype=BF16), torch.zeros(2)
    top_k, top_p = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    sampling.draw(logits, None, rows, top_p)
    sampling.draw(logits, logits.float(), rows, top_p, rows, top_k, top_p)
    names = [launch.name for launch in launches]
    assert names == ["scan_kernel", "pick_kernel", "cut_kernel", "scan_kernel", "pick_kernel"]
    for launch in launches[:3]:
        compiled = compile_launch(launch, arch)
        wide = "b32" if launch.kernel is sampling.cut_kernel else "v4.b32"
        assert f"ld.global.{wide}" in compiled.asm["ptx"], launch.name
        sass = disassemble(compiled)
        assert not re.search(r"\b(STL|LDL)\b", sass), launch.name


@pytest.mark.grid
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_stacks_of_states_are_read_sixteen_bytes_at_a_time(launches, arch):
    """As in a cascade: 1, 8 or 40 segments of a level, of all queries or of some."""
    from onchip.kernels.triton.merge import merge

    own = torch.zeros(64, 32, 128), torch.zeros(64, 32).t()
    for segments, place in ((1, None), (8, None), (40, torch.zeros(64, dtype=torch.int32))):
        stack = torch.zeros(segments, 64, 32, 128), torch.zeros(segments, 32, 64)
        merge(own, [(*stack, place)], BF16)
    assert len(launches) == 3
    for launch in launches:
        compiled = compile_launch(launch, arch)
        assert "ld.global.v4.b32" in compiled.asm["ptx"], launch.kwargs
        assert not re.search(r"\b(STL|LDL)\b", disassemble(compiled)), launch.kwargs


@pytest.mark.grid
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("dim", [128, 512])
def test_states_of_rounds_are_read_sixteen_bytes_at_a_time(launches, arch, dim):
    from onchip.kernels.triton.merge import fold

    part = torch.zeros(1, 32, 32, dim), torch.zeros(1, 32, 32)
    own = torch.zeros(1, 64, 32, dim), torch.zeros(1, 32, 64, dtype=torch.float64)
    for count in (1, 3, 4):
        fold(own, [(32, *part)] * count, fresh=count == 4)
    assert len(launches) == 3
    for launch in launches:
        compiled = compile_launch(launch, arch)
        assert "ld.global.v4.b32" in compiled.asm["ptx"], launch.kwargs
        assert not re.search(r"\b(STL|LDL)\b", disassemble(compiled)), launch.kwargs


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_residuals_move_sixteen_bytes_at_a_time(launches, arch):
    from onchip.kernels.triton import residual

    _, low = residual.split(torch.zeros(1, 33, 4, 128), BF16)
    residual.with_residual(torch.zeros(1, 4, 33), low, low)
    assert [launch.name for launch in launches] == ["split_kernel", "share_kernel"]
    for launch in launches:
        compiled = compile_launch(launch, arch)
        ptx, sass = compiled.asm["ptx"], disassemble(compiled)
        assert "ld.global.v4.b32" in ptx and not re.search(r"\b(STL|LDL)\b", sass)
        assert launch.kernel is residual.share_kernel or "st.global.v4.b32" in ptx


@pytest.mark.parametrize(("head_dim", "few"), [(20, False), (64, True)])
def test_random_lengths_make_at_most_two_variants(launches, head_dim, few):
    """head_dim 20: strides are aligned or not; few queries: split or not."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        seqlen_q, seqlen_k = torch.randint(65, 3000 if few else 600, (2,), generator=generator)
        lengths = (1 if few else int(seqlen_q), int(seqlen_k))
        sizes = {"num_heads": 3, "head_dim": head_dim}
        _call("sm_90", BF16, sizes, {"causal": True}, lengths)
    backend, by_kernel = make_backend(GPUTarget("cuda", 90, 32)), {}
    for kernel, args, kwargs in launches:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        by_kernel.setdefault(kernel.fn.__name__, set()).add(str(bind(*args, **kwargs)[1]))
    assert {"delta_kernel", "dkdv_kernel", "dq_kernel"} < set(by_kernel)
    assert {name: len(variants) for name, variants in by_kernel.items() if len(variants) > 2} == {}


@pytest.mark.grid
def test_no_memory_access_before_the_wait_for_the_previous_kernel(launches):
    """These kernels may start while the previous one still runs, and they read its results."""
    options = {"page_size": 16, "lengths": (1, 4000), "sinks": True}
    _call("sm_90", BF16, GQA, options, backward=False)
    assert [launch.name for launch in launches] == ["decode_kernel", "merge_kernel"]
    _pointwise("sm_90")
    _experts("sm_90", 1, BF16, "8 x 1.5b")
    for launch in launches:
        assert launch.kwargs["launch_pdl"]
        sass = disassemble(compile_launch(launch, "sm_90"))
        memory = [m.start() for m in re.finditer(r"\b(LDG|LDGSTS|STG|ATOMG|RED|UBLKCP)\b", sass)]
        assert "ACQBULK" in sass and sass.index("ACQBULK") < min(memory), launch.name
        assert sass.index("ACQBULK") < sass.index("PREEXIT") < min(memory)
