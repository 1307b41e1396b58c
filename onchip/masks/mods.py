"""Mask expressions: what a query may see, said without lengths.

A `Mask` is built for lengths when they are known. In all of them, p = q + seqlen_k - seqlen_q is
the position of query q among the keys (bottom-right: the last query stands at the last key).
"""

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from . import nodes
from .blockmask import BlockMask
from .nodes import Grid, Interval, Node
from .trace import depends_on_planes

_REMEMBERED = 4  # builds kept per expression: a training and an evaluation length, twice


class Mask:
    """A rule for visibility that can be combined (`&`, `|`, `~`), built and shown.

    Where a rule takes tensors it copies them to the host at once, so changing them later changes
    nothing; a function passed to `mod` must be pure.
    """

    def __init__(
        self,
        text: str,
        resolve: Callable[[Grid], Node],
        depends: Callable[[torch.device], tuple[bool, bool]] = lambda device: (False, False),
    ):
        """text: how it prints. depends: does the rule differ between batch entries, heads?"""
        self._text = text
        self._resolve = resolve
        self._depends = depends
        self._built: dict[tuple, BlockMask] = {}

    def build(
        self,
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """This mask as data for these lengths, on `device`; the last few results are kept.

        The lists are made on the CPU and copied to the device once. Only a `mod` function runs on
        the device (where the tensors it captures should be).
        """
        grid = self._grid(batch, heads, seqlen_q, seqlen_k, torch.device(device))
        built = self._built.get(grid)
        if built is None:
            built = nodes.build(self._resolve(grid)).to(device)
            self._built[grid] = built
            for oldest in list(self._built)[:-_REMEMBERED]:
                self._built.pop(oldest, None)
        return built

    def node(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
    ) -> Node:
        """This mask for these lengths before it is data: what `parts` cuts."""
        return self._resolve(self._grid(batch, heads, seqlen_q, seqlen_k, torch.device(device)))

    def _grid(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
    ) -> Grid:
        per_batch, per_head = True, True
        if batch and heads and seqlen_q and seqlen_k:  # else there is no index to try a mod with
            per_batch, per_head = self._depends(device)
        planes = (batch if per_batch else 1, heads if per_head else 1)
        return Grid(*planes, seqlen_q, seqlen_k, device)

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

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> "Mask":
        return Mask(f"~{self}", lambda grid: nodes.invert(self._resolve(grid)), self._depends)

    def _join(self, given: "Mask", sign: str, join: Callable[[Node, Node], Node]) -> "Mask":
        other = as_mask(given)
        if isinstance(other, BlockMask):
            raise ValueError("a built BlockMask cannot be combined: combine masks, then build")

        def depends(device: torch.device) -> tuple[bool, bool]:
            a, b = self._depends(device), other._depends(device)
            return a[0] or b[0], a[1] or b[1]

        return Mask(
            f"({self} {sign} {other})",
            lambda grid: join(self._resolve(grid), other._resolve(grid)),
            depends,
        )

    def __bool__(self) -> bool:
        raise ValueError(
            "a mask is neither true nor false: combine masks with & | ~, not and/or/not"
        )

    def __repr__(self) -> str:
        return self._text


def full() -> Mask:
    """Every query sees every key."""
    return Mask("full()", lambda grid: Interval(grid, 0, grid.seqlen_k))


def causal() -> Mask:
    """Query q sees the keys k <= p."""
    return Mask("causal()", lambda grid: Interval(grid, 0, positions(grid) + 1))


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Query q sees the keys p - left <= k <= p + right; None leaves a side open."""
    for name, size in (("left", left), ("right", right)):
        if size is not None and size < 0:
            raise ValueError(f"window {name}={size} must be None or at least 0")

    def resolve(grid: Grid) -> Interval:
        p, most = positions(grid), grid.seqlen_q + grid.seqlen_k  # as wide as any window gets
        lo = 0 if left is None else p - min(left, most)
        hi = grid.seqlen_k if right is None else p + min(right, most) + 1
        return Interval(grid, lo, hi)

    return Mask(f"window({left}, {right})", resolve)


def prefix_lm(prefix_len: int | Tensor) -> Mask:
    """Query q sees the keys k < prefix_len and the keys k <= p.

    prefix_len is an int, or an integer tensor (batch,) with one prefix per batch entry, each
    between 0 and seqlen_k.
    """
    lengths, shown = _lengths("prefix_len", prefix_len)

    def resolve(grid: Grid) -> Interval:
        hi = _bounded("prefix_len", lengths, grid)
        return Interval(grid, 0, torch.maximum(hi, positions(grid) + 1))

    return Mask(f"prefix_lm({shown})", resolve, lambda device: (lengths.dim() > 0, False))


def padding(lengths: Tensor) -> Mask:
    """Query q of batch entry b sees the keys k < lengths[b]; lengths is an integer tensor (batch,).

    Rows of padding queries are not hidden: their output is not asked for.
    """
    ends, shown = _lengths("lengths", lengths)
    if not ends.dim():
        raise ValueError(f"lengths must be an integer tensor (batch,), got {lengths!r}")
    return Mask(
        f"padding({shown})",
        lambda grid: Interval(grid, 0, _bounded("lengths", ends, grid)),
        lambda device: (True, False),
    )


def document(cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None) -> Mask:
    """Query q sees the keys of its own document.

    Document d holds the positions cu_seqlens[d] <= x < cu_seqlens[d + 1] of queries and keys, or
    of queries only when the keys have their own cu_seqlens_k. int32, from 0 to the length, never
    decreasing; documents may be empty. A tensor on a GPU is copied to the host here.

    With one cu_seqlens, `document(cu_seqlens) & causal()` is causal within each document. With two,
    causal() still compares positions in the whole sequence, not within the document.
    """
    cu_q = _checked_cu("cu_seqlens", cu_seqlens)
    cu_k = cu_q if cu_seqlens_k is None else _checked_cu("cu_seqlens_k", cu_seqlens_k)
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seqlens has {len(cu_q) - 1} documents and cu_seqlens_k has {len(cu_k) - 1}"
        )

    def resolve(grid: Grid) -> Interval:
        _check_end("cu_seqlens", cu_q, "seqlen_q", grid.seqlen_q)
        name = "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k"
        _check_end(name, cu_k, "seqlen_k", grid.seqlen_k)
        sizes = cu_q.diff()
        lo, hi = (torch.repeat_interleave(ends, sizes) for ends in (cu_k[:-1], cu_k[1:]))
        return Interval(grid, lo, hi)

    return Mask(f"document({len(cu_q) - 1} documents)", resolve)


def spans(bounds: Tensor) -> Mask:
    """Query q of batch entry b sees the keys bounds[b, 0, q, 0] <= k < bounds[b, 0, q, 1].

    An integer tensor (batch or 1, 1, seqlen_q, 2); no bound is negative, and a query whose keys end
    before they begin sees nothing. Copied to the host here.
    """
    if not is_spans(bounds):
        got = f"{bounds.dtype} {tuple(bounds.shape)}" if isinstance(bounds, Tensor) else bounds
        raise ValueError(f"spans must be integers of shape (batch or 1, 1, seqlen_q, 2), got {got}")
    ends = bounds.to("cpu", torch.int64, copy=True)
    if ends.numel() and ends.min() < 0:
        raise ValueError("a bound of a span is negative: where keys are no interval there is none")
    shape = (len(ends), 1, ends.shape[2])

    def resolve(grid: Grid) -> Interval:
        _check_fit("spans", (*shape, grid.seqlen_k), grid[:4])
        lo, hi = ends[:, 0].clamp(max=grid.seqlen_k).unbind(-1)
        return Interval(grid, lo, hi)

    return Mask(f"spans{shape}", resolve, lambda device: (shape[0] != 1, False))


def is_spans(bounds: object) -> bool:
    """Whether this is a tensor that `spans` takes, as far as its type and shape tell."""
    if not isinstance(bounds, Tensor) or bounds.dtype not in (torch.int32, torch.int64):
        return False
    return bounds.dim() == 4 and bounds.shape[1] == 1 and bounds.shape[3] == 2


def mod(fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """Query q sees key k iff fn(b, h, q, k); any FlexAttention `mask_mod` works unchanged.

    fn gets scalar index tensors (under vmap) and returns a bool scalar; q is the raw index, not p.
    It must be pure. It is evaluated on whole blocks, only those that the masks it is combined with
    by `&` leave open; alone it costs seqlen_q x seqlen_k evaluations in time, never in memory.
    """
    try:
        inspect.signature(fn).bind(0, 0, 0, 0)
    except TypeError as error:
        raise ValueError(f"a mask function must accept (b, h, q, k), got {fn!r}") from error
    except ValueError:  # a callable without a readable signature
        pass
    name = getattr(fn, "__name__", type(fn).__name__)
    return Mask(
        f"mod({name})",
        lambda grid: nodes.Mod(grid, fn),
        cache(lambda at: depends_on_planes(fn, at)),
    )


def dense(visible: Tensor) -> Mask:
    """Query q sees key k iff visible[..., q, k].

    A bool tensor (seqlen_q, seqlen_k) or (batch or 1, heads or 1, seqlen_q, seqlen_k). It is
    packed to one bit per cell at once, on its device, and kept on the host.
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
    words = nodes.pack_dense(visible.view(shape))

    def resolve(grid: Grid) -> nodes.Dense:
        _check_fit("dense mask", shape, grid[:4])
        return nodes.Dense(grid, words)

    return Mask(f"dense{shape}", resolve, lambda device: (shape[0] != 1, shape[1] != 1))


def from_flex(block_mask) -> Mask:
    """The mask of a FlexAttention `BlockMask` of any BLOCK_SIZE.

    A cell is visible iff its block is listed as full, or is listed as partial and mask_mod says so.
    """
    block_q, block_k = block_mask.BLOCK_SIZE
    tables = [_flex_table(block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_num_blocks is not None:
        tables.append(_flex_table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    planes, seqlens, fn = tables[0].shape[:2], block_mask.seq_lengths, block_mask.mask_mod

    def pattern(grid: Grid, table: Tensor) -> Node:
        def rule(b, h, i, j):
            return table[b if planes[0] > 1 else 0, h if planes[1] > 1 else 0, i, j]

        return nodes.Pattern(grid, rule, block_q, block_k)

    def resolve(grid: Grid) -> Node:
        _check_fit("FlexAttention BlockMask", (*planes, *seqlens), grid[:4])
        partial = nodes.both(pattern(grid, tables[0]), nodes.Mod(grid, fn))
        return nodes.either(partial, pattern(grid, tables[1])) if len(tables) > 1 else partial

    @cache
    def depends(device: torch.device) -> tuple[bool, bool]:
        per_batch, per_head = depends_on_planes(fn, device)
        return per_batch or planes[0] != 1, per_head or planes[1] != 1

    return Mask(f"from_flex({tuple(planes)})", resolve, depends)


def as_mask(mask) -> Mask | BlockMask:
    """What a user may pass as `mask=`: a Mask or BlockMask as it is, a mask_mod function, a dense
    bool tensor, the bounds of `spans` or a FlexAttention BlockMask as a Mask. Anything else is a
    ValueError.
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


def build(mask, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device="cpu") -> BlockMask:
    """Anything `as_mask` accepts, as a BlockMask that fits this problem, on `device`."""
    mask = as_mask(mask)
    if isinstance(mask, Mask):
        return mask.build(batch, heads, seqlen_q, seqlen_k, device)
    _check_fit("BlockMask", mask.shape, (batch, heads, seqlen_q, seqlen_k))
    return mask.to(device)


def positions(grid: Grid) -> Tensor:
    """p of every query, int32 (seqlen_q,)."""
    return torch.arange(grid.offset, grid.seqlen_k, dtype=torch.int32)


def _check_fit(name: str, have: tuple, want: tuple) -> None:
    """(batch or 1, heads or 1, seqlen_q, seqlen_k) against the problem."""
    if have[0] not in (1, want[0]) or have[1] not in (1, want[1]) or have[2:] != want[2:]:
        raise ValueError(f"{name} of shape {tuple(have)} does not fit {tuple(want)}")


def _lengths(name: str, value: int | Tensor) -> tuple[Tensor, str]:
    """A non-negative int (0-d) or integer tensor (batch,) on the host, and how to print it."""
    lengths = torch.as_tensor(value)
    if lengths.dim() > 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"{name} must be an int or an integer tensor (batch,), got {value!r}")
    lengths = lengths.to("cpu", torch.int64, copy=True)
    if lengths.numel() and lengths.min() < 0:
        raise ValueError(f"{name} must not be negative, got {lengths.tolist()}")
    return lengths, str(lengths.item()) if lengths.dim() == 0 else f"{len(lengths)} lengths"


def _bounded(name: str, lengths: Tensor, grid: Grid) -> Tensor:
    """lengths as a column per batch entry, after the checks that need the grid."""
    if lengths.dim() and len(lengths) != grid.batch:
        raise ValueError(f"{name} has {len(lengths)} entries for batch={grid.batch}")
    if lengths.numel() and lengths.max() > grid.seqlen_k:
        raise ValueError(f"{name}={lengths.tolist()} must not exceed seqlen_k={grid.seqlen_k}")
    return lengths.view(-1, 1).int()


def _checked_cu(name: str, cu: Tensor) -> Tensor:
    if not isinstance(cu, Tensor) or cu.dtype != torch.int32 or cu.dim() != 1 or not len(cu):
        got = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, Tensor) else type(cu).__name__
        raise ValueError(f"{name} must be an int32 tensor (documents + 1,), got {got}")
    cu = cu.to("cpu", copy=True)
    if cu[0] != 0:
        raise ValueError(f"{name} must start at 0, got {name}[0]={int(cu[0])}")
    steps = cu.diff()
    if len(steps) and steps.min() < 0:
        at = int(steps.argmin())
        raise ValueError(
            f"{name} must not decrease, got {int(cu[at])} then {int(cu[at + 1])} at index {at}"
        )
    return cu


def _check_end(name: str, cu: Tensor, axis: str, seqlen: int) -> None:
    if cu[-1] != seqlen:
        raise ValueError(f"{name} must end at {axis}={seqlen}, got {name}[-1]={int(cu[-1])}")


def _flex_table(counts: Tensor, indices: Tensor) -> Tensor:
    """Bool (planes_b, planes_h, block rows, block columns) of FlexAttention's padded lists."""
    counts, indices = counts.cpu(), indices.cpu().long()
    width = indices.shape[-1]
    listed = torch.arange(width) < counts[..., None]
    table = torch.zeros(*indices.shape[:-1], width + 1, dtype=torch.bool)
    return table.scatter_(-1, indices.masked_fill(~listed, width), True)[..., :width]
