"""Trace a score function: call it with symbols in place of the score and the indices, and record
the operations that it applies to them.

    f(score, b, h, q, k)   ->  Symbol +, *, <, ...           Symbol's operators
                               torch.tanh(symbol), where     Symbol.__torch_function__
                               bias[h, q - k]                _IndexMode: a tensor indexed by symbols
                               torch.exp(slopes)             computed by torch: no symbol is in it

The function runs once, in Python, so its loops are unrolled, and its ifs must not depend on a
symbol. A tensor that it uses must be indexed to a single element. Everything else raises
UnsupportedError with the name of the operation.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Number as PythonNumber
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from onchip.core.problem import UnsupportedError
from onchip.score_mods.expression import INPUTS, Builder, Captured, Kind, to_text

ScoreFunction = Callable[..., Any]
_CAPTURED_KINDS = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), "f"),
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), "i"),
    torch.bool: "b",
}


class ScoreMod(NamedTuple):
    """A traced score function: its expression as text (expression.py), and the tensors that it
    indexes, in the order of the text. Calls read the values that these tensors have then.
    """

    text: str
    tensors: tuple[Tensor, ...] = ()

    def flatten(self) -> tuple[Tensor | None, Tensor | None]:
        """(floats, integers): the elements of the tensors, one after another; None for none. A
        single contiguous tensor is not copied.
        """
        floats = [t for t in self.tensors if _CAPTURED_KINDS[t.dtype] == "f"]
        others = [t.to(torch.int64) for t in self.tensors if _CAPTURED_KINDS[t.dtype] != "f"]
        return _join(floats), _join(others)


def _join(tensors: Sequence[Tensor]) -> Tensor | None:
    flat = [t.reshape(-1) for t in tensors]
    if len(flat) < 2:
        return flat[0] if flat else None
    return torch.cat(flat)


def trace(score_mod: ScoreFunction | ScoreMod) -> ScoreMod:
    """Trace score_mod(score, b, h, q, k) for any number of calls. The tensors that the function
    indexes may change in place; a tensor that it computes from others may not be indexed, because
    later calls would see its value of now.
    """
    if isinstance(score_mod, ScoreMod):
        return score_mod
    return _trace(score_mod, is_kept=True)


def trace_for_call(score_mod: ScoreFunction | ScoreMod) -> ScoreMod:
    """Trace a score function for one call."""
    if isinstance(score_mod, ScoreMod):
        return score_mod
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "torch.compile does not trace score_mod: pass onchip.score_mods.trace(score_mod), made"
            " outside of the compiled function"
        )
    return _trace(score_mod, is_kept=False)


def _trace(score_mod: ScoreFunction, is_kept: bool) -> ScoreMod:
    if not callable(score_mod):
        raise ValueError(
            f"score_mod must be a function of (score, b, h, q, k), got {type(score_mod).__name__}"
        )
    tracer = _Tracer()
    symbols = [Symbol(tracer, tracer.builder.read(name)) for name in INPUTS]
    with torch.enable_grad(), _IndexMode(tracer):
        result = _call_function(score_mod, symbols)
    score = tracer.builder.convert(tracer.number(result), "f")
    if is_kept:
        tracer.check_kept()
    expression = tracer.builder.finish(score, tuple(tracer.captured))
    return ScoreMod(to_text(expression), tuple(tracer.tensors))


def _call_function(score_mod: ScoreFunction, symbols: "list[Symbol]") -> Any:
    """score_mod of the symbols. A function of other arguments raises a TypeError that says so."""
    try:
        return score_mod(*symbols)
    except TypeError as error:
        is_from_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if not is_from_call:
            raise
        raise TypeError(f"score_mod is called with (score, b, h, q, k): {error}") from None


class _Tracer:
    """The operations of a trace, and the tensors that it indexes."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.tensors: list[Tensor] = []
        self.captured: list[Captured] = []
        self.computed: dict[int, Tensor] = {}  # by storage: tensors that the function computed
        self.constants: dict[int, Tensor] = {}  # by id: tensors that it made of numbers
        self.reads_values = False  # of a captured tensor, as Python numbers

    def number(self, x: Any) -> int:
        """The operation of an operand: a symbol, a number or a tensor of one element."""
        if isinstance(x, _Traced):
            if x.tracer is not self:
                raise ValueError("score_mod uses a symbol of another trace: it may not keep one")
            return x.operation
        if isinstance(x, Tensor):
            return self._scalar(x)
        if type(x).__module__ == "numpy" and not x.shape:
            x = x.item()
        if isinstance(x, PythonNumber) and not isinstance(x, complex):
            return self.builder.constant(_plain(x))
        raise UnsupportedError(f"score_mod computes with a {type(x).__name__}: {x!r:.60}")

    def _scalar(self, t: Tensor) -> int:
        if t.dim():
            raise UnsupportedError(
                f"score_mod computes with a tensor of shape {tuple(t.shape)}: index it to one"
                " element, as in t[h, q, k]"
            )
        if id(t) in self.constants and not t.requires_grad and t.device.type == "cpu":
            return self.builder.constant(t.item())
        return self.load(t, ())

    def load(self, t: Tensor, indices: Sequence[int]) -> int:
        """An element of a tensor."""
        kind = _CAPTURED_KINDS.get(t.dtype)
        if kind is None or t.layout != torch.strided or t.is_nested:
            raise UnsupportedError(f"score_mod indexes a tensor of {t.dtype}, {t.layout}")
        same = [i for i, known in enumerate(self.tensors) if known is t]
        if not same:
            self.tensors.append(t)
            self.captured.append(Captured(kind, tuple(t.shape), 0))
        at = same[0] if same else len(self.tensors) - 1
        return self.builder.load(at, kind, tuple(indices))

    def note(self, func: Any, operands: "list[Any]", result: Any) -> None:
        """Note the tensors that the function makes, of numbers or from other tensors and random
        numbers, and whether it reads values. Views of captured tensors are not made.
        """
        operands = [x for x in operands if isinstance(x, Tensor)]
        captured = [x for x in operands if id(x) not in self.constants]
        name = getattr(func, "__name__", "")
        if captured and name in _READERS:
            self.reads_values = True
        kept = [_storage(x) for x in operands if _storage(x) not in self.computed]
        for made in _leaves([result]):
            if not isinstance(made, Tensor) or _storage(made) in kept:
                continue
            if operands or name.startswith(("rand", "normal")):
                self.computed[_storage(made)] = made
            else:
                self.constants[id(made)] = made

    def check_kept(self) -> None:
        if self.reads_values:
            raise ValueError(
                "score_mod reads the value of a tensor (item, float, if): compute it before, or"
                " pass the function itself as score_mod, which traces it in every call"
            )
        for t in self.tensors:
            if _storage(t) in self.computed:
                raise ValueError(
                    f"score_mod computes a tensor of shape {tuple(t.shape)} and indexes it:"
                    " compute it before, or pass the function itself as score_mod, which"
                    " traces it in every call"
                )


