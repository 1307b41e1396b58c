"""What is asked of attention, and every check at the door: after `describe` no code below defends
itself again.
"""

import math
import threading
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip.arguments import as_int, check_flag
from onchip.masks.blockmask import BlockMask
from onchip.masks.later import Later

MAX_HEAD_DIM = 256
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Of what the two products of the forward are made: q, k and v as they come, or a recipe of
# onchip/quant/recipes.py (LOW_PRECISIONS); "auto": FP8 where a GPU gains by it.
LOW_PRECISIONS = ("fp8", "int8", "int8_pv16")
PRECISIONS = (None, *LOW_PRECISIONS, "auto")
Window = tuple[int | None, int | None]


class UnsupportedError(ValueError):
    """A sound question that no available kernel answers; the message says what would work."""


class Tensors(NamedTuple):
    """The tensors of one call. Packed calls have rank-3 q, k, v and both cu_seqlens. In paged calls
    k and v are pages, q is packed or not, and there is no cu_seqlens_k.

    A dense call may be a part of a larger one, cut anyhow: then places_q, int32 (2, seqlen_q), says
    where each query stands in its sequence and how many sequences it is after the first of the
    batch entry, and places_k, int32 (seqlen_k,), where each key stands. ALiBi and dropout go by
    them; causal and window go by the indices of the call, as ever.

    k_scales and v_scales, fp32 (num_pages, page_size, num_kv_heads), belong to pages of 8 bits: a
    key is its values times its scale.
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
    places_q: Tensor | None = None
    places_k: Tensor | None = None
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    mask: BlockMask | Later | None = None


class Beside(NamedTuple):
    """One of two calls that run at once, each on some processors of a device: how many programs it
    has, and whether it is the second. The second follows the first in the stream, with nothing in
    between; what it reads was there before the first began. It writes, and ends, after the first:
    so what comes next need not know of two.
    """

    programs: int
    second: bool


class Problem(NamedTuple):
    """One call without its tensors: hashable, so that plans are cached on it. Packed lengths are
    the longest of the batch; the seqlen_k of a paged call is what its page table has room for.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    softmax_scale: float
    causal: bool = False
    window_size: Window = (None, None)
    softcap: float = 0.0
    dropout_p: float = 0.0
    packed: bool = False
    has_mask: bool = False
    has_alibi: bool = False
    has_bias: bool = False
    has_sinks: bool = False
    return_stats: bool = False
    deterministic: bool = False
    aligned: bool = True  # see is_aligned
    page_size: int = 0  # slots of a page, 0 where keys do not lie in pages
    has_tree_mask: bool = False
    even: bool = False  # see is_even
    has_places: bool = False
    first_head: int = 0  # of the call, in the larger one that it is a part of: dropout counts it
    wide_grads: bool = False  # gradients of 16-bit tensors come unrounded, in fp32
    precise_delta: bool = False  # what rounding takes from out is kept for the backward
    return_lse: bool = False  # to the caller: autograd, which always has it, needs it less exact
    page_dtype: torch.dtype | None = None  # of 8-bit pages, which have scales; None: that of q
    beside: Beside | None = None  # for kernels that can; others take no notice
    precision: str | None = None  # of the forward's operands: see PRECISIONS; None: that of q, k, v

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def reach(self) -> Window:
        """How far a query sees to the left and to the right: causal is a window that ends at the
        query itself.
        """
        left, right = self.window_size
        return left, 0 if self.causal else right

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one batch entry and head that causal and window leave (a block mask
        is not counted).
        """
        left, right = self.reach
        offset = self.seqlen_k - self.seqlen_q
        rows = torch.arange(self.seqlen_q)
        hi = torch.full_like(rows, self.seqlen_k) if right is None else rows + offset + right + 1
        lo = torch.zeros_like(rows) if left is None else rows + offset - left
        return int((hi.clamp(max=self.seqlen_k) - lo.clamp(min=0)).clamp(min=0).sum())

    @property
    def seen_queries(self) -> int:
        """Queries of a sequence to which causal and window leave any key."""
        _, right = self.reach
        most = self.seqlen_q if right is None else self.seqlen_k + right
        return min(self.seqlen_q, most) if self.seqlen_k else 0

    @property
    def seen_keys(self) -> int:
        """Keys of a sequence that causal and window leave to any query."""
        left, _ = self.reach
        most = self.seqlen_k if left is None else self.seqlen_q + left
        return min(self.seqlen_k, most) if self.seqlen_q else 0

    @property
    def flops(self) -> int:
        """Multiply-adds of the two products, counted as two operations each, over the visible
        pairs.
        """
        return self.batch * self.num_heads * self.visible_pairs * self._flops_per_pair

    @property
    def all_flops(self) -> int:
        """The same if every query saw every key."""
        pairs = self.seqlen_q * self.seqlen_k
        return self.batch * self.num_heads * pairs * self._flops_per_pair

    @property
    def _flops_per_pair(self) -> int:
        return 2 * (self.head_dim + self.head_dim_v)

    @property
    def key_bytes(self) -> int:
        """A key and its value, of one head, with the scales of 8-bit pages."""
        dims = self.head_dim + self.head_dim_v
        if self.page_dtype is None:
            return dims * self.dtype.itemsize
        return dims * self.page_dtype.itemsize + 2 * torch.float32.itemsize

    @property
    def min_bytes(self) -> int:
        """Each input that causal and window leave read once, each output written once: no exact
        algorithm moves less. (A block mask, which may leave less, is not counted.)
        """
        queries = self.batch * self.seqlen_q * self.num_heads
        seen = self.batch * self.seen_queries * self.num_heads
        keys = self.batch * self.seen_keys * self.num_kv_heads
        read = seen * self.head_dim * self.dtype.itemsize + keys * self.key_bytes
        written = queries * (self.head_dim_v * self.out_dtype.itemsize + 4)
        return read + written + self.residual_bytes

    @property
    def residual_bytes(self) -> int:
        """Of what precise_delta keeps beside out."""
        elements = self.batch * self.seqlen_q * self.num_heads * self.head_dim_v
        return elements * self.out_dtype.itemsize if self.precise_delta else 0


class DeviceInfo(NamedTuple):
    """Where a problem would run. capability is CUDA's (major, minor), None elsewhere; name is the
    architecture on AMD (gfx942).
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
    """The device of this name; ValueError if there is none here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"there is no device {str(name)!r} here: {reason}") from error
    return device


def is_aligned(x: Tensors) -> bool:
    """Whether bases and strides of q, k and v lie on 16 bytes, and pages whole slots apart, as the
    Hopper copy engine wants.
    """
    if x.page_table is not None and not all(_slots_apart(pages) for pages in x[1:3]):
        return False
    bits = 0
    for t in x[:3]:
        bits, itemsize = bits | t.data_ptr(), t.element_size()
        for stride in t.stride()[:-1]:
            bits |= stride * itemsize
    return bits % 16 == 0


def is_even(problem: Problem, x: Tensors) -> bool:
    """Whether packed queries over pages are at least three quarters of as many as there would be if
    all sequences had the most: known without their offsets, and false where chunks join decodes.
    """
    packed = problem.packed and problem.page_size > 0
    return packed and 4 * x.q.shape[0] >= 3 * problem.batch * problem.seqlen_q


def laid_out(problem: Problem, x: Tensors) -> Problem:
    """The problem with what only tensors on a GPU tell dispatch. Nothing else looks at it, so that
    compilers, to whom lengths may be symbols, compare none.
    """
    if not x.q.is_cuda:
        return problem
    aligned, even = is_aligned(x), is_even(problem, x)
    return problem if aligned and not even else problem._replace(aligned=aligned, even=even)


def _slots_apart(pages: Tensor) -> bool:
    page, slot = pages.stride()[:2]
    return slot > 0 and page % slot == 0


class Options(NamedTuple):
    """The scalar options of a call, as the user gave them."""

    causal: bool = False
    window_size: Window = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    return_stats: bool = False
    deterministic: bool = False
    out_dtype: torch.dtype | None = None
    precise_delta: bool = False
    return_lse: bool = False
    beside: Beside | None = None
    precision: str | None = None


FLAGS = ("causal", "return_stats", "deterministic", "precise_delta", "return_lse")


class Question(NamedTuple):
    """A Problem as it was posed. Calls alike, with the same options and with tensors of the same
    shapes, strides, dtypes and devices, share one Question and what is known about it: see
    kernels/tapes.py. `known` is None where nothing may be kept.
    """

    problem: Problem
    known: dict[tuple, Any] | None = None


T = TypeVar("T")
MAX_QUESTIONS = 1024  # a few kB each
Describe = Callable[[Tensors, Any, Any], Problem]
_questions: dict[tuple | None, Question] = {}
_lock = threading.Lock()


def ask(describe: Describe, x: Tensors, options: Options | Problem, lengths: Any) -> Question:
    """The Question of describe(x, options, lengths). A call like one before is not checked again:
    all that is checked is in the key, for no values of tensors are. There is no key where a mask
    is, and where somebody watches, to whom lengths may be symbols.
    """
    if x.mask is not None or not is_eager(x.q):
        return Question(describe(x, options, lengths))
    try:
        key = _signature(describe, x, options, lengths)
        question = _questions.get(key)
    except (TypeError, RuntimeError):  # lists in place of a window, tensors of other kinds
        return Question(describe(x, options, lengths))
    if question is not None:
        return question
    return kept(_questions, key, Question(describe(x, options, lengths), {}), MAX_QUESTIONS)


def _signature(describe: Describe, x: Tensors, options: Options | Problem, lengths: Any) -> tuple:
    """What tells questions apart. Of numbers the type counts, too: True is no length."""
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


def kept(table: dict, key: tuple, value: T, most: int) -> T:
    """What the table has under this key, the value if nothing, for which the oldest entry makes
    room. The oldest, not the one that was used least recently: to note each use would cost every
    call, and an entry that is still in use comes back for one slow call in `most` new ones.
    """
    with _lock:
        if key not in table and len(table) >= most:
            del table[next(iter(table))]
        return table.setdefault(key, value)


def forget_questions() -> None:
    """Whoever changes what calls do, like a row of the tile tables, must say so."""
    with _lock:
        _questions.clear()


PLAIN = (Tensor, torch.nn.Parameter)


def is_eager(q: Tensor) -> bool:
    """Whether nobody is watching: compilers, tracers, modes, transforms, tangents; and whether
    there are values to compute with.
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
    """Whether a compiler, a tracer or a mode sees the call, which must not see how a mask is built.
    A transform of torch.func alone computes with values.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_autocast(q: Tensor) -> bool:
    """Whether torch.autocast is on for q's device. (To ask for the name of a device takes 1 us.)"""
    if q.is_cuda:
        return torch.is_autocast_enabled("cuda")
    return not q.is_meta and torch.is_autocast_enabled(q.device.type)


