"""Decoding over a cache that is spread over ranks: each attends its own keys, and the states of all
become one. Keys do not travel.

A state is head_dim_v + 1 fp32 numbers per row, a row being one query of one head: n bytes in all.
Small ones are gathered: one message to every rank, (P - 1) n bytes come in. Larger ones are reduced
as sums are, but with the merge of states: every rank merges its share of the rows and gathers the
others', two messages to every rank, 2 (P - 1) / P n bytes. Both ways take the ranks in their order,
so the bits are the same, on every rank.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.derivatives import refuse_transforms
from onchip.kernels.protocol import accumulator_dtype
from onchip.ops import UNBOUNDED, attention, paged_attention
from onchip.parallel import digests
from onchip.parallel.comm import Comm, as_comm
from onchip.problem import UnsupportedError, Window, check_layout, check_window
from onchip.state import add_sink, finalize, merge_at_rest, resume

OutLse = tuple[Tensor, Tensor]  # (out, lse)
Span = tuple[int, int]
KeyRange = tuple[int, int]  # the position of a rank's first key, and how many positions there are

# A message takes some 15 us whatever it carries, and 512 kB pass a link of 50 GB/s in 10: to save
# less is not worth a second one.
SECOND_MESSAGE_BYTES = 512 << 10


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: object = None,
    *,
    place: KeyRange | None = None,
    causal: bool = True,
    window_size: Window = UNBOUNDED,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    **options: object,
) -> Tensor | OutLse:
    """attention() of new queries over keys of which every rank has some.

    q: (batch, seqlen_q, heads, head_dim), the same on all ranks: the last seqlen_q positions. k, v:
    (batch, keys, kv_heads, dim), this rank's, maybe none. place: (start, seqlen_k), if they are the
    positions from start on, of seqlen_k; where every query sees every key (one query, or
    causal=False; no window, no ALiBi) they may be any, and it may be left out. All ranks get the
    same out (and lse). options: softmax_scale, softcap, deterministic, kernel. No gradient.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_layout(name, t, 4, "(batch, seqlen, heads, head_dim)")
    _check(options, (q, k, v, sinks))
    mask = DecodeMask.of(q, causal, window_size, alibi_slopes)
    comm = _check_call(group, q, v, mask, alibi_slopes, sinks, options)
    calls = mask.calls(None if place is None else [place], [k.shape[1]])
    part = _LocalState.empty(q, v.shape[-1])
    for call in calls:
        rows, keys = slice(*call.rows), slice(call.keys[0])
        found = attention(
            q[:, rows],
            k[:, keys],
            v[:, keys],
            alibi_slopes=alibi_slopes,
            return_lse=True,
            out_dtype=part.out.dtype,
            **call.options,
            **options,
        )
        part.put(found, slice(None), call, alibi_slopes)
    return _finish(q, part, comm, sinks, return_lse, out_dtype)


def tree_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    group: object = None,
    *,
    places: Sequence[KeyRange] | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    causal: bool = True,
    window_size: Window = UNBOUNDED,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    **options: object,
) -> Tensor | OutLse:
    """paged_attention() over pages of which every rank has some; see tree_attention.

    q: (batch, seqlen_q, heads, head_dim). page_table and cache_seqlens are those of this rank: of
    sequence b it has cache_seqlens[b] keys, from places[b][0] on of places[b][1] positions. Where
    places are given, the host reads cache_seqlens. Pages of 8 bits come with k_scales and v_scales;
    a rank may have such pages beside others that have not.
    """
    check_layout("q", q, 4, "(batch, seqlen_q, heads, head_dim)")
    _check(options, (q, k_pages, v_pages, sinks))
    mask = DecodeMask.of(q, causal, window_size, alibi_slopes)
    comm = _check_call(group, q, v_pages, mask, alibi_slopes, sinks, options)
    calls = mask.calls(places, cache_seqlens.tolist() if places is not None else [0])
    part = _LocalState.empty(q, v_pages.shape[-1])
    for call in calls:
        at, seqlens = slice(None), cache_seqlens
        if places is not None:
            at = torch.tensor(call.batch, device=q.device)
            seqlens = cache_seqlens.new_tensor(call.keys)
        slopes = _slopes_of(alibi_slopes, at)
        found = paged_attention(
            q[at, slice(*call.rows)],
            k_pages,
            v_pages,
            page_table[at],
            seqlens,
            k_scales=k_scales,
            v_scales=v_scales,
            alibi_slopes=slopes,
            return_lse=True,
            out_dtype=part.out.dtype,
            **call.options,
            **options,
        )
        part.put(found, at, call, slopes)
    return _finish(q, part, comm, sinks, return_lse, out_dtype)


