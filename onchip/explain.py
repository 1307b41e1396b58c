"""Which kernel serves a call and why each other one does not, with the operations and bytes the
call cannot avoid; of few queries how their keys are split over programs, of a paged call also the
pages it reads, and what reading shared pages once would save.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from onchip import paged
from onchip.arguments import refuse_unknown
from onchip.dispatch import Plan, kernel_module, plan
from onchip.fold import cascade
from onchip.iomodel import prefixes
from onchip.iomodel.hardware import TABLE, Hardware, find, of_device, planned_for
from onchip.iomodel.roofline import (
    TimePrediction,
    backward_ratio,
    bound,
    human_time,
    is_modelled,
    predict,
)
from onchip.iomodel.splits import KeySplits, TileWork, even_splits, seconds, units_for_waves
from onchip.kernels.configs import (
    HOPPER_DECODE_KEYS,
    HOPPER_DECODE_ROWS,
    TileConfig,
    hopper_decode_programs,
)
from onchip.kernels.protocol import accumulator_dtype
from onchip.ops import Extras, Packing, attention, paged_attention, pose
from onchip.problem import DeviceInfo, Options, Problem, Tensors, device_info, laid_out

SCALARS = tuple(name for name in Options._fields if name != "beside")  # which nobody asks for
_OPTIONS = {*signature(attention).parameters, *signature(paged_attention).parameters, "plan"}
NOT_PAGED = ("dropout_p", "precise_delta", "precision")


class Pages(NamedTuple):
    """What a call reads through its page table."""

    page_size: int
    read: int  # a page counts once for every sequence that reads it
    distinct: int
    repeated_keys: int  # reads of keys that another sequence reads as well
    left_behind: int  # of the sequences, but before their windows
    gathered_bytes: int  # keys and values that are copied first, if the kernel reads no pages


class Splits(NamedTuple):
    """How the keys of a sequence are cut, so that enough programs share the work."""

    counts: tuple[int, ...]  # splits of each sequence
    programs: int  # that have work to do
    tile_n: int  # keys that a program takes at a time
    scratch_bytes: int  # states of splits, written and read back
    why: str
    seconds: float  # predicted
    uncut_s: float  # the same, if no sequence were cut


class Sharing(NamedTuple):
    """The same call as a cascade: bytes of keys, values and partial results, and what time is
    predicted for both.
    """

    plan: cascade.Plan
    plain_bytes: int
    cascade_bytes: int
    plain_s: float
    cascade_s: float  # with the levels of the plan; if it has none, with the best there is


class Served(NamedTuple):
    """Sequences of a call that are a call of their own."""

    kernel: str
    sequences: int
    queries: int
    keys: int

    def __str__(self) -> str:
        count = f"{self.sequences} sequences, {self.queries} queries, {self.keys} keys"
        return f"{self.kernel}: {count}"


class Explanation(NamedTuple):
    problem: Problem
    device: DeviceInfo
    plan: Plan  # of the whole call, also where it is cut into parts
    flops: int  # forward, over visible pairs; non-empty blocks of a mask count whole
    min_bytes: int  # each input read once, each output written once
    scores_bytes: int  # what standard attention would allocate for S alone
    residual_bytes: int = 0  # what precise_delta keeps for the backward, beside out
    hardware: Hardware | None = None  # what the device can do, where it is known
    pages: Pages | None = None
    splits: Splits | None = None
    sharing: Sharing | None = None
    parts: tuple[Served, ...] = ()  # of a mixed call that is cut

    @property
    def roofline(self) -> TimePrediction | None:
        """Of the forward: which resource binds, and how long it takes, or at least must. None with
        a precision of its own, of which there is no model.
        """
        if self.hardware is None or self.problem.precision is not None:
            return None
        p, kernel = self.problem, self.plan.kernel
        if is_modelled(p, self.hardware, kernel):
            return predict(p, self.hardware, kernel, density=self._density)
        scratch_bytes = self.splits.scratch_bytes if self.splits else 0
        return bound(p, self.hardware, self.flops, self.min_bytes + scratch_bytes)

    @property
    def backward_roofline(self) -> TimePrediction | None:
        """Of the backward, where a model of its kernels is at hand."""
        p, kernel, hardware = self.problem, self.plan.kernel, self.hardware
        if hardware is None or not is_modelled(p, hardware, kernel):
            return None
        return predict(p, hardware, kernel, backward=True, density=self._density)

    @property
    def _density(self) -> float:
        """Of the operations that causal and window leave, what a block mask leaves."""
        return min(1.0, self.flops / max(1, self.problem.flops))

    def __str__(self) -> str:
        p = self.problem
        where = self.device.name or self.device.type
        keys = f"up to {p.seqlen_k} keys in pages" if self.pages else f"{p.seqlen_k} keys"
        backward = "" if self.pages else f", {backward_ratio(p) * self.flops:.3e} backward"
        lines = [
            f"attention of {p.batch} x {p.seqlen_q} queries over {keys} on {where}",
            f"  shape       {p.num_heads} heads over {p.num_kv_heads}, "
            f"head_dim {p.head_dim} / {p.head_dim_v}, {str(p.dtype).removeprefix('torch.')}"
            + (f", multiplied in {p.precision}" if p.precision else ""),
            *(f"  {title:<11} {text}" for title, text in self._kernel_lines()),
            f"  flops       {self.flops:.3e} forward{backward}",
            f"  min bytes   {human_bytes(self.min_bytes)}, "
            f"{self.flops / max(1, self.min_bytes):.0f} flops for each",
            f"  not stored  {human_bytes(self.scores_bytes)} of scores",
            *self._residual_lines(),
            *(f"  {title:<11} {text}" for title, text in self._paged_lines()),
        ]
        return "\n".join(lines)

    def _residual_lines(self) -> Iterator[str]:
        if self.problem.precise_delta:
            kept = human_bytes(self.residual_bytes)
            yield f"  residual    {kept} of out, kept for the backward (precise_delta)"

    def _kernel_lines(self) -> Iterator[tuple[str, str]]:
        for part in self.parts or (self.plan.kernel,):
            yield "served by", str(part)
        serving = {part.kernel for part in self.parts}
        names_of: dict[str, list[str]] = {}
        for name, reason in self.plan.reasons.items():
            if name not in serving:
                names_of.setdefault(reason, []).append(name)
        for reason, names in names_of.items():
            yield "not by", f"{', '.join(names)}: {reason}"

    def _paged_lines(self) -> Iterator[tuple[str, str]]:
        if self.pages is not None:
            yield from _page_lines(self.pages, self.plan.kernel)
        if self.splits is not None:
            # with shared pages, the lines about sharing tell the time: they know of the L2
            timed = self.hardware is not None and self.sharing is None
            yield from _split_lines(self.splits, timed)
        for title, found in (("time", self.roofline), ("backward", self.backward_roofline)):
            if found is not None:
                yield title, str(found)
        if self.sharing is not None:
            yield from _sharing_lines(self.sharing)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
    on: str | None = None,
    **options: object,
) -> Explanation:
    """What attention() (with cu_seqlens: varlen_attention(); with page_table: paged_attention(),
    and with plan: cascade_attention()) would do with the same arguments. Nothing is computed; of
    packed and paged calls the lengths are read, for which it waits. on: "A100", "H100", "H200" or
    "B200", what such a device would do, wherever the tensors are.
    """
    unknown = {name: x for name, x in options.items() if name not in _OPTIONS}
    if unknown:
        refuse_unknown("explain", unknown, dict.fromkeys(_OPTIONS))
    there = _named(on)
    if page_table is not None or cache_seqlens is not None:
        if cu_seqlens_k is not None or max_seqlen_k is not None:
            raise TypeError("keys in pages have cache_seqlens, not cu_seqlens_k and max_seqlen_k")
        tables = Tensors(q, k, v, cu_seqlens_q, page_table=page_table, cache_seqlens=cache_seqlens)
        options = {"return_lse": return_lse, **options}
        return _explain_paged(tables, max_seqlen_q, kernel, there, options)
    packing = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scalars = _scalars(options, return_lse=return_lse)
    (problem, _), x = pose(q, k, v, scalars, Extras(**options), packing)
    parts = _dense_parts(problem, x)
    explanation = _explanation(problem, x, parts, kernel, there)
    lengths = [(p.seqlen_q, p.seqlen_k) for p in parts for _ in range(p.batch)]
    cut = _cut(explanation.plan.kernel, problem, x, lengths, there)
    explanation = explanation._replace(splits=cut)
    if x.mask is None:
        return explanation
    dense = sum(p.all_flops for p in parts)
    return explanation._replace(flops=min(explanation.flops, round(x.mask.density() * dense)))


def _scalars(options: dict, **defaults: object) -> Options:
    """The scalar options, taken out of the rest."""
    return Options(**defaults | {n: options.pop(n) for n in SCALARS if n in options})


def _explanation(
    problem: Problem,
    x: Tensors,
    parts: list[Problem],
    kernel: str | None,
    there: Hardware | None,
) -> Explanation:
    device = there.as_device if there else device_info(x.q.device)
    return Explanation(
        problem,
        device,
        plan(laid_out(problem, x), device, kernel),
        sum(p.flops for p in parts),
        min_bytes=sum(p.min_bytes for p in parts),
        scores_bytes=sum(4 * p.batch * p.num_heads * p.seqlen_q * p.seqlen_k for p in parts),
        residual_bytes=sum(p.residual_bytes for p in parts),
        hardware=there or of_device(x.q.device),
    )


def _named(on: str | None) -> Hardware | None:
    """The device that is asked about instead of the one of the tensors."""
    found = None if on is None else find(on)
    if found is None and on is not None:
        raise ValueError(f"{on=} is not known, but {', '.join(row.name for row in TABLE)} are")
    return found


def _dense_parts(problem: Problem, x: Tensors) -> list[Problem]:
    """The problem as dense ones: itself, or one per packed sequence."""
    if not problem.packed:
        return [problem]
    lengths = zip(x.cu_seqlens_q.diff().tolist(), x.cu_seqlens_k.diff().tolist(), strict=True)
    return [problem._replace(batch=1, seqlen_q=a, seqlen_k=b, packed=False) for a, b in lengths]


def _explain_paged(
    x: Tensors,
    max_seqlen_q: int | None,
    kernel: str | None,
    there: Hardware | None,
    options: dict,
) -> Explanation:
    shared = options.pop("plan", None)
    if shared is not None and x.cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = max(shared.lengths_q, default=0)  # cascade_attention asks the plan, too
    problem, x = _pose_paged(x, max_seqlen_q, options)
    lengths = _lengths(problem, x)
    found = _explanation(problem, x, [_part(problem, *pair) for pair in lengths], kernel, there)
    cut = [] if kernel or there else paged.parts(problem, x)
    parts = tuple(_served(part.problem, part.x, plan(part.problem, found.device)) for part in cut)
    pages = _pages(problem, x, lengths, parts or (_served(problem, x, found.plan),))
    found = found._replace(splits=_cut(found.plan.kernel, problem, x, lengths, there))
    model = prefixes.costs(x.q, x.k, x.v, there)
    if shared is None and pages.distinct < pages.read and _cascades(problem):
        shared = _plan(problem, x, lengths, model)
    sharing = None if shared is None else _sharing(problem, x, lengths, pages, shared, model)
    repeated_bytes = pages.repeated_keys * problem.num_kv_heads * problem.key_bytes
    min_bytes = found.min_bytes - repeated_bytes
    return found._replace(min_bytes=min_bytes, pages=pages, sharing=sharing, parts=parts)


def _pose_paged(x: Tensors, max_seqlen_q: int | None, options: dict) -> tuple[Problem, Tensors]:
    extras = ("alibi_slopes", "sinks", "tree_mask", "k_scales", "v_scales")
    given = {n: options.pop(n) for n in extras if n in options}
    foreign = [n for n in options if n in NOT_PAGED or n not in SCALARS]
    if foreign:
        raise TypeError(f"paged_attention() has no option {foreign[0]!r}")
    scalars, x = _scalars(options, causal=True), x._replace(q=paged.lowered(x.q, x.k), **given)
    if torch.are_deterministic_algorithms_enabled():
        scalars = scalars._replace(deterministic=True)
    problem = paged.describe(x, scalars, max_seqlen_q)
    paged.check_values(problem, x)
    return problem, x


def _lengths(problem: Problem, x: Tensors) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_k) of every sequence."""
    seqlens = x.cache_seqlens.tolist()
    queries = (
        x.cu_seqlens_q.diff().tolist() if problem.packed else [problem.seqlen_q] * len(seqlens)
    )
    return list(zip(queries, seqlens, strict=True))


