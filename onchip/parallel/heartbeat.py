"""Finds out which rank is lost: every rank writes a heartbeat into the store of its group, and
after a failed operation a rank reads the heartbeats of all.

    {"beat": 17, "ops": 42, "doing": "shift"}
      beat   counts up once a second; it stops when the process ends
      ops    operations begun; it stops when the rank stalls
      doing  the kind of the last operation

Heartbeats are read only after an operation has failed or timed out. The first rank to make a
diagnosis writes it into the store, and all other ranks raise the same.
"""

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from onchip.parallel.comm_base import ParallelError
from onchip.parallel.consistency import find_difference, name_ranks

BEAT_S = 1.0
SILENT_BEATS = 4.0  # a process without a beat for that long has ended
DIAGNOSIS_BEATS = 6.0  # of each timeout, left for the diagnosis: a busy machine is late
NO_HEARTBEAT = {"beat": -1, "ops": 0, "doing": "nothing"}


class HeartbeatMonitor:
    """Writes the heartbeat of one of `ranks` into their store, and diagnoses lost ranks.

    Ranks are global ranks, whatever the group. The diagnosis is in the store of the whole job,
    because ranks of other groups may wait for a rank that has raised it.
    """

    beat_s: float
    ranks: tuple[int, ...]

    def __init__(self, store: Store, job: Store, ranks: Sequence[int], rank: int, timeout_s: float):
        self.beat_s = min(BEAT_S, timeout_s / 20)
        # Three clients: one that waits for a key blocks all its other requests.
        self._store, self._job, heartbeats = _client(store), _client(job), _client(store)
        self.ranks, self._rank = tuple(ranks), rank
        self._diagnosis: ParallelError | None = None
        self._heartbeat = {"beat": 0, "ops": 0, "doing": "nothing"}
        stop = threading.Event()
        beat = (heartbeats, f"heartbeat/{rank}", self._heartbeat, self.beat_s, stop)
        _write(*beat[:3])
        thread = threading.Thread(target=_beat, args=beat, daemon=True, name="onchip-heartbeat")
        thread.start()
        weakref.finalize(self, stop_thread, thread, stop.set)

    def begin_operation(self, kind: str) -> None:
        """Count an operation. After a diagnosis every operation raises it."""
        if self._diagnosis is not None:
            raise ParallelError(str(self._diagnosis), self._diagnosis.rank)
        self._heartbeat["ops"] += 1
        self._heartbeat["doing"] = kind

    def diagnose(self, suspect: int | None, cause: str) -> ParallelError:
        """The error to raise after an operation with `suspect` failed."""
        return self._publish(
            lambda: self._find_dead(self.ranks) or self._find_stalled(suspect), suspect, cause
        )

    def exchange_texts(self, number: int, text: str, s: float) -> list[str]:
        """The texts of all ranks, in rank order. number: the exchange, alike on all ranks."""
        prefix, store = f"texts/{number}", self._store
        cause = f"waited {s:.3g} s for the call of other ranks"
        keys = [f"{prefix}/{rank}" for rank in self.ranks]
        try:
            store.set(f"{prefix}/{self._rank}", text)
            store.wait(keys, timedelta(seconds=s))
            texts = [value.decode() for value in store.multi_get(keys)]
            if number > 2:  # all ranks have read the texts of the last exchange but one
                store.delete_key(f"texts/{number - 2}/{self._rank}")
        except RuntimeError as error:
            raise self._publish(lambda: self._diagnose_absent(prefix), None, cause) from error
        return texts

    def _publish(
        self, diagnose: Callable[[], ParallelError], suspect: int | None, cause: str
    ) -> ParallelError:
        """The diagnosis in the store; if none, that of diagnose(), written to the store."""
        try:
            diagnosis = self._read_diagnosis() or diagnose()
            first = _from_text(self._job.compare_set("diagnosis", "", _to_text(diagnosis)))
            self._diagnosis = ParallelError(f"{first} (rank {self._rank}: {cause})", first.rank)
        except RuntimeError as error:
            self._diagnosis = _without_store(suspect, cause, error)
        return self._diagnosis

    def _read_diagnosis(self) -> ParallelError | None:
        is_written = self._job.check(["diagnosis"])
        return _from_text(self._job.get("diagnosis")) if is_written else None

    def _diagnose_absent(self, prefix: str) -> ParallelError:
        """Names the ranks without a text in an exchange: dead ones, or else all of them."""
        absent = [r for r in self.ranks if not self._store.check([f"{prefix}/{r}"])]
        if (dead := self._find_dead(absent)) is not None:
            return dead
        if not absent:
            return ParallelError("all ranks made the call, too late: is the store slow?")
        sentence = f"{name_ranks(absent)} did not make this call"
        return ParallelError(sentence, self._minority_rank(absent))

    def _minority_rank(self, ranks: Sequence[int]) -> int:
        """The first of these ranks or of all others, whichever are fewer."""
        others = [r for r in self.ranks if r not in ranks]
        return min(ranks, others or ranks, key=len)[0]

    def _find_dead(self, ranks: Sequence[int]) -> ParallelError | None:
        """Names ranks without a new heartbeat for SILENT_BEATS."""
        before = self._read_heartbeats()
        threading.Event().wait(SILENT_BEATS * self.beat_s)
        after = self._read_heartbeats()
        silent = [r for r in ranks if r != self._rank and before[r] == after[r]]
        silent.sort(key=lambda r: after[r]["ops"])
        sentence = f"{name_ranks(silent)} sent no heartbeat"
        return self._read_diagnosis() or (ParallelError(sentence, silent[0]) if silent else None)

    def _find_stalled(self, suspect: int | None) -> ParallelError:
        heartbeats = self._read_heartbeats()
        ops = {r: heartbeats[r]["ops"] for r in self.ranks}
        least, most = min(ops.values()), max(ops.values())
        late = [r for r in self.ranks if ops[r] == least]
        if least < most:
            where = f"operation {least} ({heartbeats[late[0]]['doing']})"
            sentence = f"{name_ranks(late)} stalled after {where}, others are at {most}"
            return ParallelError(sentence, self._minority_rank(late))
        return self._find_mismatch(heartbeats) or self._diagnose_network(suspect)

    def _find_mismatch(self, heartbeats: dict[int, dict]) -> ParallelError | None:
        """Names ranks in different operations, which wait for one another."""
        return find_difference(
            {r: json.dumps({"the operation": heartbeats[r]["doing"]}) for r in self.ranks}
        )

    def _diagnose_network(self, suspect: int | None) -> ParallelError:
        if suspect is None:
            return ParallelError("all ranks are at the same operation: is the network slow?")
        return ParallelError(f"rank {suspect} is alive, but its messages do not arrive", suspect)

    def _read_heartbeats(self) -> dict[int, dict]:
        texts = {r: self._get(f"heartbeat/{r}") for r in self.ranks}
        return {r: NO_HEARTBEAT if t is None else json.loads(t) for r, t in texts.items()}

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def stop_thread(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """Stop and join a thread before the interpreter ends. A thread that returned from the store
    later would abort the process.
    """
    stop()
    if thread is not threading.current_thread():
        thread.join(5.0)


def _client(store: Store) -> Store:
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]: the stub is older


def _write(store: Store, key: str, heartbeat: dict) -> None:
    store.set(key, json.dumps(heartbeat))


def _beat(store: Store, key: str, heartbeat: dict, beat_s: float, stop: threading.Event) -> None:
    while not stop.wait(beat_s):
        heartbeat["beat"] += 1
        try:
            _write(store, key, heartbeat)
        except RuntimeError:  # the store ended first: no rank can read heartbeats any more
            return


def _to_text(error: ParallelError) -> str:
    return json.dumps({"message": str(error), "rank": error.rank})


def _from_text(text: bytes) -> ParallelError:
    fields = json.loads(text)
    return ParallelError(fields["message"], fields["rank"])


def _without_store(suspect: int | None, cause: str, error: Exception) -> ParallelError:
    """Without the store no heartbeat can be read. Rank 0 holds it, unless torchrun's agent does."""
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    lost = suspect if in_agent else 0
    name = "" if lost is None else f"rank {lost} is lost: "
    reason = str(error).partition("\n")[0]
    return ParallelError(f"{name}the store of the group is gone ({cause}; {reason})", lost)
