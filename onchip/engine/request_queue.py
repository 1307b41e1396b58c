"""A queue of requests, sorted by their order keys."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from onchip.engine.request import Request


def _order_key(request: Request) -> tuple[float, int]:
    return request.order_key


class RequestQueue:
    """Order keys are unique and never change. A request that is removed and added again therefore
    returns to its old position, before all requests that arrived later.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a copy: the queue may change during the loop."""
        return iter(tuple(self._requests))

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order_key)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order_key, key=_order_key)
        if index == len(self) or self._requests[index] is not request:
            raise ValueError(f"{request} is not in this queue")
        del self._requests[index]
