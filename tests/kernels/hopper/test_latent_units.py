"""The work units of the latent kernel, found in plain Python: every key of every row is in one
unit, slots and records are those that triton/merge.py reads, and programs without a unit have no
rows.
"""

from types import FunctionType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from onchip.kernels.hopper import latent  # noqa: E402
from onchip.kernels.tiles import batch_bucket  # noqa: E402

ROWS, TILE = 64, 64
TABLE = 4096  # keys that a row of the page table can address
FIELDS = (  # of a LatentUnit
    *("b", "r0", "start_q", "seqlen_q", "seqlen_k", "split", "count", "begin", "end"),
    *("slot", "record", "num_records"),
)


class Pointer:
    def __init__(self, values, at=0):
        self.values, self.at = torch.tensor(values), at

    def __add__(self, offset):
        return Pointer(self.values.tolist(), self.at + offset)


GLUON = SimpleNamespace(
    arange=lambda start, stop, layout: torch.arange(start, stop),
    load=lambda pointer: pointer.values[pointer.at],
    minimum=lambda a, b: torch.minimum(*map(torch.as_tensor, (a, b))),
    maximum=lambda a, b: torch.maximum(*map(torch.as_tensor, (a, b))),
    where=lambda condition, a, b: torch.where(condition, a, b),
    sum=lambda x, axis: x.sum(),
    max=lambda x, axis: x.max(),
    full_like=torch.full_like,
    associative_scan=lambda x, axis, combine: x.cumsum(0),
    BlockedLayout=lambda *args: None,
    int32=torch.int32,
    int64=torch.int64,
)


def plain(function, world):
    return FunctionType(function.fn.__code__, world, function.fn.__name__)


def units_of(queries, keys, group, units, least, num_units, packed, left=None):
    """The unit of each program."""
    world = {**vars(latent), "gl": GLUON}
    world |= {"ROWS": ROWS, "TILE_N": TILE, "pick": plain(latent.pick, world)}
    offsets = torch.tensor([0, *queries]).cumsum(0).tolist()
    lengths = SimpleNamespace(
        cu_seqlens_q=Pointer(offsets),
        cache_seqlens=Pointer(keys),
        total_q=offsets[-1] if packed else max(queries),
        seqlen_k=TABLE,
        batch=len(keys),
        left=left,
        PACKED=packed,
        HAS_LEFT=left is not None,
    )
    for name in ("keys", "queries", "tiles"):
        method = plain(getattr(latent.LatentLengths, name), world)
        setattr(lengths, name, method.__get__(lengths))
    world["LatentUnit"] = lambda *fields: SimpleNamespace(
        **{name: int(x) for name, x in zip(FIELDS, fields, strict=True)}
    )
    find = plain(latent.find_unit, world)
    flags = units is not None, batch_bucket(len(keys))
    return [find(lengths, n, units, least, num_units, group, *flags) for n in range(num_units)]


CASES = [
    ([1], [300], 128, 3),
    ([1] * 9, [5, 1, 2049, 0, 333, 64, 4000, 16, 17], 16, 125),
    ([2] * 9, [5, 1, 2049, 0, 333, 64, 4000, 16, 17], 33, 264),
    ([1] * 64, [4096] * 64, 16, None),
    ([1] * 40, [100 * n for n in range(40)], 128, 125),
    ([1, 0, 40, 1, 7, 300], [900, 30, 3000, 1, 7, 300], 8, 125),
    ([3] * 300, [10_000 if n == 7 else n for n in range(300)], 16, 125),
]


@pytest.mark.parametrize("left", [None, 100])
@pytest.mark.parametrize("queries, keys, group, units", CASES, ids=range(len(CASES)))
def test_every_key_of_every_row_has_one_unit(queries, keys, group, units, left):
    packed, seen = len(set(queries)) > 1, [min(n, TABLE) for n in keys]
    tiles_q = [-(-n * group // ROWS) for n in queries]
    want = set()
    for b, (seqlen_q, seqlen_k) in enumerate(zip(queries, seen, strict=True)):
        first = 0 if left is None else max(0, seqlen_k - seqlen_q - left) // TILE
        tiles = range(first, -(-seqlen_k // TILE))
        want |= {(b, tile * ROWS, n) for tile in range(tiles_q[b]) for n in tiles}
    num_units = sum(tiles_q) + (units or 0) + 5
    found = units_of(queries, keys, group, units, 4, num_units, packed, left)
    exist = [unit for unit in found if unit.seqlen_q]
    got = [(unit.b, unit.r0, n) for unit in exist for n in range(unit.begin, unit.end)]
    assert len(got) == len(set(got)) and set(got) == want
    alone = {(unit.b, unit.r0) for unit in exist if unit.split == 0}
    assert alone == {(b, r * ROWS) for b, tiles in enumerate(tiles_q) for r in range(tiles)}
    for unit in exist:
        assert unit.seqlen_q == queries[unit.b] and unit.seqlen_k == seen[unit.b]
        assert 0 <= unit.r0 < queries[unit.b] * group
    for unit in found:  # those that do not exist load no keys, and have no row below seqlen_q
        assert unit.seqlen_q or (unit.r0 >= 0 and unit.begin == unit.end and unit.count == 1)


@pytest.mark.parametrize("queries, keys, group, units", CASES, ids=range(len(CASES)))
def test_slots_and_records(queries, keys, group, units):
    num_units = sum(-(-n * group // ROWS) for n in queries) + (units or 0)
    found = units_of(queries, keys, group, units, 4, num_units, len(set(queries)) > 1)
    split = [unit for unit in found if unit.count > 1]
    assert sorted(unit.slot for unit in split) == list(range(len(split)))
    assert {unit.num_records for unit in found} == {len({(u.b, u.r0) for u in split})}
    records = {unit.record: (unit.b, unit.r0) for unit in split}
    assert sorted(records) == list(range(len(set(records.values()))))
    firsts = {(unit.b, unit.r0): unit.slot for unit in split if unit.split == 0}
    assert all(unit.slot == firsts[unit.b, unit.r0] + unit.split for unit in split)


def test_too_few_programs_drop_whole_sequences():
    """Bad offsets may need more units than were launched."""
    found = units_of([1] * 6, [2000] * 6, 128, 12, 4, 20, packed=False)
    exist = {unit.b for unit in found if unit.seqlen_q}
    assert exist and all(unit.r0 >= 0 for unit in found)
    for b in exist:
        mine = [u for u in found if u.seqlen_q and u.b == b]
        assert len(mine) == 2 * mine[0].count
