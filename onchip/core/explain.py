"""explain(): which kernel serves a call, why the others do not, and the least operations and bytes.
For calls with few queries: how their keys are split over programs. For paged calls: the pages that
are read, and how much time reading shared pages once would save.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core import paged
from onchip.core.arguments import refuse_unknown
from onchip.core.backend import KeySplits, accumulator_dtype
from onchip.core.device import DeviceInfo, device_info
from onchip.core.dispatch import Plan, get_backend, plan
from onchip.core.functional import attention, paged_attention, prepare_attention
from onchip.core.problem import Options, Problem, Tensors, resolve_layout
from onchip.cost import prefixes
from onchip.cost.hardware import TABLE, Hardware, find, of_device
from onchip.cost.roofline import (
    TimePrediction,
    backward_ratio,
    bound,
    human_time,
    is_modelled,
    predict,
)
from onchip.cost.splits import first_key
from onchip.fold import cascade
from onchip.kernels import tuned
from onchip.masks import BlockMask, as_mask
from onchip.masks.blockmask import describe_blocks
from onchip.masks.deferred import DeferredMask

# The options of a call that are fields of Options as they come. sm_partition is internal, and the
# function given as score_mod becomes text.
_INTERNAL = ("sm_partition", "score_mod", "captured_is_constant")
SCALARS = tuple(name for name in Options._fields if name not in _INTERNAL)
_OPTIONS = {*signature(attention).parameters, *signature(paged_attention).parameters, "plan"}
# The tensors among the options of attention() and of paged_attention().
TENSORS = tuple(n for n in signature(attention).parameters if n in Tensors._fields[3:])
_PAGES = ("q", "page_table", "cache_seqlens", "cu_seqlens_q")
PAGED_TENSORS = tuple(
    n for n in signature(paged_attention).parameters if n in Tensors._fields and n not in _PAGES
)
NOT_PAGED = ("dropout_p", "precise_delta")
# Options of a Problem that are in other lines of an explanation, or that no caller gives.
_NOT_LISTED = {"packed", "has_mask", "page_size", "has_positions", "first_head", "wide_grads"}


class PageReads(NamedTuple):
    """The pages that a call reads."""

    page_size: int
    read: int  # a page counts once for every sequence that reads it
    distinct: int
    repeated_keys: int  # reads of keys that another sequence reads as well
    left_behind: int  # pages of the sequences that are before their windows
    gathered_bytes: int  # keys and values copied first, if the kernel does not read pages


class PrefixSharing(NamedTuple):
    """The same call as a cascade: bytes of keys, values and partial results, and the predicted
    times of both.
    """

    plan: cascade.CascadePlan
    plain_bytes: int
    cascade_bytes: int
    plain_s: float
    cascade_s: float  # with the levels of the plan; of an empty plan, with the best single level


class ServedPart(NamedTuple):
    """Sequences of a call that are computed as a call of their own."""

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
    plan: Plan  # of the whole call, also if it is split into parts
    flops: int  # forward, over visible cells; with a mask over whole blocks (`_counted`)
    min_bytes: int  # each input read once, each output written once
    scores_bytes: int  # memory of the score matrix in standard attention
    residual_bytes: int = 0  # rounding error of out that precise_delta saves for the backward
    hardware: Hardware | None = None  # rates of the device, if it is in the table
    pages: PageReads | None = None
    splits: KeySplits | None = None
    sharing: PrefixSharing | None = None
    parts: tuple[ServedPart, ...] = ()  # of a mixed batch that is split
    mask: str = ""  # its expression, and how many of its blocks are FULL and PARTIAL
    launch: str = ""  # programs and tiles of the forward, if the backend says
    tuned: str = ""  # the user's own tile rows on this device, if there are any

    @property
    def roofline(self) -> TimePrediction | None:
        """Of the forward: which resource is the bottleneck, and the predicted or the least time.
        None with a `precision`, which no model covers.
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
        """Of the backward; None without a model of its kernels."""
        p, kernel, hardware = self.problem, self.plan.kernel, self.hardware
        if hardware is None or not is_modelled(p, hardware, kernel):
            return None
        return predict(p, hardware, kernel, backward=True, density=self._density)

    @property
    def _counted(self) -> str:
        """Kernels compute non-empty blocks of a mask as a whole; causal and window cut them."""
        in_blocks = self.mask and self.flops < self.problem.flops
        return "whole blocks of the mask" if in_blocks else "visible cells"

    @property
    def _density(self) -> float:
        """The fraction of the operations under causal and window that a block mask leaves."""
        return min(1.0, self.flops / max(1, self.problem.flops))

    def __str__(self) -> str:
        """A headline, then a line for every entry of `_lines` that has a text."""
        p = self.problem
        where = self.device.name or self.device.type
        keys = f"up to {p.seqlen_k} keys in pages" if self.pages else f"{p.seqlen_k} keys"
        headline = f"attention of {p.batch} x {p.seqlen_q} queries over {keys} on {where}"
        lines = (f"  {title:<11} {text}" for title, text in self._lines() if text)
        return "\n".join([headline, *lines])

    def _lines(self) -> Iterator[tuple[str, str]]:
        p = self.problem
        dtype = str(p.dtype).removeprefix("torch.")
        precision = f", multiplied in {p.precision}" if p.precision else ""
        heads = f"{p.num_heads} heads over {p.num_kv_heads}"
        yield "shape", f"{heads}, head_dim {p.head_dim} / {p.head_dim_v}, {dtype}{precision}"
        yield "options", _describe_options(p)
        yield from self._kernel_lines()
        yield "launch", self.launch
        yield "tiles", self.tuned
        yield "mask", self.mask
        backward = "" if self.pages else f", {backward_ratio(p) * self.flops:.3e} backward"
        yield "flops", f"{self.flops:.3e} forward{backward}, over {self._counted}"
        intensity = f"{self.flops / max(1, self.min_bytes):.0f} flops for each"
        yield "min bytes", f"{human_bytes(self.min_bytes)}, {intensity}"
        yield "not stored", f"{human_bytes(self.scores_bytes)} of scores"
        if p.precise_delta:
            size = human_bytes(self.residual_bytes)
            yield "residual", f"{size} of out, saved for the backward (precise_delta)"
        yield from self._paged_lines()

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
            # With shared pages, the time is in the lines about sharing: that model includes the L2.
            shows_time = self.hardware is not None and self.sharing is None
            yield from _split_lines(self.splits, shows_time)
        for title, roofline in (("time", self.roofline), ("backward", self.backward_roofline)):
            if roofline is not None:
                yield title, str(roofline)
        if self.sharing is not None:
            yield from _sharing_lines(self.sharing)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
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
    """Explain attention() with these arguments (with cu_seqlens: varlen_attention(); with
    page_table: paged_attention(); with plan: cascade_attention()). Nothing is computed. Lengths of
    packed and paged calls are read, which synchronises with the device. on: "A100", "H100", "H200"
    or "B200": explain the call on such a device, wherever the tensors are.
    """
    unknown = {name: x for name, x in options.items() if name not in _OPTIONS}
    if unknown:
        refuse_unknown("explain", unknown, dict.fromkeys(_OPTIONS))
    target = _find_hardware(on)
    if page_table is not None or cache_seqlens is not None:
        if cu_seqlens_k is not None or max_seqlen_k is not None:
            raise TypeError("paged keys have cache_seqlens, not cu_seqlens_k and max_seqlen_k")
        tables = Tensors(q, k, v, cu_seqlens_q, page_table=page_table, cache_seqlens=cache_seqlens)
        options = {"return_lse": return_lse, **options}
        return _explain_paged(tables, max_seqlen_q, kernel, target, options)
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    lengths = (max_seqlen_q, max_seqlen_k) if is_packed else ()
    scalars = _scalars(options, return_lse=return_lse)
    apart = {name: options.pop(name, None) for name in ("mask", "score_mod", "dropout_seed")}
    foreign = [name for name in options if name not in TENSORS]
    if foreign:
        raise TypeError(f"attention() has no option {foreign[0]!r}")
    x = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    (problem, _), x = prepare_attention(x, scalars, lengths, **apart)
    parts = _dense_parts(problem, x)
    explanation = _explanation(problem, x, parts, kernel, target)
    lengths = [(p.seqlen_q, p.seqlen_k) for p in parts for _ in range(p.batch)]
    splits = explanation.plan.backend.plan_splits(problem, x, lengths, target)
    explanation = explanation._replace(splits=splits)
    if x.mask is None:
        return explanation
    dense = sum(p.all_flops for p in parts)
    flops = min(explanation.flops, round(x.mask.density() * dense))
    return explanation._replace(flops=flops, mask=_describe_mask(apart["mask"], x.mask))


