"""Two processes on one GPU over NCCL, if this NCCL supports it: equal bits, and a lost rank."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from onchip.parallel import context_parallel_attention
from onchip.parallel.comm import GroupComm, ParallelError
from tests.parallel.pool import Pool, RankError

pytestmark = pytest.mark.gpu


def over_nccl(timeout_s):
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL refuses two ranks on one GPU otherwise
    torch.cuda.set_device(0)
    comm = GroupComm(dist.new_group(backend="nccl"), timeout_s)
    one = torch.ones(1, device="cuda")
    comm.sum(one).wait()
    assert one.item() == comm.size
    return comm


def patterns(comm):
    """(received values, expected values)"""
    comm, there = over_nccl(60.0), 1 - comm.rank
    send, recv = torch.full((2, 70_001), float(comm.rank + 1), device="cuda")
    comm.shift(send, recv).wait()
    parts = [torch.full((3 + r, 2), 10.0 * comm.rank + r, device="cuda") for r in range(2)]
    swapped = [torch.empty(3 + comm.rank, 2, device="cuda") for _ in range(2)]
    comm.all_to_all(parts, swapped).wait()
    total = torch.empty(3 + comm.rank, 2, device="cuda")
    comm.reduce_scatter(parts, total).wait()
    got = recv[0], swapped[there][0, 0], total[0, 0]
    return [t.item() for t in got], [there + 1.0, 10.0 * there + comm.rank, 10.0 + 2 * comm.rank]


def stalls(comm):
    comm = over_nccl(5.0)
    if comm.rank == 1:
        time.sleep(60)
    send, recv = torch.ones(2, 70_001, device="cuda")
    began = time.monotonic()
    comm.shift(send, recv).wait()
    torch.cuda.synchronize()  # returns when the watchdog has aborted
    with pytest.raises(ParallelError) as caught:
        for _ in range(50):
            comm.shift(send, recv).wait()
            time.sleep(0.1)
    return str(caught.value), caught.value.rank, time.monotonic() - began


def mixes(comm):
    """Rank 1 alone is causal, after both calls were made before: the next call raises."""
    comm = over_nccl(20.0)
    q, k, v = torch.randn(3, 1, 64, 2, 32, device="cuda", dtype=torch.bfloat16).unbind()
    attend = lambda causal: context_parallel_attention(
        q, k, v, comm, strategy="ring", causal=causal
    )
    for causal in (True, False, True, False):
        attend(causal)
    attend(comm.rank == 1)
    with pytest.raises(ParallelError) as caught:
        attend(False)
    assert torch.isfinite(attend(False)).all()
    return str(caught.value)


@pytest.fixture
def pair():
    ranks = Pool(2)
    yield ranks
    ranks.close()


def run_pair(pool, fn, **options):
    try:
        return pool.run(2, fn, **options)
    except RankError as error:
        if "Duplicate GPU" in str(error) or "invalid usage" in str(error):
            pytest.skip("this NCCL has no two ranks on one GPU")
        raise


def test_patterns_on_nccl(pair):
    for got, expected in run_pair(pair, patterns):
        assert got == expected


def test_a_call_that_differs_on_nccl_raises_in_the_next(pair):
    sentence = "the ranks do not agree: causal is false on rank 0, true on rank 1"
    assert run_pair(pair, mixes) == [sentence] * 2


def test_a_rank_that_stalls_on_nccl_is_named(pair):
    message, rank, seconds = run_pair(pair, stalls, lost=[1])[0]
    assert rank == 1 and "rank 1 stalled" in message, message
    assert seconds < 10
