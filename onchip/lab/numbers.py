"""Numbers as a page can show them."""

from typing import Any

from torch import Tensor

DIGITS = 7  # significant ones, as many as fp32 has


def shown(x: float | Tensor | list, digits: int = DIGITS) -> Any:
    """Numbers of any nesting, rounded to significant digits; infinities as text."""
    if isinstance(x, Tensor):
        return shown(x.tolist(), digits)
    if isinstance(x, list):
        return [shown(one, digits) for one in x]
    return float(f"{x:.{digits}g}") if abs(x) < float("inf") else str(x)
