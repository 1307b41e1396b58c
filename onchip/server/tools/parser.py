"""Calls of tools in the text of a model, whole or as it grows.

    text --start--> section --{--> call --}--> section --end--> text
                       |             |
                       +-- no call --+--> text: it is shown as content, nothing is lost

A dialect is a `Dialect`: where calls begin and what stands between them. All dialects share this
parser.
"""

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from .scanner import CallScanner, NamedCallScanner


@dataclass(frozen=True)
class Dialect:
    """How a family of models writes calls.

    start: the text before calls; "" if the whole text must be calls. end: the text after a call.
    between: characters between two calls. has_names: calls may be `name{...}`. shows_special: the
    start is a special token, which texts leave out by default. opening, before, after, separator,
    closing: the text around forced calls; key: of their arguments. id_length: 0 for OpenAI's ids.
    """

    name: str
    start: str = ""
    end: str = ""
    between: str = ""
    has_names: bool = False
    shows_special: bool = False
    opening: str = ""
    before: str = ""
    after: str = ""
    separator: str = ", "
    closing: str = ""
    key: str = "arguments"
    id_length: int = 0

    def make_id(self) -> str:
        number = uuid.uuid4().hex
        return number[: self.id_length] if self.id_length else f"call_{number[:24]}"


@dataclass(frozen=True)
class CallDelta:
    """A part of a call. The first part of a call has its id and name, later ones its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class ParsedText(NamedTuple):
    content: str
    calls: tuple[CallDelta, ...]


class ToolCallParser:
    """Reads the text of one choice. names: of the tools; a call of another name is content.
    forced: the text has calls only. streams: report calls as they grow, otherwise when they are
    complete. hidden: texts of special tokens that are left out. max_calls: later ones are content.
    """

    num_calls: int

    def __init__(
        self,
        dialect: Dialect,
        names: Collection[str],
        *,
        forced: bool = False,
        streams: bool = True,
        hidden: Collection[str] = (),
        max_calls: int | None = None,
    ):
        self._dialect, self._names, self._streams = dialect, frozenset(names), streams
        self._hidden = tuple(text for text in hidden if text)
        self._max_calls = max_calls
        self.num_calls = 0
        self._held = ""  # text that may begin a marker
        self._section = ""  # since the last complete call or text, without the current call
        self._call: list[str] = []  # the characters of the current call
        self._scanner: CallScanner | NamedCallScanner | None = None
        self._sent = 0  # pieces of the arguments
        self._new_arguments: list[str] = []
        self._is_announced = False
        begins = forced or not dialect.start
        self._feed = self._feed_section if begins and not dialect.end else self._feed_text
        self._is_text_only = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> ParsedText:
        """Read more text."""
        for char in text:
            self._feed(char)
        return self._take()

    def finish(self) -> ParsedText:
        """The text ended. An unfinished call whose name was not reported is content."""
        if not self._is_announced:
            self._show(self._section + "".join(self._call))
        self._show(self._held)
        self._section = self._held = ""
        self._call.clear()
        self._scanner = None
        return self._take()

    def _take(self) -> ParsedText:
        self._flush_arguments()
        parsed = ParsedText("".join(self._content), tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return parsed

    def _show(self, text: str) -> None:
        """Add content, without the blanks between calls."""
        if self.num_calls and not self._is_text_only:
            text = text.lstrip()
            self._is_text_only = bool(text)
        if text:
            self._content.append(text)

    def _feed_text(self, char: str) -> None:
        """Look for a marker. At most its length is held back."""
        self._held += char
        start = self._dialect.start if self._may_call else ""
        markers = [marker for marker in (start, *self._hidden) if marker]
        for marker in markers:
            if self._held.endswith(marker):
                self._show(self._held[: -len(marker)])
                self._held = ""
                if marker == start:
                    self._section, self._feed = marker, self._feed_section
                return
        keep = max((_overlap(self._held, marker) for marker in markers), default=0)
        shown = len(self._held) - keep
        self._show(self._held[:shown])
        self._held = self._held[shown:]

    @property
    def _may_call(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    def _feed_section(self, char: str) -> None:
        """Between calls."""
        self._section += char
        end = self._dialect.end
        rest = self._section.removeprefix(self._dialect.start).strip()
        if char == "{" and self._may_call and rest.strip(self._dialect.between) == "{":
            self._begin(CallScanner())
        elif char.isspace() or char in self._dialect.between:
            if self.num_calls and not self._section.strip(f"{self._dialect.between} \n\r\t"):
                self._section = ""  # separators after a call are no content
        elif end and end.startswith(rest):
            if rest == end:
                self._section, self._feed = "", self._feed_text
        elif self._dialect.has_names and self._may_call and (char.isalnum() or char == "_"):
            self._begin(NamedCallScanner())
        else:
            self._leave_section(char)

    def _leave_section(self, char: str) -> None:
        """No call follows: what was read since the last call is content."""
        before, self._section = self._section[: -len(char)], ""
        self._feed = self._feed_text
        self._show(before)
        self._feed_text(char)

    def _begin(self, scanner: CallScanner | NamedCallScanner) -> None:
        self._scanner, self._sent, self._is_announced = scanner, 0, False
        self._feed = self._feed_call
        self._call = [self._section[-1]]
        self._section = self._section[:-1]
        scanner.feed(self._call[0])

    def _feed_call(self, char: str) -> None:
        scanner = self._scanner
        self._call.append(char)
        scanner.feed(char)
        is_known = scanner.name is None or scanner.name in self._names
        if scanner.is_broken or not is_known:
            self._break(char)
        elif scanner.is_done or (self._streams and scanner.name and scanner.arguments):
            self._report(scanner)

    def _break(self, char: str) -> None:
        """This is no call. A part of it that was reported stays so; the rest is content."""
        self._flush_arguments()
        shown = char if self._is_announced else self._section + "".join(self._call)
        self.num_calls += self._is_announced
        self._leave_call()
        self._feed = self._feed_text
        self._is_text_only = True
        self._show(shown)

    def _report(self, scanner: CallScanner | NamedCallScanner) -> None:
        if not self._is_announced:
            self._is_announced = True
            name = CallDelta(self.num_calls, self._dialect.make_id(), scanner.name, "")
            self._calls.append(name)
        arguments = scanner.arguments or []
        self._new_arguments += arguments[self._sent :]
        self._sent = len(arguments)
        if scanner.is_done:
            self._flush_arguments()
            self.num_calls += 1
            self._leave_call()
            self._is_text_only = False
            self._feed = self._feed_section

    def _leave_call(self) -> None:
        self._section, self._scanner, self._is_announced = "", None, False
        self._call.clear()

    def _flush_arguments(self) -> None:
        """Characters that arrive together become one delta."""
        if self._new_arguments:
            text = "".join(self._new_arguments)
            self._new_arguments.clear()
            self._calls.append(CallDelta(self.num_calls, None, None, text))


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of the text that may begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
