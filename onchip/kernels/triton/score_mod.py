"""score_mod as a device function: the source of a Triton function is written from an expression.

    |score;const f 20.0;div 0 1;tanh 2;mul 1 3          20 * tanh(score / 20)

    @triton.jit
    def score_mod(score, b, h, q, k, floats, integers, sizes):
        v0 = score
        v1 = tl.full([], 20.0, tl.float32)
        v2 = v0 / v1
        v3 = tanh(v2)
        v4 = v1 * v3
        ...
        return tl.broadcast_to(v4, score.shape), v12    the score, and its derivative by `score`

Line vN computes operation N. An operation has the shape of its operands, so what depends on h alone
is computed once a program. Floats have fp32, integers 64 bits, or 32 if the result is known to fit.
The source has no size of a captured tensor: sizes are arguments, so that a program serves every
length, or every multiple of 8 where rows of keys are loaded by vectors. Triton reads the source by
linecache, and has it in the keys of its caches.

An index wraps as in Python, and is clamped to its tensor: a bad one reads a wrong element, never
other memory. q and k themselves are not clamped, because a tile of bias[h, q, k] then is a tile of
memory, which vectors load; outside of the tensor they read 0. The quotient of two floats is rounded
to nearest where a rounding or a comparison depends on it, because 8 / 8 must not be below 1.

The expressions are onchip/score_mods/expression.py's; examples/versions/v2.py teaches the loop that
calls the function.
"""

import hashlib
import linecache
import math
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from onchip.kernels.triton.tile import tanh
from onchip.score_mods.derivative import first_derivatives
from onchip.score_mods.expression import COMPARISONS, Expression, Number

Bounds = tuple[float, float]
_INDEX: Bounds = (0, 1 << 30)  # of b, h, q and k, also of rows past the end of a tile
_ANY: Bounds = (-math.inf, math.inf)
_VECTOR = 8  # elements, of 16 bits in 16 bytes
_INT32: Bounds = (-(1 << 31), (1 << 31) - 1)
_FP32_MAX = 3.4028234663852886e38
# What rounds or compares floats: a quotient before it must be exact where torch's is.
_DISCRETE = COMPARISONS | {"floor", "ceil", "trunc", "round", "int", "floordiv", "mod", "sign"}


@lru_cache(maxsize=256)
def score_function(text: str) -> Any:
    """The device function (score, b, h, q, k, floats, integers, sizes) -> (the score after
    score_mod, its derivative by `score`). Scores are in natural units.
    """
    first = first_derivatives(text)
    outputs = [_tile(first.result), _value(first.by_score)]
    return _compile(_Source(first.expression, (first.result, first.by_score)).write(outputs))


@lru_cache(maxsize=256)
def load_function(text: str, load: int, has_element: bool) -> Any:
    """The device function of the same arguments -> (the score after score_mod, its derivative by
    the float that operation `load` reads, and if has_element the element that it reads, else 0).
    """
    first = first_derivatives(text)
    derivative = dict(zip(first.loads, first.by_load, strict=True))[load]
    outputs = [
        _tile(first.result),
        _value(derivative),
        f"p{load} + i{load}" if has_element else "0",
    ]
    clamped = load if has_element else None
    results = first.result, derivative, clamped
    return _compile(_Source(first.expression, results, clamped).write(outputs))


def _tile(number: int) -> str:
    return f"tl.broadcast_to(v{number}, score.shape)"


def _value(number: int | None) -> str:
    return "0.0" if number is None else f"v{number}"


@lru_cache(maxsize=512)
def _compile(source: str) -> Any:
    """The function of a source. Triton asks `inspect` for it, which finds it in linecache."""
    name = f"<score_mod {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    scope: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl, **_HELPERS}
    exec(compile(source, name, "exec"), scope)
    return scope["score_mod"]


