"""DTensors as arguments: the sharding rules of the torch ops, and the errors for placements that
they do not serve. torch_op.py imports this file at the first call with a DTensor.

A rank attends to its own batch entries or its own heads, with no message:

    placement of q, k, v    out      lse      dq, dk, dv
    Shard(0), batch         Shard(0) Shard(0) Shard(0)
    Shard(2), heads         Shard(2) Shard(1) Shard(2)
    Replicate()             as they are

A tensor whose batch or head dimension has size 1 is shared: every rank gets all of it, and its
gradient is the sum over the ranks, Partial(). Examples are a bias for all heads, and the keys of
multi-query attention. A mesh may have several dimensions: batch on one, heads on the next.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from onchip.core.problem import DIFFERENTIABLE, Problem, Tensors, UnsupportedError
from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import DeferredRule

Dims = tuple[int | None, int | None]  # the dimension of the batch, and that of the heads
BATCH, HEADS = 0, 1  # of Dims
# Of each tensor of a call and each result. None: it has no such dimension, and every rank gets all
# of it.
_DIMS: dict[str, Dims] = {
    **dict.fromkeys(("q", "k", "v", "out", "dout"), (0, 2)),
    **dict.fromkeys(("lse", "dlse", "bias", "mask"), (0, 1)),
    **dict.fromkeys(("page_table", "cache_seqlens", "tree_mask"), (0, None)),
    **dict.fromkeys(("k_scales", "v_scales"), (None, 2)),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "dropout_seed"), (None, None)),
    **dict.fromkeys(("positions_q", "positions_k"), (None, None)),
    "alibi_slopes": (0, 1),
    "sinks": (None, 0),
    **dict.fromkeys(("captured", "captured_ints"), (None, None)),
    "stats": (1, 2),
}
_PACKED: dict[str, Dims] = {
    **dict.fromkeys(("q", "k", "v", "out", "dout"), (None, 1)),
    **dict.fromkeys(("lse", "dlse"), (None, 0)),
    "alibi_slopes": (None, 1),
    "stats": (None, 1),
}
_PAGES: dict[str, Dims] = dict.fromkeys(("k", "v"), (None, 2))
_RANKS = {"alibi_slopes": 2, "mask": 4}  # leading dimensions may be missing
_INPUTS = ("q", "k", "v")


def distribute(problem: Problem, x: Tensors, args: Sequence[Any]) -> list[Any]:
    """The arguments of an op for DTensors q, k and v: all other tensors become replicated DTensors.
    Placements that no rule serves raise UnsupportedError.
    """
    _check_placements(problem, x)
    mesh: DeviceMesh = x.q.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    place = lambda t: replicate(t, mesh) if isinstance(t, Tensor) else t
    return [[place(t) for t in arg] if isinstance(arg, list) else place(arg) for arg in args]


def replicate(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor that is the same on every rank, as a DTensor; a DTensor is returned as it is."""
    if isinstance(t, DTensor):
        return t
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _check_placements(problem: Problem, x: Tensors) -> None:
    dims = _dims(problem.packed, problem.page_size > 0)
    shards = [0, 0]  # ranks that share the batch, and the heads
    for name in _INPUTS:
        t = getattr(x, name)
        if not isinstance(t, DTensor):
            raise ValueError(f"q is a DTensor and {name} is not: distribute {name}, too")
        for dim in {p.dim for p in t.placements if isinstance(p, Shard)}:
            if dim not in dims[name]:
                _refuse(name, t, dim)
            kind = dims[name].index(dim)
            shards[kind] = max(shards[kind], _num_shards(t.device_mesh, t.placements, dim))
    _check_heads(problem, shards[HEADS])
    if problem.dropout_p:
        raise UnsupportedError(
            "dropout_p is not served for DTensors: a rank does not know which of all cells are its"
            " own; use dropout_p=0, or attention on to_local() with a dropout_seed for each rank"
        )
    if problem.score_mod is not None:
        raise UnsupportedError(
            "score_mod is not served for DTensors: a rank does not know which of all heads and"
            " batch entries are its own; use attention on to_local(), with indices of this rank"
        )
    if isinstance(x.mask, DeferredRule | BlockMask):
        _check_mask(x.mask, shards)


def _refuse(name: str, t: DTensor, dim: int) -> None:
    if dim == t.dim() - 1:
        raise UnsupportedError(f"{name} is sharded over head_dim: redistribute it to its heads")
    raise UnsupportedError(
        f"{name} is sharded over its sequence, Shard({dim}): ring and all-to-all attention over"
        " ranks that share a sequence are onchip.parallel.context_parallel_attention, which takes"
        " to_local(); decoding is onchip.parallel.tree_attention"
    )


def _check_heads(problem: Problem, ranks: int) -> None:
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    if ranks and not _divides(ranks, heads, kv_heads):
        raise UnsupportedError(
            f"{heads} heads over {kv_heads} key heads cannot be divided among {ranks} ranks: a"
            " rank needs whole groups of heads; shard the batch, or replicate"
        )


def _check_mask(mask: BlockMask | DeferredRule, shards: Sequence[int]) -> None:
    is_rule = isinstance(mask, DeferredRule)
    for planes, ranks, name in zip(mask.shape, shards, ("batch entry", "head"), strict=False):
        if ranks and (is_rule or planes > 1):
            raise UnsupportedError(
                f"a {'rule' if is_rule else 'BlockMask'} that may differ by {name} is not divided"
                f" among {ranks} ranks: pass a bool tensor"
            )


