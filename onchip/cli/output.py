"""Where results go: files, JSON on standard output, a browser."""

import math
import os
import sys
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = Path("-")


def check_writable(path: Path) -> None:
    """Raise before the minutes of work, not after."""
    if path == STANDARD_OUTPUT:
        return
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(
            f"cannot write {path}: it is a folder, or its folder is missing or not writable"
        )


def print_json(value: Any) -> None:
    import json

    print(json.dumps(to_json(value), indent=1, ensure_ascii=False))


def to_json(value: Any) -> Any:
    """Records as objects, dtypes and paths as names. JSON has no infinity and no NaN: null."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")


def make_console(json: Path | None = None):
    """A rich console; on standard error where JSON takes standard output."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1, the code of a failed check

    return PipedConsole(stderr=json == STANDARD_OUTPUT)


def open_page(url: str) -> None:
    """Open a page in the user's browser, if there is a screen."""
    if has_screen():
        import webbrowser

        webbrowser.open(url)


def has_screen() -> bool:
    """Whether a browser can open in a window, not in the terminal."""
    shown = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY")
    return sys.stdout.isatty() and bool(shown or os.environ.get("WAYLAND_DISPLAY"))
