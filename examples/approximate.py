"""Approximations of attention beside exact attention: error, time and memory by length.

    python examples/approximate.py --quick                        # a minute on a CPU
    python examples/approximate.py --plot approximations.svg --json approximations.json

One approximation of each kind, in plain torch, by the formulas of its paper, with about 512 keys
for each query:

    low rank   Linformer  (arXiv 2006.04768)   512 weighted sums of keys stand for all keys
    kernels    Performer  (arXiv 2009.14794)   exp(q.k) = E[phi(q) phi(k)], phi positive (FAVOR+)
    hashing    Reformer   (arXiv 2001.04451)   keys in the bucket of the query, for several hashes
    patterns   Longformer (arXiv 2004.05150), BigBird (arXiv 2007.14062) and a window: exact
               attention under a sparse mask of onchip.masks

They are no part of onchip: an attention of the package is exact. Inputs are N(0, 1), without a
causal mask, and the queries, keys and values of every layer of the built-in model over text that it
was not trained on (up to 2,048 tokens), with the causal mask that it was trained with; Linformer
has no causal form. Nothing here is trained, and a model that was trained with an approximation has
learnt to live with it.

Tensors are (batch, seqlen, heads, head_dim) everywhere.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packing import read_corpora
from torch import Tensor

import onchip
from onchip import masks
from onchip.cli.bench.measure import peak_extra_bytes
from onchip.models import builtin

MODEL_LENGTH = builtin.read_config(builtin.NAME).max_seqlen
LENGTHS, QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192), (512, 1024)
BUDGET = 512  # keys or features for each query
HEADS, HEAD_DIM = 4, 64
CHUNK = 128  # queries of a chunk of a causal Performer
ROUNDS, LONG = 3, 4096  # times are the least of so many calls, from LONG on of one
CPU = torch.device("cpu")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def linformer(q: Tensor, k: Tensor, v: Tensor, rank: int) -> Tensor:
    """softmax(q (E k)ᵀ / √d) (F v), with E and F of shape (rank, seqlen).

    Linformer learns E and F for one length. Untrained, the mean of each run of seqlen / rank
    neighbours is the choice of the paper's section 4 that needs no weights; rank = seqlen: exact.
    """
    pooled = (_mean_of_runs(x, min(rank, k.shape[1])) for x in (k, v))
    return onchip.attention(q, *pooled)


def _mean_of_runs(x: Tensor, rank: int) -> Tensor:
    """(batch, rank, heads, head_dim): adaptive_avg_pool1d over the sequence."""
    rows = x.flatten(2).transpose(1, 2)
    pooled = torch.nn.functional.adaptive_avg_pool1d(rows, rank)
    return pooled.transpose(1, 2).unflatten(2, x.shape[2:])


def orthogonal_features(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """(num_features, head_dim): rows N(0, I) in distribution, orthogonal within blocks."""
    blocks = -(-num_features // head_dim)
    gauss = torch.randn(blocks, head_dim, head_dim, generator=generator, dtype=torch.float64)
    directions, triangle = torch.linalg.qr(gauss)
    # Uniform directions: without the signs of the triangle, the features are biased.
    directions = (directions * triangle.diagonal(0, 1, 2).sign()[:, None]).mT.flatten(0, 1)
    lengths = torch.randn(len(directions), head_dim, generator=generator, dtype=torch.float64)
    return (directions * lengths.norm(dim=1, keepdim=True))[:num_features]


def positive_features(x: Tensor, w: Tensor, over: tuple[int, ...]) -> Tensor:
    """phi(x) = exp(w x - |x|² / 2 - c), with c the largest exponent over these dimensions.

    E over w of phi(q) phi(k) is exp(q.k) up to a factor. c must be one for all keys of a head, and
    may be one for each query: it then cancels in the quotient.
    """
    exponents = x @ w.T - x.square().sum(-1, keepdim=True) / 2
    return torch.exp(exponents - exponents.amax(over, keepdim=True))


def performer(
    q: Tensor, k: Tensor, v: Tensor, num_features: int, causal: bool = False, seed: int = 0
) -> Tensor:
    """FAVOR+: phi(q) (phi(k)ᵀ v) / phi(q) (phi(k)ᵀ 1), with orthogonal random features."""
    generator = torch.Generator().manual_seed(seed)
    w = orthogonal_features(num_features, q.shape[-1], generator).to(q)
    scale = q.shape[-1] ** -0.25  # on both sides: the scores are q.k / √d
    phi_q = positive_features(q * scale, w, over=(3,))
    phi_k = positive_features(k * scale, w, over=(1, 3))
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last column is the denominator
    if causal:
        out = _sum_causally(phi_q, phi_k, values)
    else:
        out = torch.einsum("bnhm,bhmd->bnhd", phi_q, torch.einsum("bnhm,bnhd->bhmd", phi_k, values))
    return out[..., :-1] / out[..., -1:]


def _sum_causally(phi_q: Tensor, phi_k: Tensor, values: Tensor) -> Tensor:
    """Chunk by chunk: sums over all earlier chunks, and the products within the chunk."""
    state = values.new_zeros(*phi_k.shape[::2], phi_k.shape[-1], values.shape[-1])
    outs = []
    for start in range(0, phi_q.shape[1], CHUNK):
        a, b, c = (x[:, start : start + CHUNK] for x in (phi_q, phi_k, values))
        inside = torch.einsum("bnhm,bjhm->bhnj", a, b).tril()
        outs.append(
            torch.einsum("bnhm,bhmd->bnhd", a, state) + torch.einsum("bhnj,bjhd->bnhd", inside, c)
        )
        state = state + torch.einsum("bnhm,bnhd->bhmd", b, c)
    return torch.cat(outs, 1)


def hash_vectors(x: Tensor, rotations: Tensor) -> Tensor:
    """Buckets (rounds, ...): the index of the largest of [x R, -x R], R (rounds, head_dim, b / 2).

    Vectors in nearly the same direction are nearly always in the same bucket.
    """
    if not rotations.shape[-1]:
        return torch.zeros(len(rotations), *x.shape[:-1], dtype=torch.long)
    turned = torch.einsum("...d,rdb->r...b", x, rotations)
    return torch.cat([turned, -turned], -1).argmax(-1)


def reformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_buckets: int,
    rounds: int = 4,
    causal: bool = False,
    seed: int = 0,
) -> Tensor:
    """Attention over the keys that share a bucket with the query in some round.

    A key that shares several counts once: its score is reduced by the log of their number, and the
    rounds are summed (equations 4 to 6 and the appendix of the paper). Reformer trains one
    projection for queries and keys, and cuts buckets to chunks of one size; here both are hashed as
    they are, and buckets have the size that they have. A query with no key in any of its buckets
    gives 0.
    """
    if num_buckets > 1 and num_buckets % 2:
        raise ValueError(f"the number of buckets is one or even, not {num_buckets}")
    generator = torch.Generator().manual_seed(seed)
    shape = rounds, q.shape[-1], num_buckets // 2
    rotations = torch.randn(shape, generator=generator, dtype=torch.float64).to(q)
    buckets_q, buckets_k = (hash_vectors(x, rotations) for x in (q, k))
    outs = []
    for b, h in product(range(q.shape[0]), range(q.shape[2])):
        hashes = buckets_q[:, b, :, h], buckets_k[:, b, :, h]
        outs.append(_attend_in_buckets(q[b, :, h], k[b, :, h], v[b, :, h], hashes, causal))
    return torch.stack(outs).unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _attend_in_buckets(
    q: Tensor, k: Tensor, v: Tensor, hashes: tuple[Tensor, Tensor], causal: bool
) -> Tensor:
    """One head: q, k, v (seqlen, head_dim), and the buckets of q and of k (rounds, seqlen)."""
    buckets_q, buckets_k = hashes
    m = q.new_full((len(q), 1), -math.inf)
    l, acc = q.new_zeros(len(q), 1), torch.zeros_like(q[:, :1] * v[:1])
    for in_q, in_k in zip(buckets_q, buckets_k, strict=True):
        for bucket in in_q.unique():
            rows, cols = ((x == bucket).nonzero().flatten() for x in (in_q, in_k))
            if not len(cols):
                continue
            shared = buckets_q[:, rows, None] == buckets_k[:, None, cols]
            s = q[rows] @ k[cols].T * q.shape[-1] ** -0.5 - shared.sum(0).to(q).log()
            if causal:
                s = s.masked_fill(cols > rows[:, None], -math.inf)
            m_new = torch.maximum(m[rows], s.amax(1, keepdim=True))
            pivot = m_new.clamp_min(torch.finfo(q.dtype).min)  # a row that sees nothing yet
            alpha, p = torch.exp(m[rows] - pivot), torch.exp(s - pivot)
            acc[rows] = alpha * acc[rows] + p @ v[cols]
            l[rows] = alpha * l[rows] + p.sum(1, keepdim=True)
            m[rows] = m_new
    return acc / l.clamp_min(torch.finfo(q.dtype).tiny)


def methods(seqlen: int, causal: bool = False, budget: int = BUDGET) -> dict[str, Attend]:
    """Every approximation with about `budget` keys for a query; BigBird has at most 640."""
    buckets = max(1, 4 * seqlen // budget)  # of budget / 4 keys each in the mean, in 4 rounds
    patterns = {
        "Longformer": masks.longformer(window_size=3 * budget // 8, global_tokens=budget // 4),
        "BigBird": masks.bigbird(window_blocks=1, random_blocks=1, global_blocks=1),
        "window": masks.window(budget // 2, budget // 2),
    }
    if causal:
        patterns = {name: mask & masks.causal() for name, mask in patterns.items()}
    built = {name: masks.build(mask, 1, 1, seqlen, seqlen) for name, mask in patterns.items()}
    return {
        "exact": partial(onchip.attention, causal=causal),
        **({} if causal else {"Linformer": partial(linformer, rank=budget)}),
        "Performer": partial(performer, num_features=budget, causal=causal),
        "Reformer": partial(reformer, num_buckets=buckets, causal=causal),
        **{name: partial(onchip.attention, mask=mask) for name, mask in built.items()},
    }


def relative_error(out: Tensor, exact: Tensor) -> float:
    """RMSE over the root mean square of the exact output."""
    return ((out - exact).double().norm() / exact.double().norm()).item()


def random_inputs(seqlen: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seqlen)
    shape = 3, 1, seqlen, HEADS, HEAD_DIM
    return [tuple(torch.randn(shape, generator=generator))]


class Recorder:
    """Attention of the built-in model that keeps the inputs of every layer."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        self.calls.append((q, *(x.repeat_interleave(groups, 2) for x in (k, v))))
        return onchip.attention(q, k, v, causal=True, **options)


