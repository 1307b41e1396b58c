"""How decoding on Hopper splits its work, on the CPU: the kernel's own functions over NumPy
numbers, which wrap around and round as on the GPU.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from onchip.kernels.hopper import decode  # noqa: E402


class Float(np.ndarray):
    """fp32 with quotients off by two units in the last place, as div.full.f32's may be."""

    skew = 0

    def __truediv__(self, other):
        quotient = np.asarray(self) / np.asarray(other)
        return (quotient * np.float32(1 + self.skew * 2**-22)).view(Float)

    def to(self, dtype):
        return np.asarray(self).astype(dtype).view(Int)


class Int(np.ndarray):
    type = SimpleNamespace(layout=None)

    def to(self, dtype):
        return np.asarray(self).astype(dtype).view(Float)


def integers(values):
    return np.array(values, dtype=np.int32).view(Int)


@pytest.fixture(params=[-1, 0, 1], autouse=True)
def quotients(monkeypatch, request):
    language = SimpleNamespace(float32=np.float32, int32=np.int32, where=np.where)
    monkeypatch.setattr(decode, "gl", language)
    monkeypatch.setattr(Float, "skew", request.param)


def run(method, *args):
    """A method of an aggregate, outside of any kernel."""
    return getattr(method, "fn", method)(*args)


def cut_into(total, ranges):
    each, rest = divmod(total, ranges)
    made = SimpleNamespace(ranges=integers(ranges), each=integers(each), rest=integers(rest))
    made.start = lambda r: run(decode.RangeSplit.start, made, r)
    return made


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2**30), st.integers(1, 2048))
def test_owner_is_the_range_of_a_unit(total, ranges):
    """Range r is [r * total // ranges, (r + 1) * total // ranges), whatever its products need."""
    ranges = min(ranges, total)
    cut, all_of_them = cut_into(total, ranges), list(range(ranges))
    starts = [r * total // ranges for r in (*all_of_them, ranges)]
    first, stops = starts[:-1], starts[1:]
    assert cut.start(integers(all_of_them)).tolist() == first
    assert run(decode.RangeSplit.stop, cut, integers(all_of_them)).tolist() == stops
    last = [stop - 1 for stop in stops]
    middle = [(a + b) // 2 for a, b in zip(first, last, strict=True)]
    for units in (first, middle, last):
        assert run(decode.RangeSplit.owner, cut, integers(units)).tolist() == all_of_them


def test_ranges_past_the_last_are_empty():
    cut, there = cut_into(1000, 7), integers([7])
    assert run(decode.RangeSplit.stop, cut, there).tolist() == cut.start(there).tolist() == [1000]


@pytest.mark.grid
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 100), st.integers(1, 300))
def test_dense_ranges_cover_all_tiles_and_name_existing_sequences(batch, tiles, most):
    """Programs past the last range have no tiles, but still copy the queries of a sequence."""
    lengths = SimpleNamespace(PAGED=False, batch=batch, seqlen_k=64 * tiles)
    lengths.tiles = lambda seqlen: (0, tiles)
    total = (tiles + 4) * batch - 4
    parts = cut_into(total, min(most, max(total // 4, 1)))
    parts.stop = lambda r: parts.start(integers(r + (r < parts.ranges)))
    numpy = {"minimum": np.minimum, "maximum": np.maximum}
    names = {"SWITCH_COST": 4, "split": lambda *_: parts, "WorkRange": lambda *fields: fields}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "gl", SimpleNamespace(**numpy))
        for name, value in names.items():
            patch.setattr(decode, name, value)
        ranges = [
            run(decode.get_work_range, lengths, None, integers(r), most, 4) for r in range(most)
        ]
    covered = [b * tiles + tile + i for b, _, tile, count, *_ in ranges for i in range(count)]
    assert covered == list(range(batch * tiles))
    assert all(0 <= b < batch for b, *_ in ranges)


LANGUAGE = SimpleNamespace(
    int32=np.int32,
    float32=np.float32,
    arange=lambda start, stop, layout: np.arange(start, stop, dtype=np.int32),
    associative_scan=lambda x, axis, plus: np.cumsum(x),
    sum=lambda x, axis: np.asarray(x).sum(),
    max=lambda x, axis: np.asarray(x).max(),
    minimum=np.minimum,
    maximum=np.maximum,
    where=lambda *args: np.where(*args).view(Int),
)


@pytest.mark.grid
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 30 * 64), min_size=1, max_size=20),
    st.integers(1, 40),
    st.sampled_from([None, 100, 700]),
)
def test_programs_start_only_tiles_of_their_first_sequence(seqlens, most, left):
    """Programs past the last range may have any position, and start no tile."""
    window = {"HAS_LEFT": left is not None, "left": left, "seqlen_q": 1}
    lengths = SimpleNamespace(PAGED=True, batch=len(seqlens), **window)
    lengths.start = lambda seqlen: run(decode.DecodeSeqlens.start, lengths, seqlen)
    lengths.tiles = lambda seqlen: run(decode.DecodeSeqlens.tiles, lengths, seqlen)
    parts = lambda total, *_: paged_cut(total, most)
    fields = ["b", "seqlen", "tile", "count", "before", "split", "has_empty"]
    made = lambda *values: SimpleNamespace(**dict(zip(fields, values, strict=True)))
    names = {
        "gl": LANGUAGE,
        "split": parts,
        "WorkRange": made,
        "SWITCH_COST": 4,
        "TILE_N": 64,
        "plus": None,
    }
    names["switch_cost"] = lambda b, tiles: run(switch_cost, b, tiles)
    switch_cost = decode.switch_cost
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(decode, name, value)
        for number in range(most):
            mine = run(decode.get_work_range, lengths, integers(seqlens), integers(number), most, 4)
            started = int(run(decode.count_first_tiles, lengths, mine))
            first, tiles = lengths.tiles(integers(seqlens[int(mine.b)]))
            assert 0 <= started <= int(mine.count)
            assert started == 0 or int(mine.tile) + started <= int(tiles)


def paged_cut(total, most):
    """As `decode.split`, with ranges of 4 units at least."""
    parts = cut_into(int(total), min(most, max(int(total) // 4, 1)))
    parts.stop = lambda r: parts.start(integers(r + (r < parts.ranges)))
    return parts
