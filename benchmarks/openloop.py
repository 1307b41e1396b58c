"""Open-loop load on a server of the OpenAI API: requests arrive at given times, whether earlier
ones are answered or not.

  python -m benchmarks.openloop http://127.0.0.1:8000 --rate 5 --seconds 600 --pid PID

A closed loop waits for a response before its next request, and so hides the waiting time of other
clients. Here arrivals are drawn in advance (a Poisson process) and kept. `crowd` is a closed loop:
one connection for each client, open during the whole run. The client uses asyncio alone, so that
its own cost does not distort the measurement.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

_MIB = 2**20
_NEIGHBOURS = 20
T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """num_requests at `rate` a second (inf: all at once), prompts of prompt_chars random letters,
    max_tokens each; the same for the same seed.
    """

    num_requests: int
    rate: float = math.inf
    prompt_chars: tuple[int, int] = (20, 200)
    max_tokens: tuple[int, int] = (16, 64)
    seed: int = 0

    def arrivals(self) -> list[tuple[float, dict]]:
        """(seconds after the start, body of the request)."""
        draw, at = random.Random(self.seed), 0.0
        plan = []
        for _ in range(self.num_requests):
            plan.append((at, self.body(draw)))
            at += draw.expovariate(self.rate) if self.rate < math.inf else 0.0
        return plan

    def body(self, draw: random.Random) -> dict:
        letters = draw.choices("abcdefghijklmnopqrstuvwxyz ", k=draw.randint(*self.prompt_chars))
        return {
            "prompt": "".join(letters),
            "max_tokens": draw.randint(*self.max_tokens),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class Outcome:
    """What became of one request; times in seconds, of time.monotonic(). gaps_s: between pieces.
    status 0: there was no answer.
    """

    due_s: float
    status: int = 0
    error: str | None = None
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def first_token_s(self) -> float:
        """Since it was due, not since it was sent: a late client is no excuse."""
        return (self.first_s or math.inf) - self.due_s


async def run(url: str, load: Load, *, key: str | None = None) -> list[Outcome]:
    """Ask everything, each at its time; outcomes in the order of arrivals."""
    start = time.monotonic()
    tasks = []
    for at, body in load.arrivals():
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        tasks.append(asyncio.create_task(ask(url, body, start + at, key)))
    return list(await asyncio.gather(*tasks))


async def ask(url: str, body: dict, due_s: float, key: str | None = None) -> Outcome:
    """One streamed completion; any error is recorded in the outcome."""
    outcome = Outcome(due_s)
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(_request(parts.netloc, body, key))
            await _read(reader, outcome)
        finally:
            writer.close()
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def summary(outcomes: Sequence[Outcome]) -> dict:
    """Counts, tokens a second, and times of the answered requests, in milliseconds."""
    good = [o for o in outcomes if o.ok]
    gaps = [gap for o in good for gap in o.gaps_s]
    span = max((o.last_s or o.due_s for o in good), default=0.0) - min(
        (o.due_s for o in outcomes), default=0.0
    )
    return {
        "requests": len(outcomes),
        "answered": len(good),
        "statuses": dict(Counter(o.status for o in outcomes)),
        "errors": dict(Counter(o.error for o in outcomes if o.error)),
        "output_tokens": sum(o.num_tokens for o in good),
        "tokens_per_s": sum(o.num_tokens for o in good) / span if good and span else 0.0,
        "first_token_ms": _quantiles([o.first_token_s for o in good]),
        "between_pieces_ms": _quantiles(gaps),
        "fairness": neighbours([sum(o.gaps_s) / len(o.gaps_s) for o in good if o.gaps_s]),
    }


def neighbours(values: Sequence[float]) -> float:
    """The mean `fairness` of consecutive values: over minutes the load of the machine changes,
    which is not unfairness of the server.
    """
    groups = [values[i : i + _NEIGHBOURS] for i in range(0, len(values), _NEIGHBOURS)]
    return sum(map(fairness, groups)) / len(groups) if groups else 1.0


def fairness(values: Sequence[float]) -> float:
    """Jain's index: 1 if all are alike, 1 / n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def rss_mib(pid: int) -> float:
    """Memory that a process has in RAM, from Linux' /proc."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / _MIB
    raise ValueError(f"process {pid} has no memory: it is gone")


async def sample_memory(pid: int, every_s: float, samples: list[tuple[float, float]]) -> None:
    """(seconds since the start, MiB), until cancelled."""
    start = time.monotonic()
    while True:
        samples.append((time.monotonic() - start, rss_mib(pid)))
        await asyncio.sleep(every_s)


def growth_mib(samples: Sequence[tuple[float, float]]) -> float:
    """How much more the last quarter has at its median than the second: the first one warms up."""
    mib = [one for _, one in samples]
    quarter = len(mib) // 4
    if not quarter:
        return 0.0
    return _median(mib[-quarter:]) - _median(mib[quarter : 2 * quarter])


async def watched(work: Awaitable[T], pid: int | None, every_s: float = 5.0) -> tuple[T, dict]:
    """The result of the work, and the server's memory during it."""
    samples: list[tuple[float, float]] = []
    sampling = asyncio.create_task(sample_memory(pid, every_s, samples)) if pid else None
    result = await work
    if not sampling:
        return result, {}
    sampling.cancel()
    memory = [round(mib, 1) for _, mib in samples]
    return result, {"memory_mib": memory, "memory_growth_mib": round(growth_mib(samples), 2)}