def _storage(t: Tensor) -> int:
    """The identity of the memory of a tensor; of the tensor if it has none of its own."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(t)


def _plain(x: Any) -> float | int | bool:
    """A Python number: numpy's are converted."""
    if isinstance(x, bool):
        return x
    return operator.index(x) if hasattr(x, "__index__") else float(x)


class _IndexMode(TorchFunctionMode):
    """Serve tensors that are indexed by symbols; note which tensors the function makes."""

    def __init__(self, tracer: _Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__ and _has_symbol(args[1]):
            return Element(self.tracer, args[0]).__getitem__(args[1])
        result = func(*args, **(kwargs or {}))
        self.tracer.note(func, _leaves((*args, *(kwargs or {}).values())), result)
        return result


def _has_symbol(index: Any) -> bool:
    entries = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(entry, Symbol | Element) for entry in entries)


class _Traced:
    """What a score function computes with: it refuses to become a number. `operation` is the number
    of the operation that computes it.
    """

    tracer: _Tracer
    operation: int

    def __bool__(self) -> NoReturn:
        raise UnsupportedError(
            "score_mod branches on a value that differs by score (if, and, or, not, max, min):"
            " use torch.where, &, |, ~, torch.maximum or torch.minimum"
        )

    def _refuse_number(self) -> NoReturn:
        raise UnsupportedError(
            "score_mod turns a value that differs by score into a Python number (int, float,"
            " item, range, math): use the functions of torch"
        )

    __int__ = __float__ = __index__ = __complex__ = item = tolist = _refuse_number
    __round__ = __floor__ = __ceil__ = __trunc__ = _refuse_number
    __hash__ = object.__hash__

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        """numpy's functions, such as the product of a number of numpy and a symbol."""
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return _call(self.tracer, name, args, kwargs)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        operands = _leaves((*args, *(kwargs or {}).values()))
        tracer = next(x.tracer for x in operands if isinstance(x, _Traced))
        return _call(tracer, _name(func), args, kwargs or {})


