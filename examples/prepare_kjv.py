"""The King James Bible of Debian's package bible-kjv-text, as examples/train_lm.py reads it.

    apt-get download bible-kjv-text
    python examples/prepare_kjv.py bible-kjv-text_4.38_all.deb

A chapter is a document: a verse a line, an empty line between chapters, nothing else. Writes
examples/data/kjv.txt.xz, the same text every time; examples/data/README.md says where it is from.
"""

import io
import lzma
import re
import sys
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

TARGET = Path(__file__).with_name("data") / "kjv.txt.xz"
CLEAR, WIDEST = 256, 16
_VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)")  # Ge1:1 In the beginning ...


def member(archive: bytes, prefix: str) -> bytes:
    """A file of an `ar` archive, which is what a .deb is: headers of 60 bytes, even offsets."""
    at = 8
    while at < len(archive):
        name, size = archive[at : at + 16].decode(), int(archive[at + 48 : at + 58])
        if name.startswith(prefix):
            return archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError(f"the archive has no file {prefix}*")


def bible_data(deb: bytes) -> bytes:
    """usr/lib/bible.data of the package."""
    with tarfile.open(fileobj=io.BytesIO(member(deb, "data.tar"))) as tar:
        return tar.extractfile("./usr/lib/bible.data").read()


def windows(data: bytes) -> Iterator[bytes]:
    """The compressed windows of a bible.data: byte 88 says how many, then where each starts and
    the last ends, big-endian; each is a stream of compress(1) without its header.
    """
    number = lambda at: int.from_bytes(data[at : at + 4], "big")
    if data[:4] != b"EC02":
        raise ValueError(f"bible.data starts with {data[:4]!r}, not with EC02")
    starts = [number(92 + 4 * i) for i in range(number(88) + 1)]
    yield from (data[a:b] for a, b in zip(starts, starts[1:], strict=False))


def decompress(stream: bytes) -> bytes:
    """LZW as compress(1) writes it: codes of 9 bits, of 10 once 512 strings are known, and so on to
    16, least significant bit first. Codes come in groups of eight: what a group has left when the
    width changes is padding. Code 256 forgets all strings.
    """
    table = [bytes([i]) for i in range(256)] + [b""]
    out, last, width, at, began = [], b"", 9, 0, 0
    while at + width <= 8 * len(stream):
        word = int.from_bytes(stream[at // 8 : at // 8 + 4], "little")
        code, at = word >> at % 8 & (1 << width) - 1, at + width
        if code == CLEAR:
            del table[CLEAR + 1 :]
            last, width, at = b"", 9, at + -(at - began) % (8 * width)
            began = at
            continue
        string = table[code] if code < len(table) else last + last[:1]
        if last and len(table) < 1 << WIDEST:
            table.append(last + string[:1])
        out.append(string)
        last = string
        if len(table) == 1 << width and width < WIDEST:
            at += -(at - began) % (8 * width)
            began, width = at, width + 1
    return b"".join(out)


def chapters(text: str) -> Iterator[str]:
    """Chapter by chapter, in the order of the book, a verse a line."""
    verses = [_VERSE.fullmatch(line) for line in text.splitlines()[1:]]
    if None in verses:
        raise ValueError(f"line {verses.index(None) + 2} is no verse")
    for _, group in groupby(verses, key=lambda verse: verse.group(1, 2)):
        yield "\n".join(verse.group(4) for verse in group)


def main() -> None:
    deb = Path(sys.argv[1]).read_bytes()
    text = b"".join(decompress(window) for window in windows(bible_data(deb))).decode("ascii")
    documents = list(chapters(text))
    plain = "\n\n".join(documents).encode()
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(lzma.compress(plain, preset=9 | lzma.PRESET_EXTREME))
    size = TARGET.stat().st_size
    print(f"{TARGET}: {len(documents)} chapters, {len(plain)} bytes in {size}")


if __name__ == "__main__":
    main()
