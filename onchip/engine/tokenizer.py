"""Text to token ids and back: the tokenizer.json of a checkpoint, or plain bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from onchip.extras import advise

MAX_JSON_BYTES = 100_000_000
END = "<|endoftext|>"  # how 256 is written, where bytes are stored as a tokenizer


class Tokenizer(Protocol):
    """What an engine asks of a tokenizer. chat_template: Jinja, None if it has none; special:
    tokens that a template may name, bos_token and eos_token among them.
    """

    chat_template: str | None
    special: dict[str, str]
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are passed over, bytes that are no text become U+FFFD."""
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes([t for t in token_ids if t < self.EOS]).decode(errors="replace")

    def save(self, folder: str | Path) -> None:
        """tokenizer.json and tokenizer_config.json that say the same to `FileTokenizer` and to
        transformers: byte-level BPE without merges.
        """
        end = {"id": self.EOS, "content": END, "special": True}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        level["use_regex"] = False
        vocab = {_letter(byte): byte for byte in range(self.EOS)}
        data = {"version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level}
        data["model"] = {"type": "BPE", "vocab": vocab, "merges": []}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        config["chat_template"] = self.chat_template
        for name, content in (("tokenizer.json", data), ("tokenizer_config.json", config)):
            (Path(folder) / name).write_text(json.dumps(content, indent=1))


def _letter(byte: int) -> str:
    """The letter that byte-level tokenizers write for a byte: itself where it is printed, else the
    next that is free from U+0100 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printed:
        return chr(byte)
    return chr(256 + sum(b not in printed for b in range(byte)))


class FileTokenizer:
    """The tokenizer of a folder: tokenizer.json, read by the `tokenizers` library, and what
    tokenizer_config.json says about special tokens and chats.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        config = _json(folder / "tokenizer_config.json")
        self.special = _special(config)
        self.chat_template = _chat_template(folder, config)
        eos = self._tokenizer.token_to_id(self.special.get("eos_token", ""))
        self.eos_token_ids = () if eos is None else (eos,)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _read_tokenizer(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(
            f"{file.parent} has no {file.name}; pass prompts as token ids, or tokenizer="
        )
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise ValueError(
            f"tokenizer.json is read by the package tokenizers: {advise('serve')}"
        ) from None
    try:
        return Library.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions for what it cannot read
        raise ValueError(f"{file} is no tokenizer: {error}") from None


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
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
    """Tokens by name: stored as text, or as an object with its text in `content`."""
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Of chat_template.jinja, else of tokenizer_config.json: a text, or several by name."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def generation_eos(folder: str | Path) -> tuple[int, ...]:
    """The end tokens that generation_config.json names; none if there is no such file."""
    ids = _json(Path(folder) / "generation_config.json").get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError(f"generation_config.json has eos_token_id={ids!r:.60}")
    return tuple(ids)
