"""Which variants of a parametrised test `make test` runs.

A test over a grid of parameters (kernel x dtype x options) has many variants that prove nearly the
same. `make test` runs a few in which every value of every parameter occurs. The others are marked
`grid`, and `make slow` and .ci/run run them. A test with one list of cases keeps all of them.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark(items: list[pytest.Item]) -> None:
    """Mark the variants that `make test` leaves out. Tests of GPUs keep all variants."""
    variants = defaultdict(list)
    for item in items:
        on_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("hopper")
        if hasattr(item, "callspec") and not on_gpu and not item.get_closest_marker("slow"):
            variants[item.nodeid.partition("[")[0]].append(item)
    for group in variants.values():
        kept = set(cover([values(item) for item in group]))
        for i, item in enumerate(group):
            if i not in kept:
                item.add_marker("grid")


def mark_all_after(count: int, cases: Iterable) -> list:
    """The cases as parameters of a slow test: .ci/run runs the first `count`, and ALL=1 all."""
    marks = lambda i: () if i < count else (pytest.mark.all,)
    values = lambda case: case if isinstance(case, tuple) else (case,)
    return [pytest.param(*values(case), marks=marks(i)) for i, case in enumerate(cases)]


def values(item: pytest.Item) -> set[tuple]:
    """The values of a variant. Names of one `parametrize` are one parameter: its list of cases."""
    params = dict(item.callspec.params)
    marks = item.iter_markers("parametrize")
    names = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in marks]
    names = [name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names]
    names += [[name] for name in params.keys() - set().union(*names)]
    return {(*key, *(id(params[name]) for name in key)) for key in names}


def cover(variants: list[set]) -> list[int]:
    """The indices of a few sets that together have every element: the first set, then always the
    earliest with the most new elements.
    """
    missing, chosen = set().union(*variants), []
    while missing:
        best = max(range(len(variants)), key=lambda i: len(variants[i] & missing))
        chosen.append(best)
        missing -= variants[best]
    return chosen
