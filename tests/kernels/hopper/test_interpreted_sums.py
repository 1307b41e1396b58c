"""The kernels before and after the Hopper backward, by Triton's interpreter: lse, delta and a
cleared accumulator of dq from one, dq in the order of its rows from the other.
"""

import math

import pytest
import torch

import onchip.testing as ot
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.tiles import dq_part_columns, split_columns
from tests.interpreted import interpreted

pytest.importorskip("triton")

pytestmark = interpreted

HEADS, HEADS_K = 2, 1


@pytest.fixture
def launch(monkeypatch):
    """launch_backward. The interpreter has no previous kernel to wait for."""
    from onchip.kernels.hopper import launch_backward

    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(launch_backward, name, lambda: None)
    return launch_backward


def to_fragments(dq):
    """The numbers of 64 rows as the threads of a warpgroup hold the result of a wgmma of n columns
    (PTX): a thread has the rows lane // 4 and 8 below, and of every 8 columns two neighbours. 16
    bytes of each thread are neighbours: two rows of two columns.
    """
    numbers = torch.empty(dq.numel())
    registers = dq.shape[1] // 8
    for (row, col), value in zip(torch.cartesian_prod(*map(torch.arange, dq.shape)).tolist(),
                                 dq.flatten().tolist(), strict=True):  # fmt: skip
        warp, half, lane = row // 16, row % 16 // 8, row % 8 * 4 + col % 8 // 2
        at = ((warp * registers + col // 8) * 32 + lane) * 4 + half * 2 + col % 2
        numbers[at] = value
    return numbers


def accumulate(dq, tile_m, width):
    """One head's dq (rows, width) as the accumulator of the backward has it: tile after tile, each
    in two parts.
    """
    first, second = dq_part_columns(tile_m, *split_columns(width))
    numbers = []
    for tile in torch.nn.functional.pad(dq, (0, 0, 0, -len(dq) % tile_m)).split(tile_m):
        parts = tile.split(64) if tile_m == 128 else tile.split((first, second), 1)
        numbers += [to_fragments(part) for part in parts]
    return torch.cat(numbers)


@pytest.mark.parametrize("lengths", [(70,), (5, 0, 130)], ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 72, 96, 128])
def test_rows_and_sums_of_dq(launch, head_dim, lengths):
    x, max_seqlens = make_call(head_dim, lengths)
    problem = describe(x, Options(), max_seqlens)
    buffers = launch.BackwardBuffers.of(problem, x)
    assert buffers.width == {24: 32, 72: 80}.get(head_dim, head_dim)
    buffers.dq.fill_(math.nan)
    out, dout = torch.randn_like(x.q), torch.randn_like(x.q)
    lse = torch.randn(HEADS, sum(lengths)) if problem.packed else torch.randn(1, HEADS, *lengths)
    launch._prepare(problem, buffers, x, (out, lse, dout, None), None)
    want = [torch.randn(n, HEADS, buffers.width) for n in lengths]
    tiles = accumulator_tiles(buffers, lengths)
    assert all(tile.eq(0).all() for tile in tiles.values())
    delta = (out.float() * dout.float()).sum(-1).reshape(-1, HEADS)
    for (sequence, head), tile in tiles.items():
        tile.copy_(accumulate(want[sequence][:, head], buffers.tile_m, buffers.width))
        check_rows(buffers, lengths, sequence, head, lse.reshape(HEADS, -1), delta)
    dq = torch.full(x.q.shape, math.nan)  # unrounded: the interpreter truncates to 16 bits
    launch._finish(2.0, buffers, x.cu_seqlens_q, dq)
    assert torch.equal(dq, 2 * torch.cat(want)[..., :head_dim].reshape(dq.shape))


def make_call(head_dim, lengths):
    shape = {"num_heads": HEADS, "num_kv_heads": HEADS_K, "head_dim": head_dim}
    shape["dtype"] = torch.bfloat16
    if len(lengths) == 1:
        return Tensors(*ot.make_qkv(1, *lengths, **shape)), ()
    packed = ot.make_packed(list(lengths), list(lengths), **shape)
    return Tensors(*packed), (max(lengths),) * 2


def padded_tiles(buffers, lengths, sequence, head):
    """(first, count) of the tiles of one head of a sequence, each of which starts a new tile."""
    tile_m, total = buffers.tile_m, sum(lengths)
    count = -(-lengths[sequence] // tile_m)
    if len(lengths) == 1:
        return head * count, count
    before = sum(lengths[:sequence])
    return head * (total // tile_m + len(lengths)) + before // tile_m + sequence, count


def accumulator_tiles(buffers, lengths):
    """Views of the accumulator, by (sequence, head)."""
    size, views = buffers.tile_m * buffers.width, {}
    for sequence in range(len(lengths)):
        for head in range(HEADS):
            first, count = padded_tiles(buffers, lengths, sequence, head)
            if count:
                views[sequence, head] = buffers.dq[first * size : (first + count) * size]
    return views


def check_rows(buffers, lengths, sequence, head, lse, delta):
    """lse in base 2, +inf past the end, then delta, for each tile."""
    first, count = padded_tiles(buffers, lengths, sequence, head)
    rows = buffers.rows.view(-1, 2, buffers.tile_m)[first : first + count].transpose(0, 1)
    start, n = sum(lengths[:sequence]), lengths[sequence]
    stored_lse, stored_delta = rows.reshape(2, -1)
    torch.testing.assert_close(stored_lse[:n], lse[head, start : start + n] * math.log2(math.e))
    assert stored_lse[n:].eq(math.inf).all() and stored_delta[n:].eq(0).all()
    torch.testing.assert_close(stored_delta[:n], delta[start : start + n, head])
