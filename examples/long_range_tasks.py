"""Five tasks in the manner of the Long Range Arena (Tay et al. 2021), drawn by this script.

    listops     nested MIN, MAX, MED and SM of digits, by the published grammar: what is the value?
    text        bytes of the King James Bible: from the Old Testament or the New?
    retrieval   two passages of it, as two documents: from the same book?
    image       a noisy grey image of 10 kinds of shapes, a pixel a token: which kind?
    pathfinder  dashed curves, a pixel a token: does one curve join the two dots?

Nothing is downloaded. listops has the published distribution, of lengths too (a quarter of the
longest to the longest). The others stand in for reviews of films, papers that cite each other,
CIFAR-10 and the images of Linsley et al. (2018): accuracies do not compare with published ones. In
text and retrieval single words tell something, and a longer passage has more of them: a count of
words is right more often at 1,024 bytes than at 64 (tests/examples/test_long_range.py).

Examples depend on (count, seqlen, seed) alone, on every device the same. Seeds below HELD_OUT are
for training, the others draw what is held out: other random numbers, and chapters that no seed for
training reads.
"""

import lzma
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from packing import TEXT
from pathfinder_images import draw as draw_pathfinder
from torch import Tensor

HELD_OUT = 1 << 31  # a generator of torch reads 32 bits of a seed
PAD = 0

SYMBOLS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # the token of PAD has no symbol
OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
MAX_DEPTH, MAX_ARGUMENTS, OPERATOR_SHARE = 10, 10, 0.25  # as published
SHORTEST_LISTOPS = 8  # tokens: with fewer, few expressions are left to draw

CHAPTERS = (  # of each book
    *(50, 40, 27, 36, 34, 24, 21, 4, 31, 24, 22, 25, 29, 36, 10, 13, 10, 42, 150, 31, 12, 8, 66),
    *(52, 5, 48, 12, 14, 3, 9, 1, 4, 7, 3, 3, 3, 2, 14, 4),
    *(28, 16, 24, 21, 28, 16, 16, 13, 6, 6, 4, 4, 5, 3, 6, 4, 3, 1, 13, 5, 5, 3, 5, 1, 1, 1, 22),
)
OLD_TESTAMENT = 39  # books
HELD_OUT_CHAPTERS = 5  # one of so many

SMALLEST_IMAGE = 16  # pixels a side: a smaller one has no room for a shape or for two curves
NOISE = 12.0  # standard deviation, in levels of 256
LINE = 1.5  # pixels


class Examples(NamedTuple):
    """tokens (count, documents, seqlen), labels (count,), lengths (count, documents). Tokens of a
    document from its length on are PAD.
    """

    tokens: Tensor
    labels: Tensor
    lengths: Tensor

    @classmethod
    def of_equal_lengths(cls, tokens: Tensor, labels: Tensor) -> "Examples":
        """tokens (count, documents, seqlen), without padding."""
        return cls(tokens.long(), labels.long(), torch.full(tokens.shape[:2], tokens.shape[2]))


def draw_listops(count: int, seqlen: int, seed: int) -> Examples:
    """Expressions of more than seqlen / 4 tokens and at most seqlen."""
    if seqlen < SHORTEST_LISTOPS:
        raise ValueError(f"listops needs seqlen >= {SHORTEST_LISTOPS}, not {seqlen}")
    chance = random.Random(seed)
    tokens, labels, lengths = torch.full((count, 1, seqlen), PAD), [], []
    while len(labels) < count:
        symbols: list[str] = []
        value = write_expression(symbols, seqlen, chance)
        if seqlen // 4 < len(symbols) <= seqlen:
            row = torch.tensor([SYMBOLS.index(symbol) for symbol in symbols])
            tokens[len(labels), 0, : len(symbols)] = row
            labels.append(value)
            lengths.append([len(symbols)])
    return Examples(tokens, torch.tensor(labels), torch.tensor(lengths))


def write_expression(symbols: list[str], limit: int, chance: random.Random, depth: int = 1) -> int:
    """Append a random expression to `symbols`, and return its value.

    The outermost expression has an operator: a digit alone would be too short. With more than
    `limit` symbols the expression is not completed, and the caller must discard it.
    """
    if len(symbols) > limit:
        return 0
    if depth == MAX_DEPTH or (depth > 1 and chance.random() > OPERATOR_SHARE):
        value = chance.randrange(10)
        symbols.append(str(value))
        return value
    operator = chance.choice(tuple(OPERATORS))
    symbols.append(operator)
    arguments = range(chance.randint(2, MAX_ARGUMENTS))
    values = [write_expression(symbols, limit, chance, depth + 1) for _ in arguments]
    symbols.append("]")
    return OPERATORS[operator](values)


@cache
def read_books(held_out: bool) -> tuple[Tensor, ...]:
    """The bytes of every book: of its held-out chapters, or of its others."""
    chapters = lzma.decompress(TEXT.read_bytes()).decode().split("\n\n")
    is_held_out = lambda i: i % HELD_OUT_CHAPTERS == HELD_OUT_CHAPTERS // 2
    books = []
    for end, number in zip(accumulate(CHAPTERS), CHAPTERS, strict=True):
        chosen = [chapters[i] for i in range(end - number, end) if is_held_out(i) == held_out]
        books.append(torch.tensor(list("\n\n".join(chosen).encode()), dtype=torch.uint8))
    return tuple(books)


@cache
def read_testaments(held_out: bool) -> tuple[Tensor, Tensor]:
    books = read_books(held_out)
    return torch.cat(books[:OLD_TESTAMENT]), torch.cat(books[OLD_TESTAMENT:])


