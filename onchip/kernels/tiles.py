"""Tile sizes and pipeline options of all kernels, as tables with dated reasons. Kernels contain no
literal tile size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import ceil, inf, isqrt
from typing import Any, NamedTuple

from onchip.core.call_cache import clear_call_cache
from onchip.core.device import SHARED_BYTES
from onchip.core.problem import Problem


class TileConfig(NamedTuple):
    tile_m: int  # queries
    tile_n: int  # keys


# A tile of scores for all heads should fit the last-level cache (4 MB of fp32), and be large enough
# that Python's ~50 us per tile is small compared with its matrix products.
TILED_SCORES = 1 << 20


def tiled_config(planes: int) -> TileConfig:
    """The tile of the torch loop; `planes` = batch * heads are computed together."""
    tile_m = 512
    while tile_m > 32 and planes * tile_m * tile_m > TILED_SCORES:
        tile_m //= 2
    tile_n = max(32, min(2048, TILED_SCORES // (planes * tile_m)))
    return TileConfig(tile_m, tile_n)


PAPER_SRAM_BYTES = 100 * 1024  # "M is around 100KB" (FlashAttention, section 3.2), of an A100
_ALL = 1 << 40  # more rows than a tensor has


def paper_sram(sram: float | None, itemsize: int) -> int:
    """Elements of SRAM in the papers' model: as given, or what 100 KiB hold."""
    if sram is None:
        return PAPER_SRAM_BYTES // itemsize
    return _ALL * _ALL if sram == inf else int(sram)


