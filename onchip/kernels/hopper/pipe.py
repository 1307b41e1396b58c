"""Asynchrony as objects: shared memory that travels between one producer and its consumers.

The only file that names Gluon's TMA calls (they were renamed after Triton 3.6), and the only one
with a phase bit or a slot number in it. Slots are counted, never numbered: the i-th use of a ring.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
store_wait = tma.store_wait
tensor_descriptor = tma.tensor_descriptor
meet = getattr(gl, "barrier", None) or gl.thread_barrier  # of all threads of a partition


@builtin
def _reduce_through_builder(desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@builtin
def reinterpret(smem, desc, _semantic=None):
    """Shared memory as one tile of desc (the method's name changed after Triton 3.6)."""
    shape = [_unwrap_if_constexpr(n) for n in desc.block_shape]
    return _semantic.memdesc_reinterpret(smem, desc.dtype, shape, desc.layout)


@builtin
def _as_matrices(smem, shape, layout, _semantic=None):
    """The same memory in another shape; numbers of 8 bits become words of 16."""
    shape = [_unwrap_if_constexpr(n) for n in shape]
    dtype = gl.int16 if smem.dtype.primitive_bitwidth == 8 else smem.dtype
    return _semantic.memdesc_reinterpret(smem, dtype, shape, _unwrap_if_constexpr(layout))


# Triton 3.6 has the instruction but no name for it
_reduce_add = getattr(tma, "async_atomic_add", None) or _reduce_through_builder


@gluon.jit
def _open(num: gl.constexpr, arrivals: gl.constexpr):
    """`num` barriers that so many arrivals let pass. All that are opened must be closed when the
    program ends: memory of a barrier that nobody names any more is given to tiles, which must
    not be before it is invalidated (docs/notebook.md, a NaN that comes with company).
    """
    barriers = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(num):
        mbarrier.init(barriers.index(x), count=arrivals)
    return barriers


@gluon.jit
def _close(barriers, num: gl.constexpr):
    for x in gl.static_range(num):
        mbarrier.invalidate(barriers.index(x))


@gluon.constexpr_function
def _matrix(shape):
    """The shape of a tile as rows and columns, whatever boxes its rows come in."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return [rows, shape[-1]]


@aggregate
class Ring:
    """`num_stages` slots, each with a barrier for being full and one for being empty. If `readers`
    is not 0, so many threads release a slot through a numbered barrier.
    """

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    num_stages: gl.constexpr
    readers: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, full, empty, num_stages, readers=0):
        self.slots = slots
        self.full = full
        self.empty = empty
        self.num_stages = gl.constexpr(num_stages)
        self.readers = gl.constexpr(readers)

    @gluon.jit
    def slot(self, i):
        """The i-th filling, as a matrix."""
        slot = self.slots.index(i % self.num_stages)
        return slot.reshape(_matrix(slot.shape))

    @gluon.jit
    def tile(self, i):
        """The i-th filling, as a descriptor loads or stores it."""
        return self.slots.index(i % self.num_stages)

    @gluon.jit
    def steady_slot(self, i, turn):
        """The i-th filling in a loop over `turn`, at an address that the compiler cannot know to be
        the same for all turns: it would keep the descriptor of every 16 columns in registers across
        the loop, 32 registers too many.
        """
        slot = self.slots.index(i % self.num_stages + (turn >> 30))
        return slot.reshape([slot.shape[-2], slot.shape[-1]])

    @gluon.jit
    def wait_full(self, i):
        mbarrier.wait(self.full.index(i % self.num_stages), (i // self.num_stages) & 1)

    @gluon.jit
    def wait_empty(self, i):
        """Until the consumers have released filling i - num_stages (the first need no wait). Once
        for each filling, one after another, where the barriers are numbered.
        """
        if self.readers == 0:
            mbarrier.wait(self.empty.index(i % self.num_stages), ((i // self.num_stages) & 1) ^ 1)
        elif i >= self.num_stages:
            _numbered("sync", i % self.num_stages, self.readers)

    @gluon.jit
    def release(self, i):
        """This consumer is done with filling i."""
        if self.readers == 0:
            mbarrier.arrive(self.empty.index(i % self.num_stages), count=1)
        else:
            _numbered("arrive", i % self.num_stages, self.readers)

    @gluon.jit
    def load(self, i, desc, coord):
        """Producer: fill slot i from the tensor behind desc; what lies outside arrives as 0."""
        full = self.full.index(i % self.num_stages)
        mbarrier.expect(full, desc.block_type.nbytes)
        _load(desc, coord, full, self.slots.index(i % self.num_stages))

    @gluon.jit
    def announce(self, i, desc, parts: gl.constexpr):
        """Producer: slot i will be filled by `parts` calls of load_part."""
        mbarrier.expect(self.full.index(i % self.num_stages), desc.block_type.nbytes * parts)

    @gluon.jit
    def load_part(self, i, desc, coord, part: gl.constexpr):
        """Producer: fill the part-th of equal parts of the rows of slot i."""
        rows: gl.constexpr = desc.block_shape[-2]
        slot = self.slots.index(i % self.num_stages)
        part_of_slot = slot.slice(part * rows, rows, len(slot.shape) - 2)
        _load(desc, coord, self.full.index(i % self.num_stages), part_of_slot)

    @gluon.jit
    def load_with(self, i, desc, coord, other, other_desc, other_coord):
        """Producer: fill slot i and, under the same barrier, slot i of `other`, equally deep and
        with no barrier of its own.
        """
        full = self.full.index(i % self.num_stages)
        mbarrier.expect(full, desc.block_type.nbytes + other_desc.block_type.nbytes)
        _load(desc, coord, full, self.slots.index(i % self.num_stages))
        _load(other_desc, other_coord, full, other.slots.index(i % self.num_stages))

    @gluon.jit
    def close(self):
        _close(self.full, self.num_stages)
        if self.readers == 0:
            _close(self.empty, self.num_stages)


@gluon.constexpr_function
def _slots(num_stages, box, parts):
    return [num_stages, *box[:-2], parts * box[-2], box[-1]]


@gluon.jit
def make_ring(
    desc, num_stages: gl.constexpr, consumers: gl.constexpr, parts: gl.constexpr = 1,
    numbered: gl.constexpr = False,
):  # fmt: skip
    """A ring of tiles as desc loads them, in so many parts, released once by each consumer. At an
    mbarrier Triton lets all threads of a consumer meet before one arrives; at a `numbered` barrier
    each arrives when it gets there.
    """
    shape: gl.constexpr = _slots(num_stages, desc.block_shape, parts)
    slots = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full = _open(num_stages, 1)
    if numbered:
        return Ring(slots, full, full, num_stages, 128 * consumers)
    else:
        return Ring(slots, full, _open(num_stages, consumers), num_stages)


# The processor has 16 barriers; Triton numbers those of its partitions from 0 on
FIRST_NUMBER = gl.constexpr(8)


@gluon.constexpr_function
def _numbered_asm(what, readers):
    return f"bar.{what} $1, {readers + 32}; mov.b32 $0, 0;"  # the producer is a warp


@gluon.jit
def _numbered(what: gl.constexpr, slot, readers: gl.constexpr):
    gl.inline_asm_elementwise(
        _numbered_asm(what, readers), "=r,r", [FIRST_NUMBER + slot], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@aggregate
class Rider:
    """Slots filled by Ring.load_with: full and empty together with those of that ring."""

    slots: gl.shared_memory_descriptor
    num_stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, num_stages):
        self.slots = slots
        self.num_stages = gl.constexpr(num_stages)

    @gluon.jit
    def slot(self, i):
        """The i-th filling, as the descriptor loads it."""
        return self.slots.index(i % self.num_stages)


@gluon.jit
def make_rider(desc, num_stages: gl.constexpr):
    shape: gl.constexpr = [num_stages] + desc.block_shape
    return Rider(gl.allocate_shared_memory(desc.dtype, shape, desc.layout), num_stages)


@gluon.constexpr_function
def _matrices(warps, part, dim):
    """How `warps` matrices of 16 rows of 16-bit numbers lie in shared memory, where TMA brought
    them in boxes of `part` rows: columns in blocks of 64 numbers, whose pieces of 16 bytes are
    swizzled by the row. Offsets, bit by bit, as (matrix, row, column).
    """
    bases = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    bases += [[0, 1, 8], [0, 2, 16], [0, 4, 32], [0, 8, 0]]
    powers = lambda start, stop: [1 << x for x in range(30) if start <= 1 << x < stop]
    bases += [[x, 0, 0] for x in powers(1, part // 16)]
    bases += [[0, 0, x] for x in powers(64, dim)]
    bases += [[x, 0, 0] for x in powers(max(1, part // 16), warps)]
    return gl.SharedLinearLayout(bases, [], 1024)


@aggregate
class Boxes:
    """A ring of key tiles and value tiles, each brought in PARTS boxes and read as WARPS matrices
    of 16 rows and COLUMNS of 16 bits. Keys and values of 8 bits have scales, which the producer's
    lanes fetch: ARRIVALS at `full` for each filling are theirs and one more.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_scales: gl.shared_memory_descriptor
    v_scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    warm: gl.shared_memory_descriptor
    num_stages: gl.constexpr
    PARTS: gl.constexpr
    WARPS: gl.constexpr
    COLUMNS: gl.constexpr
    ARRIVALS: gl.constexpr
    LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, k, v, k_scales, v_scales, full, empty, warm, num_stages, PARTS, WARPS, COLUMNS,
        ARRIVALS, LAYOUT,
    ):  # fmt: skip
        self.k = k
        self.v = v
        self.k_scales = k_scales
        self.v_scales = v_scales
        self.full = full
        self.empty = empty
        self.warm = warm
        self.num_stages = gl.constexpr(num_stages)
        self.PARTS = gl.constexpr(PARTS)
        self.WARPS = gl.constexpr(WARPS)
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.ARRIVALS = gl.constexpr(ARRIVALS)
        self.LAYOUT = gl.constexpr(LAYOUT)

    @gluon.jit
    def warm_up(self, k_desc, v_desc, scratch):
        """The first copy by a descriptor waits for the descriptor to arrive: start one of each that
        nobody reads, into scratch memory, before it is known what to load.
        """
        mbarrier.expect(self.warm, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        _load(k_desc, [0, 0, 0, 0], self.warm, reinterpret(scratch, k_desc))
        _load(v_desc, [0, 0, 0, 0], self.warm, reinterpret(scratch, v_desc))

    @gluon.jit
    def wait_warm(self):
        """Before scratch memory is used or the program ends."""
        mbarrier.wait(self.warm, 0)

    @gluon.jit
    def announce(self, i, k_desc, v_desc):
        """Producer: once filling i - num_stages is released, say how much filling i will be."""
        mbarrier.wait(self.empty.index(i % self.num_stages), ((i // self.num_stages) & 1) ^ 1)
        self.expect(i, k_desc, v_desc)

    @gluon.jit
    def expect(self, i, k_desc, v_desc):
        """The same for the first num_stages fillings, which need no wait."""
        nbytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
        mbarrier.expect(self.full.index(i % self.num_stages), self.PARTS * nbytes)

    @gluon.jit
    def load(self, i, part: gl.constexpr, k_desc, v_desc, coord):
        s = i % self.num_stages
        _load(k_desc, coord, self.full.index(s), self.k.index(s * self.PARTS + part))
        _load(v_desc, coord, self.full.index(s), self.v.index(s * self.PARTS + part))

    @gluon.jit
    def fetch_scales(self, i, part: gl.constexpr, k_cells, v_cells):
        """Producer: start to copy the scales of a box of filling i."""
        at = (i % self.num_stages) * self.PARTS + part
        _fetch(self.k_scales.index(at), k_cells)
        _fetch(self.v_scales.index(at), v_cells)

    @gluon.jit
    def scales_fetched(self, i):
        """Producer: filling i is full when all that was fetched has come, too."""
        async_copy.mbarrier_arrive(self.full.index(i % self.num_stages), increment_count=False)

    @gluon.jit
    def restart(self, started):
        """All threads, before there is a producer: as if the first fillings had not been started,
        once they have come. No copy may be under way to a slot that is filled anew.
        """
        for i in range(started):
            self.wait_full(i)
        meet()
        for s in gl.static_range(self.num_stages):
            mbarrier.invalidate(self.full.index(s))
            mbarrier.init(self.full.index(s), count=self.ARRIVALS)
        fence_async_shared()

    @gluon.jit
    def wait_full(self, i):
        mbarrier.wait(self.full.index(i % self.num_stages), (i // self.num_stages) & 1)

    @gluon.jit
    def release(self, i):
        mbarrier.arrive(self.empty.index(i % self.num_stages), count=1)

    @gluon.jit
    def keys(self, i):
        """Filling i: (WARPS, 16, COLUMNS)."""
        return self._matrices(self.k, i)

    @gluon.jit
    def values(self, i):
        return self._matrices(self.v, i)

    @gluon.jit
    def _matrices(self, tiles, i):
        shape: gl.constexpr = [self.num_stages, self.WARPS, 16, self.COLUMNS]
        return _as_matrices(tiles, shape, self.LAYOUT).index(i % self.num_stages)

    @gluon.jit
    def scales(self, i, layout: gl.constexpr):
        """Of the keys of filling i and of its values, (WARPS, 16) each."""
        shape: gl.constexpr = [self.num_stages, self.WARPS, 16]
        s = i % self.num_stages
        k_scales = _as_matrices(self.k_scales, shape, _ROWS).index(s).load(layout)
        return k_scales, _as_matrices(self.v_scales, shape, _ROWS).index(s).load(layout)

    @gluon.jit
    def close(self):
        _close(self.full, self.num_stages)
        _close(self.empty, self.num_stages)
        mbarrier.invalidate(self.warm)


@gluon.jit
def make_boxes(k_desc, v_desc, num_stages: gl.constexpr, tile_n: gl.constexpr, warps: gl.constexpr):
    """Tiles of tile_n keys, in boxes as k_desc and v_desc load them."""
    ROWS: gl.constexpr = k_desc.block_shape[-2]
    PARTS: gl.constexpr = tile_n // ROWS
    KV8: gl.constexpr = k_desc.dtype.primitive_bitwidth == 8
    ARRIVALS: gl.constexpr = 1 + 32 if KV8 else 1  # all lanes of the producer, and its copies
    COLUMNS: gl.constexpr = k_desc.block_shape[-1] // 2 if KV8 else k_desc.block_shape[-1]
    shape: gl.constexpr = [num_stages * PARTS] + k_desc.block_shape
    k = gl.allocate_shared_memory(k_desc.dtype, shape, k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, shape, v_desc.layout)
    k_scales, v_scales = k, v  # stand for what nobody reads
    if KV8:
        k_scales = gl.allocate_shared_memory(gl.float32, [num_stages * PARTS, ROWS], _PLAIN)
        v_scales = gl.allocate_shared_memory(gl.float32, [num_stages * PARTS, ROWS], _PLAIN)
    full, empty, warm = _open(num_stages, ARRIVALS), _open(num_stages, 1), _open(1, 1).index(0)
    layout: gl.constexpr = _matrices(warps, ROWS, COLUMNS)
    return Boxes(k, v, k_scales, v_scales, full, empty, warm, num_stages, PARTS, warps, COLUMNS,
                 ARRIVALS, layout)  # fmt: skip


@gluon.jit
def follow():
    """By all programs of a kernel, after what can be done beside the call before: wait until that
    has ended, and let the next one begin.
    """
    gdc_wait()
    gdc_launch_dependents()


LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the one warp of a producer
AHEAD = gl.constexpr(6)  # fillings between a look-up and its use
LOOKUPS = gl.constexpr(8)  # fillings that a ring of them holds
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def prefetch(cells):
    """Bring what these pointers point to into the L1, if it is not there. Nobody waits for it."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1];\n mov.b32 $0, 0;", "=r,l", [cells], gl.int32, False, 1
    )


@gluon.jit
def fetch(smem, cells, mask):
    """Start to copy what these pointers point to, zeros where the mask is not set."""
    _fetch(smem, cells, mask)
    async_copy.commit_group()


@gluon.jit
def fetched():
    """Until all that this warp group has fetched is there."""
    async_copy.wait_group(0)


@aggregate
class Lookups:
    """What a producer must know to fill a ring (page ids), fetched AHEAD fillings earlier: it never
    waits for memory itself. A ring of numbers for each filling; one `fetch` and one `wait` belong
    to each, in order.
    """

    slots: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, slots):
        self.slots = slots

    @gluon.jit
    def fetch(self, i, cells, wanted):
        """Start to copy what these pointers point to, for filling i, if it is wanted."""
        if wanted:
            _fetch(self.slots.index(i % LOOKUPS), cells)
        async_copy.commit_group()

    @gluon.jit
    def wait(self):
        """For the numbers of a filling, when those of AHEAD more have been asked for."""
        async_copy.wait_group(AHEAD)

    @gluon.jit
    def number(self, i, x: gl.constexpr):
        """The x-th number of filling i."""
        return self.number_in(i % LOOKUPS, x, LANES)

    @gluon.jit
    def number_in(self, slot, x: gl.constexpr, layout: gl.constexpr):
        """The x-th number of a slot, for warps that have this layout."""
        return gl.max(self.slots.index(slot).slice(x, 1).load(layout), 0)

    @gluon.jit
    def keep(self, numbers):
        """The numbers of all slots. By any number of warps, before there is a producer; its first
        `fetch` of each filling need not want them.
        """
        _as_matrices(self.slots, numbers.shape, _PLAIN).store(numbers)

    @gluon.jit
    def kept(self, count: gl.constexpr, layout: gl.constexpr):
        """What `keep` has stored, all of it."""
        return _as_matrices(self.slots, [count], _PLAIN).load(layout)

    @gluon.jit
    def note(self, i, x: gl.constexpr, number):
        """Keep a number that is known already."""
        cell = self.slots.index(i % LOOKUPS).slice(x, 1)
        cell.store(gl.full([1], number, gl.int32, LANES))


@gluon.jit
def make_lookups(numbers: gl.constexpr, slots: gl.constexpr = LOOKUPS):
    return Lookups(gl.allocate_shared_memory(gl.int32, [slots, numbers], _PLAIN))


@aggregate
class Exchange:
    """Matrices of which every consumer writes a part and reads the whole. Two deep: who writes the
    i-th has taken the (i - 1)-th, so all have written that one, after their last read of the
    (i - 2)-th.
    """

    slots: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, slots, ready):
        self.slots = slots
        self.ready = ready

    @gluon.jit
    def put(self, i, row: gl.constexpr, col: gl.constexpr, value):
        """Write a part of the i-th matrix."""
        rows = self.slots.index(i & 1).slice(row, value.shape[0], 0)
        rows.slice(col, value.shape[1], 1).store(value)

    @gluon.jit
    def take(self, i):
        """Having put all my parts: the whole i-th matrix, for warpgroup products to read, once the
        others have put theirs.
        """
        fence_async_shared()
        mbarrier.arrive(self.ready, count=1)
        mbarrier.wait(self.ready, i & 1)
        return self.slots.index(i & 1)

    @gluon.jit
    def close(self):
        mbarrier.invalidate(self.ready)


@gluon.jit
def make_exchange(
    dtype: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr, consumers: gl.constexpr
):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
    slots = gl.allocate_shared_memory(dtype, [2, rows, cols], layout)
    return Exchange(slots, _open(1, consumers).index(0))


@aggregate
class Baton:
    """Whose turn it is on the tensor cores: consumers issue their products one after another."""

    turns: gl.shared_memory_descriptor
    holders: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, turns, holders):
        self.turns = turns
        self.holders = gl.constexpr(holders)

    @gluon.jit
    def take(self, me: gl.constexpr, i):
        mbarrier.wait(self.turns.index(me), i & 1)

    @gluon.jit
    def pass_on(self, me: gl.constexpr):
        mbarrier.arrive(self.turns.index((me + 1) % self.holders), count=1)

    @gluon.jit
    def close(self):
        _close(self.turns, self.holders)


@gluon.jit
def make_baton(holders: gl.constexpr):
    turns = _open(holders, 1)
    mbarrier.arrive(turns.index(0), count=1)
    return Baton(turns, holders)


@aggregate
class Tickets:
    """Work handed from the producer to the consumers, two tickets of WORDS numbers deep."""

    ring: Ring
    WORDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, WORDS):
        self.ring = ring
        self.WORDS = gl.constexpr(WORDS)

    @gluon.jit
    def give(self, i, words):
        self.ring.wait_empty(i)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        for w in gl.static_range(self.WORDS):
            word = self.ring.slots.index(i % 2 * self.WORDS + w)
            word.store(gl.full([1], words[w], gl.int32, one))
        mbarrier.arrive(self.ring.full.index(i % 2), count=1)

    @gluon.jit
    def take(self, i):
        self.ring.wait_full(i)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        words = ()
        for w in gl.static_range(self.WORDS):
            word = self.ring.slots.index(i % 2 * self.WORDS + w)
            words = words + (gl.max(word.load(one), 0),)
        self.ring.release(i)
        return words

    @gluon.jit
    def close(self):
        self.ring.close()


@gluon.jit
def make_tickets(consumers: gl.constexpr, words: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [2 * words, 1], layout)
    return Tickets(Ring(slots, _open(2, 1), _open(2, consumers), 2), words)


@gluon.jit
def store_tile(desc, coord, smem, value, ADD: gl.constexpr = False):
    """Registers -> shared memory -> the tensor behind desc, rows outside of it dropped;
    asynchronous. ADD: it is added to what is there.
    """
    store_wait(0)  # the last store of this slot must have been read
    smem.reshape(_matrix(smem.shape)).store(value)
    fence_async_shared()
    if ADD:
        _reduce_add(desc, coord, smem)
    else:
        _store(desc, coord, smem)


@gluon.jit
def store_halves(desc, coord, smem, value, ADD: gl.constexpr = False):
    """store_tile of twice the columns of desc, one half after the other: fp32 leaves through memory
    with room for 16 bits of each number.
    """
    slot = reinterpret(smem, desc)
    half: gl.constexpr = value.shape[1] // 2
    left, right = value.reshape([value.shape[0], 2, half]).permute((0, 2, 1)).split()
    store_tile(desc, coord, slot, left, ADD)
    store_tile(desc, coord[:-1] + (gl.to_tensor(half),), slot, right, ADD)
