"""A user's own tile rows: written, found by dispatch, checked, and kept over versions. Without a
GPU: devices are made up.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onchip
from onchip.cli import main, tune
from onchip.core import dispatch
from onchip.core.device import DeviceInfo
from onchip.cost import make_problem
from onchip.kernels import tiles, tuned
from onchip.kernels.tuned import Measurement

GEFORCE = DeviceInfo("cuda", "NVIDIA GeForce RTX 3090", (8, 6))
SISTER = DeviceInfo("cuda", "NVIDIA A10", (8, 6))
H200 = DeviceInfo("cuda", "NVIDIA H200", (9, 0))
KEY = ("TRITON_SM80", ("forward", 128))
ROW = tiles.TRITON_SM80["forward", 128]
FASTER = ROW._replace(tile_n=32, num_warps=4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder of tables; nothing that a test loads outlives it."""
    monkeypatch.setenv("ONCHIP_TUNED", str(tmp_path))
    monkeypatch.setattr(tiles, "_measured", {})
    monkeypatch.setattr(tiles, "_hopper_device", "")
    _forget()
    yield tmp_path
    _forget()


def _forget():
    tuned.load.cache_clear()
    dispatch._plan.cache_clear()
    tiles.triton_config.cache_clear()


def _config(device, kernel="forward"):
    use = tiles.TritonUse(128, 2, device.capability, False, False, device.name)
    return tiles.triton_config(kernel, use)


def _entry(table="TRITON_SM80", key=("forward", 128), **config):
    return {"table": table, "key": list(key), "config": FASTER._asdict() | config}


def _document(*rows, **header):
    names = {"onchip": "0.0.1", "torch": "2.11.0", "triton": "3.6.0", "rows": list(rows)}
    about = {"schema": 1, "device": GEFORCE.name, "capability": [8, 6]}
    return about | names | header


def _put(folder, document, device=GEFORCE):
    path = folder / tuned.path_of(device).name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_written_row_is_used_on_its_device_alone(folder):
    path = tuned.write(GEFORCE, [Measurement(*KEY, FASTER, 1.07, 4)])
    assert path == folder / "nvidia-geforce-rtx-3090.json"
    table = tuned.load(GEFORCE)
    assert table.rows == {KEY: FASTER} and not table.ignored
    assert _config(GEFORCE) == FASTER
    assert _config(SISTER) == _config(DeviceInfo("cuda", "", (8, 6))) == ROW
    assert tuned.load(SISTER) is None
    (row,) = json.loads(path.read_text())["rows"]
    assert row["speedup"] == 1.07 and row["cells"] == 4 and row["date"]


def test_dispatch_loads_the_table_before_the_first_launch():
    tuned.write(GEFORCE, [Measurement(*KEY, FASTER, 1.07, 4)])
    problem = make_problem(4096, num_heads=4, head_dim=128, dtype=torch.bfloat16)
    dispatch.plan(problem, DeviceInfo("cpu"))
    assert _config(GEFORCE) == ROW
    dispatch.plan(problem, GEFORCE)
    assert _config(GEFORCE) == FASTER


def test_rows_of_the_hopper_kernels():
    row = tiles.HOPPER_FORWARD[64]._replace(num_stages=3)
    tuned.write(H200, [Measurement("HOPPER_FORWARD", 64, row, 1.02, 4)])
    problem = make_problem(4096, num_heads=4, head_dim=64, dtype=torch.bfloat16, causal=True)
    assert tiles.hopper_forward_of(problem) == tiles.HOPPER_FORWARD[64]
    dispatch.plan(problem, H200)
    assert tiles.hopper_forward_of(problem) == row
    assert tiles.hopper_forward_of(problem._replace(head_dim=128)) == tiles.HOPPER_FORWARD[128]


@pytest.mark.parametrize("kernel", [None, pytest.param("triton")])
def test_explain_names_the_table(kernel):
    pytest.importorskip("triton")
    q = torch.empty(64, dtype=torch.bfloat16).expand(2, 4096, 16, 64)
    name = "TRITON_SM90['forward', 64]" if kernel else "HOPPER_FORWARD[64]"
    before = str(onchip.explain(q, q, q, causal=True, on="H200", kernel=kernel))
    assert f"; row {name}\n" in before and "measured here" not in before
    rows = [Measurement("HOPPER_FORWARD", 64, tiles.HOPPER_FORWARD[64]._replace(num_stages=3))]
    row = tiles.TRITON_SM90["forward", 64]._replace(tile_n=32)
    path = tuned.write(H200, [*rows, Measurement("TRITON_SM90", ("forward", 64), row)])
    _forget()
    text = str(onchip.explain(q, q, q, causal=True, on="H200", kernel=kernel))
    assert f"; row {name}, measured here\n" in text
    assert f"  tiles       2 rows measured here, of {path}" in text


