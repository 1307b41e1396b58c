"""The queue keeps its order when requests are removed and added again."""

import pytest

from onchip.engine import Request
from onchip.engine.request_queue import RequestQueue


def test_a_request_returns_to_its_position():
    queue, requests = RequestQueue(), [Request(str(i), (1,)) for i in range(5)]
    for i in (3, 0, 4, 1, 2):
        requests[i].order_key = (i // 2, i)
        queue.add(requests[i])
    assert list(queue) == requests and queue[-1] is requests[4]
    queue.remove(requests[1])
    with pytest.raises(ValueError, match="not in this queue"):
        queue.remove(requests[1])
    queue.add(requests[1])
    assert list(queue) == requests and len(queue) == 5
