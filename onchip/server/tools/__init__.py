"""Calls of tools: how models write them (a dialect each), and how clients receive them."""

from .hermes import HERMES
from .llama3 import LLAMA3
from .mistral import MISTRAL
from .parser import CallDelta, Dialect, ParsedText, ToolCallParser
from .plain import PLAIN

__all__ = ["CallDelta", "DIALECTS", "Dialect", "ParsedText", "ToolCallParser", "find_dialect"]

DIALECTS = {dialect.name: dialect for dialect in (HERMES, LLAMA3, MISTRAL, PLAIN)}
_MARKS = (("<tool_call>", HERMES), ("[TOOL_CALLS]", MISTRAL), ("<|python_tag|>", LLAMA3))
_FAMILIES = (("qwen", HERMES), ("mistral", MISTRAL), ("mixtral", MISTRAL), ("llama", LLAMA3))


def find_dialect(name: str, template: str | None, model_type: str) -> Dialect:
    """The dialect of a name. "auto": the one whose mark the chat template writes, because templates
    show past calls as the model was trained on them; else the one of the model's family.
    """
    if name != "auto":
        return DIALECTS[name]
    for mark, dialect in _MARKS:
        if template is not None and mark in template:
            return dialect
    families = (dialect for prefix, dialect in _FAMILIES if model_type.startswith(prefix))
    return next(families, PLAIN)
