"""Expressions: the operations of a score function, as a list.

    score / 20 tanh 20 ...          text of  20 * tanh(score / 20) + bias[h, q - k]

    f:8,512|score;const f 20.0;div 0 1;tanh 2;mul 1 3;h;q;k;sub 6 7;load 5 8 @0;add 4 9

Before the bar are the captured tensors: a letter for the kind of their elements, and their sizes.
After it, operation n refers to earlier ones by number, and the last one is the result. Text can be
an argument of a torch op and a key of a cache.

Every operation has a kind: "f" (a float in the precision of the softmax), "i" (an integer) or "b"
(a bool). The two operands of an operation have the same kind: `Builder` inserts conversions by
torch's rules of promotion. Integers and bools that a function captures are integers of one tensor,
its floats are elements of another (`ScoreMod.flatten`).
"""

import math
from functools import lru_cache
from typing import NamedTuple

from onchip.core.problem import UnsupportedError

Kind = str
Number = float | int | bool
MAX_OPERATIONS = 1000

INPUTS = {"score": "f", "b": "i", "h": "i", "q": "i", "k": "i"}
# Operations by the kinds of their operands and of their result.
FLOAT_FUNCTIONS = frozenset(
    (
        *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf"),
        *("floor", "ceil", "trunc", "round"),
    )
)
ARITHMETIC = frozenset(("add", "sub", "mul", "floordiv", "mod", "max", "min"))
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
LOGIC = frozenset(("and", "or", "xor"))
SHIFTS = frozenset(("shl", "shr"))
CONVERSIONS = {"float": "f", "int": "i", "bool": "b"}
_RANK = {"b": 0, "i": 1, "f": 2}


class Operation(NamedTuple):
    """One operation. `value`: of "const" the number, of "load" the number of the tensor."""

    name: str
    args: tuple[int, ...] = ()
    value: Number | None = None


class Captured(NamedTuple):
    """A tensor that a score function indexes. `offset` is that of its first element among the
    captured floats, or among the captured integers and bools.
    """

    kind: Kind
    sizes: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class Expression(NamedTuple):
    """Operations, the kind of each result, and the captured tensors."""

    operations: tuple[Operation, ...]
    kinds: tuple[Kind, ...]
    captured: tuple[Captured, ...]

    @property
    def float_loads(self) -> tuple[int, ...]:
        """The operations that read an element of a captured tensor of floats."""
        loads = (i for i, op in enumerate(self.operations) if op.name == "load")
        return tuple(i for i in loads if self.kinds[i] == "f")


