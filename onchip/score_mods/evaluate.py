"""Expressions on tiles of scores, in torch.

The indices b, h, q and k of a tile broadcast: (batch, 1, 1, 1), (heads, 1, 1), (rows, 1) and
(keys). An operation has the shape of its operands, so what depends on h alone is computed once a
head.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.score_mods.expression import Captured, Expression

_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "max": torch.maximum,
    "min": torch.minimum,
    "neg": operator.neg,
    "abs": operator.abs,
    "not": operator.invert,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "sign": torch.sign,
    "where": torch.where,
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt")},
    **{name: getattr(torch, name) for name in ("tanh", "sigmoid", "sin", "cos", "erf")},
    **{name: getattr(torch, name) for name in ("floor", "ceil", "trunc", "round")},
    "int": lambda a: a.to(torch.int64),
    "bool": lambda a: a != 0,
}
_TENSORS_ONLY = frozenset(("max", "min", "where", "sign", "not"))


class Cells(NamedTuple):
    """The cells of a tile: the indices of their scores, and which of them are visible (None: all).
    Hidden cells get a score, too, which is not used.
    """

    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor
    visible: Tensor | None


class Evaluator:
    """The operations of an expression on the scores of a tile, each computed at most once.

    `floats` and `integers` are the elements of the captured tensors (ScoreMod.flatten).
    """

    def __init__(
        self,
        expression: Expression,
        score: Tensor,
        cells: Cells,
        floats: Tensor | None,
        integers: Tensor | None,
    ):
        self.expression: Expression = expression
        self.cells = cells
        self.wide: torch.dtype = score.dtype
        self.score = score
        self.floats = floats
        self.integers = integers
        self._values: dict[int, Any] = {}

    def extend(self, expression: Expression) -> None:
        """Take an expression that continues the operations of this one."""
        if len(expression.operations) > len(self.expression.operations):
            self.expression = expression

    def value(self, number: int) -> Any:
        """The result of an operation: a tensor that broadcasts to the tile, or a constant."""
        if number not in self._values:
            self._values[number] = self._compute(number)
        return self._values[number]

    def tile(self, number: int) -> Tensor:
        """The result of an operation for every cell of the tile."""
        value = torch.as_tensor(self.value(number), dtype=self.wide, device=self.score.device)
        return value.expand(self.score.shape)

    def load_from(self, buffer: Tensor, load: int) -> Tensor:
        """What a load of a float would read from another tensor of elements, such as a tangent."""
        return buffer[self.positions(load)].to(self.wide)

    def positions(self, load: int) -> Tensor:
        """The element of the captured floats (or integers) that a load reads, for each cell."""
        operation = self.expression.operations[load]
        captured = self.expression.captured[_given(operation.value)]
        position = torch.full((1, 1, 1, 1), captured.offset, device=self.score.device)
        strides = _strides(captured.sizes)
        for dim, (arg, size) in enumerate(zip(operation.args, captured.sizes, strict=True)):
            index = self._wrap(self.value(arg), dim, size, captured)
            position = position + index * strides[dim]
        return position

    def _compute(self, number: int) -> Any:
        name, args, value = self.expression.operations[number]
        if name == "const":
            return value
        if name == "score":
            return self.score
        if name in Cells._fields:
            return getattr(self.cells, name)
        if name == "load":
            return self._load(number)
        operands = [self.value(a) for a in args]
        if name == "float":
            return operands[0].to(self.wide)
        if name in _TENSORS_ONLY or not any(isinstance(x, Tensor) for x in operands):
            kinds = (self.expression.kinds[a] for a in args)
            operands = [self._as_tensor(x, kind) for x, kind in zip(operands, kinds, strict=True)]
        return _COMPUTE[name](*operands)

    def _as_tensor(self, x: Any, kind: str) -> Tensor:
        dtypes = {"f": self.wide, "i": torch.int64, "b": torch.bool}
        return torch.as_tensor(x, dtype=dtypes[kind], device=self.score.device)

    def _load(self, number: int) -> Tensor:
        if self.expression.kinds[number] == "f":
            return self.load_from(_given(self.floats), number)
        element = _given(self.integers)[self.positions(number)]
        return element != 0 if self.expression.kinds[number] == "b" else element

    def _wrap(self, index: Any, dim: int, size: int, captured: Captured) -> Tensor:
        """An index in [0, size): negative ones count from the end. That of a hidden cell may be out
        of range, and reads any element.
        """
        given = self._as_tensor(index, "i")
        index = torch.where(given < 0, given + size, given)
        inside = (index >= 0) & (index < size)
        if index.device.type != "cpu" or bool(inside.all()):  # a device is not waited for
            return index.clamp(0, max(0, size - 1))
        outside = ~inside if self.cells.visible is None else ~inside & self.cells.visible
        if bool(outside.any()):
            bad = given.expand(outside.shape)[outside][0].item()
            raise IndexError(
                f"score_mod indexes a tensor of shape {captured.sizes} by {bad} in dimension {dim},"
                " at a visible score: clamp the index"
            )
        return index.clamp(0, max(0, size - 1))


def _given(x: Any) -> Any:
    """x, for type checkers: loads have a tensor's number, and their call has its elements."""
    return x


def _strides(sizes: tuple[int, ...]) -> list[int]:
    """Of a contiguous tensor."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides
