"""One call of attention as records: Tensors, Options and Problem.

    public function -> prepare_attention -> prepare -> describe -> Problem.of -> CachedCall
                       autocast, mask       cache      validation  construction

`prepare` is in call_cache.py, `describe` in validation.py (of paged calls in paged.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import DeferredMask

# Of q and k, and of v. 576 and 512: multi-head latent attention over its latent cache, where 64
# columns of the keys are rotated and the others are the values, too.
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The operands of the forward's two matrix products. None: q, k and v as given. A name of
# LOW_PRECISIONS: a recipe of onchip/quant/recipes.py. "auto": FP8 where a GPU is faster with it.
EIGHT_BIT_PRECISIONS = ("fp8", "int8", "int8_pv16")
FOUR_BIT_PRECISIONS = ("nvfp4", "nvfp4_pv8", "mxfp4")
LOW_PRECISIONS = (*EIGHT_BIT_PRECISIONS, *FOUR_BIT_PRECISIONS)
PRECISIONS = (None, *LOW_PRECISIONS, "auto")
Window = tuple[int | None, int | None]
# The tensors of a call that have gradients, in the order of `Grads` (backend.py). LEARNED: those
# that a call may lack.
LEARNED = ("bias", "sinks", "captured")
DIFFERENTIABLE = ("q", "k", "v", *LEARNED)


class UnsupportedError(ValueError):
    """A valid call that no available kernel serves. The message says what would work."""


def check_head_dims(head_dim: int, head_dim_v: int) -> None:
    """Raise ValueError for head dimensions that no kernel serves."""
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM_V):
        raise ValueError(
            f"{head_dim=} must be between 1 and {MAX_HEAD_DIM}, and {head_dim_v=} between 1 and"
            f" {MAX_HEAD_DIM_V}"
        )


class Tensors(NamedTuple):
    """The tensors of one call. Packed calls have rank-3 q, k, v and both cu_seqlens. In paged calls
    k and v are pages, q is dense or packed, and cu_seqlens_k is None.

    positions_q and positions_k belong to a dense call that computes any part of a larger call.
    positions_q, int32 (2, seqlen_q), holds the position of each query in its sequence, and the
    number of its sequence within the batch entry. positions_k, int32 (seqlen_k,), holds the
    position of each key. ALiBi and dropout use them; causal and window use the indices of the call.

    captured and captured_ints, of one dimension, belong to calls with score_mod: the elements of
    the floats, and of the integers and bools, that the function indexes (ScoreMod.flatten).

    k_scales and v_scales, fp32 (num_pages, page_size, num_kv_heads), belong to pages of 8 bits: a
    key is its stored values times its scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    captured: Tensor | None = None
    captured_ints: Tensor | None = None
    dropout_seed: Tensor | None = None
    page_table: Tensor | None = None
    cache_seqlens: Tensor | None = None
    tree_mask: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    mask: BlockMask | DeferredMask | None = None


class SMPartition(NamedTuple):
    """One of two calls that run at once, each on some of a device's processors. The second follows
    the first in the stream, with no launch in between, and reads only data written before the first
    began. It writes and ends after the first, so later launches need to wait for the second alone.
    """

    programs: int  # of this call
    second: bool  # whether this is the second of the two


class Options(NamedTuple):
    """The scalar options of a call, as the caller gave them. With `Tensors`, this is the field
    table of a call.

    `Problem` repeats these fields in this order. The schema, flattening, unflattening and fakes of
    the torch op (torch_op.py) are generated from them, and `explain` takes and prints them by name.
    To add an option:

    1. A scalar: a field here, the same field in `Problem`, a check in `resolve_options`; a scalar
       of single scores also goes into SCORE_OPTIONS. A tensor: a field before `mask` in `Tensors`,
       a flag `has_NAME` in `Problem` that `Problem.of` sets, a check in `check_extras`, its batch
       and head dimensions in core/dtensor.py. A tensor with a gradient: also LEARNED and a field of
       `Grads` and `Tangents` (backend.py); schemas, fakes, autograd and vmap follow these. Now
       every backend refuses it.
    2. The public functions: `attention`, `varlen_attention`, `paged_attention` (core/paged.py
       collects its tensors by name), `attention_weights` and `context_parallel_attention`
       (parallel/rounds.py makes the tensors of a round), as far as they take it. Their types are in
       core/signatures.py, where each class names its functions.
    3. The kernels that compute it, forward and backward, and declare it in `Backend.options`. The
       CPU kernels read scores from kernels/cpu/scores.py. `tiled` has the chain rule in
       `_backward_head_slice`, for forward mode in kernels/cpu/tangent.py and for second derivatives
       in second.py; tangent.py declares the options of both. `reference` differentiates the scores
       by autograd.
    4. The score formula of docs/fold.md and the oracle in testing.py, with which tests compare.
    5. docs/options.md and docs/limits.md, a row of benchmarks.tables.SUPPORT_ROWS (then `python -m
       benchmarks.tables`), and the lists of options of the tests in tests/core (declared_options,
       contract, torch_op, validation; a tensor: dtensor) and of tests/random_problems.py.
    """

    out_dtype: torch.dtype | None = None  # None: q's
    softmax_scale: float | None = None  # None: 1 / sqrt(head_dim)
    causal: bool = False
    window_size: Window = (None, None)
    softcap: float = 0.0
    score_mod: str | None = None  # ScoreMod.text
    dropout_p: float = 0.0
    return_stats: bool = False
    deterministic: bool = False
    reproducible: bool = False
    return_lse: bool = False
    precise_delta: bool = False
    precision: str | None = None
    sm_partition: SMPartition | None = None
    captured_is_constant: bool = False


