"""Who is lost: every rank shows a pulse in the store of its group, and who waits in vain reads it.

A pulse is a beat, which stops with the process, and the number of operations that the rank has
begun, which stops when it stalls. Nothing is judged by it until an operation has failed; then the
first rank to judge writes its verdict into the store, and the others raise the same.
"""

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from onchip.parallel.facts import compare, name_ranks
from onchip.parallel.messages import ParallelError

BEAT_S = 1.0
LISTEN_BEATS = 2.5  # silence that long is the end of a process
KEPT_BEATS = 3.0  # of a timeout, for the judgement


class Watch:
    """The pulse of this rank in a store, and the judgement about those of all ranks."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float):
        self.beat_s = min(BEAT_S, timeout_s / 20)
        # clients of their own: one that waits for a key serves nobody else
        self._store, pulses = _client(store), _client(store)
        self._rank, self._size = rank, size
        self._verdict: ParallelError | None = None
        self._pulse = {"beat": 0, "ops": 0, "doing": "nothing yet"}
        stop = threading.Event()
        beat = (pulses, f"pulse/{rank}", self._pulse, self.beat_s, stop)
        _show(*beat[:3])
        threading.Thread(target=_beat, args=beat, daemon=True, name="onchip-pulse").start()
        weakref.finalize(self, stop.set)

    def begin(self, kind: str) -> None:
        """This rank begins an operation. What failed once stays so: connections are gone."""
        if self._verdict is not None:
            raise ParallelError(str(self._verdict), self._verdict.rank)
        self._pulse["ops"] += 1
        self._pulse["doing"] = kind

    def judge(self, suspect: int | None, cause: str) -> ParallelError:
        """The error to raise after an operation with `suspect` failed."""
        try:
            verdict = self._read_verdict() or self._listen(suspect)
            self._verdict = self._publish(verdict, cause)
        except RuntimeError as error:
            self._verdict = self._without_store(suspect, cause, error)
        return self._verdict

    def decide(self, number: int, text: str, fold: Callable[[list[str]], str], s: float) -> str:
        """fold(texts of all ranks), computed by the last to come. Meetings are numbered."""
        here, store = f"meeting/{number}", self._store
        store.set(f"{here}/{self._rank}", text)
        store.set(f"latest/{self._rank}", text)
        if store.add(f"{here}/arrived", 1) == self._size:
            store.set(f"{here}/result", fold(self._texts(here)))
        try:
            store.wait([f"{here}/result"], timedelta(seconds=s))
        except RuntimeError as error:
            raise self._absent(here, text, s) from error
        result = store.get(f"{here}/result").decode()
        self._clean(number - 2)  # all who come to this meeting have read that one's result
        return result

    def _texts(self, here: str) -> list[str]:
        return [t.decode() for t in self._store.multi_get([f"{here}/{r}" for r in self._ranks])]

    @property
    def _ranks(self) -> range:
        return range(self._size)

    def _clean(self, number: int) -> None:
        if number >= 0:
            self._store.delete_key(f"meeting/{number}/{self._rank}")
        if number >= 0 and self._rank == 0:
            self._store.delete_key(f"meeting/{number}/arrived")
            self._store.delete_key(f"meeting/{number}/result")

    def _absent(self, here: str, text: str, waited_s: float) -> ParallelError:
        """Some ranks did not come: what they brought last time may say why."""
        try:
            absent = [r for r in self._ranks if not self._store.check([f"{here}/{r}"])]
            verdict = self._read_verdict() or self._no_show(absent, text)
            self._verdict = self._publish(verdict, f"waited {waited_s:.3g} s for their facts")
        except RuntimeError as error:
            self._verdict = self._without_store(None, f"waited {waited_s:.3g} s", error)
        return self._verdict

    def _no_show(self, absent: Sequence[int], text: str) -> ParallelError:
        sentence = f"{name_ranks(absent)} did not come to agree on what is computed"
        latest = {r: self._store.get(f"latest/{r}") for r in absent if self._known(r)}
        difference = compare({self._rank: text} | {r: t.decode() for r, t in latest.items()})
        if difference is not None:
            sentence += f" (by what was said last, {difference})"
        return ParallelError(sentence, absent[0] if absent else None)

    def _known(self, rank: int) -> bool:
        return self._store.check([f"latest/{rank}"])

    def _listen(self, suspect: int | None) -> ParallelError:
        before = self._pulses()
        threading.Event().wait(LISTEN_BEATS * self.beat_s)
        after = self._pulses()
        if (verdict := self._read_verdict()) is not None:
            return verdict
        others = [r for r in self._ranks if r != self._rank]
        silent = [r for r in others if before[r] == after[r]]
        if silent:
            return ParallelError(f"{name_ranks(silent)} gave no sign of life", silent[0])
        return self._slowest(after, suspect)

    def _slowest(self, pulses: list[dict], suspect: int | None) -> ParallelError:
        ops = [pulse["ops"] for pulse in pulses]
        late = [r for r in self._ranks if ops[r] == min(ops)]
        if len(late) < self._size:
            where = f"operation {min(ops)} ({pulses[late[0]]['doing']})"
            sentence = f"{name_ranks(late)} stalled after {where}, others are at {max(ops)}"
            return ParallelError(sentence, late[0])
        if suspect is None:
            return ParallelError(f"no rank is behind at operation {ops[0]}: the network is slow")
        return ParallelError(f"rank {suspect} lives, but its messages do not arrive", suspect)

    def _pulses(self) -> list[dict]:
        keys = [f"pulse/{r}" for r in self._ranks]
        shown = [self._store.check([key]) for key in keys]
        nothing = {"beat": -1, "ops": 0, "doing": "nothing yet"}
        read = lambda key: json.loads(self._store.get(key))
        return [read(key) if there else nothing for key, there in zip(keys, shown, strict=True)]

    def _read_verdict(self) -> ParallelError | None:
        if not self._store.check(["verdict"]):
            return None
        said = json.loads(self._store.get("verdict"))
        return ParallelError(said["message"], said["rank"])

    def _publish(self, verdict: ParallelError, cause: str) -> ParallelError:
        """The first verdict stands, whoever wrote it."""
        told = json.dumps({"message": str(verdict), "rank": verdict.rank})
        said = json.loads(self._store.compare_set("verdict", "", told))
        return ParallelError(f"{said['message']} (rank {self._rank}: {cause})", said["rank"])

    def _without_store(self, suspect: int | None, cause: str, error: Exception) -> ParallelError:
        sentence = "the store of the group is gone, and with it the process that holds it"
        who = "rank 0, unless it is torchrun's agent" if suspect is None else f"rank {suspect}"
        return ParallelError(f"{sentence} ({who}); {cause}; {error}", suspect or 0)


def _client(store: Store) -> Store:
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]: the stub is older


def _show(store: Store, key: str, pulse: dict) -> None:
    store.set(key, json.dumps(pulse))


def _beat(store: Store, key: str, pulse: dict, beat_s: float, stop: threading.Event) -> None:
    while not stop.wait(beat_s):
        pulse["beat"] += 1
        try:
            _show(store, key, pulse)
        except RuntimeError:  # the store ended first: nobody can read a pulse any more
            return
