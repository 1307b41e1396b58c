"""Ranks as processes of this machine, for programs that are not started by torchrun."""

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
    """[fn(comm, *args) of rank 0, of rank 1, ...], each in a process of its own, of one thread,
    over gloo. fn, args and results must survive pickling. If a rank raises, or dies, all are ended,
    and ParallelError has what the rank said.
    """
    if size < 1:
        raise ValueError(f"{size=} must be at least 1")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, members = [], []
    try:
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            job = (there, store.port, rank, size, timeout_s, fn, args)
            members.append(context.Process(target=_live, args=job, daemon=True))
            members[-1].start()
            there.close()
            pipes.append(here)
        return _collect(pipes)
    finally:
        for member in members:
            member.kill()
            member.join()


def _live(
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
    """The answers in rank order; the first that is none ends it."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        for pipe in wait([p for rank, p in enumerate(pipes) if rank not in answers]):
            rank = pipes.index(pipe)
            good, answers[rank] = _answer(pipe)
            if not good:
                raise ParallelError(f"rank {rank} of {len(pipes)} failed: {answers[rank]}", rank)
    return [answers[rank] for rank in range(len(pipes))]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "its process ended"