def describe(x: Tensors, options: Options, max_seqlens: tuple[int, ...] = ()) -> Problem:
    """The Problem that these tensors and options pose; ValueError in one sentence if they pose
    none.
    """
    q, k, v = x[:3]
    check_qkv(q, k, v, rank=3 if max_seqlens else 4)
    check_options(options, q)
    *rows_q, num_heads, head_dim = q.shape
    *rows_k, num_kv_heads, _ = k.shape
    if max_seqlens:
        batch, seqlen_q, seqlen_k = check_packing(x, max_seqlens)
    else:
        batch, seqlen_q, seqlen_k = *rows_q, rows_k[1]
        warn_of_layout(q, k)
    scale, out_dtype = options.softmax_scale, options.out_dtype or q.dtype
    problem = Problem(
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_kv_heads,
        head_dim,
        v.shape[-1],
        q.dtype,
        out_dtype,
        head_dim**-0.5 if scale is None else float(scale),
        bool(options.causal),
        tuple(options.window_size),
        float(options.softcap),
        float(options.dropout_p),
        bool(max_seqlens),
        x.mask is not None,
        x.alibi_slopes is not None,
        x.bias is not None,
        x.sinks is not None,
        bool(options.return_stats),
        bool(options.deterministic),
        has_places=x.places_q is not None,
        precise_delta=bool(options.precise_delta) and out_dtype.itemsize == 2,  # or is not rounded
        return_lse=bool(options.return_lse),
        precision=options.precision,
    )
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
    """q, k and v look as if heads came before the sequence, as torch's own attention has them."""


