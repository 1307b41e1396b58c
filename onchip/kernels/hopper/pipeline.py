"""Pipelines: shared memory that moves between one producer warp and its consumer warpgroups.

  producer                    stage i % num_stages                  consumer
  wait_empty(i)   <---------- mbarrier `empty`, or a named barrier  release(i)
  load(i, desc) --- TMA ----> tile
                  ----------> mbarrier `full`  -------------------> wait_full(i), stage(i)

Callers count iterations i = 0, 1, 2, ...; a stage number or a phase bit occurs in this file alone.
Iteration i uses stage i % num_stages, and the phase of its barriers is i // num_stages & 1.
Example: 300 keys in tiles of 128 are iterations 0, 1, 2 (the last has 44 keys, TMA fills the rest
with 0). With two stages, iteration 2 reuses stage 0, so wait_empty(2) waits for release(0).

This is also the only file that names Gluon's TMA calls, which were renamed after Triton 3.6.
examples/versions/hopper.py is the same pipeline in a few lines.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon

_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
store_wait = tma.store_wait
tensor_descriptor = tma.tensor_descriptor
sync_partition = getattr(gl, "barrier", None) or gl.thread_barrier  # all threads of a partition


@builtin
def _reduce_through_builder(desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@builtin
def reinterpret(smem, desc, _semantic=None):
    """View shared memory as one tile of desc. (The method was renamed after Triton 3.6.)"""
    shape = [_unwrap_if_constexpr(n) for n in desc.block_shape]
    return _semantic.memdesc_reinterpret(smem, desc.dtype, shape, desc.layout)


@builtin
def _view_as(smem, shape, layout, _semantic=None):
    """View the same memory in another shape. 8-bit elements become 16-bit words."""
    shape = [_unwrap_if_constexpr(n) for n in shape]
    dtype = gl.int16 if smem.dtype.primitive_bitwidth == 8 else smem.dtype
    return _semantic.memdesc_reinterpret(smem, dtype, shape, _unwrap_if_constexpr(layout))


# Triton 3.6 has the instruction but no function for it.
_reduce_add = getattr(tma, "async_atomic_add", None) or _reduce_through_builder


@gluon.jit
def _make_barriers(num: gl.constexpr, arrivals: gl.constexpr):
    """`num` mbarriers of `arrivals` arrivals each. Every barrier must be invalidated before the
    program ends. Otherwise the compiler gives the memory of a barrier after its last use to tiles
    (docs/notebook.md, a NaN from the memory of a barrier).
    """
    barriers = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(num):
        mbarrier.init(barriers.index(x), count=arrivals)
    return barriers


@gluon.jit
def _invalidate(barriers, num: gl.constexpr):
    for x in gl.static_range(num):
        mbarrier.invalidate(barriers.index(x))


@gluon.constexpr_function
def _as_2d_shape(shape):
    """The shape of a tile as rows and columns, whatever box its rows were loaded in."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return [rows, shape[-1]]


