"""Mask expressions: which keys a query sees, independent of lengths.

A `Mask` is built when the lengths are known. Everywhere p = q + seqlen_k - seqlen_q is the position
of query q among the keys (bottom-right aligned: the last query is at the last key).
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from onchip.core.arguments import as_int

from . import nodes
from .blockmask import BlockMask
from .cells import BlockPattern, Mod
from .nodes import Grid, Interval, Node
from .tensors import BuiltMask, Dense, TracedTensor, pack_dense
from .trace import depends_on_planes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask  # 0.3 s to import

_MAX_BUILDS = 4  # builds cached per expression: a training and an evaluation length, twice
_NUMBERS = count(2)  # torch.compile specialises on 0 and 1; other numbers become variables
_NUMBERED: WeakValueDictionary[int, "Mask"] = WeakValueDictionary()

Planes = tuple[bool, bool]  # does a rule differ between batch entries, between heads?
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, q, k) -> is k visible to q?
# What `mask=` takes. A tensor holds bools, or the bounds of `spans`.
MaskLike: TypeAlias = "Mask | BlockMask | FlexBlockMask | Tensor | MaskMod"


class Mask:
    """A visibility rule that can be combined (`&`, `|`, `~`), built and shown.

    A rule copies its tensors to the host at once, so later changes to them have no effect. A
    function passed to `mod` must be pure.
    """

    def __init__(
        self,
        template: str,
        arguments: tuple[Any, ...],
        resolve: Callable[[Grid], Node],
        depends: Planes | Callable[[torch.device], Planes] = (False, False),
    ):
        """The repr is template.format(*arguments), made only when it is printed: torch.compile
        cannot write a SymInt into a string. resolve and depends are picklable functions of
        picklable arguments: a DataLoader sends masks to its workers and back.
        """
        self._template = template
        self._arguments = arguments
        self._resolve = resolve
        self._depends = depends
        self._reset_builds()

    def _reset_builds(self) -> None:
        """Start without built masks, under a new number; masks made inside a graph have none."""
        self._built: dict[Grid, BlockMask] = {}
        self._planes: dict[torch.device, Planes] = {}
        self.number: Any = None  # an int, or a SymInt in a graph
        if not torch.compiler.is_compiling():
            self.number = next(_NUMBERS)
            _NUMBERED[self.number] = self

    def __getstate__(self) -> tuple[Any, ...]:
        return self._template, self._arguments, self._resolve, self._depends

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._template, self._arguments, self._resolve, self._depends = state
        self._reset_builds()

    def build(
        self,
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The BlockMask for these lengths, on `device`; the last few are cached.

        The lists are made on the CPU and copied to the device once. Only a `mod` function runs on
        the device (where the tensors it captures should be).
        """
        grid = self._grid(batch, heads, seqlen_q, seqlen_k, torch.device(device))
        built = self._built.get(grid)
        if built is None:
            built = nodes.build(self._resolve(grid)).to(device)
            self._built[grid] = built
            for oldest in list(self._built)[:-_MAX_BUILDS]:
                self._built.pop(oldest, None)
        return built

    def node(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
    ) -> Node:
        """This mask for these lengths as a node (see `nodes.Node`)."""
        return self._resolve(self._grid(batch, heads, seqlen_q, seqlen_k, torch.device(device)))

    def _grid(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
    ) -> Grid:
        per_batch, per_head = True, True
        if batch and heads and seqlen_q and seqlen_k:  # otherwise a mod has no index to run on
            per_batch, per_head = self.depends(device)
        planes = (batch if per_batch else 1, heads if per_head else 1)
        return Grid(*planes, seqlen_q, seqlen_k, device)

    def in_graph(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
    ) -> Tensor:
        """This mask by torch operations alone, for a graph that makes it from its own tensors: the
        bounds of `spans` if each query sees one interval, else a dense mask.
        """
        node = self._resolve(Grid(batch, heads, seqlen_q, seqlen_k, device))
        if not isinstance(node, Interval):
            return node.cells()
        return torch.stack(node.find_bounds(), -1)[:, None].to(device)

    def depends(self, device: torch.device) -> Planes:
        """Does the rule differ between batch entries, between heads?"""
        if not callable(self._depends):
            return self._depends
        if device not in self._planes:
            self._planes[device] = self._depends(device)
        return self._planes[device]

    def show(
        self,
        seqlen_q: int = 2048,
        seqlen_k: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        b: int = 0,
        h: int = 0,
        width: int | None = None,
        path: str | None = None,
    ) -> None:
        """Print the blocks of this mask for these lengths, or draw them to the file `path`."""
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        mask = self.build(batch, heads, seqlen_q, seqlen_k)
        planes_b, planes_h = mask.shape[:2]
        mask.show(b if planes_b > 1 else 0, h if planes_h > 1 else 0, width, path)

    def __and__(self, other: "Mask") -> "Mask":
        return self._join(other, "&", nodes.both)

    def __or__(self, other: "Mask") -> "Mask":
        return self._join(other, "|", nodes.either)

    def __rand__(self, other: "Mask") -> "Mask":
        return self & other

    def __ror__(self, other: "Mask") -> "Mask":
        return self | other

    def __invert__(self) -> "Mask":
        return Mask("~{}", (self,), partial(_invert, self), self.depends)

    def _join(self, operand: "Mask", sign: str, join: Callable[[Node, Node], Node]) -> "Mask":
        other = as_mask(operand)
        if isinstance(other, BlockMask):
            raise ValueError("a built BlockMask cannot be combined: combine masks, then build")
        resolve, depends = partial(_join, join, self, other), partial(_depends_on, self, other)
        return Mask("({} {} {})", (self, sign, other), resolve, depends)

    def __bool__(self) -> bool:
        raise ValueError(
            "a mask is neither true nor false: combine masks with & | ~, not and/or/not"
        )

    def __repr__(self) -> str:
        return self._template.format(*self._arguments)


