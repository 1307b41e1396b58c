"""The ledger: bytes moved between HBM and the chip, and operations computed."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import Problem
from onchip.kernels.tiles import TileConfig, paper_sram

if TYPE_CHECKING:
    from .arithmetic import Arithmetic


class TileVisit(NamedTuple):
    """One visited tile of scores, after the visit. rows and keys are the half-open ranges of the
    tile; m, l (batch, heads, rows, 1) and acc (batch, heads, rows, head_dim_v) are the running
    state of its rows, in v1 with acc already divided by l. These are views: copy them to keep them
    after the call.
    """

    kernel: str
    first_batch: int  # of the state's first entries, in the call
    first_head: int
    rows: tuple[int, int]
    keys: tuple[int, int]
    s: Tensor  # (batch, heads, rows, keys) the scores, -inf where hidden
    m: Tensor
    l: Tensor
    acc: Tensor
    read_bytes: int  # so far
    write_bytes: int

    def row(self, batch: int, head: int, q: int) -> tuple[float, float, list[float]] | None:
        """(m, l, acc) of one query, None if it is not in this tile."""
        b, h, r = batch - self.first_batch, head - self.first_head, q - self.rows[0]
        inside = all(0 <= i < n for i, n in zip((b, h, r), self.m.shape, strict=False))
        if not inside:
            return None
        m, l, acc = (x[b, h, r] for x in (self.m, self.l, self.acc))
        return float(m), float(l), acc.tolist()


class ByteCounts:
    """Bytes between HBM and the chip, by tensor."""

    reads: Counter[str]
    writes: Counter[str]

    @property
    def read_bytes(self) -> int:
        return self.reads.total()

    @property
    def write_bytes(self) -> int:
        return self.writes.total()

    @property
    def hbm_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


class Ledger(ByteCounts):
    """Bytes by tensor, and operations: flops of matrix products (a multiply-add is two), exps, and
    other_ops, one for every number that another operation produces or reduces. Masking and dropout
    are selections and not counted; the bits of PARTIAL blocks are read, as `mask`. rescales: rows
    in which the accumulator was multiplied because the maximum of the row changed or might have
    changed.

    sram: elements of the inputs' dtype on the chip, None for the 100 KiB of an A100 as in the
    papers, math.inf for a chip that holds everything. scratch: the dtype of intermediates in HBM (S
    and P of Algorithm 0, the running O and dQ), None for the accumulator's; the papers count the
    inputs' dtype, which is not accurate. watch: called after every TileVisit. tiles: (tile_m,
    tile_n) instead of the tiles that follow from sram. arithmetic: for paper_v4, instead of the one
    that keeps the contract.
    """

    sram: float | None
    scratch: torch.dtype | None
    watch: Callable[[TileVisit], None] | None
    tiles: TileConfig | None

    def __init__(
        self,
        sram: float | None = None,
        scratch: torch.dtype | None = None,
        watch: Callable[[TileVisit], None] | None = None,
        tiles: tuple[int, int] | None = None,
        arithmetic: "Arithmetic | None" = None,
    ):
        if sram is not None and sram < 1:
            raise ValueError(f"{sram=} must be at least 1 element, or None for 100 KiB")
        if tiles is not None and min(tiles) < 1:
            raise ValueError(f"{tiles=} must be (tile_m, tile_n) of at least 1")
        self.sram, self.scratch, self.watch = sram, scratch, watch
        self.tiles = None if tiles is None else TileConfig(*tiles)
        self.arithmetic = arithmetic
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.flops = self.exps = self.other_ops = self.rescales = 0
        self.saved: dict[int, tuple[Tensor, ...]] = {}  # P of a forward in HBM, by lse's address

    def tiles_for(self, problem: Problem, rule: Callable[..., TileConfig]) -> TileConfig:
        """The given tiles, or those of a paper's rule(sram, head_dim, head_dim_v)."""
        sram = paper_sram(self.sram, problem.dtype.itemsize)
        return self.tiles or rule(sram, problem.head_dim, problem.head_dim_v)

    def __str__(self) -> str:
        names = sorted(self.reads | self.writes)
        width = max(map(len, ["tensor", *names]))
        lines = [f"{'tensor':{width}} {'bytes read':>16} {'bytes written':>16}"]
        for name in names:
            lines.append(f"{name:{width}} {self.reads[name]:>16,} {self.writes[name]:>16,}")
        lines.append(f"{'all':{width}} {self.read_bytes:>16,} {self.write_bytes:>16,}")
        counts = f"{self.flops:,} flops, {self.exps:,} exps, {self.other_ops:,} other operations"
        return "\n".join([*lines, counts])


_open: list[Ledger] = []


@contextmanager
def ledger(sram: float | None = None, **options: Any) -> Iterator[Ledger]:
    """Inside the block every paper kernel of the process records into the given Ledger(sram,
    **options): forwards and backwards, in any thread. With nested blocks the innermost records.
    """
    book = Ledger(sram, **options)
    _open.append(book)
    try:
        yield book
    finally:
        _open.remove(book)
        book.saved.clear()


def current() -> Ledger:
    """The innermost open ledger, or an unused one."""
    return _open[-1] if _open else Ledger()
