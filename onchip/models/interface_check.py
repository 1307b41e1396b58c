"""Which transformers models pass their attention to the attention interface.

transformers accepts a registered name for every model, also for a model with modules that never
look the name up: such a model would silently run its own attention. `guard` makes a model check the
name when it is set, before any module is built.

The check reads the code objects of a model's classes. The global names in the `__init__` of a class
are the classes that it builds. An attention module that uses the interface has
`ALL_ATTENTION_FUNCTIONS` among the names of its functions. A model inside a model is another
`PreTrainedModel`, which checks itself.
"""

import inspect
from collections.abc import Iterator
from functools import cache, wraps
from itertools import takewhile
from types import CodeType, FunctionType
from typing import Any

from onchip.core.problem import UnsupportedError

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Not attention over keys and values: deformable attention samples points of an image, DETR's map is
# scores without values, and Aria's projector is outside of the two models that it connects.
_NOT_ATTENTION = ("Deformable", "AttentionMap", "AriaCrossAttention")
_DENSE_ONLY = ("eager", "sdpa")  # sparse attention with an indexer compares its name with these
_guarded: dict[type, set[str]] = {}


def guard(base: type, name: str) -> None:
    """From now on a model refuses attn_implementation=name if its modules do not look the name up.
    base: `PreTrainedModel`.
    """
    if base not in _guarded:
        _guarded[base] = set()
        _wrap(base)
    _guarded[base].add(name)


def check(model: Any, name: str, base: type) -> None:
    """UnsupportedError if the modules of this model would not serve the name. The model may be
    under construction: only its class and its config are read.
    """
    why = reason(type(model), name, base)
    if why is None:
        return
    part = getattr(model.config, "base_config_key", "")
    other = "vision_config" if part == "text_config" else "text_config"
    hint = f"; a larger model can serve another part: attn_implementation={{{other!r}: {name!r}}}"
    raise UnsupportedError(f"{type(model).__name__} {why}{hint if part else ''}")


@cache
def reason(kind: type, name: str, base: type) -> str | None:
    """Why models of this class cannot serve the name; None: they look it up or do not attend."""
    built = list(classes_of(kind, base))
    tables = [table for part in built for table in _tables(part) if name not in table]
    if tables:
        others = ", ".join(map(repr, tables[0]))
        return (
            f"chooses its attention from a table of its own, which has {others} and no custom names"
            " (onchip.integrations.flash_attn and onchip.integrations.sdpa serve a model under"
            " these)"
        )
    if any(_DENSE_ONLY in _constants(part) for part in built):
        return (
            "masks keys for 'eager' and 'sdpa' alone, and gives any other implementation indices of"
            " keys that it must choose of its own: load it with attn_implementation='sdpa'"
        )
    if any(map(looks_up, built)):
        return None
    own = next((part for part in built if _is_attention(part)), None)
    if own is None:
        return None
    return (
        f"runs attention of its own ({own.__name__}), which looks up no implementation: load it"
        " with attn_implementation='eager'"
    )


def classes_of(kind: type, base: type) -> Iterator[type]:
    """The class and all classes that it builds, but not the models inside it."""
    visited, waiting = {kind}, [kind]
    while waiting:
        part = waiting.pop()
        yield part
        for value in named_in(part, "__init__"):
            if not isinstance(value, type) or value in visited or not hasattr(value, "forward"):
                continue
            if not issubclass(value, base) and not value.__module__.startswith("torch."):
                visited.add(value)
                waiting.append(value)


def looks_up(part: type) -> bool:
    """Whether a class gets its attention function from the attention interface."""
    return _INTERFACE in _names(part)


def named_in(part: type, method: str) -> list[Any]:
    """The global objects that a method names, in the modules that define its classes. Values of
    dictionaries of classes are included.
    """
    values = []
    for function in _functions(part, method):
        space, names = function.__globals__, sorted(_code_names(function.__code__))
        named = [space[name] for name in names if name in space]
        tables = [value for value in named if type(value) is dict]
        values += [*named, *(value for table in tables for value in table.values())]
    return values


def _wrap(base: Any) -> None:
    """Wrap the two transformers methods that get every name: one runs when a model is built; a user
    calls the other, which only warns if the model cannot use the name.
    """
    choose, set_all = base.get_correct_attn_implementation, base.set_attn_implementation
    names = _guarded[base]

    @wraps(choose)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        if requested_attention in names:
            check(self, requested_attention, base)
        return choose(self, requested_attention, *args, **kwargs)

    @wraps(set_all)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        if isinstance(attn_implementation, str) and attn_implementation in names:
            for part in self.modules():
                if isinstance(part, base):
                    check(part, attn_implementation, base)
        return set_all(self, attn_implementation, *args, **kwargs)

    base.get_correct_attn_implementation = get_correct_attn_implementation
    base.set_attn_implementation = set_attn_implementation


def _is_attention(part: type) -> bool:
    return "Attention" in part.__name__ and not any(
        name in part.__name__ for name in _NOT_ATTENTION
    )


def _tables(part: type) -> list[dict[str, Any]]:
    """Dictionaries from names to implementations that a class uses when it is built."""
    if "_attn_implementation" not in _names(part, "__init__"):
        return []
    values = named_in(part, "__init__")
    return [value for value in values if type(value) is dict and "eager" in value]


def _names(part: type, method: str | None = None) -> set[str]:
    """All names in the functions of a class, or in one of them."""
    names: set[str] = set()
    for function in _functions(part, method):
        names |= _code_names(function.__code__)
    return names


def _constants(part: type) -> set[Any]:
    return {const for function in _functions(part, None) for const in function.__code__.co_consts}


def _functions(part: type, method: str | None) -> list[FunctionType]:
    """The functions of a class and of its bases, or the ones named `method`. Base classes that all
    models or all modules share are left out.
    """
    shared = lambda kind: kind.__name__ == "PreTrainedModel" or kind.__module__.startswith("torch.")
    own = takewhile(lambda kind: not shared(kind), part.__mro__)
    items = [item for kind in own for item in vars(kind).items()]
    values = [inspect.unwrap(value) for name, value in items if method in (None, name)]
    return [value for value in values if isinstance(value, FunctionType)]


def _code_names(code: CodeType) -> set[str]:
    """The names of a code object and of functions and comprehensions inside it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_code_names, inner))
