"""The automaton of a grammar, by the package llguidance. The only file that imports it; no torch,
so that a text worker can load it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from onchip.core.extras import MissingPackageError, advise
from onchip.engine.structure.grammar import BLANKS, Grammar
from onchip.engine.structure.json_schema import translate_schema

_MAX_GRAMMAR_SIZE = 50_000  # symbols; building takes about 50 us for each
_MAX_LEXER_STATES = 20_000  # 1 to 2 KB each
_INITIAL_FUEL = 400_000
_TRIAL_BYTES = 32


def load_package() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingPackageError(
            f"structured output needs the package llguidance: {advise('structured')}"
        ) from None
    return llguidance


class Vocabulary:
    """The tokens of a model, as bytes. tokens: one for each row of the logits, empty for rows
    without a token. encode: a text to token ids.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ):
        self.tokens, self.special_token_ids = tokens, special_token_ids
        self.eos_token_id, self.bos_token_id = eos_token_ids[0], None
        self._eos_token_ids, self._encode = list(eos_token_ids), encode

    def __call__(self, text: str) -> list[int]:
        """llguidance tokenizes with this. A bytes argument fails, which tells it to pass texts."""
        if not isinstance(text, str):
            raise TypeError("texts only")
        return self._encode(text)

    def build(self) -> Any:
        """Index the tokens: some seconds for a large vocabulary."""
        package = load_package()
        wrapper = package.TokenizerWrapper(self)
        return package.LLTokenizer(wrapper, eos_token=self._eos_token_ids)


def byte_vocabulary() -> Vocabulary:
    """Every byte is a token, and token 256 ends a text."""
    tokens = [bytes((byte,)) for byte in range(256)] + [b"<|end|>"]
    return Vocabulary(tokens, [256], [256], lambda text: list(text.encode()))


def build_matcher(index: Any, grammar: Grammar) -> Any:
    """A matcher at the start of a grammar. index: of `Vocabulary.build`. ValueError: the grammar
    is not valid, or too complex.
    """
    package = load_package()
    limits = package.LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    try:
        text = _translate(package, grammar)
    except ValueError as error:
        raise _refusal(grammar, str(error)) from None
    matcher = package.LLMatcher(index, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars that no text can follow
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher


class GrammarTrial:
    """Builds grammars over bytes, for a text worker."""

    def __init__(self) -> None:
        self._index = byte_vocabulary().build()
        self.check("json", "{}")  # the first call loads what every later one needs

    def check(self, kind: str, text: str) -> None:
        """Build a grammar, and follow it for some bytes: a grammar can be too complex after its
        first byte. ValueError: as for `build_matcher`.
        """
        grammar = Grammar(kind, text)
        matcher = build_matcher(self._index, grammar)
        for _ in range(_TRIAL_BYTES):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or matcher.is_stopped():
                break
            printable = bits >> 33 << 33 or bits  # blanks would lead nowhere
            matcher.consume_token((printable & -printable).bit_length() - 1)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())


def _translate(package: Any, grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    if grammar.kind == "json":
        schema = json.dumps(translate_schema(json.loads(grammar.text)), ensure_ascii=False)
        defaults = {"whitespace_pattern": BLANKS}
        return package.LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    if grammar.kind == "choice":
        choices = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
        return package.LLMatcher.grammar_from_lark(f"start: {choices}")
    if grammar.kind == "regex":  # \d is a digit of ASCII, as in JSON schemas
        pattern = package.regex_to_lark(grammar.text, use_ascii="d")
        return package.LLMatcher.grammar_from_lark(f"start: /{pattern}/")
    return package.grammar_from(grammar.kind, grammar.text)


def _refusal(grammar: Grammar, error: str) -> ValueError:
    what = {"json": "JSON schema", "regex": "regular expression", "choice": "choice"}
    return ValueError(f"the {what.get(grammar.kind, 'grammar')} is not served: {_reason(error)}")


def _reason(error: str) -> str:
    """The first sentence of an error of llguidance."""
    if error.startswith("NoExtensionBias"):
        return "no text can follow it"
    return " ".join(error.split("\n<")[0].split())[:300]


class TokenMatcher:
    """The position of one sample in its grammar. vocab_size: tokens of its masks. error: why the
    sample cannot continue.
    """

    vocab_size: int
    error: str | None

    def __init__(self, matcher: Any, vocab_size: int):
        self.matcher, self.vocab_size, self.error = matcher, vocab_size, None

    def after(self, tokens: Sequence[int]) -> "TokenMatcher | None":
        """The position after these tokens; None if the grammar does not allow them."""
        matcher = self.matcher.deep_copy()
        allowed = all(matcher.consume_token(token) for token in tokens)
        return TokenMatcher(matcher, self.vocab_size) if allowed else None

    def consume(self, token: int) -> None:
        """Follow a sampled token."""
        if not self.matcher.consume_token(token):
            self.check()

    def check(self) -> None:
        """Set `error` if the grammar has become too complex."""
        if self.error is None and self.matcher.is_error():
            self.error = f"the grammar cannot continue: {_reason(self.matcher.get_error())}"
