"""The tools of a chat request, and which of them the model may or must call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onchip.engine.structure.grammar import BLANKS

from .parser import Dialect, ToolCallParser

MAX_FORCED_CALLS = 16
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolChoice:
    """functions: the tools that may be called, by name, with the schemas of their parameters.
    is_forced: the text must be calls. max_calls: None for any number.
    """

    functions: Mapping[str, Mapping[str, Any]]
    is_forced: bool = False
    max_calls: int | None = None

    def make_grammar(self, dialect: Dialect) -> str:
        """The grammar of forced calls, in Lark. The parameters are rules of their own, so that
        references within a schema stay valid.
        """
        text = json.dumps
        calls, rules = [], []
        for index, (name, schema) in enumerate(self.functions.items()):
            head = f'{dialect.before}{{"name": {text(name)}, {text(dialect.key)}: '
            calls.append(f"call_{index}")
            rules.append(
                f"call_{index}: {text(head)} arguments_{index} {text('}' + dialect.after)}"
            )
            bounded = {"x-guidance": {"whitespace_pattern": BLANKS}, **schema}
            rules.append(f"arguments_{index}: %json {text(bounded)}")
        more = f" ({text(dialect.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}"
        around = (dialect.opening, dialect.closing)
        opening, closing = (text(part) if part else "" for part in around)
        start = f"start: {opening} call{'' if self.max_calls == 1 else more} {closing}"
        return "\n".join([start, f"call: {' | '.join(calls)}", *rules])

    def make_parser(self, dialect: Dialect, streams: bool, hidden: Sequence[str]) -> ToolCallParser:
        return ToolCallParser(
            dialect,
            self.functions,
            forced=self.is_forced,
            streams=streams,
            hidden=hidden if dialect.shows_special else (),
            max_calls=self.max_calls,
        )


def read_choice(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None
) -> ToolChoice | None:
    """The tools that may be called; None if none may. ValueError: the fields contradict one
    another.
    """
    functions = {tool["name"]: tool.get("parameters") or _NO_PARAMETERS for tool in tools or ()}
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    if not functions:
        if choice in (None, "none", "auto"):
            return None
        raise ValueError("tool_choice needs tools: send the tools that may be called")
    if choice == "none":
        return None
    if named is not None:
        if named not in functions:
            raise ValueError(f"tool_choice names {named!r:.80}, which is not among the tools")
        return ToolChoice({named: functions[named]}, True, 1)
    return ToolChoice(functions, choice == "required", 1 if parallel is False else None)