class Builder:
    """A growing list of operations in which no operation occurs twice."""

    def __init__(self, expression: Expression | None = None):
        self.operations: list[Operation] = []
        self.kinds: list[Kind] = []
        self._numbers: dict[tuple, int] = {}
        if expression is not None:
            for operation, kind in zip(expression.operations, expression.kinds, strict=True):
                self._append(operation, kind)

    def constant(self, value: Number) -> int:
        kind = "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
        return self._append(Operation("const", (), value), kind)

    def read(self, name: str) -> int:
        """One of INPUTS."""
        return self._append(Operation(name), INPUTS[name])

    def load(self, tensor: int, kind: Kind, indices: tuple[int, ...]) -> int:
        return self._append(Operation("load", indices, tensor), kind)

    def convert(self, a: int, kind: Kind) -> int:
        if self.kinds[a] == kind:
            return a
        operation = self.operations[a]
        if operation.name == "const" and operation.value is not None:
            types = {"f": float, "i": int, "b": bool}
            return self.constant(types[kind](operation.value))
        name = next(n for n, to in CONVERSIONS.items() if to == kind)
        return self._append(Operation(name, (a,)), kind)

    def where(self, condition: int, a: int, b: int) -> int:
        a, b = self._promote(a, b)
        return self._append(Operation("where", (self.convert(condition, "b"), a, b)), self.kinds[a])

    def apply(self, name: str, *args: int) -> int:
        """The operation `name` of one or two operands, converted as torch would."""
        if name in FLOAT_FUNCTIONS:
            if name in ("floor", "ceil", "trunc", "round") and self.kinds[args[0]] == "i":
                return args[0]
            return self._append(Operation(name, (self.convert(args[0], "f"),)), "f")
        if name in ("div", "pow"):
            return self._apply_quotient_or_power(name, *args)
        if name in ("neg", "abs", "sign"):
            if self.kinds[args[0]] == "b":
                raise UnsupportedError(f"score_mod applies {name} to a bool")
            return self._append(Operation(name, args), self.kinds[args[0]])
        if name == "not":
            return self._append(Operation(name, args), self._integral(name, *args))
        return self._apply_binary(name, *args)

    def _apply_binary(self, name: str, a: int, b: int) -> int:
        a, b = self._promote(a, b)
        kind = self.kinds[a]
        if name in COMPARISONS:
            return self._append(Operation(name, (a, b)), "b")
        if name in LOGIC:
            return self._append(Operation(name, (a, b)), self._integral(name, a, b))
        if name in SHIFTS:
            if kind != "i":
                raise UnsupportedError(f"score_mod applies {name} to {_NAMES[kind]}")
            return self._append(Operation(name, (a, b)), kind)
        if kind == "b":
            logic = {"add": "or", "mul": "and", "max": "or", "min": "and"}
            if name not in logic:
                raise UnsupportedError(f"score_mod applies {name} to two bools")
            return self._append(Operation(logic[name], (a, b)), kind)
        return self._append(Operation(name, (a, b)), kind)

    def _apply_quotient_or_power(self, name: str, a: int, b: int) -> int:
        """a / b or a ** b, in floats. Small powers are products, which have integers as well."""
        exponent = self.operations[b].value if self.operations[b].name == "const" else None
        if name == "pow" and exponent in (1, 2, 3, 4):
            power = a = self._promote(a, b)[0]
            for _ in range(int(exponent) - 1):
                power = self.apply("mul", power, a)
            return power
        if name == "pow" and exponent == 0.5:
            return self.apply("sqrt", a)
        if name == "pow" and exponent == -1:
            name, a, b = "div", self.constant(1.0), a
        return self._append(Operation(name, (self.convert(a, "f"), self.convert(b, "f"))), "f")

    def _promote(self, a: int, b: int) -> tuple[int, int]:
        kind = max(self.kinds[a], self.kinds[b], key=_RANK.__getitem__)
        return self.convert(a, kind), self.convert(b, kind)

    def _integral(self, name: str, *args: int) -> Kind:
        kind = self.kinds[args[0]]
        if kind == "f":
            raise UnsupportedError(f"score_mod applies a logical {name!r} to floats")
        return kind

    def _append(self, operation: Operation, kind: Kind) -> int:
        key = (*operation, kind, repr(operation.value))  # 1 == 1.0 == True, and -0.0 == 0.0
        number = self._numbers.get(key)
        if number is None:
            if len(self.operations) >= MAX_OPERATIONS:
                raise UnsupportedError(
                    f"score_mod has more than {MAX_OPERATIONS} operations: precompute a part of it"
                    " as a tensor, and index that"
                )
            number = self._numbers[key] = len(self.operations)
            self.operations.append(operation)
            self.kinds.append(kind)
        return number

    def finish(self, result: int, captured: tuple[Captured, ...] = ()) -> Expression:
        """The operations on which `result` depends. It comes last."""
        used, stack = set(), [result]
        while stack:
            number = stack.pop()
            if number not in used:
                used.add(number)
                stack += self.operations[number].args
        order = sorted(used)
        place = {number: i for i, number in enumerate(order)}
        operations = (self.operations[n] for n in order)
        moved = tuple(o._replace(args=tuple(place[a] for a in o.args)) for o in operations)
        return Expression(moved, tuple(self.kinds[n] for n in order), captured)


_NAMES = {"f": "floats", "i": "integers", "b": "bools"}


def to_text(expression: Expression) -> str:
    captured = " ".join(f"{c.kind}:{','.join(map(str, c.sizes))}" for c in expression.captured)
    pairs = zip(expression.operations, expression.kinds, strict=True)
    return f"{captured}|{';'.join(_operation_text(o, kind) for o, kind in pairs)}"


def _operation_text(operation: Operation, kind: Kind) -> str:
    name, args, value = operation
    if name == "const":
        return f"const {kind} {value!r}"
    suffix = "" if value is None else f" @{value}"
    return " ".join((name, *map(str, args))) + suffix


@lru_cache(maxsize=256)
def from_text(text: str) -> Expression:
    """The inverse of to_text."""
    captured, operations = text.split("|")
    tensors, ends = [], {"f": 0, "i": 0}
    for entry in captured.split():
        kind, sizes = entry.split(":")
        group = "f" if kind == "f" else "i"
        tensor = Captured(kind, tuple(int(n) for n in sizes.split(",") if n), ends[group])
        ends[group] += tensor.numel
        tensors.append(tensor)
    builder = Builder()
    for entry in operations.split(";"):
        _append_text(builder, entry, tensors)
    return Expression(tuple(builder.operations), tuple(builder.kinds), tuple(tensors))


def _append_text(builder: Builder, entry: str, tensors: list[Captured]) -> None:
    name, *words = entry.split()
    if name == "const":
        types = {"f": float, "i": int, "b": lambda word: word == "True"}
        builder.constant(types[words[0]](words[1]))
    elif name in INPUTS:
        builder.read(name)
    elif name == "load":
        tensor = int(words.pop()[1:])
        builder.load(tensor, tensors[tensor].kind, tuple(map(int, words)))
    elif name in CONVERSIONS:
        builder.convert(int(words[0]), CONVERSIONS[name])
    elif name == "where":
        builder.where(*map(int, words))
    else:
        builder.apply(name, *map(int, words))
