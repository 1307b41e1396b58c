"""A line keeps the order of ranks, whoever leaves and returns."""

import pytest

from onchip.engine import Request
from onchip.engine.request_queue import Line


def test_who_leaves_and_returns_stands_where_it_stood():
    line, requests = Line(), [Request(str(i), (1,)) for i in range(5)]
    for i in (3, 0, 4, 1, 2):
        requests[i].rank = (i // 2, i)
        line.add(requests[i])
    assert list(line) == requests and line[-1] is requests[4]
    line.remove(requests[1])
    with pytest.raises(ValueError, match="not in this line"):
        line.remove(requests[1])
    line.add(requests[1])
    assert list(line) == requests and len(line) == 5
