"""Tree attention: decoding over a KV cache that is spread over ranks. Each rank attends to its own
keys, and the states of all ranks are merged (Shyam et al. 2024, arXiv:2408.04093). K and V do not
travel.

A state is head_dim_v + 1 fp32 numbers per row; a row is one query of one head. All rows together
have n bytes. Small states are all-gathered: one message to every rank, (P - 1) n bytes in. Larger
ones are reduced: every rank merges its share of the rows and all-gathers the result, two messages
to every rank, 2 (P - 1) / P n bytes. Both merge in rank order, so that all ranks get the same bits
either way.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from onchip.core.backend import accumulator_dtype
from onchip.core.derivatives import check_no_tangents, refuse_transforms
from onchip.core.functional import UNBOUNDED, attention, paged_attention
from onchip.core.problem import SCORE_OPTIONS, UnsupportedError, Window
from onchip.core.signatures import No, ScoreOptions, Yes
from onchip.core.state import add_sink, finalize, merge_out_lse, resume
from onchip.core.validation import check_layout, check_window, refuse_distributed
from onchip.parallel import digests
from onchip.parallel.comm import Comm, as_comm

OutLse = tuple[Tensor, Tensor]  # (out, lse)
Span = tuple[int, int]
KeyRange = tuple[int, int]  # (position of a rank's first key, positions in all)

# A message takes some 15 us whatever its size, and 512 kB take 10 us on a link of 50 GB/s. So a
# second message pays off only if it saves more than that.
SECOND_MESSAGE_BYTES = 512 << 10


class TreeOptions(ScoreOptions, total=False):
    """Options of tree_attention."""

    place: KeyRange | None


class TreePagedOptions(ScoreOptions, total=False):
    """Options of tree_paged_attention."""

    places: Sequence[KeyRange] | None
    k_scales: Tensor | None
    v_scales: Tensor | None


@overload
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, group: object = None, *, return_lse: No = False,
    **options: Unpack[TreeOptions],
) -> Tensor: ...  # fmt: skip
@overload
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, group: object = None, *, return_lse: Yes,
    **options: Unpack[TreeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, group: object = None, *, return_lse: bool,
    **options: Unpack[TreeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
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
    **options: Any,
) -> Tensor | OutLse:
    """attention() of new queries over keys that are spread over ranks.

    q: (batch, seqlen_q, heads, head_dim), the same on all ranks: the last seqlen_q positions. k, v:
    (batch, keys, kv_heads, dim) of this rank, maybe no key. place: (start, seqlen_k), if this rank
    has the positions from start on, of seqlen_k. Where every query sees every key (one query, or
    causal=False; no window, no ALiBi) the positions do not matter and place may be left out. All
    ranks get the same out (and lse). options: the names in OPTIONS, such as softmax_scale. No
    gradient.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_layout(name, t, 4, "(batch, seqlen, heads, head_dim)")
    _check(options, (q, k, v, sinks))
    mask = DecodeMask.of(q, causal, window_size, alibi_slopes)
    comm = _check_call(group, q, v, mask, alibi_slopes, sinks, options)
    calls = mask.calls(None if place is None else [place], [k.shape[1]])
    local = _LocalState.empty(q, v.shape[-1])
    for call in calls:
        rows, keys = slice(*call.rows), slice(call.keys[0])
        state = attention(
            q[:, rows],
            k[:, keys],
            v[:, keys],
            alibi_slopes=alibi_slopes,
            return_lse=True,
            out_dtype=local.out.dtype,
            **call.options,
            **options,
        )
        local.put(state, slice(None), call, alibi_slopes)
    return _finish(q, local, comm, sinks, return_lse, out_dtype)