class _Source:
    """The lines of the operations on which some operations depend. clamped: a load whose indices
    are all inside its tensor.
    """

    def __init__(
        self, expression: Expression, results: tuple[int | None, ...], clamped: int | None = None
    ):
        self.expression, self.clamped = expression, clamped
        self.used = self._depend([n for n in results if n is not None])
        discrete = (n for n in self.used if expression.operations[n].name in _DISCRETE)
        self.exact = self._depend([a for n in discrete for a in expression.operations[n].args])
        self.bounds: dict[int, Bounds] = {}
        self.wide: set[int] = set()  # integers of 64 bits

    def _depend(self, stack: list[int]) -> set[int]:
        needed: set[int] = set()
        while stack:
            number = stack.pop()
            if number not in needed:
                needed.add(number)
                stack += self.expression.operations[number].args
        return needed

    def write(self, outputs: list[str]) -> str:
        lines = ["@triton.jit", "def score_mod(score, b, h, q, k, floats, integers, sizes):"]
        for number in sorted(self.used):
            lines += [f"    {line}" for line in self._lines(number)]
        return "\n".join((*lines, f"    return {', '.join(outputs)}", ""))

    def _lines(self, number: int) -> list[str]:
        operation = self.expression.operations[number]
        if operation.name == "load":
            return self._load(number)
        if self.expression.kinds[number] == "i":
            self._bound(number)
        return [f"v{number} = {self._expression(number)}"]

    def _expression(self, number: int) -> str:
        name, args, value = self.expression.operations[number]
        if value is not None:
            return self._constant(number, value)
        kinds = [self.expression.kinds[a] for a in args]
        if name in ("float", "int", "bool"):
            return _convert(args[0], kinds[0], name, number in self.wide)
        if not args:
            return name
        is_wide = number in self.wide or any(a in self.wide for a in args)
        operands = [self._operand(a, name, is_wide) for a in args]
        kind = kinds[-1]
        if kind == "f" and name == "div" and number in self.exact:
            name = "div_rn"
        if kind == "i" and name in ("floordiv", "mod"):
            is_plain = self.bounds[args[0]][0] >= 0 and self.bounds[args[1]][0] > 0
            name = f"{name} plain" if is_plain else name
        template = _OF_KIND.get((name, kind)) or _TEMPLATES[name]
        return template.format(*operands)

    def _operand(self, number: int, name: str, is_wide: bool) -> str:
        kind = self.expression.kinds[number]
        if kind == "b" and name in COMPARISONS:
            return f"tl.where(v{number}, 1, 0)"
        must_widen = kind == "i" and is_wide and number not in self.wide
        return f"v{number}.to(tl.int64)" if must_widen else f"v{number}"

    def _constant(self, number: int, value: Number) -> str:
        kind = self.expression.kinds[number]
        if kind == "f":
            return f"tl.full([], {_float(float(value))}, tl.float32)"
        dtype = "int1" if kind == "b" else "int64" if number in self.wide else "int32"
        return f"tl.full([], {value!r}, tl.{dtype})"

    def _load(self, number: int) -> list[str]:
        """vN is the element pN + iN. The last index keeps its width, for fewer registers: pN often
        is one number, and pointers of a tile are then that and 32 bits for each cell.
        """
        _, args, value = self.expression.operations[number]
        tensor, first = int(value or 0), self._first_size(int(value or 0))
        terms, last, inside = self._offset(tensor), "tl.full([], 0, tl.int32)", []
        for i, arg in enumerate(args):
            wrap = "clamp" if self.bounds[arg][0] >= 0 else "wrap"
            index = f"{wrap}(v{arg}, sizes[{first + i}])"
            if number != self.clamped and self.expression.operations[arg].name in ("q", "k"):
                index = f"v{arg}"
                inside.append(f"({index} < {self._size(number, i)})")
            if i == len(args) - 1:
                last = index
            else:
                strides = "".join(f" * {self._size(number, n)}" for n in range(i + 1, len(args)))
                terms.append(f"{index}.to(tl.int64){strides}")
        kind = self.expression.captured[tensor].kind
        self.bounds[number] = _ANY
        if kind == "i":
            self.wide.add(number)
        base = "floats" if kind == "f" else "integers"
        mask = f", mask={' & '.join(inside)}, other=0" if inside else ""
        load = f"tl.load({base} + p{number} + i{number}{mask})"
        converted = {"f": f"{load}.to(tl.float32)", "i": load, "b": f"{load} != 0"}[kind]
        return [
            f"p{number} = {' + '.join(terms) or 'tl.full([], 0, tl.int64)'}",
            f"i{number} = {last}",
            f"v{number} = {converted}",
        ]

    def _size(self, number: int, dim: int) -> str:
        """The size of a dimension of a load. Of keys, if it is a multiple of _VECTOR, it is written
        so that the compiler knows that: rows of bias[h, q, k] are aligned.
        """
        _, args, value = self.expression.operations[number]
        tensor = int(value or 0)
        size = f"sizes[{self._first_size(tensor) + dim}]"
        is_row = dim == len(args) - 1 and self.expression.operations[args[dim]].name == "k"
        is_aligned = self.expression.captured[tensor].sizes[dim] % _VECTOR == 0
        return f"({size} // {_VECTOR} * {_VECTOR})" if is_row and is_aligned else size

    def _first_size(self, tensor: int) -> int:
        return sum(len(c.sizes) for c in self.expression.captured[:tensor])

    def _offset(self, tensor: int) -> list[str]:
        """The elements of each tensor before this one in the same buffer."""
        captured, terms = self.expression.captured, []
        for i in range(tensor):
            if (captured[i].kind == "f") == (captured[tensor].kind == "f"):
                sizes = range(self._first_size(i), self._first_size(i + 1))
                product = "".join(f" * sizes[{n}]" for n in sizes)
                terms.append(f"tl.full([], 1, tl.int64){product}")
        return terms

    def _bound(self, number: int) -> None:
        """The least and the largest value of an integer, and from them its width."""
        name, args, value = self.expression.operations[number]
        given = [self.bounds.get(a, _ANY) for a in args if self.expression.kinds[a] == "i"]
        if value is not None:
            bounds = (value, value)
        elif name == "int" and self.expression.kinds[args[0]] == "b":
            bounds = (0, 1)
        elif not args:
            bounds = _INDEX
        else:
            bounds = _bound_result(name, given)
        self.bounds[number] = bounds
        fits = _INT32[0] <= bounds[0] and bounds[1] <= _INT32[1]
        if not fits or any(a in self.wide for a in args):
            self.wide.add(number)


