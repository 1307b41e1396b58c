"""Keys that lie in pages, gathered into packed sequences on the host: every option of
varlen_attention then applies.
"""

import torch
from torch import Tensor

from onchip.problem import UnsupportedError


def gather(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_table: Tensor,
    cache_seqlens: Tensor,
    queries: tuple[Tensor | None, int | None],
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, int, int]]:
    """(k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)) of a paged call."""
    _check(q, pages, page_table, cache_seqlens, queries)
    lengths = cache_seqlens.tolist()
    page_size = pages[0].shape[1]
    _check_values(page_table, lengths, page_size, pages[0].shape[0])
    slots = torch.cat(
        [_slots(page_table[b], n, page_size) for b, n in enumerate(lengths)]
        or [page_table.new_empty(0)]
    )
    k, v = (p.flatten(0, 1)[slots] for p in pages)
    cu_seqlens_k = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu_seqlens_q, max_seqlen_q = queries
    if cu_seqlens_q is None or max_seqlen_q is None:
        max_seqlen_q = q.shape[1]
        cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32) * max_seqlen_q
    return k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max(lengths, default=0))


def _slots(table: Tensor, length: int, page_size: int) -> Tensor:
    """Flat slot of each of the first `length` tokens of one sequence."""
    position = torch.arange(length)
    return table[position // page_size].long() * page_size + position % page_size


def _check(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_table: Tensor,
    cache_seqlens: Tensor,
    queries: tuple[Tensor | None, int | None],
) -> None:
    tensors = {"q": q, "k_pages": pages[0], "v_pages": pages[1]}
    tensors |= {"page_table": page_table, "cache_seqlens": cache_seqlens}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.device.type != "cpu":
            raise UnsupportedError(f"paged_attention runs on the CPU, {name} is on {t.device}")
    for name in ("k_pages", "v_pages"):
        shape = tuple(tensors[name].shape)
        if len(shape) != 4 or shape[:3] != tuple(pages[0].shape[:3]):
            raise ValueError(f"{name} must be (num_pages, page_size, kv_heads, dim), got {shape}")
    batch = _check_queries(q, *queries)
    for name, rank in (("page_table", 2), ("cache_seqlens", 1)):
        t = tensors[name]
        if t.dtype != torch.int32 or t.dim() != rank or t.shape[0] != batch:
            got = f"{t.dtype} {tuple(t.shape)}"
            raise ValueError(f"{name} must be int32 of rank {rank} with batch {batch}, got {got}")


def _check_queries(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int:
    """The batch of the call."""
    packed = cu_seqlens_q is not None
    if packed != (max_seqlen_q is not None) or q.dim() != (3 if packed else 4):
        raise ValueError(
            "q must be (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with"
            f" cu_seqlens_q and max_seqlen_q, got shape {tuple(q.shape)}"
        )
    return cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]


def _check_values(page_table: Tensor, lengths: list[int], page_size: int, num_pages: int) -> None:
    room = page_table.shape[1] * page_size
    for b, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise ValueError(f"cache_seqlens[{b}]={length} must lie between 0 and {room} slots")
        pages = page_table[b, : -(-length // page_size)].tolist()
        if pages and not 0 <= min(pages) <= max(pages) < num_pages:
            raise ValueError(f"page_table[{b}] leaves [0, num_pages={num_pages}): {pages}")
