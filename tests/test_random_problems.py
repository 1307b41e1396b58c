"""Some problems of tests/random_problems.py, and many more in a slow test. The message of a failure
has the seed and the number of the problem.
"""

from collections import Counter

import pytest

from tests import random_problems
from tests.grids import mark_all_after


def check(seed, numbers):
    counts = Counter()
    failures = list(random_problems.search(seed, numbers, counts))
    assert not failures, failures
    assert counts["served"] == len(numbers), counts


def test_random_problems():
    check(1, range(100))


@pytest.mark.slow
@pytest.mark.parametrize("first", mark_all_after(3, range(0, 1500, 250)))
def test_more_random_problems(first):
    check(2, range(first, first + 250))


def test_a_problem_depends_on_its_seed_and_number_alone():
    a, b, other = (random_problems.draw_case(3, number) for number in (8, 8, 9))
    assert a.title == b.title != other.title and a.q.equal(b.q)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 60, 5))  # each problem compiles a kernel: share them
@pytest.mark.parametrize(
    "kernel", [None, "triton", pytest.param("hopper", marks=pytest.mark.hopper)]
)
def test_random_problems_on_a_gpu(kernel, first):
    counts = Counter()
    failures = list(random_problems.search(4, range(first, first + 5), counts, "cuda", kernel))
    assert not failures, failures
    assert counts["served"] >= 1, counts
