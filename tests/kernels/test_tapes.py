"""Tapes do again what a call did, and nothing that it did not do. The launcher in C is a stand-in;
real kernels are in test_tapes_triton.py, real launches in test_handles.py.
"""

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import onchip
from onchip.kernels import flat, tapes
from onchip.kernels.counters import counter
from onchip.kernels.handles import CachedLauncher
from onchip.kernels.protocol import Result, Stats
from onchip.problem import Options, Question, Tensors, describe, forget_questions
from onchip.testing import assert_accurate
from tests.kernels.gpu import each_kernel, inputs

GRID = (3,)
PARAMS = [
    SimpleNamespace(name=name, default=None, is_constexpr=False, do_not_specialize=False)
    for name in ("a", "b", "c", "n")
]


LAUNCHER_OF = flat.get_c_launcher


class Compiled:
    def __getitem__(self, grid):
        return lambda *args: None


class Kernel:
    params = PARAMS

    def __getitem__(self, grid):
        return lambda *args: Compiled()


@pytest.fixture
def log(monkeypatch):
    """(grid, stream, addresses) of every flat launch."""
    found = []
    note = lambda *args: found.append((args[:3], args[3], args[4:7]))
    launcher = flat.CLauncher(note, (), False, print, {}, (), None)
    knobs = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(flat, "get_c_launcher", lambda compiled: launcher)
    monkeypatch.setattr(flat, "runtime", lambda: flat.Runtime(knobs, lambda device: 5))
    monkeypatch.setattr(tapes, "is_recordable", lambda q: True)
    return found


def tensors(n=8):
    return Tensors(*(torch.randn(1, n, 2, 16) for _ in range(3)))


def question(x):
    return Question(describe(x, Options()), {})


def kernel_of(handle, extra=lambda x, out: None):
    """A kernel that allocates out and lse, launches, and does `extra`."""

    def compute(problem, x, kernel):
        out = torch.empty_like(x.q)
        rows = x.q.new_empty(3, 5)
        handle[GRID](x.v, out, rows[2], 7)
        extra(x, out)
        return Result(out, x.q.new_empty(5))

    return compute


@pytest.fixture
def compute():
    return kernel_of(CachedLauncher(Kernel()))


def test_the_third_call_is_replayed(log, compute):
    x = tensors()
    asked = question(x)
    results = [tapes.replay_or_run(compute, asked, x, None) for _ in range(4)]
    assert len(log) == 2
    for (grid, stream, addresses), result in zip(log, results[2:], strict=True):
        assert grid == (3, 1, 1) and stream == 5
        assert addresses[:2] == (x.v.data_ptr(), result.out.data_ptr())
        assert result.out.shape == x.q.shape and result.lse.shape == (5,) and result.stats is None
    assert len({result.out.data_ptr() for result in results}) == 4


