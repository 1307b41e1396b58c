"""`python -m benchmarks wide`: head_dim 512, and latent pages of 512 + 64 columns.

"wide forward" and "wide backward" are whole calls against every peer that runs them: column
`peak_mb` is what each holds beyond its inputs. "latent decode" is one query a sequence over pages
of keys whose first 512 columns are the values, as multi-head latent attention has them, against
FlashAttention-3, which takes both parts of a page as operands of their own; `copy_share` is the
rate at which the pages are read over that of a plain copy, `tflops` that of both products.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import onchip
from benchmarks import peak
from benchmarks.serving import copy_bytes_per_s, least
from onchip.cli.bench import gpu, patterns, peers
from onchip.cli.bench.backward import GradientCheck, kernel_of
from onchip.cli.bench.forward import (
    available,
    compile_flex,
    flash_rivals,
    our_specs,
    sdpa_rivals,
)
from onchip.cli.bench.gpu import GpuCandidate, Inputs, OutputCheck, RowSpec
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.cli.bench.measure import peak_extra_bytes
from onchip.cli.bench.paged import CHECKED, DecodeCheck

PARTS = ("forward", "backward", "latent")  # of --only
LENGTHS, QUICK_LENGTHS, HEAD_DIM = (2048, 8192), (1024,), 512
SDPA = ("cudnn", "fa2", "efficient", "math")
LATENT, ROPE = 512, 64


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


def _tflops(name: str, selects: Callable[[Row], bool], at_least: float) -> Threshold:
    return Threshold(name, selects, at_least=at_least, measure=least("value"), unit="TFLOP/s")


THRESHOLDS = (
    _tflops("head_dim 512, forward, dense, 8k", _at("wide forward", "none"), 500),
    _tflops("head_dim 512, forward, causal, 8k", _at("wide forward", "causal"), 430),
    _tflops("head_dim 512, backward, dense, 8k", _at("wide backward", "none"), 250),
    Threshold(
        "latent decode, 16 heads, share of copy",
        _decode(16),
        at_least=0.85,
        measure=least("copy_share"),
    ),
    Threshold(
        "latent decode, 128 heads",
        _decode(128),
        at_least=550,
        measure=least("tflops"),
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
            for case in wide_cases(name, lengths, session.head_dims or (HEAD_DIM,)):
                yield str(case), partial(measure, session, case)
    if "latent" in parts:
        for cell in QUICK_CELLS if session.quick else LATENT_CELLS:
            title = f"latent decode, {cell.num_heads} heads, {cell.batch} x {cell.keys:,} keys"
            yield f"{title}, pages of {cell.page_size}", partial(decode, session, cell)


def wide_cases(name: str, lengths: Sequence[int], head_dims: Sequence[int]) -> Iterable[Case]:
    cells = Session(seqlens=list(lengths), head_dims=list(head_dims))
    return gpu.grid(cells, f"wide {name}", backward=name == "backward")


def measure(session: Session, case: Case) -> list[Row]:
    pattern, sets = patterns.plain(case.seqlen, case.mask), gpu.draw_sets(case, session.device)
    check = (GradientCheck if case.backward else OutputCheck)({"normal": sets[0]}, pattern.visible)
    rivals = sdpa_rivals(case, sets, check, SDPA)
    rivals += flash_rivals(session, case, sets, check) + compile_flex(session, case, sets, check)
    kernel = kernel_of(sets[0], pattern.options) if case.backward else None
    specs = our_specs(case.bench, pattern, sets, check, rivals, kernel)
    rows = gpu.contest(session, case, specs, gpu.tflops(case))
    candidates = {x.name: x for x in (*rivals, *(spec.ours for spec in specs))}
    return [row | {"peak_mb": _peak_mb(session, row, candidates, case)} for row in rows]


def _peak_mb(
    session: Session, row: Row, candidates: dict[str, GpuCandidate], case: Case
) -> dict[str, float]:
    """What a call of each candidate of a row holds beyond its inputs, with its backward."""
    found = {}
    for candidate in (candidates[name] for name in row["errors"]):
        inputs = tuple(map(candidate.layout, candidate.sets[0]))
        job = peak.call(candidate.attend, inputs, case.backward)
        found[candidate.name] = (peak_extra_bytes(job, session.device)[0] or 0) / peak.MB
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
        draw = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
        q = draw(cell.batch, 1, cell.num_heads, LATENT + ROPE)
        pages = draw(num_pages, cell.page_size, 1, LATENT + ROPE)
        order = torch.randperm(num_pages, generator=generator, device=device).int()
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
