"""Random attention problems, compared with fp64 by the accuracy rule.

    python -m tests.random_problems --seed 7 --count 1000 [--device cuda] [--kernel triton]
        [--seconds 300]
    python -m tests.random_problems --seed 7 --only 123        # problem 123 of seed 7, alone

Options x shapes x strides x dtypes x inputs that require a gradient x layout (dense, packed, paged)
x kernel. A problem depends on the seed and its number alone.
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

INF = float("inf")
CPU_KERNELS = ("aten_cpu", "tiled", "reference", "paper_v0", "paper_v1", "paper_v2", "paper_v4")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 1, 2, 3, 5, 7, 8, 12, 17, 20, 31, 33)
LONG = (63, 65, 96, 127, 129, 150, 257)
DIMS = (1, 2, 3, 8, 8, 16, 17, 24, 40)
# A GPU compiles its kernels anew for each width; Hopper's read rows of 16 bytes.
DIMS_OF_GPUS = (17, 40, 64, 64, 128)
DIMS_OF_HOPPER = (40, 64, 64, 128, 128, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (6, 3))
# Of softmax_scale, in units of its default: the rule is stated for scores of ordinary size.
SCALES = (None, None, None, None, 0, -1.0, -0.3, 0.1, 1.5)
WINDOWS = ((None, None),) * 3 + ((0, 0), (3, 0), (None, 2), (5, None), (16, 7), (60, 60), (0, None))
ATEN = ("softcap", "alibi_slopes", "bias", "dropout_p", "dropout_seed", "return_stats")
PAPERS = ("softcap", "alibi_slopes", "bias", "sinks", "return_stats")
GPU = {"hopper": ("alibi_slopes", "bias", "dropout_p", "dropout_seed", "return_stats")}


class Case(NamedTuple):
    """attention(q, k, v, **options), the inputs that require a gradient, and a line that describes
    the case. Its result has the layout of the oracle.
    """

    title: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    grad: tuple[str, ...]
    attention: Callable


class Draw(random.Random):
    """Draws of one problem."""

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
    """Problem `number` of a seed. kernel: its name; None draws one, or leaves it to dispatch."""
    draw = Draw(seed, number, device)
    if kernel is None and device == "cpu":
        kernel = draw.choice((*CPU_KERNELS, None, None))
    layout = draw.choice(("dense", "dense", "packed", "paged"))
    no_fp64 = device != "cpu" or kernel in ("paper_v4", "triton")
    dtype = draw.choice(DTYPES[2 if kernel == "hopper" else no_fp64 :])
    heads, kv_heads = draw.choice(HEADS)
    dims = DIMS if device == "cpu" else DIMS_OF_HOPPER if kernel == "hopper" else DIMS_OF_GPUS
    dim = draw.choice(dims)
    sizes = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "head_dim_v": dim if draw.maybe(0.6) else draw.choice(dims),
        "dtype": dtype,
        "distribution": draw.choice(ot.DISTRIBUTIONS),
        "seed": draw.getrandbits(30),
    }
    case = {"dense": _dense, "packed": _packed, "paged": _paged}[layout](draw, sizes, kernel)
    return case._replace(title=f"{layout} {kernel or 'default'} {case.title}")


def _dense(draw: Draw, sizes: dict, kernel: str | None) -> Case:
    batch, seqlen_q, seqlen_k = draw.choice((0, 1, 1, 2, 3)), draw.length(), draw.length()
    seqlen_k = seqlen_q if draw.maybe(0.5) else seqlen_k
    qkv = ot.make_qkv(batch, seqlen_q, seqlen_k, **sizes)
    options = _options(draw, sizes, batch)
    shape = batch, sizes["num_heads"], seqlen_q, seqlen_k
    mask, visible = _mask(draw, shape)
    if draw.maybe(0.25):
        options["bias"] = _bias(draw, shape, sizes["dtype"])
    options = _served(options, kernel)

    def attention(q, k, v, **options):
        given = {**options, "mask": mask, "kernel": kernel, "return_lse": True}
        return onchip.attention(q, k, v, **given)

    return _case(draw, qkv, {**options, "mask": visible}, attention)


def _packed(draw: Draw, sizes: dict, kernel: str | None) -> Case:
    batch = draw.choice((0, 1, 2, 3, 4))
    lengths_q, lengths_k = ([draw.length() for _ in range(batch)] for _ in range(2))
    lengths_k = lengths_q if draw.maybe(0.5) else lengths_k
    if not batch:
        lengths_q, lengths_k = [0], [0]
    packed = ot.make_packed(lengths_q, lengths_k, **sizes)
    options = _served(_options(draw, sizes, len(lengths_q)), kernel)

    def attention(q, k, v, **options):
        return onchip.varlen_attention(q, k, v, kernel=kernel, return_lse=True, **options)

    return _case(draw, packed[:3], {**options, **packed.options}, attention)


def _paged(draw: Draw, sizes: dict, kernel: str | None) -> Case:
    """Queries over pages; pages_cpu among the kernels where dispatch chooses."""
    batch, seqlen_q = draw.choice((1, 2, 5)), draw.choice((1, 1, 2, 5, 8, 17))
    lengths_k = [seqlen_q + draw.length() for _ in range(batch)]
    lengths_q = [seqlen_q] * batch
    packs = draw.maybe(0.4)
    if packs:
        lengths_q = [draw.randint(0, n) for n in lengths_q]
    packed = ot.make_packed(lengths_q, lengths_k, **sizes)
    page_size = draw.choice((16, 64) if kernel == "hopper" else (1, 4, 16, 64))
    pages = ot.make_pages(packed.k, packed.v, packed.cu_seqlens_k, page_size)
    k_pages, v_pages = (_spaced(draw, t) for t in pages[:2])
    pages = (k_pages, v_pages, *(t.to(draw.device) for t in pages[2:]))
    options = _served(_options(draw, sizes, batch), kernel)
    for name in ("dropout_p", "dropout_seed", "precise_delta"):
        options.pop(name, None)
    offsets = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}

    def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
        given = {**options, "kernel": kernel, "return_lse": True}
        if packs:
            given |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max(lengths_q)}
            return onchip.paged_attention(q, *pages, **given)
        found = onchip.paged_attention(q.unflatten(0, (batch, seqlen_q)), *pages, **given)
        return _flattened(found)

    case = _case(draw, packed[:3], {**options, **offsets}, attention)
    k, v = (t.to(draw.device) for t in packed[1:3])  # the oracle's; the call reads the pages
    return case._replace(k=k, v=v, grad=())


def _flattened(found: tuple) -> tuple:
    """(out, lse[, stats]) of a batch in the layout of a packed call."""
    out, lse, *stats = found
    rows = lambda t: t.transpose(0, 1).flatten(1)
    return out.flatten(0, 1), rows(lse), *(type(s)(*map(rows, s)) for s in stats)


def _options(draw: Draw, sizes: dict, batch: int) -> dict[str, Any]:
    """The options that all layouts share."""
    heads, dtype = sizes["num_heads"], sizes["dtype"]
    kind = lambda: draw.choice((dtype, torch.float32))
    options: dict[str, Any] = {"causal": draw.maybe(0.5), "window_size": draw.choice(WINDOWS)}
    factor = draw.choice(SCALES)
    options["softmax_scale"] = factor and factor * sizes["head_dim"] ** -0.5
    if draw.maybe(0.2):
        options["softcap"] = draw.choice((0.5, 5.0, 30))
    if draw.maybe(0.3):
        sinks = draw.normal(heads)
        sinks = sinks.masked_fill(torch.rand(heads, generator=draw.generator) < 0.1, -INF)
        options["sinks"] = sinks.to(draw.device, kind()).requires_grad_()
    if draw.maybe(0.2):
        shape = (batch, heads) if draw.maybe(0.5) else (heads,)
        options["alibi_slopes"] = (draw.normal(*shape) / 4).to(draw.device, kind())
    if draw.maybe(0.15):
        options |= {"dropout_p": draw.choice((0.1, 0.5, 0.9)), "dropout_seed": draw.getrandbits(62)}
    for name in ("return_stats", "deterministic", "precise_delta"):
        if draw.maybe(0.15):
            options[name] = True
    if draw.maybe(0.15):
        options["out_dtype"] = torch.promote_types(dtype, torch.float32)
    return options


def _served(options: dict, kernel: str | None) -> dict:
    """The options without the ones that a named kernel refuses."""
    refused = ATEN if kernel == "aten_cpu" else GPU.get(kernel or "", ())
    if kernel and kernel.startswith("paper"):
        refused = PAPERS + (("dropout_p", "dropout_seed") if kernel == "paper_v4" else ())
    if kernel == "hopper" and (options["softmax_scale"] or 1) <= 0:
        options["softmax_scale"] = None
    return {name: x for name, x in options.items() if name not in refused}


def _mask(draw: Draw, shape: tuple[int, int, int, int]) -> tuple[object, Tensor | None]:
    """A mask as a user passes it, and the same mask as a dense bool tensor."""
    batch, heads, seqlen_q, seqlen_k = shape
    if draw.maybe(0.6) or not batch:
        return None, None
    a, b = draw.randint(0, 4), draw.randint(0, 4)
    rule = draw.choice(
        (
            lambda b_, h, q, k: (q + a * k + h + b * b_) % 3 != 0,
            lambda b_, h, q, k: (k >= 8 * a) & ((q // 7) % 3 != 0),
            lambda b_, h, q, k: (q // 32 == k // 32) | (k == a),
            lambda b_, h, q, k: q * 0 + k < 0,
        )
    )
    b_, h, i, j = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    visible = rule(b_, h, i, j)
    if draw.maybe(0.3):
        keep = draw.choice((batch, 1)), draw.choice((heads, 1)), seqlen_q, seqlen_k
        visible = (torch.rand(keep, generator=draw.generator) < 0.4).to(draw.device)
        return visible, visible
    return (masks.mod(rule) if draw.maybe(0.5) else rule), visible.to(draw.device)


def _bias(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Some entries are -inf, and sometimes a whole row."""
    *lead, seqlen_k = shape
    broadcast = [n if draw.maybe(0.5) else 1 for n in lead]
    bias = draw.normal(*broadcast, seqlen_k)
    if draw.maybe(0.3):
        hidden = torch.rand(bias.shape, generator=draw.generator) < 0.3
        hidden |= torch.rand(*broadcast, 1, generator=draw.generator) < 0.2
        bias = bias.masked_fill(hidden, -INF)
    bias = bias.to(draw.device, draw.choice((dtype, torch.float32)))
    return bias.requires_grad_(draw.maybe(0.7))


