"""examples/prepare_kjv.py reads what compress(1) writes, and takes verses for what they are."""

import random
import shutil
import subprocess

import prepare_kjv
import pytest


def compress(text: bytes) -> bytes:
    """LZW as compress(1) writes it, without its header."""
    table = {bytes([i]): i for i in range(256)}
    codes, string, width, known = [], b"", 9, 257
    groups: list[tuple[int, list[int]]] = [(9, codes)]
    for byte in text:
        longer = string + bytes([byte])
        if longer in table:
            string = longer
            continue
        codes.append(table[string])
        if known < 1 << 16:
            table[longer] = known
            known += 1
        if known > 1 << width and width < 16:
            width, codes = width + 1, []
            groups.append((width, codes))
        string = bytes([byte])
    codes.append(table[string])
    return b"".join(_bits(width, codes, last=codes is groups[-1][1]) for width, codes in groups)


def _bits(width: int, codes: list[int], last: bool) -> bytes:
    number = sum(code << width * i for i, code in enumerate(codes))
    size = -(-len(codes) * width // 8) if last else width * -(-len(codes) // 8)
    return number.to_bytes(size, "little")


def words(count: int) -> bytes:
    draw = random.Random(0)
    return b" ".join(bytes(draw.choices(b"abcdefgh", k=draw.randint(1, 9))) for _ in range(count))


@pytest.mark.parametrize("count", [1, 40, 600, 4001])
def test_it_reads_what_compress_writes(count):
    text = words(count)
    packed = compress(text)
    if shutil.which("gzip"):  # a judge of our own encoder
        judge = subprocess.run(["gzip", "-dc"], input=b"\x1f\x9d\x90" + packed, capture_output=True)
        assert judge.stdout == text
    assert prepare_kjv.decompress(packed) == text


def test_windows_are_where_the_index_says():
    index = [92 + 12, 92 + 12 + 3, 92 + 12 + 5]
    number = lambda n: n.to_bytes(4, "big")
    data = b"EC02" + bytes(84) + number(2) + b"".join(map(number, index)) + b"abcde"
    assert list(prepare_kjv.windows(data)) == [b"abc", b"de"]
    with pytest.raises(ValueError, match="not with EC02"):
        list(prepare_kjv.windows(b"GZ"))


def test_a_chapter_is_its_verses_a_line_each():
    text = "Title\nGe1:1 In the beginning.\nGe1:2 And.\nGe2:1 Thus.\n1Jn1:1 That\nJn1:1 Word\n"
    assert list(prepare_kjv.chapters(text)) == ["In the beginning.\nAnd.", "Thus.", "That", "Word"]
    with pytest.raises(ValueError, match="line 3 is no verse"):
        list(prepare_kjv.chapters("Title\nGe1:1 In\nnothing\n"))