@torch.no_grad()
def model_inputs(seqlen: int) -> list[tuple[Tensor, ...]]:
    """q, k and v of each layer of the built-in model over held-out text."""
    model, recorder = builtin.tiny(), Recorder()
    tokens = read_corpora()[1].tokens[:seqlen].long()[None]
    model.run(tokens, torch.arange(seqlen)[None], recorder)
    return recorder.calls


class Result(NamedTuple):
    method: str
    inputs: str
    seqlen: int
    error: float  # over all layers, as a share of the exact output
    ms: float
    mb: float | None


def thread_ms(job: Callable[[], object], rounds: int) -> float:
    """The least time of a call by the clock of its thread: other programs do not count."""
    best = math.inf
    for _ in range(rounds):
        start = time.thread_time()
        job()
        best = min(best, time.thread_time() - start)
    return 1e3 * best


def measure(seqlen: int, inputs: str) -> Iterator[Result]:
    """On one thread. Time and memory are those of one layer."""
    causal = inputs == "model"
    calls = model_inputs(seqlen) if causal else random_inputs(seqlen)
    exact = [onchip.attention(*call, causal=causal) for call in calls]
    for name, attend in methods(seqlen, causal).items():
        job = partial(attend, *calls[0])
        peak, out = peak_extra_bytes(job, CPU)
        outs = [out, *(attend(*call) for call in calls[1:])]
        errors = [relative_error(x, y) for x, y in zip(outs, exact, strict=True)]
        error = math.sqrt(sum(e * e for e in errors) / len(errors))
        ms = thread_ms(job, 1 if seqlen >= LONG else ROUNDS)
        yield Result(name, inputs, seqlen, error, ms, peak and peak / 1e6)


