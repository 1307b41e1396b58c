"""The model's words: between texts, token ids and conversations."""

from collections.abc import Mapping, Sequence

from onchip.engine.chat import render
from onchip.engine.tokenizer import Tokenizer


class Texts:
    """A tokenizer, or none: then prompts are token ids, and texts are empty."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._known().encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The template writes the special tokens that it wants."""
        return self._known().encode(render(self._known(), messages), add_special_tokens=False)

    def _known(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer: give the prompt as token ids")
        return self._tokenizer
