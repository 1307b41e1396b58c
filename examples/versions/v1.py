"""FlashAttention v1, forward, as published (Dao et al. 2022, Algorithm 1), in Triton.

Attention never needs the whole of S = q k^T at once. A softmax over a row can be taken piece by
piece, if for every row three things are remembered: the largest score so far (m), the sum of the
exponentials relative to it (l), and the output so far (o). A piece with a larger maximum shrinks
what was summed before by exp(m - m_new). So S is computed in tiles that never leave the chip.

    for every tile of keys and values:        read once, kept on the chip
        for every tile of queries:            read again for every tile of keys
            read its o, l, m; fold the tile into them; write them back

What the later versions change:

- o, l and m are written to memory and read back once per tile of keys: N / TILE_N times.
  For N = 16,384 and tiles of 128 keys that is 128 round trips of the whole output, in fp32.
  Otherwise the result would be rounded 128 times.
- o is normalised all the time: multiplied by the old l, divided by the new one.
- The outer loop carries the state, so it cannot be split. One program computes a
  whole head: a GPU with 132 processors and 16 heads to compute is seven eighths idle.
- With `causal`, tiles above the diagonal are skipped, and every other tile is masked.
"""

import math

import torch
import triton
import triton.language as tl

TILE_M, TILE_N = 64, 128  # queries, keys; TILE_M divides TILE_N
LN2 = tl.constexpr(math.log(2))


@triton.jit
def forward_v1(
    q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, m_ptr, out_ptr, lse_ptr,
    seqlen, num_heads, scale_log2,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)  # batch * num_heads + head
    stride = num_heads * HEAD_DIM  # from one token of a head to the next
    head = ((plane // num_heads) * seqlen * num_heads + plane % num_heads) * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)[None, :]
    for n in range(0, seqlen, TILE_N):
        cols = n + tl.arange(0, TILE_N)
        kv = cols[:, None] * stride + dims
        k = tl.load(k_ptr + head + kv, mask=cols[:, None] < seqlen, other=0.0)
        v = tl.load(v_ptr + head + kv, mask=cols[:, None] < seqlen, other=0.0)
        first = n if CAUSAL else 0  # queries before the tile's first key see none of it
        for r in range(first, seqlen, TILE_M):
            rows = r + tl.arange(0, TILE_M)
            tile = rows[:, None] * stride + dims
            inside = rows[:, None] < seqlen
            q = tl.load(q_ptr + head + tile, mask=inside, other=0.0)
            seen = cols[None, :] < seqlen
            if CAUSAL:
                seen &= cols[None, :] <= rows[:, None]
            s = tl.where(seen, tl.dot(q, k.T) * scale_log2, float("-inf"))
            m_tile = tl.max(s, 1)
            p = tl.exp2(s - m_tile[:, None])

            at = plane * seqlen
            m = tl.load(m_ptr + at + rows, mask=rows < seqlen, other=0.0)
            l = tl.load(l_ptr + at + rows, mask=rows < seqlen, other=0.0)
            o = tl.load(o_ptr + head + tile, mask=inside, other=0.0)
            m_new = tl.maximum(m, m_tile)
            alpha, beta = tl.exp2(m - m_new), tl.exp2(m_tile - m_new)
            l_new = alpha * l + beta * tl.sum(p, 1)
            pv = tl.dot(p.to(v.dtype), v)
            o = ((alpha * l)[:, None] * o + beta[:, None] * pv) / l_new[:, None]
            tl.store(m_ptr + at + rows, m_new, mask=rows < seqlen)
            tl.store(l_ptr + at + rows, l_new, mask=rows < seqlen)
            tl.store(o_ptr + head + tile, o, mask=inside)

            last = r < n + TILE_N if CAUSAL else n + TILE_N >= seqlen
            if last:  # no later tile of keys is for these queries
                tl.store(out_ptr + head + tile, o.to(q.dtype), mask=inside)
                lse = (m_new + tl.log2(l_new)) * LN2
                tl.store(lse_ptr + at + rows, lse, mask=rows < seqlen)
        # the next round reads what other threads of this program have written
        tl.debug_barrier()


def attention(q, k, v, causal=False, tile_n=TILE_N):
    """softmax(q k^T / sqrt(head_dim)) v and lse, for q, k, v of shape (batch, seqlen, num_heads,
    head_dim), head_dim 64 or 128, in bf16 or fp16. lse (batch, num_heads, seqlen), natural log.
    tile_n: keys of a tile. With fewer, the state makes more round trips.
    """
    assert tile_n % TILE_M == 0 or not causal, (TILE_M, tile_n)
    batch, seqlen, num_heads, head_dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, o = torch.empty_like(q), torch.zeros_like(q, dtype=torch.float32)
    l = q.new_zeros((batch, num_heads, seqlen), dtype=torch.float32)
    m, lse = torch.full_like(l, -math.inf), torch.empty_like(l)
    forward_v1[(batch * num_heads,)](
        q, k, v, o, l, m, out, lse, seqlen, num_heads, math.log2(math.e) / math.sqrt(head_dim),
        head_dim, causal, TILE_M, tile_n, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out, lse


if __name__ == "__main__":
    from check import check

    check(attention)
