"""Processes that wait for jobs: started once, shared by all tests that need ranks on gloo.

A job is an importable function and its arguments; it runs as fn(comm, *args) on ranks 0 to size -
1. The error of a rank is returned as text, and the pool starts anew for the next job, because a
broken group cannot be used again.
"""

import multiprocessing
import pickle
import time
import traceback
from importlib import import_module
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from onchip.parallel.comm import GroupComm

# imported by one fork server, which forks every rank of every pool
IMPORTED = [
    "pytest",
    "onchip.parallel.attention",
    "onchip.kernels.cpu.aten",
    "onchip.kernels.cpu.tiled",
]
IMPORTED += [__name__]


class RankError(AssertionError):
    """The traceback of a rank that failed."""


class Pool:
    """`size` processes; run(P, fn, *args) uses the first P of them. Their store is in this process,
    or (inside) in rank 0.
    """

    def __init__(self, size, inside=False):
        self.size, self._members, self._inside = size, [], inside

    def run(self, size, fn, *args, timeout_s=60.0, lost=()):
        """[fn(comm, *args) of rank 0, of rank 1, ...]; None for ranks in `lost`, which will die."""
        if not self._members:
            self._start()
        self._connect(size)
        job = pickle.dumps((size, timeout_s, fn.__module__, fn.__qualname__, args))
        for _, pipe in self._members[:size]:
            pipe.send_bytes(job)
        results = self._collect([r for r in range(size) if r not in lost], timeout_s + 30)
        errors = {r: text for r, (succeeded, text) in results.items() if not succeeded}
        if errors or lost:
            self.close()
        if errors:
            raise RankError("\n".join(f"rank {r} of {size}:\n{t}" for r, t in errors.items()))
        return [results[r][1] if r in results else None for r in range(size)]

    def _connect(self, size):
        """Make a group of `size` ranks; torch needs all processes for it, members or not."""
        if size not in self._groups:
            self._groups.add(size)
            for _, pipe in self._members:
                pipe.send_bytes(pickle.dumps(size))

    def close(self):
        for process, _ in self._members:
            process.kill()
        for process, pipe in self._members:
            process.join()
            pipe.close()
        self._members = []

    def _start(self):
        self._groups = {self.size}
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        for rank in range(self.size):
            here, there = context.Pipe()
            args = (rank, self.size, self._store.port, self._inside, there)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))

    def _collect(self, ranks, seconds):
        """{rank: (succeeded, result)}; a rank that dies or is late has an error text."""
        results, until = {}, time.monotonic() + seconds
        pipes = {self._members[r][1]: r for r in ranks}
        while len(results) < len(ranks):
            ready = wait(
                [p for p, r in pipes.items() if r not in results], until - time.monotonic()
            )
            for pipe in ready:
                results[pipes[pipe]] = _receive(pipe)
            if not ready:
                late = f"no result within {seconds:g} s"
                results |= {r: (False, late) for r in ranks if r not in results}
        return results


def _receive(pipe):
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "the process ended"


def serve(rank, size, port, inside, pipe):
    """The loop of a rank: receive a job, send its result, until the pipe is closed."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    if inside:
        if rank == 0:
            mine = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            store.set("port", str(mine.port))
        store = dist.TCPStore("127.0.0.1", int(store.get("port")), None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {size: dist.group.WORLD}
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if isinstance(job, int):
            groups[job] = dist.new_group(list(range(job)))
        else:
            pipe.send_bytes(pickle.dumps(run_job(groups, *job)))


def run_job(groups, size, timeout_s, module, name, args):
    try:
        torch.manual_seed(0)
        comm = GroupComm(groups[size], timeout_s)
        return True, getattr(import_module(module), name)(comm, *args)
    except BaseException:
        return False, traceback.format_exc()
