"""Open files that a user names: regular files only, up to a size limit. Opening a fifo could wait
forever, and reading a device may never end. New files with a user's data are readable by their
owner only.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600


def open_regular(file: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. ValueError for any other kind."""
    try:
        return open(file, "rb", opener=_opener)
    except FileNotFoundError:
        raise
    except OSError as error:  # a socket cannot be opened at all
        raise ValueError(f"{os.fspath(file)} cannot be read: {error.strerror}") from None


def read_regular(file: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(limit + 1) if size <= limit else b""
    if size > limit or len(content) > limit:  # the file may have grown since fstat
        raise ValueError(f"{Path(file).name} has {max(size, limit + 1)} bytes, more than {limit}")
    return content


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if a folder, or a folder in it, has an entry that is neither a regular file
    nor a folder. For folders that another package reads: it would open any entry.
    """
    for entry in _entries(folder):
        inside = _entries(entry.path) if entry.is_dir() else []
        for each in (entry, *inside):
            kind = each.stat().st_mode if os.path.exists(each.path) else stat.S_IFREG
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise ValueError(f"{each.path} is not a regular file ({stat.filemode(kind)})")


def create_private(file: str | os.PathLike[str]) -> BinaryIO:
    """Create a file that only its owner can read and write. An existing file raises."""
    return open(file, "xb", opener=lambda path, flags: os.open(path, flags, PRIVATE))


def _entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _opener(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a fifo waits for a writer. Without O_NOCTTY, opening a terminal
    # would make it the controlling terminal.
    extra = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    descriptor = os.open(path, flags | extra)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise ValueError(f"{os.fspath(path)} is not a regular file ({stat.filemode(kind)})")
    return descriptor
