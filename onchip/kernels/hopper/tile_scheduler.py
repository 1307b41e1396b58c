"""Which tile of queries a program takes next."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.pipeline import LANES


@aggregate
class TileOrder:
    """Tiles of queries in the order they are handed out: sections of heads whose K and V fit the
    L2; in a section the longest rows of all its heads first (those of a causal call, and as good a
    guess as any for a mask), or head after head.
    """

    tiles_m: gl.tensor
    l2_group: gl.tensor
    num_tiles: gl.tensor
    LONGEST_FIRST: gl.constexpr

    @gluon.jit
    def locate(self, work_index):
        """(tile of queries, batch * num_heads + head) of a ticket."""
        if self.LONGEST_FIRST:
            per_section = self.tiles_m * self.l2_group
            l2_group = work_index // per_section
            rest = work_index - l2_group * per_section
            return (
                self.tiles_m - 1 - rest // self.l2_group,
                l2_group * self.l2_group + rest % self.l2_group,
            )
        else:
            return work_index % self.tiles_m, work_index // self.tiles_m


@gluon.jit
def find_tile(seqlen, order, batch, number, block, passed, ROWS: gl.constexpr):
    """(ticket, block, passed): where among all tickets the number-th tile of packed queries is that
    exists, of ROWS queries each; the tiles of a sequence come last first, for all its heads one
    after another. A ticket too many if there are not as many.

    `passed` tiles lie before the 32 sequences from `block` on, in which the last one was found:
    numbers rise, so that a producer counts no sequence twice.
    """
    num_head_tiles = seqlen.num_head_tiles()
    tile = number // num_head_tiles
    stops = _scan_tile_counts(seqlen, batch, block, ROWS)
    count = gl.max(stops, 0)
    while (passed + count <= tile) & (block < batch):
        passed += count
        block += 32
        stops = _scan_tile_counts(seqlen, batch, block, ROWS)
        count = gl.max(stops, 0)
    before = passed + stops <= tile
    sequence = block + gl.sum(before.to(gl.int32), 0)
    stop = passed + gl.min(gl.where(before, 1 << 30, stops), 0)
    work_index = (
        (sequence * num_head_tiles + number % num_head_tiles) * order.tiles_m + stop - 1 - tile
    )
    exists = (sequence < batch) & (number < order.num_tiles)  # bad lengths have more than were cut
    return gl.where(exists, work_index, order.num_tiles), block, passed


@gluon.jit
def _scan_tile_counts(seqlen, batch, block, ROWS: gl.constexpr):
    """Tiles of queries up to and with each of 32 sequences from `block` on, in the lanes."""
    b = block + gl.arange(0, 32, LANES)
    _, seqlen_q = seqlen.q_range(gl.minimum(b, batch - 1))
    tiles = gl.where(b < batch, (seqlen_q + ROWS - 1) // ROWS, 0)
    return gl.associative_scan(tiles, 0, plus)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def next_work_index(
    counter, work_index, num_tiles, DYNAMIC: gl.constexpr, SPARSE: gl.constexpr = False
):
    """The ticket after this one, num_tiles or more if there is none. Each of num_tiles tickets
    leads to one draw, and the last draw leaves the counter as the launch found it, at 0 (SPARSE:
    see end_sparse). With a program for each tile nobody draws: it is not touched, and may be
    anything.
    """
    if DYNAMIC:
        work_index = num_tiles
        if num_tiles > gl.num_programs(0):
            count = gl.atomic_add(counter, 1, sem="relaxed")  # a number, and no data behind it
            if not SPARSE:
                gl.store(counter, 0, mask=count == num_tiles - 1)
            work_index = count + gl.num_programs(0)
        return work_index
    else:
        return work_index + gl.num_programs(0)


@gluon.jit
def reset_counter(counter, num_tiles):
    """Where lengths decide how often programs draw, and may be wrong, the last program to end
    leaves the counter at 0, and so the number of those that have ended, which lies behind it.
    """
    if num_tiles > gl.num_programs(0):
        ended = gl.atomic_add(counter + 1, 1)  # after all of its draws
        is_last = ended == gl.num_programs(0) - 1
        gl.store(counter, 0, mask=is_last)
        gl.store(counter + 1, 0, mask=is_last)
