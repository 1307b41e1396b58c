"""One call of attention as records (Tensors, Options, Problem), its validation and its cache.

    public function -> prepare_attention -> prepare -> describe -> Problem.of -> CachedCall
                       autocast, mask       cache      validation  construction

`describe` validates everything but the values of tensors. Code below it does not validate again.
"""

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip.core.arguments import as_int, check_flag
from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import DeferredMask

MAX_HEAD_DIM = 256
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The operands of the forward's two matrix products. None: q, k and v as given. A name of
# LOW_PRECISIONS: a recipe of onchip/quant/recipes.py. "auto": FP8 where a GPU is faster with it.
LOW_PRECISIONS = ("fp8", "int8", "int8_pv16")
PRECISIONS = (None, *LOW_PRECISIONS, "auto")
Window = tuple[int | None, int | None]


class UnsupportedError(ValueError):
    """A valid call that no available kernel serves. The message says what would work."""


class Tensors(NamedTuple):
    """The tensors of one call. Packed calls have rank-3 q, k, v and both cu_seqlens. In paged calls
    k and v are pages, q is dense or packed, and cu_seqlens_k is None.

    positions_q and positions_k belong to a dense call that computes any part of a larger call.
    positions_q, int32 (2, seqlen_q), holds the position of each query in its sequence, and the
    number of its sequence within the batch entry. positions_k, int32 (seqlen_k,), holds the
    position of each key. ALiBi and dropout use them; causal and window use the indices of the call.

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
    the torch op (torch_op.py) are generated from them, and `explain` takes them by name. To add a
    scalar option: a field here, the same field in `Problem`, a check in `resolve_options`. To add a
    tensor: a field in `Tensors`, a flag in `Problem` that `Problem.of` sets, a check in
    `check_extras`. An option of single scores also goes into SCORE_OPTIONS. Then the public
    functions, the kernels that serve it, a refusal in `supports` of each kernel that does not, the
    oracle in `testing`, and docs/options.md.
    """

    out_dtype: torch.dtype | None = None  # None: q's
    softmax_scale: float | None = None  # None: 1 / sqrt(head_dim)
    causal: bool = False
    window_size: Window = (None, None)
    softcap: float = 0.0
    dropout_p: float = 0.0
    return_stats: bool = False
    deterministic: bool = False
    return_lse: bool = False
    precise_delta: bool = False
    precision: str | None = None
    sm_partition: SMPartition | None = None


# Options that act on one score alone. A call over some of the keys (a level of a cascade, a
# segment, the keys of one rank) takes them unchanged.
SCORE_OPTIONS = ("softmax_scale", "softcap")


