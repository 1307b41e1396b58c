"""Bounds on how much the steps of a tokenizer.json may lengthen or shorten a text.

A tokenizer.json is a small program written by the checkpoint's author: normalizers rewrite the
text, pre-tokenizers split it, decoders rewrite the tokens. The bounds here follow from their
settings alone, so they are known before any text is processed.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

MAX_GROWTH = 256  # factor by which a text may grow; nmt_nfkc's table reaches 33
MAX_SETTING_CHARS = 1024
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_COMPOSED = 4  # characters that NFC composes into one, at most
# Steps that drop no character, so a long text cannot become few tokens.
_KEEPING = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace", "Digits"}


def byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: the character itself if it is
    printable, otherwise the next unused one from U+0100 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class Components:
    """The steps of a `tokenizers` tokenizer, in order. ValueError: they may lengthen a text too
    much.
    """

    normalizers: list[dict[str, Any]]
    pre_tokenizers: list[dict[str, Any]]
    decoders: list[dict[str, Any]]

    def __init__(self, tokenizer: Any):
        self.normalizers = list(_steps(tokenizer.normalizer))
        self.pre_tokenizers = list(_steps(tokenizer.pre_tokenizer))
        self.decoders = list(_steps(tokenizer.decoder))
        self._model = tokenizer.model
        self._added = list(tokenizer.get_added_tokens_decoder().values())
        for steps in (self.normalizers, self.decoders):
            if (grown := prod(map(_growth, steps))) > MAX_GROWTH:
                raise ValueError(
                    f"a text may become {grown:g} times as long, more than {MAX_GROWTH} times"
                )

    def chars_per_token(self, vocabulary: Mapping[str, int]) -> int | None:
        """The most characters that one token can stand for. None if a step drops characters: then
        no bound exists.
        """
        shrinking = [_shrinking(step) for step in (*self.normalizers, *self.pre_tokenizers)]
        whitespace = any(token.lstrip or token.rstrip for token in self._added)
        if None in shrinking or whitespace or not self._keeps_unknown(vocabulary):
            return None
        longest = max(map(len, vocabulary), default=0)
        return int(longest * prod(factor for factor in shrinking if factor))

    def _keeps_unknown(self, vocabulary: Mapping[str, int]) -> bool:
        """Whether every character costs a token, even one that is not in the vocabulary."""
        kinds = {step["type"] for step in (*self.normalizers, *self.pre_tokenizers)}
        if "ByteLevel" in kinds and all(letter in vocabulary for letter in byte_letters()):
            return True
        if type(self._model).__name__ not in ("BPE", "Unigram"):
            return False
        return bool(self._model.byte_fallback) and all(
            token in vocabulary for token in _BYTE_TOKENS
        )

    def piece_bytes(self, piece: str) -> bytes | None:
        """The bytes that a vocabulary entry writes. None if a decoder is not a known one: then the
        tokenizer must decode it.
        """
        kinds = {step["type"] for step in self.decoders}
        if "ByteLevel" in kinds:
            letters = [_LETTERS.get(letter) for letter in piece]
            return piece.encode() if None in letters else bytes(letters)  # pyright: ignore
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        for step in self.decoders:
            if step["type"] == "Replace" and (pattern := step["pattern"].get("String")):
                piece = piece.replace(pattern, step["content"])
            elif step["type"] == "Metaspace":
                piece = piece.replace(step["replacement"], " ")
            elif step["type"] not in ("ByteFallback", "Fuse", "Strip"):
                return None
        return piece.encode()


_LETTERS = byte_letters()


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a component, with Sequences flattened."""
    if component is not None:
        yield from _unfold(json.loads(component.__getstate__()))


def _unfold(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in step.get(name, ()):
            yield from _unfold(inner)


def _growth(step: Mapping[str, Any]) -> float:
    """The most characters that one character can become."""
    written = next((step[name] for name in ("content", "prepend") if name in step), "")
    if len(written) > MAX_SETTING_CHARS:
        raise ValueError(f"a {step['type']} writes {len(written)} characters at once")
    if step["type"] == "Precompiled":
        return _longest_entry(base64.b64decode(step["precompiled_charsmap"]))
    if step["type"] != "Replace":
        return 1
    pattern = step["pattern"].get("String")
    return max(1, len(written) / len(pattern)) if pattern else 1 + len(written)


def _longest_entry(charsmap: bytes) -> int:
    """SentencePiece's table: the size of a trie, the trie, then texts that each end with a zero
    byte.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _shrinking(step: Mapping[str, Any]) -> float | None:
    """The most characters that can become one. None: any number."""
    kind = step["type"]
    if kind in ("NFC", "NFKC"):
        return _COMPOSED
    if kind == "Replace" and (pattern := step["pattern"].get("String")) and step["content"]:
        return max(1, len(pattern) / len(step["content"]))
    if kind in ("Split", "Punctuation"):
        return None if step["behavior"] == "Removed" else 1
    return 1 if kind in _KEEPING else None
