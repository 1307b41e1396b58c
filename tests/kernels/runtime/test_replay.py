"""A replay repeats the recorded call and nothing else. The C launcher is a stand-in, except in the
last tests; see also test_replay_triton.py.
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
from onchip.core.backend import Result, Stats
from onchip.core.call_cache import CachedCall, clear_call_cache
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.runtime import raw_launch, replay
from onchip.kernels.runtime.counters import counter
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.testing import assert_accurate
from tests.kernels.gpu import each_kernel, inputs

GRID = (3,)
PARAMS = [
    SimpleNamespace(name=name, default=None, is_constexpr=False, do_not_specialize=False)
    for name in ("a", "b", "c", "n")
]


LAUNCHER_OF = raw_launch.get_c_launcher


class Compiled:
    def __getitem__(self, grid):
        return lambda *args: None


class Kernel:
    params = PARAMS

    def __getitem__(self, grid):
        return lambda *args: Compiled()


@pytest.fixture
def log(monkeypatch):
    """(grid, stream, addresses) of every raw launch."""
    launches = []
    note = lambda *args: launches.append((args[:3], args[3], args[4:7]))
    launcher = raw_launch.CLauncher(note, (), False, print, {}, (), None)
    knobs = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(raw_launch, "get_c_launcher", lambda compiled: launcher)
    monkeypatch.setattr(raw_launch, "runtime", lambda: raw_launch.Runtime(knobs, lambda device: 5))
    monkeypatch.setattr(replay, "is_recordable", lambda q: True)
    return launches


def tensors(n=8):
    return Tensors(*(torch.randn(1, n, 2, 16) for _ in range(3)))


def cached_call(x):
    return CachedCall(describe(x, Options()), {})


def kernel_of(launcher, extra=lambda x, out: None):
    """A kernel that allocates out and lse, launches, and runs `extra`."""

    def compute(problem, x, kernel):
        out = torch.empty_like(x.q)
        rows = x.q.new_empty(3, 5)
        launcher[GRID](x.v, out, rows[2], 7)
        extra(x, out)
        return Result(out, x.q.new_empty(5))

    return compute


@pytest.fixture
def compute():
    return kernel_of(CachedLauncher(Kernel()))


def test_the_third_call_is_replayed(log, compute):
    x = tensors()
    cached = cached_call(x)
    results = [replay.replay_or_run(compute, cached, x, None) for _ in range(4)]
    assert len(log) == 2
    for (grid, stream, addresses), result in zip(log, results[2:], strict=True):
        assert grid == (3, 1, 1) and stream == 5
        assert addresses[:2] == (x.v.data_ptr(), result.out.data_ptr())
        assert result.out.shape == x.q.shape and result.lse.shape == (5,) and result.stats is None
    assert len({result.out.data_ptr() for result in results}) == 4


def test_recording_does_not_import_dynamo():
    """A dispatch mode may import torch._dynamo, which takes seconds even if nothing is compiled."""
    code = (
        "import sys, torch; from onchip.kernels.runtime.replay import _LaunchRecorder\n"
        "with _LaunchRecorder([torch.ones(1)]) as recorder: torch.empty(3)\n"
        "assert len(recorder.allocated) == 1 and 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_view_of_a_buffer_keeps_its_offset(log, monkeypatch, compute):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    x = tensors()
    cached = cached_call(x)
    for _ in range(3):
        replay.replay_or_run(compute, cached, x, None)
    (rows,) = (t for t in made[-3:] if t.shape == (3, 5))
    assert log[0][2][2] == rows[2].data_ptr()


def drawing_kernel():
    """A kernel that uses a work counter, also for pointer arguments that it does not read."""
    launcher = CachedLauncher(Kernel())

    def compute(problem, x, kernel):
        out, drawn = torch.empty_like(x.q), counter(x.q.device)
        launcher[GRID](drawn, out, drawn, 7)
        return Result(out, x.q.new_empty(5))

    return compute


def test_a_replay_uses_the_counter_of_its_own_stream_or_graph(log, now):
    x, compute = tensors(), drawing_kernel()
    cached = cached_call(x)
    again = lambda: replay.replay_or_run(compute, cached, x, None)
    for _ in range(3):
        again()
    now.stream = 9
    again()
    now.capturing = True
    for _ in range(2):
        again()
    now.capturing = False
    again()
    drawn = [addresses[0] for _, _, addresses in log]
    assert drawn == [addresses[2] for _, _, addresses in log]
    assert len(set(drawn[:4])) == 4 and drawn[4] == drawn[1] == counter(x.q.device).data_ptr()


def test_a_counter_pool_is_not_recorded_as_a_buffer(log, now):
    x, compute = tensors(), drawing_kernel()
    cached = cached_call(x)
    now.capturing = True
    replay.replay_or_run(compute, cached, x, None)
    now.capturing = False
    replay.replay_or_run(compute, cached, x, None)
    (recording,) = cached.cache.values()
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
def test_a_call_with_other_operations_is_never_replayed(log, extra):
    x, compute = tensors(), kernel_of(CachedLauncher(Kernel()), extra)
    cached = cached_call(x)
    for _ in range(4):
        replay.replay_or_run(compute, cached, x, None)
    assert not log


def test_a_call_that_returns_part_of_a_buffer_is_never_replayed(log):
    launcher = CachedLauncher(Kernel())

    def compute(problem, x, kernel):
        out = torch.empty_like(x.q)
        launcher[GRID](x.v, out, out, 7)
        return Result(out, out[0])

    x = tensors()
    cached = cached_call(x)
    for _ in range(4):
        replay.replay_or_run(compute, cached, x, None)
    assert not log


def test_a_call_that_returns_row_statistics_is_never_replayed(log):
    launcher = CachedLauncher(Kernel())

    def compute(problem, x, kernel):
        out, stats = torch.empty_like(x.q), x.q.new_empty(2, 5)
        launcher[GRID](x.v, out, stats, 7)
        return Result(out, x.q.new_empty(5), Stats(*stats))

    x = tensors()
    cached = cached_call(x)
    for _ in range(4):
        assert isinstance(replay.replay_or_run(compute, cached, x, None).stats, Stats)
    assert not log


def test_a_kernel_without_compiled_code_is_not_replayed(log, compute, monkeypatch):
    """The interpreter and AMD: there is no compiled kernel to launch."""
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *args: None)
    monkeypatch.setattr(raw_launch, "get_c_launcher", LAUNCHER_OF)
    x = tensors()
    cached = cached_call(x)
    for _ in range(4):
        replay.replay_or_run(compute, cached, x, None)
    assert not log


def test_alignment_is_part_of_the_key(log, compute):
    """A kernel compiled for 16-byte alignment must not get a pointer aligned to 4."""
    x = tensors()
    cached = cached_call(x)
    shifted = x._replace(v=torch.randn(x.v.numel() + 1)[1:].view(x.v.shape))
    for _ in range(3):
        replay.replay_or_run(compute, cached, x, None)
    assert len(log) == 1
    for _ in range(2):
        replay.replay_or_run(compute, cached, shifted, None)
    assert len(log) == 1
    replay.replay_or_run(compute, cached, shifted, None)
    assert log[-1][2][0] == shifted.v.data_ptr()


def test_the_kernel_name_is_part_of_the_key(log, compute):
    x = tensors()
    cached = cached_call(x)
    for kernel in ("one", "other") * 2:
        replay.replay_or_run(compute, cached, x, kernel)
    assert not log


def test_calls_seen_once_do_not_block_other_recordings(log, compute):
    x = tensors()
    cached = cached_call(x)
    for kernel in map(str, range(3 * replay.MAX_RECORDINGS)):
        replay.replay_or_run(compute, cached, x, kernel)
    assert len(cached.cache) == replay.MAX_RECORDINGS and not log
    for _ in range(3):
        replay.replay_or_run(compute, cached, x, "again and again")
    assert len(cached.cache) == replay.MAX_RECORDINGS and len(log) == 1


def test_saved_tensors_may_have_another_layout(log):
    launcher = CachedLauncher(Kernel())

    def compute(problem, x, kernel, out):
        launcher[GRID](x.q, out, out, 7)
        return Result(torch.empty(out.shape), None)

    x = tensors()
    cached = cached_call(x)
    out, other = torch.randn(1, 8, 2, 16), torch.randn(1, 2, 8, 16).transpose(1, 2)
    for saved in (out, out, other, other):
        replay.replay_or_run(compute, cached, x, None, saved)
    assert not log
    replay.replay_or_run(compute, cached, x, None, other)
    assert log[0][2][1] == other.data_ptr()


def test_an_uncached_call_keeps_no_recording(log, compute):
    x = tensors()
    for _ in range(4):
        replay.replay_or_run(compute, CachedCall(describe(x, Options())), x, None)
    assert not log


def test_no_tensor_is_kept_alive(log, compute):
    x = tensors()
    cached = cached_call(x)
    for _ in range(4):
        result = replay.replay_or_run(compute, cached, x, None)
    refs = [weakref.ref(t) for t in (*x[:3], result.out)]
    del x, result
    gc.collect()
    assert log and not any(each() for each in refs)


def test_threads_share_recordings(log, compute):
    """Every launch has the addresses of one call, and every result belongs to that call."""
    cached = cached_call(tensors())
    wanted = {}

    def call(_):
        x = tensors()
        out = replay.replay_or_run(compute, cached, x, None).out
        wanted[out.data_ptr()] = (x.v.data_ptr(), out.data_ptr())
        return x, out  # alive, so that no address comes again

    with ThreadPoolExecutor(8) as pool:
        alive = list(pool.map(call, range(400)))
    assert len(alive) == len(wanted) == 400 and len(log) > 300
    assert all(wanted[addresses[1]] == addresses[:2] for _, _, addresses in log)


@pytest.fixture
def replays(monkeypatch):
    """The number of replays; recordings of other tests are dropped."""
    clear_call_cache()
    replays = []
    original = replay.Recording.replay
    noted = lambda *args: replays.append(1) or original(*args)
    monkeypatch.setattr(replay.Recording, "replay", noted)
    return replays


@each_kernel
@pytest.mark.parametrize("n", [1, 63, 700])  # 700: more tiles than processors, so tickets are drawn
def test_replays_are_accurate(kernel, n, replays):
    attend = lambda *x, **options: onchip.attention(*x, return_lse=True, kernel=kernel, **options)
    for turn in range(4):
        q, k, v = inputs(n, 801, batch=7)
        assert_accurate(attend, q, k, v, grad=True, causal=True)
        assert len(replays) >= turn - 1


@pytest.mark.gpu
def test_every_call_returns_row_statistics():
    q, k, v = inputs(63, 801, batch=2)
    for _ in range(4):
        _, stats = onchip.attention(q, k, v, causal=True, return_stats=True)
        assert stats.entropy.isfinite().all()


@each_kernel
def test_replays_use_the_current_stream_and_can_be_captured(kernel, replays):
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
    assert len(replays) == 3


@pytest.mark.gpu
def test_paged_replays_read_their_own_page_tables(replays, monkeypatch):
    """Page tables and lengths are data, not part of a recording."""
    q = torch.randn(3, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    pages = torch.randn(2, 60, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    for turn in range(5):
        table = torch.randperm(60, device="cuda")[:36].view(3, 12).int()
        lengths = torch.tensor([1, 100 + turn, 192], device="cuda", dtype=torch.int32)
        out = onchip.paged_attention(q, *pages, table, lengths)
        with monkeypatch.context() as usual:
            usual.setattr(replay, "is_recordable", lambda q: False)
            expected = onchip.paged_attention(q, *pages, table, lengths)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert len(replays) == 3
