"""`onchip tune`: measure the tile tables of kernels/tiles.py on this GPU.

Calls never tune at run time. This command searches every row of a table: it compiles the rows that
differ from it in one field (`--quick`) or in at most two, holds them to the accuracy rule (in 8
bits, to their recipe) at odd lengths, and times them in turns by graph replay, like the candidates
of a benchmark. A row is worth replacing if another is faster by more than one per cent and by more
than the noise. `--write` writes these rows to the user's file of the device (kernels/tuned.py),
which later calls read; without it the command only prints them. VARIED of tuned.py has the values
that are tried for each field. The rows that candidates are compared with are the package's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import onchip
from onchip import quant
from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.harness import Case, Inaccurate, Row, Session, geomean
from onchip.cli.progress import Interruptible
from onchip.core.device import DeviceInfo, device_info
from onchip.kernels import tiles, tuned
from onchip.kernels.tuned import TEAMS, VARIED, is_consistent
from onchip.testing import assert_accurate, make_qkv, oracle, rmse

GAIN = 1.01
FP32_BYTES = 4  # in the keys of TRITON_DECODE
DECODE_BATCH = 32
CURRENT = "current"


class Table(NamedTuple):
    """A table of tiles.py, and the calls that use its rows."""

    name: str
    kernel: str
    way: str = ""  # forward or backward; "": the first part of a key says it
    masks: tuple[str, ...] = ("none", "causal")
    lengths: tuple[int, ...] = (2048, 8192)
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, Any], ...] = ()
    teams: bool = False  # the number of consumers may change
    fields: tuple[str, ...] = ()  # the fields of VARIED that its kernel has; (): all

    @property
    def precision(self) -> str | None:
        return dict(self.options).get("precision")


def _low_precision_table(name: str, precision: str) -> Table:
    """8-bit tiles are as wide as the blocks that share a scale, and consumers overlap one another:
    fields of tiles and of the order inside a consumer have no effect.
    """
    fields = ("num_stages", "q_stages", "named_barriers", "dynamic")
    options = (("precision", precision),)
    return Table(name, "hopper", "forward", options=options, teams=True, fields=fields)


HOPPER = (
    Table("HOPPER_FORWARD", "hopper", "forward", teams=True),
    Table("HOPPER_FORWARD_DENSE", "hopper", "forward", ("none",)),
    Table("HOPPER_FORWARD_SHORT", "hopper", "forward", ("causal",), (512, 1024), teams=True),
    Table("HOPPER_FORWARD_MASK", "hopper", "forward", ("blocks",), teams=True),
    Table("HOPPER_BACKWARD", "hopper", "backward"),
    Table("HOPPER_SPLIT", "hopper", "backward", options=(("deterministic", True),)),
    _low_precision_table("HOPPER_FP8", "fp8"),
    _low_precision_table("HOPPER_INT8", "int8"),
    _low_precision_table("HOPPER_INT8_PV16", "int8_pv16"),
)
MODIFIED = Table("TRITON_MODIFIED", "triton", options=(("softcap", 30.0),), lengths=(2048,))
TRITON = (
    Table("TRITON_FP32", "triton", dtype=torch.float32, lengths=(2048,)),
    Table("TRITON_DECODE", "triton", "decode", ("none",), (4096,)),
)
TRITON_WIDE = (
    Table("TRITON_SM90", "triton"),
    Table("TRITON_SM90_MASK", "triton", masks=("blocks",)),
    Table("TRITON_SHORT", "triton", "forward", lengths=(tiles.TRITON_SHORT_KEYS,)),
)
WAYS = {"dkdv": "backward", "dq": "backward", "forward": "forward", "decode": "decode"}


def tables(capability: tuple[int, int] | None) -> tuple[Table, ...]:
    """The tables that a device of this capability uses; None: a device of AMD."""
    if capability is None:
        modified = MODIFIED._replace(name="TRITON_AMD_MODIFIED")
        return (Table("TRITON_AMD", "triton"), modified, *TRITON)
    hopper = HOPPER if capability == (9, 0) else ()
    small = (Table("TRITON_SM120" if capability[0] == 12 else "TRITON_SM80", "triton"),)
    return (*hopper, *(TRITON_WIDE if capability[0] in (9, 10) else small), MODIFIED, *TRITON)


class Knob(NamedTuple):
    """One row of a table: the start of a search for a better row."""

    table: Table
    key: Any

    def __str__(self) -> str:
        return f"{self.table.name}[{tiles.show_key(self.key)}]"

    @property
    def row(self) -> Any:
        return getattr(tiles, self.table.name)[self.key]

    @property
    def parts(self) -> tuple:
        return self.key if isinstance(self.key, tuple) else (self.key,)

    @property
    def way(self) -> str:
        return self.table.way or WAYS[self.parts[0]]

    @property
    def head_dim(self) -> int:
        return next(x for x in self.parts if isinstance(x, int) and x >= 32)

    def cells(self, quick: bool) -> Iterator[Case]:
        lengths = self.table.lengths[-1:] if quick else self.table.lengths
        for mask, n in product(self.table.masks, lengths):
            batch = DECODE_BATCH if self.way == "decode" else max(1, gpu.TOKENS // n)
            heads = gpu.HIDDEN // self.head_dim
            backward = self.way == "backward"
            sizes = (self.table.dtype, self.head_dim, n, batch, heads)
            yield Case("tune", mask, *sizes, backward=backward, way=self.way)


def knobs(
    capability: tuple[int, int] | None,
    kernels: Sequence[str] = (),
    ways: Sequence[str] = (),
    head_dims: Sequence[int] = (),
) -> list[Knob]:
    """The rows to search; nothing chosen means everything. Rows for the gradients of a bias and of
    tensors of score_mod, and for single queries in fp32, are left as they are, and the tables that
    serve paged calls alone (TRITON_CHUNK, TRITON_KV8, HOPPER_FORWARD_PAGED), unequal head dims
    (HOPPER_FORWARD_MLA), the quantisation before a call (TRITON_ROTATE, TRITON_QUERIES,
    TRITON_TRANSPOSE), products of few rows (TRITON_PRODUCT) or tangents (TRITON_TANGENT and its
    variants).
    """
    knobs = [Knob(t, key) for t in tables(capability) for key in getattr(tiles, t.name)]
    left = {"dbias", "dcaptured", FP32_BYTES}
    known = [k for k in knobs if left.isdisjoint(k.parts)]
    wanted = lambda value, choice: not choice or value in choice
    return [
        k
        for k in known
        if wanted(k.table.kernel, kernels) and wanted(k.way, ways) and wanted(k.head_dim, head_dims)
    ]


def candidates(knob: Knob, most: int) -> dict[str, Any]:
    """The rows that differ from the current row in at most `most` fields, named by the difference;
    the current row is first.
    """
    row = knob.row
    changes = [
        [{name: value} for value in values if value != getattr(row, name)]
        for name, values in VARIED[type(row).__name__].items()
        if name in (knob.table.fields or row._fields)
        and not _follows_the_call(name, getattr(row, name))
    ]
    if knob.table.teams:
        changes.append([team for team in TEAMS if team["consumers"] != row.consumers])
    rows = {CURRENT: row}
    for count in range(1, most + 1):
        for fields in combinations(changes, count):
            for chosen in product(*fields):
                change = {name: value for part in chosen for name, value in part.items()}
                rows[_difference(change)] = row._replace(**change)
    return {name: row for name, row in rows.items() if is_consistent(row)}


def _follows_the_call(name: str, value: Any) -> bool:
    """Whether the field is a tile of 0, which the call determines and not the table."""
    return name.startswith("tile") and value == 0


def _difference(change: dict[str, Any]) -> str:
    return ", ".join(f"{n}={v}" for n, v in change.items() if not n.endswith("_regs"))


@dataclass
class Search:
    """One knob, its accurate candidates, and their speed relative to the current row, by cell.
    refused: the reason for each rejected candidate.
    """

    knob: Knob
    most: int = 2
    right: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, list[gpu.Paired]] = field(default_factory=dict)

    def steps(self, session: Session) -> Iterator[gpu.Step]:
        yield f"{self.knob}: compile and check", partial(self.check, session)
        for case in self.knob.cells(session.quick):
            yield f"{self.knob}: {case}", partial(self.time, session, case)

    def check(self, session: Session) -> list[Row]:
        """Check every candidate on odd lengths; if the current row fails, nothing is searched."""
        for name, row in candidates(self.knob, self.most).items():
            with self._try_row(session, name, row):
                self._check_accuracy(session.device)
                self.right[name] = row
        return []

    @contextmanager
    def _try_row(self, session: Session, name: str, row: Any) -> Iterator[None]:
        """A block in which `row` replaces the table's. A row that fails is rejected; a failure of
        the current row ends the step.
        """
        try:
            with tiles.trial(self.knob.table.name, self.knob.key, row):
                yield
        except Exception as error:
            gpu.still_there(session.device)
            self.right.pop(name, None)
            if name == CURRENT:
                raise
            self.refused[name] = gpu.sentence(error)

    def _check_accuracy(self, device: torch.device) -> None:
        """Outliers included: a stale row maximum is accurate on normal inputs, but may not be when
        one key has nearly all the weight.
        """
        lengths = (1, 1777) if self.knob.way == "decode" else (333, 555)
        lengths = tuple(min(n, self.knob.table.lengths[-1] - 3) for n in lengths)
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": self.knob.head_dim}
        shape |= {"dtype": self.knob.table.dtype, "device": device}
        attend = partial(onchip.attention, kernel=self.knob.table.kernel)
        for mask, distribution in product(self.knob.table.masks, ("normal", "outlier")):
            options = dict(self.knob.table.options) | {"causal": mask == "causal"}
            if mask == "blocks":
                options["mask"] = onchip.masks.mod(lambda b, h, q, k: (q // 128 + k) % 3 != 0)
            qkv = make_qkv(2, *lengths, distribution=distribution, **shape)
            if self.knob.table.precision:
                _assert_follows_recipe(attend, *qkv, **options)
            else:
                assert_accurate(attend, *qkv, grad=self.knob.way == "backward", **options)

    def time(self, session: Session, case: Case) -> list[Row]:
        """Time all candidates in turns; one row each."""
        if CURRENT not in self.right:
            return []
        call = calls(session, self.knob, case)
        captures, control = {}, None
        for name, row in list(self.right.items()):
            with self._try_row(session, name, row):  # a graph keeps the row it is captured with
                captures[name] = gpu.capture_calls(call, case.backward)
                control = control or gpu.capture_calls(call, case.backward)
        rounds = gpu.QUICK_ROUNDS if session.quick else gpu.ROUNDS
        timing = gpu.time_captures(captures, control, rounds)
        ratios = {name: timing.against(name, CURRENT) for name in self.right}
        for name, ratio in ratios.items():
            self.ratios.setdefault(name, []).append(ratio)
        return [self._row(case, name, timing, ratio) for name, ratio in ratios.items()]

    def _row(self, case: Case, name: str, timing: gpu.Timing, ratio: gpu.Paired) -> Row:
        peers = {CURRENT: timing.ms(CURRENT)}
        columns = {"peers": peers, "best_peer": CURRENT, "ratio": ratio.ratio}
        row = case.row(self.knob.table.kernel, timing.ms(name), "ms", **columns)
        columns = {
            "table": self.knob.table.name,
            "key": tiles.show_key(self.knob.key),
            "candidate": name,
        }
        off = abs(timing.control - 1)
        doubts = [f"its A/A control is off by {off:.1%}"] if off > gpu.CONTROL_LIMIT else []
        columns |= {"config": self.right[name]._asdict(), "band": list(ratio[1:]), "doubts": doubts}
        return row | columns | {"control": timing.control, "tries": timing.tries}

    def is_complete(self, quick: bool) -> bool:
        """Whether every cell was timed."""
        return len(self.ratios.get(CURRENT, ())) == len(list(self.knob.cells(quick)))

    def gains(self) -> dict[str, float]:
        """Mean speed relative to the current row over the cells, the fastest first."""
        timed = {name: ratios for name, ratios in self.ratios.items() if name in self.right}
        means = {name: geomean([r.ratio for r in ratios]) for name, ratios in timed.items()}
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    @property
    def best(self) -> str:
        """The fastest that beats the current row by GAIN and, on average, in nine of ten rounds."""
        for name, gain in self.gains().items():
            if gain >= GAIN and geomean([r.low for r in self.ratios[name]]) > 1.0:
                return name
        return CURRENT

    @property
    def measurement(self) -> tuned.Measurement:
        """What a file says about the knob."""
        table, key, best = self.knob.table.name, self.knob.key, self.best
        if best == CURRENT:
            return tuned.Measurement(table, key)
        cells = len(self.ratios[best])
        return tuned.Measurement(table, key, self.right[best], self.gains()[best], cells)


def _assert_follows_recipe(attend: Callable, q, k, v, *, precision: str, causal: bool) -> None:
    """As exact as the executable reference of `precision`."""
    exact = oracle(q, k, v, causal=causal).out
    recipe, _ = quant.attend(quant.recipes.RECIPES[precision], q, k, v, causal=causal)
    got = attend(q, k, v, precision=precision, causal=causal, out_dtype=torch.float32)
    error, bound = rmse(got, exact), 1.1 * rmse(recipe, exact)
    if not error <= bound:
        raise Inaccurate(f"its RMSE is {error:.2e}, and the recipe's allows {bound:.2e}")


def calls(session: Session, knob: Knob, case: Case) -> gpu.GpuCandidate:
    """The timed call, over sets of inputs that exceed the L2."""
    sets = gpu.draw_sets(case, session.device)
    options = dict(knob.table.options) | {"causal": case.mask == "causal"}
    if case.mask == "blocks":
        options |= patterns.blocks(case.seqlen, 0.25, session.device).options
    if knob.way == "decode":
        kv_heads = max(1, case.num_heads // 4)
        sets = [(q[:, -1:], k[:, :, :kv_heads], v[:, :, :kv_heads]) for q, k, v in sets]
    attend = partial(onchip.attention, kernel=knob.table.kernel, **options)
    return gpu.GpuCandidate("onchip", attend, sets, lambda *_: {}, ours=True)


def run(session: Session, choose: Callable[[tuple[int, int] | None], list[Knob]]) -> list[Search]:
    """Search every knob that choose(capability) names; ValueError if there is none, or no GPU.
    Ctrl-C leaves the searches that were completed.
    """
    if not torch.cuda.is_available():
        raise ValueError("tile sizes are measured on the GPU they are for, and torch finds none")
    chosen = choose(this_gpu().capability)
    if not chosen:
        raise ValueError("no row of kernels/tiles.py fits that choice on this GPU")
    searches = [Search(knob, 1 if session.quick else 2) for knob in chosen]
    with Interruptible() as work:
        gpu.run(session, lambda: (step for search in searches for step in search.steps(session)))
    session.was_interrupted = work.was_interrupted
    return [s for s in searches if not session.was_interrupted or s.is_complete(session.quick)]


def this_gpu() -> DeviceInfo:
    return device_info(torch.device("cuda", torch.cuda.current_device()))


def write(searches: Sequence[Search], device: DeviceInfo) -> Path:
    """Write the winners to the file of the device. A knob whose current row could not be timed is
    left as the file has it.
    """
    timed = [s for s in searches if s.gains()]
    return tuned.write(device, [s.measurement for s in timed])


def print_searches(console, searches: Sequence[Search]) -> None:
    """The five fastest candidates of every knob, then the rows that beat the package's."""
    from rich.table import Table as Grid

    grid = Grid("row", "candidate", "speed", "band")
    for search in searches:
        for name, gain in list(search.gains().items())[:5]:
            low, high = (geomean([r[i] for r in search.ratios[name]]) for i in (1, 2))
            mark = " *" if name == search.best and name != CURRENT else ""
            grid.add_row(str(search.knob), name + mark, f"{gain:.3f}x", f"{low:.3f} to {high:.3f}")
    console.print(grid)
    for search in searches:
        for name, reason in search.refused.items():
            console.print(f"left out: {search.knob} {name}: {reason}", markup=False, soft_wrap=True)
    console.print("\n".join(lines(searches)), markup=False, highlight=False, soft_wrap=True)


def lines(searches: Sequence[Search]) -> list[str]:
    """The winners as rows of tiles.py."""
    better = [s for s in searches if s.best != CURRENT]
    if not better:
        return ["# every row of tiles.py is kept"]
    comment = lambda s: f"# {s.gains()[s.best]:.3f}x, {s.best}"
    return [f"{s.knob} = {s.right[s.best]}  {comment(s)}" for s in better]
