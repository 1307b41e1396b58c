"""The search for better tiles, without a GPU: a capture is as fast as the row it is made with."""

import json
from functools import partial

import pytest
import torch

from onchip import quant
from onchip.cli import main, tune
from onchip.cli.bench import gpu
from onchip.cli.bench.gpu import Capture
from onchip.cli.bench.harness import Inaccurate, Session
from onchip.cli.tune import CURRENT, Knob, Search, Table
from onchip.core.device import DeviceInfo
from onchip.kernels import tiles
from onchip.testing import make_qkv

CPU = torch.device("cpu")
TRITON = Table("TRITON_SM90", "triton", lengths=(64, 128))


@pytest.fixture
def knob():
    return Knob(TRITON, ("forward", 64))


@pytest.fixture
def stand_ins(monkeypatch, knob):
    """A tile of 32 keys takes half of the time; with 8 warps the answer is wrong."""

    def capture_calls(candidate, backward):
        row = tiles.TRITON_SM90[knob.key]
        return Capture(lambda: None, 1, 0.5 if row.tile_n == 32 else 1.0)

    monkeypatch.setattr(gpu, "capture_calls", capture_calls)
    monkeypatch.setattr(gpu, "replay_in_order", lambda captures: [x.ms for x in captures])
    monkeypatch.setattr(gpu, "still_there", lambda device: None)
    monkeypatch.setattr(gpu, "draw_sets", lambda case, device: [gpu.draw(case, device)])
    monkeypatch.setattr(gpu, "TOKENS", 64)

    def check(self, device):
        row = tiles.TRITON_SM90[knob.key]
        if row.num_warps == 8:
            raise AssertionError("outside the accuracy rule")

    monkeypatch.setattr(Search, "_check_accuracy", check)


def test_a_row_is_tried_inside_its_block_only():
    use = tiles.TritonUse(64, 2, (9, 0), False, False)
    before = tiles.triton_config("forward", use)
    other = before._replace(tile_n=16)
    with pytest.raises(RuntimeError), tiles.trial("TRITON_SM90", ("forward", 64), other):
        assert tiles.triton_config("forward", use) is other
        raise RuntimeError
    assert tiles.triton_config("forward", use) is before
    assert tiles.TRITON_SM90["forward", 64] is before


def test_the_fastest_right_row_wins(stand_ins, knob):
    search, session = Search(knob), Session(device=CPU)
    for _, step in search.steps(session):
        session.rows += step()
    assert tiles.TRITON_SM90["forward", 64] == search.right[CURRENT]
    assert search.right[search.best].tile_n == 32
    assert search.gains()[search.best] == pytest.approx(2.0)
    assert all("num_warps=8" in name for name in search.refused) and search.refused
    assert not any("num_warps=8" in name for name in search.right)
    (line,) = tune.lines([search])
    assert line.startswith("TRITON_SM90['forward', 64] = TritonConfig(tile_m=128, tile_n=32")
    cells = {(row["mask"], row["seqlen"]) for row in session.rows}
    assert cells == {("none", 64), ("none", 128), ("causal", 64), ("causal", 128)}
    assert all(row["config"]["tile_n"] == 32 for row in session.rows if row["ratio"] > 1.5)


