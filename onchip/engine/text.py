"""The text of a sample while its tokens come one by one."""

from collections.abc import Sequence

from onchip.engine.tokenizer import Tokenizer

_BYTES = 3  # of a character that lacks its last one
_CONTEXT = 4  # tokens of the prompt before the first: some decoders drop a space at a beginning
_WINDOW = 16  # tokens that are decoded again and again, before the window moves
_LONGEST = 64  # tokens that are no text: no character is so long
_HALF = "\ufffd"


class Reader:
    """Grows a text by tokens. It never shows half a character, nor what may become a stop text:
    `text` is what can be shown, and only ever grows.

    The last tokens are decoded together with a few before them. What comes out beyond the text of
    those is new, unless it ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._overlap = max((len(stop) for stop in stops), default=1) - 1
        self._window, context = _context(tokenizer, prompt)
        self._shown = len(context)  # characters of the window's text that are in `_all`
        self._mark = len(self._window)  # where the window's text was whole last
        self.num_tokens = 0
        self._all = ""
        self._floor = 0  # where the text begins that may hold a stop
        self.text = ""

    def push(self, token_ids: Sequence[int], search: bool = True) -> str | None:
        """More tokens; the stop text that appears with them, if one does: the text ends before it.
        search: False while the sample is too short to stop.
        """
        before = len(self._all)
        self.num_tokens += len(token_ids)
        self._window += token_ids
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_HALF):
            self._grow(text)
        elif len(self._window) > _LONGEST:
            self._grow_by_bytes(text)
        if not search:
            self._floor = len(self._all)
        return self._show(before, self._overlap)

    def finish(self) -> str | None:
        """No more tokens: everything is shown, or what comes before the stop text in it."""
        before = len(self._all)
        self._all += self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return self._show(before, 0)

    def _grow(self, text: str) -> None:
        self._all += text[self._shown :]
        self._shown = max(self._shown, len(text))
        if len(self._window) > _WINDOW:
            del self._window[: self._mark]
            self._shown = len(self._tokenizer.decode(self._window))
        self._mark = len(self._window)

    def _grow_by_bytes(self, text: str) -> None:
        """Of bytes that are no text the last three may still begin a character."""
        self._all += text[self._shown : -_BYTES]
        del self._window[:-_CONTEXT]
        self._shown = max(0, len(self._tokenizer.decode(self._window)) - _BYTES)

    def _show(self, before: int, hold: int) -> str | None:
        start = max(self._floor, before - self._overlap)
        found = [(at, s) for s in self._stops if (at := self._all.find(s, start)) >= 0]
        if found:
            at, stop = min(found)
            self._all = self.text = self._all[:at]
            return stop
        self.text = self._all[: max(len(self.text), len(self._all) - hold)]
        return None


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of a whole continuation."""
    window, context = _context(tokenizer, prompt)
    return tokenizer.decode([*window, *token_ids])[len(context) :]


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The end of a prompt, and its text; none if that ends within a character."""
    window = list(prompt[-_CONTEXT:])
    context = tokenizer.decode(window)
    return ([], "") if context.endswith(_HALF) else (window, context)