def find_numbered(number: int) -> Mask:
    """The mask with this number, which a graph holds."""
    mask = _NUMBERED.get(number)
    if mask is None:
        raise ValueError(
            "the mask of this graph was freed: keep the Mask as long as the graph runs, or build"
            " it before the graph is made"
        )
    return mask


def _invert(mask: Mask, grid: Grid) -> Node:
    return nodes.invert(mask._resolve(grid))


def _join(join: Callable[[Node, Node], Node], a: Mask, b: Mask, grid: Grid) -> Node:
    return join(a._resolve(grid), b._resolve(grid))


def _depends_on(a: Mask, b: Mask, device: torch.device) -> Planes:
    (a_batch, a_head), (b_batch, b_head) = a.depends(device), b.depends(device)
    return a_batch or b_batch, a_head or b_head


def full() -> Mask:
    """Every query sees every key."""
    return Mask("full()", (), _full)


def _full(grid: Grid) -> Interval:
    return Interval(grid, 0, grid.seqlen_k)


def causal() -> Mask:
    """Query q sees the keys k <= p."""
    return Mask("causal()", (), _causal)


def _causal(grid: Grid) -> Interval:
    return Interval(grid, 0, positions(grid) + 1)


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Query q sees the keys p - left <= k <= p + right; None leaves a side open."""
    left = None if left is None else as_int("window(): left, if not None,", left)
    right = None if right is None else as_int("window(): right, if not None,", right)
    return Mask("window({}, {})", (left, right), partial(_window, left, right))


def _window(left: int | None, right: int | None, grid: Grid) -> Interval:
    p, most = positions(grid), grid.seqlen_q + grid.seqlen_k  # as wide as any window gets
    lo = 0 if left is None else p - min(left, most)
    hi = grid.seqlen_k if right is None else p + min(right, most) + 1
    return Interval(grid, lo, hi)


def prefix_lm(prefix_len: int | Tensor) -> Mask:
    """Query q sees the keys k < prefix_len and the keys k <= p.

    prefix_len is an int, or an integer tensor (batch,) with one prefix per batch entry, each
    between 0 and seqlen_k.
    """
    lengths = _as_lengths("prefix_lm(): prefix_len", prefix_len)
    if lengths.dim():
        template, size = "prefix_lm({} lengths)", len(lengths)
    else:
        template, size = "prefix_lm({})", lengths
    return Mask(template, (size,), partial(_prefix_lm, lengths), (lengths.dim() > 0, False))


def _prefix_lm(lengths: Tensor, grid: Grid) -> Interval:
    hi = _bounded("prefix_len", lengths, grid)
    return Interval(grid, 0, torch.maximum(hi, positions(grid) + 1))


def padding(lengths: Tensor) -> Mask:
    """Query q of batch entry b sees the keys k < lengths[b]; lengths is an integer tensor (batch,).

    Rows of padding queries are not masked: their output is unused.
    """
    ends = _as_lengths("padding(): lengths", lengths)
    if not ends.dim():
        raise ValueError(f"padding(): lengths must be an integer tensor (batch,), got {lengths!r}")
    return Mask("padding({} lengths)", (len(ends),), partial(_padding, ends), (True, False))


def _padding(ends: Tensor, grid: Grid) -> Interval:
    return Interval(grid, 0, _bounded("lengths", ends, grid))


def document(
    cu_seqlens: Tensor | Sequence[int], cu_seqlens_k: Tensor | Sequence[int] | None = None
) -> Mask:
    """Query q sees the keys of its own document.

    Document d holds the positions cu_seqlens[d] <= x < cu_seqlens[d + 1] of queries and keys, or
    of queries only when the keys have their own cu_seqlens_k. Integers from 0 to the length, never
    decreasing; documents may be empty. A tensor on a GPU is copied to the host here.

    With one cu_seqlens, `document(cu_seqlens) & causal()` is causal within each document. With two,
    causal() still compares positions in the whole sequence, not within the document.
    """
    cu_q = _as_cu("cu_seqlens", cu_seqlens)
    cu_k = None if cu_seqlens_k is None else _as_cu("cu_seqlens_k", cu_seqlens_k)
    if cu_k is not None and len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seqlens has {len(cu_q) - 1} documents and cu_seqlens_k has {len(cu_k) - 1}"
        )
    return Mask("document({} documents)", (len(cu_q) - 1,), partial(_document, cu_q, cu_k))


def _document(cu_q: Tensor, own_cu_k: Tensor | None, grid: Grid) -> Interval:
    cu_k, name = (cu_q, "cu_seqlens") if own_cu_k is None else (own_cu_k, "cu_seqlens_k")
    _check_end("cu_seqlens", cu_q, "seqlen_q", grid.seqlen_q)
    _check_end(name, cu_k, "seqlen_k", grid.seqlen_k)
    if len(cu_q) == 1:  # no document and no position
        return Interval(grid, 0, 0)
    at = torch.searchsorted(cu_q[1:], torch.arange(grid.seqlen_q), right=True)
    at = at.clamp(max=len(cu_q) - 2)  # a graph continues past a failed check
    return Interval(grid, cu_k[at], cu_k[at + 1])


def spans(bounds: Tensor) -> Mask:
    """Query q of batch entry b sees the keys bounds[b, 0, q, 0] <= k < bounds[b, 0, q, 1].

    An integer tensor (batch or 1, 1, seqlen_q, 2). No bound is negative; a query with an end below
    its start sees nothing. Copied to the host here.
    """
    if not is_spans(bounds):
        got = f"{bounds.dtype} {tuple(bounds.shape)}" if isinstance(bounds, Tensor) else bounds
        raise ValueError(f"spans must be integers of shape (batch or 1, 1, seqlen_q, 2), got {got}")
    ends = bounds.to("cpu", torch.int64, copy=True)
    _require(
        (ends >= 0).all(),
        lambda: "a bound of a span is negative: keys that are not an interval have no bounds",
    )
    shape = (len(ends), 1, ends.shape[2])
    return Mask("spans{}", (shape,), partial(_spans, ends), (len(ends) != 1, False))


def _spans(ends: Tensor, grid: Grid) -> Interval:
    _check_fit("spans", (len(ends), 1, ends.shape[2], grid.seqlen_k), grid[:4])
    lo, hi = ends[:, 0].clamp(max=grid.seqlen_k).unbind(-1)
    return Interval(grid, lo, hi)


def is_spans(bounds: object) -> bool:
    """Whether `spans` accepts this tensor, judged by its dtype and shape."""
    if not isinstance(bounds, Tensor) or bounds.dtype not in (torch.int32, torch.int64):
        return False
    return bounds.dim() == 4 and bounds.shape[1] == 1 and bounds.shape[3] == 2


def mod(fn: MaskMod) -> Mask:
    """Query q sees key k iff fn(b, h, q, k); any FlexAttention `mask_mod` works unchanged.

    fn gets scalar index tensors (under vmap) and returns a bool scalar; q is the raw index, not p.
    It must be pure. It is evaluated on whole blocks, and only on blocks that the masks combined
    with it by `&` leave open; alone it costs seqlen_q x seqlen_k evaluations in time, never in
    memory.
    """
    try:
        if not torch.compiler.is_compiling():
            inspect.signature(fn).bind(0, 0, 0, 0)
    except TypeError as error:
        raise ValueError(f"a mask function must accept (b, h, q, k), got {fn!r}") from error
    except ValueError:  # a callable without a readable signature
        pass
    name = getattr(fn, "__name__", type(fn).__name__)
    return Mask("mod({})", (name,), partial(_mod, fn), partial(depends_on_planes, fn))


def _mod(fn: Callable[..., Tensor], grid: Grid) -> Mod:
    return Mod(grid, fn)


def dense(visible: Tensor) -> Mask:
    """Query q sees key k iff visible[..., q, k].

    A bool tensor (seqlen_q, seqlen_k) or (batch or 1, heads or 1, seqlen_q, seqlen_k). It is
    packed to one bit per cell at once, on its device, and stored on the host.
    """
    dtype = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
    if dtype != torch.bool:
        raise ValueError(f"a dense mask must be bool, got {dtype}: additive masks go in bias=")
    if visible.dim() not in (2, 4):
        raise ValueError(
            "a dense mask must be (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), "
            f"got shape {tuple(visible.shape)}"
        )
    shape = (1,) * (4 - visible.dim()) + tuple(visible.shape)
    cells = visible.view(shape)
    node = TracedTensor if torch.compiler.is_compiling() else Dense
    packed = cells if torch.compiler.is_compiling() else pack_dense(cells)
    planes = (shape[0] != 1, shape[1] != 1)
    return Mask("dense{}", (shape,), partial(_dense, node, packed, shape), planes)


def _dense(node: Callable[[Grid, Tensor], Node], packed: Tensor, shape: tuple, grid: Grid) -> Node:
    _check_fit("dense mask", shape, grid[:4])
    return node(grid, packed)


def from_flex(block_mask: "FlexBlockMask") -> Mask:
    """The mask of a FlexAttention `BlockMask` of any BLOCK_SIZE.

    A cell is visible iff its block is listed as full, or it is listed as partial and mask_mod is
    true.
    """
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    tables = [_flex_table(*block_list) for block_list in lists]
    blocks, seqlens, fn = block_mask.BLOCK_SIZE, block_mask.seq_lengths, block_mask.mask_mod
    planes = tables[0].shape[0] != 1, tables[0].shape[1] != 1
    resolve = partial(_flex, tables, blocks, tuple(seqlens), fn)
    shape = tuple(tables[0].shape[:2])
    return Mask("from_flex({})", (shape,), resolve, partial(_depends_on_flex, planes, fn))


def _flex(
    tables: list[Tensor], blocks: tuple[int, int], seqlens: tuple, fn: Callable, grid: Grid
) -> Node:
    planes = tables[0].shape[:2]
    _check_fit("FlexAttention BlockMask", (*planes, *seqlens), grid[:4])
    patterns = [BlockPattern(grid, partial(_listed, table), *blocks) for table in tables]
    partly = nodes.both(patterns[0], Mod(grid, fn))
    return nodes.either(partly, patterns[1]) if len(patterns) > 1 else partly


def _listed(table: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    planes = table.shape[:2]
    return table[b if planes[0] > 1 else 0, h if planes[1] > 1 else 0, i, j]


def _depends_on_flex(planes: Planes, fn: Callable, device: torch.device) -> Planes:
    per_batch, per_head = depends_on_planes(fn, device)
    return per_batch or planes[0], per_head or planes[1]


@overload
def as_mask(mask: BlockMask) -> BlockMask: ...
@overload
def as_mask(mask: "Mask | FlexBlockMask | Tensor | MaskMod") -> Mask: ...
@overload
def as_mask(mask: object) -> Mask | BlockMask: ...
def as_mask(mask: object) -> Mask | BlockMask:
    """The values of `mask=`: a Mask or BlockMask is returned unchanged; a mask_mod function, a
    dense bool tensor, the bounds of `spans` or a FlexAttention BlockMask becomes a Mask. Anything
    else is a ValueError.
    """
    if isinstance(mask, (Mask, BlockMask)):
        return mask
    if isinstance(mask, Tensor):
        return spans(mask) if is_spans(mask) else dense(mask)
    if all(hasattr(mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod")):
        return from_flex(mask)
    if callable(mask):
        return mod(mask)
    raise ValueError(
        "mask must be a Mask, a BlockMask, a function (b, h, q, k) -> bool, a bool tensor, spans "
        f"or a FlexAttention BlockMask, got {type(mask).__name__}"
    )


def build(
    mask: MaskLike,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Anything `as_mask` accepts, as a BlockMask that fits this problem, on `device`."""
    mask = as_mask(mask)
    if isinstance(mask, Mask):
        return mask.build(batch, heads, seqlen_q, seqlen_k, device)
    _check_fit("BlockMask", mask.shape, (batch, heads, seqlen_q, seqlen_k))
    return mask.to(device)