class Symbol(_Traced):
    """A value that a score function computes: an operation of the trace. Its shape, dtype and
    device are those with which the function may make constants.
    """

    shape = torch.Size(())
    device = torch.device("cpu")

    def __init__(self, tracer: _Tracer, operation: int, narrow: torch.dtype | None = None):
        self.tracer = tracer
        self.operation = operation
        self.narrow = narrow  # the dtype of integers of fewer than 32 bits, which wrap around

    def __getitem__(self, index: Any) -> NoReturn:
        raise UnsupportedError("score_mod indexes a value that it computes, which is one number")

    __iter__ = __len__ = lambda self: self[0]  # refused, too

    @property
    def dtype(self) -> torch.dtype:
        kinds = {"f": torch.float32, "i": torch.int32, "b": torch.bool}
        return kinds[self.tracer.builder.kinds[self.operation]]

    def __repr__(self) -> str:
        return f"Symbol({self.tracer.builder.operations[self.operation].name})"

    def __getattr__(self, name: str) -> Any:
        """A method of tensors, such as symbol.abs()."""
        if name.startswith("_") or name not in _FUNCTIONS:
            raise UnsupportedError(
                f"score_mod uses .{name} of a value, which is not served;"
                f" served: {', '.join(_served())}"
            )
        return lambda *args, **kwargs: _call(self.tracer, name, (self, *args), kwargs)


class Element(_Traced):
    """A tensor of which some leading dimensions are indexed; complete, it is one element."""

    def __init__(self, tracer: _Tracer, tensor: Tensor, indices: tuple[int, ...] = ()):
        self.tracer = tracer
        self.tensor = tensor
        self.indices = indices

    def __getitem__(self, index: Any) -> "Element | Symbol":
        entries = index if isinstance(index, tuple) else (index,)
        element = Element(self.tracer, self.tensor, (*self.indices, *map(self._index, entries)))
        missing = self.tensor.dim() - len(element.indices)
        if missing < 0:
            raise IndexError(
                f"score_mod indexes a tensor of shape {tuple(self.tensor.shape)} by"
                f" {len(element.indices)} indices"
            )
        if missing:
            return element
        return Symbol(self.tracer, element.operation, _narrow_dtype(self.tensor))

    def __len__(self) -> int:
        return self.tensor.shape[len(self.indices)]

    def __iter__(self) -> Iterator["Element | Symbol"]:
        return (self[i] for i in range(len(self)))

    def _index(self, entry: Any) -> int:
        is_integer = isinstance(entry, Symbol | Element | int) and not isinstance(entry, bool)
        if not is_integer and not (isinstance(entry, Tensor) and not entry.dim()):
            raise UnsupportedError(
                f"score_mod indexes a tensor by {entry!r}: indices are integers, one a dimension"
            )
        number = self.tracer.number(entry)
        if self.tracer.builder.kinds[number] != "i":
            raise UnsupportedError("score_mod indexes a tensor by a value that is not an integer")
        return number

    @property
    def operation(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        if len(self.indices) < self.tensor.dim():
            raise UnsupportedError(
                f"score_mod computes with a row of a tensor of shape {tuple(self.tensor.shape)},"
                f" of which it indexes {len(self.indices)} dimensions: index all of them"
            )
        return self.tracer.load(self.tensor, self.indices)

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"score_mod uses .{name} of a tensor of shape {tuple(self.tensor.shape)}, of which it"
            f" indexes {len(self.indices)} dimensions: index all of them"
        )


def _leaves(args: Sequence[Any]) -> list[Any]:
    return [x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,))]


def _name(func: Any) -> str:
    """The name of a function of torch without its module, or of another with it. An operator has
    the name of its method without underscores.
    """
    name = getattr(func, "__name__", str(func))
    name = name.strip("_") if name.startswith("_") else name  # but abs_ is not abs
    module = (resolve_name(func) or "").rpartition(".")[0]
    is_torch = module in ("torch", "torch.Tensor", "torch.special", "torch.nn.functional")
    return name.removeprefix("special_") if is_torch else str(func)


def _call(tracer: _Tracer, name: str, args: tuple, kwargs: dict[str, Any]) -> Symbol:
    function = _FUNCTIONS.get(name)
    if function is None:
        raise UnsupportedError(
            f"score_mod uses {name}, which is not served; served: {', '.join(_served())}"
        )
    if not torch.is_grad_enabled():
        raise UnsupportedError(
            f"score_mod uses {name} under no_grad or in an autograd.Function: score_mod is"
            " differentiated as a formula"
        )
    narrow = _wrapping_dtype(tracer, name, _leaves((*args, *kwargs.values())))
    try:
        return Symbol(tracer, function(tracer, *args, **kwargs), narrow)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise UnsupportedError(
            f"score_mod uses {name} with arguments not served: {error}"
        ) from None