class Problem(NamedTuple):
    """One call without its tensors: hashable, because plans are cached on it. The lengths of a
    packed call are the longest of its batch. The seqlen_k of a paged call is the capacity of a row
    of its page table, in tokens.
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
    dropout_p: float = 0.0
    return_stats: bool = False
    deterministic: bool = False
    return_lse: bool = False  # to the caller; an lse for autograd alone may be less exact
    precise_delta: bool = False  # the backward gets the rounding error of out, too
    precision: str | None = None  # of the forward's operands, one of PRECISIONS
    sm_partition: SMPartition | None = None  # kernels without this ability ignore it
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
        dims = self.head_dim + self.head_dim_v
        if self.page_dtype is None:
            return dims * self.dtype.itemsize
        return dims * self.page_dtype.itemsize + 2 * torch.float32.itemsize

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


class DeviceInfo(NamedTuple):
    """The device that a problem runs on. capability is CUDA's (major, minor), None elsewhere. name
    is the architecture on AMD (gfx942).
    """

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    has_triton: bool = True


@lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    has_triton = find_spec("triton") is not None
    if device.type != "cuda":
        return DeviceInfo(device.type, has_triton=has_triton)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return DeviceInfo("hip", properties.gcnArchName.split(":")[0], None, has_triton)
    capability = properties.major, properties.minor
    return DeviceInfo("cuda", properties.name, capability, has_triton)


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of this name, or raise ValueError if this machine has none."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"there is no device {str(name)!r} here: {reason}") from error
    return device


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
    """Set `aligned` and `uniform_lengths` from tensors on a GPU, for dispatch. No other code calls
    this, because under torch.compile lengths may be SymInts, and comparing them would add guards.
    """
    if not x.q.is_cuda:
        return problem
    aligned, uniform_lengths = is_aligned(x), has_uniform_lengths(problem, x)
    if aligned and not uniform_lengths:
        return problem
    return problem._replace(aligned=aligned, uniform_lengths=uniform_lengths)


def _is_page_multiple_of_slot(pages: Tensor) -> bool:
    page, slot = pages.stride()[:2]
    return slot > 0 and page % slot == 0


FLAGS = tuple(name for name, kind in Options.__annotations__.items() if kind is bool)


class CachedCall(NamedTuple):
    """A Problem and the cache of its launches (kernels/runtime/replay.py). Calls with the same
    options, and tensors of the same shapes, strides, dtypes and devices, share one CachedCall.
    `cache` is None for calls that are not cached.
    """

    problem: Problem
    cache: dict[tuple, Any] | None = None


T = TypeVar("T")
MAX_CACHED_CALLS = 1024  # a few kB each
Describe = Callable[[Tensors, Any, Any], Problem]
_cached_calls: dict[tuple | None, CachedCall] = {}
_lock = threading.Lock()


def prepare(describe: Describe, x: Tensors, options: Options | Problem, lengths: Any) -> CachedCall:
    """Look up the CachedCall of describe(x, options, lengths), or make one. A repeated call is not
    validated again: the key holds everything that validation reads, which is no value of a tensor.
    Not cached: calls with a mask, and calls under torch.compile or tracing, where lengths may be
    SymInts.
    """
    if x.mask is not None or not is_eager(x.q):
        return CachedCall(describe(x, options, lengths))
    try:
        key = _signature(describe, x, options, lengths)
        call = _cached_calls.get(key)
    except (TypeError, RuntimeError):  # a window that is a list, a subclass of Tensor
        return CachedCall(describe(x, options, lengths))
    if call is not None:
        return call
    call = CachedCall(describe(x, options, lengths), {})
    return insert_bounded(_cached_calls, key, call, MAX_CACHED_CALLS)


def _signature(describe: Describe, x: Tensors, options: Options | Problem, lengths: Any) -> tuple:
    """The key of a call. It has the types of numbers, too: True == 1, but True is not a length."""
    numbers = lengths if isinstance(lengths, tuple) else (lengths,)
    key = [describe, options, lengths, *map(type, (*options, *options.window_size, *numbers))]
    records = torch.is_grad_enabled()
    for t in x[:-1]:
        if t is None:
            key.append(None)
        elif type(t) in PLAIN:
            key += (t.shape, t.stride(), t.dtype, t.device, records and t.requires_grad)
        else:
            raise TypeError(f"{type(t).__name__} has no signature")
    return tuple(key)


def insert_bounded(table: dict, key: tuple, value: T, max_entries: int) -> T:
    """Return table[key], inserting value if the key is missing. A full table evicts its oldest
    entry, not the least recently used one: recording each use would cost every call, and an evicted
    entry still in use costs one slow call per `max_entries` new ones.
    """
    with _lock:
        if key not in table and len(table) >= max_entries:
            del table[next(iter(table))]
        return table.setdefault(key, value)


def clear_call_cache() -> None:
    """Forget all cached calls. Code that changes how calls run, such as a row of the tile tables,
    must call this: cached launches would go on as before.
    """
    with _lock:
        _cached_calls.clear()


PLAIN = (Tensor, torch.nn.Parameter)


def is_eager(q: Tensor) -> bool:
    """Whether the call runs eagerly: no torch.compile, tracer, dispatch mode, torch.func transform
    or forward-mode tangent is active, and q holds values (no meta or fake tensor).
    """
    return (
        not torch.compiler.is_compiling()
        and type(q) in PLAIN
        and not q.is_meta
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def is_traced() -> bool:
    """Whether a compiler, a tracer or a dispatch mode records the call. Then a mask is not built
    now, because the graph would hold the operations that build it. Under a torch.func transform
    alone, tensors have values and the mask can be built.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_autocast(q: Tensor) -> bool:
    """Whether torch.autocast is on for q's device. Reading the device's name takes 1 us, which q on
    CUDA avoids.
    """
    if q.is_cuda:
        return torch.is_autocast_enabled("cuda")
    return not q.is_meta and torch.is_autocast_enabled(q.device.type)


def describe(x: Tensors, options: Options, max_seqlens: Sequence[int] = ()) -> Problem:
    """Validate a dense or packed call and return its Problem. An invalid call raises ValueError
    with one sentence.
    """
    q, k, v = x[:3]
    check_qkv(q, k, v, rank=3 if max_seqlens else 4)
    options = resolve_options(options, q)
    if max_seqlens:
        max_seqlens = check_packing(x, max_seqlens)
    else:
        warn_of_layout(q, k)
    problem = Problem.of(x, options, max_seqlens)
    check_extras(problem, x)
    return problem