HEADS_FIRST = (
    "do q, k and v lie as (batch, heads, seqlen, head_dim), as scaled_dot_product_attention takes"
    " them? attention() takes (batch, seqlen, heads, head_dim): pass q.transpose(1, 2),"
    " k.transpose(1, 2), v.transpose(1, 2), and transpose the result; views, no copies"
)
MOST_HEADS = 128  # of a model; longer sequences are common
_layout_warned = False


def looks_heads_first(q: Tensor, k: Tensor) -> bool:
    """Whether a call has as many heads as a sequence has tokens, over sequences as short as models
    have heads.
    """
    if not q.dim() == k.dim() == 4:
        return False
    return q.shape[2] > MOST_HEADS >= max(q.shape[1], k.shape[1]) and q.shape[1] > 1


def warn_of_layout(q: Tensor, k: Tensor) -> None:
    """LayoutWarning, once a process. Not under a compiler, where lengths may be symbols."""
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
    """may_overlap: pages that no table names, of a view of rows, may share memory with others."""
    check_tensor(name, t)
    if t.dim() != rank:
        raise ValueError(f"{name} must have rank {rank}, {layout}, got shape {tuple(t.shape)}")
    if t.stride(-1) != 1 and t.shape[-1] != 1 and t.numel():
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {t.stride()}:"
            f" call {name}.contiguous()"
        )
    if may_overlap or torch.compiler.is_compiling():  # strides may be symbols: the op checks
        return
    if _overlaps(t):
        raise ValueError(
            f"{name} has elements that share memory, with strides {t.stride()} for shape"
            f" {tuple(t.shape)}: call {name}.contiguous()"
        )