def test_recording_does_not_wake_the_compiler():
    """A dispatch mode may import torch._dynamo: seconds, for who compiles nothing."""
    code = (
        "import sys, torch; from onchip.kernels.tapes import _LaunchRecorder\n"
        "with _LaunchRecorder([torch.ones(1)]) as recorder: torch.empty(3)\n"
        "assert len(recorder.allocated) == 1 and 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_of_a_buffer_keeps_its_place(log, monkeypatch, compute):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    x = tensors()
    asked = question(x)
    for _ in range(3):
        tapes.replay_or_run(compute, asked, x, None)
    (rows,) = (t for t in made[-3:] if t.shape == (3, 5))
    assert log[0][2][2] == rows[2].data_ptr()


def drawing_kernel():
    """One whose launch draws, and has the counter also in the place of what is not read."""
    handle = CachedLauncher(Kernel())

    def compute(problem, x, kernel):
        out, drawn = torch.empty_like(x.q), counter(x.q.device)
        handle[GRID](drawn, out, drawn, 7)
        return Result(out, x.q.new_empty(5))

    return compute


def test_counters_are_those_of_where_a_tape_is_played(log, now):
    x, compute = tensors(), drawing_kernel()
    asked = question(x)
    replay = lambda: tapes.replay_or_run(compute, asked, x, None)
    for _ in range(3):
        replay()
    now.stream = 9
    replay()
    now.capturing = True
    for _ in range(2):
        replay()
    now.capturing = False
    replay()
    drawn = [addresses[0] for _, _, addresses in log]
    assert drawn == [addresses[2] for _, _, addresses in log]
    assert len(set(drawn[:4])) == 4 and drawn[4] == drawn[1] == counter(x.q.device).data_ptr()


def test_the_counters_of_a_device_are_no_buffer_of_the_call_that_made_them(log, now):
    x, compute = tensors(), drawing_kernel()
    asked = question(x)
    now.capturing = True
    tapes.replay_or_run(compute, asked, x, None)
    now.capturing = False
    tapes.replay_or_run(compute, asked, x, None)
    (recording,) = asked.known.values()
    assert now.waits == 1 and len(recording.buffers) == 3


KEPT = torch.zeros(8)


@pytest.mark.parametrize(
    "extra",
    [
        lambda x, out: out.zero_(),
        lambda x, out: x.q + 1,
        lambda x, out: x.q.transpose(1, 2).contiguous(),
        lambda x, out: out.sum().item(),
        lambda x, out: CachedLauncher(Kernel())[GRID](KEPT, out, out, 7),
        lambda x, out: CachedLauncher(Kernel())[GRID](x.q[0], out, out, 7),
    ],
    ids=["in place", "operation", "copy", "value", "foreign tensor", "view of an input"],
)
def test_a_call_that_does_more_is_never_replayed(log, extra):
    x, compute = tensors(), kernel_of(CachedLauncher(Kernel()), extra)
    asked = question(x)
    for _ in range(4):
        tapes.replay_or_run(compute, asked, x, None)
    assert not log


def test_nor_is_one_that_returns_a_part_of_a_buffer(log):
    handle = CachedLauncher(Kernel())

    def compute(problem, x, kernel):
        out = torch.empty_like(x.q)
        handle[GRID](x.v, out, out, 7)
        return Result(out, out[0])

    x = tensors()
    asked = question(x)
    for _ in range(4):
        tapes.replay_or_run(compute, asked, x, None)
    assert not log


def test_nor_is_one_that_returns_row_statistics(log):
    handle = CachedLauncher(Kernel())

    def compute(problem, x, kernel):
        out, stats = torch.empty_like(x.q), x.q.new_empty(2, 5)
        handle[GRID](x.v, out, stats, 7)
        return Result(out, x.q.new_empty(5), Stats(*stats))

    x = tensors()
    asked = question(x)
    for _ in range(4):
        assert isinstance(tapes.replay_or_run(compute, asked, x, None).stats, Stats)
    assert not log


def test_a_kernel_that_did_not_compile_is_not_replayed(log, compute, monkeypatch):
    """The interpreter, AMD: nothing was compiled that could be launched."""
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *args: None)
    monkeypatch.setattr(flat, "get_c_launcher", LAUNCHER_OF)
    x = tensors()
    asked = question(x)
    for _ in range(4):
        tapes.replay_or_run(compute, asked, x, None)
    assert not log


def test_alignment_tells_calls_apart(log, compute):
    """A kernel compiled for 16 bytes must not read from 4."""
    x = tensors()
    asked = question(x)
    shifted = x._replace(v=torch.randn(x.v.numel() + 1)[1:].view(x.v.shape))
    for _ in range(3):
        tapes.replay_or_run(compute, asked, x, None)
    assert len(log) == 1
    for _ in range(2):
        tapes.replay_or_run(compute, asked, shifted, None)
    assert len(log) == 1
    tapes.replay_or_run(compute, asked, shifted, None)
    assert log[-1][2][0] == shifted.v.data_ptr()


def test_kernels_by_name_are_told_apart(log, compute):
    x = tensors()
    asked = question(x)
    for kernel in ("one", "other") * 2:
        tapes.replay_or_run(compute, asked, x, kernel)
    assert not log


def test_calls_that_came_once_do_not_keep_others_from_being_replayed(log, compute):
    x = tensors()
    asked = question(x)
    for kernel in map(str, range(3 * tapes.MAX_RECORDINGS)):
        tapes.replay_or_run(compute, asked, x, kernel)
    assert len(asked.known) == tapes.MAX_RECORDINGS and not log
    for _ in range(3):
        tapes.replay_or_run(compute, asked, x, "again and again")
    assert len(asked.known) == tapes.MAX_RECORDINGS and len(log) == 1


