"""Which run of pytest has which test: what .ci/run selects, and that a grid keeps its values."""

import shlex
import shutil
import subprocess
from itertools import chain, combinations, product
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.grids import cover

ROOT = Path(__file__).parents[1]
MARKERS = ("slow", "grid", "extras", "interpreted", "alone", "all", "programs")


def subsets():
    """Every set of markers that a test could have."""
    sizes = range(len(MARKERS) + 1)
    return map(frozenset, chain.from_iterable(combinations(MARKERS, n) for n in sizes))


def selected(*targets):
    """The sets of markers that the runs of pytest in these targets of the Makefile select."""
    command = ["make", "--dry-run", *targets]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    runs = [line for line in printed.stdout.splitlines() if "-m pytest" in line]
    assert runs
    return {markers for markers, run in product(subsets(), runs) if has(run, markers)}


def has(run, markers):
    words = shlex.split(run.rstrip("\\"))
    if ("TRITON_INTERPRET=1" in words) != ("interpreted" in markers):
        return False
    arguments = words[words.index("pytest") + 1 :]
    if "-m" not in arguments:
        return True
    expression = Expression.compile(arguments[arguments.index("-m") + 1])
    return expression.evaluate(lambda name, **_: name in markers)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_every_test_is_run_by_ci():
    """But for the variants of kernels and the seeds that only ALL=1 runs."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert {"make test-all", "make programs", "make triton36"} <= set(script)
    in_ci = selected("test-all", "programs")
    assert selected("test", "test-extras", "slow", "programs") == in_ci
    assert all(markers in in_ci or {"slow", "all"} <= markers for markers in subsets())


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_each_portable_kernel_is_compiled_by_the_newest_or_the_oldest_triton():
    compiled = {frozenset({"slow"}), frozenset({"slow", "all"}), frozenset(), frozenset({"grid"})}
    newest, oldest = selected("test-all"), selected("triton36")
    assert compiled <= newest | oldest and not compiled <= newest and not compiled <= oldest


def test_a_grid_keeps_every_value_of_every_parameter():
    grid = [{("a", i), ("b", j), ("c", k)} for i, j, k in product(range(5), range(4), range(2))]
    chosen = cover(grid)
    assert set().union(*(grid[i] for i in chosen)) == set().union(*grid)
    assert chosen[0] == 0 and len(chosen) == 5


def test_a_list_of_cases_keeps_all_of_them():
    assert cover([{("case", i), ("dtype", i % 2)} for i in range(9)]) == list(range(9))
