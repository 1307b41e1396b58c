"""Ranks as processes: their values, their errors in one sentence, and what they inherit."""

import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals of Unix"),
]


def add_ranks(job, term):
    """A sum over all ranks. Ctrl-C of a terminal reaches no rank."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT in blocked and signal.SIGTERM not in blocked
    with job.join("cpu"):
        total = torch.tensor([job.rank + term])
        dist.all_reduce(total)
        return int(total), str(job.folder), os.environ["WORLD_SIZE"]


def fail(job, rank):
    """One rank fails; the others would wait forever."""
    if job.rank == rank:
        raise LookupError("no such page") if rank else OSError("disk full")
    threading.Event().wait()


def leave(job, code):
    if job.rank == 1:
        os._exit(code)
    threading.Event().wait()


def test_the_value_of_rank_0():
    from onchip.parallel.launch import launch_ranks

    before, handlers = dict(os.environ), signal.getsignal(signal.SIGTERM)
    result = launch_ranks(2, add_ranks, 10)
    total, folder, world_size = result.value
    assert (total, world_size, result.stopped_by) == (21, "2", None)
    assert not os.path.exists(folder) and dict(os.environ) == before
    assert signal.getsignal(signal.SIGTERM) is handlers
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(
    ("work", "argument", "rank", "sentence", "is_refusal"),
    [
        (fail, 0, 0, "disk full", True),
        (fail, 1, 1, "no such page", False),
        (leave, 7, 1, "rank 1 of 2 ended with exit code 7", False),
    ],
    ids=["refusal", "error", "exit"],
)
def test_the_first_rank_that_ends_is_named(work, argument, rank, sentence, is_refusal):
    from onchip.parallel.launch import RankFailure, launch_ranks

    with pytest.raises(RankFailure) as failure:
        launch_ranks(2, work, argument)
    found = failure.value
    assert (found.rank, str(found), found.is_refusal) == (rank, sentence, is_refusal)
