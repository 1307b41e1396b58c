"""Ranks as processes of this machine, started by torch's elastic launcher, without restarts.

    launch_ranks -> elastic agent --- spawn ---> run_rank -> work(job, argument)
    SIGINT, SIGTERM ----------------- SIGUSR1 -> rank 0          it may finish its work
    a rank ended -------------------- SIGTERM -> the other ranks they end now, SIGKILL after 30 s

The ranks meet in files of a private folder: no port is opened for the rendezvous, and gloo connects
them over the loopback interface. A rank that raises leaves its sentence in the folder, so that the
launcher reports one sentence instead of a traceback for each rank.
"""

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:  # torch's launcher cannot be imported on every system
    from torch.distributed.launcher.api import LaunchConfig

LOG = logging.getLogger("onchip")
STEP_TIMEOUT = timedelta(minutes=10)  # of a collective; NCCL's default
MAX_ERROR_BYTES = 4096
REFUSALS = (ValueError, OSError)
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")


class RankFailure(RuntimeError):
    """A rank ended before its work was done. kind: the class of its error; None if the process was
    killed or ended itself. is_refusal: the error was a ValueError or an OSError.
    """

    def __init__(self, rank: int, sentence: str, kind: str | None = None, is_refusal: bool = False):
        super().__init__(sentence)
        self.rank, self.kind, self.is_refusal = rank, kind, is_refusal


class LaunchResult(NamedTuple):
    """value: of rank 0; None if a signal ended it before its work began. stopped_by: the first
    signal that this process got.
    """

    value: Any
    stopped_by: signal.Signals | None


@dataclass(frozen=True)
class RankJob:
    """One rank of a job. folder: private to the job, and gone after it."""

    rank: int
    world_size: int
    folder: Path

    @contextmanager
    def join(self, device_type: str) -> Iterator[None]:
        """The default process group of all ranks, inside of the block."""
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{self.folder / 'group'}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=STEP_TIMEOUT,
        )
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def launch_ranks(
    world_size: int, work: Callable[[RankJob, Any], Any], argument: object
) -> LaunchResult:
    """Call work(job, argument) in world_size processes and return when all have ended. Call it in
    the main thread. Both arguments are pickled. Until it returns, SIGINT and SIGTERM reach rank 0
    as SIGUSR1, and nothing else. RankFailure: a rank failed first, and all others were ended.
    """
    if not hasattr(signal, "pthread_sigmask"):
        raise ValueError("several ranks of one machine need a Unix system")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _silence_launcher()
    with tempfile.TemporaryDirectory(prefix="onchip-ranks-") as name, _environment():
        folder = Path(name)
        with _StopForwarder(folder) as stop:
            launch = elastic_launch(_config(world_size, folder), run_rank)
            try:
                values = launch(folder, work, argument)
            except ChildFailedError as error:
                rank, failure = min(error.failures.items())
                if stop.received is not None and rank == 0 and failure.exitcode == -signal.SIGUSR1:
                    return LaunchResult(None, stop.received)
                raise _describe_failure(folder, rank, world_size, failure.exitcode) from None
            except SignalException as error:  # SIGHUP, SIGQUIT
                name = signal.Signals(error.sigval).name
                raise RankFailure(0, f"the launcher was ended by {name}") from None
        return LaunchResult(values[0], stop.received)


def run_rank(folder: Path, work: Callable[[RankJob, Any], Any], argument: object) -> Any:
    """The process of one rank. Signals were blocked while its modules were loaded."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        (folder / "pid.new").write_text(str(os.getpid()))
        (folder / "pid.new").rename(folder / "pid")
    _watch_launcher()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        value = work(RankJob(rank, world_size, folder), argument)
    except Exception as error:
        if not isinstance(error, REFUSALS):
            LOG.critical("rank %d of %d failed", rank, world_size, exc_info=error)
        _write_error(folder / f"error-{rank}", error)
        raise SystemExit(1) from None
    sys.stdout.flush()
    return value


def _config(world_size: int, folder: Path) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are forwarded
        local_addr="127.0.0.1",
    )


@contextmanager
def _environment() -> Iterator[None]:
    """Variables that the ranks inherit. Without the first, torch's agent would listen on all
    interfaces.
    """
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    names = [name for _, name in socket.if_nameindex()]
    if loopback := [name for name in ("lo", "lo0") if name in names]:
        variables["GLOO_SOCKET_IFNAME"] = loopback[0]
    before = dict(os.environ)
    os.environ.update({name: os.environ.get(name, value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _StopForwarder:
    """Inside of the block, every stop signal of this process becomes a SIGUSR1 for rank 0.
    received: the first of them.

    The main thread blocks the signals, and so do the ranks, which inherit this: a Ctrl-C, which a
    terminal sends to all processes, would otherwise end some ranks in a traceback. The forwarding
    thread, which was started before, does not block them, so this process still gets them.
    """

    def __init__(self, folder: Path):
        self.received: signal.Signals | None = None
        self._pid_file, self._ended = folder / "pid", threading.Event()
        self._signals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="onchip-signals")

    def __enter__(self) -> "_StopForwarder":
        self._handlers = {number: signal.getsignal(number) for number in signal.Signals}
        self._thread.start()
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self._signals.put(number))
        resource_tracker.ensure_running()  # started later, it would unblock them again
        blocked = {*STOP_SIGNALS, signal.SIGUSR1}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._signals.put(None)
        self._thread.join()
        for number, handler in self._handlers.items():  # torch's launcher leaves its own behind
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _run(self) -> None:
        while (number := self._signals.get()) is not None:
            self.received = self.received or signal.Signals(number)
            self._forward()

    def _forward(self) -> None:
        """Wait until rank 0 has started, and signal it."""
        while not self._pid_file.exists():
            if self._ended.wait(0.05):
                return
        try:
            os.kill(int(self._pid_file.read_text()), signal.SIGUSR1)
        except ProcessLookupError:
            return  # it has ended


def _watch_launcher() -> None:
    """End this rank if the launcher is killed: no other process would end it."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(30.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="onchip-launcher").start()


def _silence_launcher() -> None:
    """The launcher logs a table and tracebacks for a failed rank; RankFailure has one sentence."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


def _write_error(file: Path, error: Exception) -> None:
    fields = {
        "kind": type(error).__name__,
        "sentence": (str(error) or type(error).__name__)[: MAX_ERROR_BYTES // 8],
        "is_refusal": isinstance(error, REFUSALS),
    }
    file.write_text(json.dumps(fields))


def _describe_failure(folder: Path, rank: int, world_size: int, exit_code: int) -> RankFailure:
    """The error that a rank has left, or how its process ended."""
    file = folder / f"error-{rank}"
    if file.exists():
        with file.open() as opened:
            fields = json.loads(opened.read(MAX_ERROR_BYTES))
        return RankFailure(rank, **fields)
    end = f"ended with exit code {exit_code}"
    if exit_code < 0:
        end = f"was ended by {signal.Signals(-exit_code).name}"
    return RankFailure(rank, f"rank {rank} of {world_size} {end}")
