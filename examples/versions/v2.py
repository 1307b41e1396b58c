"""FlashAttention v2, forward (Dao 2023), in Triton. Read v1.py first.

The two loops change places:

    for every tile of queries:                a program of its own
        for every tile of keys and values:    folded into o, l, m, which never leave the chip

What follows from it:

- The state stays in registers. Memory sees q once, out once, and k and v once per tile of queries,
  mostly from the L2, because neighbouring programs read the same ones. Nothing is read back.
- Tiles of queries are independent: the sequence is a dimension of parallelism. One head
  of 16,384 queries fills 128 processors, where v1 used one.
- The accumulator is not normalised until the end: one multiplication by alpha per tile, and one
  division per row. Tensor cores are 15 times as fast as the rest of the chip, so every operation
  that is not a matrix product counts.
- A backward pass needs exp(s - m) / l, which is exp(s - lse) with lse = m + log(l): one number per
  row is stored instead of two.
- Only tiles that the diagonal or the end of the keys cuts are masked, in a loop of their own.

Inside a program the same swap happens once more: warps share the tile of queries, each takes some
rows and all keys, so that no warp waits for a part of another's sum. The compiler does this.
"""

import math

import torch
import triton
import triton.language as tl

LN2 = tl.constexpr(math.log(2))
TILE_M, TILE_N = 128, 128  # queries, keys


@triton.jit
def load_tile(ptr, rows, seqlen, stride, HEAD_DIM: tl.constexpr):
    """Rows of one head; rows past the end arrive as 0."""
    dims = tl.arange(0, HEAD_DIM)[None, :]
    return tl.load(ptr + rows[:, None] * stride + dims, mask=rows[:, None] < seqlen, other=0.0)


@triton.jit
def fold(q, k, v, seen, m, l, acc, scale_log2, MASKED: tl.constexpr):
    """The state (m, l, acc) with one more tile of keys and values in it."""
    s = tl.dot(q, k.T)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    alpha = tl.exp2(m - m_new)  # shrinks everything folded so far
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, l * alpha + tl.sum(p, 1), acc


@triton.jit
def forward_v2(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    seqlen, num_heads, num_tiles, scale_log2,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % num_tiles
    plane = (tl.program_id(0) // num_tiles).to(tl.int64)  # batch * num_heads + head
    stride = num_heads * HEAD_DIM
    head = ((plane // num_heads) * seqlen * num_heads + plane % num_heads) * HEAD_DIM
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    cols = tl.arange(0, TILE_N)
    q = load_tile(q_ptr + head, rows, seqlen, stride, HEAD_DIM)
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, HEAD_DIM], tl.float32)

    hi = tl.minimum(seqlen, (tile + 1) * TILE_M) if CAUSAL else seqlen
    whole = tile * TILE_M if CAUSAL else seqlen  # every query sees the keys before it
    edge = whole // TILE_N * TILE_N
    for n in range(0, edge, TILE_N):
        k = load_tile(k_ptr + head, n + cols, seqlen, stride, HEAD_DIM)
        v = load_tile(v_ptr + head, n + cols, seqlen, stride, HEAD_DIM)
        m, l, acc = fold(q, k, v, True, m, l, acc, scale_log2, False)
    for n in range(edge, hi, TILE_N):  # cut by the diagonal or by the end of the keys
        k = load_tile(k_ptr + head, n + cols, seqlen, stride, HEAD_DIM)
        v = load_tile(v_ptr + head, n + cols, seqlen, stride, HEAD_DIM)
        seen = n + cols[None, :] < seqlen
        if CAUSAL:
            seen &= n + cols[None, :] <= rows[:, None]
        m, l, acc = fold(q, k, v, seen, m, l, acc, scale_log2, True)

    out = out_ptr + head + rows[:, None] * stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out, (acc * (1.0 / l)[:, None]).to(q.dtype), mask=rows[:, None] < seqlen)
    tl.store(lse_ptr + plane * seqlen + rows, (m + tl.log2(l)) * LN2, mask=rows < seqlen)


def attention(q, k, v, causal=False):
    """As in v1.py."""
    batch, seqlen, num_heads, head_dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    lse = q.new_empty((batch, num_heads, seqlen), dtype=torch.float32)
    tiles = triton.cdiv(seqlen, TILE_M)
    forward_v2[(tiles * batch * num_heads,)](
        q, k, v, out, lse, seqlen, num_heads, tiles, math.log2(math.e) / math.sqrt(head_dim),
        head_dim, causal, TILE_M, TILE_N, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out, lse


if __name__ == "__main__":
    from check import check

    check(attention)
