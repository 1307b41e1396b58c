"""Data of the figures about papers: bytes and tiles of the published kernels, rates of devices."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import onchip
from onchip import masks
from onchip.cost import make_problem
from onchip.cost.hardware import TABLE, Hardware
from onchip.lab import traffic
from onchip.lab.published.ledger import TileVisit, ledger
from onchip.lab.rounding import round_significant
from onchip.lab.traffic import Chip
from onchip.parallel.machines import H200, LENGTHS

SRAM_BYTES = 100 * 1024  # of the papers
TITLES = {"standard": "Standard attention", "v1": "FlashAttention", "v2": "FlashAttention-2"}
KERNELS = {"standard": "paper_v0", "v1": "paper_v1", "v2": "paper_v2"}
FORMULAS: dict[str, Callable[..., Any]] = {
    "standard": traffic.standard,
    "v1": traffic.v1,
    "v2": traffic.v2,
}
HALF, HEAD_DIM = torch.float16, 64
SRAM = SRAM_BYTES // HALF.itemsize
RACED = tuple(2**n for n in range(8, 17))
EXECUTED = 2048  # the longest that runs while the page is written

# Algorithm 0 is three kernels: what each does, and which tensors it reads and writes.
PHASES = (
    ("S = QKᵀ is written to HBM", ("q", "k"), ("s",)),
    ("S is read, P = softmax(S) is written", ("s",), ("p", "l, m")),
    ("P is read, O = PV is written", ("p", "v"), ("o",)),
)


def race() -> dict[str, Any]:
    """The bytes that each algorithm moves for one head at each length, in the order in which they
    move.
    """
    return {
        "lengths": RACED,
        "executed": EXECUTED,
        "head_dim": HEAD_DIM,
        "dtype": str(HALF).removeprefix("torch."),
        "sram_bytes": SRAM_BYTES,
        "titles": TITLES,
        "runs": {name: [_count_moved(name, n) for n in RACED] for name in KERNELS},
        "devices": [_levels(device) for device in TABLE],
    }


def _count_moved(name: str, seqlen: int) -> dict[str, Any]:
    if seqlen <= EXECUTED:
        book = run_with_ledger(name, seqlen)
    else:
        book = count_traffic(name, seqlen, HEAD_DIM, HALF, SRAM)
    reads, writes = (_by_tensor(counts) for counts in (book.reads, book.writes))
    tensors = [t for t in ("q", "k", "v", "s", "p", "o", "l, m") if reads[t] or writes[t]]
    return {
        "phases": _phases(name, reads, writes),
        "tensors": {t.upper() if t != "l, m" else t: [reads[t], writes[t]] for t in tensors},
    }


def run_with_ledger(name: str, seqlen: int) -> Any:
    """Run a call and return its ledger."""
    q, k, v = inputs(seqlen, HEAD_DIM).to(HALF).unbind(0)
    with ledger(SRAM, scratch=HALF) as book:
        onchip.attention(q, k, v, kernel=KERNELS[name])
    return book


def count_traffic(
    name: str, seqlen: int, head_dim: int, dtype: torch.dtype, sram: float
) -> traffic.Traffic:
    """The counts of a call that is not run. Intermediates in HBM have the dtype of the inputs."""
    problem = make_problem(seqlen, head_dim=head_dim, dtype=dtype)
    return FORMULAS[name](problem, Chip(sram, scratch=dtype))


def _by_tensor(counts: Counter[str]) -> Counter[str]:
    """Initialising and converting are part of a tensor's traffic; l, m and lse are one line."""
    total: Counter[str] = Counter()
    for name, num_bytes in counts.items():
        base = name.split(".")[0]
        total["l, m" if base in ("l", "m", "lse") else base] += num_bytes
    return total


def _phases(name: str, reads: Counter[str], writes: Counter[str]) -> list[dict[str, Any]]:
    if name != "standard":
        what = (
            "tiles are read, O is written once"
            if name == "v2"
            else "tiles are read, O is read and written"
        )
        return [{"what": what, "read": reads.total(), "write": writes.total()}]
    total = lambda counts, tensors: sum(counts[t] for t in tensors)
    return [
        {"what": what, "read": total(reads, come), "write": total(writes, go)}
        for what, come, go in PHASES
    ]


def _levels(device: Hardware) -> dict[str, Any]:
    names = ("name", "size_bytes", "bytes_s", "latency_s")
    levels = [{name: getattr(level, name) for name in names} for level in device.levels]
    return {"name": device.name, "levels": levels}


SEQLEN, TILE, PATCHES, NUMBERS = 1024, 128, 8, 4
WATCHED = tuple(range(40, SEQLEN, 64))
WINDOW = 255
NEAR = 96  # tokens over which inputs are correlated
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (WINDOW, 0)},
    "blocks": {"mask": masks.butterfly()},
}


