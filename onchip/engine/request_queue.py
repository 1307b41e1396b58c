"""Requests in the order of their ranks."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from onchip.engine.request import Request


def _order_key(request: Request) -> tuple[float, int]:
    return request.order_key


class RequestQueue:
    """Ranks are unique and never change, so a request that leaves a line and returns stands where
    it stood, before everyone who came after it.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Those in line now: it may change meanwhile."""
        return iter(tuple(self._requests))

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order_key)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order_key, key=_order_key)
        if index == len(self) or self._requests[index] is not request:
            raise ValueError(f"{request} is not in this line")
        del self._requests[index]
