"""An open loop against `onchip serve` on the CPU, a process of its own, with the built-in model."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from onchip.bench import openloop
from onchip.bench.harness import Case, Refused, Row, Session

RATE, SECONDS, QUICK_SECONDS = 5.0, 30.0, 2.0
STOP_S = 60


def measure(session: Session) -> list[Row]:
    """A row: tokens a second, with the waits, the errors and the memory beside it. Refused if a
    request was not answered.
    """
    span = session.seconds or (QUICK_SECONDS if session.quick else SECONDS)
    load = openloop.Load(max(1, round(RATE * span)), RATE)
    with server() as (url, pid):
        got = asyncio.run(openloop.soak(url, load, pid, every_s=min(5.0, span / 20)))
    if got["answered"] < got["requests"]:
        raise Refused(f"{got['answered']} of {got['requests']} answered: {got['errors']}")
    case = Case("http", "tiny", None, 0, 0, got["requests"], 0, way="serve")
    session.say(f"http: {got}")
    return [case.row("onchip", got["tokens_per_s"], "tokens/s", rate=RATE, span_s=span, **got)]


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Its address and its process; SIGTERM at the end, and it must obey."""
    command = [sys.executable, "-m", "onchip", "serve", "--port", "0", "--device", "cpu"]
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
    raise Refused("the server ended before it served: see its message above")
