"""Ranks as processes: answers in order, and what a rank that fails leaves behind."""

import os
import time

import pytest
import torch

from onchip.parallel.comm import ParallelError
from onchip.parallel.processes import run_processes


def ranks_before(comm, factor):
    came = torch.zeros(1)
    comm.shift(torch.full((1,), float(comm.rank)), came).wait()
    return factor * int(came), torch.get_num_threads()


def fail(comm, how):
    if comm.rank == 1:
        if how == "dies":
            os._exit(3)
        raise KeyError("lost key")
    time.sleep(60)  # must not be waited for


def test_every_rank_answers_in_its_place():
    assert run_processes(3, ranks_before, 10) == [(20, 1), (0, 1), (10, 1)]


@pytest.mark.parametrize(
    "how, said",
    [("raises", "KeyError: 'lost key'"), pytest.param("dies", "ended", marks=pytest.mark.slow)],
)
def test_a_rank_that_fails_ends_all(how, said):
    start = time.monotonic()
    with pytest.raises(ParallelError, match=f"(?s)rank 1 of 2 failed: .*{said}") as caught:
        run_processes(2, fail, how)
    assert caught.value.rank == 1 and time.monotonic() - start < 50


def test_no_rank_is_no_job():
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        run_processes(0, ranks_before, 1)