@torch.no_grad()
def measure_all(lengths: tuple[int, ...]) -> Iterator[Result]:
    for seqlen in lengths:
        yield from measure(seqlen, "random")
        if seqlen <= MODEL_LENGTH:
            yield from measure(seqlen, "model")


def print_table(results: list[Result]) -> None:
    lengths = sorted({r.seqlen for r in results})
    cells = {(r.method, r.inputs, r.seqlen): r for r in results}
    tables = {
        "error on N(0, 1)": ("random", lambda r: f"{100 * r.error:.3g} %"),
        "error on the built-in model": ("model", lambda r: f"{100 * r.error:.3g} %"),
        "ms": ("random", lambda r: f"{r.ms:,.1f}"),
        "MB beyond the inputs": ("random", lambda r: "" if r.mb is None else f"{r.mb:,.1f}"),
    }
    for title, (inputs, show) in tables.items():
        print(f"\n{title:28}" + "".join(f"{n:>10,}" for n in lengths))
        for name in methods(512):
            row = (cells.get((name, inputs, n)) for n in lengths)
            print(f"{name:28}" + "".join(f"{show(r) if r else '':>10}" for r in row))


def draw(results: list[Result], path: Path) -> None:
    """Error on both inputs, and time, by length."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "approximate", "font.size": 9}
    panels = (
        ("error on N(0, 1)", "random", lambda r: r.error),
        ("error on the built-in model", "model", lambda r: r.error),
        ("time, ms", "random", lambda r: r.ms),
    )
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        grid = figure.subplots(1, 3)
        for axes, (title, inputs, value) in zip(grid, panels, strict=True):
            for i, name in enumerate(methods(512)):
                points = [r for r in results if (r.method, r.inputs) == (name, inputs)]
                points = [r for r in points if value(r) > 1e-6]  # exact: nothing on a log scale
                colour = "black" if name == "exact" else f"C{i}"
                xy = [r.seqlen for r in points], [value(r) for r in points]
                axes.plot(*xy, marker="o", markersize=4, color=colour, label=name)
            axes.set(title=title, xlabel="tokens", yscale="log")
            axes.set_xscale("log", base=2)
            ticks = sorted({r.seqlen for r in results if r.inputs == inputs})
            axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
            axes.grid(alpha=0.25)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=7, loc="outside upper center", frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="512 and 1,024 tokens alone")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw error and time by length")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = []
    for result in measure_all(QUICK_LENGTHS if args.quick else LENGTHS):
        results.append(result)
        print(f"\r{result.seqlen:,} tokens, {result.method:20}", end="", file=sys.stderr)
    print(file=sys.stderr)
    print_table(results)
    if args.json:
        args.json.write_text(json.dumps([r._asdict() for r in results], indent=1) + "\n")
    if args.plot:
        draw(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
