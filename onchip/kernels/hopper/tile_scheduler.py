"""The tile scheduler: which tile of queries a persistent program computes next.

Static: program p computes the work indices p, p + P, p + 2P, ... for P programs. Dynamic: the
producer draws the next work index from an atomic counter. Example: 300 tokens, one head and tiles
of 128 are the work indices 0, 1, 2; a causal call visits the tiles 2, 1, 0, the longest rows first.
"""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import LANES


@aggregate
class TileOrder:
    """The order of query tiles. Heads are grouped so that K and V of l2_group heads fit the L2.
    Within a group the longest rows of all heads come first (causal calls, and a good guess for
    masks), or one head after another.
    """

    tiles_m: gl.tensor
    l2_group: gl.tensor
    num_tiles: gl.tensor
    LONGEST_FIRST: gl.constexpr

    @gluon.jit
    def locate(self, work_index):
        """(tile of queries, batch * num_heads + head) of a work index."""
        if self.LONGEST_FIRST:
            per_group = self.tiles_m * self.l2_group
            group_index = work_index // per_group
            rest = work_index - group_index * per_group
            return (
                self.tiles_m - 1 - rest // self.l2_group,
                group_index * self.l2_group + rest % self.l2_group,
            )
        else:
            return work_index % self.tiles_m, work_index // self.tiles_m


@gluon.jit
def find_tile(seqlen, order, batch, number, block, passed, ROWS: gl.constexpr):
    """(work index, block, passed) of the number-th existing tile of packed queries, ROWS queries
    each. The tiles of a sequence come last first, for all heads one after another. If there are not
    that many tiles, the work index is num_tiles.

    `passed` tiles precede the 32 sequences from `block` on, in which the last tile was found.
    Numbers only rise, so a producer counts each sequence once.
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
    # Wrong lengths may have more tiles than the launch.
    exists = (sequence < batch) & (number < order.num_tiles)
    return gl.where(exists, work_index, order.num_tiles), block, passed


@gluon.jit
def _scan_tile_counts(seqlen, batch, block, ROWS: gl.constexpr):
    """Inclusive prefix sums of the query tiles of 32 sequences from `block` on, one a lane."""
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
    """The next work index; num_tiles or more if there is none. Each work index leads to one draw,
    and the last draw resets the counter to 0, the state in which the launch found it (SPARSE: see
    reset_counter). With one program per tile the counter is not used and may have any value.
    """
    if DYNAMIC:
        work_index = num_tiles
        if num_tiles > gl.num_programs(0):
            count = gl.atomic_add(counter, 1, sem="relaxed")  # relaxed: no data depends on it
            if not SPARSE:
                gl.store(counter, 0, mask=count == num_tiles - 1)
            work_index = count + gl.num_programs(0)
        return work_index
    else:
        return work_index + gl.num_programs(0)


@gluon.jit
def push_index(queue, num_pushed, work_index, DYNAMIC: gl.constexpr):
    """Backward's producer: push a work index."""
    if DYNAMIC:
        queue.push(num_pushed, (work_index,))


@gluon.jit
def pop_first_index(queue, num_popped, DYNAMIC: gl.constexpr, WARPS: gl.constexpr = 4):
    """Backward's consumer: the first work index."""
    work_index = gl.program_id(0)
    if DYNAMIC:
        (work_index,) = queue.pop(num_popped, WARPS)
    return work_index


@gluon.jit
def pop_next_index(queue, num_popped, work_index, DYNAMIC: gl.constexpr, WARPS: gl.constexpr = 4):
    """Backward's consumer: the next work index. The caller counts popped items only if DYNAMIC:
    Triton 3.6 would carry an unused count through the loop, and compile another order of
    instructions.
    """
    if DYNAMIC:
        (work_index,) = queue.pop(num_popped, WARPS)
    else:
        work_index += gl.num_programs(0)
    return work_index


@gluon.jit
def reset_counter(counter, num_tiles):
    """The last program to end resets the counter, and the count of ended programs behind it. Used
    where lengths decide how often programs draw: wrong lengths must not leave a counter behind.
    """
    if num_tiles > gl.num_programs(0):
        ended = gl.atomic_add(counter + 1, 1)  # after all draws of this program
        is_last = ended == gl.num_programs(0) - 1
        gl.store(counter, 0, mask=is_last)
        gl.store(counter + 1, 0, mask=is_last)
