"""Progress on a terminal: finished requests, and tokens per second."""

import sys
import time


class ProgressBar:
    """A context manager. On a terminal rich draws a bar; without rich one line counts. Elsewhere
    nothing is printed.
    """

    def __init__(self, total: int, wanted: bool):
        self._total = total
        self._wanted = wanted and total > 0 and sys.stderr.isatty()
        self._done, self._tokens, self._started = 0, 0, time.monotonic()
        self._bar = None

    def __enter__(self) -> "ProgressBar":
        if self._wanted and (bar := _rich_bar()):
            self._bar = bar
            self._task = bar.add_task("requests", total=self._total)
            bar.start()
        return self

    def advance(self, num_tokens: int) -> None:
        """Count one finished request with this many tokens."""
        self._done += 1
        self._tokens += num_tokens
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"{rate:,.0f} tokens/s")
        elif self._wanted:
            line = f"{self._done}/{self._total} requests, {rate:,.0f} tokens/s"
            print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._wanted:
            print(file=sys.stderr)


def _rich_bar():
    """A progress bar on stderr, or None without rich."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    return Progress(console=Console(stderr=True))
