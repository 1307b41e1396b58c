"""How long tests take: `pytest --durations-file PATH` writes it as JSON.

Wall and CPU seconds of the whole run, of every test file and of every test over one second. CPU
seconds include child processes that have ended; on a loaded machine they say more than wall time.
"""

import json
import os
import platform
import time
from collections import defaultdict
from datetime import date
from pathlib import Path

import pytest
import torch


class Durations:
    """A pytest plugin. Under xdist each worker measures, and the controller sums and writes."""

    def __init__(self, config: pytest.Config):
        is_worker = hasattr(config, "workerinput")
        self.path = None if is_worker else config.getoption("--durations-file")
        self.arguments = config.invocation_params.args
        self.began = time.time()
        self.cpu_seconds = 0.0
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logstart(self):
        self.cpu_seconds = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        before, self.cpu_seconds = self.cpu_seconds, _cpu_seconds()
        report.cpu_seconds = self.cpu_seconds - before
        return report

    def pytest_runtest_logreport(self, report):
        test = self.seconds[report.nodeid]
        test[0] += report.duration
        test[1] += report.cpu_seconds

    def pytest_sessionfinish(self):
        if self.path is None:
            return
        files = defaultdict(lambda: [0.0, 0.0, 0])
        for nodeid, seconds in self.seconds.items():
            file = files[nodeid.partition("::")[0]]
            file[:] = [a + b for a, b in zip(file, (*seconds, 1), strict=True)]
        slowest = {nodeid: s for nodeid, s in self.seconds.items() if max(s) > 1}
        report = {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "arguments": self.arguments,
            "wall_seconds": round(time.time() - self.began, 1),
            "cpu_seconds": round(sum(cpu for _, cpu in self.seconds.values()), 1),
            "files: wall seconds, CPU seconds, tests": _longest_first(files),
            "tests over 1 s: wall seconds, CPU seconds": _longest_first(slowest),
        }
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        Path(self.path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _longest_first(table: dict[str, list]) -> dict[str, str]:
    rows = sorted(table.items(), key=lambda row: -row[1][1])
    return {name: " ".join(f"{x:.4g}" for x in numbers) for name, numbers in rows}