def check_qkv(q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    layout = "(batch, seqlen, heads, head_dim)" if rank == 4 else "(total, heads, head_dim)"
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_layout(name, t, rank, layout)
    check_agreement(q, k, v)
    if rank == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k and v have batch {k.shape[0]}")


class LayoutWarning(UserWarning):
    """q, k and v look as if laid out (batch, heads, seqlen, head_dim), as torch's attention
    expects.
    """


HEADS_FIRST = (
    "are q, k and v (batch, heads, seqlen, head_dim), as scaled_dot_product_attention takes them?"
    " attention() takes (batch, seqlen, heads, head_dim): pass q.transpose(1, 2),"
    " k.transpose(1, 2), v.transpose(1, 2), and transpose the result; these are views, not copies"
)
MOST_HEADS = 128  # the most heads of a model; sequences are often longer
_layout_warned = False


def looks_heads_first(q: Tensor, k: Tensor) -> bool:
    """Whether q has more heads than models have, over sequences no longer than that number: then
    heads and sequence are probably swapped.
    """
    if not q.dim() == k.dim() == 4:
        return False
    return q.shape[2] > MOST_HEADS >= max(q.shape[1], k.shape[1]) and q.shape[1] > 1


def warn_of_layout(q: Tensor, k: Tensor) -> None:
    """Give LayoutWarning, once per process. Not under a compiler, where lengths may be SymInts."""
    global _layout_warned
    if _layout_warned or not is_eager(q) or not looks_heads_first(q, k):
        return
    _layout_warned = True
    shape = "batch {}, seqlen {}, heads {}, head_dim {}".format(*q.shape)
    warnings.warn(f"q has {shape}: {HEADS_FIRST}.", LayoutWarning, stacklevel=6)


def check_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.is_nested:
        raise UnsupportedError(
            f"{name} is a nested tensor: pass values() of jagged ones to varlen_attention, with"
            " offsets().int() as cu_seqlens"
        )
    if t.layout != torch.strided:
        raise UnsupportedError(f"{name} has layout {t.layout}: call {name}.to_dense()")
    if hasattr(t, "device_mesh"):
        raise UnsupportedError(
            f"{name} is a DTensor: call attention on the local batch entries and heads, inside of"
            " torch.distributed.tensor.experimental.local_map or with to_local(); a sequence that"
            " ranks share is for onchip.parallel.context_parallel_attention"
        )


def check_layout(
    name: str, t: Tensor, rank: int, layout: str, *, may_overlap: bool = False
) -> None:
    """Check type, rank and strides. may_overlap: elements may share memory. Pages of a strided view
    may, where no page table refers to them.
    """
    check_tensor(name, t)
    if t.dim() != rank:
        raise ValueError(f"{name} must have rank {rank}, {layout}, got shape {tuple(t.shape)}")
    if t.stride(-1) != 1 and t.shape[-1] != 1 and t.numel():
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {t.stride()}:"
            f" call {name}.contiguous()"
        )
    if may_overlap or torch.compiler.is_compiling():  # strides may be SymInts: the op checks them
        return
    if _overlaps(t):
        raise ValueError(
            f"{name} has elements that share memory, with strides {t.stride()} for shape"
            f" {tuple(t.shape)}: call {name}.contiguous()"
        )


def _overlaps(t: Tensor) -> bool:
    """Whether different indices may address the same memory, other than along expanded dimensions
    (stride 0). torch's conversions and kernels may read such a tensor wrongly.
    """
    extent = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False


