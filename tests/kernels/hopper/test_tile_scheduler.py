"""The producers of the Hopper kernels, run as plain Python on several threads: every tile is
computed once, and the counter is 0 before and after a launch.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from types import FunctionType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("triton")
from onchip.kernels.hopper import backward, backward_split, producer, tile_scheduler  # noqa: E402

PROGRAMS = 5
QUERIES = 4  # of a tile


class Device:
    """The part of Gluon that producers use. A pointer to the counter is an index into `words`."""

    def __init__(self):
        self.words = [0, 0]
        self.draws = 0
        self._lock = threading.Lock()
        self._here = threading.local()
        self.minimum, self.maximum, self.static_range = min, max, range

    def num_programs(self, axis):
        return PROGRAMS

    def program_id(self, axis):
        return self._here.program

    def atomic_add(self, at, n, sem="acq_rel"):
        sleep(0)  # other threads may run first
        with self._lock:
            self.draws += at == 0
            self.words[at] += n
            return self.words[at] - n

    def store(self, at, value, mask=True):
        if mask:
            self.words[at] = value

    def launch(self, produce, *args):
        def run(program):
            self._here.program = program
            produce(*args)

        with ThreadPoolExecutor(PROGRAMS) as pool:
            list(pool.map(run, range(PROGRAMS)))


def plain(module, device, **stand_ins):
    """`produce` of a module and the functions that it calls, as plain Python, with stand_ins."""
    world = {**vars(tile_scheduler), **vars(module)}
    for name, value in world.items():
        if hasattr(value, "fn"):
            code, defaults = value.fn.__code__, value.fn.__defaults__
            world[name] = FunctionType(code, world, name, defaults)
    world.update(gl=device, **stand_ins)
    return world["produce"]


def make_params(num_tiles, **more):
    cfg = SimpleNamespace(DYNAMIC=True, CONSUMERS=2, TILE_N=1, TILE_M=1, TILE=1, VALUES=False)
    cfg.KEYS = False
    off = SimpleNamespace(ON=False)
    order = SimpleNamespace(num_tiles=num_tiles)
    seqlen, pages = MagicMock(group_size=1), SimpleNamespace(SIZE=0)
    parts = {"cfg": cfg, "blocks": off, "order": order, "seqlen": seqlen, "pages": pages}
    return SimpleNamespace(STRIPS=False, **parts, **more)


def make_forward_params(lengths, sparse, handed_out):
    """Parameters of a call over sequences of these lengths. Each sequence has as many work indices
    as the longest.
    """
    tiles = -(-max(lengths) // QUERIES)
    num_tiles = tiles * len(lengths)
    rows = [(n % tiles * QUERIES, lengths[n // tiles]) for n in range(num_tiles)]
    existing = [n for n, (row, length) in enumerate(rows) if row < length]

    def work_tile(work_index):
        row, length = rows[work_index] if work_index < num_tiles else (-1, 0)
        return SimpleNamespace(
            work_index=work_index, row=row, seqlen_q=length, seqlen_k=length, batch=0, head=0, k0=0
        )

    def find(number, block, passed):
        return existing[number] if number < len(existing) else num_tiles, block, passed

    def keys(work_tile, consumers):
        handed_out.append(work_tile.work_index)
        return SimpleNamespace(lo=0, hi=work_tile.work_index % 4)  # none for some

    params = make_params(
        num_tiles, SPARSE=sparse, work_tile=work_tile, find_tile=find, block_range=keys
    )
    params.pack_tile = lambda work_tile: ()
    return params, existing


def forward_of(device):
    nothing = lambda *args: None
    state = lambda *args: SimpleNamespace(
        **dict(zip(("work_index", "num_pushed", "block", "passed"), args, strict=True))
    )
    return plain(
        producer, device, load_rows=nothing, load_previous_out=nothing, ProducerState=state
    )


def pipes():
    return MagicMock(**{"k.num_stages": 2, "q.num_stages": 2, "dout.num_stages": 1})


LENGTHS = {
    "equal": [40] * 3,
    "packed": [40, 0, 3, 0, 0, 17, 39, 1],
    "nothing after the first": [100, 0, 0, 0],
    "nothing at all but one": [0, 0, 0, 0, 0, 0, 1, 0],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sparse", [False, True], ids=["", "sparse"])
def test_forward(lengths, sparse):
    device = Device()
    produce = forward_of(device)
    for _ in range(3):  # the next launch uses the same counter
        handed_out = []
        params, existing = make_forward_params(lengths, sparse, handed_out)
        device.draws = 0
        device.launch(produce, *[None] * 7, 0, pipes(), params)
        assert sorted(handed_out) == existing and device.words == [0, 0]
        assert device.draws == len(existing if sparse else range(params.order.num_tiles))


@pytest.mark.parametrize("apart", [0, 2, 100])
def test_wrong_lengths_leave_the_counter_at_0(apart):
    """Wrong tiles, or the same one again and again, as long as the launch ends."""
    device = Device()
    params, _ = make_forward_params(LENGTHS["packed"], True, [])
    end = 3 * params.order.num_tiles
    params.find_tile = lambda number, *at: (number * apart if number < end else end, *at)
    device.launch(forward_of(device), *[None] * 7, 0, pipes(), params)
    assert device.words == [0, 0]


def test_with_a_program_for_each_tile_nothing_is_drawn():
    """The counter is not used and may have any value."""
    device = Device()
    device.words = ["any", "value"]
    handed_out = []
    params, existing = make_forward_params([QUERIES] * PROGRAMS, False, handed_out)
    device.launch(forward_of(device), *[None] * 7, 0, pipes(), params)
    assert sorted(handed_out) == existing and device.words == ["any", "value"]


@pytest.mark.parametrize("num_tiles", [PROGRAMS + 1, 41])
def test_backward(num_tiles):
    device, handed_out = Device(), []

    def work_tile(work_index):
        handed_out.append(work_index)
        return 0, 0, work_index

    walk = SimpleNamespace(count=0)
    produce = plain(backward, device, make_walk=lambda *args: walk)
    for _ in range(3):
        params = make_params(num_tiles, work_tile=work_tile)
        params.seqlen.sequence.return_value = (0, 9, 0, 9)
        device.launch(produce, None, None, None, None, None, 0, pipes(), params)
        assert sorted(handed_out) == list(range(num_tiles)) and device.words == [0, 0]
        handed_out.clear()


@pytest.mark.parametrize("num_tiles", [PROGRAMS + 1, 41])
def test_backward_split(num_tiles):
    device, handed_out = Device(), []

    def work_tile(work_index, part):
        handed_out.append(work_index)
        return SimpleNamespace(row=0, length=0)

    for _ in range(3):
        params = make_params(num_tiles, work_tile=work_tile)
        device.launch(
            plain(backward_split, device), None, None, None, None, None, 0, pipes(), params
        )
        assert sorted(handed_out) == list(range(num_tiles)) and device.words == [0, 0]
        handed_out.clear()
