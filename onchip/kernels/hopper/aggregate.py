"""Gluon aggregates without hand-written constructors.

Triton 3.6 requires an `__init__` in every aggregate; Triton 3.9 writes one if there is none. This
decorator writes the same one for both.
"""

import linecache

from triton.language.core import _aggregate

from onchip.kernels.hopper.gluon_types import gl, gluon


def aggregate(cls):
    """Triton's aggregate. Without an `__init__`, the class takes its fields in order; a value in
    the class body is the field's default. Fields that are gl.constexpr are wrapped as such.
    """
    if "__init__" not in vars(cls):
        cls.__init__ = gluon.constexpr_function(_make_init(cls))
    return _aggregate(cls)


def _make_init(cls):
    """The constructor, compiled from text that `inspect` finds in linecache: Triton hashes the text
    into the kernel's cache key. Otherwise Triton 3.6 would reuse a kernel after fields have changed
    places.
    """
    fields = cls.__annotations__
    defaults = {name: vars(cls)[name] for name in fields if name in vars(cls)}
    parameters = ", ".join(f"{x}={defaults[x]!r}" if x in defaults else x for x in fields)
    is_constexpr = lambda name: fields[name] in (gl.constexpr, "gl.constexpr")
    lines = [f"def __init__(self, {parameters}):"]
    lines += [f"    self.{x} = {f'gl.constexpr({x})' if is_constexpr(x) else x}" for x in fields]
    source = "\n".join(lines) + "\n"
    filename = f"<fields of {cls.__module__}.{cls.__qualname__}>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    namespace = {"gl": gl, "__name__": cls.__module__}
    exec(compile(source, filename, "exec"), namespace)
    return namespace["__init__"]
