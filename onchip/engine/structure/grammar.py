"""What a text must follow: JSON, a JSON schema, a regular expression, choices, or a grammar.

`parse_grammar` reads the names of OpenAI and vLLM and checks sizes before anything is compiled.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from onchip.engine.structure.regex_size import count_states

MAX_GRAMMAR_BYTES = 1 << 16
MAX_DEPTH = 64  # of a schema; its compiler recurses
MAX_CHOICES = 1024
# Blanks between the tokens of a JSON text: none, one, or a line break with its indentation. Without
# a bound a model can write blanks until its max_tokens.
BLANKS = r"( |\n {0,32})"
MAX_REGEX_STATES = 20_000  # a mask over more takes seconds
_FORMATS = frozenset({"text", "json_object", "json_schema"})


class Grammar(NamedTuple):
    """kind: json (text is a schema), regex, choice (text is a JSON list) or grammar (Lark or
    GBNF).
    """

    kind: str
    text: str


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text must follow, by vLLM's names; exactly one of them. json: a schema, as a text or
    an object. json_object: any JSON object. grammar: in the syntax of Lark or GBNF.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def parse_grammar(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """The grammar of a request; None if its text is free. ValueError: it is not one."""
    formats = _of_response_format(response_format)
    wanted = formats | _of_structured_outputs(structured_outputs)
    if not wanted:
        return None
    if len(wanted) > 1 or (formats and structured_outputs is not None):
        raise ValueError(
            f"one kind of structured output is served at a time, not {' and '.join(sorted(wanted))}"
        )
    ((kind, value),) = wanted.items()
    if kind in ("json", "json_object"):
        return Grammar("json", _schema_text(value if kind == "json" else {"type": "object"}))
    if kind == "choice":
        return Grammar("choice", _choice_text(value))
    _check_text(kind, value)
    if kind == "regex":
        _check_regex(value)
    return Grammar(kind, value)


def _of_response_format(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or value.get("type") not in _FORMATS:
        raise ValueError(
            f"response_format={value!r:.60} must have a type: {', '.join(sorted(_FORMATS))}"
        )
    if value["type"] == "text":
        return {}
    if value["type"] == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    if not isinstance(described, Mapping) or "schema" not in described:
        raise ValueError("response_format of type json_schema needs json_schema with a schema")
    return {"json": described["schema"]}


def _of_structured_outputs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    names = [field.name for field in fields(StructuredOutputsParams)]
    given = vars(value) if isinstance(value, StructuredOutputsParams) else value
    if not isinstance(given, Mapping):
        raise ValueError(f"structured_outputs={value!r:.60} must be an object")
    if unknown := set(map(str, given)) - set(names):
        raise ValueError(
            f"structured_outputs.{min(unknown):.60} is not served: {', '.join(names)} are"
        )
    # False leaves an entry out, but as `json` it is a schema.
    is_given = lambda name, entry: entry is not None and (name == "json" or entry is not False)
    wanted = {name: entry for name, entry in given.items() if is_given(name, entry)}
    if not wanted:
        raise ValueError(f"structured_outputs needs one of {', '.join(names)}")
    if wanted.get("json_object") not in (None, True):
        raise ValueError(f"json_object={wanted['json_object']!r:.60} must be True or False")
    return wanted


def _schema_text(schema: Any) -> str:
    """The schema as JSON. The order of its properties is kept: texts have them in this order."""
    if isinstance(schema, str):
        _check_text("a JSON schema", schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is not JSON: {str(error)[:200]}") from None
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"a JSON schema must be an object, not {schema!r:.60}")
    for node in walk(schema):
        for pattern in _list_patterns(node):
            _check_regex(pattern)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema is not JSON: {str(error)[:200]}") from None
    _check_text("a JSON schema", text)
    return text


def _list_patterns(node: Any) -> list[str]:
    """Expressions in one value of a schema."""
    if not isinstance(node, Mapping):
        return []
    names = node.get("patternProperties")
    patterns = [node.get("pattern"), *(names if isinstance(names, Mapping) else ())]
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def walk(schema: Any) -> Iterator[Any]:
    """All values in a schema, without recursion: a client may nest them as deep as it likes."""
    waiting = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels")
        yield node
        inner: Iterable[Any] = ()
        if isinstance(node, Mapping):
            inner = node.values()
        elif isinstance(node, (list, tuple)):
            inner = node
        waiting += [(value, depth + 1) for value in inner]


def _choice_text(choices: Any) -> str:
    if not isinstance(choices, (list, tuple)) or not all(isinstance(c, str) for c in choices):
        raise ValueError(f"choice={choices!r:.60} must be a list of texts")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"choice has {len(choices)} texts: 1 to {MAX_CHOICES} are served")
    if "" in choices:
        raise ValueError("choice holds an empty text: every choice needs a character")
    text = json.dumps(list(choices))
    _check_text("choice", text)
    return text


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}={text!r:.60} must be a text, and not empty")
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{name} has {size} bytes: up to {MAX_GRAMMAR_BYTES} are served")
    if "\0" in text:
        raise ValueError(f"{name} holds a zero byte")


def _check_regex(pattern: str) -> None:
    if (states := count_states(pattern)) > MAX_REGEX_STATES:
        raise ValueError(
            f"the regular expression repeats its parts {states} times in all: up to"
            f" {MAX_REGEX_STATES} states are served"
        )
