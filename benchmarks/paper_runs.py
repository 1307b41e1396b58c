"""The runs of `python -m benchmarks paper`: the published kernels with their ledgers, one head at a
time, and our kernels against unfused attention.
"""

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import patterns
from onchip.cli.bench.measure import peak_extra_bytes
from onchip.kvcache import KVCache, Spec
from onchip.lab.published import ledger, softmax
from onchip.lab.traffic import Chip
from onchip.testing import oracle, rmse

DTYPE = torch.bfloat16  # as many bytes as fp16, and faster on CPUs with matrix units
FP32 = torch.float32
CPU = torch.device("cpu")
ROUNDS = 3
LONG = 16384  # one round is enough, and takes seconds
SPARSE_LENGTH, SPARSE_HEADS = 4096, 2


class LedgerCounts(NamedTuple):
    """A ledger of one head: bytes over the HBM boundary, and operations."""

    forward_bytes: int
    backward_bytes: int
    forward_flops: int
    backward_flops: int
    rescales: int

    @property
    def hbm_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops


@cache
def counted(
    kernel: str, seqlen: int, head_dim: int, chip: Chip, backward: bool = True
) -> LedgerCounts:
    """One head of a published kernel, executed; intermediate tensors have the inputs' type."""
    q, k, v = (x.requires_grad_(backward) for x in _inputs(seqlen, head_dim, 1))
    dout = torch.ones_like(q)
    with ledger(sram=chip.sram, scratch=DTYPE, tiles=chip.tiles) as book:
        out = onchip.attention(q, k, v, kernel=kernel)
        forward = book.hbm_bytes, book.flops, book.rescales
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)
    return LedgerCounts(
        forward[0],
        book.hbm_bytes - forward[0],
        forward[1],
        book.flops - forward[1],
        forward[2],
    )


def _inputs(seqlen: int, head_dim: int, heads: int, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, seqlen, heads, head_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def passes(name: str, length: int = 4096) -> float:
    """How often a softmax reads its vector, and its values where it weighs some."""
    x, v = torch.randn(1, length), torch.randn(1, length, 64)
    with ledger(sram=1024) as book:
        softmax.one_pass(x, v) if name == "one_pass" else getattr(softmax, name)(x)
    return book.reads["x"] / x.nbytes


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Standard attention: S and P in memory, in the type of the inputs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, dim=-1)
    return (p @ v).transpose(1, 2)


def thread_seconds(jobs: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """The least time of each job on one thread, by that thread's own clock: what others do on this
    machine meanwhile does not count.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.thread_time()
            job()
            best[name] = min(best[name], time.thread_time() - start)
    torch.set_num_threads(threads)
    return best


@cache
def speedup(seqlen: int, head_dim: int, heads: int, way: str = "forward") -> float:
    """Unfused over ours in seconds, in fp32, which no CPU is slow at; way: forward, backward or
    both together.
    """
    inputs = [x.requires_grad_(way != "forward") for x in _inputs(seqlen, head_dim, heads, FP32)]
    dout = torch.randn(1, seqlen, heads, head_dim)
    candidates = {"unfused": unfused, "onchip": onchip.attention}
    jobs = {name: _job(attend, inputs, dout, way) for name, attend in candidates.items()}
    best = thread_seconds(jobs, ROUNDS if seqlen < LONG else 1)
    return best["unfused"] / best["onchip"]


def _job(
    attend: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor, way: str
) -> Callable[[], object]:
    if way == "forward":
        return lambda: attend(*inputs)
    if way == "backward":
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


@cache
def loop_seconds(tiles_n: tuple[int, ...]) -> dict[int, float]:
    """v1's loop as published, in torch, by the size of its K/V blocks: one head of 1,024 x 64."""
    q, k, v = _inputs(1024, 64, 1, FP32)

    def run(tile_n: int) -> None:
        with ledger(tiles=(64, tile_n)):
            onchip.attention(q, k, v, kernel="paper_v1")

    return thread_seconds({n: partial(run, n) for n in tiles_n}, ROUNDS)


@cache
def sparse_seconds(densities: tuple[float, ...]) -> dict[float, float]:
    """Forward and backward of our kernel, over these shares of the blocks of 128; 1: no mask."""
    inputs = [x.requires_grad_() for x in _inputs(SPARSE_LENGTH, 64, SPARSE_HEADS, FP32)]
    dout, jobs = torch.randn_like(inputs[0]), {}
    for density in densities:
        options = {} if density == 1 else patterns.blocks(SPARSE_LENGTH, density).options
        jobs[density] = _job(partial(onchip.attention, **options), inputs, dout, "both")
    return thread_seconds(jobs, ROUNDS)


@cache
def peak_bytes(name: str, seqlen: int) -> int | None:
    """The most memory beyond the inputs: one head of 128, fp32, forward."""
    inputs = _inputs(seqlen, 128, 1, FP32)
    attend = unfused if name == "unfused" else onchip.attention
    attend(*(x[:, :64] for x in inputs))  # what the first call of a process keeps is not its peak
    return peak_extra_bytes(lambda: attend(*inputs), CPU)[0]


def cache_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> float:
    """Of a real cache of pages in 16 bit: what it allocated, over the slots that it has."""
    spec = Spec(num_layers, num_kv_heads, head_dim, dtype=torch.float16)
    cache = KVCache(spec, num_pages=2)
    return (cache.pages.k.nbytes + cache.pages.v.nbytes) / (2 * spec.page_size)


@cache
def error_ratio() -> float:
    """RMSE of ours over that of unfused attention, bf16, against fp64."""
    q, k, v = _inputs(1024, 64, 8)
    exact = oracle(q, k, v).out
    return rmse(onchip.attention(q, k, v), exact) / rmse(unfused(q, k, v), exact)