def _describe_options(problem: Problem) -> str:
    """The options of a call that differ from their defaults."""
    texts = []
    if not math.isclose(problem.softmax_scale, problem.head_dim**-0.5, rel_tol=1e-6):
        texts.append(f"softmax_scale {problem.softmax_scale:g}")
    for name in problem.used_options:
        value = getattr(problem, name)
        if name == "score_mod":
            texts.append(f"score_mod of {value.count(';') + 1} operations")
        elif name not in _NOT_LISTED:
            texts.append(name.removeprefix("has_") if value is True else f"{name} {value}")
    return ", ".join(texts)


def _describe_mask(given: object, mask: BlockMask | DeferredMask) -> str:
    """given: the value of `mask=`."""
    mask = mask.built() if isinstance(mask, DeferredMask) else mask
    rule = "BlockMask" if given is mask else as_mask(given)
    return f"{rule}: {describe_blocks(mask.num_full, mask.num_partial, mask.num_blocks)}"


def _scalars(options: dict, **defaults: object) -> Options:
    """Remove the scalar options from `options` and return them."""
    return Options(**defaults | {n: options.pop(n) for n in SCALARS if n in options})


def _explanation(
    problem: Problem,
    x: Tensors,
    parts: list[Problem],
    kernel: str | None,
    target: Hardware | None,
) -> Explanation:
    device = target.as_device if target else device_info(x.q.device)
    hardware = target or of_device(x.q.device)
    problem = resolve_layout(problem, x)
    chosen = plan(problem, device, kernel)
    launch, tuned_table = None, tuned.load(device)
    if hardware is not None:
        exactly = replace(hardware, name=device.name, capability=device.capability)
        launch = chosen.backend.describe_launch(problem, exactly)
    return Explanation(
        problem,
        device,
        chosen,
        sum(p.flops for p in parts),
        min_bytes=sum(p.min_bytes for p in parts),
        scores_bytes=sum(4 * p.batch * p.num_heads * p.seqlen_q * p.seqlen_k for p in parts),
        residual_bytes=sum(p.residual_bytes for p in parts),
        hardware=hardware,
        launch=launch or "",
        tuned=str(tuned_table) if tuned_table and tuned_table.rows else "",
    )


