"""Grammars, compiled in other threads and kept for later requests.

A schema comes from a client, and llguidance cannot be interrupted. A grammar is therefore built
over bytes in a text worker first, which is killed past its time or memory, and only then over the
model's vocabulary in this process:

    compile --> thread --> text worker: 0.75 s, 512 MiB --> build over the vocabulary --> cache
"""

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any
from weakref import WeakValueDictionary

from onchip.engine.structure.automaton import (
    TokenMatcher,
    Vocabulary,
    build_matcher,
    load_package,
)
from onchip.engine.structure.grammar import Grammar
from onchip.engine.text_worker_pool import JobEnded, TextWorkerPool
from onchip.engine.tokenizer import Tokenizer

COMPILE_S = 0.75
COMPILE_BYTES = 512 << 20
CACHED_GRAMMARS = 64
KEEP_FAILURE_S = 60.0  # repeating a refused schema costs nothing; later it is tried again
THREADS = 2


class PendingGrammar:
    """A grammar that is being compiled, or is compiled."""

    def __init__(self, future: Future[Any], vocab_size: int):
        self.future, self._vocab_size = future, vocab_size
        self._failed_at: float | None = None
        future.add_done_callback(self._note_failure)

    @property
    def is_ready(self) -> bool:
        """Compiled, or refused."""
        return self.future.done()

    @property
    def error(self) -> str | None:
        """Why the grammar is refused. Waits until it is ready."""
        if self.future.cancelled():
            return "the engine was closed"
        error = self.future.exception()
        return None if error is None else str(error) or type(error).__name__

    @property
    def is_stale(self) -> bool:
        """It failed a while ago: another attempt may succeed."""
        failed = self._failed_at
        return failed is not None and time.monotonic() > failed + KEEP_FAILURE_S

    def make_matcher(self) -> TokenMatcher:
        """A new matcher at the start of the grammar."""
        return TokenMatcher(self.future.result().deep_copy(), self._vocab_size)

    def _note_failure(self, future: Future[Any]) -> None:
        if future.cancelled() or future.exception() is not None:
            self._failed_at = time.monotonic()


def wait_for_any(grammars: Sequence[PendingGrammar], seconds: float) -> None:
    """Wait until one of them is ready, for some time at most."""
    wait_for([grammar.future for grammar in grammars], seconds, FIRST_COMPLETED)


class GrammarCompiler:
    """Compiles the grammars of one engine. Thread-safe. Threads, worker and index of the
    vocabulary are made at the first grammar.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._cache: OrderedDict[Grammar, PendingGrammar] = OrderedDict()
        self._in_use: WeakValueDictionary[Grammar, PendingGrammar] = WeakValueDictionary()
        self._lock, self._index_lock = threading.Lock(), threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._workers: TextWorkerPool | None = None
        self._index: Any = None
        self._is_trusted = False

    def trust(self) -> None:
        """Skip the text worker from now on: another process has built the same grammars in one."""
        self._is_trusted = True

    def compile(self, grammar: Grammar) -> PendingGrammar:
        """Start to compile a grammar, or find it: in the cache, or as long as anyone holds it.
        ValueError: this engine compiles none.
        """
        with self._lock:
            pending = self._cache.get(grammar) or self._in_use.get(grammar)
            if pending is None or pending.is_stale:
                self._check()
                future = self._start_threads().submit(self._build, grammar)
                pending = self._in_use[grammar] = PendingGrammar(future, self._vocab_size)
            self._cache[grammar] = pending
            self._cache.move_to_end(grammar)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            return pending

    def warm_up(self) -> None:
        """Start the worker and index the vocabulary in another thread, if the package is here: the
        first request does not wait for them.
        """
        try:
            self.compile(Grammar("json", '{"type": "object"}'))
        except ValueError:
            return  # a request with a grammar gets the reason

    def close(self) -> None:
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
            if self._workers is not None:
                self._workers.close()
            self._cache.clear()

    def _check(self) -> None:
        load_package()
        if self._tokenizer is None:
            raise ValueError("structured output needs a tokenizer: the engine has none")
        if not hasattr(self._tokenizer, "token_bytes"):
            raise ValueError("structured output needs a tokenizer with token_bytes and is_special")
        if not self._eos:
            raise ValueError("structured output needs a token that ends a text: the model has none")

    def _start_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "onchip-grammar")
            if sys.platform != "win32":  # there only the limits of the package apply
                self._workers = TextWorkerPool(THREADS, None, COMPILE_BYTES, grammars=True)
        return self._threads

    def _build(self, grammar: Grammar) -> Any:
        if self._workers is not None and not self._is_trusted:
            try:
                self._workers.run("check_grammar", COMPILE_S, kind=grammar.kind, text=grammar.text)
            except JobEnded as error:
                limit = f"{COMPILE_S:g} s" if error.late else f"{COMPILE_BYTES >> 20} MiB"
                raise ValueError(
                    f"the grammar is not served: it takes more than {limit} to compile"
                ) from None
        return build_matcher(self._find_index(), grammar)

    def _find_index(self) -> Any:
        with self._index_lock:
            if self._index is None:
                self._index = self._vocabulary().build()
            return self._index

    def _vocabulary(self) -> Vocabulary:
        tokenizer: Any = self._tokenizer
        ids = range(self._vocab_size)
        return Vocabulary(
            [_token_bytes(tokenizer, i) for i in ids],
            [i for i in ids if tokenizer.is_special(i) or i in self._eos],
            self._eos,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
        )


def _token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """A token that cannot be decoded is never allowed."""
    try:
        return tokenizer.token_bytes(token_id)
    except ValueError:
        return b""