def node_of(
    mask: Mask | BlockMask, planes: tuple[int, int], lengths: tuple[int, int], device: torch.device
) -> Node:
    """The node of a mask: planes are (batch, heads), lengths (seqlen_q, seqlen_k)."""
    if isinstance(mask, BlockMask):
        return BuiltMask(mask)
    return mask.node(*planes, *lengths, device)


def positions(grid: Grid) -> Tensor:
    """p of every query, int32 (seqlen_q,)."""
    return torch.arange(grid.offset, grid.seqlen_k, dtype=torch.int32)


def _check_fit(name: str, have: tuple, want: tuple) -> None:
    """(batch or 1, heads or 1, seqlen_q, seqlen_k) against the problem."""
    if have[0] not in (1, want[0]) or have[1] not in (1, want[1]) or have[2:] != want[2:]:
        raise ValueError(f"{name} of shape {tuple(have)} does not fit {tuple(want)}")


def _as_lengths(name: str, value: Any) -> Tensor:
    """A non-negative int (0-d), or an integer tensor (batch,), as int64 on the host."""
    if isinstance(value, (int, torch.SymInt)):
        return torch.full((), as_int(name, value), dtype=torch.int64)
    lengths = _as_integers(value)
    if lengths is None or lengths.dim() > 1:
        raise ValueError(f"{name} must be an int or an integer tensor (batch,), got {value!r}")
    _require((lengths >= 0).all(), lambda: f"{name} must not be negative, got {lengths.tolist()}")
    return lengths


