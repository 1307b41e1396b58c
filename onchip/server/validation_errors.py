"""Errors of a body in one sentence: the field, its value, and what would be accepted.

pydantic finds the errors. Its own messages name Python types and members of unions, but neither the
value nor what this server accepts instead.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .errors import APIError

_MAX_ERRORS = 64  # errors that are considered
_KINDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a text",
    "string_unicode": "a text of Unicode",
    "string_pattern_mismatch": "another text",
}
_BOUNDS = {
    "greater_than": ("gt", "a number above"),
    "greater_than_equal": ("ge", "a number of at least"),
    "less_than": ("lt", "a number below"),
    "less_than_equal": ("le", "a number of at most"),
    "string_too_long": ("max_length", "a text with a length of at most"),
    "string_too_short": ("min_length", "a text with a length of at least"),
    "too_long": ("max_length", "a number of entries of at most"),
    "too_short": ("min_length", "a number of entries of at least"),
}


def explain_errors(
    errors: Sequence[Mapping[str, Any]], body: Any, fields: Mapping[str, Any]
) -> APIError:
    """One sentence for pydantic's errors about a body; locations start at the body. fields: of the
    body's model, by name.

    A field with a union type has one error per member: the error deepest within the field matches
    what the client meant.
    """
    same = [entry for entry in errors[:_MAX_ERRORS] if entry["loc"][:1] == errors[0]["loc"][:1]]
    error = max(same, key=lambda entry: len(_path(entry["loc"], body)))
    path = _path(error["loc"], body)
    if not path:
        return APIError(400, "the body is not a request: send an object as application/json")
    name = ".".join(map(str, path))[:100]
    if error["type"] == "extra_forbidden":
        return APIError(400, _explain_unknown(name, path, fields), param=name)
    if error["type"] == "missing":
        return APIError(400, f"{name} is missing: it must be given", param=name)
    accepted = _accepted(error, path, fields)
    value = describe(error.get("input"))
    return APIError(400, f"{name}={value} is not served: send {accepted}", param=name)


def describe(value: Any) -> str:
    """A value in a few characters, even if it is megabytes long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"a text of {len(value)} characters"
    if isinstance(value, (int, float)):
        return str(value) if abs(value) < 1e15 else "a number of more than 15 digits"
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    return f"a list of {len(value)} entries" if isinstance(value, Sequence) else "this value"


def _path(loc: Sequence[Any], body: Any) -> list[str | int]:
    """The part of the location that is in the body, without the type names that pydantic adds."""
    path: list[str | int] = []
    here: Any = body
    for part in loc:
        if _has(here, part):
            here = here[part]
        elif path and part != loc[-1] or not isinstance(part, str) or _is_type(part):
            continue
        else:
            here = None  # a missing field
        path.append(part)
    return path


def _has(value: Any, part: Any) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)


def _is_type(part: str) -> bool:
    """A member of a union: `str`, `list[...]`, `constrained-str`, or the name of a model."""
    return not part.isidentifier() or part in ("str", "int", "float", "bool") or part[0].isupper()


def _accepted(error: Mapping[str, Any], path: Sequence[Any], fields: Mapping[str, Any]) -> str:
    known = _description(path, fields)
    if known is not None:
        return known
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        name, phrase = _BOUNDS[kind]
        return f"{phrase} {context[name]}"
    if kind == "literal_error":
        return str(context["expected"])
    return _KINDS.get(kind, "what the schema says, /openapi.json")


def _description(path: Sequence[Any], fields: Mapping[str, Any]) -> str | None:
    """The description of the last field on the path, which also describes entries of a list or
    object.
    """
    description = None
    for part in path:
        if part in fields:
            description = fields[part].description
            fields = _inner(fields[part].annotation)
    return description


def _inner(annotation: Any) -> Mapping[str, Any]:
    """The fields of the model within an annotation such as list[ChatMessage] | None."""
    if hasattr(annotation, "model_fields"):
        return annotation.model_fields
    for argument in getattr(annotation, "__args__", ()):
        if fields := _inner(argument):
            return fields
    return {}


def _explain_unknown(name: str, path: Sequence[Any], fields: Mapping[str, Any]) -> str:
    message = f"Unrecognized request argument supplied: {name}"
    similar = get_close_matches(str(path[-1])[:64], fields, 1) if len(path) == 1 else []
    return f"{message}; did you mean {similar[0]}?" if similar else message
