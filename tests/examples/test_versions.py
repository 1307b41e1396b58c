"""The four versions give the same attention: interpreted, compiled for Hopper, and run there."""

import ast
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

import onchip
from benchmarks.versions import FOLDER, load
from onchip.testing import assert_accurate, make_qkv, rmse
from tests.interpreted import interpreted

triton = pytest.importorskip("triton")

PORTABLE, HOPPER = ["v1", "v2"], ["v2_gluon", "v3", "v4"]
SHARED_BYTES = 232448
V4_ORDER = {"dynamic": False, "section": 1}


def inputs(seqlen, device="cpu", **shape):
    shape = {"num_heads": 2, "head_dim": 64, "dtype": torch.bfloat16} | shape
    return make_qkv(2, seqlen, device=device, **shape)


@pytest.mark.parametrize("name", ["v1", "v2", "v3", "v4"])
def test_at_most_150_lines_of_code(name):
    """Docstrings, comments and blank lines aside."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.stmt):
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            lines |= set(range(node.lineno, last + 1))
    assert 50 < len(lines) <= 150, len(lines)


@interpreted
@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [1, 63, 129, 300])
def test_interpreted(name, causal, seqlen):
    """fp16, because the interpreter knows no bf16."""
    qkv = inputs(seqlen, dtype=torch.float16, distribution="outlier")
    assert_accurate(load(name).attention, *qkv, causal=causal)


@interpreted
@pytest.mark.parametrize("name", PORTABLE)
def test_interpreted_with_other_strides(name):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(70, head_dim=128))
    q, k, v = q.half(), k.half(), v.half()
    assert_accurate(load(name).attention, q, k, v, causal=True)


def compiled(kernel, args, kwargs):
    """The kernel for sm_90, specialised as this launch would."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    short |= {torch.int32: "i32"}
    signature, constants, aligned = {}, {}, {}
    for i, (param, value) in enumerate(zip(kernel.params, args, strict=True)):
        if param.is_constexpr:
            signature[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name], aligned[(i,)] = f"*{short[value.dtype]}", ALIGNED
        elif hasattr(value, "block_shape"):
            inner = f"{short[value.base.dtype]}{list(value.block_shape)},{value.layout!r}"
            signature[param.name] = f"tensordesc<{inner}>"
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature, constants, aligned)
    options = kwargs | {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


ALIGNED = [["tt.divisibility", 16]]
MAY_SPILL = {"v1": 0.1, "v2": 0.01}  # v1 holds o and what is added to it at once


def instructions(cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", sass)


TMA = ("v2_warps", "v3", "v4")
QUICK = [("v1", 64, True, {}), ("v2", 128, True, {}), ("v3", 128, True, {}), ("v4", 128, True, {})]
SLOW = [
    ("v1", 128, False, {}),
    ("v2", 64, False, {}),
    ("v2_gluon", 128, True, {"tma": False}),
    ("v2_gluon", 64, False, {"tma": True}),
    ("v2_warps", 128, True, {"split_keys": True}),
    ("v2_warps", 64, False, {"normalise": True}),
    ("v2_warps", 128, False, {}),
    ("v3", 64, False, {}),
    ("v3", 128, False, {"overlap": False, "pingpong": False}),
    ("v4", 64, False, {}),
    ("v4", 128, True, {"lazy": False, "poly": False} | V4_ORDER),
    ("v4", 64, True, {"poly": False}),
    ("v4", 128, False, {"lazy": False}),
]


@pytest.mark.parametrize(
    ("name", "head_dim", "causal", "options"),
    QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_compiled_for_hopper(launches, name, head_dim, causal, options):
    """Fits in shared memory, multiplies with warpgroups, and spills nothing, but for the kernels in
    which Triton decides about registers.
    """
    load(name).attention(*inputs(300, head_dim=head_dim), causal, **options)
    ((kernel, args, kwargs),) = launches
    result = compiled(kernel, args, kwargs)
    code = instructions(result.asm["cubin"])
    assert result.metadata.shared <= SHARED_BYTES
    spilled = code.count("LDL") + code.count("STL")
    assert "HGMMA" in code and spilled <= MAY_SPILL.get(name, 0.0) * len(code)
    assert ("UTMALDG" in code) == (name in TMA or options.get("tma", False))


@pytest.mark.hopper
class TestOnHopper:
    @pytest.mark.parametrize("name", PORTABLE + HOPPER)
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("seqlen", [1, 63, 128, 799, 1023])
    def test_accurate(self, name, head_dim, causal, seqlen):
        """v4 without its lazy maximum, which outliers tell from an exact one: see below."""
        attend = partial(load(name).attention, **({"lazy": False} if name == "v4" else {}))
        for dtype in (torch.bfloat16, torch.float16):
            qkv = inputs(seqlen, "cuda", head_dim=head_dim, dtype=dtype, distribution="outlier")
            assert_accurate(attend, *qkv, causal=causal)

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("causal", [False, True])
    def test_a_lazy_maximum_is_accurate(self, head_dim, causal):
        qkv = inputs(1023, "cuda", head_dim=head_dim)
        assert_accurate(load("v4").attention, *qkv, causal=causal)

    @pytest.mark.parametrize("options", [{}, {"normalise": True}, {"split_keys": True}])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_work_of_warps(self, options, head_dim):
        attend = partial(load("v2_warps").attention, **options)
        for seqlen, causal in ((63, False), (799, True), (1023, False)):
            qkv = inputs(seqlen, "cuda", head_dim=head_dim)
            assert_accurate(attend, *qkv, causal=causal)

    def test_without_tma(self):
        attend = lambda q, k, v, causal: load("v2_gluon").attention(q, k, v, causal, tma=False)
        for head_dim in (64, 128):
            qkv = inputs(799, "cuda", head_dim=head_dim)
            assert_accurate(attend, *qkv, causal=True)

    @pytest.mark.parametrize("causal", [False, True])
    def test_overlap_and_pingpong_change_no_bit(self, causal):
        q, k, v = inputs(2047, "cuda", num_heads=40, head_dim=128)
        out, lse = load("v3").attention(q, k, v, causal)
        others = [("v3", {"overlap": False, "pingpong": False}), ("v3", {"pingpong": False})]
        others += [("v4", {"lazy": False, "poly": False} | V4_ORDER)]
        others += [("v4", {"lazy": False, "poly": False})]
        for name, options in others:
            other, other_lse = load(name).attention(q, k, v, causal, **options)
            assert torch.equal(out, other) and torch.equal(lse, other_lse), (name, options)

    @pytest.mark.parametrize("name", HOPPER)
    def test_races_show_in_repeats(self, name):
        q, k, v = inputs(1999, "cuda", num_heads=30)
        out, lse = load(name).attention(q, k, v, True)
        for _ in range(100):
            again, again_lse = load(name).attention(q, k, v, True)
            assert torch.equal(out, again) and torch.equal(lse, again_lse)

    @pytest.mark.parametrize("causal", [False, True])
    def test_v4_rescales_when_it_must(self, causal):
        """Keys are walked from the last to the first: let the first score highest. Then one key has
        nearly all the weight of many a row, and a P above 1 is rounded where a P of 1 is not.
        """
        q, k, v = inputs(1500, "cuda", head_dim=128)
        k = k * torch.linspace(6, 0.01, 1500, device="cuda")[:, None, None].to(k.dtype)
        exact = onchip.attention(*(t.double().cpu() for t in (q, k, v)), causal=causal).cuda()
        error = lambda lazy: rmse(load("v4").attention(q, k, v, causal, lazy=lazy)[0], exact)
        assert_accurate(partial(load("v4").attention, lazy=False), q, k, v, causal=causal)
        assert error(lazy=True) <= 1.25 * error(lazy=False)