def _part(problem: Problem, seqlen_q: int, seqlen_k: int) -> Problem:
    """One sequence as a dense call over the keys that its window leaves."""
    seen = seqlen_k - _first_key(problem, seqlen_q, seqlen_k)
    return problem._replace(batch=1, seqlen_q=seqlen_q, seqlen_k=seen, packed=False, page_size=0)


def _first_key(problem: Problem, seqlen_q: int, seqlen_k: int) -> int:
    left = problem.window_size[0]
    return 0 if left is None else max(0, seqlen_k - seqlen_q - left)


def _served(problem: Problem, x: Tensors, chosen: Plan) -> Served:
    queries = x.q.shape[0] if problem.packed else problem.batch * problem.seqlen_q
    return Served(chosen.kernel, problem.batch, queries, int(x.cache_seqlens.sum()))


def _pages(
    problem: Problem, x: Tensors, lengths: Sequence[tuple[int, int]], parts: Sequence[Served]
) -> Pages:
    read = list(_reads(problem, x, lengths))
    held: dict[int, int] = {}
    for page, keys in read:
        held[page] = max(keys, held.get(page, 0))
    repeated = sum(keys for _, keys in read) - sum(held.values())
    left_behind = sum(_first_key(problem, *pair) // problem.page_size for pair in lengths)
    reads_pages = lambda name: getattr(kernel_module(name), "READS_PAGES", False)
    gathered = sum(part.keys for part in parts if not reads_pages(part.kernel))
    gathered_bytes = gathered * _token_bytes(problem)
    return Pages(problem.page_size, len(read), len(held), repeated, left_behind, gathered_bytes)


def _reads(
    problem: Problem, x: Tensors, lengths: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """(page, how many of its keys) of every sequence that has a query."""
    size = problem.page_size
    for row, (seqlen_q, seqlen_k) in zip(x.page_table.tolist(), lengths, strict=True):
        begin = _first_key(problem, seqlen_q, seqlen_k)
        for place in range(begin // size, -(-seqlen_k // size) if seqlen_q else 0):
            first, end = max(begin, place * size), min(seqlen_k, (place + 1) * size)
            yield row[place], end - first


def _token_bytes(problem: Problem) -> int:
    dims = problem.head_dim + problem.head_dim_v
    dtype = problem.dtype if problem.page_dtype is None else accumulator_dtype(problem.dtype)
    return problem.num_kv_heads * dims * dtype.itemsize


def _page_lines(pages: Pages, kernel: str) -> Iterator[tuple[str, str]]:
    shared = pages.read - pages.distinct
    text = f"{pages.read} of {pages.page_size} slots"
    text += f", {shared} of these reads repeat another's" if shared else ""
    text += f"; {pages.left_behind} left behind by the window" if pages.left_behind else ""
    yield "pages", text
    if pages.gathered_bytes:
        yield "gathered", f"{human_bytes(pages.gathered_bytes)} first: {kernel} reads no pages"


def _cut(
    kernel: str,
    problem: Problem,
    x: Tensors,
    lengths: Sequence[tuple[int, int]],
    on: Hardware | None,
) -> Splits | None:
    """None where the kernel splits no keys of such a call, or where it is not here to be asked."""
    if kernel == "triton" and find_spec("triton"):
        serves = import_module("onchip.kernels.triton.decode").serves(problem)
        return _splits(problem, x, lengths, on) if serves else None
    if kernel == "hopper" and kernel_module("hopper").splits_keys(problem):
        return even_ranges(problem, lengths, on or planned_for(x.q.device))
    return None


def _splits(
    problem: Problem, x: Tensors, lengths: Sequence[tuple[int, int]], on: Hardware | None
) -> Splits:
    """What kernels/triton/splits.py will do on the device with these lengths."""
    decode, launch = (import_module(f"onchip.kernels.triton.{n}") for n in ("decode", "launch"))
    hardware = on or decode.machine(x.q.device)
    config = decode.choose_config(problem, launch.LaunchArgs.of(problem, x), hardware.processors)
    launched = decode.plan_launch(problem, x.q.shape[-3], config, hardware)
    cut = lambda f: [f(problem, *pair, config) for pair in lengths]
    tiles_q, tiles = cut(_tiles_q), cut(_tiles)
    counts = count_splits(launched.cut, tiles_q, tiles)
    units = [a * b for a, b in zip(tiles_q, counts, strict=True)]
    slots = sum(n for n, count in zip(units, counts, strict=True) if count > 1)
    row_bytes = 4 * (problem.head_dim_v + 1)  # out and lse in fp32
    work, parts = TileWork.of(problem, *config[:2]), list(map(KeySplits, tiles_q, tiles, counts))
    return Splits(
        tuple(counts),
        sum(units) * problem.num_kv_heads,
        config.tile_n,
        2 * slots * problem.num_kv_heads * launched.part_rows * row_bytes,
        _why(problem, launched.cut, config.tile_n, hardware.processors, sum(tiles)),
        *_times(work, parts, hardware, merged=launched.num_records > 0),
    )


def _times(
    work: TileWork, parts: Sequence[KeySplits], hardware: Hardware, merged: bool
) -> tuple[float, float]:
    """Seconds of the call as it is cut, and if nothing were."""
    whole = [part._replace(splits=1) for part in parts]
    return seconds(work, parts, hardware, merged), seconds(work, whole, hardware, False)


def even_ranges(problem: Problem, lengths: Sequence[tuple[int, int]], hardware: Hardware) -> Splits:
    """What kernels/hopper/decode.py will do on such a device with these lengths."""
    config = TileConfig(HOPPER_DECODE_ROWS, 64)
    processors, least = hardware.processors, HOPPER_DECODE_KEYS // config.tile_n
    most = units_for_waves(hopper_decode_programs(problem), problem.num_kv_heads, processors)
    tiles = [max(1, _tiles(problem, *pair, config)) for pair in lengths]
    total = sum(tiles)
    ranges = min(most, max(1, total // least))
    holder = lambda tile: ((tile + 1) * ranges - 1) // total
    stops = list(accumulate(tiles))
    counts = [holder(b - 1) - holder(b - n) + 1 for b, n in zip(stops, tiles, strict=True)]
    rows = problem.seqlen_q * problem.num_heads
    states = sum(n for n in counts if n > 1) * rows
    why = f"{total} tiles of 64 keys in {ranges} even ranges ({processors} processors)"
    row_bytes, work = 4 * (problem.head_dim_v + 1), TileWork.of(problem, *config)
    times = (
        seconds(work, parts, hardware, merged=False)
        for parts in ([KeySplits(1, total, ranges)], [KeySplits(1, n) for n in tiles])
    )
    programs = ranges * problem.num_kv_heads
    return Splits(tuple(counts), programs, config.tile_n, 2 * states * row_bytes, why, *times)


def _tiles_q(problem: Problem, seqlen_q: int, seqlen_k: int, config) -> int:
    return -(-seqlen_q * problem.group_size // config.tile_m)


def _tiles(problem: Problem, seqlen_q: int, seqlen_k: int, config) -> int:
    first = _first_key(problem, seqlen_q, seqlen_k) // config.tile_n
    return -(-seqlen_k // config.tile_n) - first


def count_splits(
    cut: tuple[int | None, int | None, int | None], tiles_q: Sequence[int], tiles: Sequence[int]
) -> list[int]:
    """Splits of each sequence, which has tiles_q tiles of queries and `tiles` of keys. cut: units,
    least and fixed as kernels/triton/splits.py explains them.
    """
    units, least, fixed = cut
    if units is None or least is None:
        return [1] * len(tiles)
    work = sum(a * b for a, b in zip(tiles_q, tiles, strict=True))
    even = max(-(-work // units), least)
    most: Callable[[int, int], int] = lambda a, n: even if fixed is None else n if a > 1 else fixed
    return [even_splits(n, max(1, most(a, n))) for a, n in zip(tiles_q, tiles, strict=True)]


def _why(problem: Problem, cut: tuple, tile_n: int, processors: int, tiles: int) -> str:
    units, least, fixed = cut
    if problem.return_stats:
        return "statistics of rows cannot be merged"
    if units is None:
        return f"no cut of {problem.seqlen_k} keys is predicted to pay for its merge"
    if fixed is not None:
        return f"every {fixed * tile_n} keys, whatever else is in the batch (deterministic)"
    share = f"{tiles} tiles of {tile_n} keys for {units} programs a key head"
    return f"{share} ({processors} processors), {least * tile_n} keys each at least"


def _split_lines(splits: Splits, is_known: bool) -> Iterator[tuple[str, str]]:
    low, high = min(splits.counts, default=1), max(splits.counts, default=1)
    each = f"{low}" if low == high else f"{low} to {high}"
    yield "splits", f"{each} of a sequence, {splits.programs} programs: {splits.why}"
    if is_known:
        times = f"{human_time(splits.seconds)}, {human_time(splits.uncut_s)} without a cut"
        yield "predicted", times
    if splits.scratch_bytes:
        yield "merged", f"{human_bytes(splits.scratch_bytes)} of partial results, there and back"


def _cascades(problem: Problem) -> bool:
    """Whether cascade_attention takes such a call."""
    window = problem.window_size != (None, None)
    return not (window or problem.has_alibi or problem.return_stats)


def _plan(
    problem: Problem,
    x: Tensors,
    lengths: Sequence[tuple[int, int]],
    model: prefixes.PrefixCosts,
    max_levels: int = cascade.MAX_LEVELS,
) -> cascade.Plan | None:
    """None where the queries are not all in the cache: such tables cannot be shared."""
    if any(seqlen_k < seqlen_q for seqlen_q, seqlen_k in lengths):
        return None
    options: dict = {"seqlen_q": problem.seqlen_q, "max_levels": max_levels}
    if problem.packed:
        options["cu_seqlens_q"] = [0, *accumulate(n for n, _ in lengths)]
    tables = x.page_table.cpu(), [n for _, n in lengths]
    return cascade.plan(*tables, problem.page_size, model, **options)


def _sharing(
    problem: Problem,
    x: Tensors,
    lengths: Sequence[tuple[int, int]],
    pages: Pages,
    shared: cascade.Plan,
    model: prefixes.PrefixCosts,
) -> Sharing:
    moved = prefixes.moved(x.q, x.k, x.v)
    runs = sum(g.stop - g.start for level in shared.levels for g in level.groups)
    once = pages.read - sum(shared.shared) + runs
    partials = sum(shared.lengths_q) * moved.partial if shared.levels else 0
    for level in shared.levels:
        queries = sum(shared.lengths_q[b] for g in level.groups for b in g.members)
        partials += moved.of_queries(queries, level.segments)
    saved = shared.saved
    if not shared.levels:
        forced = _plan(problem, x, lengths, model._replace(level=0.0), max_levels=1)
        saved = forced.saved - model.level if forced and forced.levels else 0.0
    plain_s = model.one_call(pages.read, pages.distinct)
    in_bytes = pages.read * moved.page, once * moved.page + partials
    return Sharing(shared, *in_bytes, plain_s, plain_s - saved)


def _sharing_lines(sharing: Sharing) -> Iterator[tuple[str, str]]:
    times = f"{human_time(sharing.plain_s)} as one call, {human_time(sharing.cascade_s)} with "
    if not sharing.plan.levels:
        yield "cascade", "no level of shared pages saves as much as it costs"
        if sharing.cascade_s != sharing.plain_s:
            yield "predicted", times + "the best level"
        return
    before, after = sharing.plain_bytes, sharing.cascade_bytes
    less = f"{before / max(1, after):.1f}x less"
    yield "cascade", f"{human_bytes(before)} as one call, {human_bytes(after)} shared: {less}"
    for number, level in enumerate(sharing.plan.levels, 1):
        members = sum(len(g.members) for g in level.groups)
        pages = sum(g.stop - g.start for g in level.groups)
        groups = "1 group" if len(level.groups) == 1 else f"{len(level.groups)} groups"
        read = f"{members} sequences in {groups} read {pages} pages"
        if level.segments > 1:
            read += f" in {level.segments} segments"
        yield f"level {number}", f"{read}, saves {human_time(level.saved)}"
    if sharing.plan.together is not None:
        own, level, *_ = sharing.plan.together
        yield "at once", f"{own} programs read what is not shared, {level} the level"
    yield "predicted", times + ("a level" if len(sharing.plan.levels) == 1 else "levels")


def human_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
