"""Files from outside are opened here: regular ones alone, and none that is larger than a limit. A
fifo would wait for its writer for good, a device has no end. New files that hold a user's data can
be read by their owner alone.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600


def open_regular(file: str | os.PathLike) -> BinaryIO:
    """A regular file, or a link to one, open for reading; ValueError if it is something else."""
    try:
        return open(file, "rb", opener=_opener)
    except FileNotFoundError:
        raise
    except OSError as error:  # a socket cannot be opened at all
        raise ValueError(f"{os.fspath(file)} cannot be read: {error.strerror}") from None


def read_regular(file: str | os.PathLike, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(limit + 1) if size <= limit else b""
    if size > limit or len(content) > limit:  # it may have grown since
        raise ValueError(f"{Path(file).name} has {max(size, limit + 1)} bytes, more than {limit}")
    return content


def check_folder(folder: str | os.PathLike) -> None:
    """ValueError if a folder, or one in it, holds something that is neither a regular file nor a
    folder: for folders that another package reads, which opens what it finds.
    """
    for entry in _entries(folder):
        inside = _entries(entry.path) if entry.is_dir() else []
        for each in (entry, *inside):
            kind = each.stat().st_mode if os.path.exists(each.path) else stat.S_IFREG
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise ValueError(f"{each.path} is no regular file ({stat.filemode(kind)})")


def create_private(file: str | os.PathLike) -> BinaryIO:
    """A new file that its owner alone can read and write; an existing one is never touched."""
    return open(file, "xb", opener=lambda path, flags: os.open(path, flags, PRIVATE))


def _entries(folder: str | os.PathLike) -> list[os.DirEntry]:
    with os.scandir(folder) as found:
        return list(found)


def _opener(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a fifo waits; with O_NOCTTY, opening a terminal does not take it.
    extra = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    descriptor = os.open(path, flags | extra)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise ValueError(f"{os.fspath(path)} is no regular file ({stat.filemode(kind)})")
    return descriptor
