"""Text to token ids and back: the tokenizer.json of a checkpoint, or plain bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from onchip.core.extras import MissingPackageError, advise
from onchip.engine.tokenizer_components import Components, byte_letters

MAX_JSON_BYTES = 100_000_000
END = "<|endoftext|>"  # text of token 256 in a saved ByteTokenizer


class Tokenizer(Protocol):
    """The interface that an engine needs. chat_template: Jinja, or None; special: tokens by name
    for templates, bos_token and eos_token among them.
    """

    chat_template: str | None
    special: dict[str, str]
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Invalid bytes become U+FFFD."""
        ...


class ByteTokenizer:
    """Token i is byte i of UTF-8, and 256 ends a text."""

    EOS = 256
    VOCAB_SIZE = 257
    chat_template: str | None = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    special: dict[str, str] = {}
    eos_token_ids: tuple[int, ...] = (EOS,)
    chars_per_token: int | None = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        end = b"" if skip_special_tokens else END.encode()
        pieces = [bytes((t,)) if t < self.EOS else end for t in token_ids]
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < self.EOS else END.encode()

    def is_special(self, token_id: int) -> bool:
        return token_id >= self.EOS

    def save(self, folder: str | Path) -> None:
        """Write an equivalent tokenizer.json and tokenizer_config.json for `FileTokenizer` and
        transformers: byte-level BPE without merges.
        """
        end = {"id": self.EOS, "content": END, "special": True}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        level["use_regex"] = False
        vocab = dict(sorted(byte_letters().items(), key=lambda entry: entry[1]))
        data = {"version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level}
        data["model"] = {"type": "BPE", "vocab": vocab, "merges": []}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        config["chat_template"] = self.chat_template
        for name, content in (("tokenizer.json", data), ("tokenizer_config.json", config)):
            (Path(folder) / name).write_text(json.dumps(content, indent=1))


class FileTokenizer:
    """The tokenizer of a folder: tokenizer.json, read by the `tokenizers` library, and the special
    tokens and chat template of tokenizer_config.json.

    The file is a program written by the checkpoint's author. `Components` bounds how much it
    changes the length of a text, and a panic of the library, which is a BaseException, becomes a
    ValueError. Time is bounded only in a process of `text_worker_pool.TextWorkerPool`.

    chars_per_token: the most characters of a token; None: unbounded.
    """

    folder: Path
    chars_per_token: int | None
    special: dict[str, str]
    chat_template: str | None
    eos_token_ids: tuple[int, ...]

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._tokenizer = _read_tokenizer(self.folder / "tokenizer.json")
        try:
            self._components = Components(self._tokenizer)
        except ValueError as error:
            raise ValueError(f"{self.folder / 'tokenizer.json'} is not served: {error}") from None
        self.chars_per_token = self._components.chars_per_token(self._tokenizer.get_vocab())
        config = _json(self.folder / "tokenizer_config.json")
        self.special = _special(config)
        self.chat_template = _chat_template(self.folder, config)
        eos = self._tokenizer.token_to_id(self.special.get("eos_token", ""))
        self.eos_token_ids = () if eos is None else (eos,)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            raise _failure("the tokenizer cannot encode the text", error) from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _failure("the tokenizer cannot decode the tokens", error) from None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token writes: part of a character, a word with its leading space, or
        the content of a special token.
        """
        if token_id in self._added:
            return self._added[token_id]
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:  # an embedding row without a token
            return b""
        written = self._components.piece_bytes(piece)
        return self.decode([token_id]).encode() if written is None else written

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids


def _read_tokenizer(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(
            f"{file.parent} has no {file.name}; pass prompts as token ids, or tokenizer="
        )
    if (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{file} has {size} bytes, more than {MAX_JSON_BYTES}")
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise MissingPackageError(
            f"tokenizer.json is read by the package tokenizers: {advise('serve')}"
        ) from None
    try:
        tokenizer = Library.from_file(str(file))
        # As in transformers: truncation and padding in the file are for training batches.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except BaseException as error:
        raise _failure(f"{file} is not a tokenizer", error) from None


def _failure(what: str, error: BaseException) -> BaseException:
    """The library raises bare Exceptions, and a Rust panic is a BaseException of its own."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return error
    return ValueError(f"{what}: {str(error)[:300] or type(error).__name__}")


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if the file does not exist."""
    if not file.is_file():
        return {}
    if (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{file.name} has {size} bytes, more than {MAX_JSON_BYTES}")
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file.name} holds no object")
    return data


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Tokens by name, stored as text or as an object with its text in `content`."""
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """From chat_template.jinja, else from tokenizer_config.json: a text, or several by name."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def generation_eos(folder: str | Path) -> tuple[int, ...]:
    """The end tokens of generation_config.json; none if the file does not exist."""
    ids = _json(Path(folder) / "generation_config.json").get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError(f"generation_config.json has eos_token_id={ids!r:.60}")
    return tuple(ids)
