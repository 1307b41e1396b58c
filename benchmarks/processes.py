"""Ranks as processes of this machine, for programs that torchrun did not start."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from onchip.parallel.comm import GroupComm, ParallelError


def run_processes(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list:
    """[fn(comm, *args) of rank 0, of rank 1, ...], each in a process with one thread, over gloo.
    fn, args and results must be picklable. If a rank raises or dies, all processes are killed, and
    the ParallelError has the traceback of that rank.
    """
    if size < 1:
        raise ValueError(f"{size=} must be at least 1")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            job = (sender, store.port, rank, size, timeout_s, fn, args)
            processes.append(context.Process(target=_run_rank, args=job, daemon=True))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_rank(
    pipe: Connection, port: int, rank: int, size: int, timeout_s: float, fn: Callable, args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        pipe.send((True, fn(GroupComm(timeout_s=timeout_s), *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _collect(pipes: list[Connection]) -> list:
    """The results in rank order; the first failure raises."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for pipe in wait([p for rank, p in enumerate(pipes) if rank not in results]):
            rank = pipes.index(pipe)
            succeeded, results[rank] = _receive(pipe)
            if not succeeded:
                raise ParallelError(f"rank {rank} of {len(pipes)} failed: {results[rank]}", rank)
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "its process ended"