def test_saved_tensors_may_come_back_in_another_layout(log):
    handle = CachedLauncher(Kernel())

    def compute(problem, x, kernel, out):
        handle[GRID](x.q, out, out, 7)
        return Result(torch.empty(out.shape), None)

    x = tensors()
    asked = question(x)
    out, other = torch.randn(1, 8, 2, 16), torch.randn(1, 2, 8, 16).transpose(1, 2)
    for saved in (out, out, other, other):
        tapes.replay_or_run(compute, asked, x, None, saved)
    assert not log
    tapes.replay_or_run(compute, asked, x, None, other)
    assert log[0][2][1] == other.data_ptr()


def test_nothing_is_kept_for_a_question_that_keeps_nothing(log, compute):
    x = tensors()
    for _ in range(4):
        tapes.replay_or_run(compute, Question(describe(x, Options())), x, None)
    assert not log


def test_of_tensors_nothing_is_kept(log, compute):
    x = tensors()
    asked = question(x)
    for _ in range(4):
        result = tapes.replay_or_run(compute, asked, x, None)
    gone = [weakref.ref(t) for t in (*x[:3], result.out)]
    del x, result
    gc.collect()
    assert log and not any(each() for each in gone)


def test_threads_share_tapes(log, compute):
    """Every launch has the addresses of one call, and every result is that call's."""
    asked = question(tensors())
    wanted = {}

    def call(_):
        x = tensors()
        out = tapes.replay_or_run(compute, asked, x, None).out
        wanted[out.data_ptr()] = (x.v.data_ptr(), out.data_ptr())
        return x, out  # alive, so that no address comes again

    with ThreadPoolExecutor(8) as pool:
        alive = list(pool.map(call, range(400)))
    assert len(alive) == len(wanted) == 400 and len(log) > 300
    assert all(wanted[addresses[1]] == addresses[:2] for _, _, addresses in log)


@pytest.fixture
def plays(monkeypatch):
    """How often tapes were played; none is left of other tests."""
    forget_questions()
    found = []
    replay = tapes.Recording.replay
    monkeypatch.setattr(tapes.Recording, "replay", lambda *args: found.append(1) or replay(*args))
    return found


@each_kernel
@pytest.mark.parametrize("n", [1, 63, 700])  # 700: more tiles than processors, so tickets are drawn
def test_replays_are_right(kernel, n, plays):
    attend = lambda *x, **options: onchip.attention(*x, return_lse=True, kernel=kernel, **options)
    for turn in range(4):
        q, k, v = inputs(n, 801, batch=7)
        assert_accurate(attend, q, k, v, grad=True, causal=True)
        assert len(plays) >= turn - 1


@pytest.mark.gpu
def test_row_statistics_come_with_every_call():
    q, k, v = inputs(63, 801, batch=2)
    for _ in range(4):
        _, stats = onchip.attention(q, k, v, causal=True, return_stats=True)
        assert stats.entropy.isfinite().all()


@each_kernel
def test_replays_follow_the_stream_and_can_be_captured(kernel, plays):
    q, k, v = inputs(300, batch=9)
    attend = lambda: onchip.attention(q, k, v, causal=True, kernel=kernel)
    expected = [attend() for _ in range(3)][0]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.testing.assert_close(attend(), expected, rtol=0, atol=0)
        torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert len(plays) == 3


@pytest.mark.gpu
def test_paged_replays_read_their_own_tables(plays, monkeypatch):
    """Pages and lengths are data, not part of a tape."""
    q = torch.randn(3, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    pages = torch.randn(2, 60, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    for turn in range(5):
        table = torch.randperm(60, device="cuda")[:36].view(3, 12).int()
        lengths = torch.tensor([1, 100 + turn, 192], device="cuda", dtype=torch.int32)
        out = onchip.paged_attention(q, *pages, table, lengths)
        with monkeypatch.context() as usual:
            usual.setattr(tapes, "is_recordable", lambda q: False)
            expected = onchip.paged_attention(q, *pages, table, lengths)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert len(plays) == 3
