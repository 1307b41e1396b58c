"""Random attention problems, compared with fp64 under the accuracy rule of onchip.testing.

    python -m tests.random_problems --seed 7 --count 1000 [--device cuda] [--kernel triton]
        [--seconds 300]
    python -m tests.random_problems --seed 7 --only 123        # problem 123 of seed 7, alone

A problem combines options, shapes, strides, dtypes, the inputs that require a gradient, a layout
(dense, packed, paged) and a kernel. It depends only on the seed and on its number.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
import onchip.lab  # registers the kernels of the papers
import onchip.testing as ot
from onchip import masks
from onchip.core.dispatch import get_backend
from onchip.core.problem import LEARNED, UNDECLARED, Problem

INF = float("inf")
CPU_KERNELS = ("aten_cpu", "tiled", "reference", "paper_v0", "paper_v1", "paper_v2", "paper_v4")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 1, 2, 3, 5, 7, 8, 12, 17, 20, 31, 33)
LONG = (63, 65, 96, 127, 129, 150, 257)
DIMS = (1, 2, 3, 8, 8, 16, 17, 24, 40)
# Few, because a GPU compiles a kernel for each. Rows of Hopper's are multiples of 16 bytes.
GPU_DIMS = (17, 40, 64, 64, 128)
HOPPER_DIMS = (40, 64, 64, 128, 128, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (6, 3))
# softmax_scale in units of its default; the accuracy rule holds for scores of ordinary size.
SCALES = (None, None, None, None, 0, -1.0, -0.3, 0.1, 1.5)
WINDOWS = ((None, None),) * 3 + ((0, 0), (3, 0), (None, 2), (5, None), (16, 7), (60, 60), (0, None))
# The field of Problem, for options that have another name there.
FIELDS = {
    "alibi_slopes": "has_alibi",
    "bias": "has_bias",
    "sinks": "has_sinks",
    "dropout_seed": "dropout_p",
}


class Case(NamedTuple):
    """A call `attention(q, k, v, **options)`, which returns its results in the oracle's layout.

    title: one line that describes the call. grad: names of the inputs that require a gradient.
    """

    title: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    grad: tuple[str, ...]
    attention: Callable


class ProblemRng(random.Random):
    """The random numbers of one problem."""

    def __init__(self, seed: int, number: int, device: str):
        super().__init__(f"{seed}:{number}")
        self.device = device
        self.generator = torch.Generator().manual_seed(self.getrandbits(60))

    def maybe(self, p: float) -> bool:
        return self.random() < p

    def length(self) -> int:
        return self.choice(LONG if self.maybe(0.05) else LENGTHS)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def draw_case(seed: int, number: int, device: str = "cpu", kernel: str | None = None) -> Case:
    """Problem `number` of a seed. With kernel=None, a CPU gets a random kernel or the choice of
    dispatch, and a GPU gets the choice of dispatch.
    """
    rng = ProblemRng(seed, number, device)
    if kernel is None and device == "cpu":
        kernel = rng.choice((*CPU_KERNELS, None, None))
    layout = rng.choice(("dense", "dense", "packed", "paged"))
    no_fp64 = device != "cpu" or kernel in ("paper_v4", "triton")
    dtype = rng.choice(DTYPES[2 if kernel == "hopper" else no_fp64 :])
    heads, kv_heads = rng.choice(HEADS)
    dims = DIMS if device == "cpu" else HOPPER_DIMS if kernel == "hopper" else GPU_DIMS
    dim = rng.choice(dims)
    sizes = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "head_dim_v": dim if rng.maybe(0.6) else rng.choice(dims),
        "dtype": dtype,
        "distribution": rng.choice(ot.DISTRIBUTIONS),
        "seed": rng.getrandbits(30),
    }
    case = {"dense": _draw_dense, "packed": _draw_packed, "paged": _draw_paged}[layout](
        rng, sizes, kernel
    )
    return case._replace(title=f"{layout} {kernel or 'default'} {case.title}")


def _draw_dense(rng: ProblemRng, sizes: dict, kernel: str | None) -> Case:
    batch, seqlen_q, seqlen_k = rng.choice((0, 1, 1, 2, 3)), rng.length(), rng.length()
    seqlen_k = seqlen_q if rng.maybe(0.5) else seqlen_k
    qkv = ot.make_qkv(batch, seqlen_q, seqlen_k, **sizes)
    options = _draw_options(rng, sizes, batch)
    shape = batch, sizes["num_heads"], seqlen_q, seqlen_k
    mask, visible = _draw_mask(rng, shape)
    if rng.maybe(0.25):
        options["bias"] = _draw_bias(rng, shape, sizes["dtype"])
    options = _drop_refused(options, kernel)

    def attention(q, k, v, **options):
        arguments = {**options, "mask": mask, "kernel": kernel, "return_lse": True}
        return onchip.attention(q, k, v, **arguments)

    return _make_case(rng, qkv, {**options, "mask": visible}, attention)


def _draw_packed(rng: ProblemRng, sizes: dict, kernel: str | None) -> Case:
    batch = rng.choice((0, 1, 2, 3, 4))
    lengths_q, lengths_k = ([rng.length() for _ in range(batch)] for _ in range(2))
    lengths_k = lengths_q if rng.maybe(0.5) else lengths_k
    if not batch:
        lengths_q, lengths_k = [0], [0]
    packed = ot.make_packed(lengths_q, lengths_k, **sizes)
    options = _drop_refused(_draw_options(rng, sizes, len(lengths_q)), kernel)

    def attention(q, k, v, **options):
        return onchip.varlen_attention(q, k, v, kernel=kernel, return_lse=True, **options)

    return _make_case(rng, packed[:3], {**options, **packed.options}, attention)


def _draw_paged(rng: ProblemRng, sizes: dict, kernel: str | None) -> Case:
    """Queries over pages. Where dispatch chooses the kernel, it may choose pages_cpu."""
    batch, seqlen_q = rng.choice((1, 2, 5)), rng.choice((1, 1, 2, 5, 8, 17))
    lengths_k = [seqlen_q + rng.length() for _ in range(batch)]
    lengths_q = [seqlen_q] * batch
    packs = rng.maybe(0.4)
    if packs:
        lengths_q = [rng.randint(0, n) for n in lengths_q]
    packed = ot.make_packed(lengths_q, lengths_k, **sizes)
    page_size = rng.choice((16, 64) if kernel == "hopper" else (1, 4, 16, 64))
    pages = ot.make_pages(packed.k, packed.v, packed.cu_seqlens_k, page_size)
    k_pages, v_pages = (_restride(rng, t) for t in pages[:2])
    pages = (k_pages, v_pages, *(t.to(rng.device) for t in pages[2:]))
    options = _drop_refused(_draw_options(rng, sizes, batch), kernel)
    for name in ("dropout_p", "dropout_seed", "precise_delta"):
        options.pop(name, None)
    offsets = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}

    def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
        arguments = {**options, "kernel": kernel, "return_lse": True}
        if packs:
            arguments |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max(lengths_q)}
            return onchip.paged_attention(q, *pages, **arguments)
        q = q.unflatten(0, (batch, seqlen_q))
        return _flatten_batch(onchip.paged_attention(q, *pages, **arguments))

    case = _make_case(rng, packed[:3], {**options, **offsets}, attention)
    k, v = (t.to(rng.device) for t in packed[1:3])  # for the oracle; the call reads the pages
    return case._replace(k=k, v=v, grad=())


def _flatten_batch(results: tuple) -> tuple:
    """(out, lse[, stats]) of a dense batch, in the layout of a packed call."""
    out, lse, *stats = results
    rows = lambda t: t.transpose(0, 1).flatten(1)
    return out.flatten(0, 1), rows(lse), *(type(s)(*map(rows, s)) for s in stats)


def _draw_options(rng: ProblemRng, sizes: dict, batch: int) -> dict[str, Any]:
    """Options that every layout takes."""
    heads, dtype = sizes["num_heads"], sizes["dtype"]
    kind = lambda: rng.choice((dtype, torch.float32))
    options: dict[str, Any] = {"causal": rng.maybe(0.5), "window_size": rng.choice(WINDOWS)}
    factor = rng.choice(SCALES)
    options["softmax_scale"] = factor and factor * sizes["head_dim"] ** -0.5
    if rng.maybe(0.2):
        options["softcap"] = rng.choice((0.5, 5.0, 30))
    if rng.maybe(0.3):
        sinks = rng.normal(heads)
        sinks = sinks.masked_fill(torch.rand(heads, generator=rng.generator) < 0.1, -INF)
        options["sinks"] = sinks.to(rng.device, kind()).requires_grad_()
    if rng.maybe(0.2):
        shape = (batch, heads) if rng.maybe(0.5) else (heads,)
        options["alibi_slopes"] = (rng.normal(*shape) / 4).to(rng.device, kind())
    if rng.maybe(0.15):
        options |= {"dropout_p": rng.choice((0.1, 0.5, 0.9)), "dropout_seed": rng.getrandbits(62)}
    for name in ("return_stats", "deterministic", "precise_delta"):
        if rng.maybe(0.15):
            options[name] = True
    if rng.maybe(0.15):
        options["out_dtype"] = torch.promote_types(dtype, torch.float32)
    return options


def _drop_refused(options: dict, kernel: str | None) -> dict:
    """The options without the ones that the named kernel does not declare."""
    if kernel is None:
        return options
    if kernel == "hopper" and (options["softmax_scale"] or 1) <= 0:
        options["softmax_scale"] = None
    refused = Problem._field_defaults.keys() - UNDECLARED - get_backend(kernel).options
    return {name: x for name, x in options.items() if FIELDS.get(name, name) not in refused}


def _draw_mask(rng: ProblemRng, shape: tuple[int, int, int, int]) -> tuple[object, Tensor | None]:
    """A mask as a user writes it, and the same mask as a dense bool tensor."""
    batch, heads, seqlen_q, seqlen_k = shape
    if rng.maybe(0.6) or not batch:
        return None, None
    a, b = rng.randint(0, 4), rng.randint(0, 4)
    rule = rng.choice(
        (
            lambda b_, h, q, k: (q + a * k + h + b * b_) % 3 != 0,
            lambda b_, h, q, k: (k >= 8 * a) & ((q // 7) % 3 != 0),
            lambda b_, h, q, k: (q // 32 == k // 32) | (k == a),
            lambda b_, h, q, k: q * 0 + k < 0,
        )
    )
    b_, h, i, j = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    visible = rule(b_, h, i, j)
    if rng.maybe(0.3):
        keep = rng.choice((batch, 1)), rng.choice((heads, 1)), seqlen_q, seqlen_k
        visible = (torch.rand(keep, generator=rng.generator) < 0.4).to(rng.device)
        return visible, visible
    return (masks.mod(rule) if rng.maybe(0.5) else rule), visible.to(rng.device)


def _draw_bias(rng: ProblemRng, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A bias with some elements of -inf, and sometimes a whole row of them."""
    *lead, seqlen_k = shape
    broadcast = [n if rng.maybe(0.5) else 1 for n in lead]
    bias = rng.normal(*broadcast, seqlen_k)
    if rng.maybe(0.3):
        hidden = torch.rand(bias.shape, generator=rng.generator) < 0.3
        hidden |= torch.rand(*broadcast, 1, generator=rng.generator) < 0.2
        bias = bias.masked_fill(hidden, -INF)
    bias = bias.to(rng.device, rng.choice((dtype, torch.float32)))
    return bias.requires_grad_(rng.maybe(0.7))