@overload
def tree_paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, cache_seqlens: Tensor,
    group: object = None, *, return_lse: No = False, **options: Unpack[TreePagedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def tree_paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, cache_seqlens: Tensor,
    group: object = None, *, return_lse: Yes, **options: Unpack[TreePagedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def tree_paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, cache_seqlens: Tensor,
    group: object = None, *, return_lse: bool, **options: Unpack[TreePagedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
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
    **options: Any,
) -> Tensor | OutLse:
    """paged_attention() over pages that are spread over ranks; see tree_attention.

    q: (batch, seqlen_q, heads, head_dim). page_table and cache_seqlens are of this rank: it has
    cache_seqlens[b] keys of sequence b, from places[b][0] on of places[b][1] positions. With places
    the host reads cache_seqlens. 8-bit pages need k_scales and v_scales; ranks may mix 8-bit and
    other pages.
    """
    check_layout("q", q, 4, "(batch, seqlen_q, heads, head_dim)")
    _check(options, (q, k_pages, v_pages, sinks))
    mask = DecodeMask.of(q, causal, window_size, alibi_slopes)
    comm = _check_call(group, q, v_pages, mask, alibi_slopes, sinks, options)
    calls = mask.calls(places, cache_seqlens.tolist() if places is not None else [0])
    local = _LocalState.empty(q, v_pages.shape[-1])
    for call in calls:
        at, seqlens = slice(None), cache_seqlens
        if places is not None:
            at = torch.tensor(call.batch, device=q.device)
            seqlens = cache_seqlens.new_tensor(call.keys)
        slopes = _slopes_of(alibi_slopes, at)
        state = paged_attention(
            q[at, slice(*call.rows)],
            k_pages,
            v_pages,
            page_table[at],
            seqlens,
            k_scales=k_scales,
            v_scales=v_scales,
            alibi_slopes=slopes,
            return_lse=True,
            out_dtype=local.out.dtype,
            **call.options,
            **options,
        )
        local.put(state, at, call, slopes)
    return _finish(q, local, comm, sinks, return_lse, out_dtype)


class DecodeCall(NamedTuple):
    """One kernel call: `rows` of some sequences over the first keys[i] of this rank's keys of
    sequence batch[i], in a window aligned bottom-right. ahead[i]: how many positions the rows are
    after the position that the alignment gives them.
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
    """The positions that a query sees. splits_rows: ALiBi needs one call per row. A call measures
    ALiBi's distances from the aligned position of a query. For a single row that is wrong by a
    constant, which can be corrected; for several rows it is not a constant.
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
        """The calls of this rank. For every sequence: its place, and this rank's number of keys."""
        rows = (0, self.seqlen_q)
        if places is None:
            self._check_without_places()
            return [DecodeCall(rows, (None, None), [0], counts, [0])]
        _check_key_ranges(places, counts)
        by_window: dict[tuple[Span, Window], DecodeCall] = {}
        chunks = pairwise(range(self.seqlen_q + 1)) if self.splits_rows else [rows]
        for rows in chunks:
            for b, ((start, seqlen_k), count) in enumerate(zip(places, counts, strict=True)):
                self._add_rows(by_window, b, rows, seqlen_k - self.seqlen_q - start, count)
        return list(by_window.values())

    def _add_rows(self, by_window: dict, b: int, rows: Span, first: int, count: int) -> None:
        """Add the call of `rows` over `count` keys of sequence b to `by_window`. first: position of
        the first row, counted from the first key.
        """
        (lo, hi), (left, right) = rows, self.window_size
        last = first + hi - 1
        keys = count if right is None else min(count, last + right + 1)
        if lo >= hi or keys <= 0:
            return
        ahead = last - (keys - 1)
        if left is not None and left < ahead:  # the last rows see no key of this rank
            return self._add_rows(by_window, b, (lo, hi - (ahead - left)), first, count)
        left = None if left is None or left - ahead >= keys - 1 else left - ahead
        right = None if right is None or right + ahead >= hi - lo - 1 else right + ahead
        key = (lo, hi), (left, right)
        call = by_window.setdefault(key, DecodeCall(*key, [], [], []))
        for numbers, number in zip(call[2:], (b, keys, ahead), strict=True):
            numbers.append(number)

    def _check_without_places(self) -> None:
        left, right = self.window_size
        if left is not None or self.splits_rows or (right is not None and self.seqlen_q > 1):
            raise ValueError(
                "a window, ALiBi and causal queries need the positions of a rank's keys: give their"
                " place, (start, seqlen_k)"
            )


def _check_key_ranges(places: Sequence[KeyRange], counts: list[int]) -> None:
    if len(places) != len(counts):
        raise ValueError(f"there are {len(places)} places for {len(counts)} sequences")
    for b, ((start, seqlen_k), count) in enumerate(zip(places, counts, strict=True)):
        if not 0 <= start <= start + count <= seqlen_k:
            raise ValueError(
                f"sequence {b}: {count} keys from {start=} on are not within {seqlen_k=}"
            )


class _LocalState(NamedTuple):
    """The state of this rank, unrounded: out (batch, seqlen_q, heads, head_dim_v), lse (batch,
    heads, seqlen_q).
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
        self, state: OutLse, at: slice | Tensor, call: DecodeCall, slopes: Tensor | None
    ) -> None:
        rows, (out, lse) = slice(*call.rows), state
        if slopes is not None:
            ahead = torch.tensor(call.ahead, device=lse.device)[:, None, None]
            lse = lse - slopes.to(lse.dtype)[..., None] * ahead
        self.out[at, rows], self.lse[at, :, rows] = out, lse


def merge_over_ranks(out: Tensor, lse: Tensor, comm: Comm) -> OutLse:
    """Merge the states of all ranks: out (batch, seqlen_q, heads, head_dim_v) and lse (batch,
    heads, seqlen_q).
    """
    states = torch.cat([out, lse.transpose(1, 2)[..., None]], -1)
    rows = states.flatten(0, 2)
    saved_bytes = rows.nbytes * (comm.size - 1) * (comm.size - 2) // comm.size
    merged = (
        _merge_by_exchange(rows, comm)
        if saved_bytes > SECOND_MESSAGE_BYTES
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
    """Merge states (rows, head_dim_v + 1) over disjoint keys."""
    out, lse = merge_out_lse([p[:, :-1] for p in parts], [p[:, -1] for p in parts])
    return torch.cat([out, lse[:, None]], -1)


def _finish(
    q: Tensor,
    local: _LocalState,
    comm: Comm,
    sinks: Tensor | None,
    return_lse: bool,
    out_dtype: torch.dtype | None,
) -> Tensor | OutLse:
    out, lse = merge_over_ranks(*local, comm)
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
    """The communicator, after the ranks have compared their calls."""
    comm = as_comm(group)
    shape = {"q": tuple(q.shape), "dtype": q.dtype, "head_dim_v": v.shape[-1]}
    values = {"alibi_slopes": digests.of_tensor(slopes), "sinks": digests.of_tensor(sinks)}
    fields = {"call": "tree_attention", **shape, **mask._asdict(), **values, **options}
    comm.check_consistent(fields, q.device)
    return comm


OPTIONS = {*SCORE_OPTIONS, "deterministic", "kernel"}


def _check(options: dict[str, object], tensors: Sequence[Tensor | None]) -> None:
    for name in sorted(set(options) - OPTIONS):
        raise UnsupportedError(f"decoding over several ranks does not take {name}")
    refuse_transforms("decoding over several ranks", *tensors)
    check_no_tangents("decoding over several ranks")
    refuse_distributed("decoding over several ranks", *tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedError(
            "decoding over several ranks has no gradient: call it under torch.no_grad(), or train"
            " with context_parallel_attention"
        )