def test_the_winner_is_written_for_the_device(stand_ins, knob, tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_TUNED", str(tmp_path))
    device = DeviceInfo("cuda", "NVIDIA H100", (9, 0))
    search, session = Search(knob, 1), Session(device=CPU)
    for _, step in search.steps(session):
        step()
    (row,) = json.loads(tune.write([search], device).read_text())["rows"]
    assert row["table"] == "TRITON_SM90" and row["key"] == ["forward", 64]
    assert row["config"]["tile_n"] == 32 and row["cells"] == 4
    assert row["speedup"] == pytest.approx(2.0)
    search.ratios = {CURRENT: search.ratios[CURRENT]}  # searched again, and nothing was faster
    assert json.loads(tune.write([search], device).read_text())["rows"] == []


def test_a_gain_within_the_noise_changes_nothing(knob):
    search = Search(knob, right=dict.fromkeys((CURRENT, "a", "b"), knob.row))
    even = gpu.Paired(1.0, 0.99, 1.01)
    search.ratios = {CURRENT: [even], "a": [gpu.Paired(1.2, 0.9, 1.4)], "b": [even]}
    assert search.best == CURRENT and tune.lines([search]) == ["# every row of tiles.py is kept"]
    search.ratios["b"] = [gpu.Paired(1.02, 1.005, 1.03)]
    assert search.best == "b"


def test_a_candidate_that_cannot_be_captured_is_out(stand_ins, monkeypatch, knob):
    def capture_calls(candidate, backward):
        if tiles.TRITON_SM90[knob.key].tile_n == 32:
            raise RuntimeError("out of resources")
        return Capture(lambda: None, 1, 1.0)

    search, session = Search(knob, 1), Session(device=CPU)
    steps = [step for _, step in search.steps(session)]
    for step in steps[:2]:
        step()
    monkeypatch.setattr(gpu, "capture_calls", capture_calls)  # it fails in its second cell
    assert steps[2]() and search.best == CURRENT
    assert search.refused["tile_n=32"] == "RuntimeError: out of resources"
    assert "tile_n=32" in search.ratios and "tile_n=32" not in search.gains()


def test_a_present_row_that_is_wrong_ends_the_search(stand_ins, monkeypatch, knob):
    def check(self, device):
        raise AssertionError("wrong")

    monkeypatch.setattr(Search, "_check_accuracy", check)
    search = Search(knob)
    with pytest.raises(AssertionError):
        search.check(Session(device=CPU))
    assert search.time(Session(device=CPU), next(knob.cells(True))) == []


@pytest.mark.parametrize("most", [1, 2])
def test_candidates_differ_in_few_fields(most):
    for knob in tune.knobs((9, 0)):
        rows = tune.candidates(knob, most)
        assert rows[CURRENT] == knob.row and len(set(rows.values())) == len(rows) > 1
        for row in rows.values():
            pairs = zip(row._fields, row, knob.row, strict=True)
            changed = {name for name, a, b in pairs if a != b and "regs" not in name}
            assert len(changed) <= most
        if knob.row[0] == 0:
            assert all(row[0] == 0 for row in rows.values())  # tile_m of a decode follows the call


def test_every_table_is_searched_on_the_devices_that_use_it():
    """A new table of tiles.py is a line of tune.py, or a name here."""
    names = lambda *capability: {k.table.name for k in tune.knobs(capability or None)}
    tables = {name for name, x in vars(tiles).items() if isinstance(x, dict) and name.isupper()}
    tables = {name for name in tables if name.startswith(("HOPPER_", "TRITON_"))}
    assert names(9, 0) | names(8, 0) | names(12, 0) | names() == tables - {
        "TRITON_CHUNK",
        "TRITON_COLUMNS",
        "TRITON_WIDE",
        "TRITON_WIDE_AMD",
        "TRITON_FIXED_ORDER",
        "TRITON_CHUNK_AMD",
        "TRITON_DECODE_99KB",
        "TRITON_DECODE_AMD",
        "TRITON_KV8_AMD",
        "TRITON_KV8",
        "TRITON_ROTATE",
        "TRITON_TRANSPOSE",
        "TRITON_PRODUCT",
        "TRITON_EXPERTS",
        "TRITON_EXPERTS_SM90",
        "TRITON_EXPERTS_FP32",
        "TRITON_QUERIES",
        "TRITON_TANGENT",
        "TRITON_TANGENT_SM90",
        "TRITON_TANGENT_MODIFIED",
        "TRITON_TANGENT_AMD",
        "TRITON_TANGENT_AMD_MODIFIED",
        "TRITON_TANGENT_FP32",
        "HOPPER_FORWARD_MLA",
        "HOPPER_FORWARD_PAGED",
        "HOPPER_FORWARD_SPARSE",
        "HOPPER_DENSE_KEYS",
        "HOPPER_DECODE_STAGES",
        "HOPPER_DECODE_STAGES_DENSE",
        "HOPPER_SPLIT_KEYS",
    }
    assert "TRITON_SM80" in names(8, 0) and not {"HOPPER_FORWARD", "TRITON_SM90"} & names(8, 0)
    chosen = tune.knobs((9, 0), ["triton"], ["backward"], [128])
    assert {k.parts[0] for k in chosen} == {"dkdv", "dq"} and {k.head_dim for k in chosen} == {128}


@pytest.mark.parametrize("config", tune.VARIED)
def test_varied_fields_are_fields_of_the_config(config):
    """A field that tiles.py renames must be renamed in VARIED, or it is no longer searched."""
    assert set(tune.VARIED[config]) <= set(getattr(tiles, config)._fields)


def test_a_key_has_its_expression_and_head_dim():
    knob = Knob(Table("HOPPER_FORWARD", "hopper", "forward"), 64)
    assert (str(knob), knob.head_dim) == ("HOPPER_FORWARD[64]", 64)


def test_rows_of_8_bits_vary_in_what_their_kernel_knows():
    (table,) = [t for t in tune.tables((9, 0)) if t.name == "HOPPER_FP8"]
    rows = tune.candidates(Knob(table, 128), 1)
    assert {row.tile_n for row in rows.values()} == {128}
    assert {row.consumers for row in rows.values()} == {2, 3}
    assert not any(name.startswith(("delay_pv_wait", "rescale", "pingpong")) for name in rows)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_pv16"])
def test_rows_of_8_bits_are_checked_against_their_recipe(precision):
    q, k, v = make_qkv(1, 40, 150, num_heads=2, head_dim=64)
    check = partial(tune._assert_follows_recipe, q=q, k=k, v=v, precision=precision, causal=True)

    def attend(q, k, v, *, precision, causal, out_dtype, noise=0.0):
        out, _ = quant.attend(quant.recipes.RECIPES[precision], q, k, v, causal=causal)
        return out.to(out_dtype) + noise * torch.randn_like(out, dtype=out_dtype)

    check(attend)
    with pytest.raises(Inaccurate, match="the recipe's allows"):
        check(partial(attend, noise=0.1))


def test_queries_do_not_arrive_where_the_output_leaves():
    knob = Knob(Table("HOPPER_FORWARD", "hopper", "forward", teams=True), 256)
    rows = tune.candidates(knob, 2).values()
    assert knob.row.out_in_q and all(row.q_stages == 1 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_sentence(capsys):
    assert main(["tune", "--quick"]) == 2
    assert capsys.readouterr().err.startswith("onchip: tile sizes are measured on the GPU")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_small_search(tmp_path, capsys, monkeypatch):
    """One row of one table: all of them are minutes of compiling."""
    monkeypatch.setattr(tune, "tables", lambda capability: (TRITON._replace(lengths=(2048,)),))
    path = tmp_path / "tune.json"
    chosen = ["--kernel", "triton", "--pass", "forward", "--head-dims", "64"]
    assert main(["tune", "--quick", "--json", str(path), *chosen]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["candidate"] for row in rows} > {CURRENT}
    assert "TRITON_SM90['forward', 64]" in capsys.readouterr().out
