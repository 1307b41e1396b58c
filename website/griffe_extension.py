"""An extension of Griffe, which reads the package for the reference."""

import re

import griffe

_CODE = re.compile(r"(`[^`]*`|^(?: {4}.*\n?)+)", re.MULTILINE)


class Onchip(griffe.Extension):
    """Functions come first in a package, and docstrings are prepared for Markdown."""

    def on_module(self, *, mod: griffe.Module, **_) -> None:
        if mod.exports:  # functions first, then constants and classes
            mod.exports = sorted(map(str, mod.exports), key=str.swapcase)
        _rewrite(mod, [])

    def on_function(self, *, func: griffe.Function, **_) -> None:
        if "unknown" in func.parameters:  # collects misspelt options for an error
            del func.parameters["unknown"]
        _rewrite(func, [p.name for p in func.parameters])

    def on_class(self, *, cls: griffe.Class, **_) -> None:
        init = cls.members.get("__init__")
        parameters = [p.name for p in init.parameters] if isinstance(init, griffe.Function) else []
        _rewrite(cls, [*parameters, *cls.members])

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        _drop_fields(pkg)


def _drop_fields(obj: griffe.Module | griffe.Class) -> None:
    """The signature of a dataclass shows its fields: those without a docstring are not listed
    again. Griffe's own extension must have made the signatures before.
    """
    for name, member in list(obj.members.items()):
        if isinstance(member, griffe.Module | griffe.Class):
            _drop_fields(member)
        elif "dataclass" in obj.labels and _is_plain_field(member):
            obj.del_member(name)


def _is_plain_field(member: griffe.Object | griffe.Alias) -> bool:
    is_value = isinstance(member, griffe.Attribute) and "property" not in member.labels
    return is_value and not member.docstring


def _rewrite(obj: griffe.Object, names: list[str]) -> None:
    if obj.docstring:
        obj.docstring.value = to_markdown(obj.docstring.value, names)


def to_markdown(text: str, names: list[str]) -> str:
    """A docstring of plain text as Markdown. `name: ...` describes a parameter or a field: the name
    becomes code, and begins a paragraph if it begins a line.
    """
    parts = _CODE.split(text)  # prose and code alternate
    parts[::2] = (_mark(part, names) for part in parts[::2])
    return "".join(parts)


def _mark(prose: str, names: list[str]) -> str:
    # Products are no emphasis, i <= j is no tag, and out[, lse] is no link.
    prose = re.sub(r"([*_\\[])", r"\\\1", prose).replace("<", "&lt;")
    if not names:
        return prose
    name = "|".join(re.escape(n.replace("_", r"\_")) for n in names)
    described = re.compile(rf"(^|[.;] )((?:{name})(?:, (?:{name}))*)(?=: )", re.MULTILINE)

    def mark(match: re.Match[str]) -> str:
        code = ", ".join(f"`{n}`" for n in match[2].replace("\\", "").split(", "))
        return (match[1] or "\n") + code

    return described.sub(mark, prose)
