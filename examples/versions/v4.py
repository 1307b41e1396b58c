"""FlashAttention v4's ideas (Zadouri et al. 2026), forward, on Hopper. Read v3.py first.

v4 was written for Blackwell, with faster tensor cores and exponentials as slow as before. Its ideas
need no Blackwell; the ablation in docs/kernels.md measures each of them here.

- POLY: one of eight exponentials is computed by multiply-adds: 2^x = 2^floor(x) 2^f, where 2^f on
  [0, 1) is a polynomial of degree 3 (relative error 9e-5; bf16 rounds to 2e-3), and 2^floor(x) an
  addition to the exponent. The exponential unit computes the other seven.
- LAZY: the accumulator is rescaled only if a row's maximum has grown by more than 2^8. Until then
  the old m is used: P may reach 256 instead of 1, and the division by l at the end corrects
  everything at once. After the first tiles that is rare. It costs precision only where one key has
  nearly all the weight: 16 bits represent a P of 1 exactly, and round one of 203.7.
- Persistence: as many programs as processors, each computes many tiles. The producer loads the next
  one while the consumers still finish and store the last.
- DYNAMIC: causal tiles differ in length, so the program that is free first takes the next one: the
  producer draws a work index from a counter in memory and passes it to the consumers through shared
  memory (the work queue).
- Longest first: short tiles come last and fill the gaps at the end. Heads are grouped into
  sections, so that their keys and values stay in the L2 together, and the longest tiles of a
  section come first.

onchip/kernels/hopper has these ideas as options: forward.py, tile_scheduler.py, softmax.py.
"""

import math
import struct

import hopper as hw
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE, STAGES = gl.constexpr(128), gl.constexpr(4)  # as in v3
L2_BYTES = 32 << 20  # of keys and values that are in use together
bits = lambda x: f"0f{struct.unpack('I', struct.pack('f', x))[0]:08X}"
EXP2 = gl.constexpr(  # of eight numbers: $8 to $14 by the exponential unit, $15 by hand
    "".join(f"ex2.approx.ftz.f32 ${i}, ${i + 8};" for i in range(7))
    + f"""{{ .reg .b32 x, f, e, p;
    max.f32 x, $15, {bits(-127)};
    add.rm.f32 e, x, {bits(1.5 * 2**23)};  // so large that floor(x) is in the low bits
    sub.f32 f, e, {bits(1.5 * 2**23)}; sub.f32 f, x, f;
    fma.rn.f32 p, f, {bits(0.0771190897)}, {bits(0.2275643945)};
    fma.rn.f32 p, p, f, {bits(0.6951461434)};
    fma.rn.f32 p, p, f, {bits(1)};
    shl.b32 e, e, 23; add.s32 e, e, p; mov.b32 $7, e; }}"""
)


@gluon.jit
def locate(work_index, params, CAUSAL: gl.constexpr):
    """(batch * num_heads + head, first query, tiles of keys) of a work index: the last tiles of all
    heads of a section, then the last but one, and so on.
    """
    seqlen, num_heads, tiles_m, section, num_tiles = params
    rest = work_index % (tiles_m * section)
    batch_head = work_index // (tiles_m * section) * section + rest % section
    tile = tiles_m - 1 - rest // section
    return batch_head, tile * TILE, tile + 1 if CAUSAL else tiles_m


@gluon.jit
def produce(q_desc, k_desc, v_desc, counter_ptr, pipes, params, CAUSAL: gl.constexpr,
            DYNAMIC: gl.constexpr):  # fmt: skip
    seqlen, num_heads, tiles_m, section, num_tiles = params
    q_pipeline, kv_pipeline, work_queue, turn = pipes
    t = 0  # tiles of queries so far
    i = 0  # tiles of keys so far
    work_index = gl.program_id(0)
    while work_index < num_tiles:
        if DYNAMIC:
            hw.push(work_queue, t, work_index)
        batch_head, row, tiles = locate(work_index, params, CAUSAL)
        batch, head = batch_head // num_heads, batch_head % num_heads
        for c in gl.static_range(2):
            hw.fill(q_desc, [batch, head, row + 64 * c, 0], q_pipeline, 2 * t + c)
        for j in range(tiles):
            at = [batch, head, (tiles - 1 - j) * TILE, 0]
            hw.fill(k_desc, at, kv_pipeline, 2 * i)
            hw.fill(v_desc, at, kv_pipeline, 2 * i + 1)
            i += 1
        t += 1
        work_index = (gl.atomic_add(counter_ptr, 1) if DYNAMIC else work_index) + gl.num_programs(0)
    if DYNAMIC:
        hw.push(work_queue, t, work_index)