def _bound_result(name: str, given: list[Bounds]) -> Bounds:
    """The bounds of an operation on integers within `given`."""
    if any(math.inf in (-lo, hi) for lo, hi in given):
        return _ANY
    if name in ("add", "sub", "mul", "max", "min"):
        corners = [_CORNERS[name](x, y) for x in given[0] for y in given[1]]
        return min(corners), max(corners)
    if name == "where":
        return min(lo for lo, _ in given), max(hi for _, hi in given)
    if name in ("neg", "abs"):
        (lo, hi) = given[0]
        least = 0 if lo <= 0 <= hi else min(abs(lo), abs(hi))
        return (-hi, -lo) if name == "neg" else (least, max(abs(lo), abs(hi)))
    if name in ("floordiv", "mod") and given[1][0] > 0:
        if name == "mod":
            return 0, given[1][1] - 1
        corners = [x // y for x in given[0] for y in given[1]]
        return min(corners), max(corners)
    return (-1, 1) if name == "sign" else _ANY


_CORNERS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": max,
    "min": min,
}


def _convert(a: int, kind: str, name: str, is_wide: bool) -> str:
    if name == "bool":
        return f"v{a} != 0"
    if kind == "b":
        return f"tl.where(v{a}, 1.0, 0.0)" if name == "float" else f"tl.where(v{a}, 1, 0)"
    return f"v{a}.to(tl.float32)" if name == "float" else f"v{a}.to(tl.int64)"


def _float(value: float) -> str:
    if math.isnan(value):
        return 'float("nan")'
    if abs(value) > _FP32_MAX:
        return 'float("inf")' if value > 0 else 'float("-inf")'
    return repr(value)


