"""Gluon's two modules: `gluon` with the decorators, and its language `gl`.

Triton has no types. For a type checker, therefore, a kernel is Any, and `gl` has the types of
arguments and fields; everything else in a kernel is left to Triton's compiler.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class gluon:
        @staticmethod
        def jit(fn: Any = None, **options: Any) -> Any: ...
        @staticmethod
        def constexpr_function(fn: Any) -> Any: ...

    class _Language(type):
        def __getattr__(cls, name: str) -> Any: ...

    class gl(metaclass=_Language):
        class tensor: ...

        class shared_memory_descriptor: ...

        class constexpr:
            def __init__(self, value: Any): ...

else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

__all__ = ["gl", "gluon"]
