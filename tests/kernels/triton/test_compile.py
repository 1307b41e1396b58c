"""The portable kernels, cross-compiled for GPUs: the code that ptxas generates, and the number of
variants.

Each variant is a real call with launches that are recorded instead of run, so that the host code,
the tile tables and the signatures are tested together.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import onchip.testing as ot
from benchmarks import footprint
from onchip import masks
from onchip.core import paged
from onchip.core.device import DeviceInfo
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.tiles import TritonConfig
from tests.kv8 import quantise_pages

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreting and compiling cannot share a process", allow_module_level=True)

STREAMED = ("delta_kernel", "merge_kernel")
SHARED_BYTES = {90: 232448, 100: 232448, 80: 101376, "gfx942": 65536}
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


def _call(monkeypatch, arch, dtype, sizes, options, lengths=None, backward=True):
    """Run one call of the contract as if on `arch`."""
    from onchip.kernels.triton import backward as bwd
    from onchip.kernels.triton import forward as fwd
    from onchip.kernels.triton import launch

    capability = None if isinstance(arch, str) else divmod(arch, 10)
    monkeypatch.setattr(launch, "device_info", lambda _: DeviceInfo("cuda", "", capability))
    options = dict(options)
    lengths = options.pop("lengths", lengths or (160, 200))
    page_size, form = options.pop("page_size", 0), options.pop("form", None)
    q, k, v = ot.make_qkv(1, *lengths, dtype=dtype, **sizes)
    extras, scalars, max_seqlens = _extras(options, q, k)
    if max_seqlens:
        q, k, v = q[0], k[0], v[0]
    x = Tensors(q, k, v, **extras)
    if page_size:
        x = _in_pages(x, page_size)
        if form is not None:
            (k, v), scales = quantise_pages(x.k, x.v, form)
            x = x._replace(k=k, v=v, **scales)
        problem = paged.describe(x, Options(**scalars))
    else:
        problem = describe(x, Options(**scalars), max_seqlens)
    out, lse, _ = fwd.forward(problem, x)
    if backward:
        bwd.backward(problem, x, out, lse, out, None)


def _in_pages(x: Tensors, page_size: int) -> Tensors:
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    offsets = torch.tensor([0, seqlen_k], dtype=torch.int32)
    pages = ot.make_pages(x.k[0], x.v[0], offsets, page_size)
    tree = torch.ones(1, seqlen_q, seqlen_q, dtype=torch.bool) if 1 < seqlen_q < 16 else None
    names = ("k", "v", "page_table", "cache_seqlens")
    return x._replace(**dict(zip(names, pages, strict=True)), tree_mask=tree)


def _extras(options: dict, q, k):
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
    if scalars.get("dropout_p"):
        extras["dropout_seed"] = torch.tensor(7)
    return extras, scalars, (seqlen_q, seqlen_k) if packed else None


def _source(kernel, args, kwargs) -> ASTSource:
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


def _compile(kernel, args, kwargs, arch):
    amd = isinstance(arch, str)
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", arch, 32)
    names = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
    options = {name: kwargs.pop(name) for name in names if name in kwargs}
    return triton.compile(_source(kernel, args, kwargs), target=target, options=options)


def _sass(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
D64, D128, D256 = ({"head_dim": d, "num_heads": 2} for d in (64, 128, 256))
GQA = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
MANY = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
EVERYTHING = {"causal": True, "softcap": 5.0, "alibi": True, "bias": True, "sinks": True}
EVERYTHING |= {"dropout_p": 0.1, "return_stats": True}
QUICK = [(90, BF16, D128, {"causal": True})]
SLOW = [
    (90, BF16, D64, {"causal": True}),
    (90, BF16, D256, {"causal": True}),
    (90, BF16, GQA, {"packed": True, "window_size": (255, 0), "sinks": True}),
    (90, BF16, D128, {"mask": True}),
    (90, BF16, D128, EVERYTHING),
    (90, FP16, {"head_dim": 96, "head_dim_v": 40}, {"causal": True, "softcap": 30.0}),
    (90, FP32, D128, {"causal": True}),
    (90, FP32, D256, EVERYTHING),
    (80, BF16, D64, {"causal": True}),
    (80, BF16, GQA, {"causal": True, "packed": True}),
    (80, BF16, D256, {"mask": True}),
    (80, BF16, D256, EVERYTHING),
    (80, FP32, D64, {"causal": True}),
    (90, BF16, D128, {"lengths": (1, 4000), "sinks": True}),
    (90, BF16, D64, {"lengths": (64, 64), "causal": True}),
    (80, BF16, D256 | {"num_kv_heads": 1}, {"lengths": (30, 4000), "causal": True}),
    (90, FP32, D256 | {"num_kv_heads": 1}, {"lengths": (30, 4000), "softcap": 5.0}),
    (100, BF16, D128, {"causal": True}),
    ("gfx942", BF16, D128, {"causal": True}),
    (90, BF16, GQA, {"page_size": 16, "lengths": (1, 4000), "sinks": True}),
    (90, BF16, MANY, {"page_size": 16, "lengths": (1, 1000)}),
    (90, BF16, GQA, {"page_size": 16, "lengths": (300, 4000), "causal": True}),
    (90, BF16, D64, {"page_size": 1, "lengths": (5, 4000), "window_size": (999, 0)}),
    (90, BF16, D256, {"page_size": 64, "lengths": (300, 4000), "return_stats": True}),
    (90, FP32, D256, {"page_size": 3, "lengths": (300, 4000), "softcap": 5.0, "alibi": True}),
    (80, BF16, GQA, {"page_size": 16, "lengths": (1, 4000)}),
    (80, FP16, D256, {"page_size": 256, "lengths": (300, 4000), "causal": True, "softcap": 5.0}),
    ("gfx942", BF16, GQA, {"page_size": 16, "lengths": (1, 4000)}),
    (90, BF16, MANY, {"page_size": 16, "lengths": (1, 1000), "form": E4M3}),
    (90, BF16, GQA, {"page_size": 16, "lengths": (300, 4000), "causal": True, "form": INT8}),
    (90, BF16, D64, {"page_size": 1, "lengths": (5, 4000), "window_size": (999, 0), "form": INT8}),
    (90, FP16, D256, {"page_size": 64, "lengths": (300, 4000), "form": E4M3}),
    (80, BF16, GQA, {"page_size": 16, "lengths": (1, 4000), "form": E4M3}),
    ("gfx942", BF16, GQA, {"page_size": 16, "lengths": (1, 4000), "form": INT8}),
]
PLAIN = ({"causal": True}, SLOW[2][3])  # footprint.py predicts their shared memory
VARIANTS = [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(QUICK)]
VARIANTS += [
    pytest.param(*case, id=f"{case[0]}-{i}", marks=pytest.mark.slow)
    for i, case in enumerate(SLOW, len(QUICK))
]


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


@pytest.mark.parametrize(("arch", "dtype", "sizes", "options"), VARIANTS)
def test_compiles_within_the_chip(monkeypatch, launches, arch, dtype, sizes, options):
    """Fits in shared memory, uses the tensor cores, and spills next to nothing in the hot loop."""
    train = arch in (80, 90) and "lengths" not in options
    _call(monkeypatch, arch, dtype, sizes, options, backward=train)
    for kernel, args, kwargs in launches:
        name = kernel.fn.__name__
        if name == "delta_kernel" and (arch, dtype, sizes, options) != QUICK[0]:
            continue  # one of them is enough
        compiled = _compile(kernel, args, kwargs, arch)
        assert compiled.metadata.shared <= SHARED_BYTES[arch], name
        if arch == 90 and dtype == BF16 and options in PLAIN:
            _holds(compiled, name, kwargs, sizes["head_dim"])
        if "cubin" not in compiled.asm or dtype == FP32 or name in STREAMED:
            continue
        body = _hot_loop(_sass(compiled.asm["cubin"]))
        if arch in (80, 90) and name != "dbias_kernel":
            spilled = sum(n.startswith(("STL", "LDL")) for n in body)
            allowed = len(body) // (10 if name == "dkdv_kernel" else 50)
            assert body and spilled <= allowed, f"{name}: {spilled} of {len(body)}"
        if arch == 90 and options == {"causal": True}:
            assert any(n.startswith("HGMMA") for n in body), name


def test_writes_and_copies_move_sixteen_bytes_at_a_time(launches):
    from onchip.kernels.llm import kv_write

    pages, new = torch.zeros(2, 4, 16, 8, 128, dtype=BF16), torch.zeros(3, 8, 128, dtype=BF16)
    kv_write.write(new, new, pages[0], pages[1], torch.zeros(3, dtype=torch.int32))
    kv_write.copy_pages(pages, torch.zeros(5, 2, dtype=torch.int32))
    for kernel, args, kwargs in launches:
        ptx = _compile(kernel, args, kwargs, 90).asm["ptx"]
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx, kernel.fn.__name__


def _pointwise(monkeypatch, arch):
    """Every kernel of pointwise.py, at the sizes of Qwen3-0.6B; some of them twice."""
    from onchip.kernels.llm import pointwise

    info = DeviceInfo("cuda", "", divmod(arch, 10))
    monkeypatch.setattr(pointwise, "device_info", lambda _: info)
    x, weight, heads = (torch.zeros(*n, dtype=BF16) for n in ((3, 1024), (1024,), (128,)))
    pointwise.add_rms_norm(x, x, weight, 1e-6, 0.0)
    qkv, pages = torch.zeros(3, 4096, dtype=BF16), torch.zeros(2, 4, 16, 8, 128, dtype=BF16)
    turn, slots = (torch.zeros(3, 1, 64), torch.zeros(3, 1, 64)), torch.zeros(3, dtype=torch.int32)
    pointwise.place(qkv, 16, turn, (heads, heads), (1e-6, 0.0), tuple(pages), slots)
    pointwise.gated_activation(torch.zeros(3, 6144, dtype=BF16), "silu")


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_pointwise_kernels_move_sixteen_bytes_at_a_time(monkeypatch, launches, arch):
    _pointwise(monkeypatch, arch)
    assert len(launches) == 3
    for kernel, args, kwargs in launches:
        compiled = _compile(kernel, args, kwargs, arch)
        ptx, sass = compiled.asm["ptx"], _sass(compiled.asm["cubin"])
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx, kernel.fn.__name__
        assert not re.search(r"\b(STL|LDL)\b", sass), kernel.fn.__name__


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_sampling_fits_into_registers(launches, arch):
    """With all sampling options, and with none."""
    from onchip.kernels.llm import sampling

    logits, rows = torch.zeros(2, 151_936, dtype=BF16), torch.zeros(2)
    top_k, top_p = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    sampling.draw(logits, None, rows, top_p)
    sampling.draw(logits, logits.float(), rows, top_p, rows, top_k, top_p)
    names = [kernel.fn.__name__ for kernel, _, _ in launches]
    assert names == ["scan_kernel", "pick_kernel", "cut_kernel", "scan_kernel", "pick_kernel"]
    for kernel, args, kwargs in launches[:3]:
        compiled = _compile(kernel, args, kwargs, arch)
        wide = "b32" if kernel is sampling.cut_kernel else "v4.b32"
        assert f"ld.global.{wide}" in compiled.asm["ptx"], kernel.fn.__name__
        sass = _sass(compiled.asm["cubin"])
        assert not re.search(r"\b(STL|LDL)\b", sass), kernel.fn.__name__


@pytest.mark.grid
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_stacks_of_states_are_read_sixteen_bytes_at_a_time(launches, arch):
    """As in a cascade: 1, 8 or 40 segments of a level, of all queries or of some."""
    from onchip.kernels.triton.merge import merge

    own = torch.zeros(64, 32, 128), torch.zeros(64, 32).t()
    for segments, place in ((1, None), (8, None), (40, torch.zeros(64, dtype=torch.int32))):
        stack = torch.zeros(segments, 64, 32, 128), torch.zeros(segments, 32, 64)
        merge(own, [(*stack, place)], BF16)
    assert len(launches) == 3
    for kernel, args, kwargs in launches:
        compiled = _compile(kernel, args, kwargs, arch)
        assert "ld.global.v4.b32" in compiled.asm["ptx"], kwargs
        assert not re.search(r"\b(STL|LDL)\b", _sass(compiled.asm["cubin"])), kwargs


@pytest.mark.grid
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_states_of_rounds_are_read_sixteen_bytes_at_a_time(launches, arch):
    from onchip.kernels.triton.merge import fold

    part = torch.zeros(1, 32, 32, 128), torch.zeros(1, 32, 32)
    own = torch.zeros(1, 64, 32, 128), torch.zeros(1, 32, 64, dtype=torch.float64)
    for count in (1, 3, 4):
        fold(own, [(32, *part)] * count, fresh=count == 4)
    assert len(launches) == 3
    for kernel, args, kwargs in launches:
        compiled = _compile(kernel, args, kwargs, arch)
        assert "ld.global.v4.b32" in compiled.asm["ptx"], kwargs
        assert not re.search(r"\b(STL|LDL)\b", _sass(compiled.asm["cubin"])), kwargs


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_residuals_move_sixteen_bytes_at_a_time(launches, arch):
    from onchip.kernels.triton import residual

    _, low = residual.split(torch.zeros(1, 33, 4, 128), BF16)
    residual.with_residual(torch.zeros(1, 4, 33), low, low)
    assert [kernel.fn.__name__ for kernel, _, _ in launches] == ["split_kernel", "share_kernel"]
    for kernel, args, kwargs in launches:
        compiled = _compile(kernel, args, kwargs, arch)
        ptx, sass = compiled.asm["ptx"], _sass(compiled.asm["cubin"])
        assert "ld.global.v4.b32" in ptx and not re.search(r"\b(STL|LDL)\b", sass)
        assert kernel is residual.share_kernel or "st.global.v4.b32" in ptx


@pytest.mark.parametrize(("head_dim", "few"), [(20, False), (64, True)])
def test_random_lengths_make_at_most_two_variants(monkeypatch, launches, head_dim, few):
    """head_dim 20: strides are aligned or not; few queries: split or not."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        seqlen_q, seqlen_k = torch.randint(65, 3000 if few else 600, (2,), generator=generator)
        lengths = (1 if few else int(seqlen_q), int(seqlen_k))
        sizes = {"num_heads": 3, "head_dim": head_dim}
        _call(monkeypatch, 90, BF16, sizes, {"causal": True}, lengths)
    backend, by_kernel = make_backend(GPUTarget("cuda", 90, 32)), {}
    for kernel, args, kwargs in launches:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        by_kernel.setdefault(kernel.fn.__name__, set()).add(str(bind(*args, **kwargs)[1]))
    assert {"delta_kernel", "dkdv_kernel", "dq_kernel"} < set(by_kernel)
    assert {name: len(variants) for name, variants in by_kernel.items() if len(variants) > 2} == {}


def test_no_memory_access_before_the_wait_for_the_previous_kernel(monkeypatch, launches):
    """These kernels may start while the previous one still runs, and they read its results."""
    options = {"page_size": 16, "lengths": (1, 4000), "sinks": True}
    _call(monkeypatch, 90, BF16, GQA, options, backward=False)
    assert [kernel.fn.__name__ for kernel, _, _ in launches] == ["decode_kernel", "merge_kernel"]
    _pointwise(monkeypatch, 90)
    for kernel, args, kwargs in launches:
        assert kwargs["launch_pdl"]
        sass = _sass(_compile(kernel, args, kwargs, 90).asm["cubin"])
        memory = [m.start() for m in re.finditer(r"\b(LDG|LDGSTS|STG|ATOMG|RED|UBLKCP)\b", sass)]
        assert "ACQBULK" in sass and sass.index("ACQBULK") < min(memory), kernel.fn.__name__
        assert sass.index("ACQBULK") < sass.index("PREEXIT") < min(memory)
