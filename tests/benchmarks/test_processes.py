"""Ranks as processes: results in rank order, and a rank that fails ends all."""

import os
import time

import pytest
import torch

from benchmarks.processes import run_processes
from onchip.parallel.comm import ParallelError


def ranks_before(comm, factor):
    received = torch.zeros(1)
    comm.shift(torch.full((1,), float(comm.rank)), received).wait()
    return factor * int(received), torch.get_num_threads()


def fail(comm, how):
    if comm.rank == 1:
        if how == "dies":
            os._exit(3)
        raise KeyError("lost key")
    time.sleep(60)  # the caller must not wait for this


def test_results_are_in_rank_order():
    assert run_processes(3, ranks_before, 10) == [(20, 1), (0, 1), (10, 1)]


@pytest.mark.parametrize(
    "how, error",
    [("raises", "KeyError: 'lost key'"), pytest.param("dies", "ended", marks=pytest.mark.slow)],
)
def test_a_rank_that_fails_ends_all(how, error):
    start = time.monotonic()
    with pytest.raises(ParallelError, match=f"(?s)rank 1 of 2 failed: .*{error}") as caught:
        run_processes(2, fail, how)
    assert caught.value.rank == 1 and time.monotonic() - start < 50


def test_zero_ranks_are_refused():
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        run_processes(0, ranks_before, 1)
