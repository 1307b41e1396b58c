"""Round the numbers of the page for JSON, which has no infinity."""

from typing import Any

from torch import Tensor

DIGITS = 7  # significant ones, as many as fp32 has


def round_significant(x: float | Tensor | list[Any], digits: int = DIGITS) -> Any:
    """Numbers of any nesting, rounded to significant digits; infinities as text."""
    if isinstance(x, Tensor):
        return round_significant(x.tolist(), digits)
    if isinstance(x, list):
        return [round_significant(item, digits) for item in x]
    return float(f"{x:.{digits}g}") if abs(x) < float("inf") else str(x)
