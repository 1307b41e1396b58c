"""Kernels with score_mod, cross-compiled: they fit, use the tensor cores and hardly spill,
and one program serves every length of the tensors that score_mod indexes.
"""

import re

import pytest
import torch

from onchip.score_mods import trace

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("interpreting and compiling cannot share a process", allow_module_level=True)

from benchmarks.cross_compile import (  # noqa: E402
    as_if_on,
    attend,
    capability_of,
    compile_launch,
    read_resources,
)
from tests.kernels.triton.test_compile import SHARED_BYTES, variants  # noqa: E402

LENGTHS = (160, 200)
SLOPES, TABLE, BIAS = torch.rand(2), torch.rand(2, 399), torch.rand(2, *LENGTHS)
FUNCTIONS = {
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "relative": lambda s, b, h, q, k: s + TABLE[h, q - k + 199],
    "bias": lambda s, b, h, q, k: s + BIAS[h, q, k],
    "shared": lambda s, b, h, q, k: s + SLOPES[h // 2] + BIAS[h, q // 16, 3] * BIAS[0, 1, k % 7],
}


# The exceptions, by reports of 2026-11-19: pointers of a tile of bias take two registers each.
# Instructions with Triton 3.6 (3.9: none), and vector registers with 3.9 (3.6: none).
SPILLS = {("sm_80", "bias", "forward_kernel"): 4, ("gfx942", "bias", "dkdv_kernel"): 5}


def _call(arch, function, head_dim=64, lengths=LENGTHS, **options):
    options |= {"causal": True, "score_mod": trace(function), "lengths": lengths}
    with as_if_on(arch):
        attend(torch.bfloat16, {"head_dim": head_dim, "num_heads": 2}, options)


QUICK = [("sm_90", 64, "relative")]
SLOW = [(arch, 64, name) for name in FUNCTIONS for arch in ("sm_80", "sm_90", "gfx942")]
SLOW += [("sm_90", 128, "alibi"), ("sm_80", 128, "relative"), ("sm_90", 256, "softcap")]
VARIANTS = QUICK + [case for case in SLOW if case not in QUICK]


@pytest.mark.parametrize(("arch", "head_dim", "name"), variants(VARIANTS, quick=1))
def test_kernels_fit_and_spill_nothing(launches, arch, head_dim, name):
    _call(arch, FUNCTIONS[name], head_dim)
    names = [launch.name for launch in launches]
    assert names[0] == "forward_kernel" and {"dkdv_kernel", "dq_kernel"} <= {*names}
    assert ("dcaptured_kernel" in names) == (name != "softcap")
    for launch in launches:
        if launch.name == "delta_kernel":
            continue
        compiled = compile_launch(launch, arch)
        assert compiled.metadata.shared <= SHARED_BYTES[arch], launch.name
        allowed = SPILLS.get((arch, name, launch.name), 0)
        if capability_of(arch) is None:  # it spills scalar registers, also without score_mod
            (spills,) = re.findall(r"\.vgpr_spill_count: +(\d+)\n", compiled.asm["amdgcn"])
            assert int(spills) <= allowed, launch.name
        else:
            assert read_resources(compiled).spills <= allowed, launch.name
            assert "mma" in compiled.asm["ptx"], launch.name


def test_constant_tensors_have_no_launch(launches):
    _call("sm_90", FUNCTIONS["relative"], captured_is_constant=True)
    assert [x.name for x in launches] == [f"{n}_kernel" for n in ("forward", "delta", "dkdv", "dq")]


@pytest.mark.parametrize(("seqlen_k", "first"), [(200, 0), (203, 0), (200, 3)])
def test_rows_are_loaded_by_vectors_where_they_are_aligned(launches, seqlen_k, first):
    """Rows of bf16: not if their length is no multiple of 8, nor behind `first` elements of another
    tensor in the same memory. A vector would be misaligned there.
    """
    bias, before = torch.rand(2, 160, seqlen_k).bfloat16(), torch.rand(first).bfloat16()
    function = lambda s, b, h, q, k: s + (before[h] if first else 0) + bias[h, q, k]
    _call("sm_90", function, lengths=(160, seqlen_k), captured_is_constant=True)
    (forward,) = (launch for launch in launches if launch.name == "forward_kernel")
    ptx = compile_launch(forward, "sm_90").asm["ptx"]
    singles = len(re.findall(r"ld\.global\.b16", ptx))
    assert singles == 0 if (seqlen_k, first) == (200, 0) else singles >= 64


def test_other_lengths_take_the_same_program(launches):
    """Arguments that Triton specialises on are equal: constants, and which arguments are None."""
    for length in (200, 333):
        table = torch.rand(2, 2 * length)
        function = lambda s, b, h, q, k, table=table: s + table[h, q - k]
        _call("sm_90", function, lengths=(length, length))
    assert len(launches) % 2 == 0
    half = len(launches) // 2
    for one, other in zip(launches[:half], launches[half:], strict=True):
        assert one.kernel is other.kernel and one.kwargs == other.kwargs
        missing = [[x is None for x in launch.args] for launch in (one, other)]
        assert missing[0] == missing[1]
        names = one.kernel.arg_names
        sizes = [i for i, name in enumerate(names) if name.startswith("size_")]
        assert all(one.kernel.params[i].do_not_specialize for i in sizes)