async def soak(url: str, load: Load, pid: int | None, every_s: float = 5.0) -> dict:
    """Run the load and sample the server's memory."""
    outcomes, memory = await watched(run(url, load), pid, every_s)
    return summary(outcomes) | memory


async def crowd(url: str, load: Load, span_s: float) -> list[list[Outcome]]:
    """Run load.num_requests clients for span_s seconds. Each sends its next request as soon as it
    has a response, so that all connections are in use all the time. Outcomes by client.
    """
    end = time.monotonic() + span_s

    async def client(number: int) -> list[Outcome]:
        draw, outcomes = random.Random(f"{load.seed} {number}"), []
        while not outcomes or time.monotonic() < end:
            outcomes.append(await ask(url, load.body(draw), time.monotonic()))
        return outcomes

    return list(await asyncio.gather(*map(client, range(load.num_requests))))


def _request(host: str, body: dict, key: str | None) -> bytes:
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", f"host: {host}", "content-type: application/json"]
    lines += [f"content-length: {len(data)}", "connection: close"]
    lines += [f"authorization: Bearer {key}"] if key else []
    return "\r\n".join([*lines, "", ""]).encode() + data


async def _read(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    outcome.status = int(head.split(b" ", 2)[1])
    if outcome.status != 200:
        outcome.error = (await reader.read(500)).decode(errors="replace").strip()
        return
    done = False
    while not done:
        data = await _chunk(reader)
        if not data:
            raise ValueError("the stream ended before it was done")
        done = _take(data, outcome)


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]


def _take(data: bytes, outcome: Outcome) -> bool:
    """Events of one piece; whether they are the last."""
    now = time.monotonic()
    for event in data.decode().split("\n\n"):
        if event == "data: [DONE]":
            return True
        if event.startswith("data: "):
            _note(json.loads(event.removeprefix("data: ")), outcome, now)
    return False


def _note(event: dict, outcome: Outcome, now: float) -> None:
    if "error" in event:
        outcome.error = event["error"]["message"]
    elif event["choices"]:
        if outcome.last_s is not None:
            outcome.gaps_s.append(now - outcome.last_s)
        outcome.first_s = outcome.first_s or now
        outcome.last_s = now
    else:
        outcome.num_tokens = event["usage"]["completion_tokens"]


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    at = lambda share: ranked[min(len(ranked) - 1, int(share * len(ranked)))] * 1000
    names = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(at(share), 2) for name, share in names.items()} if ranked else {}


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.openloop", description=__doc__)
    p.add_argument("url")
    p.add_argument("--rate", type=float, default=5.0, help="requests a second (default 5)")
    p.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default 60)")
    p.add_argument("--pid", type=int, help="of the server, to sample its memory")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    load = Load(max(1, round(args.rate * args.seconds)), args.rate, seed=args.seed)
    result = asyncio.run(soak(args.url, load, args.pid))
    print(json.dumps(result, indent=2))
    return 0 if result["answered"] == result["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
