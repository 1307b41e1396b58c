"""The derivatives of an expression, as further operations behind its own.

    score;const f 20.0;div 0 1;tanh 2;mul 1 3        20 * tanh(score / 20)
    ...;mul 3 3;const f 1.0;sub ..                   1 - tanh^2, from operation 3: its derivative

Each operation has its rule (`_RULES`), applied in the order of the operations: forward mode. So a
branch that `where` does not choose has no share, even where its derivative is infinite; in reverse
mode it would be multiplied by zero, which gives NaN. None stands for a derivative that is zero.

At a kink: abs, sign and round have the derivative 0 there; of two equal operands of max or min
each has half of the derivative. These are torch's values.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from onchip.score_mods.expression import Builder, Expression, from_text

Derivative = int | None


class FirstDerivatives(NamedTuple):
    """`expression` has the operations of a score function, and behind them its derivatives:
    `result` is the score, `by_score` its derivative, `by_load` one for each of float_loads.
    """

    expression: Expression
    result: int
    by_score: Derivative
    loads: tuple[int, ...]
    by_load: tuple[Derivative, ...]


class SecondDerivatives(NamedTuple):
    """The derivatives of `first.by_score` and of each of `first.by_load`, by the score and by each
    of first.loads: row 0 and column 0 are the score. `expression` extends that of `first`.
    """

    expression: Expression
    first: FirstDerivatives
    table: tuple[tuple[Derivative, ...], ...]


@lru_cache(maxsize=256)
def first_derivatives(text: str) -> FirstDerivatives:
    """The first derivatives of the expression with this text."""
    expression = from_text(text)
    builder, result = Builder(expression), len(expression.operations) - 1
    loads = expression.float_loads
    by_score = _differentiate(builder, result, _score(expression))
    by_load = tuple(_differentiate(builder, result, load) for load in loads)
    return FirstDerivatives(_collect(builder, expression), result, by_score, loads, by_load)


@lru_cache(maxsize=256)
def second_derivatives(text: str) -> SecondDerivatives:
    """The second derivatives of the expression with this text."""
    first = first_derivatives(text)
    builder = Builder(first.expression)
    variables = (_score(first.expression), *first.loads)
    table = tuple(
        tuple(None if d is None else _differentiate(builder, d, by) for by in variables)
        for d in (first.by_score, *first.by_load)
    )
    return SecondDerivatives(_collect(builder, first.expression), first, table)


def _collect(builder: Builder, expression: Expression) -> Expression:
    return Expression(tuple(builder.operations), tuple(builder.kinds), expression.captured)


def _score(expression: Expression) -> Derivative:
    names = [operation.name for operation in expression.operations]
    return names.index("score") if "score" in names else None


def _differentiate(builder: Builder, result: int, by: Derivative) -> Derivative:
    """The derivative of operation `result` by operation `by`."""
    if by is None:
        return None
    derivatives: dict[int, Derivative] = {by: builder.constant(1.0)}
    for number in range(by + 1, result + 1):
        name, args, _ = builder.operations[number]
        along = [derivatives.get(a) for a in args]
        rule = _RULES.get(name)
        if rule is not None and any(d is not None for d in along):
            derivatives[number] = rule(_Algebra(builder), number, args, along)
    return derivatives.get(result)


class _Algebra(NamedTuple):
    """Sums and products of derivatives, in which None is zero."""

    builder: Builder

    def constant(self, value: float) -> int:
        return self.builder.constant(value)

    def apply(self, name: str, *args: int) -> int:
        return self.builder.apply(name, *args)

    def add(self, a: Derivative, b: Derivative) -> Derivative:
        if a is None or b is None:
            return b if a is None else a
        return self.apply("add", a, b)

    def subtract(self, a: Derivative, b: Derivative) -> Derivative:
        if b is None:
            return a
        return self.apply("neg", b) if a is None else self.apply("sub", a, b)

    def multiply(self, d: Derivative, factor: int) -> Derivative:
        if d is None or self._is_one(factor):
            return d
        return factor if self._is_one(d) else self.apply("mul", d, factor)

    def divide(self, d: Derivative, divisor: int) -> Derivative:
        return None if d is None else self.apply("div", d, divisor)

    def choose(self, condition: int, a: Derivative, b: Derivative) -> Derivative:
        if a is None and b is None:
            return None
        zero = self.constant(0.0)
        return self.builder.where(condition, zero if a is None else a, zero if b is None else b)

    def _is_one(self, number: int) -> bool:
        operation = self.builder.operations[number]
        return operation.name == "const" and operation.value == 1


# A rule takes the algebra, the number of the operation, its operands and their derivatives.
Rule = Callable[[_Algebra, int, tuple[int, ...], list[Derivative]], Derivative]


def _function(factor: Callable[[_Algebra, int, int], int]) -> Rule:
    """The rule of a function of one operand: its derivative times `factor(algebra, out, a)`."""
    return lambda x, out, args, d: x.multiply(d[0], factor(x, out, args[0]))


def _one_minus_square(x: _Algebra, out: int, a: int) -> int:
    return x.apply("sub", x.constant(1.0), x.apply("mul", out, out))


def _sigmoid_factor(x: _Algebra, out: int, a: int) -> int:
    return x.apply("mul", out, x.apply("sub", x.constant(1.0), out))


def _rsqrt_factor(x: _Algebra, out: int, a: int) -> int:
    cube = x.apply("mul", out, x.apply("mul", out, out))
    return x.apply("mul", x.constant(-0.5), cube)


def _erf_factor(x: _Algebra, out: int, a: int) -> int:
    bell = x.apply("exp", x.apply("neg", x.apply("mul", a, a)))
    return x.apply("mul", x.constant(2.0 / math.sqrt(math.pi)), bell)


def _product(x: _Algebra, out: int, args: tuple[int, ...], d: list[Derivative]) -> Derivative:
    a, b = args
    return x.add(x.multiply(d[0], b), x.multiply(d[1], a))


def _quotient(x: _Algebra, out: int, args: tuple[int, ...], d: list[Derivative]) -> Derivative:
    return x.divide(x.subtract(d[0], x.multiply(d[1], out)), args[1])


def _power(x: _Algebra, out: int, args: tuple[int, ...], d: list[Derivative]) -> Derivative:
    """d[0] * b * a^(b - 1) + d[1] * a^b * log(a)"""
    a, b = args
    lower = x.apply("pow", a, x.apply("sub", b, x.constant(1.0)))
    by_base = x.multiply(x.multiply(d[0], b), lower)
    return x.add(by_base, None if d[1] is None else x.multiply(d[1], _times_log(x, out, a)))


def _times_log(x: _Algebra, out: int, a: int) -> int:
    return x.apply("mul", out, x.apply("log", a))


def _remainder(x: _Algebra, out: int, args: tuple[int, ...], d: list[Derivative]) -> Derivative:
    if d[1] is None:
        return d[0]
    return x.subtract(d[0], x.multiply(d[1], x.apply("floordiv", *args)))


def _extremum(comparison: str) -> Rule:
    def rule(x: _Algebra, out: int, args: tuple[int, ...], d: list[Derivative]) -> Derivative:
        half = x.constant(0.5)
        mean = x.add(x.multiply(d[0], half), x.multiply(d[1], half))
        unequal = x.choose(x.apply(comparison, *args), d[0], d[1])
        return x.choose(x.apply("eq", *args), mean, unequal)

    return rule


_RULES: dict[str, Rule] = {
    "add": lambda x, out, args, d: x.add(d[0], d[1]),
    "sub": lambda x, out, args, d: x.subtract(d[0], d[1]),
    "neg": lambda x, out, args, d: x.subtract(None, d[0]),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "mod": _remainder,
    "max": _extremum("gt"),
    "min": _extremum("lt"),
    "where": lambda x, out, args, d: x.choose(args[0], d[1], d[2]),
    "abs": _function(lambda x, out, a: x.apply("sign", a)),
    "exp": _function(lambda x, out, a: out),
    "exp2": _function(lambda x, out, a: x.apply("mul", out, x.constant(math.log(2.0)))),
    "log": lambda x, out, args, d: x.divide(d[0], args[0]),
    "log2": lambda x, out, args, d: x.divide(
        d[0], x.apply("mul", args[0], x.constant(math.log(2.0)))
    ),
    "sqrt": _function(lambda x, out, a: x.apply("div", x.constant(0.5), out)),
    "rsqrt": _function(_rsqrt_factor),
    "tanh": _function(_one_minus_square),
    "sigmoid": _function(_sigmoid_factor),
    "sin": _function(lambda x, out, a: x.apply("cos", a)),
    "cos": _function(lambda x, out, a: x.apply("neg", x.apply("sin", a))),
    "erf": _function(_erf_factor),
}
