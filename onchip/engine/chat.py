"""Conversations as text: the Jinja template of a tokenizer, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from onchip.engine.tokenizer import Tokenizer
from onchip.extras import advise

Message = Mapping[str, Any]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt that a conversation is for this tokenizer. template: instead of its own."""
    template = template or tokenizer.chat_template
    if template is None:
        raise ValueError("the tokenizer has no chat_template: give one, or a prompt")
    _check(messages)
    environment = _environment()
    variables = {**tokenizer.special, **variables, "messages": list(messages)}
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        return environment.from_string(template).render(**variables)
    except Exception as error:  # a template is a program of its own, and may fail in any way
        raise ValueError(f"the chat template failed: {error}") from None


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("the conversation is empty")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message must have a role and a content, got {message!r:.80}")


def _environment() -> Any:
    """As transformers renders templates. The sandbox keeps a template, which is somebody else's
    program, from anything but its variables.
    """
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError(
            f"chat templates are rendered by the package jinja2: {advise('serve')}"
        ) from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> None:
    raise ValueError(message)
