"""Memories measured: each set is assigned to its level, and larger sets are never faster."""

import pytest
import torch

from onchip.cli.bench import levels


def test_caches_are_those_that_hold_data(tmp_path):
    described = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("3", "Unified", "300M")]
    for i, files in enumerate(described):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, text in zip(("level", "type", "size"), files, strict=True):
            (folder / name).write_text(f"{text}\n")
    assert levels.cache_sizes(tmp_path) == [("L1", 48 << 10), ("L3", 300 << 20)]
    assert levels.cache_sizes(tmp_path / "nowhere") == []


def test_a_walk_visits_every_line_of_its_set():
    ring = levels.chain(63)
    where, at, visited = ring.flatten().tolist(), 0, set()
    for _ in range(63):
        visited.add(at)
        at = where[at]
    assert at == 0 and visited == set(range(0, ring.numel(), levels.STRIDE))
    assert ring.nbytes == 63 * levels.LINE_BYTES and levels.walk_s(ring.nbytes) > 0


def test_time_hidden_by_the_interpreter_is_zero():
    assert levels.beyond(11e-9, 8e-9) == 0.0
    assert levels.beyond(80e-9, 8e-9) == pytest.approx(72e-9)


def test_a_sweep_names_levels_and_keeps_the_thread_count(monkeypatch):
    monkeypatch.setattr(levels, "cache_sizes", lambda: [("L1", 32 << 10), ("L2", 1 << 20)])
    monkeypatch.setattr(levels, "READ", 1 << 20)
    before = torch.get_num_threads()
    rows = list(levels.cpu_levels((16 << 10, 1 << 18, 1 << 22)))
    assert [row.level for row in rows] == ["L1", "L2", "DRAM"]
    assert rows[0].latency_s == 0.0 and all(row.bytes_s > 1e8 for row in rows)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("held", "last"), [(300, 600), (32, 256), (1200, 256)])
def test_the_last_set_is_larger_than_every_cache_if_that_is_not_too_large(monkeypatch, held, last):
    monkeypatch.setattr(levels, "cache_sizes", lambda: [("L1", 32 << 10), ("L3", held << 20)])
    assert levels.cpu_sets()[-1] == last << 20


def test_progress_runs_to_its_end(monkeypatch):
    row = levels.LevelTiming("L1", 16 << 10, 1e9, 0.0)
    monkeypatch.setattr(levels, "cpu_levels", lambda: iter([row] * len(levels.cpu_sets())))
    progress = []
    list(levels.measure(torch.device("cpu"), lambda title, done: progress.append(done)))
    assert progress[0] == 0.0 and progress[-1] == 1.0 and progress == sorted(progress)


@pytest.mark.gpu
def test_memories_of_a_gpu():
    cache, memory = levels.measure(torch.device("cuda"), lambda title, done: None)
    assert (cache.level, memory.level) == ("L2", "HBM")
    assert cache.bytes_s > memory.bytes_s and cache.latency_s and memory.latency_s
    assert cache.latency_s < memory.latency_s < 2e-6
