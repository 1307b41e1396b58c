"""The model's tokenizer and chat template, for callers on the event loop.

Both run in separate processes (text_worker_pool.py), templates apart from tokenizers: a template
that loops delays other chats until its time limit, but no plain prompt. A request waits for a free
process no longer than its deadline allows.
"""

import asyncio
import codecs
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from onchip.engine.chat_template import get_template
from onchip.engine.text_worker_pool import JobEnded, TextWorkerPool, check_system
from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

from .errors import APIError

PROCESSES = min(4, os.cpu_count() or 1)  # of each kind; a tokenizer may take 300 MiB


class WorkerQueue:
    """One thread per process. Further jobs wait, and leave the queue at their deadline."""

    def __init__(self, name: str, workers: TextWorkerPool):
        self.workers = workers
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix=f"onchip-{name}")

    async def run(self, work: Callable[..., Any], deadline_s: float) -> Any:
        """Run work(seconds=...) in a thread. TimeoutError: not done by deadline_s, a time of
        time.monotonic.
        """

        def start() -> Any:
            return work(seconds=deadline_s - time.monotonic())

        async with asyncio.timeout(deadline_s - time.monotonic()):
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, start)
            except JobEnded as error:
                if error.late and time.monotonic() >= deadline_s:
                    raise TimeoutError from None
                raise APIError(400, str(error), code="text_limit") from None
            except ValueError as error:
                raise APIError(400, str(error)) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.workers.close()


class TokenText(NamedTuple):
    """One token by itself. text: as OpenAI writes it, `bytes:\\xe2\\x82` for part of a character.
    hidden: a special token, which does not appear in texts.
    """

    text: str
    data: bytes
    hidden: bool = False


class Codec:
    """tokenizer: None for prompts of token ids and empty texts. max_tokens: limit of a prompt.

    A tokenizer object that was not loaded from a folder is the server's own code and runs in a
    thread.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_tokens: int):
        check_system("a server")
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        folder = tokenizer.folder if isinstance(tokenizer, FileTokenizer) else None
        self._from_folder = folder is not None
        self._template_queue = WorkerQueue("template", TextWorkerPool(PROCESSES))
        self._tokenizer_queue = WorkerQueue("tokenizer", TextWorkerPool(PROCESSES, folder))
        self._token_cache: dict[int, TokenText] = {}

    @property
    def end_texts(self) -> tuple[str, ...]:
        """The texts of tokens that end a text, if special tokens are shown."""
        special = {} if self._tokenizer is None else self._tokenizer.special
        return tuple(special[name] for name in ("eos_token",) if name in special)

    def start(self) -> None:
        """Start a process of each kind, so that the first request does not wait for it."""
        if self._tokenizer is not None and self._tokenizer.chat_template is not None:
            self._template_queue.workers.start()
        if self._from_folder:
            self._tokenizer_queue.workers.start()

    def close(self) -> None:
        self._template_queue.close()
        self._tokenizer_queue.close()

    async def encode(
        self, text: str, deadline_s: float, add_special_tokens: bool, bounded: bool = True
    ) -> list[int]:
        """bounded: False accepts texts that are longer than a prompt may be."""
        tokenizer = self._require_tokenizer()
        if bounded:
            self._check_length(text)
        if self._from_folder:
            work = partial(self._tokenizer_queue.workers.encode, text, add_special_tokens)
        else:
            work = _ignore_timeout(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._tokenizer_queue.run(work, deadline_s)

    async def decode_prompt(self, token_ids: Sequence[int], deadline_s: float) -> str:
        if self._from_folder:
            work = partial(self._tokenizer_queue.workers.decode, token_ids)
        else:
            work = _ignore_timeout(self.decode, token_ids)
        return await self._tokenizer_queue.run(work, deadline_s)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], deadline_s: float
    ) -> str:
        """The text of a conversation. options: as for chat.render_template."""
        tokenizer = self._require_tokenizer()
        try:
            template = get_template(tokenizer)
        except ValueError as error:
            raise APIError(400, str(error)) from None
        work = partial(
            self._template_queue.workers.render, template, messages, tokenizer.special, options
        )
        return await self._template_queue.run(work, deadline_s)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def token(self, token_id: int) -> TokenText:
        """The text and bytes of one token."""
        if token_id not in self._token_cache:
            self._token_cache[token_id] = self._read_token(token_id)
        return self._token_cache[token_id]

    def _read_token(self, token_id: int) -> TokenText:
        if not isinstance(self._tokenizer, (FileTokenizer, ByteTokenizer)):  # an object of the user
            text = self.decode([token_id])
            return TokenText(text, text.encode())
        data = self._tokenizer.token_bytes(token_id)
        hidden = self._tokenizer.is_special(token_id)
        try:
            return TokenText(data.decode(), data, hidden)
        except UnicodeDecodeError:
            written = "".join(f"\\x{byte:02x}" for byte in data)
            return TokenText(f"bytes:{written}", data, hidden)

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise APIError(400, "the model has no tokenizer: give the prompt as token ids")
        return self._tokenizer

    def _check_length(self, text: str) -> None:
        """Checked before the tokenizer runs: a BPE takes seconds for a word of a few MiB."""
        per_token = getattr(self._tokenizer, "chars_per_token", None)
        if per_token is not None and len(text) > per_token * self._max_tokens:
            raise APIError(
                400,
                f"{len(text)} characters are too many: a token has {per_token} at most, and the"
                f" model takes {self._max_tokens} tokens",
                code="context_length_exceeded",
            )


def text_offsets(tokens: Sequence[TokenText], start: int) -> list[int]:
    """The offset in characters at which each token's text begins, if the first begins at `start`.
    All tokens of one character begin at its offset.
    """
    decoder, starts = codecs.getincrementaldecoder("utf-8")("ignore"), []
    for token in tokens:
        starts.append(start)
        start += 0 if token.hidden else len(decoder.decode(token.data))
    return starts


def _ignore_timeout(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Work in this process cannot be interrupted."""
    return lambda seconds: work(*args, **kwargs)