def _narrow_dtype(t: Tensor) -> torch.dtype | None:
    return t.dtype if t.dtype in (torch.int8, torch.uint8, torch.int16) else None


def _wrapping_dtype(tracer: _Tracer, name: str, operands: list[Any]) -> torch.dtype | None:
    """The dtype in which torch computes with integers of few bits alone; None for another one. The
    functions that could leave its range are refused: here they would not wrap around.
    """
    dtypes = []
    for x in operands:
        tensor = x.tensor if isinstance(x, Element) else x
        if isinstance(tensor, Tensor | Symbol) and tensor.dtype == torch.bool:
            continue  # a bool has the dtype of the other operand
        if isinstance(tensor, Tensor):
            dtypes.append(_narrow_dtype(tensor))
        elif isinstance(x, Symbol):
            dtypes.append(x.narrow)
        elif isinstance(x, float):
            dtypes.append(None)
    if name in _WIDENING or not dtypes or None in dtypes:
        return None
    if name in _WRAPPING:
        raise UnsupportedError(
            f"score_mod uses {name} of elements of {dtypes[0]}, which would wrap around: convert"
            " them before, as in t[k].int()"
        )
    return dtypes[0]


def _served() -> list[str]:
    return sorted(_FUNCTIONS)


def _apply(operation: str) -> Callable[..., int]:
    if operation in _ONE_OPERAND:
        return lambda x, a: x.builder.apply(operation, x.number(a))
    return lambda x, a, b: x.builder.apply(operation, x.number(a), x.number(b))


def _add(sign: str) -> Callable[..., int]:
    def function(x: _Tracer, a: Any, b: Any, *, alpha: float = 1) -> int:
        b = x.number(b)
        if alpha != 1:
            b = x.builder.apply("mul", x.builder.constant(alpha), b)
        return x.builder.apply(sign, x.number(a), b)

    return function


def _div(x: _Tracer, a: Any, b: Any, *, rounding_mode: str | None = None) -> int:
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


def _where(x: _Tracer, condition: Any, input: Any, other: Any) -> int:
    return x.builder.where(x.number(condition), x.number(input), x.number(other))


def _masked_fill(x: _Tracer, a: Any, mask: Any, value: Any) -> int:
    return _where(x, mask, value, a)


def _clamp(x: _Tracer, a: Any, min: Any = None, max: Any = None) -> int:
    """At a bound the derivative is that of `a`, as in torch."""
    a = x.number(a)
    for name, bound in (("lt", min), ("gt", max)):
        if bound is not None:
            bound = x.number(bound)
            a = x.builder.where(x.builder.apply(name, a, bound), bound, a)
    return a


def _relu(x: _Tracer, a: Any, inplace: bool = False) -> int:
    _check_not_inplace(inplace)
    a, zero = x.number(a), x.builder.constant(0)
    return x.builder.where(x.builder.apply("le", a, zero), zero, a)


def _leaky_relu(x: _Tracer, a: Any, negative_slope: float = 0.01, inplace: bool = False) -> int:
    _check_not_inplace(inplace)
    a, zero = x.number(a), x.builder.constant(0)
    below = x.builder.apply("mul", x.builder.constant(negative_slope), a)
    return x.builder.where(x.builder.apply("gt", a, zero), a, below)


def _silu(x: _Tracer, a: Any, inplace: bool = False) -> int:
    _check_not_inplace(inplace)
    a = x.number(a)
    return x.builder.apply("mul", a, x.builder.apply("sigmoid", a))


def _gelu(x: _Tracer, a: Any, approximate: str = "none") -> int:
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


def _full_like(value: float) -> Callable[..., int]:
    return lambda x, a: x.builder.convert(x.builder.constant(value), x.builder.kinds[x.number(a)])


def _isnan(x: _Tracer, a: Any) -> int:
    return x.builder.apply("ne", x.number(a), x.number(a))


def _isinf(x: _Tracer, a: Any) -> int:
    return x.builder.apply("eq", x.builder.apply("abs", x.number(a)), x.builder.constant(math.inf))


def _square(x: _Tracer, a: Any) -> int:
    return x.builder.apply("mul", x.number(a), x.number(a))


def _reciprocal(x: _Tracer, a: Any) -> int:
    return x.builder.apply("div", x.builder.constant(1.0), x.number(a))


def _logical(operation: str) -> Callable[..., int]:
    """An operation of bools: other values count as True unless they are 0."""
    return lambda x, *args: x.builder.apply(
        operation, *(x.builder.convert(x.number(a), "b") for a in args)
    )


