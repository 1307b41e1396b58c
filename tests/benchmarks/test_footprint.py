"""On-chip footprints from the tile tables: within every device, and how many programs fit. The
kernels' own tests compile them and compare byte for byte.
"""

from dataclasses import replace

import pytest

from benchmarks import footprint
from benchmarks.footprint import HANDED_OVER, HANDED_OVER_BACKWARD, Footprint
from onchip.cost.hardware import A100, H200
from onchip.kernels import tiles

TABLES = (
    tiles.HOPPER_FORWARD,
    tiles.HOPPER_FORWARD_SHORT,
    tiles.HOPPER_FORWARD_MASK,
    tiles.HOPPER_FORWARD_PAGED,
)


def every_hopper_row():
    for table in TABLES:
        for dim, config in table.items():
            yield footprint.hopper_forward(config, dim, dim)
            yield footprint.hopper_forward(config, dim, dim, page_size=16)
    for dim, config in tiles.HOPPER_FORWARD_MLA.items():
        yield footprint.hopper_forward(config, dim, 128)
    for dim in tiles.HOPPER_DECODE_STAGES:
        yield footprint.hopper_decode(dim, 16)
    yield footprint.hopper_decode(128, 16, kv8=True)
    for dim, config in tiles.HOPPER_SPLIT.items():
        yield footprint.hopper_backward_split(config, dim, dim, keys=True)


@pytest.mark.parametrize("row", list(every_hopper_row()))
def test_every_row_of_the_tables_fits_a_hopper_processor(row):
    assert row.shared_bytes + HANDED_OVER <= H200.shared_bytes
    check_registers(row)


@pytest.mark.parametrize("dim", tiles.HOPPER_BACKWARD)
def test_every_row_of_the_backward_fits_a_hopper_processor(dim):
    row = footprint.hopper_backward(tiles.HOPPER_BACKWARD[dim], dim)
    assert row.shared_bytes + HANDED_OVER_BACKWARD <= H200.shared_bytes
    check_registers(row)


def check_registers(row):
    assert row.register_bytes <= 4 * H200.registers and row.programs(H200) >= 1
    given = sum(threads * registers for threads, registers in row.roles)
    assert given <= row.threads * row.registers


def test_two_kv8_programs_fit_a_processor():
    """Also with lengths of 2,048 sequences. One warp gets the registers of a warpgroup."""
    row = footprint.hopper_decode(128, 16, kv8=True)
    row.buffers["lengths"] = 4 * tiles.HOPPER_DECODE_BATCH
    row.buffers["handed over, and queries on their way"] = HANDED_OVER + 2 * 16 * 64
    each = replace(row, threads=256)
    assert each.programs(H200) == tiles.HOPPER_DECODE_KV8_PROGRAMS == 2


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_every_row_of_triton_fits(kernel, dim):
    row = footprint.triton(kernel, tiles.TRITON_SM90[kernel, dim], dim)
    assert row.shared_bytes <= H200.shared_bytes and row.register_bytes <= 4 * H200.registers


def test_the_scarcer_memory_limits_the_number_of_programs():
    row = Footprint({"k": 60_000}, threads=128, registers=128)
    assert row.programs(H200) == 3 and row.programs(A100) == 2  # 227 and 163 KB
    half = Footprint({"k": 227 * 512}, threads=128, registers=128)
    assert half.programs(H200) == 1  # each takes 1 KB more, of 228
    wide = Footprint({"k": 1000}, threads=256, registers=255)
    assert wide.programs(H200) == 1 and Footprint({}).programs(H200) == 2


def test_a_tile_of_head_dim_128_fills_the_chip():
    row = footprint.hopper_forward(tiles.HOPPER_FORWARD[128], 128, 128)
    assert row.buffers == {"q": 65536, "k": 65536, "v": 65536, "out": 32768, "work queue": 24}
    assert row.shared_bytes == 229400 + 8 * row.barriers and row.threads == 384
    alone = tiles.HOPPER_FORWARD[128]._replace(q_stages=1)
    unrounded = footprint.hopper_forward(alone, 128, 128, wide=True)
    assert unrounded.buffers == row.buffers | {"q": 32768, "out": 65536}
