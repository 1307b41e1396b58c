"""Loads on `onchip serve` on the CPU, in a separate process, with the built-in model: an open loop
of requests, and a crowd of clients with connections that are open all the time.
"""

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from benchmarks import openloop
from onchip.cli.bench.harness import Case, Row, RowRefused, Session

RATE, SECONDS, QUICK_SECONDS = 5.0, 30.0, 2.0
CLIENTS, QUICK_CLIENTS, SEATS = 1000, 20, 128
STOP_S = 60


def measure(session: Session) -> list[Row]:
    """A row: tokens a second, with latencies, errors and memory. RowRefused if a request has no
    response.
    """
    span = _span(session)
    load = openloop.Load(max(1, round(RATE * span)), RATE)
    with server() as (url, pid):
        got = asyncio.run(openloop.soak(url, load, pid, every_s=min(5.0, span / 20)))
    return [_row(session, "http", got | {"rate": RATE, "span_s": span})]


def crowd(session: Session) -> list[Row]:
    """A row of the same kind for clients that ask again as soon as they are answered. `answers`: of
    the client that got fewest, and most.
    """
    span, clients = _span(session), QUICK_CLIENTS if session.quick else CLIENTS
    open_files(2 * clients)
    load = openloop.Load(clients, prompt_chars=(20, 60), max_tokens=(8, 16))
    with server("--max-num-seqs", str(SEATS)) as (url, pid):
        every_s = min(5.0, span / 20)
        work = openloop.watched(openloop.crowd(url, load, span), pid, every_s)
        by_client, memory = asyncio.run(work)
    answers = [sum(outcome.ok for outcome in outcomes) for outcomes in by_client]
    got = openloop.summary(sorted(chain(*by_client), key=lambda outcome: outcome.due_s)) | memory
    got |= {"clients": clients, "answers": [min(answers), max(answers)], "span_s": span}
    return [_row(session, "crowd", got)]


def open_files(count: int) -> None:
    """So many, if this process may; RowRefused otherwise. The server inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        raise RowRefused(f"a process may open {hard} files here, {count} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count)), hard))


def _span(session: Session) -> float:
    return session.seconds or (QUICK_SECONDS if session.quick else SECONDS)


def _row(session: Session, bench: str, got: dict) -> Row:
    if got["answered"] < got["requests"]:
        raise RowRefused(f"{got['answered']} of {got['requests']} answered: {got['errors']}")
    case = Case(bench, "tiny", None, 0, 0, got["requests"], 0, way="serve")
    session.say(f"{bench}: {got}")
    return case.row("onchip", got["tokens_per_s"], "tokens/s", **got)


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int]]:
    """Its address and its process; SIGTERM at the end, and it must obey."""
    command = [sys.executable, "-m", "onchip", "serve", "--port", "0", "--device", "cpu", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            yield _address(process), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def _address(process: subprocess.Popen) -> str:
    for line in process.stdout or ():
        if found := re.search(r"(http://\S+)/v1", line):
            return found[1]
    raise RowRefused("the server ended before it served: see its message above")