class DecodeCall(NamedTuple):
    """What rows of some sequences see of a rank's keys: the first keys[i] of sequence batch[i],
    through a window aligned bottom-right. They stand ahead[i] positions after where that puts them.
    """

    rows: Span
    window_size: Window
    batch: list[int]
    keys: list[int]
    ahead: list[int]

    @property
    def options(self) -> dict[str, object]:
        left, right = self.window_size
        if right == 0:
            return {"causal": True, "window_size": (left, None)}
        return {"causal": False, "window_size": (left, right)}


class DecodeMask(NamedTuple):
    """Which positions a query sees, and whether rows must go one by one: a call counts the distance
    of ALiBi from where it puts a query, which is off by a constant for a single row, but not for
    several.
    """

    seqlen_q: int
    window_size: Window  # causal is right = 0
    splits_rows: bool

    @classmethod
    def of(
        cls, q: Tensor, causal: bool, window_size: Window, slopes: Tensor | None
    ) -> "DecodeMask":
        check_window(window_size)
        left, right = window_size
        right = 0 if causal else right
        if slopes is not None and right != 0 and q.shape[1] > 1:
            raise UnsupportedError(
                "alibi_slopes over a cache of several ranks need causal=True or a single query"
            )
        return cls(q.shape[1], (left, right), slopes is not None)

    def calls(self, places: Sequence[KeyRange] | None, counts: list[int]) -> list[DecodeCall]:
        """For every sequence its place, and how many keys the rank has of it."""
        rows = (0, self.seqlen_q)
        if places is None:
            self._check_without_places()
            return [DecodeCall(rows, (None, None), [0], counts, [0])]
        _check_key_ranges(places, counts)
        found: dict[tuple[Span, Window], DecodeCall] = {}
        chunks = pairwise(range(self.seqlen_q + 1)) if self.splits_rows else [rows]
        for rows in chunks:
            for b, ((start, seqlen_k), count) in enumerate(zip(places, counts, strict=True)):
                self._add_rows(found, b, rows, seqlen_k - self.seqlen_q - start, count)
        return list(found.values())

    def _add_rows(self, found: dict, b: int, rows: Span, first: int, count: int) -> None:
        """Adds to `found` what rows see of `count` keys, the first row standing at `first` counted
        from the first key.
        """
        (lo, hi), (left, right) = rows, self.window_size
        last = first + hi - 1
        keys = count if right is None else min(count, last + right + 1)
        if lo >= hi or keys <= 0:
            return
        ahead = last - (keys - 1)
        if left is not None and left < ahead:  # the last rows see nothing here
            return self._add_rows(found, b, (lo, hi - (ahead - left)), first, count)
        left = None if left is None or left - ahead >= keys - 1 else left - ahead
        right = None if right is None or right + ahead >= hi - lo - 1 else right + ahead
        key = (lo, hi), (left, right)
        call = found.setdefault(key, DecodeCall(*key, [], [], []))
        for numbers, number in zip(call[2:], (b, keys, ahead), strict=True):
            numbers.append(number)

    def _check_without_places(self) -> None:
        left, right = self.window_size
        if left is not None or self.splits_rows or (right is not None and self.seqlen_q > 1):
            raise ValueError(
                "a window, ALiBi and causal queries need to know where a rank's keys stand: give"
                " their place, (start, seqlen_k)"
            )


def _check_key_ranges(places: Sequence[KeyRange], counts: list[int]) -> None:
    if len(places) != len(counts):
        raise ValueError(f"there are {len(places)} places for {len(counts)} sequences")
    for b, ((start, seqlen_k), count) in enumerate(zip(places, counts, strict=True)):
        if not 0 <= start <= start + count <= seqlen_k:
            raise ValueError(
                f"sequence {b}: {count} keys from {start=} on do not lie within {seqlen_k=}"
            )


