"""Attention over keys and values in host memory or in a file: segments stream to the device of the
queries and are folded one after another, so that the disk limits the context.

A CUDA device has two buffers: while attend computes over one, a side stream fills the other. Pinned
memory is copied directly; other memory passes through pinned staging, which a worker thread fills.
On the CPU segments are views, and nothing is copied.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.derivatives import check_no_tangents
from onchip.core.problem import SCORE_OPTIONS, UnsupportedError, Window
from onchip.core.state import add_sink, finalize, resume
from onchip.core.validation import check_layout, check_window
from onchip.fold.fold import fold

KV = tuple[Tensor, Tensor]  # keys and values of a segment
OutLse = tuple[Tensor, Tensor]
Span = tuple[int, int]  # keys [lo, hi)

# Two buffers of this size are all the K/V on a device. A copy of 256 MB takes 5 ms on a PCIe 5 bus,
# which hides the cost of starting it. On the host a segment only bounds the memory that a kernel
# may convert or copy.
SEGMENT_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}


class Offloaded:
    """Keys (batch, seqlen, kv_heads, head_dim) and values (batch, seqlen, kv_heads, head_dim_v) in
    host memory: pinned (fastest to a GPU), pageable, or mapped from a file (torch.from_file,
    torch.from_numpy of a memmap). Read only: they must not change until the device has finished the
    call.
    """

    k: Tensor
    v: Tensor

    def __init__(self, k: Tensor, v: Tensor):
        for name, t in (("k", k), ("v", v)):
            if not isinstance(t, Tensor) or t.device.type != "cpu" or t.dim() != 4:
                got = f"{tuple(t.shape)} on {t.device}" if isinstance(t, Tensor) else type(t)
                layout = "(batch, seqlen, kv_heads, dim)"
                raise ValueError(f"{name} must be a CPU tensor {layout}, got {got}")
        if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
            got = f"k {k.dtype} {tuple(k.shape)}, v {v.dtype} {tuple(v.shape)}"
            raise ValueError(f"k and v must agree in all but head_dim, got {got}")
        self.k, self.v = k, v

    @property
    def seqlen(self) -> int:
        return self.k.shape[1]

    @property
    def pinned(self) -> bool:
        """Whether a device can copy from this memory without the host."""
        return self.k.is_pinned() and self.v.is_pinned()

    @property
    def token_bytes(self) -> int:
        """Keys and values of one position, over the batch."""
        batch, _, num_kv_heads, head_dim = self.k.shape
        return batch * num_kv_heads * (head_dim + self.v.shape[-1]) * self.k.element_size()

    def segment(self, lo: int, hi: int) -> KV:
        """Keys and values [lo, hi), as views."""
        return self.k[:, lo:hi], self.v[:, lo:hi]

    def prefetch(self, lo: int, hi: int) -> None:
        """Called when [lo, hi) will be read next: a source may start to load it."""

    def release(self, lo: int, hi: int) -> None:
        """Called when [lo, hi) has been read: a source may release it."""


def run(
    attend: Callable[..., OutLse],
    q: Tensor,
    source: Offloaded,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    segment_bytes: int | None = None,
    **options: object,
) -> OutLse:
    """(out, lse) of q (batch, seqlen_q, heads, head_dim) over the whole source.

    attend is called like onchip.attention, once per segment of at most segment_bytes of keys and
    values; a device holds two segments at a time. causal and window are aligned bottom-right over
    the whole source. Segments that no query sees are never read. A sink counts once. Other options
    (softmax_scale, softcap, kernel) apply to every call. No gradient.
    """
    _check(q, source, window_size, sinks, options)
    default = SEGMENT_BYTES["cpu" if q.device.type == "cpu" else "cuda"]
    size = default if segment_bytes is None else segment_bytes
    if size < 1:
        raise ValueError(f"{segment_bytes=} must be at least 1")
    cut = Segmentation(
        q.shape[1], source.seqlen, max(1, size // source.token_bytes), causal, window_size
    )
    options["out_dtype"] = wide = torch.promote_types(q.dtype, torch.float32)
    parts = [_fold_rows(attend, q, source, cut, rows, options) for rows in cut.chunks()]
    outs, lses = zip(*parts, strict=True)
    out, lse = torch.cat(outs, 1), torch.cat(lses, 2)
    if sinks is not None:
        state = add_sink(resume(out.transpose(1, 2), lse), sinks.to(wide)[:, None])
        out, lse = finalize(state)
        out = out.transpose(1, 2)
    return out.to(out_dtype or q.dtype), lse


OPTIONS = {*SCORE_OPTIONS, "kernel", "deterministic"}
REFUSED = {
    "alibi_slopes": "a segment has no distance between its keys and the queries",
    "bias": "a bias over all keys would be larger than the keys",
    "mask": "a block mask is not cut into segments",
    "dropout_p": "there is no gradient to train with",
    "return_stats": "row statistics are not merged",
}


def _check(
    q: Tensor, source: Offloaded, window_size: Window, sinks: Tensor | None, options: dict
) -> None:
    for name in sorted(set(options) - OPTIONS):
        why = REFUSED.get(name, f"it takes {', '.join(sorted(OPTIONS))}")
        raise UnsupportedError(f"offload does not take {name}: {why}")
    check_layout("q", q, 4, "(batch, seqlen_q, heads, head_dim)")
    if not isinstance(source, Offloaded):
        raise ValueError(f"source must be (k, v) or an Offloaded, got {type(source).__name__}")
    check_window(window_size)
    if sinks is not None and tuple(sinks.shape) != (q.shape[2],):
        raise ValueError(f"sinks must be (heads,) = ({q.shape[2]},), got {tuple(sinks.shape)}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, source.k, source.v)):
        raise UnsupportedError("offload has no gradient: call it under torch.no_grad()")
    check_no_tangents("offload")  # copies between devices and files carry none


class Segmentation(NamedTuple):
    """Which queries attend to which segments of keys. Query i is at position i + offset."""

    seqlen_q: int
    seqlen_k: int
    tokens: int  # of a segment
    causal: bool
    window_size: Window

    @property
    def offset(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def right(self) -> int | None:
        return 0 if self.causal else self.window_size[1]

    def chunks(self) -> list[Span]:
        """Queries that stream together: all, unless the window has a left bound. Then a chunk has
        no more queries than a segment has keys: so the first segment contains the first key of the
        last query, and no call needs a window that begins after its query.
        """
        step = self.seqlen_q if self.window_size[0] is None else self.tokens
        starts = range(0, self.seqlen_q, max(step, 1))
        return [(a, min(a + step, self.seqlen_q)) for a in starts] or [(0, 0)]

    def spans(self, rows: Span) -> list[Span]:
        """The segments that a chunk of queries sees, at least one (which may be empty).

        They are cut from the end, unless a window needs a full first segment. The queries are the
        last positions, so one segment contains the diagonal and all others need no mask.
        """
        left = self.window_size[0]
        lo = 0 if left is None else min(max(rows[0] + self.offset - left, 0), self.seqlen_k)
        hi = self.seqlen_k if self.right is None else rows[1] + self.offset + self.right
        hi = max(min(hi, self.seqlen_k), lo)
        odd = (hi - lo) % self.tokens if left is None else 0
        edges = sorted({lo, hi, *range(lo + odd, hi, self.tokens)})
        return list(pairwise(edges)) or [(lo, hi)]

    def options(self, rows: Span, span: Span) -> dict[str, object]:
        """causal and window_size of one call, which aligns the last query of the chunk with the
        last key of the segment: `ahead` keys before the position of the query.
        """
        lo, hi = span
        left, right, ahead = self.window_size[0], self.right, rows[1] + self.offset - hi
        if left is not None:
            left = None if lo >= rows[1] - 1 + self.offset - left else left - ahead
        if right is not None:
            right = None if hi - 1 <= rows[0] + self.offset + right else right + ahead
        if lo == hi:
            return {}
        if right == 0:
            return {"causal": True, "window_size": (left, None)}
        return {"causal": False, "window_size": (left, right)}


def _fold_rows(
    attend: Callable[..., OutLse],
    q: Tensor,
    source: Offloaded,
    cut: Segmentation,
    rows: Span,
    options: dict,
) -> OutLse:
    """(out, lse) of a chunk of queries, unrounded."""
    spans = cut.spans(rows)
    bring = _view_segments if q.device.type == "cpu" else _copy_segments
    segments = zip(spans, bring(source, spans, q.device), strict=True)

    def attend_segment(q: Tensor, segment: tuple[Span, KV]) -> OutLse:
        span, (k, v) = segment
        return attend(q, k, v, return_lse=True, **options, **cut.options(rows, span))

    return fold(q[:, slice(*rows)], segments, attend_segment)


def _view_segments(source: Offloaded, spans: list[Span], device: torch.device) -> Iterator[KV]:
    """Segments as views, for queries on the CPU."""
    del device
    for i, span in enumerate(spans):
        for following in spans[i + 1 : i + 2]:
            source.prefetch(*following)
        yield source.segment(*span)
        source.release(*span)


class SegmentBuffer:
    """The device memory of one segment and, if the source is not pinned, its pinned staging
    memory.
    """

    here: list[Tensor]
    staging: list[Tensor] | None
    copied: torch.cuda.Event
    used: torch.cuda.Event

    def __init__(self, source: Offloaded, tokens: int, device: torch.device):
        shapes = [(t.shape[0], tokens, *t.shape[2:]) for t in (source.k, source.v)]
        allocate = lambda **where: [torch.empty(s, dtype=source.k.dtype, **where) for s in shapes]
        self.here = allocate(device=device)
        self.staging = None if source.pinned else allocate(pin_memory=True)
        self.copied, self.used = torch.cuda.Event(), torch.cuda.Event()

    def fetch(self, source: Offloaded, span: Span, stream: torch.cuda.Stream) -> None:
        """Enqueue the copy of a segment; without staging the host does not wait."""
        segment = source.segment(*span)
        if self.staging is not None:
            self.copied.synchronize()  # the previous segment has left the staging memory
            for buffer, t in zip(self.staging, segment, strict=True):
                buffer[:, : t.shape[1]].copy_(t)
            source.release(*span)
            segment = self._first(self.staging, span)
        with torch.cuda.stream(stream):
            stream.wait_event(self.used)  # attend has read the previous segment
            for buffer, t in zip(self._first(self.here, span), segment, strict=True):
                for row, source_row in zip(buffer, t, strict=True):  # one sequence: contiguous
                    row.copy_(source_row, non_blocking=True)
            self.copied.record(stream)

    @staticmethod
    def _first(buffers: list[Tensor], span: Span) -> list[Tensor]:
        return [buffer[:, : span[1] - span[0]] for buffer in buffers]

    def segment(self, span: Span) -> KV:
        k, v = self._first(self.here, span)
        return k, v


def _copy_segments(source: Offloaded, spans: list[Span], device: torch.device) -> Iterator[KV]:
    """Segments on the device; the next one is copied while the current one is in use. The current
    stream waits for copies, the host only for staging.
    """
    compute, copier = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    tokens = max(hi - lo for lo, hi in spans)
    slots = [SegmentBuffer(source, tokens, device) for _ in spans[:2]]
    copier.wait_stream(compute)  # the allocator may have reused memory that is still being read
    worker = ThreadPoolExecutor(1)

    def fetch(i: int) -> None:
        slots[i % 2].fetch(source, spans[i], copier)

    def start(i: int) -> Future | None:
        for following in spans[i + 1 : i + 2]:
            source.prefetch(*following)
        return fetch(i) if source.pinned else worker.submit(fetch, i)

    try:
        fetched = start(0)
        for i, span in enumerate(spans):
            following = start(i + 1) if i + 1 < len(spans) else None
            if fetched is not None:
                fetched.result()
            compute.wait_event(slots[i % 2].copied)
            yield slots[i % 2].segment(span)
            slots[i % 2].used.record(compute)
            fetched = following
    finally:
        worker.shutdown()
        compute.wait_stream(copier)  # also after an error, no copy outlives its buffer