def draw_text(count: int, seqlen: int, seed: int) -> Examples:
    """Passages of exactly seqlen bytes; label 1: of the New Testament."""
    texts = read_testaments(seed >= HELD_OUT)
    longest = min(map(len, texts))
    if seqlen > longest:
        raise ValueError(f"text has no passage of {seqlen:,} bytes: seqlen is at most {longest:,}")
    chance = random.Random(seed)
    labels = [chance.randrange(2) for _ in range(count)]
    starts = [chance.randrange(len(texts[label]) - seqlen + 1) for label in labels]
    rows = [texts[i][start : start + seqlen] for i, start in zip(labels, starts, strict=True)]
    return Examples.of_equal_lengths(torch.stack(rows)[:, None], torch.tensor(labels))


def draw_retrieval(count: int, seqlen: int, seed: int) -> Examples:
    """Pairs of passages of exactly seqlen bytes that share no byte; label 1: of the same book.

    Every book that has room for two passages is drawn equally often under both labels, so that one
    passage alone does not tell.
    """
    books = [book for book in read_books(seed >= HELD_OUT) if len(book) >= 2 * seqlen]
    if len(books) < 2:
        raise ValueError(f"retrieval finds no two books with two passages of {seqlen:,} bytes")
    chance = random.Random(seed)
    labels = [chance.randrange(2) for _ in range(count)]
    pairs = [draw_pair(books, seqlen, label == 1, chance) for label in labels]
    return Examples.of_equal_lengths(torch.stack(pairs), torch.tensor(labels))


def draw_pair(books: list[Tensor], seqlen: int, is_same: bool, chance: random.Random) -> Tensor:
    one, other = chance.sample(books, 2)
    other = one if is_same else other
    if is_same:
        first, second = sorted(chance.randrange(len(one) - 2 * seqlen + 1) for _ in range(2))
        starts = [first, second + seqlen]
        chance.shuffle(starts)
    else:
        starts = [chance.randrange(len(book) - seqlen + 1) for book in (one, other)]
    passages = zip((one, other), starts, strict=True)
    return torch.stack([book[start : start + seqlen] for book, start in passages])


def draw_image(count: int, seqlen: int, seed: int) -> Examples:
    """Square images of seqlen pixels; label: the shape, and 5 more if only its outline is drawn.

    Place, size, a turn of up to 10 degrees, both grey levels and the noise are random.
    """
    size = image_side("image", seqlen)
    generator = torch.Generator().manual_seed(seed)
    uniform = lambda low, high: low + (high - low) * torch.rand(count, 1, 1, generator=generator)
    labels = torch.randint(2 * len(SHAPES), (count,), generator=generator)
    radius = uniform(0.25 * size, 0.4 * size)
    centre_x, centre_y = (uniform(-1, 1) * (size / 2 - radius) + (size - 1) / 2 for _ in range(2))
    turn = uniform(-math.pi / 18, math.pi / 18)
    pixel = torch.arange(size, dtype=torch.float32)
    x, y = (pixel - centre_x) / radius, (pixel[:, None] - centre_y) / radius
    x, y = x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()
    distances = torch.stack([shape(x, y) for shape in SHAPES])  # of an edge; negative inside
    distance = radius * distances[labels % len(SHAPES), torch.arange(count)]
    outline = (distance + LINE / 2).abs() - LINE / 2
    is_outline = (labels >= len(SHAPES))[:, None, None]
    covered = (0.5 - torch.where(is_outline, outline, distance)).clamp(0, 1)
    ground = uniform(0, 255)
    contrast = uniform(96, 160) * torch.where(ground < 128, 1.0, -1.0)
    noise = NOISE * torch.randn(count, size, size, generator=generator)
    grey = (ground + contrast * covered + noise).round().clamp(0, 255)
    return Examples.of_equal_lengths(grey.flatten(1)[:, None], labels)


SHAPES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (  # about the distance of an edge
    lambda x, y: torch.hypot(x, y) - 1,  # a disc
    lambda x, y: x.abs().maximum(y.abs()) - 0.8,  # a square
    lambda x, y: (x.abs() + y.abs() - 1) * 0.7,  # a diamond
    lambda x, y: (0.87 * x.abs() - 0.5 * y).maximum(y) - 0.5,  # a triangle
    lambda x, y: (x.abs().minimum(y.abs()) - 0.35).maximum(x.abs().maximum(y.abs()) - 1),  # a cross
)


def draw_pathfinder_pixels(count: int, seqlen: int, seed: int) -> Examples:
    """The images of examples/pathfinder_images.py; a pixel is 0 or 1."""
    scene = draw_pathfinder(count, image_side("pathfinder", seqlen), seed)
    return Examples.of_equal_lengths(scene.images.flatten(1)[:, None], scene.labels)


def image_side(task: str, seqlen: int) -> int:
    size = math.isqrt(seqlen)
    if size * size != seqlen or size < SMALLEST_IMAGE:
        least = SMALLEST_IMAGE**2
        raise ValueError(f"{task} needs seqlen = side * side >= {least}, not {seqlen}")
    return size


@dataclass(frozen=True)
class Task:
    """draw(count, seqlen, seed): examples of `documents` sequences each, whose tokens are below
    vocab_size and whose labels are below num_classes. seqlen: as published; small_seqlen: for a
    CPU.
    """

    draw: Callable[[int, int, int], Examples]
    vocab_size: int
    num_classes: int
    seqlen: int
    small_seqlen: int
    documents: int = 1


TASKS = {
    "listops": Task(draw_listops, len(SYMBOLS), 10, 2000, 64),
    "text": Task(draw_text, 256, 2, 4096, 128),
    "retrieval": Task(draw_retrieval, 256, 2, 4096, 64, documents=2),
    "image": Task(draw_image, 256, 2 * len(SHAPES), 1024, 256),
    "pathfinder": Task(draw_pathfinder_pixels, 2, 2, 1024, 256),
}