def _overlaps(t: Tensor) -> bool:
    """Whether different indices may reach the same memory, other than along dimensions that are
    expanded (stride 0): torch's conversions and kernels may read such a tensor wrongly.
    """
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def check_agreement(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dtypes, devices, heads and head dims: what q, k and v share in every layout."""
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        _refuse_dtypes(q, k, v)
    check_places_and_shapes(q, k, v)


def check_places_and_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The same without dtypes, which pages of 8 bits have of their own."""
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
    """For calls whose keys have a dtype of their own."""
    _check_dtype("q", q)


def _check_dtype(name: str, t: Tensor) -> None:
    if t.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"{name}.dtype={t.dtype} is not one of {names}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    *_, num_heads, head_dim = q.shape  # a slice of a Size costs more than all of it
    *rows_k, num_kv_heads, head_dim_k = k.shape
    *rows_v, num_heads_v, head_dim_v = v.shape
    if rows_k != rows_v or num_kv_heads != num_heads_v:
        raise ValueError(
            f"k and v must agree but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if head_dim != head_dim_k:
        raise ValueError(f"q has head_dim {head_dim}, k has head_dim {head_dim_k}")
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        raise ValueError(f"{head_dim=} and {head_dim_v=} must lie between 1 and {MAX_HEAD_DIM}")
    if num_heads == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        hint = f" ({HEADS_FIRST})" if looks_heads_first(q, k) else ""
        raise ValueError(f"{num_heads=} must be a positive multiple of {num_kv_heads=}{hint}")


def check_packing(x: Tensors, max_seqlens: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, seqlen_q, seqlen_k) of a packed call; the values inside cu_seqlens are checked by
    check_values.
    """
    check_offsets_tensor("cu_seqlens_q", x.cu_seqlens_q, x.q)
    check_offsets_tensor("cu_seqlens_k", x.cu_seqlens_k, x.q)
    if x.cu_seqlens_q.shape != x.cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must be equally long, got"
            f" {x.cu_seqlens_q.shape[0]} and {x.cu_seqlens_k.shape[0]}"
        )
    longest_q, longest_k = max_seqlens
    lengths = as_int("max_seqlen_q", longest_q), as_int("max_seqlen_k", longest_k)
    return x.cu_seqlens_q.shape[0] - 1, *lengths


def check_offsets_tensor(name: str, cu: Tensor | None, q: Tensor) -> None:
    is_tensor = isinstance(cu, Tensor)
    if not is_tensor or cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1:
        what = f"{cu.dtype} of shape {tuple(cu.shape)}" if is_tensor else type(cu).__name__
        raise ValueError(f"{name} must be an int32 tensor of shape (batch + 1,), got {what}")
    if cu.device != q.device:
        raise ValueError(f"{name} is on {cu.device}, q is on {q.device}")


def check_options(options: Options, q: Tensor) -> None:
    for name in FLAGS:
        check_flag(name, getattr(options, name))
    scale, softcap, dropout_p = options.softmax_scale, options.softcap, options.dropout_p
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"softmax_scale={scale} must be a finite number")
    if not _is_finite(softcap) or softcap < 0:
        raise ValueError(f"{softcap=} must be a finite number >= 0 (0 switches it off)")
    if not _is_finite(dropout_p) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{dropout_p=} must lie in [0, 1)")
    if options.window_size != (None, None):
        check_window(options.window_size)
    if options.precision not in PRECISIONS:
        names = ", ".join(map(repr, PRECISIONS))
        raise ValueError(f"precision={options.precision!r} is not one of {names}")
    if options.out_dtype is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if options.out_dtype not in (q.dtype, wide):
            raise ValueError(f"out_dtype={options.out_dtype} must be {q.dtype} or {wide}")


def check_window(window_size: Window) -> None:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{window_size=} must be a pair (left, right), None = unbounded")
    for name, side in zip(("left", "right"), window_size, strict=True):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(f"window_size {name}={side!r} must be None (unbounded) or an int >= 0")


def check_extras(problem: Problem, x: Tensors) -> None:
    """alibi_slopes, bias, sinks, mask and dropout_seed against the problem they join."""
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
        raise UnsupportedError("bias needs a dense call: packed sequences share no score matrix")
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
    """By comparison: Dynamo does not trace math.isfinite of a symbol. Real: numpy's floats."""
    if not isinstance(x, (int, float, Real)) or isinstance(x, bool):
        return False
    number: Any = x
    return -math.inf < number < math.inf


class checks:
    """Whether *values* (cu_seqlens, page ids, lengths) on a GPU are checked, at the price of a
    synchronisation. CPU values always are.

    A switch (`onchip.checks(True)`) and a context manager (`with onchip.checks(True): ...`), for
    all threads. The latest one counts that is still open: contexts of several threads may end in
    any order.
    """

    enabled = False
    _open: tuple["checks", ...] = ()

    def __init__(self, enabled: bool):
        check_flag("enabled", enabled)
        self._wanted, self._entered = enabled, False
        with _lock:
            checks._settle((*checks._open, self))

    def __enter__(self) -> "checks":
        self._entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        with _lock:
            checks._settle(tuple(x for x in checks._open if x is not self))

    @classmethod
    def _settle(cls, still_open: tuple["checks", ...]) -> None:
        """Switches are never closed: of many, the oldest are dropped."""
        switches = [x for x in still_open if not x._entered]
        dropped = switches[:-MAX_SWITCHES]
        cls._open = tuple(x for x in still_open if x not in dropped)
        cls.enabled = bool(cls._open) and cls._open[-1]._wanted


MAX_SWITCHES = 64


def check_values(problem: Problem, x: Tensors) -> None:
    """cu_seqlens must start at 0, never fall, end at the total and stay within max_seqlen."""
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
        raise ValueError(f"max_seqlen_{side}={max_seqlen}, but one has {max(lengths)} tokens")
