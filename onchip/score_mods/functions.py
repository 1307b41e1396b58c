"""The functions of torch that a score function may call, each as operations of its expression.

    torch.clamp(x, 0, 1)    ->   where(x < 0, 0, x), where(.. > 1, 1, ..)

A function takes the trace and its arguments, and returns the number of the operation with its
result. Kinks have the derivatives of torch: clamp has that of x at its bounds, relu 0 at 0.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from onchip.core.problem import UnsupportedError
from onchip.score_mods.expression import FLOAT_FUNCTIONS, Builder, Kind


class Trace(Protocol):
    """The trace, as functions see it: its operations, and the operation of an argument."""

    builder: Builder

    def number(self, x: Any) -> int: ...


Function = Callable[..., int]


def _apply(operation: str) -> Function:
    if operation in _ONE_OPERAND:
        return lambda x, a: x.builder.apply(operation, x.number(a))
    return lambda x, a, b: x.builder.apply(operation, x.number(a), x.number(b))


def _add(sign: str) -> Function:
    def function(x: Trace, a: Any, b: Any, *, alpha: float = 1) -> int:
        b = x.number(b)
        if alpha != 1:
            b = x.builder.apply("mul", x.builder.constant(alpha), b)
        return x.builder.apply(sign, x.number(a), b)

    return function


def _div(x: Trace, a: Any, b: Any, *, rounding_mode: str | None = None) -> int:
    a, b = x.number(a), x.number(b)
    if rounding_mode == "floor":
        return x.builder.apply("floordiv", a, b)
    if rounding_mode is None:
        return x.builder.apply("div", a, b)
    if "f" in (x.builder.kinds[a], x.builder.kinds[b]):
        return x.builder.apply("trunc", x.builder.apply("div", a, b))
    zero = x.builder.constant(0)
    is_negative = x.builder.apply("xor", *(x.builder.apply("lt", n, zero) for n in (a, b)))
    whole = x.builder.apply("floordiv", *(x.builder.apply("abs", n) for n in (a, b)))
    return x.builder.where(is_negative, x.builder.apply("neg", whole), whole)


def _where(x: Trace, condition: Any, input: Any, other: Any) -> int:
    return x.builder.where(x.number(condition), x.number(input), x.number(other))


def _masked_fill(x: Trace, a: Any, mask: Any, value: Any) -> int:
    return _where(x, mask, value, a)


def _clamp(x: Trace, a: Any, min: Any = None, max: Any = None) -> int:
    """At a bound the derivative is that of `a`, as in torch."""
    a = x.number(a)
    for name, bound in (("lt", min), ("gt", max)):
        if bound is not None:
            bound = x.number(bound)
            a = x.builder.where(x.builder.apply(name, a, bound), bound, a)
    return a


def _relu(x: Trace, a: Any, inplace: bool = False) -> int:
    _check_not_inplace(inplace)
    a, zero = x.number(a), x.builder.constant(0)
    return x.builder.where(x.builder.apply("le", a, zero), zero, a)


def _leaky_relu(x: Trace, a: Any, negative_slope: float = 0.01, inplace: bool = False) -> int:
    _check_not_inplace(inplace)
    a, zero = x.number(a), x.builder.constant(0)
    below = x.builder.apply("mul", x.builder.constant(negative_slope), a)
    return x.builder.where(x.builder.apply("gt", a, zero), a, below)


def _silu(x: Trace, a: Any, inplace: bool = False) -> int:
    _check_not_inplace(inplace)
    a = x.number(a)
    return x.builder.apply("mul", a, x.builder.apply("sigmoid", a))


def _gelu(x: Trace, a: Any, approximate: str = "none") -> int:
    """a / 2 * (1 + erf(a / sqrt(2))), or tanh(sqrt(2 / pi) * (a + 0.044715 a^3)) for erf(..)."""
    a, apply, constant = x.number(a), x.builder.apply, x.builder.constant
    if approximate == "tanh":
        cube = apply("mul", a, apply("mul", a, a))
        inner = apply("add", a, apply("mul", constant(0.044715), cube))
        step = apply("tanh", apply("mul", constant(math.sqrt(2 / math.pi)), inner))
    else:
        step = apply("erf", apply("mul", a, constant(math.sqrt(0.5))))
    return apply("mul", apply("mul", constant(0.5), a), apply("add", constant(1.0), step))


def _check_not_inplace(inplace: bool) -> None:
    if inplace:
        raise UnsupportedError("score_mod uses inplace=True: use the result of the function")


def _full_like(value: float) -> Function:
    return lambda x, a: x.builder.convert(x.builder.constant(value), x.builder.kinds[x.number(a)])


def _isnan(x: Trace, a: Any) -> int:
    return x.builder.apply("ne", x.number(a), x.number(a))


def _isinf(x: Trace, a: Any) -> int:
    return x.builder.apply("eq", x.builder.apply("abs", x.number(a)), x.builder.constant(math.inf))


def _square(x: Trace, a: Any) -> int:
    return x.builder.apply("mul", x.number(a), x.number(a))


def _reciprocal(x: Trace, a: Any) -> int:
    return x.builder.apply("div", x.builder.constant(1.0), x.number(a))


def _logical(operation: str) -> Function:
    """An operation of bools: other values count as True unless they are 0."""
    return lambda x, *args: x.builder.apply(
        operation, *(x.builder.convert(x.number(a), "b") for a in args)
    )


def _to(x: Trace, a: Any, dtype: Any = None, **kwargs: Any) -> int:
    """Conversions. A float remains in the precision of the softmax, so narrow types are refused."""
    if kwargs.pop("non_blocking", False) or kwargs.pop("copy", False) or kwargs:
        raise UnsupportedError(f"score_mod uses to with {', '.join(kwargs) or 'copy'}")
    kind = _KINDS_OF_TYPES.get(getattr(dtype, "dtype", dtype))  # to(tensor): its dtype
    if kind is None:
        raise UnsupportedError(
            f"score_mod converts a value to {dtype}: scores are computed in fp32 (fp64 for fp64)"
        )
    return x.builder.convert(x.number(a), kind)


def _as(kind: Kind) -> Function:
    return lambda x, a: x.builder.convert(x.number(a), kind)


# Functions of integers of 8 or 16 bits: with a result beyond their range, and with a wider one.
WRAPPING = frozenset(
    (
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "pow", "power", "square"),
        *("neg", "negative", "abs", "absolute", "lshift", "bitwise_left_shift"),
        *("not", "invert", "bitwise_not"),
    )
)
WIDENING = frozenset(("int", "long", "float", "double", "bool", "to", "type", "type_as"))
_KINDS_OF_TYPES = {
    **dict.fromkeys((torch.float32, torch.float64, float), "f"),
    **dict.fromkeys((torch.int64, torch.int32, int), "i"),
    **dict.fromkeys((torch.bool, bool), "b"),
}
_ONE_OPERAND = FLOAT_FUNCTIONS | {"neg", "abs", "sign", "not"}
# Functions of torch and methods of tensors by name, without underscores.
FUNCTIONS: dict[str, Function] = {
    **{name: _apply(name) for name in _ONE_OPERAND - {"not"}},
    **{name: _apply(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor")},
    **{name: _apply(name) for name in ("mul", "pow", "mod", "floordiv")},
    "power": _apply("pow"),
    "add": _add("add"),
    **dict.fromkeys(("sub", "subtract"), _add("sub")),
    "rsub": lambda x, a, b: _add("sub")(x, b, a),
    "multiply": _apply("mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _div),
    "remainder": _apply("mod"),
    "floor_divide": _apply("floordiv"),
    **dict.fromkeys(("maximum", "max"), _apply("max")),
    **dict.fromkeys(("minimum", "min"), _apply("min")),
    "absolute": _apply("abs"),
    "negative": _apply("neg"),
    "expit": _apply("sigmoid"),
    "fix": _apply("trunc"),
    **dict.fromkeys(("invert", "bitwise_not"), _apply("not")),
    "bitwise_and": _apply("and"),
    "bitwise_or": _apply("or"),
    "bitwise_xor": _apply("xor"),
    **dict.fromkeys(("lshift", "bitwise_left_shift"), _apply("shl")),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _apply("shr")),
    "greater": _apply("gt"),
    "greater_equal": _apply("ge"),
    "less": _apply("lt"),
    "less_equal": _apply("le"),
    "not_equal": _apply("ne"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda x, a, min: _clamp(x, a, min),
    "clamp_max": lambda x, a, max: _clamp(x, a, None, max),
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "silu": _silu,
    "gelu": _gelu,
    "zeros_like": _full_like(0.0),
    "ones_like": _full_like(1.0),
    "full_like": lambda x, a, fill_value: _full_like(fill_value)(x, a),
    "isnan": _isnan,
    "isinf": _isinf,
    "square": _square,
    "reciprocal": _reciprocal,
    **dict.fromkeys(("to", "type", "type_as"), _to),
    **dict.fromkeys(("float", "double"), _as("f")),
    **dict.fromkeys(("int", "long"), _as("i")),
    "bool": _as("b"),
}