def check_agreement(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check dtypes, devices, heads and head dims of q, k and v, in any layout."""
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        _refuse_dtypes(q, k, v)
    check_devices_and_shapes(q, k, v)


def check_devices_and_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """check_agreement without dtypes: pages of 8 bits have a dtype of their own."""
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must share a device, got {q.device}, {k.device}, {v.device}")
    if q.dtype == torch.float64 and q.device.type not in ("cpu", "meta"):
        raise UnsupportedError(f"float64 is served on the CPU, not on {q.device}: use float32")
    _check_shapes(q, k, v)


def _refuse_dtypes(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_dtype(name, t)
    raise ValueError(f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


def check_query_dtype(q: Tensor) -> None:
    """Check q's dtype alone: pages of 8 bits have a dtype of their own."""
    _check_dtype("q", q)


def _check_dtype(name: str, t: Tensor) -> None:
    if t.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"{name}.dtype={t.dtype} is not one of {names}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    *_, num_heads, head_dim = q.shape  # unpacking a torch.Size is faster than slicing it
    *rows_k, num_kv_heads, head_dim_k = k.shape
    *rows_v, num_heads_v, head_dim_v = v.shape
    if rows_k != rows_v or num_kv_heads != num_heads_v:
        raise ValueError(
            f"k and v must agree except in head_dim, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if head_dim != head_dim_k:
        raise ValueError(f"q has head_dim {head_dim}, k has head_dim {head_dim_k}")
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        raise ValueError(f"{head_dim=} and {head_dim_v=} must be between 1 and {MAX_HEAD_DIM}")
    if num_heads == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        hint = f" ({HEADS_FIRST})" if looks_heads_first(q, k) else ""
        raise ValueError(f"{num_heads=} must be a positive multiple of {num_kv_heads=}{hint}")


def check_packing(x: Tensors, max_seqlens: Sequence[int]) -> tuple[int, int]:
    """Check cu_seqlens and return (max_seqlen_q, max_seqlen_k). check_values checks the values of
    cu_seqlens.
    """
    check_offsets_tensor("cu_seqlens_q", x.cu_seqlens_q, x.q)
    check_offsets_tensor("cu_seqlens_k", x.cu_seqlens_k, x.q)
    if x.cu_seqlens_q.shape != x.cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same length, got"
            f" {x.cu_seqlens_q.shape[0]} and {x.cu_seqlens_k.shape[0]}"
        )
    longest_q, longest_k = max_seqlens
    return as_int("max_seqlen_q", longest_q), as_int("max_seqlen_k", longest_k)


def check_offsets_tensor(name: str, cu: Tensor | None, q: Tensor) -> None:
    is_tensor = isinstance(cu, Tensor)
    if not is_tensor or cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1:
        what = f"{cu.dtype} of shape {tuple(cu.shape)}" if is_tensor else type(cu).__name__
        raise ValueError(f"{name} must be an int32 tensor of shape (batch + 1,), got {what}")
    if cu.device != q.device:
        raise ValueError(f"{name} is on {cu.device}, q is on {q.device}")


def resolve_options(options: Options, q: Tensor) -> Options:
    """Validate options and replace None by the default of a call over q."""
    for name in FLAGS:
        check_flag(name, getattr(options, name))
    scale, softcap, dropout_p = options.softmax_scale, options.softcap, options.dropout_p
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"softmax_scale={scale} must be a finite number")
    if not _is_finite(softcap) or softcap < 0:
        raise ValueError(f"{softcap=} must be a finite number >= 0 (0 switches it off)")
    if not _is_finite(dropout_p) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{dropout_p=} must be in [0, 1)")
    if options.window_size != (None, None):
        check_window(options.window_size)
    if options.precision not in PRECISIONS:
        names = ", ".join(map(repr, PRECISIONS))
        raise ValueError(f"precision={options.precision!r} is not one of {names}")
    if options.out_dtype is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if options.out_dtype not in (q.dtype, wide):
            raise ValueError(f"out_dtype={options.out_dtype} must be {q.dtype} or {wide}")
    out_dtype = options.out_dtype or q.dtype
    return options._replace(
        out_dtype=out_dtype,
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        window_size=tuple(options.window_size),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        precise_delta=options.precise_delta and out_dtype.itemsize == 2,  # else out is not rounded
    )


def check_window(window_size: Window) -> None:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{window_size=} must be a pair (left, right), None = unbounded")
    for name, side in zip(("left", "right"), window_size, strict=True):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(f"window_size {name}={side!r} must be None (unbounded) or an int >= 0")


def check_extras(problem: Problem, x: Tensors) -> None:
    """Check alibi_slopes, sinks, bias and mask against the problem."""
    if x.alibi_slopes is not None:
        shapes = ((problem.num_heads,), (problem.batch, problem.num_heads))
        _check_tensor("alibi_slopes", x.alibi_slopes, x.q, shapes)
        if x.alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError("alibi_slopes has no gradient here: pass alibi_slopes.detach()")
    if x.sinks is not None:
        _check_tensor("sinks", x.sinks, x.q, ((problem.num_heads,),))
    if x.bias is not None:
        _check_bias(problem, x)
    if x.mask is not None:
        _check_mask(problem, x)


