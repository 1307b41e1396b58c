"""Chat templates: a conversation rendered to text by the tokenizer's Jinja template, in a sandbox.

The template is a program written by the checkpoint's author. `render` runs it in the calling
process without bounds on time and memory; `text_worker_pool.TextWorkerPool` runs it in a process
that can be killed.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from onchip.core.extras import MissingPackageError, advise
from onchip.engine.tokenizer import Tokenizer

Message = Mapping[str, Any]

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field, newest first
_END = "\ue000END OF THE FINAL MESSAGE\ue001 "  # private characters; templates may strip the space


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    **options: Any,
) -> str:
    """The prompt of a conversation. template: replaces the tokenizer's own; options: as for
    `render_template`.
    """
    return render_template(
        get_template(tokenizer, template), messages, tokenizer.special, **options
    )


def get_template(tokenizer: Tokenizer, template: str | None = None) -> str:
    template = template or tokenizer.chat_template
    if template is None:
        raise ValueError("the tokenizer has no chat_template: give one, or a prompt")
    return template


def render_template(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    **variables: Any,
) -> str:
    """Render the template. special: special tokens that the template may use by name.

    add_generation_prompt: None for True, unless continue_final_message is set: then the text ends
    with the content of the last message, which the model continues.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt=True excludes continue_final_message")
    conversation = _copy_messages(messages)
    if continue_final_message:
        _mark_end(conversation[-1])
    compiled = _compile(template)
    variables = {**special, **variables, "messages": conversation}
    variables |= {"tools": tools or None, "documents": documents or None}
    variables["add_generation_prompt"] = add_generation_prompt is not False
    if continue_final_message:
        variables["add_generation_prompt"] = False
    try:
        text = compiled.render(**variables)
    except Exception as error:  # a template is a program and may raise anything
        raise _failure(error) from None
    return _cut_at_end(text) if continue_final_message else text


def _copy_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies in which the reasoning, if there is any, has every name that templates use."""
    if not messages:
        raise ValueError("the conversation is empty")
    conversation = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message must have a role and a content, got {message!r:.80}")
        reasoning = [message[name] for name in _REASONING if message.get(name) is not None]
        alias = {"thinking": reasoning[0]} if reasoning else {}
        final = {"reasoning_content": reasoning[0]} if reasoning else {}
        conversation.append({**alias, **message, **final})
    return conversation


def _mark_end(message: dict[str, Any]) -> None:
    """Append a mark to the message's text, to find its end in the rendered text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END
        return
    parts = [dict(part) for part in content or () if isinstance(part, Mapping)]
    texts = [part for part in parts if isinstance(part.get("text"), str)]
    if not texts:
        raise ValueError("continue_final_message: the last message has no text to continue")
    texts[-1]["text"] += _END
    message["content"] = parts


def _cut_at_end(text: str) -> str:
    """A template that strips contents also strips the mark's space; then strip the text, too."""
    at = text.rfind(_END.strip())
    if at < 0:
        raise ValueError("continue_final_message: the chat template leaves the last message out")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(template)
    except Exception as error:  # also RecursionError and what compile() raises
        raise _failure(error) from None


def _failure(error: Exception) -> ValueError:
    return ValueError(f"the chat template failed: {str(error) or type(error).__name__}")


def _environment() -> Any:
    """The settings of transformers. The sandbox gives a template nothing but its variables."""
    try:
        from jinja2 import nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace
    except ImportError:
        raise MissingPackageError(
            f"chat templates are rendered by the package jinja2: {advise('serve')}"
        ) from None

    class Generation(Extension):
        """{% generation %} marks the model's own text for training; here it is only a scope."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PublicNamespace(Namespace):
        """A namespace that rejects names with a leading underscore, which could shadow Python's
        own.
        """

        def __init__(*args: Any, **values: Any) -> None:  # a template may use the name `self`
            self, *rest = args
            Namespace.__init__(self)
            for name, value in dict(*rest, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace has no attribute {name!r}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = PublicNamespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise ValueError(message)
