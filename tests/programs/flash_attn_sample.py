"""A sample of flash-attention's own tests, tests/test_flash_attn.py, through the alias.

    python tests/programs/flash_attn_sample.py FILE [--seed 0] [--count 600] [--workers 12]
        [--part 1/1] [--seconds 380] [--cpu] [pytest ...]

FILE is that file in a clone of its repository, unmodified. It has about half a million cases. The
seed chooses `count` of them before pytest generates them: an equal share of each test function, or
all cases of a function that has fewer. --part 2/3 runs the second third of the sample. Cases that
have not begun after --seconds are skipped and counted. --cpu runs cases on the CPU (slow, for a
few). Values such as lengths are checked on the device; upstream does this too where its tests
expect an error.

Every worker loads this file as a plugin of pytest, and reads the sample from the environment.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from inspect import getmembers, isfunction
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from flash_on_cpu import OnCpu

SEED, COUNT, PART, DEADLINE, ON_CPU = (
    f"FLASH_ATTN_SAMPLE_{name}" for name in ("SEED", "COUNT", "PART", "DEADLINE", "CPU")
)
CASE_SECONDS = 150  # a case that compiles its kernels takes tens of seconds
OVERTIME_SECONDS = 20  # for cases that begin just before the deadline
MAX_ERRORS = 25


def marks_of(function):
    """[(names of arguments, their values)] of the parametrize marks of a function."""
    marks = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = names.split(",") if isinstance(names, str) else names
            marks.append(([name.strip() for name in names], list(values)))
    return marks


def size_of(function):
    return prod(len(values) for _, values in marks_of(function))


def divide(sizes, count):
    """function -> number of its cases. Larger functions get what smaller ones leave over."""
    shares, left = {}, count
    for done, (name, size) in enumerate(sorted(sizes.items(), key=lambda row: (row[1], row[0]))):
        shares[name] = min(size, -(-left // (len(sizes) - done)))
        left -= shares[name]
    return shares


def draw(function, count, seed):
    """(names of arguments, `count` different cases)"""
    marks, rng = marks_of(function), random.Random(f"{seed} {function.__name__}")
    names = [name for group, _ in marks for name in group]
    if count >= size_of(function):
        picked = list(product(*(values for _, values in marks)))
    else:
        indices_drawn = set()
        while len(indices_drawn) < count:
            indices_drawn.add(tuple(rng.randrange(len(values)) for _, values in marks))
        picked = [
            tuple(values[i] for i, (_, values) in zip(indices, marks, strict=True))
            for indices in sorted(indices_drawn)
        ]
    rows = [
        [v for (group, _), value in zip(marks, case, strict=True) for v in _flat(group, value)]
        for case in picked
    ]
    return names, [pytest.param(*row) for row in rows]


def _flat(group, value):
    return list(value) if len(group) > 1 else [value]


def _functions(module):
    return {n: f for n, f in getmembers(module, isfunction) if n.startswith("test_")}


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Generate the sampled cases instead of all combinations of the marks."""
    functions = _functions(metafunc.module)
    sizes = {name: size_of(function) for name, function in functions.items()}
    count = divide(sizes, int(os.environ[COUNT]))[metafunc.function.__name__]
    names, rows = draw(metafunc.function, count, os.environ[SEED])
    definition = metafunc.definition
    definition.own_markers[:] = [m for m in definition.own_markers if m.name != "parametrize"]
    if names:
        metafunc.parametrize(names, rows)


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, os.environ[PART].split("/"))
    order = random.Random(os.environ[SEED])
    order.shuffle(items)  # each worker gets long and short cases
    items[:] = items[part - 1 :: parts]


_OPEN = ExitStack()


def pytest_configure(config):
    import onchip
    import onchip.integrations.flash_attn

    onchip.integrations.flash_attn.install()
    onchip.checks(True)
    if os.environ[ON_CPU] != "1":
        return
    _OPEN.enter_context(OnCpu())
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.synchronize = lambda *_: None


def pytest_unconfigure(config):
    _OPEN.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    left = float(os.environ[DEADLINE]) - time.time()
    if left < 0:
        pytest.skip("no time left")
    seconds = min(CASE_SECONDS, int(left) + OVERTIME_SECONDS)

    def too_long(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_RESULTS, _ERRORS = Counter(), []


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    name = report.nodeid.partition("::")[2].partition("[")[0]
    outcome = report.outcome
    if outcome == "skipped" and "no time left" in str(report.longrepr):
        outcome = "not run"
    _RESULTS[name, outcome] += 1
    if outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        error = str(report.longrepr) if crash is None else f"line {crash.lineno}: {crash.message}"
        _ERRORS.append(f"{report.nodeid.partition('::')[2]}\n    {error.splitlines()[0][:300]}")


def pytest_terminal_summary(terminalreporter):
    outcomes = ("passed", "failed", "skipped", "not run")
    write = terminalreporter.write_line
    write(f"{'':44}" + "".join(f"{outcome:>9}" for outcome in outcomes))
    for name in sorted({name for name, _ in _RESULTS}):
        write(f"{name:44}" + "".join(f"{_RESULTS[name, outcome]:9}" for outcome in outcomes))
    for line in _ERRORS[:MAX_ERRORS]:
        write(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--seconds", type=float, default=380)
    parser.add_argument("--cpu", action="store_true")
    args, rest = parser.parse_known_args()
    sample = {SEED: args.seed, COUNT: args.count, PART: args.part, ON_CPU: int(args.cpu)}
    sample[DEADLINE] = time.time() + args.seconds
    os.environ.update({name: str(value) for name, value in sample.items()})
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, here)
    file = args.file.resolve()
    where = [str(file), f"--rootdir={file.parent}", "-c", os.devnull]
    plain = ["-q", "--no-header", "--noconftest", "--tb=line", "-p", "no:cacheprovider"]
    ours = ["-W", "ignore", "-p", "flash_attn_sample", "-n", str(args.workers)]
    return pytest.main([*where, *plain, *ours, *rest])


if __name__ == "__main__":
    sys.exit(main())