# Options that act on one score alone. A call over some of the keys (a level of a cascade, a
# segment, the keys of one rank) takes them unchanged.
SCORE_OPTIONS = ("softmax_scale", "softcap")
# Fields of Problem that have a default but are not declared in Backend.options. precision is
# declared in Backend.precisions, with its values. precise_delta is computed outside of backends. A
# backend may ignore the others: they change no result.
UNDECLARED = frozenset(
    (
        *("precision", "precise_delta", "return_lse", "sm_partition", "captured_is_constant"),
        *("aligned", "uniform_lengths", "latent"),
    )
)


class Problem(NamedTuple):
    """One call without its tensors: hashable, because plans are cached on it. The lengths of a
    packed call are the longest of its batch. The seqlen_k of a paged call is the capacity of a row
    of its page table, in tokens.

    The fields with a default are the options of the call, except those in UNDECLARED.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    # The fields of Options, in the same order, with defaults resolved.
    out_dtype: torch.dtype
    softmax_scale: float
    causal: bool = False
    window_size: Window = (None, None)
    softcap: float = 0.0
    score_mod: str | None = None
    dropout_p: float = 0.0
    return_stats: bool = False
    deterministic: bool = False
    reproducible: bool = False
    return_lse: bool = False  # to the caller; an lse for autograd alone may be less exact
    precise_delta: bool = False  # the backward gets the rounding error of out, too
    precision: str | None = None  # of the forward's operands, one of PRECISIONS
    sm_partition: SMPartition | None = None  # kernels without this ability ignore it
    captured_is_constant: bool = False  # dcaptured is not needed; torch_op.py sets it
    # Which tensors the call has.
    packed: bool = False
    has_mask: bool = False
    has_alibi: bool = False
    has_bias: bool = False
    has_sinks: bool = False
    has_tree_mask: bool = False
    has_positions: bool = False
    page_size: int = 0  # tokens per page; 0: keys are not paged
    page_dtype: torch.dtype | None = None  # of 8-bit pages, which have scales; None: q's dtype
    # Set with _replace: by resolve_layout for dispatch, and by callers that compute a part of a
    # larger call.
    aligned: bool = True  # see is_aligned
    uniform_lengths: bool = False  # see has_uniform_lengths
    latent: bool = False  # see keys_hold_values
    first_head: int = 0  # number of the first head within the larger call: dropout depends on it
    wide_grads: bool = False  # return the gradients of 16-bit tensors unrounded, in fp32

    @classmethod
    def of(cls, x: Tensors, options: Options, max_seqlens: Sequence[int] = ()) -> "Problem":
        """Build the Problem of validated tensors and resolved options. No other code builds a
        Problem from tensors. max_seqlens: (max_seqlen_q, max_seqlen_k) of a packed call.
        """
        q, k, v = x.q, x.k, x.v
        packed, has_pages = x.cu_seqlens_q is not None, x.page_table is not None
        if has_pages:
            seqlen_k = x.page_table.shape[1] * k.shape[1]
        else:
            seqlen_k = max_seqlens[1] if packed else k.shape[1]
        return cls(
            x.cu_seqlens_q.shape[0] - 1 if packed else q.shape[0],
            max_seqlens[0] if packed else q.shape[1],
            seqlen_k,
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            v.shape[-1],
            q.dtype,
            *options,
            packed=packed,
            has_mask=x.mask is not None,
            has_alibi=x.alibi_slopes is not None,
            has_bias=x.bias is not None,
            has_sinks=x.sinks is not None,
            has_tree_mask=x.tree_mask is not None,
            has_positions=x.positions_q is not None,
            page_size=k.shape[1] if has_pages else 0,
            page_dtype=None if x.k_scales is None else k.dtype,
        )

    @property
    def used_options(self) -> list[str]:
        """The options that do not have their default. A backend that runs the call declares each
        of them (`Backend.options`).
        """
        options = self._field_defaults.items()
        used = [name for name, default in options if getattr(self, name) != default]
        return [name for name in used if name not in UNDECLARED]

    @property
    def widest(self) -> int:
        """The larger of the head dimensions."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def window(self) -> Window:
        """window_size with causal applied: causal is a right side of 0."""
        left, right = self.window_size
        return left, 0 if self.causal else right

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one batch entry and head that causal and window leave visible. A
        block mask is not counted.
        """
        left, right = self.window
        offset = self.seqlen_k - self.seqlen_q
        rows = torch.arange(self.seqlen_q)
        hi = torch.full_like(rows, self.seqlen_k) if right is None else rows + offset + right + 1
        lo = torch.zeros_like(rows) if left is None else rows + offset - left
        return int((hi.clamp(max=self.seqlen_k) - lo.clamp(min=0)).clamp(min=0).sum())

    @property
    def seen_queries(self) -> int:
        """Queries of a sequence that see at least one key under causal and window."""
        _, right = self.window
        most = self.seqlen_q if right is None else self.seqlen_k + right
        return min(self.seqlen_q, most) if self.seqlen_k else 0

    @property
    def seen_keys(self) -> int:
        """Keys of a sequence that at least one query sees under causal and window."""
        left, _ = self.window
        most = self.seqlen_k if left is None else self.seqlen_q + left
        return min(self.seqlen_k, most) if self.seqlen_q else 0

    @property
    def flops(self) -> int:
        """Operations of the two products over the visible pairs; a multiply-add counts as two."""
        return self.batch * self.num_heads * self.visible_pairs * self._flops_per_pair

    @property
    def all_flops(self) -> int:
        """flops if every query saw every key."""
        pairs = self.seqlen_q * self.seqlen_k
        return self.batch * self.num_heads * pairs * self._flops_per_pair

    @property
    def _flops_per_pair(self) -> int:
        return 2 * (self.head_dim + self.head_dim_v)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value, of one head, with the scales of 8-bit pages."""
        return self._stored_bytes(self.head_dim) + self.value_bytes

    @property
    def value_bytes(self) -> int:
        """Bytes of one value of one head, with the scale of 8-bit pages; 0 if the key holds it."""
        return 0 if self.latent else self._stored_bytes(self.head_dim_v)

    def _stored_bytes(self, dim: int) -> int:
        if self.page_dtype is None:
            return dim * self.dtype.itemsize
        return dim * self.page_dtype.itemsize + torch.float32.itemsize

    @property
    def min_bytes(self) -> int:
        """The least traffic of an exact algorithm: each visible input is read once, each output is
        written once. A block mask, which may hide more, is not counted.
        """
        queries = self.batch * self.seqlen_q * self.num_heads
        seen = self.batch * self.seen_queries * self.num_heads
        keys = self.batch * self.seen_keys * self.num_kv_heads
        read = seen * self.head_dim * self.dtype.itemsize + keys * self.key_bytes
        written = queries * (self.head_dim_v * self.out_dtype.itemsize + 4)
        return read + written + self.residual_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of the rounding error of out, which precise_delta saves for the backward."""
        elements = self.batch * self.seqlen_q * self.num_heads * self.head_dim_v
        return elements * self.out_dtype.itemsize if self.precise_delta else 0


def keys_hold_values(x: Tensors) -> bool:
    """Whether the values of a paged call are the first columns of its keys, in the same memory."""
    k, v = x.k, x.v
    if v.shape[3] > k.shape[3] or k.dtype != v.dtype or not _start_together(k, v):
        return False
    k_scales, v_scales = x.k_scales, x.v_scales
    if k_scales is None or v_scales is None:
        return k_scales is v_scales
    return _start_together(k_scales, v_scales)


def _start_together(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def is_aligned(x: Tensors) -> bool:
    """Whether the base addresses and strides of q, k and v are multiples of 16 bytes, and the page
    stride is a multiple of the slot stride, as TMA requires.
    """
    if x.page_table is not None and not all(_is_page_multiple_of_slot(t) for t in x[1:3]):
        return False
    bits = 0
    for t in x[:3]:
        bits, itemsize = bits | t.data_ptr(), t.element_size()
        for stride in t.stride()[:-1]:
            bits |= stride * itemsize
    return bits % 16 == 0


def has_uniform_lengths(problem: Problem, x: Tensors) -> bool:
    """Whether packed queries over pages fill at least three quarters of batch x max_seqlen_q. This
    needs no values of cu_seqlens. It is False for batches that mix prefill chunks and decodes.
    """
    packed = problem.packed and problem.page_size > 0
    return packed and 4 * x.q.shape[0] >= 3 * problem.batch * problem.seqlen_q


def resolve_layout(problem: Problem, x: Tensors) -> Problem:
    """Set `latent`, and on a GPU `aligned` and `uniform_lengths`, from the tensors, for dispatch.
    No other code calls this, because under torch.compile lengths may be SymInts, and comparing
    them would add guards.
    """
    if problem.page_size and keys_hold_values(x):
        problem = problem._replace(latent=True)
    if not x.q.is_cuda:
        return problem
    aligned, uniform_lengths = is_aligned(x), has_uniform_lengths(problem, x)
    if aligned and not uniform_lengths:
        return problem
    return problem._replace(aligned=aligned, uniform_lengths=uniform_lengths)


def _is_page_multiple_of_slot(pages: Tensor) -> bool:
    page, slot = pages.stride()[:2]
    return slot > 0 and page % slot == 0
