"""Host time, measured without a GPU: the clock and the queue are stand-ins."""

import itertools

import pytest
import torch

import onchip
from benchmarks import host
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, RowRefused, Session, check_thresholds

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch):
    for name in ("synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


def test_jobs_take_turns_and_the_queue_is_emptied_before_each():
    log = []
    jobs = {name: (lambda name=name: log.append(name)) for name in "ab"}
    times = host.call_times(jobs, 3, calls=2, wait=lambda: log.append("."))
    assert "".join(log) == ".aa.bb.bb.aa.aa.bb." and [len(x) for x in times.values()] == [3, 3]


def test_a_round_is_the_median_of_its_calls():
    """One call that was interrupted does not count."""
    spent = itertools.cycle([10e-6, 10e-6, 900e-6])
    now = [0.0]

    def call():
        now[0] += next(spent)

    times = host.call_times({"a": call}, 4, calls=3, wait=lambda: None, clock=lambda: now[0])
    assert times["a"] == [pytest.approx(10.0)] * 4


def test_a_call_that_synchronises_gets_no_row(no_gpu):
    def call():
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RowRefused, match="synchronises"):
        host.check_no_sync(call)


@pytest.mark.parametrize("bench", host.PASSES)
def test_every_pass_gives_a_row(no_gpu, bench):
    way = "backward" if bench == "host backward" else "forward"
    backward = way == "backward"
    case = Case(bench, "causal", torch.bfloat16, 16, 63, num_heads=2, backward=backward, way=way)
    (row,) = host.measure(Session(device=CPU, quick=True), case, None)
    assert row["value"] > 0 and row["peers"]["sdpa"] > 0 and row["error"] > 0
    assert (row["bench"], row["kernel"], row["unit"]) == (bench, "aten_cpu", "us")


def test_recording_records_and_the_other_does_not():
    inputs = gpu.draw(Case("host", "none", torch.float32, 8, 5, num_heads=1, backward=True), CPU)
    out = {bench: host.job(bench, onchip.attention, inputs)() for bench in host.PASSES}
    assert not out["host"].requires_grad and out["host grad"].requires_grad
    assert len(out["host backward"]) == 3


def test_the_thresholds_are_those_of_a_call():
    row = lambda bench, us: {"bench": bench, "value": us, "unit": "us"}
    rows = [row("host", 59.0), row("host grad", 91.0), row("host backward", 500.0)]
    assert [v.ok for v in check_thresholds(rows, host.THRESHOLDS)] == [True, False]


def test_the_breakdown_finds_the_slow_part():
    def slow():
        return sum(range(2000))

    def call():
        return slow()

    rows = host.breakdown(call, 20)
    assert "sum" in rows[0].where and rows[0].times == 1.0
    whole = next(row for row in rows if row.where.endswith(" call"))
    assert whole.all_us >= rows[0].own_us > whole.own_us


def test_the_breakdown_runs_on_the_cpu(capsys):
    assert host.main(rows=3, calls=20) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 * 4 and "us of one call" in shown[0]
