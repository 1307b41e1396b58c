"""Tokens are exchanged for heads and back, for any number of tokens, heads and ranks."""

import pytest
import torch

from onchip.parallel import sharding
from onchip.parallel.all_to_all import HeadAllToAll, assign_heads, kv_heads_of, split_by_kv_head
from onchip.parallel.comm import run_ranks

HEADS = [(8, 8), (8, 2), (6, 3), (12, 3), (5, 5), (7, 1), (1, 1), (16, 4)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("heads, kv", HEADS, ids=str)
def test_heads_are_assigned_once_and_evenly(heads, kv, size):
    """No rank has more than its share, rounded up. Key heads that divide are not shared."""
    assigned = assign_heads(heads, kv, size)
    assert [h for lo, hi in assigned for h in range(lo, hi)] == list(range(heads))
    assert max(hi - lo for lo, hi in assigned) == -(-heads // size)
    if kv % size == 0:
        needed = [kv_heads_of(span, heads // kv) for span in assigned]
        assert sum(hi - lo for lo, hi in needed) == kv


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("heads, kv", HEADS, ids=str)
def test_calls_cover_all_heads_of_a_rank(heads, kv, size):
    """Query head h reads key head h // group_size, in at most three calls."""
    group_size = heads // kv
    for span in assign_heads(heads, kv, size):
        first_kv, seen = kv_heads_of(span, group_size)[0], []
        calls = split_by_kv_head(span, group_size)
        assert len(calls) <= 3
        for call in calls:
            queries = range(call.heads.start, call.heads.stop)
            keys = range(call.kv_heads.start, call.kv_heads.stop)
            assert len(queries) % len(keys) == 0
            for i, h in enumerate(queries):
                shared = keys[i // (len(queries) // len(keys))]
                assert (span[0] + h) // group_size == first_kv + shared
                seen.append(span[0] + h)
        assert seen == list(range(*span))


@pytest.mark.parametrize("layout", [sharding.contiguous, sharding.zigzag, sharding.striped])
@pytest.mark.parametrize("heads, kv", [(8, 2), (5, 5), (7, 1)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_to_heads_and_back_to_tokens(layout, heads, kv, size):
    """to_heads: this rank's heads of all tokens, in order. to_tokens: all heads of its tokens, with
    shared heads summed.
    """
    seqlen, layout = 29, layout(size)
    q, k = torch.randn(2, seqlen, heads, 3), torch.randn(2, seqlen, kv, 5).double()
    assigned = assign_heads(heads, kv, size)
    spans = [[kv_heads_of(span, heads // kv) for span in assigned], assigned]

    def on_rank(comm):
        rows = tuple(layout.positions(r, seqlen) for r in range(size))
        exchange = HeadAllToAll(comm, rows)
        mine = [layout.shard(t, comm.rank) for t in (k, q)]
        exchanged = exchange.to_heads(mine, spans)
        for t, whole, s in zip(exchanged, (k, q), spans, strict=True):
            assert torch.equal(t, whole[:, :, slice(*s[comm.rank])])
        return exchange.to_tokens(exchanged, spans)

    back = run_ranks(size, on_rank)
    holders = torch.zeros(kv)
    for lo, hi in spans[0]:
        holders[lo:hi] += 1
    assert torch.equal(layout.unshard([b[1] for b in back]), q)
    torch.testing.assert_close(layout.unshard([b[0] for b in back]), k * holders[:, None])
