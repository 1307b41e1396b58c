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

import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Number as PythonNumber
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from onchip.core.problem import UnsupportedError
from onchip.score_mods.expression import INPUTS, Builder, Captured, to_text
from onchip.score_mods.functions import FUNCTIONS, WIDENING, WRAPPING

ScoreFunction = Callable[..., Any]
_CAPTURED_KINDS = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), "f"),
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), "i"),
    torch.bool: "b",
}

# Functions that read the values of tensors.
_READERS = frozenset(
    (
        *("item", "tolist", "numpy", "__array__"),
        *("__int__", "__float__", "__bool__", "__index__"),
    )
)


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
        self.builder: Builder = Builder()
        self.tensors: list[Tensor] = []
        self.captured: list[Captured] = []
        self.computed: dict[int, Tensor] = {}  # by storage: tensors that the function computed
        self.constants: dict[int, Tensor] = {}  # by id: tensors that it made of numbers
        self.reads_values: bool = False  # of a captured tensor, as Python numbers

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

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__ and _has_symbol(args[1]):
            return Element(self.tracer, args[0])[args[1]]
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

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """numpy's functions, such as the product of a number of numpy and a symbol."""
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return _call(self.tracer, name, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        operands = _leaves((*args, *(kwargs or {}).values()))
        tracer = next(x.tracer for x in operands if isinstance(x, _Traced))
        return _call(tracer, _name(func), tuple(args), kwargs or {})


class Symbol(_Traced):
    """A value that a score function computes: an operation of the trace. Its shape, dtype and
    device are those with which the function may make constants.
    """

    shape: torch.Size = torch.Size(())
    device: torch.device = torch.device("cpu")

    def __init__(self, tracer: _Tracer, operation: int, narrow: torch.dtype | None = None):
        self.tracer = tracer
        self.operation = operation
        self.narrow = narrow  # the dtype of integers of fewer than 32 bits, which wrap around

    def __getitem__(self, index: Any) -> NoReturn:
        raise UnsupportedError("score_mod indexes a value that it computes, which is one number")

    def __len__(self) -> int:
        return self[0]

    def __iter__(self) -> Iterator[Any]:
        return self[0]

    @property
    def dtype(self) -> torch.dtype:
        kinds = {"f": torch.float32, "i": torch.int32, "b": torch.bool}
        return kinds[self.tracer.builder.kinds[self.operation]]

    def __repr__(self) -> str:
        return f"Symbol({self.tracer.builder.operations[self.operation].name})"

    def __getattr__(self, name: str) -> Any:
        """A method of tensors, such as symbol.abs()."""
        if name.startswith("_") or name not in FUNCTIONS:
            raise UnsupportedError(
                f"score_mod uses .{name} of a value, which is not served;"
                f" served: {', '.join(sorted(FUNCTIONS))}"
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
    function = FUNCTIONS.get(name)
    if function is None:
        raise UnsupportedError(
            f"score_mod uses {name}, which is not served; served: {', '.join(sorted(FUNCTIONS))}"
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
    if name in WIDENING or not dtypes or None in dtypes:
        return None
    if name in WRAPPING:
        raise UnsupportedError(
            f"score_mod uses {name} of elements of {dtypes[0]}, which would wrap around: convert"
            " them before, as in t[k].int()"
        )
    return dtypes[0]


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