def paper_v1_tiles(sram: int, head_dim: int, head_dim_v: int) -> TileConfig:
    """Bc = ceil(M / 4d), Br = min(Bc, d) as published: 4d is a row of q, k, v and out together.
    (With Br = Bc these alone fill M, and S does not fit: the paper counts up to a constant.)
    """
    tile_n = -(-sram // (2 * (head_dim + head_dim_v)))
    return TileConfig(min(tile_n, head_dim), tile_n)


# Rows of the operand that streams through the chip. Their number does not change the traffic, so it
# is the smallest that a tensor core takes. The other operand gets the rest of the chip, which does
# change the traffic.
PAPER_STREAMED = 16


def paper_v2_tiles(sram: int, head_dim: int, head_dim_v: int) -> TileConfig:
    """As many queries as fit with q, out, s, and a tile of k and v. (The paper's tiles are 64 and
    128, chosen by hand.)
    """
    dims = head_dim + head_dim_v
    tile_n = max(1, min(PAPER_STREAMED, sram // (2 * dims)))
    return TileConfig(max(1, (sram - tile_n * dims) // (dims + tile_n)), tile_n)


def paper_v2_backward_tiles(sram: int, head_dim: int, head_dim_v: int) -> TileConfig:
    """As many keys as fit with k, v, dk, dv, p, ds, and a tile of q, dq and dout."""
    held, streamed = 2 * (head_dim + head_dim_v), 2 * head_dim + head_dim_v
    tile_m = max(1, min(PAPER_STREAMED, sram // (2 * streamed)))
    return TileConfig(tile_m, max(1, (sram - tile_m * streamed) // (held + 2 * tile_m)))


class ProductConfig(NamedTuple):
    """a (tile_m, tile_k) @ b (tile_k, tile_n)."""

    tile_m: int
    tile_n: int
    tile_k: int


def paper_product_tiles(sram: int, inner: int) -> ProductConfig:
    """The largest square tiles of a product's result with which both factors fit: the whole inner
    dimension if it is short, t^2 + 2 t k <= M, otherwise cubes of 3 t^2 <= M.
    """
    tile = isqrt(inner * inner + sram) - inner
    if tile >= inner:
        return ProductConfig(tile, tile, max(1, inner))
    cube = max(1, isqrt(sram // 3))
    return ProductConfig(cube, cube, cube)


class TritonConfig(NamedTuple):
    tile_m: int  # queries; tiles divide the 128 of a mask's blocks
    tile_n: int  # keys
    num_warps: int
    num_stages: int
    max_registers: int = 0  # per thread, if the compiler would take more; 0: no limit


_T = TritonConfig
_DIMS = (64, 128, 256)


def _triton_rows(**kernels: tuple[TritonConfig, ...]) -> dict[tuple[str, int], TritonConfig]:
    return {(name, d): row for name in kernels for d, row in zip(_DIMS, kernels[name], strict=True)}


# Chosen from ptxas reports (2026-11-15, Triton 3.6 and 3.9): the largest tiles with a hot loop that
# does not spill, within the shared memory named. One row per padded head_dim 64, 128, 256. 227 kB,
# warpgroup products: 16-bit inputs on compute capability 9 and 10. dkdv of 128 spills a tenth of
# its hot loop with 64 queries; of 256 it spills 1 % on Triton 3.6, 6 % on 3.9.
TRITON_SM90 = _triton_rows(
    forward=(_T(128, 64, 4, 3), _T(128, 128, 8, 3), _T(128, 64, 8, 2)),
    dkdv=(_T(64, 128, 8, 3), _T(32, 128, 8, 3), _T(32, 64, 8, 2)),
    dq=(_T(128, 64, 8, 3), _T(128, 64, 8, 3), _T(128, 32, 8, 2)),
)
# Bit tiles take registers of their own, and the index of a tile is read from a list first: Triton
# gives each of the two loads half of the stages, so that five stages make three buffers.
TRITON_SM90_MASK = _triton_rows(
    forward=(_T(128, 64, 4, 5), _T(128, 64, 8, 5), _T(128, 64, 8, 3)),
    dkdv=(_T(64, 128, 8, 5), _T(32, 128, 8, 5), _T(32, 64, 8, 3)),
    dq=(_T(128, 64, 8, 5), _T(128, 64, 8, 5), _T(128, 32, 8, 3)),
)
# 99 kB: all other devices and calls that multiply 16-bit numbers.
TRITON_SM80 = _triton_rows(
    forward=(_T(128, 64, 4, 3), _T(128, 64, 8, 3), _T(64, 32, 8, 2)),
    dkdv=(_T(64, 64, 4, 2), _T(64, 64, 8, 2), _T(32, 32, 8, 1)),
    dq=(_T(128, 64, 8, 2), _T(128, 32, 8, 2), _T(64, 16, 8, 2)),
)
# By ptxas reports (2026-11-18, Triton 3.9), not timed: three stages of a forward of 128 spill.
TRITON_SM120 = TRITON_SM80 | {("forward", 128): _T(128, 64, 8, 2)}
# softcap, ALiBi, bias, dropout, statistics: long score arithmetic, and bias tiles also pass through
# shared memory. 99 kB with all of them at once. dcaptured: by ptxas reports (2026-11-19, Triton
# 3.9), not timed: of head_dim 64, tiles of 64 queries spill 38 times on sm_80, 32 do not.
TRITON_MODIFIED = _triton_rows(
    forward=(_T(64, 64, 4, 2), _T(64, 32, 4, 2), _T(64, 32, 8, 1)),
    dkdv=(_T(32, 64, 8, 2), _T(32, 64, 8, 1), _T(16, 32, 8, 1)),
    dq=(_T(64, 32, 4, 2), _T(64, 32, 8, 2), _T(32, 32, 8, 1)),
    dbias=(_T(64, 64, 8, 1), _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
    dcaptured=(_T(32, 64, 8, 1), _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
)
# AMD (CDNA), 16-bit numbers, with and without these options. By LLVM's reports (2026-11-18, Triton
# 3.9, gfx942), not timed: the largest tiles that spill nothing. Rows of TRITON_MODIFIED spill 15
# registers in a forward of 64, 33 in dkdv of 128, 116 in dq of 256; with all options, 129 in a
# forward and 157 in dq of 256.
TRITON_AMD_MODIFIED = TRITON_MODIFIED | {
    ("forward", 256): _T(64, 16, 8, 1),
    ("dq", 256): _T(32, 16, 8, 1),
    ("dcaptured", 64): _T(64, 64, 8, 1),
}
TRITON_AMD = _triton_rows(
    forward=(_T(64, 32, 4, 1), _T(64, 32, 4, 1), _T(64, 32, 8, 1)),
    dkdv=(_T(32, 64, 8, 1), _T(16, 64, 8, 1), _T(16, 32, 8, 1)),
    dq=(_T(64, 32, 4, 1), _T(64, 32, 8, 1), _T(64, 16, 8, 1)),
)
# Without tensor cores both operands of a product are in registers.
TRITON_FP32 = _triton_rows(
    forward=(_T(32, 32, 8, 2), _T(32, 16, 8, 2), _T(32, 16, 8, 2)),
    dkdv=(_T(32, 32, 8, 1), _T(16, 32, 8, 1), _T(16, 16, 8, 1)),
    dq=(_T(32, 32, 8, 1), _T(32, 16, 8, 1), _T(16, 16, 8, 1)),
    dbias=(_T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
    dcaptured=(_T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
)
# Padded head_dim 512 in 16 bits, with any mask and score option, on any device. By ptxas and LLVM
# reports (2026-11-19, Triton 3.9, sm_80 to sm_120, gfx942, gfx950), not timed: tiles that fit 99 kB
# (AMD: 64 kB). Causal calls spill nothing. With all options and a mask, gfx942 spills 41 registers
# in dkdv and 17 in dbias; NVIDIA spills at most 61 instructions of a kernel, on sm_80 7 of them in
# the loop of dbias, none in other loops. Tiles of 64 queries, for warpgroup products, spill on
# sm_90. On AMD, 32 keys spill in the forward and in decoding, and so do 8 warps in dkdv and dq.
# decode: tile_m is the most rows, queries x heads of a group, of a program.
TRITON_WIDE = {
    ("forward", 512): _T(32, 32, 8, 1),
    ("dkdv", 512): _T(16, 16, 8, 1),
    ("dq", 512): _T(16, 32, 8, 1),
    ("dbias", 512): _T(16, 64, 8, 1),
    ("dcaptured", 512): _T(16, 64, 8, 1),
    ("decode", 512): _T(32, 32, 8, 1),
    ("chunk", 512): _T(32, 32, 8, 1),
}
TRITON_WIDE_AMD = {
    ("forward", 512): _T(32, 16, 8, 1),
    ("dkdv", 512): _T(16, 16, 4, 1),
    ("dq", 512): _T(16, 16, 4, 1),
    ("dbias", 512): _T(16, 16, 4, 1),
    ("dcaptured", 512): _T(16, 16, 4, 1),
    ("decode", 512): _T(32, 16, 8, 1),
    ("chunk", 512): _T(32, 16, 8, 1),
}
# Tangents and second derivatives: two accumulators of tile_m rows (of tile_n in second_dkdv), and
# each tile of keys with its tangent. By ptxas and LLVM reports (2026-11-19, Triton 3.9, sm_80,
# sm_90, gfx942), not timed; spills are counted in the loop over unmasked tiles. In causal calls of
# 64, 128 and 256 columns on sm_80 the tangents spill nothing, of 512 columns 91 of 891 instructions
# (16 keys a tile: 250 of 1,219), and second_dq 57 of 668. second_dkdv spills nothing with 256 and
# 512. Few rows of second_dbias were compiled.
TRITON_TANGENT = {
    **_triton_rows(
        tangent=(_T(128, 32, 8, 2), _T(64, 32, 8, 2), _T(32, 16, 8, 1)),
        second_dkdv=(_T(32, 64, 8, 1), _T(16, 64, 8, 1), _T(16, 32, 8, 1)),
        second_dq=(_T(64, 32, 8, 1), _T(64, 16, 8, 1), _T(16, 16, 8, 1)),
        second_dbias=(_T(32, 32, 8, 1), _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
    ),
    ("tangent", 512): _T(16, 32, 8, 1),
    ("second_dkdv", 512): _T(16, 16, 8, 1),
    ("second_dq", 512): _T(16, 16, 8, 1),
    ("second_dbias", 512): _T(16, 16, 8, 1),
}
# Warpgroup products. tangent of 128: 9 spills of 932 instructions; 32 keys a tile spill nothing,
# but then twice as many instructions rescale the accumulators. 256: tiles of 64 queries, for
# warpgroup products, spill a tenth. second_dkdv of 64 and 128: 16 of 945 and 21 of 1,036.
TRITON_TANGENT_SM90 = TRITON_TANGENT | {
    ("tangent", 64): _T(128, 64, 8, 3),
    ("tangent", 128): _T(128, 64, 8, 2),
    ("tangent", 256): _T(32, 32, 8, 2),
    ("second_dkdv", 64): _T(64, 64, 8, 2),
    ("second_dkdv", 128): _T(32, 64, 8, 2),
    ("second_dq", 64): _T(64, 64, 8, 2),
    ("second_dq", 128): _T(64, 32, 8, 2),
}
# softcap, ALiBi and bias, with their tangents: all of them and a mask spill 22 of 1,309 in the
# tangents of 64 columns, none of 128 and 256.
TRITON_TANGENT_MODIFIED = TRITON_TANGENT | {
    ("tangent", 64): _T(64, 32, 4, 2),
    ("tangent", 128): _T(32, 32, 8, 1),
    ("tangent", 256): _T(16, 16, 8, 1),
    ("tangent", 512): _T(16, 16, 4, 1),
    ("second_dkdv", 256): _T(16, 16, 8, 1),
}
# 512: the second derivatives spill 175 (dkdv) and 149 registers (dq), with 8 warps 398 in dkdv.
TRITON_TANGENT_AMD = TRITON_TANGENT | {
    ("tangent", 64): _T(64, 32, 4, 1),
    ("tangent", 128): _T(64, 32, 8, 1),
    ("tangent", 512): _T(16, 16, 4, 1),
    ("second_dkdv", 512): _T(16, 16, 4, 1),
    ("second_dq", 512): _T(16, 16, 4, 1),
    ("second_dbias", 512): _T(16, 16, 4, 1),
}
# With softcap, ALiBi and bias the rows above spill 49 registers in the tangents of 64 columns.
TRITON_TANGENT_AMD_MODIFIED = TRITON_TANGENT_AMD | {
    ("tangent", 64): _T(32, 16, 8, 1),
    ("tangent", 128): _T(32, 16, 8, 1),
    ("tangent", 256): _T(16, 16, 8, 1),
}
# fp32 in causal calls on sm_80: nothing with 64 and 128 columns, with 256 120 of 2,906 instructions
# in second_dkdv. All score options and a mask: 249 of 2,679 in the tangents of 64 columns.
TRITON_TANGENT_FP32 = _triton_rows(
    tangent=(_T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
    second_dkdv=(_T(16, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
    second_dq=(_T(32, 16, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
    second_dbias=(_T(16, 16, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
)
TANGENT_KERNELS = ("tangent", "second_dkdv", "second_dq", "second_dbias")
# By itemsize: those of 8-bit pages, of 16-bit numbers, of fp32. fp32 of 512 columns needs 129 kB in
# dkdv, and spills on AMD throughout; 8-bit pages have no tiles yet.
TRITON_COLUMNS = {1: 256, 2: 512, 4: 256}
# Few queries: bound by memory, so keys are loaded in long tiles, and a group of query heads shares
# them (tile_m follows their number). Keys: (itemsize, padded head_dim). head_dim 256 by ptxas
# reports (2026-11-15, Triton 3.6): 4 warps spill with 64 rows, and three buffers of 64 keys fill
# the shared memory (224 kB). fp32 of 256, four problems (H200, 2026-11-18): 16 warps and one stage
# take 1.9 times as long, 16 warps and 32 keys 1.02 to 1.38 times.
TRITON_DECODE = {
    (2, 64): _T(0, 128, 4, 3),
    (2, 128): _T(0, 64, 4, 3),
    (2, 256): _T(0, 32, 8, 2),
    (4, 64): _T(0, 32, 4, 2),
    (4, 128): _T(0, 16, 4, 2),
    (4, 256): _T(0, 16, 8, 2),
}
# 99 kB, by ptxas reports (2026-11-18, Triton 3.9, sm_86), not timed there: 64 rows with two stages
# and 8 warps take 100.3 kB; one stage and 16 warps take 96 kB, no spills.
TRITON_DECODE_99KB = {(4, 256): _T(0, 16, 16, 1)}
# AMD, by LLVM's reports as above: 32 keys spill 12 registers.
TRITON_DECODE_AMD = {(2, 256): _T(0, 16, 8, 1)}
# All keys in one tile, of half as many keys: there is nothing to load ahead, and four programs of
# 128 registers fit on a processor instead of two. By ptxas reports (2026-11-16, Triton 3.6), not
# timed: a third fewer instructions, 4 spills of 1,080. head_dim 128 has such tiles anyway.
TRITON_SHORT = {(2, 64): _T(0, 64, 4, 1, 128)}
TRITON_SHORT_KEYS = 64
# A page id is read before the keys: Triton gives each of the two loads half of the stages, so that
# five stages make three buffers. Five are better with few programs; with many programs three stages
# let more programs fit on a processor (H200, 2026-11-15: 0.94 and 0.87 of cuDNN at 1 x 16k, 0.93
# and 0.98 at 128 x 8k). Page ids loaded a tile ahead by hand: 0.75 to 0.8 throughout.
TRITON_PAGED_STAGES = 5
TRITON_FULL_REGISTERS = 128  # of 168: four programs of four warps on a processor, not three
# Many queries over pages: rows of queries x heads of a group. By ptxas reports (2026-11-15, Triton
# 3.6), not timed: no spills, and two programs on a processor (56, 112 and 96 kB). 128 keys a tile
# spill at head_dim 128 with 4 warps. fp32 has the tiles of the plain forward.
TRITON_CHUNK = {
    (2, 64): _T(64, 64, 4, 5),
    (2, 128): _T(64, 64, 4, 5),
    (2, 256): _T(64, 32, 8, 3),
    (4, 64): _T(32, 32, 8, 2),
    (4, 128): _T(32, 16, 8, 2),
    (4, 256): _T(32, 16, 8, 2),
}
# AMD, by LLVM's reports as above: 64 keys spill 61 registers.
TRITON_CHUNK_AMD = {(2, 128): _T(64, 32, 4, 1)}
# 8-bit pages with 16-bit queries, by ptxas reports (2026-11-15, Triton 3.6 and 3.9). decode: as
# many bytes a tile as above, so twice the keys; with fewer, a row is loaded 4 bytes at a time.
# chunk: a warpgroup product reads keys from shared memory, so unpacked keys would have to be
# written there first: with 64 rows that spills 5 % of the loop; with 32 rows other products are
# used.
TRITON_KV8 = _triton_rows(
    decode=(_T(0, 256, 4, 3), _T(0, 128, 4, 3), _T(0, 64, 8, 2)),
    chunk=(_T(32, 128, 4, 3), _T(32, 128, 4, 3), _T(32, 64, 8, 3)),
)
# AMD, by LLVM's reports as above: the tiles of TRITON_KV8 spill 16 to 500 registers.
TRITON_KV8_AMD = _triton_rows(
    decode=(_T(0, 64, 4, 1), _T(0, 64, 4, 1), _T(0, 32, 8, 1)),
    chunk=(_T(32, 64, 4, 1), _T(32, 64, 4, 1), _T(32, 16, 8, 1)),
)
TRITON_KV8_REGISTERS = 168  # of 210 at head_dim 128: three programs on a processor, not two
DECODE_ROWS = 64  # queries x heads of a group; more have work enough for the plain forward
# Keys per query from which on so few queries are split over programs. Not tuned (2026-11-15):
# decoding and verifying are far above, training (as many keys as queries) is below.
FEW_KEYS = 8
SPLIT_WAVES = 2  # programs per processor if sequences are split: one starts while another reads
SPLIT_MOST_WAVES = 4  # programs that a processor can run at once: registers of 4 x 4 warps
SPLIT_KEYS = 256  # fewer keys than this are not worth a program and its share of the merge
FIXED_KEYS = 1024  # per split, if splits must not depend on the batch
# The reproducible forward: one tile for all calls of a dtype and head_dim, of 64 rows, which the
# products of a warpgroup need. By ptxas reports (2026-11-20, Triton 3.6 and 3.9): at most 2 % of
# the instructions spill, and two programs fit on a processor up to head_dim 128. Stages change no
# bit. Keys of a split: few enough for the programs of one long sequence, and a merge for every
# eight tiles.
TRITON_FIXED_ORDER = {
    (2, 64): _T(64, 64, 4, 3),
    (2, 128): _T(64, 64, 4, 3),
    (2, 256): _T(64, 32, 8, 2),
    (4, 64): _T(32, 32, 8, 2),
    (4, 128): _T(32, 16, 8, 2),
    (4, 256): _T(32, 16, 8, 2),
}
FIXED_ORDER_KEYS = 512
FIXED_ORDER_MERGE = _T(4, 4, 4, 1)  # rows of a program, splits whose loads are issued at once
FIXED_ORDER_SCRATCH_BYTES = 256 << 20  # states of splits; more: one program for each tile
TRITON_STREAMED = _T(16, 0, 4, 1)  # delta: bound by memory, any tile of some kB will do
FOLD_ROWS_WIDE = 4  # of 512 columns: 8 rows of four states and their sum spill (ptxas, 2026-11-19)
TRITON_MERGE = _T(0, 32, 4, 1)  # splits at a time: one after the other, each would cost a latency
TRITON_NORM = _T(0, 8, 16, 1)  # elements of a thread: 16 bytes of each tensor; at most 16 warps
TRITON_PLACE = _T(4, 0, 1, 1)  # heads of a token: 16 elements of a thread at head_dim 128
TRITON_GATE = _T(0, 1024, 4, 1)  # elements of a row: 16 bytes of gate and of up to a thread


# Products of few rows (llm/products.py), by the rows of a program; from the bytes in flight and
# ptxas reports (2026-11-18, Triton 3.6), not timed. columns: weight rows of a program, largest
# first. flight_bytes: of weights that a processor requests before its programs wait for their
# predecessor; 4.8 TB/s take 40 kB in each of 132. row_elements: of x in a tile, with a norm, which
# holds them in fp32, and without.
class ProductRow(NamedTuple):
    columns: tuple[int, ...]
    flight_bytes: int
    row_elements: tuple[int, int]


_P = ProductRow((32, 16, 8), 65_536, (8192, 32_768))
TRITON_PRODUCT = dict.fromkeys((1, 2, 4, 8), _P)
# H200, 2026-11-19, over torch's launches (h200-products.json): up to 8 rows 1.06 to 4.2x with
# weights of at most 50 MB, 0.88 to 1.02x with those of 117 to 1,050 MB; 16 rows 0.49 to 0.95x but
# for products of 1,024 columns.
PRODUCT_MOST_ROWS, PRODUCT_MOST_BYTES = max(TRITON_PRODUCT), 1 << 26
AMD_PRODUCT_ROWS = 16  # of a program: its compiler uses tensor cores from 16 rows on, and pads none
# 64 kB of LDS, of which a tile takes twice its size; larger ones also spill (gfx942, Triton 3.6).
AMD_PRODUCT = ProductRow((32, 16), 16_384, (2048, 8192))


# Products with reproducible=True (llm/fixed_order.py). The largest tile with a program for nine of
# ten processors is taken: for few rows one of few weight rows, so that loads are in flight on all
# processors. All of 16-bit numbers have 64 rows and more, one instruction family on Hopper;
# models/order_check.py compares their bits on the device. From ptxas reports (2026-11-20, Triton
# 3.6 and 3.9), not timed.
class FixedOrderTile(NamedTuple):
    """Rows of x and of the weight, and columns that are multiplied at a time."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int

    @property
    def config(self) -> TritonConfig:
        return TritonConfig(self.tile_m, self.tile_n, self.num_warps, self.num_stages)


_F = FixedOrderTile
FIXED_ORDER_TILES = (
    _F(128, 256, 64, 8, 4),
    _F(128, 128, 64, 8, 4),
    _F(64, 128, 64, 4, 4),
    _F(64, 64, 128, 4, 3),
    _F(64, 32, 128, 4, 4),
    _F(64, 16, 128, 4, 5),
)
FIXED_ORDER_TILE_FP32 = _F(64, 64, 32, 8, 2)  # no tensor cores: one tile for all calls
FIXED_ORDER_GROUP = 8  # tiles of rows whose programs are neighbours, and share weights in L2


def fixed_order_tiles(itemsize: int, shared_bytes: int) -> tuple[FixedOrderTile, ...]:
    """The tiles for numbers of this size, with as many stages as fit the shared memory."""
    if itemsize == 4:
        return (FIXED_ORDER_TILE_FP32,)
    stage_bytes = lambda tile: (tile.tile_m + tile.tile_n) * tile.tile_k * itemsize
    stages = (min(t.num_stages, shared_bytes // stage_bytes(t)) for t in FIXED_ORDER_TILES)
    pairs = zip(FIXED_ORDER_TILES, stages, strict=True)
    return tuple(tile._replace(num_stages=count) for tile, count in pairs)


def choose_fixed_order_tile(
    tiles: tuple[FixedOrderTile, ...], rows: int, columns: int, processors: int
) -> FixedOrderTile:
    """The tile of a product of x (rows, ...) and a weight (columns, ...)."""
    least_rows = tiles[-1].tile_m
    for tile in tiles:
        programs = ceil(rows / tile.tile_m) * ceil(columns / tile.tile_n)
        is_filled = rows > tile.tile_m // 2 or tile.tile_m == least_rows
        if is_filled and 10 * programs >= 9 * processors:
            return tile
    return tiles[-1]


# Elements of x (rows x width) up to which a product computes the norm of its input: every program
# reads x and the residual, twice if a row is longer than a tile. From 16 x 1,024 or 4 x 4,096 on,
# the programs of a layer of 8B would read as many bytes of them as of weights.
PRODUCT_NORM_ELEMENTS = 16_384


class ProductTile(NamedTuple):
    """TILE_N rows of the weight, tile_k columns at a time, in parts of `span`."""

    tile_n: int
    tile_k: int
    span: int
    num_warps: int

    @property
    def config(self) -> TritonConfig:
        return TritonConfig(0, self.tile_n, self.num_warps, 1)


def product_rows(num_rows: int, itemsize: int, is_amd: bool) -> int:
    """Rows of a program: a power of two. fp32 has no tensor-core product: one row at a time."""
    if itemsize == 4:
        return 1
    return AMD_PRODUCT_ROWS if is_amd else min(PRODUCT_MOST_ROWS, 1 << (num_rows - 1).bit_length())


def product_tile(
    rows: int,
    columns: int,
    width: int,
    itemsize: int,
    processors: int,
    *,
    has_norm: bool,
    is_amd: bool,
) -> ProductTile:
    """tile_n: such that the processor with most programs reads least; of equals the largest. Then
    as many columns as are in flight, with up to four programs on a processor. A warp has at least
    a line, 128 bytes, of a weight row; a thread 256 bytes of the tile, or half of that if the next
    tile is loaded meanwhile, and up to 32 elements of x.
    """
    row = AMD_PRODUCT if is_amd else TRITON_PRODUCT[rows]
    load = lambda tile_n: ceil(ceil(columns / tile_n) / processors) * tile_n
    tile_n = min(row.columns, key=load)
    programs = min(4, load(tile_n) // tile_n)
    tile_k = min(
        row.flight_bytes // programs // itemsize // tile_n, row.row_elements[not has_norm] // rows
    )
    tile_k = 1 << (tile_k.bit_length() - 1)
    whole = max(128 // itemsize, 1 << (width - 1).bit_length())
    tile_k = min(tile_k, whole)
    thread_bytes = 256 if tile_k == whole else 128
    warps = max(tile_n * tile_k * itemsize // (32 * thread_bytes), rows * tile_k // (32 * 32), 1)
    warps = min(8, warps)
    return ProductTile(tile_n, tile_k, max(128 // itemsize, tile_k // warps), warps)


class ExpertTile(NamedTuple):
    tile_n: int  # columns of the result; `up` computes gate and up of as many
    tile_k: int
    num_warps: int
    num_stages: int

    @property
    def config(self) -> TritonConfig:
        return TritonConfig(0, self.tile_n, self.num_warps, self.num_stages)


# Grouped products of experts (llm/fused_moe.py), by kernel and rows of a tile. From ptxas and LLVM
# reports (2026-11-19, Triton 3.9, sm_80 to sm_100, gfx942), not timed: nothing spills, but for
# `down` of widths that are not a multiple of 16 bytes (at most 32 instructions). Up to 32 rows a
# product waits for its weights: three stages of 16 kB in flight, and two or three programs on a
# processor. From 64 rows on tiles are for the tensor cores; 99 kB of shared memory.
_E = ExpertTile
TRITON_EXPERTS = {
    ("up", 16): _E(32, 128, 4, 4),
    ("up", 32): _E(32, 128, 4, 4),
    ("up", 64): _E(64, 64, 4, 4),
    ("up", 128): _E(64, 64, 8, 4),
    ("down", 16): _E(64, 128, 4, 4),
    ("down", 32): _E(64, 128, 4, 4),
    ("down", 64): _E(128, 64, 4, 4),
    ("down", 128): _E(128, 64, 8, 4),
}
# 227 kB, warpgroup products: compute capability 9 and 10. 128 x 256 fp32 sums take 128 registers.
TRITON_EXPERTS_SM90 = TRITON_EXPERTS | {
    ("up", 128): _E(128, 64, 8, 4),
    ("down", 128): _E(256, 64, 8, 4),
}
# Without tensor cores; accuracy matters more than time.
TRITON_EXPERTS_FP32 = {
    ("up", 16): _E(32, 32, 4, 2),
    ("up", 64): _E(32, 32, 8, 2),
    ("down", 16): _E(64, 32, 4, 2),
    ("down", 64): _E(64, 32, 8, 2),
}
EXPERT_LEAST_COLUMNS = 16  # of a program: one tensor-core product
EXPERT_FEW_ROWS = 32  # of a tile that waits for its weights
EXPERT_GROUP = 8  # tiles of rows whose programs are neighbours, and share weights in L2
TRITON_GROUP_ROWS = _T(0, 1024, 4, 1)  # rows that a program counts at a time
TRITON_COMBINE = _T(0, 1024, 4, 1)  # elements of a token: 16 bytes of each row to a thread


def expert_tile_rows(rows: int, num_experts: int, itemsize: int) -> int:
    """Rows of a tile: as many as an expert has in the mean if as many have rows as can have. An
    expert with more has several tiles, whose programs share its weights in L2.
    """
    mean = rows / max(1, min(rows, num_experts))
    sizes = [tile_m for kernel, tile_m in _expert_table(itemsize, None) if kernel == "up"]
    return next((tile_m for tile_m in sizes if tile_m >= mean), sizes[-1])


def expert_tile(
    kernel: str,
    tile_m: int,
    num_tiles: int,
    columns: int,
    width: int,
    itemsize: int,
    capability: tuple[int, int] | None,
    processors: int,
) -> ExpertTile:
    """The row of a table. While there are fewer programs than processors, a program has half the
    columns, and few rows have twice the depth: as many bytes are in flight.
    """
    tile_n, tile_k, warps, stages = _expert_table(itemsize, capability)[kernel, tile_m]
    if width * itemsize % 16:  # loaded element by element, each with its address in registers
        tile_n, tile_k = tile_n // 2, tile_k // 2
    while tile_n > EXPERT_LEAST_COLUMNS and num_tiles * ceil(columns / tile_n) < processors:
        tile_n //= 2
        if tile_m <= EXPERT_FEW_ROWS:
            tile_k, warps = 2 * tile_k, min(warps, tile_n // 8)
    return ExpertTile(tile_n, tile_k, warps, stages if capability else 1)  # AMD: 64 kB of LDS


def _expert_table(
    itemsize: int, capability: tuple[int, int] | None
) -> dict[tuple[str, int], ExpertTile]:
    if itemsize == 4:
        return TRITON_EXPERTS_FP32
    has_large_smem = capability is not None and capability[0] in (9, 10)
    return TRITON_EXPERTS_SM90 if has_large_smem else TRITON_EXPERTS


# Logits of a row. scan: a span, the same for all batches, otherwise samples would depend on the
# other rows; cut: 16 sums for each element of the tile, in registers.
TRITON_SCAN, TRITON_PICK = _T(0, 4096, 8, 1), _T(0, 4096, 8, 1)
TRITON_CUT = _T(0, 1024, 16, 1)
COPY_ELEMENTS = 2048  # elements of a page per program of a copy
# Quantised operands: sums of keys and, by padded head_dim, 128 tokens times a Hadamard matrix, or
# transposed. H200, 2026-11-16, 16k tokens of 2,048: rotations 44, 50 and 83 us, values 33, 35 and
# 47 us. Twice the warps: rotations 51, 72 and 88 us.
TRITON_SUMS = _T(0, 32, 4, 1)
TRITON_ROTATE = {64: _T(128, 0, 4, 2), 128: _T(128, 0, 8, 2, 128), 256: _T(128, 0, 8, 1)}
# The same rotation after the norm and RoPE of queries, which need registers: of 256 columns they
# would spill (4 % of the instructions, Triton 3.6). Not measured yet.
TRITON_QUERIES = {64: _T(128, 0, 8, 1), 128: _T(128, 0, 8, 1)}
TRITON_TRANSPOSE = {64: _T(128, 0, 8, 1, 80), 128: _T(128, 0, 8, 1, 128), 256: _T(128, 0, 16, 1)}
BIAS_PROGRAMS = 512  # enough to fill a GPU if the bias itself has fewer tiles


class TritonUse(NamedTuple):
    """The inputs of the choice of a Triton tile."""

    dim: int  # the larger of the padded head dims
    itemsize: int
    capability: tuple[int, int] | None
    has_mask: bool
    modified: bool  # more than scaling, masking and sinks
    device: str = ""  # its name, by which a user's measured rows are found


@cache
def triton_config(kernel: str, use: TritonUse) -> TritonConfig:
    row = _triton_row(kernel, max(64, use.dim), use)
    return row if use.capability else row._replace(num_stages=1)  # AMD: 64 kB of LDS


def _triton_row(kernel: str, dim: int, use: TritonUse) -> TritonConfig:
    if kernel == "fixed_order":
        return TRITON_FIXED_ORDER[use.itemsize, dim]
    if kernel in ("delta", "merge"):
        return TRITON_MERGE if kernel == "merge" else TRITON_STREAMED
    if dim > _DIMS[-1]:
        kernel = "decode" if kernel in ("short", "paged", "paged_full") else kernel
        return find_row(triton_table(kernel, use), (kernel, dim), use.device)
    if kernel in ("decode", "short", "paged", "paged_full", "chunk"):
        return _decode_row(kernel, (use.itemsize, dim), use)
    return find_row(triton_table(kernel, use), (kernel, dim), use.device)


def _decode_row(kernel: str, key: tuple[int, int], use: TritonUse) -> TritonConfig:
    kind = "chunk" if kernel == "chunk" else "decode"
    if key[0] == 1:
        row = (TRITON_KV8 if use.capability else TRITON_KV8_AMD)[kind, key[1]]
    else:
        row = find_row(_decode_table(kind, key, use), key, use.device)
    has_large_smem = use.capability is not None and use.capability[0] in (9, 10)
    if kernel == "short" and has_large_smem and key in TRITON_SHORT:
        return find_row("TRITON_SHORT", key, use.device)
    if kernel == "paged" and has_large_smem:
        return row._replace(num_stages=TRITON_PAGED_STAGES)
    if kernel == "paged_full" and has_large_smem and key[1] == 128 and key[0] < 4:
        registers = TRITON_KV8_REGISTERS if key[0] == 1 else TRITON_FULL_REGISTERS
        return row._replace(max_registers=registers)
    return row if has_large_smem else row._replace(num_stages=min(row.num_stages, 3))


def _decode_table(kind: str, key: tuple[int, int], use: TritonUse) -> str:
    """The name of the table: most rows are the same on all devices."""
    table = f"TRITON_{kind.upper()}"
    if use.capability is None:
        special = TRITON_CHUNK_AMD if kind == "chunk" else TRITON_DECODE_AMD
        return f"{table}_AMD" if key in special else table
    has_99kb = use.capability not in SHARED_BYTES
    return f"{table}_99KB" if has_99kb and kind == "decode" and key in TRITON_DECODE_99KB else table


def triton_table(kernel: str, use: TritonUse) -> str:
    """The name of the table with the rows of forward, dkdv, dq, dbias or dcaptured, or of
    TANGENT_KERNELS.
    """
    if kernel in TANGENT_KERNELS:
        return _tangent_table(use)
    if use.dim > _DIMS[-1]:
        return "TRITON_WIDE" if use.capability else "TRITON_WIDE_AMD"
    if use.itemsize == 4:
        return "TRITON_FP32"
    is_modified = use.modified or kernel == "dbias"
    if use.capability is None:
        return "TRITON_AMD_MODIFIED" if is_modified else "TRITON_AMD"
    if is_modified:
        return "TRITON_MODIFIED"
    if use.capability[0] in (9, 10):
        return "TRITON_SM90_MASK" if use.has_mask else "TRITON_SM90"
    return "TRITON_SM120" if use.capability[0] == 12 else "TRITON_SM80"


def _tangent_table(use: TritonUse) -> str:
    if use.itemsize == 4:
        return "TRITON_TANGENT_FP32"
    if use.capability is None:
        return "TRITON_TANGENT_AMD_MODIFIED" if use.modified else "TRITON_TANGENT_AMD"
    if use.modified:
        return "TRITON_TANGENT_MODIFIED"
    return "TRITON_TANGENT_SM90" if use.capability[0] in (9, 10) else "TRITON_TANGENT"


class HopperConfig(NamedTuple):
    """One producer warp and `consumers` warpgroups of 64 queries each."""

    tile_n: int
    consumers: int
    num_stages: int
    q_stages: int = 1  # 2: the next queries arrive while the last are in use
    pingpong: bool = False  # consumers take turns on the tensor cores
    out_in_q: bool = False  # the output leaves through the queries' memory; q_stages must be 1
    rescale: str = "always"  # "moved": where a maximum did; "stale" (v4): by more than 2^8
    rescale_under_qk: bool = False  # rescale under the next QK product, not after this PV product
    delay_pv_wait: int = 0  # exponentials of a thread before it waits for the last PV product
    named_barriers: bool = False  # key stages are released by named barriers
    overlap: bool = True  # QK of a key tile runs beside PV of the last one, not after it
    q_in_registers: bool = False  # QK reads q from registers: hopper/tensors.py has its condition
    emulated_exp2: int = 0  # v4: every emulated_exp2-th exponential by multiply-adds
    dynamic: bool = False  # dynamic scheduling even if all tiles take equally long
    # Registers of a thread. At entry every thread has entry_regs; then consumers and producer share
    # these: 3 * 168 = 240 + 240 + 24 for two consumers and the producer, counted as a warpgroup.
    consumer_regs: int = 240
    producer_regs: int = 24
    entry_regs: int = 168


_THREE = {"consumer_regs": 160, "producer_regs": 32, "entry_regs": 128}
# 2 consumers: 0.87x at 4k. A pingpong turn ends when a consumer has its scores: 1.01x over ending
# it when the product was issued.
_D64 = HopperConfig(128, 3, 2, q_stages=2, pingpong=True, **_THREE)
_D64_TWO = HopperConfig(128, 2, 4, q_stages=2)
# If no maximum changes, nothing is rescaled: 1.01-1.03x, and the same bits. Exponentials during the
# values' product 1.01-1.03x from 4k on, named barriers 1.01x.
_D128 = HopperConfig(
    128,
    2,
    2,
    q_stages=2,
    rescale="moved",
    rescale_under_qk=True,
    delay_pv_wait=16,
    named_barriers=True,
    dynamic=True,
)
# 64 keys a tile: the accumulator takes 128 registers; q and two stages of k and v fill 192 kB.
# dynamic: ptxas then waits for the values' product in the middle of the softmax, not before it.
_D256 = HopperConfig(64, 2, 2, out_in_q=True, dynamic=True)
# Rows of 32, 80, 96, 160 and 192 columns, by ptxas reports (2026-11-18), begin with those of the
# next power of two. Measured beside FlashAttention-3 and 4 (h200-forward-widths.json), other rows
# were not. 32: four stages fit.
_D32 = _D64._replace(num_stages=4)
# 128 keys a tile: q and two stages of k and v fill 200 kB, so the output leaves through q's memory.
# Every option that takes a register spills: a later wait for values 36 of 657 instructions in the
# loop, rescale="moved" 2 of 620.
_D160 = HopperConfig(128, 2, 2, out_in_q=True, dynamic=True)
# 64 keys a tile: with 128, q and two stages of k and v would be 240 kB, and ptxas waits for each
# wgmma on its own.
_D192 = HopperConfig(64, 2, 3, out_in_q=True, dynamic=True)
# Scores and P take the same registers, so the next scores wait for the values' product; the other
# consumers use the tensor cores meanwhile. H200, 2026-11-19, over two consumers: 1.04 and 1.05x in
# dense calls of 4k tokens, 1.04 and 1.06x of 16k; causal 0.95x of 4k, 0.99 and 1.02x of 16k.
_D96_THREE = HopperConfig(
    128,
    3,
    2,
    q_stages=2,
    rescale="moved",
    overlap=False,
    named_barriers=True,
    dynamic=True,
    **_THREE,
)
# By width, bf16 on an H200, 2026-11-16; docs/notebook.md has the runs.
HOPPER_FORWARD = {
    32: _D32,
    64: _D64,
    80: _D128._replace(delay_pv_wait=8),
    96: _D128._replace(delay_pv_wait=8),
    128: _D128._replace(delay_pv_wait=8),
    160: _D160,
    192: _D192._replace(rescale="moved", delay_pv_wait=4, named_barriers=True),
    256: _D256._replace(rescale="moved", delay_pv_wait=4, named_barriers=True),
}
# The wait for values after 4 exponentials: 1.08x in dense calls of head_dim 256, where more
# exponentials or named barriers cost 1 to 5 %; causal ones 1.03x, with named barriers and
# rescale="moved".
HOPPER_FORWARD_DENSE = {
    80: _D96_THREE,
    96: _D96_THREE,
    128: _D128,
    192: _D192._replace(delay_pv_wait=4),
    256: _D256._replace(delay_pv_wait=4),
}
# q and k of 192 columns, v of at most 128 (multi-head latent attention): tiles of 128 keys fit, 208
# kB with the output in q's memory. By ptxas reports (2026-11-18), not timed.
HOPPER_FORWARD_MLA = {192: _D128._replace(q_stages=1, out_in_q=True, delay_pv_wait=8)}
# Tiles of 192 rows waste much of a short triangle: 1.15x at 512, but 0.96x at 2k. In a square they
# waste the rest of the last tile; at 512 tokens both are equally fast. Tiles of a short window are
# mostly masked, too: 1.25x with 256 keys, 1.29x with 512, 1.04 to 0.99x with 1,024, 0.90x with
# 4,096.
HOPPER_FORWARD_SHORT = {32: _D64_TWO, 64: _D64_TWO}
HOPPER_SHORT, HOPPER_SHORT_DENSE = 1024, 512
# Dense calls with at most so many keys have the row of causal ones: of 1,024 queries three
# consumers waste an eighth.
HOPPER_DENSE_KEYS = {80: 1024, 96: 1024}
# Calls with fewer tokens, which do not fill half of a tile: triton is 1.16 to 1.9 times as fast
# (bench short, N = 64).
HOPPER_FEW = 64
# Strips of three consumers, without pingpong: a consumer without visible blocks in a tile continues
# with the next. Four stages, otherwise consumers wait for each other: 1.10x over three stages with
# 75 % of the blocks, 1.20x with 50 %. The wait for values behind 4 exponentials at head_dim 128:
# 1.01x; 2, 4, 8 at 64: 1.003x, 0.996x, 0.976x with 75 % of the blocks.
# Words of a mask leave too few registers for 160 columns and 128 keys (8 spills of 785).
_STRIPS = HopperConfig(128, 3, 4, q_stages=2, named_barriers=True, delay_pv_wait=2, **_THREE)
HOPPER_FORWARD_MASK = {
    32: _STRIPS,
    64: _STRIPS,
    80: _D128._replace(delay_pv_wait=4),
    96: _D128._replace(delay_pv_wait=4),
    128: _D128._replace(delay_pv_wait=4),
    160: _D192,
    192: _D192,
    256: _D256,
}
# Masks with few common blocks among rows: consumers wait for tiles that only the others use. With
# random blocks, a consumer uses a share of 1 / (2 - density) of the tiles it loads; compared with
# two consumers, strips were 0.92x as fast with 5 % (a share of 0.513), 1.04x with 10 % (0.526),
# 1.08x with 15 %, 1.11x with 25 %.
HOPPER_FORWARD_SPARSE = {32: _D64_TWO, 64: _D64_TWO}
HOPPER_STRIPS = 0.52

# A producer that reads page ids needs 40 registers: its code spills 68 times with 24, 7 times with
# 40 (pages of 16, Triton 3.6). With three consumers there are too few registers for that.
_LOOKING_UP = {"consumer_regs": 232, "producer_regs": 40}
# Options that gain 1 to 3 % with contiguous keys cost 8 % here (H200, 2026-11-16, a level of 64 x 4
# rows over 8k keys: 24.0 us with them, 22.0 without), presumably because of many small copies.
_AT_EASE = {"delay_pv_wait": 0, "named_barriers": False}
HOPPER_FORWARD_PAGED = {
    64: _D64_TWO._replace(**_LOOKING_UP),
    128: _D128._replace(**_LOOKING_UP, **_AT_EASE),
    256: _D256._replace(**_LOOKING_UP),
}


# Quantised operands, by the larger padded head_dim: tiles of the 128 keys that share a scale. Of
# 256 columns of values, 128 at a time are summed. H200, 8k tokens, 2026-11-16: pingpong 1.04, 1.03
# and 1.09x, dynamic scheduling 1.01 to 1.02x; two consumers without pingpong 0.76x at 64, 0.82x at
# 128.
HOPPER_FP8 = {
    64: HopperConfig(128, 3, 4, q_stages=2, pingpong=True, dynamic=True, **_THREE),
    128: HopperConfig(128, 3, 4, q_stages=2, pingpong=True, dynamic=True, **_THREE),
    256: HopperConfig(128, 2, 2, pingpong=True, dynamic=True),
}
# Average number of keys per query from which on a whole call gains by FP8: 8k of them without a
# mask 1.03 to 1.18x, 16k causal tokens 0.99 to 1.13x, half as many 0.9 to 0.97x.
HOPPER_FP8_KEYS = 8192
# int8 has a scale for each key of a tile, 32 registers per thread: two consumers.
_INTS = HopperConfig(128, 2, 4, q_stages=2, pingpong=True, dynamic=True)
HOPPER_INT8 = {64: _INTS, 128: _INTS, 256: HopperConfig(128, 2, 2)}
HOPPER_INT8_PV16 = {64: _INTS, 128: _INTS._replace(num_stages=2)}


def hopper_quantised_config(precision: str | None, width: int) -> HopperConfig:
    """The row of a precision that is not None."""
    return _hopper_row(f"HOPPER_{str(precision).upper()}", width)


HOPPER_UNROUNDED_WIDTH = 128  # a wider unrounded output does not fit shared memory


def hopper_width(head_dim: int) -> int:
    """head_dim as a power of two. Tiles of the forward and of the backward have more widths."""
    return max(64, 1 << (head_dim - 1).bit_length())


# Widths of the forward's tiles: a power of two, or a power of two and a tail of 16, 32 or 64
# columns (hopper/column_tails.py). 112 as 64 + 32 + 16 took 8 % longer than padded to 128: three
# products lose (H200). 48 as 32 + 16 was not timed: PV would be two products of few columns, and
# both read P from registers. Calls over pages have powers of two from 64 on.
HOPPER_WIDTHS = (32, 64, 80, 96, 128, 160, 192, 256)


def hopper_backward_widths(problem: Problem) -> tuple[int, int]:
    """The widths of q and k, and of v and dout, in the backward. They are equal, but for values of
    at most 128 columns beside keys of 192, which are multi-head latent attention. H200, 2026-11-19,
    over tiles of the next power of two, 1k and 8k tokens: 1.31 to 1.40x at 32, 1.13 to 1.30x at 80,
    1.09 to 1.20x at 96, 1.34 to 1.54x at 160, 1.22 to 1.33x at 192, 1.35 to 1.47x at (192, 128).
    """
    width = hopper_forward_width(problem.head_dim)
    width_v = hopper_forward_width(problem.head_dim_v)
    if width == 192 and width_v <= 128:
        return 192, 128
    return max(width, width_v), max(width, width_v)


def dq_part_columns(tile_m: int, columns: int, tail: int) -> tuple[int, int]:
    """The columns of dq that each of two consumers computes, for 64 queries: all columns of its
    half of 128 queries, the columns or the tail, or half of the columns.
    """
    if tile_m == 128:
        return columns, columns
    return (columns, tail) if tail else (columns // 2, columns // 2)


@cache  # the backward asks for it several times in a call
def hopper_forward_width(head_dim: int, page_size: int = 0) -> int:
    """head_dim as the forward's tiles pad it."""
    if page_size:
        return hopper_width(head_dim)
    return next(width for width in HOPPER_WIDTHS if width >= head_dim)


def hopper_forward_widths(problem: Problem) -> tuple[int, int]:
    """The widths of q and k, and of v and the output."""
    width = hopper_forward_width(problem.head_dim, problem.page_size)
    return width, hopper_forward_width(problem.head_dim_v, problem.page_size)


def split_columns(width: int) -> tuple[int, int]:
    """(columns of a tile, columns of its tail; 0 without a tail)"""
    columns = 1 << (width.bit_length() - 1)
    return columns, width - columns


def hopper_forward_of(problem: Problem) -> HopperConfig:
    width, width_v = hopper_forward_widths(problem)
    config = _hopper_row(*_hopper_forward_key(problem))
    if config.out_in_q and not _fits_in_q(width, width_v):
        config = config._replace(out_in_q=False)  # the tiles differ, and there is enough memory
    three = config.consumers == 3 and width_v > 64
    if problem.out_dtype.itemsize == 4 and (width_v == 128 or three):
        config = config._replace(q_stages=1)  # an unrounded output takes the second stage of q
    return config


def _fits_in_q(width: int, width_v: int) -> bool:
    """Whether the output has the tiles of q, or the first of them."""
    return width == width_v or split_columns(width)[0] == width_v


def describe_hopper_row(problem: Problem) -> str:
    """The row of hopper_forward_of, for `explain`."""
    return describe_row(*_hopper_forward_key(problem), _hopper_device)


def hopper_forward_sparse(problem: Problem) -> HopperConfig:
    """The row of a mask whose rows share few blocks."""
    return HOPPER_FORWARD_SPARSE[max(hopper_forward_widths(problem))]


def _hopper_forward_key(problem: Problem) -> tuple[str, int]:
    """(table, key) of the row."""
    width, width_v = hopper_forward_widths(problem)
    plain = not (problem.has_mask or problem.page_size)
    if plain and width in HOPPER_FORWARD_MLA and width_v <= 128:
        return "HOPPER_FORWARD_MLA", width
    cut, dim = problem.window[1] is not None, max(width, width_v)
    use = cut, problem.has_mask, _keys_met(problem), problem.page_size
    return _hopper_forward_table(dim, *use), dim


def _keys_met(problem: Problem) -> int:
    """The most keys that a tile of three consumers reads."""
    left, right = problem.window
    if left is None or right is None:
        return problem.seqlen_k
    return min(problem.seqlen_k, left + right + 64 * _D64.consumers)


def hopper_stages_out(problem: Problem) -> bool:
    """Whether the output is stored through shared memory (TMA), not directly from registers."""
    return problem.out_dtype.itemsize == 2 or stages_unrounded(*hopper_forward_widths(problem))


def stages_unrounded(width: int, width_v: int) -> bool:
    """Whether an unrounded output fits shared memory. Beside q and k of 160 or 192 columns, tiles
    of 128 keys leave no memory for it.
    """
    return width_v <= HOPPER_UNROUNDED_WIDTH and width not in (160, 192)


def hopper_forward_config(
    head_dim: int, cut: bool, has_mask: bool, keys: int, page_size: int = 0
) -> HopperConfig:
    """The row of equal head dims. cut: tiles differ in length (causal or window). keys: the keys
    that a tile reads.
    """
    dim = hopper_forward_width(head_dim, page_size)
    return _hopper_row(_hopper_forward_table(dim, cut, has_mask, keys, page_size), dim)


def _hopper_forward_table(dim: int, cut: bool, has_mask: bool, keys: int, page_size: int) -> str:
    """The name of the table."""
    if page_size:
        return "HOPPER_FORWARD_PAGED"
    is_short = keys <= (HOPPER_SHORT if cut or has_mask else HOPPER_SHORT_DENSE)
    if is_short and dim in HOPPER_FORWARD_SHORT:
        return "HOPPER_FORWARD_SHORT"
    if has_mask:
        return "HOPPER_FORWARD_MASK"
    is_dense = not cut and dim in HOPPER_FORWARD_DENSE and keys > HOPPER_DENSE_KEYS.get(dim, 0)
    return "HOPPER_FORWARD_DENSE" if is_dense else "HOPPER_FORWARD"


# Keys are copied page by page: a tile must be whole pages (or part of one page), and copies of
# fewer than 16 rows would be more copies than the producer can issue in time.
HOPPER_PAGE_SIZES = (16, 32, 64, 128, 256)
# Queries x heads, lengths rounded up as dispatch does, from which on this kernel reads pages: tiles
# of 128 for all processors of an H200, or for half of them if half is rounding. Triton's kernel is
# half as fast, but splits the keys to use all processors.
HOPPER_PAGED_ROWS = 128 * 128
# Packed sequences with fewer queries x heads of a group are not counted together, however many they
# are: each has a tile of its own, and most of it would be empty.
HOPPER_TILE_ROWS = 128


# Few queries: stages of 64 keys and values in flight. 96 kB of them keep memory busy; with twice as
# many some processors run ahead of others, and all wait for the last (H200, 2026-11-15, 16 x 4k
# keys: 61 to 66 us with three stages of head_dim 128, 49 to 68 us with six).
HOPPER_DECODE_STAGES = {64: 6, 128: 3, 256: 2}  # out of pages, which take many small copies
HOPPER_DECODE_STAGES_DENSE = {64: 6, 128: 2, 256: 2}
HOPPER_DECODE_KEYS = 256  # fewer are not worth a program and its share of the merge
HOPPER_DECODE_ROWS = 16  # queries x heads of a group: one tensor-core product
# 8-bit pages, head_dim 80 to 128: unpacking takes more warps than one program has.
HOPPER_DECODE_KV8_STAGES, HOPPER_DECODE_KV8_PROGRAMS, HOPPER_DECODE_KV8_REGISTERS = 3, 2, 128
HOPPER_DECODE_BATCH = 2048  # larger batches run on triton: their lengths would not fit smem


def batch_bucket(batch: int) -> int:
    """The sequences that a decode program counts: 32, 256, 2,048; each size compiles a kernel."""
    size = 32
    while size < batch:
        size *= 8
    return size


def hopper_decode_programs(problem: Problem) -> int:
    """Programs of the decode kernel that a processor runs at once."""
    return 1 if problem.page_dtype is None else HOPPER_DECODE_KV8_PROGRAMS


# Latent pages: columns of keys and of values, and the tile of queries and keys of a program.
HOPPER_LATENT = (576, 512)
HOPPER_LATENT_TILE = TritonConfig(64, 64, 12, 2)
# Programs per processor if sequences are split. One fills the shared memory of a processor. A few
# less, so that as many sequences as there are processors, or nearly, are not cut in two.
HOPPER_LATENT_WAVES = (0.95, 2, 3)


class HopperBackwardConfig(NamedTuple):
    """A producer warp, a storing warp and two consumer warpgroups of 64 keys each. dq leaves in
    parts of 64 queries, one of each consumer for a tile (dq_part_columns). There are at most five
    stages of q and dout: see hopper/pipeline.py on named barriers.
    """

    tile_m: int
    tile_n: int = 128
    q_stages: int = 3
    dout_stages: int = 2
    consumer_regs: int = 240
    producer_regs: int = 24
    entry_regs: int = 168


# By width, 2026-11-18. dk and dv take as many registers of each thread as the width, a step of 64
# queries 96. Scores of the next tile need its queries while dk still needs the last, so a third
# stage of q helps where it fits beside three stages of ds. At head_dim 64 a tile is two steps: half
# as many barriers as tiles of 64. 32, 80 and 96: three stages fit, by ptxas reports, not timed.
HOPPER_BACKWARD = {
    32: HopperBackwardConfig(128),
    64: HopperBackwardConfig(128, q_stages=2),
    80: HopperBackwardConfig(64),
    96: HopperBackwardConfig(64),
    128: HopperBackwardConfig(64),
}


def hopper_backward_config(width: int) -> HopperBackwardConfig:
    """The row of a width of hopper_backward_widths."""
    return _hopper_row("HOPPER_BACKWARD", width)


class HopperSplitConfig(NamedTuple):
    """One producer warp and two consumer warpgroups of 64 own rows each; `tile` rows of the other
    side stream by.
    """

    tile: int
    b0_stages: int
    b1_stages: int
    own_in_registers: bool = False  # own rows also in registers: saves shared memory reads
    consumer_regs: int = 240
    producer_regs: int = 24
    entry_regs: int = 168


# By width, 2026-11-15. tile is that of HOPPER_BACKWARD, with which it shares lse and delta. The own
# rows of 256 columns fill 128 kB; b1 is free again as soon as its one product is done. Those of 160
# and 192 fill 80 and 96 kB, so that three stages of b0 fit (2026-11-18, not timed).
HOPPER_SPLIT = {
    32: HopperSplitConfig(128, 3, 2),
    64: HopperSplitConfig(128, 3, 2),
    80: HopperSplitConfig(64, 3, 2, own_in_registers=True),
    96: HopperSplitConfig(64, 3, 2, own_in_registers=True),
    128: HopperSplitConfig(64, 3, 2, own_in_registers=True),
    160: HopperSplitConfig(64, 3, 2),
    192: HopperSplitConfig(64, 3, 2),
    256: HopperSplitConfig(64, 2, 1),
}
HOPPER_SPLIT_ALL = 160  # the width from which on every gradient has its own kernel


def hopper_split_config(width: int) -> HopperSplitConfig:
    """The row of the larger width of hopper_backward_widths."""
    return _hopper_row("HOPPER_SPLIT", width)


# Keys that a query sees in the mean, up to which dq in its own kernel is faster than summed in
# fp32: the sum is cleared, added to and read once, however few keys there are. By head_dim, H200,
# 2026-11-18 (docs/notebook.md): causal calls of 512 tokens 1.02 to 1.04x at 64 and 1.09 to 1.11x
# at 128, of 1,024 tokens 0.94x and 1.01x; dense calls of 512 tokens 0.97x and 1.00x. 80 and 96 lie
# between them: about 0.96x and 0.97x for 1,024 tokens. They were timed with a kernel for dq alone.
HOPPER_SPLIT_KEYS = {32: 256, 64: 256, 80: 256, 96: 256, 128: 512}
_SPLIT_ROWS, _MANY_TILES = 128, 4 * 132  # four tiles for each processor of an H200


def hopper_splits_dq(problem: Problem) -> bool:
    """Whether dq has its own kernel: deterministic, of wide heads, and in calls with few keys.
    These were measured with as many key heads as heads, without lists of sequences or tiles, and
    with tiles for all processors: otherwise one more kernel takes longer than the sum.
    """
    width = max(hopper_backward_widths(problem))
    if problem.deterministic or width >= HOPPER_SPLIT_ALL:
        return True
    if problem.packed or problem.has_mask or problem.group_size > 1 or problem.softcap:
        return False
    num_tiles = problem.batch * problem.num_heads * (-(-problem.seqlen_q // _SPLIT_ROWS))
    return num_tiles >= _MANY_TILES and _mean_keys(problem) <= HOPPER_SPLIT_KEYS[width]


def _mean_keys(problem: Problem) -> float:
    """Keys that a query with any key sees in the mean, to half a key. Keys before the first one
    count.
    """
    (left, right), keys = problem.window, float(problem.seqlen_k)
    if right is not None:
        keys = min(keys, problem.seqlen_k + right - problem.seen_queries / 2)
        if left is not None:
            keys = min(keys, left + right + 1)
    return keys


# Rows that a user measured with `onchip tune --write`, by device name, then by (table, key).
# kernels/tuned.py reads and checks them. They take precedence over the rows above.
Measured = dict[tuple[str, Any], Any]
_measured: dict[str, Measured] = {}
_hopper_device = ""  # the first device with rows of HOPPER_*, which serve the whole process
_is_trial = False


def find_row(table: str, key: Any, device: str = "") -> Any:
    """The row of a table for a device: measured there by the user, else the package's."""
    measured = None if _is_trial else _measured.get(device, {}).get((table, key))
    return globals()[table][key] if measured is None else measured


def describe_row(table: str, key: Any, device: str) -> str:
    """A row by name, for `explain`: ', measured here' if it is the user's."""
    is_measured = (table, key) in _measured.get(device, {})
    return f"row {table}[{show_key(key)}]{', measured here' if is_measured else ''}"


def show_key(key: Any) -> str:
    return ", ".join(map(repr, key)) if isinstance(key, tuple) else repr(key)


def _hopper_row(table: str, dim: int) -> Any:
    """The host code of the Hopper kernels chooses rows without a device: all are alike."""
    return find_row(table, dim, _hopper_device)


def use_measured(device: str, rows: Measured) -> None:
    """Let the rows precede those of the package on this device; {}: the package's alone."""
    global _hopper_device
    _measured[device] = rows
    has_hopper_rows = any(table.startswith("HOPPER_") for table, _ in rows)
    _hopper_device = _hopper_device or (device if has_hopper_rows else "")
    triton_config.cache_clear()


@contextmanager
def trial(table: str, key: Any, row: Any) -> Iterator[None]:
    """Inside the block `table[key]` is `row`, for all calls of the process: `onchip tune` tries
    rows this way. All other rows are the package's. Cached choices are dropped at both ends; other
    calls pay nothing for it.
    """
    global _is_trial
    rows = globals()[table]
    before, was_trial = rows[key], _is_trial
    try:
        rows[key], _is_trial = row, True
        _forget()
        yield
    finally:
        rows[key], _is_trial = before, was_trial
        _forget()


def _forget() -> None:
    triton_config.cache_clear()
    clear_call_cache()
