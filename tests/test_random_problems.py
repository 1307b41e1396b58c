"""Some problems of tests/random_problems.py, and many more in a slow test. The message of a failure
has the seed and the number of the problem.
"""

from collections import Counter

import pytest

from tests import random_problems


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 100), pytest.param(2, 1500, marks=pytest.mark.slow)]
)
def test_random_problems(seed, count):
    counts = Counter()
    failures = list(random_problems.search(seed, range(count), counts))
    assert not failures, failures
    assert counts["served"] == count, counts


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
