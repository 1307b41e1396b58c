"""A progress bar on a terminal: finished requests, and tokens per second."""

import sys
import time


class ProgressBar:
    """A context manager; rich draws the bar on a terminal, elsewhere nothing is printed."""

    def __init__(self, total: int, wanted: bool):
        self._total = total
        self._wanted = wanted and total > 0 and sys.stderr.isatty()
        self._tokens, self._started = 0, time.monotonic()
        self._bar = None

    def __enter__(self) -> "ProgressBar":
        if self._wanted:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True))
            self._task = self._bar.add_task("requests", total=self._total)
            self._bar.start()
        return self

    def advance(self, num_tokens: int) -> None:
        """Count one finished request with this many tokens."""
        self._tokens += num_tokens
        if self._bar is not None:
            rate = self._tokens / max(1e-9, time.monotonic() - self._started)
            self._bar.update(self._task, advance=1, description=f"{rate:,.0f} tokens/s")

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