def _case(draw: Draw, qkv: tuple[Tensor, ...], options: dict, attention: Callable) -> Case:
    q, k, v = (_strided(draw, t) for t in qkv)
    names = ["q", "k", "v"] + [n for n in ("bias", "sinks") if _wants_grad(options.get(n))]
    grad = tuple(n for n in names if draw.maybe(0.7))
    on_device = {n: x.to(draw.device) if isinstance(x, Tensor) else x for n, x in options.items()}
    for name in ("bias", "sinks"):  # a copy is no leaf
        if name in options:
            on_device[name] = options[name]
    told = {n: _told(x) for n, x in options.items() if x is not None and n != "dropout_seed"}
    title = f"q{tuple(q.shape)} k{tuple(k.shape)} v{tuple(v.shape)} {q.dtype} {told} grad={grad}"
    return Case(title, q, k, v, on_device, grad, attention)


def _wants_grad(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _told(x: object) -> object:
    return f"{x.dtype}{tuple(x.shape)}" if isinstance(x, Tensor) else x


def _strided(draw: Draw, x: Tensor) -> Tensor:
    """x, or a part of it repeated, with other strides."""
    if draw.maybe(0.15):
        dim = draw.choice(range(x.dim() - 1))
        return x.to(draw.device).narrow(dim, 0, min(1, x.shape[dim])).expand(x.shape)
    return _spaced(draw, x)


def _spaced(draw: Draw, x: Tensor) -> Tensor:
    """Equal to x, with other strides."""
    x = x.to(draw.device)
    way = draw.choice(("contiguous", "heads first", "poisoned", "sliced", "stepped"))
    if way == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if way == "poisoned":
        return ot.poison_neighbours(x, draw.choice((3, 8)))
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
    """None, "refused" or a description of the failure."""
    try:
        qkv = case.q, case.k, case.v
        ot.assert_accurate(case.attention, *qkv, grad=case.grad, **case.options)
    except onchip.UnsupportedError as error:
        return f"refused: {error}"
    except Exception as error:  # any error of a sound call is a failure
        return f"{type(error).__name__}: {error}"
    return None


def search(
    seed: int,
    numbers: Iterable[int],
    counts: Counter,
    device: str = "cpu",
    kernel: str | None = None,
) -> Iterator[Failure]:
    """Failures as they occur; counts: of served, refused and failed problems."""
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
    parser.add_argument("--only", type=int, help="the number of one problem")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel", help="default: each in turn on the CPU, dispatch elsewhere")
    parser.add_argument("--seconds", type=float, default=INF, help="draw no more problems then")
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