def test_a_table_survives_an_upgrade(folder):
    """Rows of another version are used if they still apply; the others are skipped, said in one
    warning, and kept in the file for the version that wrote them.
    """
    older = {name: x for name, x in FASTER._asdict().items() if name != "max_registers"}
    known = {"table": "TRITON_SM80", "key": ["dq", 64], "config": older}
    gone = _entry("TRITON_SM70"), _entry(key=("forward", 512)), _entry(swizzle=3)
    path = _put(folder, _document(known, *gone))
    with pytest.warns(UserWarning) as caught:
        assert tuned.load(GEFORCE).rows == {("TRITON_SM80", ("dq", 64)): FASTER}
    (warning,) = caught
    for said in (
        "TRITON_SM70['forward', 128]: this version has no such table to tune",
        "TRITON_SM80['forward', 512]: the table has no such row",
        "TRITON_SM80['forward', 128]: tiles have no field 'swizzle' any more",
    ):
        assert said in str(warning.message)
    tuned.write(GEFORCE, [Measurement(*KEY, FASTER, 1.1, 2)])
    rows = json.loads(path.read_text())["rows"]
    assert [x["key"] for x in rows] == [["dq", 64], ["forward", 128], ["forward", 512], [*KEY[1]]]
    tuned.write(GEFORCE, [Measurement(*KEY)])  # searched again: the package's row is as fast
    assert [x["key"] for x in json.loads(path.read_text())["rows"]].count([*KEY[1]]) == 1


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("[" * 100_000, "recursion"),
        ("{", "Expecting"),
        ("[]", "not a table of tile rows"),
        (_document(schema=2), "its schema is 2, and this version reads 1"),
        (_document(colour="red"), "unknown field 'colour'"),
        ({"schema": 1}, "lacks the field 'capability'"),
        (_document(device="NVIDIA A10"), "it is for 'NVIDIA A10', not for 'NVIDIA GeForce"),
        (_document(capability=[8, 9]), "it is for"),
        (_document(rows={}), "its rows are not a list"),
        (_document(*[_entry()] * 1001), "at most 1000"),
        (" " * (1 << 20) + "{}", "more than 1048576"),
    ],
    ids=lambda x: x if isinstance(x, str) and len(x) < 60 else "",
)
def test_a_file_that_cannot_be_used_is_a_warning(folder, document, said):
    _put(folder, document)
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert tuned.load(GEFORCE) is None
    assert said in str(caught[0].message) and str(folder) in str(caught[0].message)
    assert _config(GEFORCE) == ROW