def _as_integers(values: Any) -> Tensor | None:
    """Integers as an int64 tensor on the host, copied; None if they are of another type."""
    try:
        integers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # what torch raises for strings, None and lists
        return None
    if integers.dtype == torch.bool or integers.is_floating_point() or integers.is_complex():
        return None
    return integers.to("cpu", torch.int64, copy=True)


def _bounded(name: str, lengths: Tensor, grid: Grid) -> Tensor:
    """lengths as a column per batch entry, after the checks that need the grid."""
    if lengths.dim() and len(lengths) != grid.batch:
        raise ValueError(f"{name} has {len(lengths)} entries for batch={grid.batch}")
    _require(
        (lengths <= grid.seqlen_k).all(),
        lambda: f"{name}={lengths.tolist()} must not exceed seqlen_k={grid.seqlen_k}",
    )
    return lengths.view(-1, 1).int()


def _as_cu(name: str, offsets: Any) -> Tensor:
    """Offsets as int64 on the host, copied."""
    cu = _as_integers(offsets)
    if cu is None or cu.dim() != 1 or not len(cu):
        got = (
            f"{offsets.dtype} {tuple(offsets.shape)}"
            if isinstance(offsets, Tensor)
            else repr(offsets)
        )
        raise ValueError(
            f"document(): {name} must be integers of shape (documents + 1,), got {got}"
        )
    _require(cu[0] == 0, lambda: f"{name} must start at 0, got {name}[0]={int(cu[0])}")
    _require((cu.diff() >= 0).all(), partial(_describe_decrease, name, cu))
    return cu


