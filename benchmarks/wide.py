"""`python -m benchmarks wide`: head_dim 512, and latent pages of 512 + 64 columns.

"wide forward" and "wide backward" are whole calls against every peer that runs them: column
`peak_mb` is what each holds beyond its inputs. "latent decode" is one query a sequence over pages
of keys whose first 512 columns are the values, as multi-head latent attention has them, against
FlashAttention-3, which takes both parts of a page as operands of their own; `copy_share` is the
rate at which the pages are read over that of a plain copy, `tflops` that of both products.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
from benchmarks.serving import copy_bytes_per_s
from onchip.cli.bench import gpu, patterns, peers
from onchip.cli.bench.backward import GradientCheck, kernel_of
from onchip.cli.bench.forward import available, sdpa_rivals
from onchip.cli.bench.gpu import GpuCandidate, Inputs, OutputCheck, RowSpec
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.cli.bench.measure import peak_extra_bytes
from onchip.cli.bench.paged import CHECKED, DecodeCheck

PARTS = ("forward", "backward", "latent")  # of --only
LENGTHS, QUICK_LENGTHS, HEAD_DIM = (2048, 8192), (1024,), 512
SDPA = ("cudnn", "fa2", "efficient", "math")
LATENT, ROPE = 512, 64
MB = 1e6


class LatentCell(NamedTuple):
    """Sequences of as many keys, in pages; heads that share each key."""

    num_heads: int
    batch: int = 64
    keys: int = 8192
    page_size: int = 64


LATENT_CELLS = (
    LatentCell(16),
    LatentCell(16, page_size=16),
    LatentCell(128),
    LatentCell(128, batch=1, keys=65536),
)
QUICK_CELLS = (LatentCell(16, batch=4, keys=1024),)


def _at(bench: str, mask: str) -> Callable[[Row], bool]:
    fits = lambda row: row["mask"] == mask and row["seqlen"] == LENGTHS[-1]
    return lambda row: row["bench"] == bench and fits(row)


def _decode(num_heads: int) -> Callable[[Row], bool]:
    fits = lambda row: row["num_heads"] == num_heads and row["batch"] == LATENT_CELLS[0].batch
    return lambda row: row["bench"] == "latent decode" and fits(row)


def _least(column: str) -> Callable[[list[Row]], float]:
    return lambda rows: min(row[column] for row in rows)


def _tflops(name: str, selects: Callable[[Row], bool], at_least: float) -> Threshold:
    return Threshold(name, selects, at_least=at_least, measure=_least("value"), unit="TFLOP/s")


THRESHOLDS = (
    _tflops("head_dim 512, forward, dense, 8k", _at("wide forward", "none"), 500),
    _tflops("head_dim 512, forward, causal, 8k", _at("wide forward", "causal"), 430),
    _tflops("head_dim 512, backward, dense, 8k", _at("wide backward", "none"), 250),
    Threshold(
        "latent decode, 16 heads, share of copy",
        _decode(16),
        at_least=0.85,
        measure=_least("copy_share"),
    ),
    Threshold(
        "latent decode, 128 heads",
        _decode(128),
        at_least=550,
        measure=_least("tflops"),
        unit="TFLOP/s",
    ),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    parts = session.only or PARTS
    lengths = session.seqlens or (QUICK_LENGTHS if session.quick else LENGTHS)
    for name in ("forward", "backward"):
        if name in parts:
            grid = {"lengths": lengths, "head_dims": session.head_dims or (HEAD_DIM,)}
            for case in wide_cases(name, **grid):
                yield str(case), partial(measure, session, case)
    if "latent" in parts:
        for cell in QUICK_CELLS if session.quick else LATENT_CELLS:
            title = f"latent decode, {cell.num_heads} heads, {cell.batch} x {cell.keys:,} keys"
            yield f"{title}, pages of {cell.page_size}", partial(decode, session, cell)


def wide_cases(name: str, lengths: Sequence[int], head_dims: Sequence[int]) -> Iterator[Case]:
    backward = name == "backward"
    for head_dim in head_dims:
        for mask in ("none", "causal"):
            for n in lengths:
                heads = max(1, gpu.HIDDEN // head_dim)
                sizes = (head_dim, n, max(1, gpu.TOKENS // n), heads, backward)
                way = "backward" if backward else ""
                yield Case(f"wide {name}", mask, torch.bfloat16, *sizes, way)


def measure(session: Session, case: Case) -> list[Row]:
    pattern, sets = patterns.plain(case.seqlen, case.mask), gpu.draw_sets(case, session.device)
    check = (GradientCheck if case.backward else OutputCheck)({"normal": sets[0]}, pattern.visible)
    mod = (lambda b, h, q, k: q >= k) if case.mask == "causal" else None
    makers = {
        "flex": lambda: peers.flex(case.seqlen, mod, session.device),
        "fa3": lambda: peers.fa3(causal=case.mask == "causal"),
        "fa4": lambda: peers.fa4(causal=case.mask == "causal"),
    }
    rivals = sdpa_rivals(case, sets, check, SDPA) + available(session, makers, sets, check)
    attend = partial(onchip.attention, **pattern.options)
    ours = GpuCandidate("onchip", attend, sets, check, ours=True)
    plan = onchip.explain(*sets[0][:3], **pattern.options).plan
    kernel = kernel_of(sets[0], pattern.options) if case.backward else plan.kernel
    spec = RowSpec(case.bench, kernel, ours, rivals)
    rows = gpu.contest(session, case, [spec], gpu.tflops(case))
    candidates = {candidate.name: candidate for candidate in (*rivals, ours)}
    return [row | {"peak_mb": _peak_mb(session, row, candidates, case)} for row in rows]


def _peak_mb(
    session: Session, row: Row, candidates: dict[str, GpuCandidate], case: Case
) -> dict[str, float]:
    """What a call of each timed candidate holds beyond its inputs, with a backward its own."""
    found = {}
    for name in ("onchip", *row["peers"]):
        candidate = candidates[name]
        inputs = tuple(map(candidate.layout, candidate.sets[0]))
        if case.backward:
            call = lambda inputs=inputs, x=candidate: x.differentiate(inputs)[1]()
        else:
            call = partial(candidate.forward, candidate.sets[0])
        found[name] = (peak_extra_bytes(call, session.device)[0] or 0) / MB
    return found


def decode(session: Session, cell: LatentCell) -> list[Row]:
    sets, check = draw_latent(cell, session.device)
    lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=session.device)
    scale = (LATENT + ROPE) ** -0.5
    attend = lambda q, pages, table: onchip.paged_attention(
        q, pages, None, table, lengths, latent=LATENT, softmax_scale=scale
    )
    ours = GpuCandidate("onchip", attend, sets, check, ours=True)
    makers = {"fa3": lambda: _fa3(lengths, scale)}
    q, pages, table = sets[0]
    explained = onchip.explain(
        q, pages, None, page_table=table, cache_seqlens=lengths, latent=LATENT
    )
    sizes = {"num_kv_heads": 1, "head_dim_v": LATENT, "way": "decode"}
    shape = (LATENT + ROPE, cell.keys, cell.batch, cell.num_heads)
    case = Case("latent decode", f"pages of {cell.page_size}", torch.bfloat16, *shape, **sizes)
    rivals = available(session, makers, sets, check)
    spec = RowSpec(case.bench, explained.plan.kernel, ours, rivals)
    rows = gpu.contest(session, case, [spec], gpu.MICROSECONDS)
    pairs = cell.batch * cell.num_heads * cell.keys
    rate = copy_bytes_per_s(session.device)
    return [
        row
        | {
            "page_size": cell.page_size,
            "copy_share": 1e6 * pages.nbytes / rate / row["value"],
            "tflops": 2 * pairs * (2 * LATENT + ROPE) / row["value"] / 1e6,
        }
        for row in rows
    ]


def draw_latent(cell: LatentCell, device: torch.device) -> tuple[list[Inputs], DecodeCheck]:
    """Sets of (q, pages of keys, page_table), pages in random order, and the check of the first."""
    num_pages = cell.batch * cell.keys // cell.page_size
    page_bytes = cell.page_size * (LATENT + ROPE) * torch.bfloat16.itemsize
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    sets: list[Inputs] = []
    for seed in range(gpu.num_sets(num_pages * page_bytes, l2_bytes)):
        generator = torch.Generator(device).manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "device": device}
        draw = lambda *shape, **more: torch.randn(shape, dtype=torch.bfloat16, **more)
        q = draw(cell.batch, 1, cell.num_heads, LATENT + ROPE, **options)
        pages = draw(num_pages, cell.page_size, 1, LATENT + ROPE, **options)
        order = torch.randperm(num_pages, **options).int()
        sets.append((q, pages, order.view(cell.batch, -1)))
    q, pages, table = sets[0]
    keys = [pages[table[b].long()].flatten(0, 1)[None] for b in range(min(CHECKED, cell.batch))]
    return sets, DecodeCheck([(q[b : b + 1], k, k[..., :LATENT]) for b, k in enumerate(keys)])


def _fa3(lengths: Tensor, scale: float) -> peers.Attend:
    """FlashAttention-3 over the two parts of the pages: `qv` are the queries of the latent."""
    attend = peers.fa3(cache_seqlens=lengths, softmax_scale=scale, num_splits=0)  # 0: it chooses

    def parts(q: Tensor, pages: Tensor, table: Tensor) -> Tensor:
        split = lambda x: x.split((LATENT, ROPE), -1)
        (q_latent, q_rope), (latent, rope) = split(q), split(pages)
        return attend(q_rope, (rope, latent), table, qv=q_latent)

    return parts