def _check_tensor(name: str, t: Tensor, q: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(t, Tensor) or tuple(t.shape) not in shapes:
        got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {got}")
    _check_kind(name, t, q)


def _check_kind(name: str, t: Tensor, q: Tensor) -> None:
    if t.dtype not in DTYPES:
        raise ValueError(f"{name}.dtype={t.dtype} must be a floating type")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")


def _check_bias(problem: Problem, x: Tensors) -> None:
    if problem.packed:
        raise UnsupportedError("bias needs a dense call: packed sequences have no common scores")
    full = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    shape = tuple(x.bias.shape) if isinstance(x.bias, Tensor) else ()
    fits = len(shape) == 4 and shape[3] == full[3]
    if not fits or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        layout = "(batch|1, heads|1, seqlen_q|1, seqlen_k)"
        raise ValueError(f"bias must be {layout} with sizes {full}, got {shape}")
    _check_kind("bias", x.bias, x.q)


def _check_mask(problem: Problem, x: Tensors) -> None:
    if problem.packed:
        raise UnsupportedError(
            "mask needs a dense call: use attention(mask=masks.document(cu_seqlens) & mask)"
        )
    batch, heads, *lengths = shape = x.mask.shape
    wanted = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    fits = batch in (1, problem.batch) and heads in (1, problem.num_heads)
    if not fits or tuple(lengths) != wanted[2:]:
        raise ValueError(f"mask of shape {shape} does not fit scores of shape {wanted}")
    if x.mask.device != x.q.device:
        raise ValueError(f"mask is on {x.mask.device}, q is on {x.q.device}: use mask.to(q.device)")


def _is_finite(x: Any) -> bool:
    """Compare with infinity: Dynamo does not trace math.isfinite of a SymFloat. Real includes
    numpy's floats.
    """
    if not isinstance(x, (int, float, Real)) or isinstance(x, bool):
        return False
    number: Any = x
    return -math.inf < number < math.inf


class checks:
    """Whether *values* (cu_seqlens, page ids, lengths) on a GPU are checked, which synchronises
    with the device. Values on the CPU are always checked.

    Both a switch (`onchip.checks(True)`) and a context manager (`with onchip.checks(True): ...`),
    for all threads. The latest one that is still open decides. Contexts of several threads may end
    in any order.
    """

    enabled = False
    _open: tuple["checks", ...] = ()

    def __init__(self, enabled: bool):
        check_flag("enabled", enabled)
        self._enables, self._entered = enabled, False
        with _lock:
            checks._update((*checks._open, self))

    def __enter__(self) -> "checks":
        self._entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        with _lock:
            checks._update(tuple(x for x in checks._open if x is not self))

    @classmethod
    def _update(cls, still_open: tuple["checks", ...]) -> None:
        """Set the open switches and contexts. Switches are never closed, so the oldest of more than
        MAX_SWITCHES are dropped.
        """
        switches = [x for x in still_open if not x._entered]
        dropped = switches[:-MAX_SWITCHES]
        cls._open = tuple(x for x in still_open if x not in dropped)
        cls.enabled = bool(cls._open) and cls._open[-1]._enables


MAX_SWITCHES = 64


def check_values(problem: Problem, x: Tensors) -> None:
    """Check that cu_seqlens starts at 0, never decreases, ends at the total and that no sequence is
    longer than max_seqlen.
    """
    if not problem.packed or not values_are_checked(x.q):
        return
    _check_offsets("q", x.cu_seqlens_q, x.q.shape[0], problem.seqlen_q)
    if not problem.page_size:
        _check_offsets("k", x.cu_seqlens_k, x.k.shape[0], problem.seqlen_k)


def values_are_checked(q: Tensor) -> bool:
    return q.device.type == "cpu" or checks.enabled


def _check_offsets(side: str, cu: Tensor, total: int, max_seqlen: int) -> None:
    offsets = cu.tolist()
    name = f"cu_seqlens_{side}"
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name} must run from 0 to total_{side}={total}, got {offsets[0]} to {offsets[-1]}"
        )
    lengths = [b - a for a, b in pairwise(offsets)]
    if min(lengths, default=0) < 0:
        i = next(i for i, n in enumerate(lengths) if n < 0)
        raise ValueError(f"{name} must not decrease, got {offsets[i]} then {offsets[i + 1]}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side}={max_seqlen}, but a sequence has {max(lengths)} tokens"
        )