def _describe_decrease(name: str, cu: Tensor) -> str:
    at = int(cu.diff().argmin())
    return f"{name} must not decrease, got {int(cu[at])} then {int(cu[at + 1])} at index {at}"


def _check_end(name: str, cu: Tensor, axis: str, seqlen: int) -> None:
    _require(
        cu[-1] == seqlen,
        lambda: f"{name} must end at {axis}={seqlen}, got {name}[-1]={int(cu[-1])}",
    )


def _require(is_met: Tensor, message: Callable[[], str]) -> None:
    """Raise unless the condition, a bool scalar on the host, holds. A graph checks it when it runs,
    with a general error text.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
            is_met, "the tensors of a mask do not fit the lengths of the call"
        )
    elif not is_met:
        raise ValueError(message())


def _flex_table(counts: Tensor, indices: Tensor) -> Tensor:
    """Bool (planes_b, planes_h, block rows, block columns) of FlexAttention's padded lists."""
    counts, indices = counts.cpu(), indices.cpu().long()
    width = indices.shape[-1]
    listed = torch.arange(width) < counts[..., None]
    table = torch.zeros(*indices.shape[:-1], width + 1, dtype=torch.bool)
    return table.scatter_(-1, indices.masked_fill(~listed, width), True)[..., :width]
