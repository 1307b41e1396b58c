"""Progress of long commands, and their end by Ctrl-C."""

import sys
import time
from typing import Any

PROGRESS_S = 10.0  # between lines of progress where there is no terminal


class ProgressDisplay:
    """Progress as a context manager. It returns `report_progress(title, done)` with done in [0, 1].
    On a terminal it draws a bar, elsewhere it prints a line to stderr every PROGRESS_S, so that a
    log shows progress.
    """

    def __init__(self, console):
        self.bar = _make_bar(console) if console.is_terminal else None
        self.task = self.bar.add_task("starting", total=1.0) if self.bar else None
        self.began_s = self.printed_s = time.monotonic()

    def __enter__(self):
        if self.bar:
            self.bar.start()
        return self._report

    def _report(self, title: str, done: float) -> None:
        if self.bar:
            self.bar.update(self.task, description=title, completed=done)
            return
        now = time.monotonic()
        if now - self.printed_s >= PROGRESS_S:
            self.printed_s = now
            line = f"onchip: {done:4.0%} after {now - self.began_s:.0f} s: {title}"
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self.bar:
            self.bar.stop()


def _make_bar(console) -> Any:
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TimeElapsedColumn,
    )

    title = "[progress.description]{task.description}"
    columns = (SpinnerColumn(), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn(), title)
    return Progress(*columns, console=console, transient=True)


class Interruptible:
    """A block that Ctrl-C leaves early. The code after the block writes what was done so far and
    then calls `end`, which raises the KeyboardInterrupt again.
    """

    was_interrupted = False

    def __enter__(self) -> "Interruptible":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> bool:
        self.was_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.was_interrupted

    def end(self, done: str) -> None:
        """done: a sentence about what was done, and where it is."""
        if self.was_interrupted:
            raise KeyboardInterrupt(done)