def test_a_folder_in_place_of_the_file_is_a_warning(folder):
    tuned.path_of(GEFORCE).mkdir()
    with pytest.warns(UserWarning, match="is not a regular file"):
        assert tuned.load(GEFORCE) is None


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (_entry(tile_n=48), "tile_n=48 is not possible"),
        (_entry(tile_n=256), "tile_n=256 is not possible"),
        (_entry(tile_m=0), "tile_m=0 is not possible"),
        (_entry(tile_m=True), "tile_m=True is not possible"),
        (_entry(num_warps="8"), "num_warps='8' is not possible"),
        (_entry(num_stages=99), "num_stages=99 is not possible"),
        (_entry(max_registers=1000), "max_registers=1000 is not possible"),
        (_entry(tile_n=128, num_stages=3), "take 131072 bytes of shared memory"),
        (_entry() | {"speedup": "fast"}, "speedup is 'fast'"),
        (_entry() | {"cells": -1}, "cells is -1"),
        (_entry() | {"note": "x"}, "a row has other fields"),
        (_entry() | {"key": []}, "neither the name of a table nor a key"),
        (_entry("TRITON_ROTATE", (128,)), "no such table to tune"),
        ([], "a row has other fields"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_used_is_skipped(folder, entry, said):
    good = {"table": "TRITON_SM80", "key": ["dq", 64], "config": FASTER._asdict()}
    _put(folder, _document(entry, good))
    with pytest.warns(UserWarning, match="rows of .* are ignored") as caught:
        assert list(tuned.load(GEFORCE).rows) == [("TRITON_SM80", ("dq", 64))]
    assert said in str(caught[0].message)


@pytest.mark.parametrize(
    ("table", "key", "change"),
    [
        ("HOPPER_FORWARD", 256, {"q_stages": 2}),  # the output leaves through the queries' memory
        ("HOPPER_FORWARD", 64, {"consumer_regs": 240}),  # of two consumers
        ("HOPPER_FORWARD", 128, {"num_stages": 4}),  # 192 kB of keys and values, 64 kB of queries
        ("HOPPER_BACKWARD", 128, {"tile_m": 128}),
        ("HOPPER_BACKWARD", 128, {"dout_stages": 3}),  # named barriers
        ("HOPPER_FORWARD", 64, {"rescale": "never"}),
    ],
)
def test_rows_of_the_hopper_kernels_are_consistent(folder, table, key, change):
    row = getattr(tiles, table)[key]._replace(**change)
    tuned.write(H200, [Measurement(table, key, row)])
    with pytest.warns(UserWarning, match="are ignored"):
        assert tuned.load(H200).rows == {}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
)


@pytest.mark.slow
@given(st.sampled_from(tuned.ROW), json_values)
def test_no_value_of_a_row_raises(field, value):
    document = json.dumps(_document(_entry() | {field: value}))
    table = tuned.parse(document.encode(), tuned.path_of(GEFORCE), GEFORCE)
    assert len(table.rows) + len(table.ignored) == 1


def test_off_ignores_every_table(monkeypatch):
    tuned.write(GEFORCE, [Measurement(*KEY, FASTER)])
    monkeypatch.setenv("ONCHIP_TUNED", "off")
    assert tuned.path_of(GEFORCE) is None and tuned.load(GEFORCE) is None
    with pytest.raises(ValueError, match="ONCHIP_TUNED=off"):
        tuned.write(GEFORCE, [])


def test_a_file_of_a_newer_version_is_set_aside_not_overwritten(folder):
    path = _put(folder, _document(schema=2))
    tuned.write(GEFORCE, [Measurement(*KEY, FASTER)])
    assert json.loads((folder / f"{path.name}.old").read_text())["schema"] == 2
    assert tuned.load(GEFORCE).rows == {KEY: FASTER}


def test_the_command_asks_for_its_folder_before_it_measures(monkeypatch, capsys):
    monkeypatch.setenv("ONCHIP_TUNED", "off")
    assert main(["tune", "--write"]) == 2
    assert "turns tuned tables off" in capsys.readouterr().err


def test_the_default_folder_is_that_of_the_users_configuration(monkeypatch, tmp_path):
    monkeypatch.delenv("ONCHIP_TUNED")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    expected = tmp_path / "onchip" / "tuned" / "gfx942.json"
    assert tuned.path_of(DeviceInfo("hip", "gfx942")) == expected
    assert tuned.path_of(DeviceInfo("cpu")) is None


def test_a_trial_starts_from_the_rows_of_the_package():
    tuned.write(GEFORCE, [Measurement("TRITON_SM80", ("dq", 128), FASTER)])
    tuned.load(GEFORCE)
    package_row = tiles.TRITON_SM80["dq", 128]
    with tiles.trial(*KEY, FASTER):
        assert _config(GEFORCE) == FASTER and _config(GEFORCE, "dq") == package_row
    assert _config(GEFORCE) == ROW and _config(GEFORCE, "dq") == FASTER


def test_every_table_that_is_searched_can_be_written():
    searched = {t.name for c in ((9, 0), (8, 6), (12, 0), None) for t in tune.tables(c)}
    assert searched == set(tuned.TUNABLE)


@pytest.mark.parametrize("device", [GEFORCE, H200, DeviceInfo("cuda", "A100", (8, 0))], ids=str)
def test_every_row_of_the_package_could_be_a_users(device):
    for knob in tune.knobs(device.capability):
        entry = tuned._entry(Measurement(knob.table.name, knob.key, knob.row))
        assert tuned._read_row(json.loads(json.dumps(entry)), device)[1] == knob.row
