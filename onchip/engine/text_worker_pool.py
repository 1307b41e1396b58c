"""Text workers: processes that render chat templates and run tokenizers, with bounded time and
memory. No model runs in them.

A chat template and a tokenizer.json are programs written by the checkpoint's author, and they run
on texts of clients. An endless loop in Jinja or Rust cannot be interrupted in a thread, and memory
cannot be bounded there. A text worker is a small process (no torch) that is killed when its job
exceeds its time or memory; the next job starts another.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onchip.engine import text_worker_main as worker_main

JOB_S = 10.0
START_S = 120.0  # to load a tokenizer on a busy machine
JOB_BYTES = 1 << 30  # of one job; 4 MiB of text take a BPE some 0.5 GiB
LOAD_BYTES = 4 << 30  # of a tokenizer while it is read
# No other variables are passed on: a template must not see keys.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG")
# A single text is never split over threads, and the memory that a thread maps counts as used.
_SINGLE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class JobEnded(ValueError):
    """A job exceeded its time limit, or its process died. late: it exceeded its time."""

    def __init__(self, message: str, late: bool = False):
        super().__init__(message)
        self.late = late


def check_system(what: str) -> None:
    """Raise ValueError on Windows, which starts no process with a socket as its standard input and
    has no interval timers.
    """
    if sys.platform == "win32":
        raise ValueError(f"{what} needs Linux or macOS (WSL on Windows): it starts text workers")


class TextWorker:
    """One process. folder: of the tokenizer that it loads, None for templates only. grammars: it
    tries grammars. Not thread-safe.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        job_bytes: int = JOB_BYTES,
        grammars: bool = False,
    ):
        check_system("a chat template or a tokenizer of a folder")
        self._connection, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(worker_main.__file__)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic prints a long trace
                env=environment | _SINGLE,
            )
        setup = {"path": sys.path, "folder": folder and str(Path(folder).resolve())}
        setup |= {"job_bytes": job_bytes, "load_bytes": LOAD_BYTES, "grammars": grammars}
        try:
            self._exchange(setup, START_S, f"the tokenizer of {folder} was not loaded")
        except BaseException:
            self.close()
            raise

    def run(self, do: str, seconds: float, **job: Any) -> Any:
        """The result of a job, which is a method of worker_main.TextJobs. ValueError: the job
        failed. After a JobEnded the process is gone.
        """
        what = {"render": "chat template", "check_grammar": "grammar"}.get(do, "tokenizer")
        job = {"do": do, "seconds": seconds, **job}
        return self._exchange(job, seconds, f"the {what} was ended")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _exchange(self, message: Any, seconds: float, failure: str) -> Any:
        end = time.monotonic() + seconds
        try:
            self._connection.settimeout(seconds)
            worker_main.send(self._connection, message)
            answer = worker_main.receive(lambda count: self._read(count, end))
        except TimeoutError:
            self.close()
            raise JobEnded(f"{failure}: not done within {seconds:.3g} s", late=True) from None
        except (EOFError, OSError):
            self.close()
            raise JobEnded(f"{failure}: its process ran out of memory or crashed") from None
        except BaseException:  # an interrupt: a later job would read this job's answer
            self.close()
            raise
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def _read(self, count: int, end: float) -> bytes:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv(count)


class TextWorkerPool:
    """At most `count` processes of one kind, started on demand. Thread-safe: more than `count`
    concurrent jobs wait for a free process.
    """

    def __init__(
        self,
        count: int,
        folder: str | Path | None = None,
        job_bytes: int = JOB_BYTES,
        grammars: bool = False,
    ):
        self._setup, self._job_s = (folder, job_bytes, grammars), JOB_S
        self._slots = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._idle: list[TextWorker] = []
        self._open: set[TextWorker] = set()
        self._closed = False

    def __enter__(self) -> "TextWorkerPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start one process now, so that the first job does not wait for it."""
        with self._slots:
            self._put_back(self._take())

    def run(self, do: str, seconds: float | None = None, **job: Any) -> Any:
        """Like TextWorker.run. seconds: time limit once a process is free and started; at most
        JOB_S.
        """
        seconds = self._job_s if seconds is None else max(1e-3, min(seconds, self._job_s))
        with self._slots:
            process = self._take()
            try:
                value = process.run(do, seconds, **job)
            except JobEnded:
                self._drop(process)
                raise
            except ValueError:
                self._put_back(process)
                raise
            except BaseException:
                self._drop(process)
                raise
            self._put_back(process)
            return value

    def render(
        self,
        template: str,
        messages: Sequence[Any],
        special: Mapping[str, str],
        options: Mapping[str, Any],
        seconds: float | None = None,
    ) -> str:
        """Like chat.render_template. Template variables must be JSON."""
        job = {"template": template, "messages": messages, "special": special, "options": options}
        try:
            return self.run("render", seconds, **job)
        except TypeError as error:
            raise ValueError(f"template variables must be JSON: {error}") from None

    def encode(
        self, text: str, add_special_tokens: bool, seconds: float | None = None
    ) -> list[int]:
        job = {"text": text, "add_special_tokens": add_special_tokens}
        return worker_main.unpack_ids(self.run("encode", seconds, **job))

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        seconds: float | None = None,
    ) -> str:
        job = {
            "token_ids": worker_main.pack_ids(token_ids),
            "skip_special_tokens": skip_special_tokens,
        }
        return self.run("decode", seconds, **job)

    def close(self) -> None:
        """Kill all processes; running jobs raise JobEnded."""
        with self._lock:
            self._closed, processes = True, list(self._open)
            self._open.clear()
            self._idle.clear()
        for process in processes:
            process.close()

    def _take(self) -> TextWorker:
        with self._lock:
            if self._closed:
                raise JobEnded("the workers are closed")
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                self._open.discard(process)  # killed from outside
        process = TextWorker(*self._setup)
        with self._lock:
            self._open.add(process)
        return process

    def _put_back(self, process: TextWorker) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.close()

    def _drop(self, process: TextWorker) -> None:
        with self._lock:
            self._open.discard(process)
        process.close()
