"""A JSON schema as llguidance reads it, with the meaning of draft 2020-12.

    "pattern": "^\\s$"      ECMA-262, as the draft says       -> in the syntax of Rust
    "maxItems": 2.0         any number without a fraction     -> 2
    "format": "email"       with the bounds of its RFC        -> a pattern
    "$ref": "#/$defs/d"     to itself, which allows no text   -> refused

Rust's expressions differ in a few characters: there \\s has U+0085, and [[:alpha:]] is a class.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from onchip.engine.structure.grammar import walk

_VALUES = frozenset({"const", "default", "enum", "examples"})  # their objects are no schemas
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_COUNTS = frozenset(
    {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
)
# Bounds that llguidance lacks. A month has its days, and a second 60 is valid in one minute of some
# years only (RFC 3339). In an address at most 64 bytes precede the @ and 255 follow it (RFC 5321).
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:[0-9]{2}-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_ATOM, _LABEL = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]", "[A-Za-z0-9](?:[A-Za-z0-9-]{0,60}[A-Za-z0-9])?"
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}.{{7}}[0-5]",
    "email": rf"^{_ATOM}(?:\.?{_ATOM}){{0,31}}@{_LABEL}(?:\.{_LABEL}){{1,3}}$",
    "time": "^.{6}[0-5]",
}
_PIECE = re.compile(r"\\.|\[\^?|\]|--|&&|~~|.", re.DOTALL)
_SPACES = r"\t\n\x0B\f\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_CLASSES = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]", ".": r"[^\n\r\u2028\u2029]"}


def translate_schema(schema: Any) -> Any:
    """A copy for llguidance. ValueError: the schema has no counterpart there."""
    if isinstance(schema, bool):
        return _translate_boolean(schema)
    _check_references(schema)
    return _translate(schema)


def _translate_boolean(schema: bool) -> dict[str, Any]:
    if not schema:
        raise ValueError("the schema false allows no text")
    return {}


def _translate(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_translate(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    translated = {name: _translate_keyword(name, value) for name, value in schema.items()}
    _add_format_pattern(translated)
    return translated


def _add_format_pattern(schema: dict[str, Any]) -> None:
    form, others = schema.get("format"), schema.get("allOf", [])
    pattern = _FORMAT_PATTERNS.get(form) if isinstance(form, str) else None
    if pattern is None or not isinstance(others, list):
        return
    schema["allOf"] = [*others, {"pattern": translate_pattern(pattern)}]
    if form == "email":  # the intersection with llguidance's own expression takes too long
        del schema["format"]


def _translate_keyword(name: str, value: Any) -> Any:
    if name in _VALUES:
        return value
    if name == "pattern" and isinstance(value, str):
        return translate_pattern(value)
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in _MAPS and isinstance(value, Mapping):
        rename = translate_pattern if name == "patternProperties" else str
        return {rename(key): _translate(inner) for key, inner in value.items()}
    return _translate(value)


def translate_pattern(pattern: str) -> str:
    """An expression of ECMA-262 in the syntax of Rust's."""
    pieces, in_class = [], False
    for piece in _PIECE.findall(pattern):
        if in_class:
            if piece == "]" and pieces[-1] in ("[", "[^"):
                raise ValueError(f"the pattern {pattern!r:.60} has an empty class")
            in_class = piece != "]"
            if piece[0] == "[" or piece in ("--", "&&", "~~"):
                piece = "\\" + piece  # a character here; in Rust a class, or an operation on two
            pieces.append(piece if piece == "." else _CLASSES.get(piece, piece))
        else:
            in_class = piece in ("[", "[^")
            pieces.append(_CLASSES.get(piece, piece))
    return "".join(pieces)


def _check_references(root: Any) -> None:
    """Refuse a $ref that leads back to itself through others, and to no schema."""
    checked: set[str] = set()
    for node in walk(root):
        seen: set[str] = set()
        while isinstance(node, Mapping) and isinstance(reference := node.get("$ref"), str):
            if reference in checked:
                break
            if reference in seen:
                raise ValueError(f"the $ref {reference!r:.60} refers to itself")
            seen.add(reference)
            node = _find(root, reference)
        checked |= seen


def _find(root: Any, reference: str) -> Any:
    """What a JSON pointer of a $ref points to in a schema, or None."""
    node, (before, *names) = root, unquote(reference).split("/")
    if before != "#":
        return None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
