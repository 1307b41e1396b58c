"""Attention of a sequence that is spread over ranks: one function for all strategies, with its
gradient.
"""

from typing import NamedTuple, Unpack, overload

import torch
from torch import Tensor

from onchip.core.derivatives import refuse_transforms
from onchip.core.functional import autocast, seed_tensor
from onchip.core.problem import Options, Tensors, UnsupportedError, Window
from onchip.core.signatures import No, TrainingOptions, Yes
from onchip.core.validation import check_qkv, describe, refuse_distributed
from onchip.masks import BlockMask, MaskLike, as_mask
from onchip.parallel import digests
from onchip.parallel.comm import Comm
from onchip.parallel.mesh2d import Mesh2D
from onchip.parallel.rounds import GlobalMask, RoundOptions, count_hops
from onchip.parallel.sharding import Layout, as_layout, document_offsets
from onchip.parallel.strategy import GroupLike, as_ranks, choose_strategy, run_strategy


class ContextParallelOptions(TrainingOptions, total=False):
    """Options of context_parallel_attention."""

    strategy: str
    layout: str | Layout
    seqlen: int | None
    cu_seqlens: Tensor | None
    mask: "MaskLike | None"


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: GroupLike = None, *, return_lse: No = False,
    **options: Unpack[ContextParallelOptions],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: GroupLike = None, *, return_lse: Yes,
    **options: Unpack[ContextParallelOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: GroupLike = None, *, return_lse: bool,
    **options: Unpack[ContextParallelOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@torch.compiler.disable
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: GroupLike = None,
    *,
    strategy: str = "auto",
    layout: str | Layout = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    mask: object = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
    precise_delta: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of one sequence over all ranks of a group. Each rank passes its part of q, k and
    v under the layout. The result is the same on any number of ranks, dropout included, and
    differentiable.

    q: (batch, local, heads, head_dim); k, v: (batch, local, kv_heads, dim), where local is
    layout.length(rank, seqlen) (see `onchip.parallel.sharding`). Packed documents: (local, heads,
    dim) and the cu_seqlens of the whole sequence, the same on all ranks (on the CPU; on a GPU the
    host waits for the values). seqlen: of the whole sequence, if it is neither the end of
    cu_seqlens nor size * local. group: a ProcessGroup, a DeviceMesh, a Comm, or None for all ranks.

    strategy: "ring"; "ulysses" (each rank computes some heads); "hybrid" (groups of neighbours
    exchange heads, and the groups form a ring; in a two-dimensional DeviceMesh the first dimension
    is the ring); "allgather" (all keys on every rank); or "auto", the one of the first three that
    sends least.

    causal, window_size, mask and ALiBi are over positions in the whole sequence (in the document,
    if packed). mask: any that attention() takes, over (seqlen, seqlen). lse: (batch, heads, local),
    or (heads, local). All ranks make the same call. It is compared before every forward and
    backward, and a ParallelError names the difference (docs/ring.md lists the compared arguments).

    sinks and alibi_slopes are the same on all ranks. The gradient of sinks is that of the local
    queries, like that of any weight: sum it over the ranks. dropout_seed: the same on all ranks; by
    default rank 0 draws it.
    """
    refuse_transforms("context_parallel_attention", q, k, v, sinks)
    refuse_distributed("context_parallel_attention", q, k, v)
    ranks = as_ranks(group)
    q, k, v = autocast(q, k, v)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = Options(
        out_dtype=out_dtype,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        precise_delta=precise_delta,
    )
    x = Tensors(q, k, v, alibi_slopes=alibi_slopes, sinks=sinks)
    sequence = GlobalSequence.of(
        ranks, layout, check_inputs(x, options, cu_seqlens), seqlen, cu_seqlens
    )
    global_mask = make_global_mask(sequence, x, options, mask)
    fields = _shared_arguments(
        strategy, sequence, global_mask, options, x, dropout_seed if dropout_p else None
    )
    ranks.check_consistent({"pass": "forward", **fields}, q.device)
    seed = _shared_seed(ranks, dropout_seed, q) if dropout_p else None
    round_options = RoundOptions(
        options, kernel, alibi_slopes, seed, precise_delta=_needs_residual(options, x)
    )
    if cu_seqlens is not None:
        x = x._replace(q=q[None], k=k[None], v=v[None])
    choice = choose_strategy(
        strategy, ranks, q.shape[-2], k.shape[-2], count_hops(sequence.layout, global_mask)
    )
    before_backward = lambda: ranks.check_consistent({"pass": "backward", **fields}, q.device)
    call = ranks, sequence.layout, global_mask, round_options, x
    out, lse = run_strategy(choice, *call, out_dtype or q.dtype, before_backward)
    if cu_seqlens is not None:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


class GlobalSequence(NamedTuple):
    """The sequence that is spread over the ranks."""

    layout: Layout
    seqlen: int
    documents: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        comm: Comm | Mesh2D,
        layout: str | Layout,
        local: int,
        seqlen: int | None,
        cu_seqlens: Tensor | None,
    ) -> "GlobalSequence":
        """The sequence of which this rank has `local` positions."""
        layout = as_layout(layout, comm.size)
        documents = (
            None if cu_seqlens is None else tuple(document_offsets(cu_seqlens, seqlen).tolist())
        )
        if seqlen is None:
            seqlen = comm.size * local if documents is None else documents[-1]
        if isinstance(seqlen, bool) or not isinstance(seqlen, int) or seqlen < 0:
            raise ValueError(f"{seqlen=} must be a non-negative int")
        held = layout.length(comm.rank, seqlen)
        if held != local:
            raise ValueError(
                f"rank {comm.rank} holds {held} of {seqlen=} positions under {layout}, its q, k and"
                f" v have {local}: give seqlen=, the length of the whole sequence"
            )
        return cls(layout, seqlen, documents)


def check_inputs(x: Tensors, options: Options, cu_seqlens: Tensor | None) -> int:
    """Check all that needs no other rank. Returns the number of local positions."""
    check_qkv(*x[:3], rank=4 if cu_seqlens is None else 3)
    if x.q.shape[-3] != x.k.shape[-3]:
        raise UnsupportedError(
            f"q has {x.q.shape[-3]} local positions, k and v have {x.k.shape[-3]}: queries and keys"
            " must be of one sequence"
        )
    if cu_seqlens is None:
        describe(x, options)
        return x.q.shape[1]
    if x.alibi_slopes is not None and x.alibi_slopes.dim() > 1:
        raise UnsupportedError("alibi_slopes must be (heads,) for documents that ranks share")
    dense = x._replace(q=x.q[None], k=x.k[None], v=x.v[None])
    describe(dense, options)
    return x.q.shape[0]


def make_global_mask(
    sequence: GlobalSequence, x: Tensors, options: Options, mask: object
) -> GlobalMask:
    """The keys that the queries of the whole sequence see."""
    packed = sequence.documents is not None
    if mask is not None and packed:
        raise UnsupportedError("documents take no mask: use mask=masks.document(cu_seqlens) & mask")
    planes = (1 if packed else x.q.shape[0], x.q.shape[-2])
    if mask is not None:
        mask = as_mask(mask)
        if isinstance(mask, BlockMask):
            _check_fit(mask, (*planes, sequence.seqlen, sequence.seqlen))
    uses_positions = bool(options.dropout_p) or x.alibi_slopes is not None
    seen = options.causal, tuple(options.window_size), sequence.documents, mask
    return GlobalMask(sequence.seqlen, *seen, planes, uses_positions)


def _check_fit(mask: BlockMask, shape: tuple[int, int, int, int]) -> None:
    fits = all(n in (1, m) for n, m in zip(mask.shape[:2], shape, strict=False))
    if not fits or mask.shape[2:] != shape[2:]:
        raise ValueError(f"mask of shape {mask.shape} does not fit scores of shape {shape}")


def _shared_arguments(
    strategy: str,
    sequence: GlobalSequence,
    global_mask: GlobalMask,
    options: Options,
    x: Tensors,
    seed: int | Tensor | None,
) -> dict[str, object]:
    """The arguments that must be equal on all ranks. Otherwise messages would not fit, or would fit
    and give a rank the keys of a different call.
    """
    return {
        "call": "context_parallel_attention",
        "strategy": strategy,
        "layout": str(sequence.layout),
        "seqlen": sequence.seqlen,
        "cu_seqlens": digests.of_documents(sequence.documents),
        "batch": global_mask.planes[0],
        "q": (x.q.shape[-2:], x.q.dtype, x.q.device.type),
        "k": (x.k.shape[-2:], x.k.dtype),
        "v": (x.v.shape[-2:], x.v.dtype),
        "mask": digests.of_mask(
            global_mask.mask, global_mask.planes, global_mask.seqlen, x.q.device
        ),
        "sinks": digests.of_tensor(x.sinks),
        "alibi_slopes": digests.of_tensor(x.alibi_slopes),
        "dropout_seed": digests.of_tensor(seed) if isinstance(seed, Tensor) else seed,
        "grad": torch.is_grad_enabled() and any(t.requires_grad for t in x[:3]),
        **options._asdict(),
    }


def _needs_residual(options: Options, x: Tensors) -> bool:
    """Whether out is rounded, and a backward will use the residual."""
    is_rounded = (options.out_dtype or x.q.dtype).itemsize == 2
    leaves = (t for t in (x.q, x.k, x.v, x.sinks) if t is not None)
    has_backward = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
    return options.precise_delta and is_rounded and has_backward


def _shared_seed(comm: Comm | Mesh2D, seed: int | Tensor | None, q: Tensor) -> Tensor:
    if seed is not None:
        return seed_tensor(seed, q)
    drawn = seed_tensor(None, q)
    if comm.rank:
        drawn.zero_()
    comm.sum(drawn).wait()
    return drawn