def _make_case(
    rng: ProblemRng, qkv: tuple[Tensor, ...], options: dict, attention: Callable
) -> Case:
    q, k, v = (_expand_or_restride(rng, t) for t in qkv)
    names = ["q", "k", "v"] + [n for n in LEARNED if _requires_grad(options.get(n))]
    grad = tuple(n for n in names if rng.maybe(0.7))
    on_device = {n: x.to(rng.device) if isinstance(x, Tensor) else x for n, x in options.items()}
    for name in LEARNED:  # a copy is no leaf
        if name in options:
            on_device[name] = options[name]
    described = {
        n: _describe(x) for n, x in options.items() if x is not None and n != "dropout_seed"
    }
    title = (
        f"q{tuple(q.shape)} k{tuple(k.shape)} v{tuple(v.shape)} {q.dtype} {described} grad={grad}"
    )
    return Case(title, q, k, v, on_device, grad, attention)


def _requires_grad(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _describe(x: object) -> object:
    return f"{x.dtype}{tuple(x.shape)}" if isinstance(x, Tensor) else x


def _expand_or_restride(rng: ProblemRng, x: Tensor) -> Tensor:
    """x with other strides, or one slice of it expanded to the shape of x."""
    if rng.maybe(0.15):
        dim = rng.choice(range(x.dim() - 1))
        return x.to(rng.device).narrow(dim, 0, min(1, x.shape[dim])).expand(x.shape)
    return _restride(rng, x)


def _restride(rng: ProblemRng, x: Tensor) -> Tensor:
    """The same values with other strides."""
    x = x.to(rng.device)
    way = rng.choice(("contiguous", "heads first", "poisoned", "sliced", "stepped"))
    if way == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if way == "poisoned":
        return ot.poison_neighbours(x, rng.choice((3, 8)))
    if way == "sliced":
        return torch.cat([x * float("nan"), x, x], -2)[..., x.shape[-2] : 2 * x.shape[-2], :]
    if way == "stepped":
        wide = x.repeat_interleave(2, -3)
        return (wide.repeat_interleave(3, -1)[..., ::3] if x.shape[-1] == 1 else wide)[
            ..., ::2, :, :
        ]
    return x


class Failure(NamedTuple):
    number: int
    title: str
    reason: str


def judge(case: Case) -> str | None:
    """None if the call is accurate, "refused: ..." if the kernel refuses it, or the error."""
    try:
        qkv = case.q, case.k, case.v
        ot.assert_accurate(case.attention, *qkv, grad=case.grad, **case.options)
    except onchip.UnsupportedError as error:
        return f"refused: {error}"
    except Exception as error:  # the call is valid, so that any other error is a failure
        return f"{type(error).__name__}: {error}"
    return None


def search(
    seed: int,
    numbers: Iterable[int],
    counts: Counter,
    device: str = "cpu",
    kernel: str | None = None,
) -> Iterator[Failure]:
    """Yield each failure as it occurs, and count served, refused and failed problems."""
    for number in numbers:
        case = draw_case(seed, number, device, kernel)
        reason = judge(case)
        outcome = "served" if reason is None else "failed"
        if reason is not None and reason.startswith("refused"):
            outcome = reason
        counts[outcome] += 1
        if outcome == "failed":
            yield Failure(number, case.title, reason or "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", type=int, help="run only the problem of this number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--kernel", help="default: a random one on the CPU, the choice of dispatch on a GPU"
    )
    parser.add_argument("--seconds", type=float, default=INF, help="stop after this time")
    args = parser.parse_args()
    began, counts = time.perf_counter(), Counter()
    numbers = range(args.count) if args.only is None else range(args.only, args.only + 1)
    numbers = takewhile(lambda _: time.perf_counter() - began < args.seconds, numbers)
    for number, title, reason in search(args.seed, numbers, counts, args.device, args.kernel):
        print(f"--seed {args.seed} --only {number}: {title}\n{reason}\n", flush=True)
    spent = time.perf_counter() - began
    for outcome, count in counts.items():
        print(f"{count} {outcome}")
    failed, drawn = counts["failed"], counts.total()
    print(f"{failed} failures in {drawn} problems of seed {args.seed}, {spent:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