@aggregate
class Pipeline:
    """`num_stages` stages with a `full` and an `empty` barrier each. If `participants` is not 0,
    `empty` is not used: a stage is released through a named barrier, at which so many threads meet,
    those of the consumers, which do not wait, and the producer's warp, which does.
    """

    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    num_stages: gl.constexpr
    participants: gl.constexpr = 0
    first_barrier: gl.constexpr = 0

    @gluon.jit
    def stage(self, i):
        """The tile of iteration i, as a matrix."""
        stage = self.smem.index(i % self.num_stages)
        return stage.reshape(_as_2d_shape(stage.shape))

    @gluon.jit
    def tma_stage(self, i):
        """The tile of iteration i, in the shape in which a descriptor loads or stores it."""
        return self.smem.index(i % self.num_stages)

    @gluon.jit
    def opaque_stage(self, i, loop_index):
        """The tile of iteration i, inside a loop over loop_index. The compiler cannot prove that
        the address is the same in each iteration. Otherwise it would keep the descriptor of every
        16 columns in registers across the loop, 32 registers too many.
        """
        stage = self.smem.index(i % self.num_stages + (loop_index >> 30))
        return stage.reshape([stage.shape[-2], stage.shape[-1]])

    @gluon.jit
    def wait_full(self, i):
        mbarrier.wait(self.full.index(i % self.num_stages), (i // self.num_stages) & 1)

    @gluon.jit
    def wait_empty(self, i):
        """Wait until the consumers have released iteration i - num_stages; the first num_stages
        iterations do not wait. With named barriers, call it exactly once for each iteration, in
        order.
        """
        if self.participants == 0:
            mbarrier.wait(self.empty.index(i % self.num_stages), ((i // self.num_stages) & 1) ^ 1)
        elif i >= self.num_stages:
            _named_barrier("sync", self.first_barrier + i % self.num_stages, self.participants)

    @gluon.jit
    def release(self, i):
        """Consumer: iteration i is no longer read."""
        if self.participants == 0:
            mbarrier.arrive(self.empty.index(i % self.num_stages), count=1)
        else:
            _named_barrier("arrive", self.first_barrier + i % self.num_stages, self.participants)

    @gluon.jit
    def load(self, i, desc, coord, linked_bytes: gl.constexpr = 0):
        """Producer: load the tile of iteration i. Elements outside of the tensor arrive as 0.
        linked_bytes: of the tiles that load_linked loads under the same barrier.
        """
        full = self.full.index(i % self.num_stages)
        mbarrier.expect(full, desc.block_type.nbytes + linked_bytes)
        _load(desc, coord, full, self.smem.index(i % self.num_stages))

    @gluon.jit
    def load_linked(self, i, desc, coord, linked):
        """Producer, after load: load iteration i of `linked`, LinkedStages of this pipeline."""
        full = self.full.index(i % self.num_stages)
        _load(desc, coord, full, linked.smem.index(i % self.num_stages))

    @gluon.jit
    def expect_parts(self, i, desc, parts: gl.constexpr, linked_bytes: gl.constexpr = 0):
        """Producer: `parts` calls of load_part will fill iteration i. linked_bytes: for each of
        them, of the parts that load_linked_part loads under the same barrier.
        """
        nbytes: gl.constexpr = desc.block_type.nbytes + linked_bytes
        mbarrier.expect(self.full.index(i % self.num_stages), nbytes * parts)

    @gluon.jit
    def load_part(self, i, desc, coord, part: gl.constexpr):
        """Producer: load one of several equal parts of the rows of iteration i."""
        self.load_linked_part(i, desc, coord, part, self)

    @gluon.jit
    def load_linked_part(self, i, desc, coord, part: gl.constexpr, linked):
        """Producer: load_part of `linked`, LinkedStages of this pipeline."""
        rows: gl.constexpr = desc.block_shape[-2]
        stage = linked.smem.index(i % self.num_stages)
        part_of_stage = stage.slice(part * rows, rows, len(stage.shape) - 2)
        _load(desc, coord, self.full.index(i % self.num_stages), part_of_stage)

    @gluon.jit
    def close(self):
        _invalidate(self.full, self.num_stages)
        if self.participants == 0:
            _invalidate(self.empty, self.num_stages)


@gluon.constexpr_function
def _stage_shape(num_stages, box, parts):
    """A box of one number a row has one part."""
    return [num_stages, *box[:-2], parts * box[-2], box[-1]] if len(box) > 1 else [num_stages, *box]


@gluon.jit
def make_pipeline(
    desc, num_stages: gl.constexpr, consumers: gl.constexpr, parts: gl.constexpr = 1,
    first_barrier: gl.constexpr = 0,
):  # fmt: skip
    """A pipeline of the tiles that desc loads, in `parts` parts, released once by each consumer.
    With mbarriers, Triton synchronises all threads of a consumer before one of them arrives. With
    named barriers (from first_barrier on) each thread arrives on its own.
    """
    shape: gl.constexpr = _stage_shape(num_stages, desc.block_shape, parts)
    smem = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full = _make_barriers(num_stages, 1)
    if first_barrier > 0:
        return Pipeline(smem, full, full, num_stages, 128 * consumers + 32, first_barrier)
    else:
        return Pipeline(smem, full, _make_barriers(num_stages, consumers), num_stages)


# A program has 16 named barriers. Triton uses them from 0 on, one for each partition. Ours in the
# forward: up to four stages of keys. In the backward: the stages of pipelines, the two consumers of
# a StoreQueue, twice the two of a TileExchange.
FORWARD_BARRIER = gl.constexpr(8)
PIPELINE_BARRIER = gl.constexpr(5)
STORE_BARRIER = gl.constexpr(10)
EXCHANGE_BARRIER = gl.constexpr(12)


@gluon.constexpr_function
def _named_barrier_asm(what, threads):
    return f"bar.{what} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def _named_barrier(what: gl.constexpr, barrier, threads: gl.constexpr):
    gl.inline_asm_elementwise(
        _named_barrier_asm(what, threads), "=r,r", [barrier], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@aggregate
class LinkedStages:
    """Stages filled by Pipeline.load_linked. They are full and empty together with
    that pipeline's.
    """

    smem: gl.shared_memory_descriptor
    num_stages: gl.constexpr

    @gluon.jit
    def stage(self, i):
        """The tile of iteration i, in the shape in which the descriptor loads it."""
        return self.smem.index(i % self.num_stages)

    @gluon.jit
    def matrix(self, i):
        """The tile of iteration i, as a matrix."""
        stage = self.smem.index(i % self.num_stages)
        return stage.reshape(_as_2d_shape(stage.shape))

    @gluon.jit
    def opaque_matrix(self, i, loop_index):
        """The tile of iteration i, as a matrix: see Pipeline.opaque_stage."""
        stage = self.smem.index(i % self.num_stages + (loop_index >> 30))
        return stage.reshape(_as_2d_shape(stage.shape))


@gluon.jit
def make_linked_stages(desc, num_stages: gl.constexpr, parts: gl.constexpr = 1):
    shape: gl.constexpr = _stage_shape(num_stages, desc.block_shape, parts)
    return LinkedStages(gl.allocate_shared_memory(desc.dtype, shape, desc.layout), num_stages)


@gluon.constexpr_function
def _warp_tile_layout(warps, part, dim):
    """The shared-memory layout of `warps` matrices of 16 rows of 16-bit elements, loaded by TMA in
    boxes of `part` rows. Columns come in blocks of 64 elements; pieces of 16 bytes are swizzled by
    the row. The bases are (matrix, row, column) for each bit of the offset.
    """
    bases = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    bases += [[0, 1, 8], [0, 2, 16], [0, 4, 32], [0, 8, 0]]
    powers = lambda start, stop: [1 << x for x in range(30) if start <= 1 << x < stop]
    bases += [[x, 0, 0] for x in powers(1, part // 16)]
    bases += [[0, 0, x] for x in powers(64, dim)]
    bases += [[x, 0, 0] for x in powers(max(1, part // 16), warps)]
    return gl.SharedLinearLayout(bases, [], 1024)


@aggregate
class KVStages:
    """A pipeline of K and V tiles under one barrier. A tile is loaded in PARTS boxes and read as
    WARPS matrices of 16 rows and COLUMNS 16-bit columns. 8-bit K and V have scales, which the lanes
    of the producer warp copy; `full` then expects ARRIVALS arrivals, 32 lanes and TMA.
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

    @gluon.jit
    def prefetch_descriptors(self, k_desc, v_desc, scratch):
        """Start one unused copy through each descriptor, into scratch memory. The first copy
        through a descriptor waits for the descriptor itself; this overlaps that wait with finding
        out what to load.
        """
        mbarrier.expect(self.warm, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        _load(k_desc, [0, 0, 0, 0], self.warm, reinterpret(scratch, k_desc))
        _load(v_desc, [0, 0, 0, 0], self.warm, reinterpret(scratch, v_desc))

    @gluon.jit
    def wait_descriptors(self):
        """Wait for the copies of prefetch_descriptors, before scratch memory is used or the program
        ends. Otherwise a copy could overwrite it.
        """
        mbarrier.wait(self.warm, 0)

    @gluon.jit
    def acquire(self, i, k_desc, v_desc):
        """Producer: wait until iteration i - num_stages is released, then expect iteration i."""
        mbarrier.wait(self.empty.index(i % self.num_stages), ((i // self.num_stages) & 1) ^ 1)
        self.expect(i, k_desc, v_desc)

    @gluon.jit
    def expect(self, i, k_desc, v_desc):
        """Producer: expect the bytes of iteration i. Alone, for the first num_stages iterations,
        which do not wait.
        """
        nbytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
        mbarrier.expect(self.full.index(i % self.num_stages), self.PARTS * nbytes)

    @gluon.jit
    def load(self, i, part: gl.constexpr, k_desc, v_desc, coord):
        s = i % self.num_stages
        _load(k_desc, coord, self.full.index(s), self.k.index(s * self.PARTS + part))
        _load(v_desc, coord, self.full.index(s), self.v.index(s * self.PARTS + part))

    @gluon.jit
    def fetch_scales(self, i, part: gl.constexpr, k_pointers, v_pointers):
        """Producer: start to copy the scales of one box of iteration i."""
        at = (i % self.num_stages) * self.PARTS + part
        _fetch(self.k_scales.index(at), k_pointers)
        _fetch(self.v_scales.index(at), v_pointers)

    @gluon.jit
    def arrive_scales(self, i):
        """Producer: arrive at `full` of iteration i once the scales copied so far have landed."""
        async_copy.mbarrier_arrive(self.full.index(i % self.num_stages), increment_count=False)

    @gluon.jit
    def restart(self, started):
        """All threads, before the producer starts: undo the first `started` iterations, after they
        have landed. Otherwise a copy could still be on its way to a stage that is filled again.
        """
        for i in range(started):
            self.wait_full(i)
        sync_partition()
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
        """K of iteration i: (WARPS, 16, COLUMNS)."""
        return self._stage(self.k, i)

    @gluon.jit
    def values(self, i):
        """V of iteration i: (WARPS, 16, COLUMNS)."""
        return self._stage(self.v, i)

    @gluon.jit
    def _stage(self, tiles, i):
        shape: gl.constexpr = [self.num_stages, self.WARPS, 16, self.COLUMNS]
        return _view_as(tiles, shape, self.LAYOUT).index(i % self.num_stages)

    @gluon.jit
    def scales(self, i, layout: gl.constexpr):
        """(scales of K, scales of V) of iteration i, (WARPS, 16) each."""
        shape: gl.constexpr = [self.num_stages, self.WARPS, 16]
        s = i % self.num_stages
        k_scales = _view_as(self.k_scales, shape, _ROWS).index(s).load(layout)
        return k_scales, _view_as(self.v_scales, shape, _ROWS).index(s).load(layout)

    @gluon.jit
    def close(self):
        _invalidate(self.full, self.num_stages)
        _invalidate(self.empty, self.num_stages)
        mbarrier.invalidate(self.warm)


@gluon.jit
def make_kv_stages(
    k_desc, v_desc, num_stages: gl.constexpr, tile_n: gl.constexpr, warps: gl.constexpr
):
    """Tiles of tile_n keys, in the boxes that k_desc and v_desc load."""
    ROWS: gl.constexpr = k_desc.block_shape[-2]
    PARTS: gl.constexpr = tile_n // ROWS
    EIGHT: gl.constexpr = k_desc.dtype.primitive_bitwidth == 8
    ARRIVALS: gl.constexpr = 1 + 32 if EIGHT else 1  # 32 lanes of the producer, and TMA
    COLUMNS: gl.constexpr = k_desc.block_shape[-1] // 2 if EIGHT else k_desc.block_shape[-1]
    shape: gl.constexpr = [num_stages * PARTS] + k_desc.block_shape
    k = gl.allocate_shared_memory(k_desc.dtype, shape, k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, shape, v_desc.layout)
    k_scales, v_scales = k, v  # placeholders, not read
    if EIGHT:
        k_scales = gl.allocate_shared_memory(gl.float32, [num_stages * PARTS, ROWS], _PLAIN)
        v_scales = gl.allocate_shared_memory(gl.float32, [num_stages * PARTS, ROWS], _PLAIN)
    full, empty, warm = (
        _make_barriers(num_stages, ARRIVALS),
        _make_barriers(num_stages, 1),
        _make_barriers(1, 1).index(0),
    )
    layout: gl.constexpr = _warp_tile_layout(warps, ROWS, COLUMNS)
    return KVStages(k, v, k_scales, v_scales, full, empty, warm, num_stages, PARTS, warps, COLUMNS,
                    ARRIVALS, layout)  # fmt: skip


@gluon.jit
def sync_with_previous_kernel():
    """Programmatic dependent launch: wait until the previous kernel of the stream has ended, and
    let the next one start. All programs call it, after the work that does not depend on the
    previous kernel.
    """
    gdc_wait()
    gdc_launch_dependents()


LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # the one warp of a producer
PREFETCH_DISTANCE = gl.constexpr(6)  # iterations between the copy of an index and its use
PREFETCH_STAGES = gl.constexpr(8)  # iterations in shared memory
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def prefetch(pointers):
    """Prefetch these addresses into the L1, without a wait."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1];\n mov.b32 $0, 0;", "=r,l", [pointers], gl.int32, False, 1
    )


@gluon.jit
def fetch(smem, pointers, mask):
    """Start to copy from these pointers to shared memory; elements where the mask is not set become
    0.
    """
    _fetch(smem, pointers, mask)
    async_copy.commit_group()


@gluon.jit
def wait_fetched():
    """Wait for all copies that this warpgroup has started with `fetch`."""
    async_copy.wait_group(0)


@aggregate
class IndexPrefetch:
    """Small integers that a producer needs (page ids, tile numbers, lengths), copied to shared
    memory PREFETCH_DISTANCE iterations before their use. The producer therefore never waits for
    global memory. Each iteration has one `fetch` and one `wait`, in order.
    """

    smem: gl.shared_memory_descriptor

    @gluon.jit
    def fetch(self, i, pointers, wanted):
        """Start to copy the integers of iteration i, if `wanted`."""
        if wanted:
            _fetch(self.smem.index(i % PREFETCH_STAGES), pointers)
        async_copy.commit_group()

    @gluon.jit
    def wait(self):
        """Wait for the integers of an iteration, after the copies of PREFETCH_DISTANCE more were
        started.
        """
        async_copy.wait_group(PREFETCH_DISTANCE)

    @gluon.jit
    def get(self, i, x: gl.constexpr):
        """Integer x of iteration i."""
        return self.get_at(i % PREFETCH_STAGES, x, LANES)

    @gluon.jit
    def get_at(self, stage, x: gl.constexpr, layout: gl.constexpr):
        """Integer x of one stage, for warps of this layout."""
        return gl.max(self.smem.index(stage).slice(x, 1).load(layout), 0)

    @gluon.jit
    def store_all(self, values):
        """Store the integers of all stages, by any number of warps, before the producer starts. The
        producer's first `fetch` of each stage may then be skipped (wanted=False).
        """
        _view_as(self.smem, values.shape, _PLAIN).store(values)

    @gluon.jit
    def load_all(self, count: gl.constexpr, layout: gl.constexpr):
        """Load what store_all has stored."""
        return _view_as(self.smem, [count], _PLAIN).load(layout)

    @gluon.jit
    def put(self, i, x: gl.constexpr, value):
        """Store one integer of iteration i."""
        cell = self.smem.index(i % PREFETCH_STAGES).slice(x, 1)
        cell.store(gl.full([1], value, gl.int32, LANES))


@gluon.jit
def make_index_prefetch(width: gl.constexpr, stages: gl.constexpr = PREFETCH_STAGES):
    return IndexPrefetch(gl.allocate_shared_memory(gl.int32, [stages, width], _PLAIN))


@aggregate
class TileExchange:
    """A ring of three matrices in shared memory, between two consumers: each writes one half of a
    matrix and reads the whole one iteration later. A consumer takes matrix i - 1 before it writes
    matrix i: then the other one has sent i - 1, after its last read of i - 3.
    """

    smem: gl.shared_memory_descriptor

    @gluon.jit
    def put(self, i, row: gl.constexpr, col: gl.constexpr, value):
        """Write a part of matrix i."""
        rows = self.smem.index(i % 3).slice(row, value.shape[0], 0)
        rows.slice(col, value.shape[1], 1).store(value)

    @gluon.jit
    def send(self, i, me: gl.constexpr):
        """After the own half of matrix i is written: let the other consumer read it."""
        fence_async_shared()
        _named_barrier("arrive", EXCHANGE_BARRIER + 2 * me + i % 2, 256)

    @gluon.jit
    def take(self, i, me: gl.constexpr, wanted=True):
        """If wanted: wait until the other consumer has sent matrix i, exactly once for each i."""
        other: gl.constexpr = 1 - me
        if wanted:
            _named_barrier("sync", EXCHANGE_BARRIER + 2 * other + i % 2, 256)

    @gluon.jit
    def matrix(self, i):
        """Matrix i, which has been taken, for wgmma."""
        return self.smem.index(i % 3)


@gluon.jit
def make_tile_exchange(dtype: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
    return TileExchange(gl.allocate_shared_memory(dtype, [3, rows, cols], layout))


@gluon.jit
def sync_consumers():
    """Wait until both consumers have written what their products read from shared memory."""
    fence_async_shared()
    _named_barrier("sync", STORE_BARRIER + 1, 256)


@gluon.jit
def _first_rows(smem, rows: gl.constexpr):
    if rows == smem.shape[0]:
        return smem
    else:
        return smem.slice(0, rows, 0)


@aggregate
class StoreQueue:
    """Shared memory of each consumer, from which a storing warp adds tiles to global memory: the
    consumers never wait for a store.
    """

    smem: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    consumers: gl.constexpr

    @gluon.jit
    def wait_empty(self, i, me: gl.constexpr):
        """Consumer: wait until the first i tiles have left."""
        mbarrier.wait(self.empty.index(me), (i & 1) ^ 1)

    @gluon.jit
    def put(self, i, me: gl.constexpr, value, wanted=True):
        """Consumer: write tile i, if wanted. It may have fewer rows than the memory."""
        if wanted:
            self.wait_empty(i, me)
            _first_rows(self.smem.index(me), value.shape[0]).store(value)

    @gluon.jit
    def send(self, me: gl.constexpr, wanted=True):
        """Consumer: hand over the tile that was written, if wanted. The fence waits for the writes:
        call it when they have had time.
        """
        if wanted:
            fence_async_shared()
            _named_barrier("arrive", STORE_BARRIER + me, 160)

    @gluon.jit
    def add(self, desc, coord, consumer: gl.constexpr):
        """Storing warp: add the next tile of a consumer to global memory."""
        _named_barrier("sync", STORE_BARRIER + consumer, 160)
        _reduce_add(desc, coord, _first_rows(self.smem.index(consumer), desc.block_shape[0]))
        store_wait(0)
        mbarrier.arrive(self.empty.index(consumer), count=1)

    @gluon.jit
    def close(self):
        _invalidate(self.empty, self.consumers)


@gluon.jit
def make_store_queue(desc, consumers: gl.constexpr):
    shape: gl.constexpr = [consumers] + desc.block_shape
    smem = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return StoreQueue(smem, _make_barriers(consumers, 1), consumers)


@aggregate
class PingPong:
    """Order among the consumers on the tensor cores: one warpgroup issues its products while the
    others exponentiate (FlashAttention-3's ping-pong scheduling).
    """

    turns: gl.shared_memory_descriptor
    warpgroups: gl.constexpr

    @gluon.jit
    def wait_turn(self, me: gl.constexpr, i):
        """Wait for turn i of this warpgroup."""
        mbarrier.wait(self.turns.index(me), i & 1)

    @gluon.jit
    def signal_next(self, me: gl.constexpr):
        """Let the next warpgroup issue."""
        mbarrier.arrive(self.turns.index((me + 1) % self.warpgroups), count=1)

    @gluon.jit
    def close(self):
        _invalidate(self.turns, self.warpgroups)


@gluon.jit
def make_pingpong(warpgroups: gl.constexpr):
    turns = _make_barriers(warpgroups, 1)
    mbarrier.arrive(turns.index(0), count=1)
    return PingPong(turns, warpgroups)


@aggregate
class WorkQueue:
    """Work items of FIELDS integers, from the producer to all consumers, two deep."""

    pipeline: Pipeline
    FIELDS: gl.constexpr

    @gluon.jit
    def push(self, i, values):
        """Producer: store item i."""
        self.pipeline.wait_empty(i)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        for w in gl.static_range(self.FIELDS):
            cell = self.pipeline.smem.index(i % 2 * self.FIELDS + w)
            cell.store(gl.full([1], values[w], gl.int32, one))
        mbarrier.arrive(self.pipeline.full.index(i % 2), count=1)

    @gluon.jit
    def pop(self, i, WARPS: gl.constexpr = 4):
        """Consumer: item i."""
        self.pipeline.wait_full(i)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        values = ()
        for w in gl.static_range(self.FIELDS):
            cell = self.pipeline.smem.index(i % 2 * self.FIELDS + w)
            values = values + (gl.max(cell.load(one), 0),)  # max: a scalar from one element
        self.pipeline.release(i)
        return values

    @gluon.jit
    def close(self):
        self.pipeline.close()


@gluon.jit
def make_work_queue(consumers: gl.constexpr, fields: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = gl.allocate_shared_memory(gl.int32, [2 * fields, 1], layout)
    return WorkQueue(Pipeline(smem, _make_barriers(2, 1), _make_barriers(2, consumers), 2), fields)


@gluon.jit
def store_tile(desc, coord, smem, value, ADD: gl.constexpr = False):
    """Registers -> shared memory -> global memory by TMA, asynchronously. Rows outside of the
    tensor are dropped. ADD: TMA adds to global memory instead of overwriting it.
    """
    store_wait(0)  # TMA must have read the last tile stored through this memory
    smem.reshape(_as_2d_shape(smem.shape)).store(value)
    fence_async_shared()
    if ADD:
        _reduce_add(desc, coord, smem)
    else:
        _store(desc, coord, smem)


@gluon.jit
def store_with_tail(desc, coord, smem, value, tail_desc, tail_smem, tail):
    """store_tile of a tile and of its tail, the columns behind it. Both are written before the
    first leaves. Otherwise the tail would wait until TMA has read the other columns.
    """
    store_wait(0)
    smem.reshape(_as_2d_shape(smem.shape)).store(value)
    tail_smem.reshape(_as_2d_shape(tail_smem.shape)).store(tail)
    fence_async_shared()
    _store(desc, coord, smem)
    _store(tail_desc, coord[:-1] + (gl.to_tensor(desc.block_shape[-1]),), tail_smem)


@gluon.jit
def store_halves(desc, coord, smem, value, ADD: gl.constexpr = False):
    """store_tile of twice the columns of desc, in two halves: an fp32 tile leaves through shared
    memory sized for 16-bit elements.
    """
    stage = reinterpret(smem, desc)
    half: gl.constexpr = value.shape[1] // 2
    left, right = value.reshape([value.shape[0], 2, half]).permute((0, 2, 1)).split()
    store_tile(desc, coord, stage, left, ADD)
    store_tile(desc, coord[:-1] + (gl.to_tensor(coord[-1] + half),), stage, right, ADD)