def _to(x: _Tracer, a: Any, dtype: Any = None, **kwargs: Any) -> int:
    """Conversions. A float remains in the precision of the softmax, so narrow types are refused."""
    if kwargs.pop("non_blocking", False) or kwargs.pop("copy", False) or kwargs:
        raise UnsupportedError(f"score_mod uses to with {', '.join(kwargs) or 'copy'}")
    if isinstance(dtype, Symbol):
        dtype = dtype.dtype
    kind = _KINDS_OF_TYPES.get(dtype)
    if kind is None:
        raise UnsupportedError(
            f"score_mod converts a value to {dtype}: scores are computed in fp32 (fp64 for fp64)"
        )
    return x.builder.convert(x.number(a), kind)


def _as(kind: Kind) -> Callable[..., int]:
    return lambda x, a: x.builder.convert(x.number(a), kind)


# Functions that read the values of tensors.
_READERS = frozenset(
    (
        *("item", "tolist", "numpy", "__array__"),
        *("__int__", "__float__", "__bool__", "__index__"),
    )
)
# Functions of integers of 8 or 16 bits: with a result beyond their range, and with a wider one.
_WRAPPING = frozenset(
    (
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "pow", "power", "square"),
        *("neg", "negative", "abs", "absolute", "lshift", "bitwise_left_shift"),
        *("not", "invert", "bitwise_not"),
    )
)
_WIDENING = frozenset(("int", "long", "float", "double", "bool", "to", "type", "type_as"))
_KINDS_OF_TYPES = {
    **dict.fromkeys((torch.float32, torch.float64, float), "f"),
    **dict.fromkeys((torch.int64, torch.int32, int), "i"),
    **dict.fromkeys((torch.bool, bool), "b"),
}
_ONE_OPERAND = frozenset(
    (
        *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf"),
        *("floor", "ceil", "trunc", "round", "neg", "abs", "sign", "not"),
    )
)
# Functions of torch and methods of tensors by name, without underscores.
_FUNCTIONS: dict[str, Callable[..., int]] = {
    **{name: _apply(name) for name in _ONE_OPERAND - {"not"}},
    **{name: _apply(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor")},
    **{name: _apply(name) for name in ("mul", "pow", "mod", "floordiv")},
    **dict.fromkeys(("power",), _apply("pow")),
    **dict.fromkeys(("add",), _add("add")),
    **dict.fromkeys(("sub", "subtract"), _add("sub")),
    **dict.fromkeys(("rsub",), lambda x, a, b: _add("sub")(x, b, a)),
    **dict.fromkeys(("multiply",), _apply("mul")),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _div),
    **dict.fromkeys(("remainder",), _apply("mod")),
    **dict.fromkeys(("floor_divide",), _apply("floordiv")),
    **dict.fromkeys(("maximum", "max"), _apply("max")),
    **dict.fromkeys(("minimum", "min"), _apply("min")),
    **dict.fromkeys(("absolute",), _apply("abs")),
    **dict.fromkeys(("negative",), _apply("neg")),
    **dict.fromkeys(("expit",), _apply("sigmoid")),
    **dict.fromkeys(("fix",), _apply("trunc")),
    **dict.fromkeys(("invert", "bitwise_not"), _apply("not")),
    **dict.fromkeys(("bitwise_and",), _apply("and")),
    **dict.fromkeys(("bitwise_or",), _apply("or")),
    **dict.fromkeys(("bitwise_xor",), _apply("xor")),
    **dict.fromkeys(("lshift", "bitwise_left_shift"), _apply("shl")),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _apply("shr")),
    **dict.fromkeys(("greater",), _apply("gt")),
    **dict.fromkeys(("greater_equal",), _apply("ge")),
    **dict.fromkeys(("less",), _apply("lt")),
    **dict.fromkeys(("less_equal",), _apply("le")),
    **dict.fromkeys(("not_equal",), _apply("ne")),
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


def _operator(name: str, is_reflected: bool = False) -> Callable[..., Symbol]:
    def method(self: Any, *others: Any) -> Symbol:
        args = (*others, self) if is_reflected else (self, *others)
        return _call(self.tracer, name, args, {})

    return method


_BINARY_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BINARY_OPERATORS += ("and", "or", "xor", "lshift", "rshift", "matmul")
for _class in (Symbol, Element):
    for _operation in ("neg", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_class, f"__{_operation}__", _operator(_operation))
    for _operation in _BINARY_OPERATORS:
        setattr(_class, f"__{_operation}__", _operator(_operation))
        setattr(_class, f"__r{_operation}__", _operator(_operation, is_reflected=True))
