"""`onchip bench cpu`: this CPU against torch SDPA in the same run.

Every contender gets the layout it likes best. A dense mask is built before the clock starts, and SDPA is
given it as bool or as float, whichever is faster. The padded peer of the packed rows gets no mask where
causality makes one needless.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import onchip
from onchip.bench.harness import Bar, Case, Contender, Exact, Inaccurate, Row, Session
from onchip.bench.measure import peak_extra_bytes
from onchip.testing import assert_accurate, make_packed, make_qkv, oracle, rmse

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192), (64, 128)
MASKED_LENGTH, WINDOW, NUM_DOCUMENTS, BLOCK, DENSITY = 8192, 256, 16, 128, 0.1
PACKED_LENGTHS = [round(64 * 32 ** (i / 15)) for i in range(16)]  # 64 to 2048, even in the logarithm
MASK_TOKENS, MASK_DOCUMENTS = 131072, 32
MEMORY_LENGTH = 65536
Step = tuple[str, Callable[[], Row]]


def _is(bench: str, **columns: object) -> Callable[[Row], bool]:
    wanted = {"bench": bench, **columns}
    return lambda row: all(row[name] == value for name, value in wanted.items())


BOTH = "forward+backward"
BARS = (
    Bar("forward", _is("dense", **{"pass": "forward"}), at_least=0.95),
    Bar("forward+backward, fp32", _is("dense", dtype="float32", **{"pass": BOTH}), at_least=0.90),
    Bar("forward+backward, bf16", _is("dense", dtype="bfloat16", **{"pass": BOTH}), at_least=0.55),
    Bar("window", _is("masked", mask="window 256", **{"pass": "forward"}), at_least=8),
    Bar("documents", _is("masked", mask="16 documents", **{"pass": "forward"}), at_least=6),
    Bar("random blocks", _is("masked", mask="10% of blocks", **{"pass": "forward"}), at_least=5),
    Bar("window, forward+backward", _is("masked", mask="window 256", **{"pass": BOTH}), at_least=4),
    Bar("documents, forward+backward", _is("masked", mask="16 documents", **{"pass": BOTH}), at_least=4),
    Bar("packed against padded", _is("packed"), at_least=2.5),
    Bar("memory, forward", _is("memory", **{"pass": "forward"}), at_most=64),
    Bar("memory, forward+backward", _is("memory", **{"pass": BOTH}), at_most=160),
    Bar("building a mask", _is("mask build"), at_most=20),
    Bar("import", _is("import"), at_most=300),
    Bar("host time of a call", _is("host"), at_most=60),
)


def run(session: Session) -> None:
    torch.set_num_threads(session.threads)
    session.run([*dense_steps(session), *masked_steps(session), *packed_steps(session), *other_steps(session)])


class Pattern(NamedTuple):
    """A mask three ways: by rows for the oracle, as options of onchip, and as options of SDPA."""

    name: str
    visible: Callable[[Tensor], Tensor]
    ours: dict
    peers: dict[str, dict]


def dense_steps(session: Session) -> Iterator[Step]:
    lengths, head_dims = ((256,), (64,)) if session.quick else (LENGTHS, HEAD_DIMS)
    for backward in (False, True):
        for dtype in DTYPES:
            for head_dim in head_dims:
                for n in lengths:
                    for causal in (False, True):
                        case = Case("dense", "causal" if causal else "none", dtype, head_dim, n, backward=backward)
                        yield str(case), partial(contest, session, case, partial(plain, n, causal))


def masked_steps(session: Session) -> Iterator[Step]:
    n = 1024 if session.quick else MASKED_LENGTH
    patterns = {
        f"window {WINDOW}": window,
        f"{NUM_DOCUMENTS} documents": documents,
        f"{DENSITY:.0%} of blocks": blocks,
    }
    for backward in (False, True):
        for name, build in patterns.items():
            if backward and build is blocks:
                continue
            for dtype in DTYPES:
                case = Case("masked", name, dtype, 64, n, backward=backward)
                yield str(case), partial(contest, session, case, partial(build, n, dtype))


def contest(session: Session, case: Case, build: Callable[[], Pattern]) -> Row:
    """One row of onchip.attention against SDPA."""
    pattern = build()
    q, k, v = make_qkv(case.batch, case.seqlen, num_heads=case.num_heads, head_dim=case.head_dim, dtype=case.dtype)
    attend = partial(onchip.attention, **pattern.ours)
    kernel = onchip.explain(q, k, v, **pattern.ours).plan.kernel
    theirs = tuple(heads_first(x) for x in (q, k, v))
    peers = [Contender(name, partial(sdpa, **options), theirs) for name, options in pattern.peers.items()]
    ours = Contender("onchip", attend, (q, k, v))
    return session.contest(case, kernel, ours, peers, Exact(q, k, v, pattern.visible))


def plain(n: int, causal: bool) -> Pattern:
    visible = lambda rows: torch.arange(n) <= rows[:, None] if causal else rows.new_ones(len(rows), n).bool()
    return Pattern("", visible, {"causal": causal}, {"sdpa": {"is_causal": causal}})


def window(n: int, dtype: torch.dtype) -> Pattern:
    """Each query sees itself and the 255 keys before it."""
    distance = lambda rows: rows[:, None] - torch.arange(n)
    visible = lambda rows: (distance(rows) >= 0) & (distance(rows) < WINDOW)
    return Pattern("window", visible, {"window_size": (WINDOW - 1, 0)}, dense_peers(visible, n, dtype))


def documents(n: int, dtype: torch.dtype) -> Pattern:
    """Unequal documents whose ends fall inside blocks; each token sees all of its own document."""
    ends = document_ends(n, NUM_DOCUMENTS)
    ids = torch.bucketize(torch.arange(n), ends[1:], right=True)
    visible = lambda rows: ids[rows][:, None] == ids
    mask = onchip.masks.document(ends.int()).build(1, 1, n, n)
    return Pattern("documents", visible, {"mask": mask}, dense_peers(visible, n, dtype))


def blocks(n: int, dtype: torch.dtype) -> Pattern:
    """A random tenth of the blocks, and the diagonal, so that no row is empty (SDPA answers NaN there)."""
    side = n // BLOCK
    chosen = torch.rand(side, side, generator=torch.Generator().manual_seed(0)) < DENSITY
    chosen |= torch.eye(side, dtype=torch.bool)
    dense = chosen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    visible = lambda rows: dense[rows]
    mask = onchip.masks.as_mask(dense).build(1, 1, n, n)
    return Pattern("blocks", visible, {"mask": mask}, dense_peers(visible, n, dtype))


def dense_peers(visible: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype) -> dict[str, dict]:
    as_bool = visible(torch.arange(n))
    as_float = torch.zeros(n, n, dtype=dtype).masked_fill_(~as_bool, float("-inf"))
    return {"sdpa bool mask": {"attn_mask": as_bool}, "sdpa float mask": {"attn_mask": as_float}}


def document_ends(n: int, num_documents: int) -> Tensor:
    """Boundaries from 0 to n of documents of unequal lengths, short and long ones mixed."""
    weights = torch.linspace(0.5, 1.5, num_documents)[torch.arange(num_documents) * 7 % num_documents]
    ends = (weights.cumsum(0) / weights.sum() * n).round().long()
    return torch.cat([torch.zeros(1, dtype=torch.long), ends])


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """torch's SDPA in the layout of onchip: transposed views, no copies."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def heads_first(x: Tensor) -> Tensor:
    """The same tensor stored as (batch, heads, seqlen, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def packed_steps(session: Session) -> Iterator[Step]:
    lengths = [n // 8 for n in PACKED_LENGTHS] if session.quick else PACKED_LENGTHS
    for dtype in DTYPES:
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
    ours = Contender("onchip", attend, x[:3])
    peer = Contender("sdpa padded", partial(sdpa, **hidden), padded, lambda out: out[real])
    kernel = onchip.explain(*x[:3], causal=causal, **x.options).plan.kernel
    return session.contest(case, kernel, ours, [peer], PackedExact(x, causal))


def pad(x: Tensor, real: Tensor) -> Tensor:
    """(total, heads, head_dim) -> (batch, longest, heads, head_dim), zeros where `real` is False."""
    padded = x.new_zeros(*real.shape, *x.shape[1:])
    padded[real] = x
    return padded


class PackedExact:
    """The judge of packed results: all rows, sequence by sequence."""

    def __init__(self, x, causal: bool):
        self.x, self.options = x, {"causal": causal, **x.options}
        cu = {name: self.options[name] for name in ("causal", "cu_seqlens_q", "cu_seqlens_k")}
        self.out = oracle(*x[:3], **cu).out

    def check(self, contender: Contender, backward: bool) -> float:
        try:
            assert_accurate(contender.forward(), *self.x[:3], grad=backward, **self.options)
        except AssertionError as error:
            raise Inaccurate(str(error)) from error
        return self.error(contender)

    def error(self, contender: Contender) -> float:
        return rmse(contender.judged(contender.forward()), self.out)


def other_steps(session: Session) -> Iterator[Step]:
    n = 4096 if session.quick else MEMORY_LENGTH
    for backward in (False, True):
        case = Case("memory", "none", torch.float32, 64, n, num_heads=1, backward=backward)
        yield str(case), partial(memory, case)
    tokens = 8192 if session.quick else MASK_TOKENS
    yield "building a mask", partial(mask_build, tokens)
    yield "import", partial(import_time, 1 if session.quick else 3)
    yield "host time of a call", partial(host_time, session)


def memory(case: Case) -> Row:
    """Peak memory beyond the inputs, in a process of its own."""
    code = f"from onchip.bench.cpu import print_peak; print_peak({case.seqlen}, {case.backward})"
    peak = float(child(code))
    kernel = onchip.explain(*make_qkv(1, 1, num_heads=1)).plan.kernel
    return case.row(kernel, peak / 1e6, "MB")


def print_peak(n: int, backward: bool) -> None:
    """Runs in the child: one call over n tokens, after a small one that loads what torch loads once."""
    peak = None
    for seqlen in (128, n):
        ours = Contender("onchip", onchip.attention, make_qkv(1, seqlen, num_heads=1))
        _ = ours.dout if backward else None
        peak, _ = peak_extra_bytes(ours.job(backward), torch.device("cpu"))
    print(peak)


def mask_build(tokens: int) -> Row:
    ends = document_ends(tokens, MASK_DOCUMENTS).int()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        built = (onchip.masks.document(ends) & onchip.masks.causal()).build(1, 1, tokens, tokens)
        times.append(time.perf_counter() - start)
    held = sum(t.numel() * t.element_size() for t in built.tensors())
    case = Case("mask build", f"{MASK_DOCUMENTS} documents, causal, {held / 1e3:.0f} kB", torch.int32, 0, tokens)
    return case.row("masks", statistics.median(times) * 1e3, "ms")


def import_time(runs: int) -> Row:
    """What `import onchip` adds to `import torch`."""
    code = "import time, torch; t = time.perf_counter(); import onchip; print(time.perf_counter() - t)"
    least = min(float(child(code)) for _ in range(runs))
    return Case("import", "none", torch.float32, 0, 0).row("none", least * 1e3, "ms")


def host_time(session: Session, calls: int = 300) -> Row:
    """A call so small that only its fixed cost is left, without gradients."""
    q, k, v = make_qkv(1, 4, num_heads=1, head_dim=8)
    theirs = tuple(heads_first(x) for x in (q, k, v))
    contenders = (Contender("onchip", onchip.attention, (q, k, v)), Contender("sdpa", sdpa, theirs))
    repeat = lambda job: lambda: [job() for _ in range(calls)]
    best = session.clock({c.name: repeat(c.job(False)) for c in contenders})
    case = Case("host", "none", torch.float32, 8, 4, num_heads=1)
    per_call_us = {name: t / calls * 1e6 for name, t in best.items()}
    kernel = onchip.explain(q, k, v).plan.kernel
    peers = {"sdpa": per_call_us["sdpa"]}
    ratio = per_call_us["sdpa"] / per_call_us["onchip"]
    return case.row(kernel, per_call_us["onchip"], "us", peers=peers, best_peer="sdpa", ratio=ratio)


def child(code: str) -> str:
    """The output of a fresh Python that has the same torch threads as this one."""
    code = f"import torch; torch.set_num_threads({torch.get_num_threads()}); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the measuring process failed:\n{done.stderr}")
    return done.stdout
