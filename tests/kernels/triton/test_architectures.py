"""Every GPU: the portable kernels compile for it and fit, and the committed table says so.

Each architecture compiles the calls with the largest tiles; `make slow ALL=1` compiles all. The
table is benchmarks/results/architectures.json, written by `python -m benchmarks architectures`.
"""

import json
from pathlib import Path

import pytest
import torch

import onchip
from onchip.core import device as core_device
from onchip.core import dispatch
from onchip.core.device import DeviceInfo, device_info
from onchip.cost import make_problem
from onchip.kernels import tiles

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("interpreting and compiling cannot share a process", allow_module_level=True)

from benchmarks import architectures  # noqa: E402
from benchmarks.architectures import CASES, LARGEST, compile_case  # noqa: E402
from benchmarks.cross_compile import ARCHITECTURES, compile_launch, device_of  # noqa: E402

RESULTS = Path(__file__).parents[3] / "benchmarks/results/architectures.json"
TABLE = json.loads(RESULTS.read_text(encoding="utf-8"))
KEY = ("bench", "mask", "head_dim", "pass")
ROWS = {tuple(row[name] for name in KEY): row for row in TABLE["rows"]}
COLUMNS = ("value", "registers", "spills", "threads", "tile_m", "tile_n", "num_stages")
# Decoding has one large kernel, attention three: the first is compiled in every run. sm_90, sm_80
# and sm_100 are also compiled by test_compile.py.
QUICK = [(LARGEST[1], arch) for arch in ("sm_86", "sm_120", "gfx942", "gfx950")]
SLOW = [(LARGEST[1], arch) for arch in ("sm_89", "sm_121")]
SLOW += [(LARGEST[0], arch) for arch in ("sm_86", "sm_120", "gfx942")]
ALL = [(case, arch) for case in CASES for arch in case.archs]
ALL = [pair for pair in ALL if pair not in QUICK + SLOW]


def _params(pairs, *marks):
    return [pytest.param(*pair, id=f"{pair[1]}-{pair[0].key}", marks=marks) for pair in pairs]


VARIANTS = _params(QUICK) + _params(SLOW, pytest.mark.slow)
VARIANTS += _params(ALL, pytest.mark.slow, pytest.mark.all)


@pytest.mark.parametrize(("case", "arch"), VARIANTS)
def test_kernels_fit_and_the_committed_table_is_current(case, arch):
    """With another Triton than the table's, they fit: registers differ, and its older tools cannot
    read the code of every GPU.
    """
    if triton.__version__ != TABLE["meta"]["triton"]:
        shared = [compile_launch(x, arch).metadata.shared for x in case.launches(arch)]
        assert max(shared) <= device_of(arch).shared_bytes
        return
    for row in compile_case(case, arch):
        committed = ROWS[tuple(row[name] for name in KEY)]
        assert {name: row[name] for name in COLUMNS} == {name: committed[name] for name in COLUMNS}


def test_the_committed_table_has_every_case():
    assert {(row["bench"], row["mask"], row["head_dim"]) for row in TABLE["rows"]} == {
        (arch, case.name, case.head_dim) for case in CASES for arch in case.archs
    }


def test_everything_in_the_committed_table_fits():
    assert all(row["value"] <= row["limit_bytes"] for row in TABLE["rows"])
    for row in TABLE["rows"]:
        assert row["limit_bytes"] == device_of(row["bench"]).shared_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_table_has_the_tiles_that_calls_choose(case):
    """For every architecture, without compiling: a changed tile table makes the table stale."""
    for arch in case.archs:
        for launch in case.launches(arch):
            tile = architectures.tile_of(launch)
            name = architectures.name_of(launch)
            committed = ROWS[arch, case.name, case.head_dim, name]
            assert {field: committed[field] for field in tile} == tile


@pytest.mark.parametrize(
    ("device", "table"),
    [
        (DeviceInfo("cuda", "", (8, 0)), "TRITON_SM80"),
        (DeviceInfo("cuda", "", (8, 6)), "TRITON_SM80"),
        (DeviceInfo("cuda", "", (8, 9)), "TRITON_SM80"),
        (DeviceInfo("cuda", "", (9, 0)), "TRITON_SM90"),
        (DeviceInfo("cuda", "", (10, 0)), "TRITON_SM90"),
        (DeviceInfo("cuda", "", (12, 0)), "TRITON_SM120"),
        (DeviceInfo("cuda", "", (12, 1)), "TRITON_SM120"),
        (DeviceInfo("hip", "gfx942"), "TRITON_AMD"),
        (DeviceInfo("hip", "gfx950"), "TRITON_AMD"),
    ],
    ids=str,
)
def test_the_table_of_a_device(device, table):
    use = tiles.TritonUse(128, 2, device.capability, False, False)
    assert tiles.triton_table("forward", use) == table


def test_a_turing_gpu_is_refused_in_a_sentence_and_served_by_torch(monkeypatch):
    problem = make_problem(4096, num_heads=4, head_dim=64, dtype=torch.float16)
    turing = DeviceInfo("cuda", "Tesla T4", (7, 5))
    plan = dispatch.plan(problem, turing)
    assert plan.kernel == "tiled"
    assert plan.reasons["triton"] == "needs compute capability 8.0 or later, found 7.5"
    assert "hopper" in plan.reasons
    with pytest.raises(onchip.UnsupportedError, match=r"needs compute capability 8.0 .* found 7.5"):
        dispatch.plan(problem, turing, "triton")


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((12, 1), True)])
def test_no_other_triton_kernel_runs_on_a_turing_gpu(monkeypatch, capability, runs):
    """Sampling, norms, writes to the cache and merges ask has_triton, and fall back to torch."""

    class Properties:
        name, (major, minor) = "GPU", capability

    monkeypatch.setattr(core_device.torch.cuda, "get_device_properties", lambda _: Properties)
    info = device_info.__wrapped__(torch.device("cuda", 0))
    assert info.capability == capability and info.has_triton == runs


def test_shared_memory_by_device():
    kb = {arch: device_of(arch).shared_bytes // 1024 for arch in ARCHITECTURES}
    assert kb == {
        **{"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227},
        **{"sm_120": 99, "sm_121": 99, "gfx942": 64, "gfx950": 160},
    }
    assert DeviceInfo("hip", "gfx90a").shared_bytes == 64 * 1024
