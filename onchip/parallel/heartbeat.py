"""Who is lost: every rank shows a heartbeat in the store of its group, and who waits in vain reads it.

A heartbeat is a beat, which stops with the process, and the number of operations that the rank has
begun, which stops when it stalls. Nothing is judged by it until an operation has failed; then the
first rank to diagnose writes its diagnosis into the store, and the others raise the same.
"""

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from onchip.parallel.consistency import find_difference, name_ranks
from onchip.parallel.messages import ParallelError

BEAT_S = 1.0
SILENT_BEATS = 4.0  # silence that long is the end of a process
DIAGNOSIS_BEATS = 6.0  # of a timeout, for the judgement: a busy machine is late with everything
NO_HEARTBEAT = {"beat": -1, "ops": 0, "doing": "nothing"}


class HeartbeatMonitor:
    """The heartbeat of one of `ranks` in their store, and the judgement about all of them. Ranks are
    those of the job, whatever group they form here, and the diagnosis is in the store of the job: a
    rank that leaves because of it may be missed in other groups.
    """

    def __init__(self, store: Store, job: Store, ranks: Sequence[int], rank: int, timeout_s: float):
        self.beat_s = min(BEAT_S, timeout_s / 20)
        # clients of their own: one that waits for a key serves nobody else
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
        """This rank begins an operation. What failed once stays so: connections are gone."""
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
        """The texts of all ranks, in their order. Meetings are numbered."""
        here, store = f"meeting/{number}", self._store
        cause = f"waited {s:.3g} s for what others compute"
        keys = [f"{here}/{rank}" for rank in self.ranks]
        try:
            store.set(f"{here}/{self._rank}", text)
            store.wait(keys, timedelta(seconds=s))
            texts = [found.decode() for found in store.multi_get(keys)]
            if number > 2:  # every rank that is here has read the texts of the last but one
                store.delete_key(f"meeting/{number - 2}/{self._rank}")
        except RuntimeError as error:
            raise self._publish(lambda: self._diagnose_absent(here), None, cause) from error
        return texts

    def _publish(
        self, diagnose: Callable[[], ParallelError], suspect: int | None, cause: str
    ) -> ParallelError:
        """The diagnosis: that of the first who judged, or else diagnose()."""
        try:
            diagnosis = self._read_diagnosis() or diagnose()
            said = self._job.compare_set("diagnosis", "", _to_text(diagnosis))
            first = _from_text(said)
            self._diagnosis = ParallelError(f"{first} (rank {self._rank}: {cause})", first.rank)
        except RuntimeError as error:
            self._diagnosis = _without_store(suspect, cause, error)
        return self._diagnosis

    def _read_diagnosis(self) -> ParallelError | None:
        there = self._job.check(["diagnosis"])
        return _from_text(self._job.get("diagnosis")) if there else None

    def _diagnose_absent(self, here: str) -> ParallelError:
        """Ranks that are lost, or else did not come to a meeting."""
        absent = [r for r in self.ranks if not self._store.check([f"{here}/{r}"])]
        if (lost := self._find_dead(absent)) is not None:
            return lost
        if not absent:
            return ParallelError("all ranks came to agree, too late: is the store slow?")
        sentence = f"{name_ranks(absent)} did not come to agree on what is computed"
        return ParallelError(sentence, self._minority_rank(absent))

    def _minority_rank(self, ranks: Sequence[int]) -> int:
        """One of the fewer: these ranks, or all others."""
        others = [r for r in self.ranks if r not in ranks]
        return min(ranks, others or ranks, key=len)[0]

    def _find_dead(self, ranks: Sequence[int]) -> ParallelError | None:
        """Listens for a while to those who may be gone."""
        before = self._read_heartbeats()
        threading.Event().wait(SILENT_BEATS * self.beat_s)
        after = self._read_heartbeats()
        silent = [r for r in ranks if r != self._rank and before[r] == after[r]]
        silent.sort(key=lambda r: after[r]["ops"])
        sentence = f"{name_ranks(silent)} gave no sign of life"
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
        """Ranks that compute different things wait for one another."""
        return find_difference(
            {r: json.dumps({"the operation": heartbeats[r]["doing"]}) for r in self.ranks}
        )

    def _diagnose_network(self, suspect: int | None) -> ParallelError:
        if suspect is None:
            return ParallelError("all ranks are at the same operation: is the network slow?")
        return ParallelError(f"rank {suspect} lives, but its messages do not arrive", suspect)

    def _read_heartbeats(self) -> dict[int, dict]:
        shown = {r: self._get(f"heartbeat/{r}") for r in self.ranks}
        return {r: NO_HEARTBEAT if said is None else json.loads(said) for r, said in shown.items()}

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def stop_thread(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """Before the interpreter ends: a thread that comes back from the store later aborts it."""
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
        except RuntimeError:  # the store ended first: nobody can read a heartbeat any more
            return


def _to_text(error: ParallelError) -> str:
    return json.dumps({"message": str(error), "rank": error.rank})


def _from_text(text: bytes) -> ParallelError:
    said = json.loads(text)
    return ParallelError(said["message"], said["rank"])


def _without_store(suspect: int | None, cause: str, error: Exception) -> ParallelError:
    """Rank 0 holds the store, unless torchrun's agent does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    who = suspect if agent else 0
    named = "" if who is None else f"rank {who} is lost: "
    told = str(error).partition("\n")[0]
    return ParallelError(f"{named}the store of the group is gone ({cause}; {told})", who)