class _LocalState(NamedTuple):
    """The state of this rank: out (batch, seqlen_q, heads, head_dim_v), lse (batch, heads,
    seqlen_q), wide.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, head_dim_v: int) -> "_LocalState":
        batch, seqlen_q, heads, _ = q.shape
        wide = accumulator_dtype(q.dtype)
        out = q.new_zeros(batch, seqlen_q, heads, head_dim_v, dtype=wide)
        return cls(out, q.new_full((batch, heads, seqlen_q), -torch.inf, dtype=wide))

    def put(
        self, found: OutLse, at: slice | Tensor, call: DecodeCall, slopes: Tensor | None
    ) -> None:
        rows, (out, lse) = slice(*call.rows), found
        if slopes is not None:
            ahead = torch.tensor(call.ahead, device=lse.device)[:, None, None]
            lse = lse - slopes.to(lse.dtype)[..., None] * ahead
        self.out[at, rows], self.lse[at, :, rows] = out, lse


def merge_over_ranks(out: Tensor, lse: Tensor, comm: Comm) -> OutLse:
    """The states of all ranks, out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads,
    seqlen_q), as one.
    """
    states = torch.cat([out, lse.transpose(1, 2)[..., None]], -1)
    rows = states.flatten(0, 2)
    spared = rows.nbytes * (comm.size - 1) * (comm.size - 2) // comm.size
    merged = (
        _merge_by_exchange(rows, comm)
        if spared > SECOND_MESSAGE_BYTES
        else _merge_by_gather(rows, comm)
    )
    merged = merged.view_as(states)
    return merged[..., :-1], merged[..., -1].transpose(1, 2)


def _merge_by_gather(rows: Tensor, comm: Comm) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(comm.size)]
    comm.all_gather(rows, parts).wait()
    return _merge(parts)


def _merge_by_exchange(rows: Tensor, comm: Comm) -> Tensor:
    shares = rows.tensor_split(comm.size)
    mine = [torch.empty_like(shares[comm.rank]) for _ in shares]
    comm.all_to_all(shares, mine).wait()
    merged = torch.empty_like(rows)
    comm.all_gather(_merge(mine), merged.tensor_split(comm.size)).wait()
    return merged


def _merge(parts: Sequence[Tensor]) -> Tensor:
    """States (rows, head_dim_v + 1) over disjoint keys as one."""
    out, lse = merge_at_rest([p[:, :-1] for p in parts], [p[:, -1] for p in parts])
    return torch.cat([out, lse[:, None]], -1)


def _finish(
    q: Tensor,
    part: _LocalState,
    comm: Comm,
    sinks: Tensor | None,
    return_lse: bool,
    out_dtype: torch.dtype | None,
) -> Tensor | OutLse:
    out, lse = merge_over_ranks(*part, comm)
    if sinks is not None:
        state = add_sink(resume(out.transpose(1, 2), lse), sinks.to(lse.dtype)[:, None])
        out, lse = finalize(state)
        out = out.transpose(1, 2)
    out = out.to(out_dtype or q.dtype)
    return (out, lse) if return_lse else out


def _slopes_of(slopes: Tensor | None, at: slice | Tensor) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[at]


def _check_call(
    group: object,
    q: Tensor,
    v: Tensor,
    mask: DecodeMask,
    slopes: Tensor | None,
    sinks: Tensor | None,
    options: dict[str, object],
) -> Comm:
    """The communicator, after the ranks have compared what they are asked."""
    comm = as_comm(group)
    shape = {"q": tuple(q.shape), "dtype": q.dtype, "head_dim_v": v.shape[-1]}
    values = {"alibi_slopes": digests.of_tensor(slopes), "sinks": digests.of_tensor(sinks)}
    fields = {"call": "tree_attention", **shape, **mask._asdict(), **values, **options}
    comm.check_consistent(fields, q.device)
    return comm


OPTIONS = {"softmax_scale", "softcap", "deterministic", "kernel"}


def _check(options: dict[str, object], tensors: Sequence[Tensor | None]) -> None:
    for name in sorted(set(options) - OPTIONS):
        raise UnsupportedError(f"decoding over several ranks does not take {name}")
    refuse_transforms("decoding over several ranks", *tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedError(
            "decoding over several ranks has no gradient: call it under torch.no_grad(), or train"
            " with context_parallel_attention"
        )