@gluon.jit
def softmax(s, m, l, scale_log2, LAZY: gl.constexpr, POLY: gl.constexpr):
    m_new = gl.maximum(m, gl.max(s, 1))
    if LAZY:
        m_new = gl.where((m_new - m) * scale_log2 > 8.0, m_new, m)
    alpha = gl.exp2((m - m_new) * scale_log2)
    x = s * scale_log2 - (m_new * scale_log2)[:, None]
    if POLY:
        p = gl.inline_asm_elementwise(EXP2, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f", [x],
                                      dtype=gl.float32, is_pure=True, pack=8)  # fmt: skip
    else:
        p = gl.exp2(x)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def consume(o_desc, lse_ptr, o_stages, pipes, params, scale_log2, C: gl.constexpr,
            CAUSAL: gl.constexpr, DYNAMIC: gl.constexpr, LAZY: gl.constexpr,
            POLY: gl.constexpr):  # fmt: skip
    seqlen, num_heads, tiles_m, section, num_tiles = params
    q_pipeline, kv_pipeline, work_queue, turn = pipes
    q_stages, q_full, q_empty = q_pipeline
    stages, full, empty = kv_pipeline
    HEAD_DIM: gl.constexpr = q_stages.shape[-1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    q = hw.matrix(q_stages, C)
    t = 0
    i = 0
    work_index = hw.pop(work_queue, 0) if DYNAMIC else gl.program_id(0)
    while work_index < num_tiles:
        batch_head, row, tiles = locate(work_index, params, CAUSAL)
        row = row + 64 * C
        m, l, acc = hw.empty_state(64, HEAD_DIM, S, O)
        hw.wait(q_full, 2 * t + C)
        hw.wait(full, 2 * i)
        s = hw.finish(hw.start_scores(q, stages, 2 * i, S), 0)
        hw.arrive(empty, 2 * i)
        s = hw.mask_scores(s, row, (tiles - 1) * TILE, seqlen, CAUSAL, S)
        p_wide, m, l, alpha = softmax(s, m, l, scale_log2, False, POLY)
        p = gl.convert_layout(p_wide.to(q.dtype), P)
        for _ in range(1, tiles):
            i += 1
            hw.wait(full, 2 * i)
            hw.wait(turn, 2 * (i - t - 1) + C)
            s_next = hw.start_scores(q, stages, 2 * i, S)
            hw.wait(full, 2 * i - 1)
            acc_next = hw.start_values(p, stages, 2 * i - 1, acc)
            hw.arrive(turn, 1 - C)
            s = hw.finish(s_next, 1)
            p_wide, m, l, alpha = softmax(s, m, l, scale_log2, LAZY, POLY)
            moved = gl.min(alpha, 0) < 1.0 if LAZY else True  # any row of this consumer
            acc = hw.finish(acc_next, 0)
            hw.arrive(empty, 2 * i)
            hw.arrive(empty, 2 * i - 1)
            if moved:
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
            p = gl.convert_layout(p_wide.to(q.dtype), P)
        hw.arrive(q_empty, C)
        hw.wait(full, 2 * i + 1)
        acc = hw.finish(hw.start_values(p, stages, 2 * i + 1, acc), 0)
        hw.arrive(empty, 2 * i + 1)
        acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
        hw.store_wait(0)  # the last output has left the memory that this one needs
        at = [batch_head // num_heads, batch_head % num_heads, row, 0]
        hw.store_tile(o_desc, at, o_stages, C, acc.to(q.dtype))
        hw.store_lse(lse_ptr, batch_head, row, seqlen, m * scale_log2, l)
        t += 1
        i += 1
        work_index = hw.pop(work_queue, t) if DYNAMIC else work_index + gl.num_programs(0)
    hw.store_wait(0)


@gluon.jit(do_not_specialize=["seqlen", "num_heads", "tiles_m", "section", "num_tiles"])
def forward_v4(q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, seqlen, num_heads, tiles_m,
               section, num_tiles, scale_log2, CAUSAL: gl.constexpr, DYNAMIC: gl.constexpr,
               LAZY: gl.constexpr, POLY: gl.constexpr):  # fmt: skip
    turn = hw.barriers(2, 1)
    hw.arrive(turn, 0)
    q_pipeline, kv_pipeline = hw.make_pipeline(q_desc, 2, 1), hw.make_pipeline(k_desc, STAGES, 2)
    pipes, o = (q_pipeline, kv_pipeline, hw.make_work_queue(), turn), hw.allocate_tiles(o_desc, 2)
    params = (seqlen, num_heads, tiles_m, section, num_tiles)
    gl.warp_specialize([
        (consume, (o_desc, lse_ptr, o, pipes, params, scale_log2, 0, CAUSAL, DYNAMIC, LAZY, POLY)),
        (consume, (o_desc, lse_ptr, o, pipes, params, scale_log2, 1, CAUSAL, DYNAMIC, LAZY, POLY)),
        (produce, (q_desc, k_desc, v_desc, counter_ptr, pipes, params, CAUSAL, DYNAMIC)),
    ], [4, 1], [240, 24])  # fmt: skip


def attention(q, k, v, causal=False, lazy=True, poly=True, dynamic=True, section=None):
    """As in v3.py. dynamic, section: for causal calls, else all tiles are of one length. section:
    how many heads are worked on together; None: what the L2 holds, 1: one head after the other.
    """
    batch, seqlen, num_heads, head_dim = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((batch, num_heads, seqlen), dtype=torch.float32)
    tiles_m, planes = triton.cdiv(seqlen, TILE.value), batch * num_heads
    section = (section or max(1, L2_BYTES // (4 * seqlen * head_dim))) if causal else 1
    section = next(n for n in range(min(section, planes), 0, -1) if planes % n == 0)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    forward_v4[(min(tiles_m * planes, processors),)](
        hw.descriptor(q, 64), hw.descriptor(k, TILE.value), hw.descriptor(v, TILE.value),
        hw.descriptor(out, 64), lse, torch.zeros(1, dtype=torch.int32, device=q.device),
        seqlen, num_heads, tiles_m, section, tiles_m * planes,
        math.log2(math.e) / math.sqrt(head_dim), causal, causal and dynamic, lazy, poly,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out, lse


if __name__ == "__main__":
    from check import check

    check(attention)