def _num_shards(mesh: DeviceMesh, placements: Iterable[Placement], dim: int) -> int:
    # A list: Dynamo does not trace prod of a generator.
    return prod([mesh.size(i) for i, p in enumerate(placements) if p == Shard(dim)])


def _divides(ranks: int, heads: int, kv_heads: int) -> bool:
    return heads % ranks == 0 and (kv_heads == 1 or kv_heads % ranks == 0)


def _dims(packed: bool, paged: bool) -> dict[str, Dims]:
    return _DIMS | (_PACKED if packed else {}) | (_PAGES if paged else {})


class _OpCall:
    """The arguments of an op by name, as DTensor gives them to a rule."""

    def __init__(self, schema: OpSchema):
        names = (argument.name for argument in schema.op._schema.arguments)
        self.schema = schema
        self.args: dict[str, Any] = dict(zip(names, schema.args_schema, strict=True))
        packed, paged = (self.args[n] is not None for n in ("cu_seqlens_q", "page_table"))
        self.dims = _dims(packed, paged)

    @property
    def kinds(self) -> Iterator[int | None]:
        """None (replicated) first: of placements of equal cost, DTensor takes the first."""
        yield None
        for kind in (BATCH, HEADS):
            dim = self.dims["q"][kind]
            if dim is not None and self.args["q"].shape[dim] > 1:
                yield kind

    def place(self, name: str, shape: Sequence[int], kind: int | None) -> Placement:
        """The placement of an argument or result if ranks share `kind`, BATCH or HEADS."""
        dim = None if kind is None else self.dims[name][kind]
        if dim is None:
            return Replicate()
        dim -= max(0, _RANKS.get(name, 0) - len(shape))
        return Shard(dim) if dim >= 0 and shape[dim] > 1 else Replicate()

    def inputs(self, kind: int | None) -> Iterator[Placement]:
        """The placement of every tensor, in the order of the schema."""
        for name, arg in self.args.items():
            tensors = getattr(arg, "children", [arg])
            # One tensor is a mask of cells or bounds; more are the lists of a BlockMask.
            kind_of_mask = None if name == "mask" and len(tensors) > 1 else kind
            for t in tensors:
                if isinstance(t, OpStrategy):
                    yield self.place(name, t.shape, kind_of_mask)

    def results(self, kind: int | None) -> Iterator[Placement]:
        """out, lse and stats of a forward; stats are empty unless they are returned."""
        for name in ("out", "lse", "stats"):
            is_empty = name == "stats" and not self.args["return_stats"]
            dim = None if kind is None or is_empty else self.dims[name][kind]
            yield Replicate() if dim is None else Shard(dim)

    def gradients(self, kind: int | None) -> Iterator[Placement]:
        """The gradients of DIFFERENTIABLE; an absent one is empty."""
        for name in DIFFERENTIABLE:
            t = self.args[name]
            placement = Replicate() if t is None else self.place(name, t.shape, kind)
            is_sum = t is not None and kind is not None and placement == Replicate()
            yield Partial() if is_sum else placement

    def has_whole_groups(self, specs: Sequence[Any], _: Any) -> bool:
        """Whether every rank has whole groups of heads. specs: of the tensors that are not None."""
        names = [name for name, arg in self.args.items() if arg is not None]
        q = specs[names.index("q")]
        heads, kv_heads = (self.args[n].shape[self.dims[n][HEADS]] for n in ("q", "k"))
        ranks = _num_shards(q.mesh, q.placements, self.dims["q"][HEADS])
        return _divides(ranks, heads, kv_heads)


def _forward_rule(schema: OpSchema) -> OpStrategy:
    call = _OpCall(schema)
    return _expand(call, [[*call.results(kind), *call.inputs(kind)] for kind in call.kinds], 3)


def _backward_rule(schema: OpSchema) -> OpStrategy:
    call = _OpCall(schema)
    rows = [[*call.gradients(kind), *call.inputs(kind)] for kind in call.kinds]
    return _expand(call, rows, len(DIFFERENTIABLE))


def _expand(call: _OpCall, rows: list[list[Placement]], results: int) -> OpStrategy:
    """Rows for one dimension of a mesh to rows for all of its dimensions."""
    schema, check = call.schema, call.has_whole_groups
    mesh = call.args["q"].mesh
    return expand_to_full_mesh_op_strategy(
        mesh, schema, rows, input_index=results, is_valid_strategy_cb=check
    )


def _split_rule(schema: OpSchema) -> OpStrategy:
    """Element by element."""
    out: Any = schema.args_schema[0]
    rows = [[Replicate()] * 3, *([Shard(dim)] * 3 for dim in range(out.ndim))]
    return expand_to_full_mesh_op_strategy(out.mesh, schema, rows, input_index=2)


def _register() -> None:
    """register_sharding of torch would cache a rule's result by the tensors alone. It depends on
    the options, too, and on which tensors are absent: the 0 of RuntimeSchemaInfo.
    """
    forward = dict.fromkeys(("attention", "forward", "forward_deferred"), _forward_rule)
    backward = dict.fromkeys(("gradients", "backward", "backward_deferred"), _backward_rule)
    register = DTensor._op_dispatcher.sharding_propagator.register_op_strategy
    for name, rule in {**forward, **backward, "split": _split_rule}.items():
        op = getattr(torch.ops.onchip, name).default
        register(op, rule, RuntimeSchemaInfo(0, needs_pytree=True))


_register()
