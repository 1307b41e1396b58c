"""`onchip serve --tensor-parallel-size N`: one server in front of a model on several ranks.

    launcher                      rank 0                                 other ranks
    launch_ranks -- spawn ----->  HTTP, Service, LeaderEngine -------->  follow
    SIGTERM, SIGINT - SIGUSR1 ->  drains, closes the engine ---------->  return
    a rank ended --- SIGTERM -->  open requests fail, the server ends    end

The launcher has no model and serves nothing. It returns the exit code of rank 0, or says in one
sentence which rank has ended.
"""

import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from onchip.core.extras import MissingPackageError
from onchip.core.problem import UnsupportedError
from onchip.engine.followers import LeaderEngine, follow
from onchip.parallel.comm_base import ParallelError
from onchip.parallel.launch import RankFailure, RankJob, launch_ranks
from onchip.parallel.message_channel import MessageChannel

from .api_keys import Keyring
from .app import Server, ServerOptions
from .command import (
    LOG_FORMAT,
    add_model_type,
    describe,
    load_engine,
    make_announcement,
    summarise,
)
from .errors import APIError
from .process import ServerProcess
from .service import RETRY_AFTER_S

LOG = logging.getLogger("onchip.serve")
REFUSALS: dict[str, type[ValueError]] = {
    kind.__name__: kind for kind in (MissingPackageError, UnsupportedError)
}
OTHERS_S = 5.0  # for the launcher to find the rank that ended first, before this one ends, too


class RankArguments(NamedTuple):
    """What every rank gets from the launcher. The socket is bound, and rank 0 listens."""

    args: SimpleNamespace
    options: ServerOptions
    keys: Keyring
    sock: socket.socket


class RankOutcome(NamedTuple):
    """The end of rank 0: its exit code, and a summary of what it did."""

    code: int
    summary: str


def serve_ranks(
    args: SimpleNamespace, options: ServerOptions, keys: Keyring, sock: socket.socket
) -> int:
    """Run until a signal or until a rank ends. ValueError: the ranks refuse the model or an
    option.
    """
    try:
        result = launch_ranks(
            args.tensor_parallel_size, serve_rank, RankArguments(args, options, keys, sock)
        )
    except RankFailure as failure:
        if failure.is_refusal:
            raise REFUSALS.get(failure.kind or "", ValueError)(str(failure)) from None
        print(f"onchip: {failure}: the service has ended", file=sys.stderr)
        return 1
    if result.value is None:
        summary, code = "before the server had started", 128 + signal.SIGTERM
    else:
        code, summary = result.value
    if result.stopped_by is signal.SIGINT:
        raise KeyboardInterrupt(summary)
    return code


def serve_rank(job: RankJob, arguments: RankArguments) -> RankOutcome | None:
    """The work of one rank."""
    args = arguments.args
    logging.basicConfig(format=LOG_FORMAT)
    level = args.log_level.upper() if job.rank == 0 else "ERROR"  # each line is logged once
    logging.getLogger("onchip").setLevel(level)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if str(device) == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // job.world_size))
    with job.join(str(device)):
        engine = load_engine(args)
        channel = MessageChannel()
        if job.rank == 0:
            leader = LeaderEngine(engine, channel)
            LOG.info(
                "%s ranks=%d", describe(engine, arguments.options.model), args.tensor_parallel_size
            )
            return _lead(leader, arguments)
        arguments.sock.close()
        _follow(engine, channel, job.rank)
    return None


def _lead(leader: LeaderEngine, arguments: RankArguments) -> RankOutcome:
    args, options, keys, sock = arguments
    server = Server(leader, add_model_type(options, leader.model), keys)
    announce = make_announcement(args, options, keys, sock)
    process = LeaderProcess(server, args.drain_s, announce)
    leader.on_failure = process.end_after_failure
    signal.signal(signal.SIGUSR1, process.handle_exit)
    process.run([sock])
    if not process.started:  # a signal was faster: no thread drives the engine
        leader.close()
    if server.service.death_cause or process.has_lost_rank or not leader.has_ended_others:
        raise SystemExit(1)  # the launcher ends the other ranks
    return RankOutcome(0, summarise(server.service.stats))


def _follow(engine: Any, channel: MessageChannel, rank: int) -> None:
    try:
        follow(engine, channel, rank)
    except ParallelError as error:
        if error.rank == 0:  # lost: the launcher ends this rank, and names the other
            threading.Event().wait(OTHERS_S)
        raise
    engine.close()


class LeaderProcess(ServerProcess):
    """The server of rank 0. SIGUSR1 is the launcher's word to drain. SIGTERM means that another
    rank has ended: no step can run any more, so open requests fail at once.
    """

    has_lost_rank: bool = False

    def handle_exit(self, sig: int = 0, frame: FrameType | None = None) -> None:
        if sig != signal.SIGTERM:
            super().handle_exit(sig, frame)
        elif self._loop is None:
            self.has_lost_rank = self.should_exit = True
        elif not self._loop.is_closed():
            self.has_lost_rank = True
            self._loop.call_soon_threadsafe(self._fail_all)

    def end_after_failure(self) -> None:
        """Called in the engine's thread. The launcher may still have to find the rank that ended
        first; if none has, the failure is this rank's own.
        """
        self.has_lost_rank = True
        timer = threading.Timer(OTHERS_S, self.handle_exit, (signal.SIGTERM,))
        timer.daemon = True
        timer.start()

    def _fail_all(self) -> None:
        cast(Server, self.server).service.fail_all(lost_rank_error())
        self.drain_s = 0.0
        self._stop()


def lost_rank_error() -> APIError:
    return APIError(
        503,
        "a process of the model has ended, and this request with it",
        code="rank_lost",
        retry_after_s=RETRY_AFTER_S,
        closes=True,
    )