_TEMPLATES = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "div_rn": "divide({}, {})",
    "floordiv": "floor_divide({}, {})",
    "mod": "modulo({}, {})",
    "floordiv plain": "{} // {}",
    "mod plain": "{} % {}",
    "pow": "power({}, {})",
    "max": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "-{}",
    "abs": "tl.abs({})",
    "not": "~{}",
    "and": "{} & {}",
    "or": "{} | {}",
    "xor": "{} ^ {}",
    "shl": "shift_left({}, {})",
    "shr": "shift_right({}, {})",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "where": "tl.where({}, {}, {})",
    **{name: f"tl.{name}({{}})" for name in ("exp", "exp2", "log", "log2", "rsqrt")},
    **{name: f"tl.{name}({{}})" for name in ("sin", "cos", "erf", "floor", "ceil")},
    "sqrt": "tl.sqrt_rn({})",
    "tanh": "tanh({})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{}))",
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "round": "round_to_even({})",
}
_OF_KIND = {
    ("max", "i"): "tl.maximum({}, {})",
    ("min", "i"): "tl.minimum({}, {})",
    ("sign", "i"): "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))",
    ("not", "b"): "{} == 0",
    ("floordiv", "f"): "floor_divide_floats({}, {})",
    ("mod", "f"): "modulo_floats({}, {})",
}


@triton.jit
def wrap(index, size):
    """An index inside a dimension: negative ones count from its end."""
    return clamp(tl.maximum(tl.where(index < 0, index + size, index), 0), size)


@triton.jit
def clamp(index, size):
    """The same of an index that is not negative."""
    return tl.minimum(index, size - 1)


@triton.jit
def divide(a, b):
    """a / b, rounded to nearest."""
    a, b = tl.broadcast(a, b)
    return tl.div_rn(a, b)


@triton.jit
def floor_divide(a, b):
    """a // b of integers, rounded down as in Python. `//` of Triton rounds to zero."""
    whole = a // b
    rest = a - whole * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), whole - 1, whole)


@triton.jit
def modulo(a, b):
    """a % b of integers, with the sign of b."""
    rest = a - a // b * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide_floats(a, b):
    """a // b of floats, for quotients below 2^23."""
    a, b = tl.broadcast(a, b)
    whole = tl.floor(tl.div_rn(a, b))
    rest = tl.fma(-whole, b, a)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), whole - 1, whole)


@triton.jit
def modulo_floats(a, b):
    """a % b of floats, with the sign of b, for quotients below 2^23."""
    a, b = tl.broadcast(a, b)
    whole = tl.floor(tl.div_rn(a, b))
    rest = tl.where(whole == 0, a, tl.fma(-whole, b, a))
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def power(a, b):
    """a^b; of a negative a only for whole b, otherwise NaN."""
    a, b = tl.broadcast(a, b)
    size = tl.exp2(b * tl.log2(tl.abs(a)))
    half = b * 0.5
    signed = tl.where(half == tl.floor(half), size, -size)
    signed = tl.where(b == tl.floor(b), signed, float("nan"))
    return tl.where((b == 0) | (a == 1), 1.0, tl.where(a < 0, signed, size))


@triton.jit
def round_to_even(x):
    """The nearest integer; of two, the even one."""
    below = tl.floor(x)
    rest, half = x - below, below * 0.5
    middle = below + tl.where(half == tl.floor(half), 0.0, 1.0)
    return tl.where(rest > 0.5, below + 1, tl.where(rest < 0.5, below, middle))


@triton.jit
def shift_left(a, b):
    """a << b in 64 bits; 0 for a negative b and for one from 64 on."""
    fits = (b >= 0) & (b < 64)
    return tl.where(fits, a.to(tl.int64) << tl.where(fits, b, 0).to(tl.int64), 0)


@triton.jit
def shift_right(a, b):
    """a >> b in 64 bits; the sign of a for a negative b and for one from 63 on."""
    fits = (b >= 0) & (b < 63)
    return a.to(tl.int64) >> tl.where(fits, b, 63).to(tl.int64)


_HELPERS = {
    "tanh": tanh,
    "divide": divide,
    "wrap": wrap,
    "clamp": clamp,
    "floor_divide": floor_divide,
    "modulo": modulo,
    "floor_divide_floats": floor_divide_floats,
    "modulo_floats": modulo_floats,
    "power": power,
    "round_to_even": round_to_even,
    "shift_left": shift_left,
    "shift_right": shift_right,
}