def _find_hardware(on: str | None) -> Hardware | None:
    """The device named by `on`, in place of the device of the tensors."""
    hardware = None if on is None else find(on)
    if hardware is None and on is not None:
        raise ValueError(f"{on=} is unknown; known are {', '.join(row.name for row in TABLE)}")
    return hardware


def _dense_parts(problem: Problem, x: Tensors) -> list[Problem]:
    """Dense problems: the problem itself, or one per packed sequence."""
    if not problem.packed:
        return [problem]
    lengths = zip(x.cu_seqlens_q.diff().tolist(), x.cu_seqlens_k.diff().tolist(), strict=True)
    return [problem._replace(batch=1, seqlen_q=a, seqlen_k=b, packed=False) for a, b in lengths]


def _explain_paged(
    x: Tensors,
    max_seqlen_q: int | None,
    kernel: str | None,
    target: Hardware | None,
    options: dict,
) -> Explanation:
    shared = options.pop("plan", None)
    if shared is not None and x.cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = max(shared.lengths_q, default=0)  # as in cascade_attention
    is_latent = x.v is None
    problem, x = _prepare_paged(x, max_seqlen_q, options)
    lengths = _lengths(problem, x)
    sequences = [_one_sequence(problem, *pair) for pair in lengths]
    whole = _explanation(problem, x, sequences, kernel, target)
    split = [] if kernel or target else paged.split_mixed_batch(problem, x)
    parts = tuple(_served(part.problem, part.x, plan(part.problem, whole.device)) for part in split)
    pages = _count_pages(problem, x, lengths, parts or (_served(problem, x, whole.plan),))
    splits = whole.plan.backend.plan_splits(whole.problem, x, lengths, target)
    model = prefixes.costs(x.q, x.k, x.v, target)
    if shared is None and pages.distinct < pages.read and _cascades(problem):
        shared = _plan(problem, x, lengths, model)
    sharing = None if shared is None else _sharing(problem, x, lengths, pages, shared, model)
    saved_bytes = pages.repeated_keys * problem.num_kv_heads * problem.key_bytes
    if is_latent:  # the keys hold the values
        keys = sum(p.seen_keys for p in sequences) - pages.repeated_keys
        saved_bytes += keys * problem.num_kv_heads * problem.value_bytes
        dims = problem.head_dim + problem.head_dim_v
        pages = pages._replace(gathered_bytes=pages.gathered_bytes * problem.head_dim // dims)
    return whole._replace(
        min_bytes=whole.min_bytes - saved_bytes,
        pages=pages,
        splits=splits,
        sharing=sharing,
        parts=parts,
    )


def _prepare_paged(x: Tensors, max_seqlen_q: int | None, options: dict) -> tuple[Problem, Tensors]:
    tensors = {n: options.pop(n) for n in PAGED_TENSORS if n in options}
    latent = options.pop("latent", None)
    unknown = [n for n in options if n in NOT_PAGED or n not in SCALARS]
    if unknown:
        raise TypeError(f"paged_attention() has no option {unknown[0]!r}")
    scalars = _scalars(options, causal=True)
    x = x._replace(q=paged.autocast_queries(x.q, x.k), **tensors)
    v, v_scales = paged.find_values(x.k, x.v, x.k_scales, x.v_scales, latent)
    x = x._replace(v=v, v_scales=v_scales)
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


def _one_sequence(problem: Problem, seqlen_q: int, seqlen_k: int) -> Problem:
    """One sequence as a dense call over the keys from the start of its window."""
    keys = seqlen_k - first_key(problem, seqlen_q, seqlen_k)
    return problem._replace(batch=1, seqlen_q=seqlen_q, seqlen_k=keys, packed=False, page_size=0)


def _served(problem: Problem, x: Tensors, chosen: Plan) -> ServedPart:
    queries = x.q.shape[0] if problem.packed else problem.batch * problem.seqlen_q
    return ServedPart(chosen.kernel, problem.batch, queries, int(x.cache_seqlens.sum()))


def _count_pages(
    problem: Problem, x: Tensors, lengths: Sequence[tuple[int, int]], parts: Sequence[ServedPart]
) -> PageReads:
    read = list(_reads(problem, x, lengths))
    held: dict[int, int] = {}
    for page, keys in read:
        held[page] = max(keys, held.get(page, 0))
    repeated = sum(keys for _, keys in read) - sum(held.values())
    left_behind = sum(first_key(problem, *pair) // problem.page_size for pair in lengths)
    gathered = sum(part.keys for part in parts if not get_backend(part.kernel).reads_pages)
    gathered_bytes = gathered * _token_bytes(problem)
    return PageReads(problem.page_size, len(read), len(held), repeated, left_behind, gathered_bytes)


def _reads(
    problem: Problem, x: Tensors, lengths: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """(page, number of its keys that are read) for every sequence that has a query."""
    size = problem.page_size
    for row, (seqlen_q, seqlen_k) in zip(x.page_table.tolist(), lengths, strict=True):
        begin = first_key(problem, seqlen_q, seqlen_k)
        for column in range(begin // size, -(-seqlen_k // size) if seqlen_q else 0):
            first, end = max(begin, column * size), min(seqlen_k, (column + 1) * size)
            yield row[column], end - first


def _token_bytes(problem: Problem) -> int:
    dims = problem.head_dim + problem.head_dim_v
    dtype = problem.dtype if problem.page_dtype is None else accumulator_dtype(problem.dtype)
    return problem.num_kv_heads * dims * dtype.itemsize


def _page_lines(pages: PageReads, kernel: str) -> Iterator[tuple[str, str]]:
    shared = pages.read - pages.distinct
    text = f"{pages.read} of {pages.page_size} slots"
    text += f", {shared} of them also read by another sequence" if shared else ""
    text += f"; {pages.left_behind} before the window" if pages.left_behind else ""
    yield "pages", text
    if pages.gathered_bytes:
        yield "gathered", f"{human_bytes(pages.gathered_bytes)} first: {kernel} does not read pages"


def _split_lines(splits: KeySplits, shows_time: bool) -> Iterator[tuple[str, str]]:
    low, high = min(splits.counts, default=1), max(splits.counts, default=1)
    each = f"{low}" if low == high else f"{low} to {high}"
    yield "splits", f"{each} of a sequence, {splits.programs} programs: {splits.why}"
    if shows_time:
        times = f"{human_time(splits.seconds)}, {human_time(splits.uncut_s)} without splits"
        yield "predicted", times
    if splits.scratch_bytes:
        yield "merged", f"{human_bytes(splits.scratch_bytes)} of partial results, written and read"


def _cascades(problem: Problem) -> bool:
    """Whether cascade_attention serves this call."""
    window = problem.window_size != (None, None)
    return not (window or problem.has_alibi or problem.return_stats)


def _plan(
    problem: Problem,
    x: Tensors,
    lengths: Sequence[tuple[int, int]],
    model: prefixes.PrefixCosts,
    max_levels: int = cascade.MAX_LEVELS,
) -> cascade.CascadePlan | None:
    """The cascade of the call. None if a sequence has more queries than keys: then its tables
    cannot be shared.
    """
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
    pages: PageReads,
    shared: cascade.CascadePlan,
    model: prefixes.PrefixCosts,
) -> PrefixSharing:
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
    return PrefixSharing(shared, *in_bytes, plain_s, plain_s - saved)


def _sharing_lines(sharing: PrefixSharing) -> Iterator[tuple[str, str]]:
    times = f"{human_time(sharing.plain_s)} as one call, {human_time(sharing.cascade_s)} with "
    if not sharing.plan.levels:
        yield "cascade", "no level of shared pages saves more than it costs"
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
        yield "at once", f"{own} programs read the pages that are not shared, {level} the level"
    yield "predicted", times + ("a level" if len(sharing.plan.levels) == 1 else "levels")


def human_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