def loops() -> dict[str, Any]:
    """v1 and v2 under each mask: after every tile its position, the bytes so far, and the state of
    the watched rows in it; the pooled scores of each tile, as digits.
    """
    x = inputs(SEQLEN, HEAD_DIM)
    runs = {name: {mask: _Run(name, mask, x) for mask in MASKS} for name in KERNELS}
    exact = {mask: _rows(onchip.attention(*x, **options)) for mask, options in MASKS.items()}
    return {
        "seqlen": SEQLEN,
        "tile": TILE,
        "head_dim": HEAD_DIM,
        "dtype": "float32",
        "rows": WATCHED,
        "shown": NUMBERS,
        "patches": PATCHES,
        "runs": {name: {m: runs[name][m].data() for m in MASKS} for name in ("v1", "v2")},
        "standard": {mask: runs["standard"][mask].total for mask in MASKS},
        "scores": {mask: runs["v1"][mask].scores() for mask in MASKS},
        "exact": exact,
    }


class _Run:
    """One call of a published kernel, with the state of the watched rows after every tile."""

    def __init__(self, name: str, mask: str, x: Tensor):
        self.steps: list[list[int]] = []
        self.states: list[list[list[Any]]] = []
        self.pooled: dict[int, Tensor] = {}
        with ledger(watch=self._record, tiles=(TILE, TILE)) as book:
            onchip.attention(*x, kernel=KERNELS[name], **MASKS[mask])
        self.total = book.hbm_bytes

    def data(self) -> dict[str, Any]:
        return {"steps": self.steps, "states": self.states, "total": self.total}

    def _record(self, step: TileVisit) -> None:
        i, j = step.rows[0] // TILE, step.keys[0] // TILE
        self.steps.append([i, j, step.read_bytes, step.write_bytes])
        states = []
        for n, q in enumerate(WATCHED):
            if state := step.row(0, 0, q):
                m, l, acc = state
                states.append(
                    [
                        n,
                        round_significant(m),
                        round_significant(l),
                        *round_significant(acc[:NUMBERS]),
                    ]
                )
        self.states.append(states)
        patches = torch.nn.functional.max_pool2d(step.s[0, :1], TILE // PATCHES)
        self.pooled[i * (SEQLEN // TILE) + j] = patches.flatten()

    def scores(self) -> list[str]:
        """For each tile the largest score of each patch, as its sixteenth of all scores; a dot if
        the mask hides the whole patch, an empty string if the kernel skips the tile.
        """
        every = torch.cat(list(self.pooled.values()))
        edges = every[every > -torch.inf].quantile(torch.arange(1, 16) / 16)
        level = lambda x: "." if x == -torch.inf else f"{int(torch.bucketize(x, edges)):x}"
        tiles = (self.pooled.get(n, ()) for n in range((SEQLEN // TILE) ** 2))
        return ["".join(level(x) for x in tile) for tile in tiles]


def _rows(out: Tensor) -> Any:
    return round_significant(out[0, WATCHED, 0, :NUMBERS])


def inputs(seqlen: int, head_dim: int) -> Tensor:
    """q, k and v (3, 1, seqlen, 1, head_dim). Neighbouring tokens are correlated: otherwise the
    picture of the scores would be noise.
    """
    generator = torch.Generator().manual_seed(0)
    noise, steps = torch.randn(2, 3, seqlen, head_dim, generator=generator)
    walk = steps[0].cumsum(0)
    near = (walk - walk.roll(NEAR, 0)) / NEAR**0.5
    return (noise + torch.stack([near, near, noise[2]]))[:, None, :, None]


HEADS = tuple(2**n for n in range(13))
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)
CONTEXTS = tuple(2**n for n in range(8, 21))


def lengths() -> dict[str, Any]:
    """Per head: bytes moved, flops, exps and extra memory, by type, head_dim and length; the rates
    of devices; measured TFLOP/s of onchip's kernel. Bytes are the least of each algorithm,
    because a real chip has an L2 that keeps tiles: S and P, written and read, and every other
    tensor once.
    """
    kinds = {"standard": "standard", "flash": "v2"}
    rates = {d: H200.kernel(False, False, d).tflops for d in HEAD_DIMS}
    measured = {"device": H200.name, "dtype": "bfloat16", "lengths": LENGTHS, "tflops": rates}
    return {
        "lengths": CONTEXTS,
        "heads": HEADS,
        "head_dims": HEAD_DIMS,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in DTYPES],
        "counts": {
            kind: [[[_counts(name, n, d, t) for n in CONTEXTS] for d in HEAD_DIMS] for t in DTYPES]
            for kind, name in kinds.items()
        },
        "devices": [_rates(device) for device in TABLE],
        "measured": measured,
    }


def _counts(name: str, seqlen: int, head_dim: int, dtype: torch.dtype) -> list[int]:
    book = count_traffic(name, seqlen, head_dim, dtype, math.inf)
    extra = seqlen * (head_dim * dtype.itemsize + 4)  # out and lse
    if name == "standard":
        extra += 2 * seqlen**2 * dtype.itemsize  # S and P
    scores = book.flops // (4 * head_dim)  # each takes an exponential, as roofline.bound counts
    return [book.hbm_bytes, book.flops, scores, extra]


def _rates(device: Hardware) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory_bytes": device.memory.size_bytes,
        "bytes_s": device.memory_bytes_s,
        "flops": [round_significant(device.flops(dtype)) for dtype in DTYPES],
        "has_tensor": [device.has_tensor(dtype) for dtype in DTYPES],
        "exps_s": device.exps_s,
        "launch_s": device.launch_s,
    }
