"""`onchip bench cpu`: this CPU against torch SDPA in the same run.

Both read the same memory, heads first: the layout SDPA likes best, and a view to onchip. A dense
mask is built before the clock starts, and SDPA is given it as bool or as float, whichever is
faster. The padded peer of packed rows gets no mask where causality makes one needless.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import patterns
from onchip.cli.bench.harness import Candidate, Case, Exact, Row, Session, Threshold, hold
from onchip.cli.bench.measure import peak_extra_bytes
from onchip.cli.bench.patterns import Pattern, document_ends
from onchip.cli.bench.peers import heads_first, sdpa
from onchip.core.machine import has_fast_matmul
from onchip.masks.blockmask import BlockMask
from onchip.testing import make_packed, make_qkv, oracle, rmse

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192), (64, 128)
MASKED_LENGTH = 8192
# 64 to 2048, even in the logarithm
PACKED_LENGTHS = [round(64 * 32 ** (i / 15)) for i in range(16)]
MASK_TOKENS, MASK_DOCUMENTS = 131072, 32
MEMORY_LENGTH = 65536
Step = tuple[str, Callable[[], Row]]


def dtypes() -> list[torch.dtype]:
    """Of the rows against SDPA, which takes a thousand times as long without instructions for
    them.
    """
    return [dtype for dtype in DTYPES if has_fast_matmul(dtype)]


def _is(bench: str, way: str | None = None, **columns: str) -> Callable[[Row], bool]:
    """Rows of a benchmark, of one pass if `way` is given, with these columns."""
    wanted = {"bench": bench, **columns} | ({"pass": way} if way else {})
    return lambda row: all(row[name] == value for name, value in wanted.items())


FORWARD, BOTH = "forward", "forward+backward"
WINDOW, DOCUMENTS, BLOCKS = "window 256", "16 documents", "10% of blocks"
THRESHOLDS = (
    Threshold("forward", _is("dense", FORWARD), at_least=0.95),
    Threshold("forward+backward, fp32", _is("dense", BOTH, dtype="float32"), at_least=0.90),
    Threshold(
        "forward+backward, bf16",
        _is("dense", BOTH, dtype="bfloat16"),
        at_least=0.55,
        optional=True,  # of CPUs that have instructions for bf16
    ),
    Threshold("window", _is("masked", FORWARD, mask=WINDOW), at_least=8),
    Threshold("documents", _is("masked", FORWARD, mask=DOCUMENTS), at_least=6),
    Threshold("random blocks", _is("masked", FORWARD, mask=BLOCKS), at_least=5),
    Threshold("window, forward+backward", _is("masked", BOTH, mask=WINDOW), at_least=4),
    Threshold("documents, forward+backward", _is("masked", BOTH, mask=DOCUMENTS), at_least=4),
    Threshold("packed against padded", _is("packed"), at_least=2.5),
    Threshold("memory, forward", _is("memory", FORWARD), at_most=64),
    Threshold("memory, forward+backward", _is("memory", BOTH), at_most=160),
    Threshold("building a mask", _is("mask build"), at_most=20),
    Threshold("import", _is("import"), at_most=300),
    Threshold("host time of a call", _is("host"), at_most=60),
)


def run(session: Session) -> None:
    if session.seqlens or session.head_dims or session.flex:
        raise ValueError("--seqlens, --head-dims and --flex are for the benchmarks of a GPU")
    if len(dtypes()) < len(DTYPES):
        session.note(
            "this CPU has no instructions for bf16: rows of it would measure torch's loops"
        )
    torch.set_num_threads(session.threads)
    kinds = (dense_steps, masked_steps, packed_steps, other_steps)
    session.run(step for steps in kinds for step in steps(session))


def dense_steps(session: Session) -> Iterator[Step]:
    lengths, head_dims = ((256,), (64,)) if session.quick else (LENGTHS, HEAD_DIMS)
    for backward, dtype, head_dim, n in product((False, True), dtypes(), head_dims, lengths):
        for pattern in (patterns.dense(n), patterns.causal(n)):
            case = Case("dense", pattern.name, dtype, head_dim, n, backward=backward)
            peers = {"sdpa": {"is_causal": pattern.name == "causal"}}
            yield str(case), partial(contest, session, case, pattern, lambda peers=peers: peers)


def masked_steps(session: Session) -> Iterator[Step]:
    n = 1024 if session.quick else MASKED_LENGTH
    forward = (patterns.window(n), patterns.documents(n), patterns.blocks(n))
    for backward, chosen in ((False, forward), (True, forward[:2])):
        for pattern, dtype in product(chosen, dtypes()):
            case = Case("masked", pattern.name, dtype, 64, n, backward=backward)
            peers = partial(dense_peers, pattern, n, dtype)
            yield str(case), partial(contest, session, case, pattern, peers)


def contest(
    session: Session, case: Case, pattern: Pattern, peers: Callable[[], dict[str, dict]]
) -> Row:
    """One row against SDPA; peers() gives the options of each way to call SDPA."""
    sizes: dict[str, Any] = dict(num_heads=case.num_heads, head_dim=case.head_dim, dtype=case.dtype)
    q, k, v = x = tuple(heads_first(t) for t in make_qkv(case.batch, case.seqlen, **sizes))
    kernel = onchip.explain(q, k, v, **pattern.options).plan.kernel
    ours = Candidate("onchip", partial(onchip.attention, **pattern.options), x)
    rivals = [Candidate(name, partial(sdpa, **mask), x) for name, mask in peers().items()]
    return session.contest(case, kernel, ours, rivals, Exact(q, k, v, pattern.visible))


def dense_peers(pattern: Pattern, n: int, dtype: torch.dtype) -> dict[str, dict]:
    as_bool = pattern.visible(torch.arange(n))
    as_float = torch.zeros(n, n, dtype=dtype).masked_fill_(~as_bool, float("-inf"))
    return {"sdpa bool mask": {"attn_mask": as_bool}, "sdpa float mask": {"attn_mask": as_float}}


def packed_steps(session: Session) -> Iterator[Step]:
    lengths = [n // 8 for n in PACKED_LENGTHS] if session.quick else PACKED_LENGTHS
    for dtype in dtypes():
        for causal in (False, True):
            mask = "causal" if causal else "none"
            case = Case("packed", mask, dtype, 64, sum(lengths), len(lengths), num_heads=4)
            yield str(case), partial(packed_contest, session, case, lengths, causal)


def packed_contest(session: Session, case: Case, lengths: list[int], causal: bool) -> Row:
    """onchip.varlen_attention against SDPA on the same sequences padded to the longest."""
    x = make_packed(lengths, num_heads=case.num_heads, head_dim=case.head_dim, dtype=case.dtype)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    attend = lambda q, k, v: onchip.varlen_attention(q, k, v, causal=causal, **x.options)
    padded = tuple(heads_first(pad(t, real)) for t in x[:3])
    hidden = {"is_causal": True} if causal else {"attn_mask": real[:, None, None]}
    ours = Candidate("onchip", attend, x[:3])
    peer = Candidate("sdpa padded", partial(sdpa, **hidden), padded, lambda out: out[real])
    kernel = onchip.explain(*x[:3], causal=causal, **x.options).plan.kernel
    return session.contest(case, kernel, ours, [peer], PackedExact(x, causal))


def pad(x: Tensor, real: Tensor) -> Tensor:
    """(total, heads, head_dim) -> (batch, longest, heads, head_dim), zero where `real` is False."""
    padded = x.new_zeros(*real.shape, *x.shape[1:])
    padded[real] = x
    return padded


class PackedExact:
    """The check of packed results: all rows, sequence by sequence."""

    def __init__(self, x, causal: bool):
        self.x, self.options = x, {"causal": causal, **x.options}
        cu = {name: self.options[name] for name in ("causal", "cu_seqlens_q", "cu_seqlens_k")}
        self.out = oracle(*x[:3], **cu).out

    def check(self, candidate: Candidate, backward: bool) -> float:
        hold(candidate.forward(), *self.x[:3], grad=backward, **self.options)
        return self.error(candidate)

    def error(self, candidate: Candidate) -> float:
        return rmse(candidate.to_check_layout(candidate.forward()), self.out)


def other_steps(session: Session) -> Iterator[Step]:
    n = 4096 if session.quick else MEMORY_LENGTH
    for backward in (False, True):
        case = Case("memory", "none", torch.float32, 64, n, num_heads=1, backward=backward)
        yield str(case), partial(memory, case)
    tokens = 8192 if session.quick else MASK_TOKENS
    name = f"{MASK_DOCUMENTS} docs, causal"
    yield "building a mask", partial(mask_time, Case("mask build", name, None, 0, tokens))
    yield "the size of a mask", partial(mask_memory, Case("mask size", name, None, 0, tokens))
    yield "import", partial(import_time, 1 if session.quick else 3)
    yield "host time of a call", partial(host_time, session)


def memory(case: Case) -> Row:
    """Peak memory beyond the inputs, in a process of its own."""
    run_peak = f"print_peak({case.seqlen}, {case.backward})"
    peak = float(child(f"from onchip.cli.bench.cpu import print_peak; {run_peak}"))
    kernel = onchip.explain(*make_qkv(1, 1, num_heads=1)).plan.kernel
    return case.row(kernel, peak / 1e6, "MB")


def print_peak(n: int, backward: bool) -> None:
    """Runs in the child: one call over n tokens, after a small one that loads what is to load."""
    peak = None
    for seqlen in (128, n):
        ours = Candidate("onchip", onchip.attention, make_qkv(1, seqlen, num_heads=1))
        _ = ours.dout if backward else None
        peak, _ = peak_extra_bytes(ours.job(backward), torch.device("cpu"))
    print(peak)


def build_mask(tokens: int) -> BlockMask:
    ends = document_ends(tokens, MASK_DOCUMENTS).int()
    mask = onchip.masks.document(ends) & onchip.masks.causal()
    return mask.build(1, 1, tokens, tokens)


def mask_time(case: Case) -> Row:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        build_mask(case.seqlen)
        times.append(time.perf_counter() - start)
    return case.row("masks", statistics.median(times) * 1e3, "ms")


def mask_memory(case: Case) -> Row:
    tensors = build_mask(case.seqlen).tensors()
    return case.row("masks", sum(t.numel() * t.element_size() for t in tensors) / 1e6, "MB")


def import_time(runs: int) -> Row:
    """What `import onchip` adds to `import torch`."""
    code = (
        "import time, torch; t = time.perf_counter(); import onchip; print(time.perf_counter() - t)"
    )
    least = min(float(child(code)) for _ in range(runs))
    return Case("import", "none", None, 0, 0).row("none", least * 1e3, "ms")


def host_time(session: Session, calls: int = 300) -> Row:
    """A call so small that only its fixed cost is left, without gradients."""
    q, k, v = make_qkv(1, 4, num_heads=1, head_dim=8)
    theirs = tuple(heads_first(x) for x in (q, k, v))
    candidates = (Candidate("onchip", onchip.attention, (q, k, v)), Candidate("sdpa", sdpa, theirs))
    repeat = lambda job: lambda: [job() for _ in range(calls)]
    best = session.clock({c.name: repeat(c.job(False)) for c in candidates})
    case = Case("host", "none", torch.float32, 8, 4, num_heads=1)
    per_call_us = {name: t / calls * 1e6 for name, t in best.items()}
    kernel = onchip.explain(q, k, v).plan.kernel
    peers = {"sdpa": per_call_us["sdpa"]}
    ratio = per_call_us["sdpa"] / per_call_us["onchip"]
    return case.row(kernel, per_call_us["onchip"], "us", peers=peers, best_peer="sdpa", ratio=ratio)


def child(code: str) -> str:
    """The output of a fresh Python that has the same torch threads as this one. Torch for ARM
    includes mimalloc, which returns freed memory at once in this process: memory that it kept would
    hide what a measured call takes.
    """
    code = f"import torch; torch.set_num_threads({torch.get_num_threads()}); {code}"
    root = str(Path(onchip.__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"the measuring process failed:\n{done.stderr}")
    return done.stdout
