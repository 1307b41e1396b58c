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
# years only (RFC 3339). In an address at most 64 bytes precede the @ (RFC 5321). Domains have 2
# to 4 labels of up to 62 bytes: masks of any labels, 253 bytes in all (RFC 1035), take too long.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:[0-9]{2}-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_ATOM, _LABEL = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]", "[A-Za-z0-9](?:[A-Za-z0-9-]{0,60}[A-Za-z0-9])?"
_FORMAT_PATTERNS = {
    "date": [f"^{_DATE}$"],
    "date-time": [f"^{_DATE}.{{7}}[0-5]"],
    "email": [rf"^{_ATOM}(?:\.?{_ATOM})*@{_LABEL}(?:\.{_LABEL}){{1,3}}$", "^[^@]{1,64}@"],
    "time": ["^.{6}[0-5]"],
}
_PIECE = re.compile(r"\[(\^?)((?:\\.|[^\\\]])*)(\]?)|\\.|.", re.DOTALL)  # a class, or a character
_MEMBER = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)
_SETS = frozenset({r"\d", r"\D", r"\s", r"\S", r"\w", r"\W"})
_SPACES = r"\t\n\x0B\f\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_SPACE_SETS = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
_OUTSIDE_CLASSES = _SPACE_SETS | {".": r"[^\n\r\u2028\u2029]"}
_IN_CLASSES = _SPACE_SETS | {mark: "\\" + mark for mark in "[&~-"}  # operators of Rust's


def translate_schema(schema: Any) -> Any:
    """A copy for llguidance. ValueError: the schema has no counterpart there."""
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("the schema false allows no text")
    _check_references(schema)
    return _translate(schema)


def _translate(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_translate(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    translated = {name: _translate_keyword(name, value) for name, value in schema.items()}
    _add_format_patterns(translated)
    return translated


def _add_format_patterns(schema: dict[str, Any]) -> None:
    form, others = schema.get("format"), schema.get("allOf", [])
    patterns = _FORMAT_PATTERNS.get(form) if isinstance(form, str) else None
    if patterns is None or not isinstance(others, list):
        return
    schema["allOf"] = [*others, *({"pattern": translate_pattern(p)} for p in patterns)]
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
    return _PIECE.sub(_translate_piece, pattern)


def _translate_piece(piece: re.Match[str]) -> str:
    sign, members, end = piece.groups()
    if members is None:
        return _OUTSIDE_CLASSES.get(piece[0], piece[0])
    if not members:
        raise ValueError(f"the pattern {piece.string!r:.60} has an empty class")
    if sign:  # with all characters below U+0020 a class would also have " and \, in llguidance
        sign = r"^\x00"
    return f"[{sign}{_MEMBER.sub(_translate_member, members)}{end}"


def _translate_member(member: re.Match[str]) -> str:
    """[+--] has the range from + to -; [+-\\d] has no range, and its hyphen is a character."""
    ends = [end for end in member.groups() if end]
    hyphen = r"\-" if _SETS.intersection(ends) else "-"
    return hyphen.join([_IN_CLASSES.get(end, end) for end in ends])


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
