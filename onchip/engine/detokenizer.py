"""Incremental detokenization: the text of a sample while its tokens arrive."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial

from onchip.engine.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]

_BYTES = 3  # most bytes of an incomplete character
_CONTEXT = 4  # prompt tokens decoded with the first: some decoders drop a leading space
_WINDOW = 16  # tokens that are decoded repeatedly before the window moves
_LONGEST = 64  # tokens without a valid character: no character is so long
_HALF = "\ufffd"


class GrowingText:
    """A text that only grows at its end. Every character is stored once, and reading a part costs
    only the length of that part.
    """

    __slots__ = ("_ends", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ends = [0]

    def __len__(self) -> int:
        return self._ends[-1]

    def __str__(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._ends.append(self._ends[-1] + len(piece))

    def part(self, start: int, stop: int) -> str:
        """Characters start to stop - 1, which must exist; another thread may append meanwhile."""
        first, last = bisect_right(self._ends, start) - 1, bisect_left(self._ends, stop)
        before = self._ends[first]
        return "".join(self._pieces[first:last])[start - before : stop - before]


class Detokenizer:
    """Extends `text` by tokens. `text` never ends with half a character, nor with the possible
    beginning of a stop string.

    The last tokens are decoded together with a few before them. The characters beyond the text of
    the earlier ones are new, unless they end within a character.
    """

    text: GrowingText
    num_tokens: int

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ):
        self._decode, self._stops = _make_decoder(tokenizer, skip_special_tokens), tuple(stops)
        self._overlap = max((len(stop) for stop in stops), default=1) - 1
        self._window, context = _context(self._decode, prompt)
        self._shown = len(context)  # characters of the window's text that are shown or held
        self._mark = len(self._window)  # tokens after which the window's text was last complete
        self.num_tokens = 0
        self._held = ""  # characters after `text`, not shown yet
        self._floor = 0  # position from which stop strings count
        self.text = GrowingText()

    def push(self, token_ids: Sequence[int], search: bool = True) -> str | None:
        """Add tokens. Return the stop string that they complete, if any; the text then ends before
        it. search: False while the sample is too short to stop.
        """
        self.num_tokens += len(token_ids)
        self._window += token_ids
        text = self._decode(self._window)
        if not text.endswith(_HALF):
            self._grow(text)
        elif len(self._window) > _LONGEST:
            self._grow_by_bytes(text)
        if not search:
            self._floor = len(self.text) + len(self._held)
        return self._show(self._overlap)

    def finish(self) -> str | None:
        """No more tokens follow: show everything, or the text before a stop string in it."""
        self._held += self._decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return self._show(0)

    def _grow(self, text: str) -> None:
        self._held += text[self._shown :]
        self._shown = max(self._shown, len(text))
        if len(self._window) > _WINDOW:
            del self._window[: self._mark]
            self._shown = len(self._decode(self._window))
        self._mark = len(self._window)

    def _grow_by_bytes(self, text: str) -> None:
        """In a run of invalid bytes only the last three may still begin a character."""
        self._held += text[self._shown : -_BYTES]
        del self._window[:-_CONTEXT]
        self._shown = max(0, len(self._decode(self._window)) - _BYTES)

    def _show(self, hold: int) -> str | None:
        """Show all but the last `hold` characters, or the text before a stop string."""
        start, held = max(0, self._floor - len(self.text)), self._held
        matches = [(at, s) for s in self._stops if (at := held.find(s, start)) >= 0]
        end, stop = min(matches) if matches else (max(0, len(held) - hold), None)
        self.text.add(held[:end])
        self._held = "" if matches else held[end:]
        return stop


def decode_text(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """The text of a whole continuation."""
    decode = _make_decoder(tokenizer, skip_special_tokens)
    window, context = _context(decode, prompt)
    return decode([*window, *token_ids])[len(context) :]


def _make_decoder(tokenizer: Tokenizer, skip_special_tokens: bool) -> Decode:
    if skip_special_tokens:
        return tokenizer.decode
    return partial(tokenizer.decode, skip_special_tokens=False)


def _context(decode: Decode, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The end of a prompt, and its text; both empty if it ends within a character."""
    window = list(prompt[-_CONTEXT:])
    context = decode(window)
    return ([], "") if context.endswith(_HALF) else (window, context)
