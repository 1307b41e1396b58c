"""One call in JSON, read character by character, so that its arguments can be streamed."""

import json
from typing import Any

_ARGUMENTS = ("arguments", "parameters")
_MAX_HEAD = 512  # characters of a name


class ValueScanner:
    """Finds the end of a JSON value. The value is not checked before its end."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = self.is_done = False

    @property
    def text(self) -> str:
        return "".join(self._chars)

    @property
    def is_object(self) -> bool:
        return self._chars[:1] == ["{"]

    def feed(self, char: str) -> bool:
        """Take a character. Return False if the value ended before it, as numbers do."""
        if self._in_string:
            self._feed_string(char)
        elif self._depth == 0 and (char in ",}]" or char.isspace()):
            self.is_done = True
            return False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self._chars.append(char)
        self.is_done = self._depth == 0 and not self._in_string and char in '"}]'
        return True

    def _feed_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False


class CallScanner:
    """Reads `{"name": ..., "arguments": {...}}`; other keys are ignored. name: None until it is
    known. arguments: the pieces so far; None until they begin. is_broken: this is no call.
    """

    name: str | None
    arguments: list[str] | None

    def __init__(self) -> None:
        self.name = self.arguments = None
        self.is_done = self.is_broken = False
        self._key = ""
        self._expects = "{"
        self._value: ValueScanner | None = None

    def feed(self, char: str) -> None:
        """Take a character; `is_done` and `is_broken` say whether more is needed."""
        if self._value is not None:
            if self._feed_value(self._value, char) or self.is_broken:
                return
        elif char.isspace():
            return
        if self._expects == "value" or (self._expects == "key" and char == '"'):
            self._value = ValueScanner()
            self.is_broken = not self._feed_value(self._value, char)
        elif char == "}" and self._expects in ("key", ","):
            self._finish()
        elif char == self._expects:
            self._expects = {"{": "key", ":": "value", ",": "key"}[char]
        elif not char.isspace():
            self.is_broken = True

    def _feed_value(self, value: ValueScanner, char: str) -> bool:
        """Return True if the character belongs to the value."""
        taken = value.feed(char)
        if taken and value.is_object and self._expects == "value" and self._key in _ARGUMENTS:
            self.arguments = self.arguments or []
            self.arguments.append(char)
        if value.is_done:
            self._value = None
            self._take(value.text)
        return taken

    def _take(self, text: str) -> None:
        """A key or a value is complete."""
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            self.is_broken = True
            return
        if self._expects == "key":
            self._key, self._expects = read, ":"
            self.is_broken = read in _ARGUMENTS and self.arguments is not None
            return
        self._expects = ","
        if self._key == "name":
            self.name, self.is_broken = read, not isinstance(read, str)
        elif self._key in _ARGUMENTS and self.arguments is None:
            arguments = _read_arguments(read)
            self.arguments, self.is_broken = [arguments or ""], arguments is None

    def _finish(self) -> None:
        self.is_done, self.is_broken = True, self.name is None
        if self.arguments is None:
            self.arguments = ["{}"]


def _read_arguments(value: Any) -> str | None:
    """Some models write the arguments as a text of JSON, or null for none."""
    if value is None:
        return "{}"
    try:
        return value if isinstance(json.loads(value), dict) else None
    except (TypeError, ValueError, RecursionError):
        return None


class NamedCallScanner:
    """Reads `name{...}` or `name[ARGS]{...}`, the newer form of Mistral. Fields as in
    CallScanner.
    """

    name: str | None
    arguments: list[str] | None

    def __init__(self) -> None:
        self.name = self.arguments = None
        self.is_done = self.is_broken = False
        self._head = ""
        self._value = ValueScanner()

    def feed(self, char: str) -> None:
        if self.arguments is None:
            if char != "{":
                self._head += char
                self.is_broken = len(self._head) > _MAX_HEAD
                return
            self.name, self.arguments = self._head.strip().removesuffix("[ARGS]").strip(), []
        self._value.feed(char)
        self.arguments.append(char)
        if self._value.is_done:
            self.is_done, self.is_broken = True, _read_arguments(self._value.text) is None
