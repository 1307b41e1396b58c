"""The program of a text worker: renders chat templates, runs one tokenizer and tries grammars,
within bounds.

`text_worker_pool.TextWorker` starts it as a script. A message is 4 bytes of length, then JSON. The
first message configures the worker, every later one is a job. The answer is {"value": ...} or
{"error": text}. An endless loop, too much memory or a crash ends only this process.
"""

import base64
import contextlib
import json
import signal
import socket
import struct
import sys
import types
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("<I")
GRACE_S = 2.0  # past the deadline, where the parent kills this process unless it died itself
MAX_RENDERED_CHARS = 32 << 20


def pack_ids(token_ids: Sequence[int]) -> str:
    """Token ids in JSON, in a tenth of the time that a list of numbers takes."""
    return base64.b64encode(array("Q", token_ids).tobytes()).decode()


def unpack_ids(packed: str) -> list[int]:
    return array("Q", base64.b64decode(packed)).tolist()


def send(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(read: Callable[[int], bytes]) -> Any:
    """The next message; EOFError: the other side closed. read: like a socket's recv."""
    (length,) = LENGTH.unpack(_read(read, LENGTH.size))
    return json.loads(_read(read, length))


def _read(read: Callable[[int], bytes], count: int) -> bytes:
    chunks = []
    while count:
        chunk = read(min(count, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def _stub_packages() -> None:
    """`onchip` and `onchip.engine` as bare folders: their __init__ would import torch, which takes
    seconds and hundreds of MiB.
    """
    folder = Path(__file__).resolve().parent
    for name, path in (("onchip", folder.parent), ("onchip.engine", folder)):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module


def limit_memory(more_bytes: int) -> None:
    """Let this process map only this many more bytes. Without /proc, as on macOS, there is no
    limit.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class TextJobs:
    """The jobs of this process, by name. folder: of the tokenizer, or None. grammars: load their
    automaton.
    """

    def __init__(self, folder: str | None, grammars: bool = False):
        from onchip.engine.chat_template import render_template
        from onchip.engine.tokenizer import FileTokenizer

        self._render = render_template
        with contextlib.suppress(ValueError):  # import Jinja now, not during a job
            render_template("", [{"role": ""}], {})
        self._tokenizer = FileTokenizer(folder) if folder else None
        if grammars:
            from onchip.engine.structure.automaton import GrammarTrial

            self.check_grammar = GrammarTrial().check

    def render(self, template: str, messages: Any, special: Any, options: Any) -> str:
        text = self._render(template, messages, special, **options)
        if len(text) > MAX_RENDERED_CHARS:
            raise ValueError(f"the chat template wrote {len(text)} characters")
        return text

    def encode(self, text: str, add_special_tokens: bool) -> str:
        return pack_ids(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: str, skip_special_tokens: bool) -> str:
        ids = unpack_ids(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def _answer(do: Any, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": do(**job)}
    except MemoryError:
        return {"error": "more memory was needed than a worker may take"}
    except ValueError as error:
        return {"error": str(error)[:2000]}


def main() -> None:
    with socket.socket(fileno=0) as connection:
        setup = receive(connection.recv)
        sys.path[:] = setup["path"]
        _stub_packages()
        limit_memory(setup["load_bytes"])
        try:
            jobs = TextJobs(setup["folder"], setup["grammars"])
        except (ValueError, MemoryError) as error:
            send(connection, {"error": str(error) or "the tokenizer needs too much memory"})
            return
        limit_memory(setup["job_bytes"])
        send(connection, {"value": None})
        while True:
            job = receive(connection.recv)
            signal.setitimer(signal.ITIMER_REAL, job.pop("seconds") + GRACE_S)
            answer = _answer(getattr(jobs, job.pop("do")), job)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(connection, answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):  # the parent died, or closed the connection
        main()
