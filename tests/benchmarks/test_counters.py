"""The table that ncu prints, and the call that it watches."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

import onchip
from benchmarks import counters
from benchmarks.counters import CountedCall, KernelBytes

TABLE = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "forward_kernel" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","python3.12","127.0.0.1","spin_kernel","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",\
"Command line profiler metrics","dram__bytes_read.sum","byte","1,024"
"0","4711","python3.12","127.0.0.1","spin_kernel","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",\
"Command line profiler metrics","dram__bytes_write.sum","byte","0"
"1","4711","python3.12","127.0.0.1","forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0",\
"9.0","Command line profiler metrics","dram__bytes_read.sum","Mbyte","201.5"
"1","4711","python3.12","127.0.0.1","forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0",\
"9.0","Command line profiler metrics","dram__bytes_write.sum","byte","67,108,864"
"1","4711","python3.12","127.0.0.1","forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0",\
"9.0","Command line profiler metrics","sm__cycles_elapsed.avg","cycle","5"
"""


def test_kernels_are_read_from_the_table():
    kernels = counters.parse(TABLE.splitlines())
    assert kernels == [
        KernelBytes("spin_kernel", 1024.0, 0.0),
        KernelBytes("forward_kernel", 201.5e6, 67108864.0),
    ]
    assert kernels[1].hbm_bytes == 201.5e6 + 67108864


def test_a_table_without_kernels_is_no_traffic_of_zero():
    with pytest.raises(ValueError, match="counted no kernel"):
        counters.parse(["==ERROR== ERR_NVGPUCTRPERM", ""])


def test_the_profiler_runs_without_clock_control(monkeypatch):
    commands = []
    done = SimpleNamespace(returncode=0, stdout=TABLE, stderr="")
    monkeypatch.setattr(counters.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or done)
    (kernels,) = counters.count((CountedCall(2, 4096, 16, 128, causal=True),))
    command = " ".join(commands[0])
    assert len(kernels) == 1 and command.startswith("/usr/bin/ncu --clock-control none")
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum" in command
    assert command.endswith('-m benchmarks.counters [[2, 4096, 16, 128, true, false, "onchip"]]')
    with pytest.raises(ValueError, match="ncu saw 1 of 2 calls"):
        counters.count((CountedCall(1, 64, 1, 64), CountedCall(1, 64, 1, 64)))


def test_marks_part_the_kernels_of_calls():
    names = ["fill", "spin_kernel(long)", "prepare", "backward", "at::cuda::spin_kernel", "forward"]
    calls = counters.by_call(KernelBytes(name) for name in names)
    assert [[k.kernel for k in call] for call in calls] == [["prepare", "backward"], ["forward"]]


def test_without_a_profiler_an_error_names_it(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="ncu"):
        counters.count((CountedCall(1, 64, 1, 64),))


def test_a_failed_profiler_raises_its_message(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="no permission")
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: failed)
    with pytest.raises(ValueError, match="no permission"):
        counters.count((CountedCall(1, 65, 1, 64),))


@pytest.mark.parametrize("backward", [False, True])
def test_the_watched_call_runs_twice(monkeypatch, backward):
    calls, attention = [], onchip.attention
    record = lambda *args, **options: calls.append(options) or attention(*args, **options)
    monkeypatch.setattr(onchip, "attention", record)
    counters.run(CountedCall(1, 63, 2, 32, causal=True, backward=backward), torch.device("cpu"))
    assert calls == [{"causal": True}] * 2


@pytest.mark.hopper
@pytest.mark.alone
@pytest.mark.skipif(counters.shutil.which("ncu") is None, reason="ncu is not installed")
def test_a_forward_moves_each_tensor_once():
    from onchip.cost import make_problem

    call = CountedCall(4, 4096, 16, 128)
    problem = make_problem(4096, batch=4, num_heads=16, head_dim=128, dtype=torch.bfloat16)
    num_bytes = sum(kernel.hbm_bytes for kernel in counters.count((call,))[0])
    assert num_bytes == pytest.approx(problem.min_bytes, rel=0.05)
