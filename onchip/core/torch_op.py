"""The torch ops behind the public functions: schema, fakes, autograd and vmap. The ops are private.

    eager        attend -> run -> replay_or_run (kernels/runtime/replay.py) -> _compute -> kernel
    with grad    attend -> _attend_with_grad -> _EagerAttention -> run, run_backward
    traced       attend -> onchip::attention -> _attention_autograd -> onchip::forward -> run
    tangents     as traced, then _TracedAttention.jvp -> onchip::tangents -> run_tangents
    second       create_graph: backward -> onchip::gradients, differentiated by _TracedGradients:
                 onchip::tangents and onchip::tangent_gradients -> run_tangent_gradients

The custom ops exist for torch.compile, export, torch.func and autograd tracing. An eager call skips
them.

A torch op takes tensors and scalars, not objects, so a call is flattened to one tuple: the tensors
(`Tensors` without its mask), lengths and options, then the tensors of the mask, or the tensor that
it will be built from. The schema is generated from the fields of `Tensors` and `Options`. The op
chooses its kernel when it runs, so a compiled graph does not specialise on the choice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from onchip.core import backend, paged
from onchip.core.backend import (
    AccumulateFn,
    Backend,
    Grads,
    MergeFn,
    Result,
    Stats,
    Tangents,
    accumulator_dtype,
    empty_result,
)
from onchip.core.call_cache import CachedCall, insert_bounded, prepare
from onchip.core.derivatives import (
    SingleLevel,
    check_tangents,
    check_unmapped,
    first_order,
    has_tangent,
    is_recorded,
    no_second_order,
    refuse_forward_mode,
    refuse_third_order,
)
from onchip.core.device import device_info
from onchip.core.dispatch import find_second_order, find_tangents, plan
from onchip.core.flops import (
    backward_flops,
    forward_flops,
    register_flop_formulas,
    tangent_gradients_flops,
    tangents_flops,
)
from onchip.core.problem import (
    DIFFERENTIABLE,
    LEARNED,
    Options,
    Problem,
    Tensors,
    UnsupportedError,
    resolve_layout,
)
from onchip.core.torch_mode import is_autocast, is_eager
from onchip.core.validation import check_extras, check_packing, check_qkv
from onchip.core.values import check_values
from onchip.kernels.runtime.replay import MAX_RECORDINGS, replay_or_run
from onchip.masks import deferred
from onchip.masks.blockmask import BlockMask
from onchip.masks.deferred import DeferredMask, DeferredRule, is_number

_LIB = torch.library.Library("onchip", "DEF")
_BACKENDS = ("CPU", "CUDA", "MPS", "XPU")
_NUM_TENSORS = len(Tensors._fields) - 1
# The options that are arguments of every op. The window is two arguments, precise_delta is an
# argument of `attention` alone, and sm_partition exists only in eager calls.
_SCALARS = tuple(
    name for name in Options._fields if name not in ("window_size", "precise_delta", "sm_partition")
)
_SCHEMA_TYPES = {bool: "bool", float: "float", torch.dtype: "ScalarType", str | None: "str?"}


def _schema() -> str:
    """The arguments of an op, in the order of `_flatten`, typed as in Tensors and Problem."""
    optional = Tensors._field_defaults
    tensors = (f"Tensor{'?' if n in optional else ''} {n}" for n in Tensors._fields[:_NUM_TENSORS])
    lengths = "SymInt seqlen_q, SymInt seqlen_k, SymInt? window_left, SymInt? window_right"
    scalars = (f"{_SCHEMA_TYPES[Problem.__annotations__[n]]} {n}" for n in _SCALARS)
    return ", ".join((*tensors, lengths, *scalars, "str? kernel", "Tensor[] mask"))


_ARGUMENTS = _schema()
_OUT_DTYPE, _SCORE_MOD, _CONSTANT = (
    _NUM_TENSORS + 4 + _SCALARS.index(n) for n in ("out_dtype", "score_mod", "captured_is_constant")
)
_END = _NUM_TENSORS + 4 + len(_SCALARS) + 1  # index of the mask's tensors
_SAVED_TENSORS = 4  # dout, dlse, out and lse precede the other arguments of a backward


def attend(call: CachedCall, x: Tensors, kernel: str | None) -> Result:
    """Compute a call; out and lse are differentiable. The custom op exists for torch.compile,
    export and autograd tracing. An eager call skips it, which saves 15 us, and 30 us with
    gradients.
    """
    if is_eager(x.q):
        if torch.is_grad_enabled() and _requires_grad(x):
            return _attend_with_grad(call, x, kernel)
        return run(call, x, kernel)
    problem = call.problem
    _count_flops()
    args = _flatten(problem, x, kernel)
    if hasattr(x.q, "device_mesh"):
        from onchip.core.dtensor import distribute

        args = distribute(problem, x, args)
    out, lse, stats = _ATTENTION(*args, problem.precise_delta)
    return Result(out, lse, Stats(*stats.unbind(0)) if problem.return_stats else None)


def _change_call(call: CachedCall, name: str, change: Callable[[Problem], Problem]) -> CachedCall:
    """The call with another problem, cached in the cache of the call by the name of the change."""
    cache, key = call.cache, (name,)
    changed = None if cache is None else cache.get(key)
    if changed is not None:
        return changed
    problem = change(call.problem)
    return (
        CachedCall(problem)
        if cache is None
        else insert_bounded(cache, key, CachedCall(problem, {}), MAX_RECORDINGS)
    )


def _with_wide_out(problem: Problem) -> Problem:
    """With an unrounded out, for `split`."""
    return problem._replace(out_dtype=accumulator_dtype(problem.dtype))


def _with_constant_captured(problem: Problem) -> Problem:
    return problem._replace(captured_is_constant=True)


def split(out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """backend.split, in one launch on a GPU. out must be contiguous. Compiled code calls this as
    an op. Inlined, Inductor would cancel the round-trip to 16 bits and the residual would be zero.
    """
    return _residuals(out).split(out, dtype)


def with_residual(dlse: Tensor | None, residual: Tensor, dout: Tensor) -> Tensor:
    """backend.with_residual, in one launch on a GPU."""
    return _residuals(dout).with_residual(dlse, residual, dout)


def _residuals(t: Tensor) -> ModuleType:
    """The module with split and with_residual. Compilers get torch operations, which they fuse."""
    if t.is_cuda and is_eager(t) and device_info(t.device).has_triton:
        from onchip.kernels.triton import entry

        return entry
    return backend


def _forward_op(mask: Sequence[Tensor]) -> Callable[..., Any]:
    """A mask of one tensor is built from values when the op runs. CUDA graphs must not capture that
    op: a replay would reuse the mask of the capture.
    """
    return _FORWARD_DEFERRED if len(mask) == 1 else _FORWARD


def _backward_op(mask: Sequence[Tensor]) -> Callable[..., Any]:
    return _BACKWARD_DEFERRED if len(mask) == 1 else _BACKWARD


def _attend_with_grad(call: CachedCall, x: Tensors, kernel: str | None) -> Result:
    if call.problem.precise_delta:
        call = _change_call(call, "unrounded", _with_wide_out)
    out, lse, *stats = _EagerAttention.apply(call, x, kernel, *_differentiable(x))
    return Result(out, lse, Stats(*stats) if stats else None)


class _EagerAttention(torch.autograd.Function):
    """The gradient of an eager call. Objects pass through `apply` unchanged. The differentiable
    tensors of x are passed a second time, because autograd sees only tensor arguments.
    """

    @staticmethod
    def forward(ctx, call, x, kernel, *_):
        (out, lse, stats), residual = run(call, x, kernel), None
        if call.problem.precise_delta:
            out, residual = split(out, call.problem.dtype)
        ctx.call = call, x.mask, kernel
        ctx.save_for_backward(*x[:_NUM_TENSORS], out, lse, residual)
        ctx.set_materialize_grads(False)
        if stats is None:
            return out, lse
        ctx.mark_non_differentiable(*stats)
        return out, lse, *stats

    @staticmethod
    def backward(ctx, *grads):
        has_residual = ctx.call[0].problem.precise_delta
        return (_first_eager_backward if has_residual else _eager_backward)(ctx, *grads)

    jvp = staticmethod(refuse_forward_mode)


def _eager_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple:
    """The `backward` of _EagerAttention."""
    check_unmapped(dout, dlse)
    call, mask, kernel = ctx.call
    *tensors, out, lse, residual = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (3 + len(_DIFFERENTIABLE))
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = dlse if residual is None else with_residual(dlse, residual, dout)
    x = Tensors(*tensors, mask=mask)
    if x.captured is not None and not ctx.needs_input_grad[3 + DIFFERENTIABLE.index("captured")]:
        call = _change_call(call, "constant captured", _with_constant_captured)
    grads = _gradients(call, x, kernel, (out, lse, dout, dlse))
    return None, None, None, *grads


_first_eager_backward = first_order(_eager_backward)


class _TracedAttention(SingleLevel):
    """The gradient of the op `attention`. `below` computes the forward one level below autograd."""

    @staticmethod
    def forward(ctx, below, precise_delta, *args):
        mask, residual = list(args[_END:]), None
        out, lse, stats = below(*args)
        if precise_delta:
            out, residual = torch.ops.onchip.split(out, args[0].dtype)
        ctx.scalars, ctx.out_dtype = args[_NUM_TENSORS:_END], out.dtype
        ctx.has_residual = residual is not None
        ctx.save_for_backward(*args[:_NUM_TENSORS], *mask, out, lse, residual)
        ctx.save_for_forward(*args[:_NUM_TENSORS], *mask)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats)
        return out, lse, stats

    @staticmethod
    def backward(ctx, *grads):
        return (_first_traced_backward if ctx.has_residual else _traced_backward)(ctx, *grads)

    @staticmethod
    def jvp(ctx, *tangents):  # pyright: ignore[reportIncompatibleMethodOverride]
        tangents = tangents[2:]  # the first two belong to no tensor
        dx = [tangents[i] for i in _WITH_TANGENTS]
        check_tangents(dx, tangents)
        tensors, mask = ctx.saved_tensors[:_NUM_TENSORS], ctx.saved_tensors[_NUM_TENSORS:]
        dout, dlse = _TANGENTS(*dx, *tensors, *ctx.scalars, list(mask))
        return dout.to(ctx.out_dtype), dlse, None


def _traced_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple:
    """The `backward` of _TracedAttention."""
    check_unmapped(dout, dlse)
    *inputs, out, lse, residual = ctx.saved_tensors
    if residual is not None and any(map(has_tangent, inputs)):
        raise no_second_order("precise_delta")  # the tangent kernel has an unrounded out of its own
    tensors, mask = inputs[:_NUM_TENSORS], inputs[_NUM_TENSORS:]
    if dout is None and dlse is None:
        return (None,) * (2 + _END + len(mask))
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = dlse if residual is None else with_residual(dlse, residual, dout)
    needs = ctx.needs_input_grad[2 : 2 + _NUM_TENSORS]
    args = _choose_gradients((*tensors, *ctx.scalars, mask), needs)
    grads = _GRADIENTS(dout, dlse, out, lse, *args)
    return None, None, *_place_gradients(grads, tensors, needs), *_no_gradients(mask)


_first_traced_backward = first_order(_traced_backward)


def _choose_gradients(args: tuple, needs: Sequence[bool]) -> tuple:
    """The arguments of an op that computes the gradients of the tensors that need one. Only that of
    captured can be omitted.
    """
    is_constant = args[_CAPTURED] is not None and not needs[_CAPTURED]
    return *args[:_CONSTANT], is_constant, *args[_CONSTANT + 1 :]


def _place_gradients(
    grads: Sequence[Tensor], tensors: Sequence, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of an op's tensors, from those of DIFFERENTIABLE; None for absent tensors and
    for those that need none.
    """
    placed: list[Tensor | None] = [None] * _NUM_TENSORS
    for index, grad in zip(_DIFFERENTIABLE, grads, strict=True):
        placed[index] = None if tensors[index] is None or not needs[index] else grad
    return placed


def _no_gradients(mask: Sequence) -> list[None]:
    """The gradients of the arguments after the tensors."""
    return [None] * (_END - _NUM_TENSORS + len(mask))


class _SavedCall(SingleLevel):
    """An op that computes derivatives, with `_LEADING` tensors before the arguments of a call. It
    saves all of its tensors. Its own derivatives are at least second derivatives of attention.
    """

    _LEADING = 0

    @classmethod
    def record(cls, *args: Any) -> Any:
        *inputs, mask = args
        return super().record(*inputs, *mask)

    @classmethod
    def forward(cls, ctx, below, *args):
        first, end = cls._LEADING + _NUM_TENSORS, cls._LEADING + _END
        mask = list(args[end:])
        ctx.scalars = args[first:end]
        ctx.save_for_backward(*args[:first], *mask)
        ctx.save_for_forward(*args[:first], *mask)
        return below(*args[:end], mask)

    @classmethod
    def unpack(cls, ctx: Any) -> tuple[Sequence, Sequence, Sequence]:
        """The leading tensors, the other tensors without the mask, and the arguments of a call.
        Raise if no kernel has second derivatives of the call.
        """
        saved, first = ctx.saved_tensors, cls._LEADING + _NUM_TENSORS
        x = saved[cls._LEADING : first]
        args = *x, *ctx.scalars, list(saved[first:])
        _check_second_order(args)
        return saved[: cls._LEADING], x, args


class _TracedGradients(_SavedCall):
    """The derivatives of the op `gradients`, a function of dout, dlse and the tensors of the call.
    out and lse are functions of these tensors, so they have no gradient of their own.
    """

    _LEADING = _SAVED_TENSORS

    @classmethod
    def forward(cls, ctx, below, *args):
        ctx.set_materialize_grads(False)
        return super().forward(ctx, below, *args)

    @staticmethod
    def backward(ctx, *u):
        check_unmapped(*u)
        (dout, dlse, *_), x, args = _TracedGradients.unpack(ctx)
        dx = _as_tangents(u, x, args)
        of_dout, of_dlse, _, _, *of_x = ctx.needs_input_grad[1:]
        _check_slopes(of_x[_SLOPES])
        grads, grads_x = [None] * _SAVED_TENSORS, [None] * _NUM_TENSORS
        if of_dout or of_dlse:
            ddout, ddlse = _TANGENTS(*dx, *args)
            grads[:2] = ddout, None if dlse is None else ddlse
        if any(of_x):
            chosen = _choose_gradients(args, of_x)
            grads_x = _place_gradients(_TANGENT_GRADIENTS(dout, dlse, *dx, *chosen), x, of_x)
        return None, *grads, *grads_x, *_no_gradients(args[-1])

    @staticmethod
    def jvp(ctx, *tangents):  # pyright: ignore[reportIncompatibleMethodOverride]
        ddout, ddlse, _, _, *of_x = tangents[1:]
        dx = Tangents(*(of_x[i] for i in _WITH_TANGENTS))
        check_tangents((ddout, ddlse, *dx), (ddout, ddlse, *of_x))
        (dout, dlse, *results), _, args = _TracedGradients.unpack(ctx)
        terms = []
        if any(t is not None for t in dx):
            terms.append(_TANGENT_GRADIENTS(dout, dlse, *dx, *args))
        if ddout is not None or ddlse is not None:
            ddout = torch.zeros_like(dout) if ddout is None else ddout
            terms.append(_GRADIENTS(ddout, ddlse, *results, *args))
        return tuple(sum(grads[1:], grads[0]) for grads in zip(*terms, strict=True))


class _TracedTangents(_SavedCall):
    """The gradients of the op `tangents`, which is linear in the tangents of the inputs."""

    _LEADING = len(Tangents._fields)

    @staticmethod
    def backward(ctx, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        check_unmapped(dout, dlse)
        dx, x, args = _TracedTangents.unpack(ctx)
        of_dx = ctx.needs_input_grad[1 : 1 + len(dx)]
        of_x = ctx.needs_input_grad[1 + len(dx) :]
        _check_slopes(of_x[_SLOPES] or of_dx[_WITH_TANGENTS.index(_SLOPES)])
        grads_dx, grads_x = [None] * len(dx), [None] * _NUM_TENSORS
        if any(of_dx):
            out, lse, _ = _ATTENTION(*args, False)
            chosen = _choose_gradients(args, _by_tensor(of_dx))
            grads_dx = _of_tangents(_GRADIENTS(dout, dlse, out, lse, *chosen), dx, of_dx)
        if any(of_x):
            chosen = _choose_gradients(args, of_x)
            grads_x = _place_gradients(_TANGENT_GRADIENTS(dout, dlse, *dx, *chosen), x, of_x)
        return None, *grads_dx, *grads_x, *_no_gradients(args[-1])

    jvp = staticmethod(refuse_third_order)


class _TracedTangentGradients(_SavedCall):
    """The gradients of the op `tangent_gradients` with respect to the tangents alone: it is linear
    in them, by a symmetric matrix of second derivatives. The other inputs are behind _ThirdOrder.
    """

    _LEADING = 2 + len(Tangents._fields)

    @staticmethod
    def backward(ctx, *u):
        check_unmapped(*u)
        (dout, dlse, *dx), x, args = _TracedTangentGradients.unpack(ctx)
        of_dx = ctx.needs_input_grad[3 : 3 + len(dx)]
        _check_slopes(of_dx[_WITH_TANGENTS.index(_SLOPES)])
        chosen = _choose_gradients(args, _by_tensor(of_dx))
        grads = _TANGENT_GRADIENTS(dout, dlse, *_as_tangents(u, x, args), *chosen)
        return (
            None,
            None,
            None,
            *_of_tangents(grads, dx, of_dx),
            *[None] * _NUM_TENSORS,
            *_no_gradients(args[-1]),
        )

    jvp = staticmethod(refuse_third_order)


class _ThirdOrder(SingleLevel):
    """Return a tensor unchanged. Derivatives through it raise UnsupportedError. needs_input_grad
    does not say which gradients a caller asks for, but torch calls this backward only for those.
    """

    @staticmethod
    def forward(ctx, below, t):
        return below(t)

    backward = staticmethod(refuse_third_order)
    jvp = staticmethod(refuse_third_order)


def _as_tangents(grads: Sequence[Tensor | None], x: Sequence, args: tuple) -> Tangents:
    """The gradients of gradients as tangents of the inputs x; None for absent inputs, and for
    captured if the op with the arguments `args` returned no gradient of it.
    """
    named = zip(DIFFERENTIABLE, grads, _differentiable(Tensors(*x)), strict=True)
    dx = Tangents(**{name: grad for name, grad, t in named if t is not None})
    return dx._replace(captured=None) if args[_CONSTANT] else dx


def _of_tangents(
    grads: Sequence[Tensor], dx: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the tangents dx, from those of DIFFERENTIABLE; None for absent tangents and
    for those that need none.
    """
    named: dict[str, Tensor] = dict(zip(DIFFERENTIABLE, grads, strict=True))
    triples = zip(Tangents._fields, dx, needs, strict=True)
    return [named.get(name) if t is not None and need else None for name, t, need in triples]


def _by_tensor(needs: Sequence[bool]) -> list[bool]:
    """needs of the fields of Tangents, by the tensors of an op."""
    placed = [False] * _NUM_TENSORS
    for index, need in zip(_WITH_TANGENTS, needs, strict=True):
        placed[index] = need
    return placed


def _check_second_order(args: tuple) -> None:
    """Raise if no kernel computes the second derivatives of a call."""
    problem, x, kernel = _unflatten(args)
    if hasattr(x.q, "device_mesh"):
        raise no_second_order("its tensors are DTensors")
    find_second_order(problem, device_info(x.q.device), kernel)


def _check_slopes(requires_grad: bool) -> None:
    if requires_grad:
        raise UnsupportedError(
            "alibi_slopes and their tangents have no gradient here: detach them, or differentiate"
            " with respect to the slopes in forward mode"
        )


def _attention_autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The Autograd kernel of `attention`."""
    *inputs, mask, precise_delta = args
    has_transform = _has_transform()
    if not is_recorded([inputs[i] for i in _DIFFERENTIABLE]):
        precise_delta = False  # no backward would read the residual
        apply = lambda below, _, *args: below(*args)
    else:
        _check_differentiable(inputs, has_transform and precise_delta)
        apply = _TracedAttention.record
    if precise_delta:
        inputs[_OUT_DTYPE] = accumulator_dtype(inputs[0].dtype)

    def below(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        args, mask = args[:_END], list(args[_END:])
        if has_transform:
            return _redispatch(_ATTENTION, keyset, *args, mask, False)
        return _forward_op(mask)(*args, mask)

    return apply(below, precise_delta, *inputs, *mask)


def _gradients_autograd(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    """The Autograd kernel of `gradients`."""
    below = _backward_op(args[-1])
    if _has_transform():
        below = partial(_redispatch, _GRADIENTS, keyset)
    inputs = (*args[:2], *(args[_SAVED_TENSORS + i] for i in _WITH_TANGENTS))
    return _TracedGradients.record(below, *args) if is_recorded(inputs) else below(*args)


def _tangents_autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """The Autograd kernel of `tangents`."""
    below = partial(_redispatch, _TANGENTS, keyset)
    first = len(_WITH_TANGENTS)
    inputs = (*args[:first], *(args[first + i] for i in _WITH_TANGENTS))
    return _TracedTangents.record(below, *args) if is_recorded(inputs) else below(*args)


def _tangent_gradients_autograd(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    """The Autograd kernel of `tangent_gradients`."""
    below = partial(_redispatch, _TANGENT_GRADIENTS, keyset)
    first = 2 + len(_WITH_TANGENTS)
    of_x = [first + i for i in _WITH_TANGENTS]
    if not is_recorded((*args[:first], *(args[i] for i in of_x))):
        return below(*args)
    guarded = [*args]
    alias = partial(_redispatch, torch.ops.aten.alias.default, keyset)
    for i in (0, 1, *of_x):
        guarded[i] = None if args[i] is None else _ThirdOrder.record(alias, args[i])
    return _TracedTangentGradients.record(below, *guarded)


def _has_transform() -> bool:
    """Whether a level of torch.func is active. Then the level below gets the same op again, because
    that level may differentiate as well. Otherwise the level below gets `forward` or `backward`,
    the ops that graphs record: a running graph then never enters autograd's Python code.
    """
    return _functorch.peek_interpreter_stack() is not None


def _redispatch(op: Any, keyset: Any, *args: Any) -> Any:
    """Call the op one level below, with gradient recording on: the forward of an autograd.Function
    runs with it off, and the level below would record nothing.
    """
    below = torch._C._AutoDispatchBelowAutograd()
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below:
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _check_differentiable(args: Sequence[Any], keeps_residual: bool) -> None:
    if args[Tensors._fields.index("page_table")] is not None:
        raise UnsupportedError(
            "paged_attention has no derivative, and one of its tensors requires one: detach it"
        )
    if keeps_residual:
        raise UnsupportedError("precise_delta is not served under transforms of torch.func")


def _gradients(call: CachedCall, x: Tensors, kernel: str | None, saved: tuple) -> Sequence:
    """The gradients of `_differentiable(x)`. saved: (out, lse, dout, dlse)."""
    is_differentiated = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if is_eager(x.q) and not is_differentiated:
        return run_backward(call, x, kernel, *saved)
    _count_flops()
    out, lse, dout, dlse = saved
    args = _flatten(call.problem, x, kernel)
    # Otherwise the forward was eager, and its backward is being compiled.
    op = _GRADIENTS if is_differentiated else _backward_op(args[-1])
    grads = op(dout, dlse, out, lse, *args)
    if call.problem.captured_is_constant:
        x = x._replace(captured=None)
    return [None if t is None else g for t, g in zip(_differentiable(x), grads, strict=True)]


_DIFFERENTIABLE = [Tensors._fields.index(name) for name in DIFFERENTIABLE]
_WITH_TANGENTS = [Tensors._fields.index(name) for name in Tangents._fields]
_SLOPES, _CAPTURED = (Tensors._fields.index(name) for name in ("alibi_slopes", "captured"))
_differentiable: Callable[[Tensors], tuple[Tensor | None, ...]] = itemgetter(*_DIFFERENTIABLE)


def _requires_grad(x: Tensors) -> bool:
    for t in _differentiable(x):  # noqa: SIM110 (any() with a generator takes twice as long)
        if t is not None and t.requires_grad:
            return True
    return False


def _flatten(problem: Problem, x: Tensors, kernel: str | None) -> tuple:
    """The arguments of an op for a call. `_unflatten` is the inverse."""
    lengths = (problem.seqlen_q, problem.seqlen_k, *problem.window_size)
    scalars = [getattr(problem, name) for name in _SCALARS]
    mask = [] if x.mask is None else _mask_tensors(x.mask)
    return *x[:_NUM_TENSORS], *lengths, *scalars, kernel, mask


def _unflatten(args: tuple) -> tuple[Problem, Tensors, str | None]:
    """The problem, tensors and kernel of an op's arguments. The lengths of a dense call are read
    from its tensors: a graph traced with other lengths may still hold the lengths of its trace.
    """
    x, mask = Tensors(*args[:_NUM_TENSORS]), args[_END]
    seqlen_q, seqlen_k, left, right, *scalars, kernel = args[_NUM_TENSORS:_END]
    options = Options(window_size=(left, right), **dict(zip(_SCALARS, scalars, strict=True)))
    problem = Problem.of(x, options, (seqlen_q, seqlen_k))
    if not mask:
        return problem, x, kernel
    if len(mask) > 1:  # a BlockMask, for the lengths that the graph was traced with
        built = _find_mask(mask, seqlen_q, seqlen_k)
    elif is_number(mask[0]):
        grid = problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k
        built = DeferredRule(mask[0], grid, x.q.device)
    else:
        built = DeferredMask(mask[0], problem.seqlen_q, problem.seqlen_k)
    return problem._replace(has_mask=True), x._replace(mask=built), kernel


# The op sees the caller's tensor objects, so the identity of a mask's tensors finds the BlockMask
# again, with the host data that it has cached.
_MASKS: WeakValueDictionary[int, BlockMask] = WeakValueDictionary()


def _mask_tensors(mask: BlockMask | DeferredMask) -> list[Tensor]:
    if isinstance(mask, DeferredMask):
        return mask.tensors()
    if not torch.compiler.is_compiling():
        _MASKS[id(mask.tiles)] = mask
    return mask.tensors()


def _find_mask(tensors: Sequence[Tensor], seqlen_q: int, seqlen_k: int) -> BlockMask:
    mask = _MASKS.get(id(tensors[-1]))
    # A slice of the mask's heads has the same tiles, but other rows.
    if mask is not None and mask.tiles is tensors[-1] and mask.rows[0] is tensors[0]:
        return mask
    return BlockMask.from_tensors(list(tensors), seqlen_q, seqlen_k)


def _check_described(x: Tensors, problem: Problem, _: Any) -> Problem:
    """Validate a call that was described when its graph was traced: the graphs of torch.jit.trace
    and make_fx may be called with tensors of other shapes.
    """
    if problem.page_size:
        paged.check_shapes(problem, x)
        return problem
    check_qkv(*x[:3], rank=3 if problem.packed else 4)
    if problem.packed:
        check_packing(x, (problem.seqlen_q, problem.seqlen_k))
    check_extras(problem, x)
    if problem.out_dtype not in (problem.dtype, accumulator_dtype(problem.dtype)):
        raise ValueError(
            f"a graph that was traced for {problem.out_dtype} got tensors of {problem.dtype}"
        )
    return problem


def build_once(mask: Tensor, seqlen_k: int) -> Tensor:
    """Mark a dense mask or the bounds of spans, over seqlen_k keys, in a graph that is being
    compiled. When the graph runs, it builds the mask once for all calls that use it.
    """
    return torch.ops.onchip.mask(mask, seqlen_k)


def _copy_mask(mask: Tensor, seqlen_k: int) -> Tensor:
    """Copy the mask's tensor, and cache the BlockMask built from it while the copy exists."""
    copy = _empty_padded(mask)
    copy.copy_(mask)
    deferred.keep(copy, DeferredMask(copy, mask.shape[-2], seqlen_k).built())
    return copy


def _empty_padded(mask: Tensor, _: Any = None) -> Tensor:
    """An empty tensor of the mask's shape, with strides that no graph gives to its results.
    Inductor reuses the memory of dead tensors, and with equal strides the same tensor object: then
    the cached BlockMask of a mask would be found for a tensor computed from that mask.
    """
    return mask.new_empty((*mask.shape[:-1], mask.shape[-1] + 1))[..., :-1]


def _build_mask(x: Tensors) -> Tensors:
    return x._replace(mask=x.mask.built()) if isinstance(x.mask, DeferredMask) else x


def _attention(*args):
    """`attention` without autograd, as in inference mode."""
    return _forward(*args[:-1])


def _forward(*args):
    problem, x, kernel = _unflatten(args)
    _check_unrecorded(x)
    x = _build_mask(x)
    out, lse, stats = run(prepare_checked(x, problem), x, kernel)
    return out, lse, _empty(lse) if stats is None else torch.stack(stats)


def _check_unrecorded(x: Tensors) -> None:
    """A graph of make_fx without gradients holds the forward alone, and must not be differentiated:
    its gradient would be missing.
    """
    tensors = [t for t in _differentiable(x) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(
            "this graph was traced without its gradient, and one of its inputs requires one:"
            " trace with inputs that require a gradient, or detach them"
        )
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        refuse_forward_mode(None)  # tangents are not visible below autograd: there may be one


def prepare_checked(x: Tensors, problem: Problem) -> CachedCall:
    """The CachedCall of a Problem that was described before. Shapes are validated again."""
    return prepare(_check_described, x, problem, ())


def run(call: CachedCall, x: Tensors, kernel: str | None) -> Result:
    """Compute a call without gradient and without the op. For callers with their own autograd."""
    check_values(call.problem, x)
    paged.check_values(call.problem, x)
    return replay_or_run(_compute, call, x, kernel)


def get_merge_fn(call: CachedCall, x: Tensors, kernel: str | None) -> MergeFn | None:
    """Backend.get_merge_fn of the backend that runs this call."""
    return _choose_backend(call.problem, x, kernel).get_merge_fn(call.problem, x)


def _compute(problem: Problem, x: Tensors, kernel: str | None) -> Result:
    parts = [] if kernel else paged.split_mixed_batch(problem, x)
    if not parts:
        return _serve(problem, x, kernel)
    results = [(part, _serve(part.problem, part.x, kernel)) for part in parts]
    return paged.join_parts(problem, x, results)


def _serve(problem: Problem, x: Tensors, kernel: str | None) -> Result:
    forward = _forward_of(_choose_backend(problem, x, kernel), problem)
    if not is_autocast(x.q):
        return forward(problem, x)
    with _no_autocast(x.q):
        return forward(problem, x)


def _forward_of(backend: Backend, problem: Problem) -> paged.Forward:
    if problem.page_size and not backend.reads_pages:
        return partial(paged.gather_and_forward, backend.forward)
    return backend.forward


def _backward(dout, dlse, out, lse, *args):
    problem, x, kernel = _unflatten(args)
    x = _build_mask(x)
    call = prepare_checked(x, problem)
    grads = run_backward(call, x, kernel, out, lse, dout, dlse)
    return tuple(_empty(lse) if g is None else g for g in grads)


def run_backward(
    call: CachedCall,
    x: Tensors,
    kernel: str | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Grads:
    """The gradients of a call. out and lse: see core/backend.py."""
    return replay_or_run(_compute_backward, call, x, kernel, out, lse, dout.contiguous(), dlse)


def _compute_backward(
    problem: Problem,
    x: Tensors,
    kernel: str | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Grads:
    if problem.precision is not None:  # straight-through: the gradient of unquantised q, k and v
        problem, kernel = problem._replace(precision=None), None
    if problem.reproducible:  # of the forward: (out, lse) means the same to every backward
        problem, kernel = problem._replace(reproducible=False), None
    backward = _choose_backend(problem, x, kernel, backward=True).backward
    if not is_autocast(x.q):
        return backward(problem, x, out, lse, dout, dlse)
    with _no_autocast(x.q):
        return backward(problem, x, out, lse, dout, dlse)


def _tangents(*args):
    first = len(_WITH_TANGENTS)
    problem, x, kernel = _unflatten(args[first:])
    x = _build_mask(x)
    return run_tangents(prepare_checked(x, problem), x, kernel, Tangents(*args[:first]))


def run_tangents(
    call: CachedCall, x: Tensors, kernel: str | None, dx: Tangents
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse of a call."""
    check_values(call.problem, x)
    backend = find_tangents(call.problem, device_info(x.q.device), kernel)
    with _no_autocast(x.q):
        return backend.tangents(call.problem, x, dx)


def _tangent_gradients(dout, dlse, *args):
    first = len(_WITH_TANGENTS)
    problem, x, kernel = _unflatten(args[first:])
    x = _build_mask(x)
    call, dx = prepare_checked(x, problem), Tangents(*args[:first])
    grads = run_tangent_gradients(call, x, kernel, dx, dout, dlse)
    like = dout.to(accumulator_dtype(problem.dtype))
    return tuple(_empty(like) if g is None else g for g in grads)


def run_tangent_gradients(
    call: CachedCall,
    x: Tensors,
    kernel: str | None,
    dx: Tangents,
    dout: Tensor,
    dlse: Tensor | None,
) -> Grads:
    """The gradients of the tangents of a call: see Backend.tangent_gradients."""
    check_values(call.problem, x)
    backend = find_second_order(call.problem, device_info(x.q.device), kernel)
    with _no_autocast(x.q):
        return backend.tangent_gradients(call.problem, x, dx, dout, dlse)


def get_accumulate_fn(call: CachedCall, x: Tensors, kernel: str | None) -> AccumulateFn | None:
    """Backend.get_accumulate_fn of the backend that runs this call's backward."""
    backend = _choose_backend(call.problem, x, kernel, backward=True)
    return backend.get_accumulate_fn(call.problem)


def _choose_backend(
    problem: Problem, x: Tensors, kernel: str | None, backward: bool = False
) -> Backend:
    return plan(resolve_layout(problem, x), device_info(x.q.device), kernel, backward).backend


def _attention_fake(*args):
    return _forward_fake(*args[:-1])


def _forward_fake(*args):
    register_flop_formulas(_FLOPS)
    problem, x, _ = _unflatten(args)
    out, lse = empty_result(problem, x)
    return out, lse, lse.new_empty(2, *lse.shape) if problem.return_stats else _empty(lse)


def _backward_fake(dout, dlse, out, lse, *args):
    problem, x, _ = _unflatten(args)
    return _empty_gradients(problem, x, lse)


def _empty_gradients(problem: Problem, x: Tensors, lse: Tensor) -> tuple[Tensor, ...]:
    """Empty gradients of a call. lse: a tensor with the dtype of the call's lse."""
    if problem.captured_is_constant:
        x = x._replace(captured=None)
    dq, dk, dv = (t.new_empty(t.shape) for t in x[:3])
    learned = (
        _empty(lse) if t is None else t.new_empty(t.shape, dtype=lse.dtype)
        for t in _differentiable(x)[3:]
    )
    return dq, dk, dv, *learned


def _tangents_fake(*args):
    return empty_result(*_unflatten(args[len(_WITH_TANGENTS) :])[:2])


def _tangent_gradients_fake(dout, dlse, *args):
    problem, x, _ = _unflatten(args[len(_WITH_TANGENTS) :])
    return _empty_gradients(problem, x, empty_result(problem, x)[1])


def _count_flops() -> None:
    if not torch.compiler.is_compiling():  # Dynamo need not trace it: the fakes call it
        register_flop_formulas(_FLOPS)


def _forward_flops(*args, **_: Any) -> int:
    return forward_flops(*_unflatten(args)[:2])


def _backward_flops(*args, **_: Any) -> int:
    return backward_flops(*_unflatten(args[_SAVED_TENSORS:])[:2])


def _tangents_flops(*args, **_: Any) -> int:
    first = len(_WITH_TANGENTS)
    return tangents_flops(*_unflatten(args[first:])[:2], Tangents(*args[:first]))


def _tangent_gradients_flops(dout, dlse, *args, **_: Any) -> int:
    first = len(_WITH_TANGENTS)
    return tangent_gradients_flops(*_unflatten(args[first:])[:2], Tangents(*args[:first]))


def _split_fake(out, dtype):
    return torch.empty_like(out, dtype=dtype), torch.empty_like(out, dtype=dtype)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)  # an op returns tensors, not None


def _no_autocast(q: Tensor) -> torch.autocast:
    """Switch autocast off inside a kernel: it would lower the products in fp32."""
    return torch.autocast(q.device.type, enabled=False)


def _attention_vmap(info, in_dims, *args):
    """vmap of a dense forward: the mapped dimension joins the batch. With score_mod, which gets the
    batch index, each entry is a call of its own.
    """
    size = info.batch_size
    *inputs, precise_delta = args
    if inputs[_SCORE_MOD] is not None:
        _check_no_seed(inputs)
        attend_entry = lambda *entry: _ATTENTION(*entry, precise_delta)
        return _map_entries(attend_entry, info, in_dims[:-1], *inputs)
    out, lse, stats = _ATTENTION(*_fold_arguments(size, in_dims, inputs), precise_delta)
    batch = _batch_of_entry(inputs[0], in_dims[0])
    out, lse = (t.unflatten(0, (size, batch)) for t in (out, lse))
    if not stats.numel():
        return (out, lse, stats), (0, 0, None)
    return (out, lse, stats.unflatten(1, (size, -1))), (0, 0, 1)


def _forward_vmap(info, in_dims, *args):
    """vmap of a traced graph when it runs."""
    return _attention_vmap(info, (*in_dims, None), *args, False)


def _gradients_vmap(info, in_dims, *args):
    """vmap of the gradients: each entry of the mapped dimension gets its own. Entries fold into the
    batch, except where entries of a batch share a gradient, in packed calls and with score_mod.
    """
    size, n = info.batch_size, _SAVED_TENSORS
    x = Tensors(*args[n : n + _NUM_TENSORS])
    alone = (*_differentiable(x)[3:], x.cu_seqlens_q, args[n + _SCORE_MOD])
    if any(t is not None for t in alone):
        return _map_entries(_GRADIENTS, info, in_dims, *args)
    saved = [_fold(t, dim, size) for t, dim in zip(args[:n], in_dims, strict=False)]
    grads = _GRADIENTS(*saved, *_fold_arguments(size, in_dims[n:], args[n:]))
    batch = _batch_of_entry(x.q, in_dims[n])
    mapped = [t.unflatten(0, (size, batch)) for t in grads[:3]]
    return (*mapped, *grads[3:]), (*(0, 0, 0), *(None for _ in LEARNED))


def _map_entries(op: Any, info: Any, in_dims: Sequence, *args: Any) -> tuple[tuple, tuple]:
    """vmap of an op, one call for each entry of the mapped dimension: of the tangents and their
    gradients jacfwd maps over the tangents alone, and serves every call that jvp serves.
    """
    size = info.batch_size
    calls = [op(*_take_entry(i, in_dims, args)) for i in range(max(1, size))]
    results = tuple(torch.stack(entries)[:size] for entries in zip(*calls, strict=True))
    return results, (0,) * len(results)


def _take_entry(i: int, in_dims: Sequence, args: Sequence) -> list[Any]:
    """The arguments of an op for entry i of the mapped dimension. A dimension without entries is
    taken as one entry of zeros, for the shapes of the results.
    """
    *in_dims, mask_dims = in_dims
    mask_dims = [None] * len(args[-1]) if mask_dims is None else mask_dims

    def take(t: Any, dim: int | None) -> Any:
        if dim is None:
            return t
        entries = t.movedim(dim, 0)
        return entries[i] if len(entries) else entries.new_zeros(entries.shape[1:])

    return [*map(take, args[:-1], in_dims), [*map(take, args[-1], mask_dims)]]


def _fold_arguments(size: int, in_dims: Sequence, args: Sequence) -> list[Any]:
    """The arguments of a dense call, with a mapped dimension of `size` entries folded into the
    batch. Tensors without a batch (sinks, a seed) must be the same for all entries.
    """
    dims = dict(zip(Tensors._fields, in_dims, strict=False))
    x = Tensors(*args[:_NUM_TENSORS])
    mapped = {name for name in Tensors._fields[:_NUM_TENSORS] if dims[name] is not None}
    unmappable = (x.cu_seqlens_q, x.page_table, x.positions_q)
    if mapped - {"q", "k", "v", "bias", "alibi_slopes"} or any(t is not None for t in unmappable):
        raise UnsupportedError(_VMAP_SERVES)
    _check_no_seed(args)
    batch = _batch_of_entry(x.q, dims["q"])
    folded = [*args]
    folded[:3] = (_fold(t, dim, size) for t, dim in zip(x[:3], in_dims, strict=False))
    for name, rank in (("bias", 4), ("alibi_slopes", 2)):
        shared = _fold_shared(getattr(x, name), dims[name], size, batch, rank)
        folded[Tensors._fields.index(name)] = shared
    folded[_END] = _fold_mask(args[_END], in_dims[_END], size, batch)
    return folded


_VMAP_SERVES = (
    "vmap serves dense calls mapped over q, k, v, bias, alibi_slopes, tensors of score_mod and"
    " tensors as masks, without dropout"
)


def _check_no_seed(args: Sequence[Any]) -> None:
    """Refuse dropout: its random numbers depend on the batch index, which vmap changes."""
    if Tensors(*args[:_NUM_TENSORS]).dropout_seed is not None:
        raise UnsupportedError(_VMAP_SERVES)


def _fold(t: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """t with the mapped dimension folded into its first, the batch."""
    if t is None:
        return None
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.flatten(0, 1)


def _batch_of_entry(q: Tensor, dim: int | None) -> int:
    """The batch of each entry of a mapped dimension."""
    return q.shape[1 if dim == 0 else 0]


def _fold_shared(t: Tensor | None, dim: int | None, size: int, batch: int, rank: int) -> Any:
    """_fold for a tensor of at most `rank` dimensions that batch entries may share. If it is not
    mapped, they still share it.
    """
    if t is None or dim is None and (t.dim() < rank or t.shape[0] == 1 < batch):
        return t
    t = t[None] if dim is None else t.movedim(dim, 0)
    while t.dim() <= rank:
        t = t.unsqueeze(1)
    return t.expand(size, batch, *t.shape[2:]).flatten(0, 1)


def _fold_mask(mask: list[Tensor], dims: Any, size: int, batch: int) -> list[Tensor]:
    if len(mask) == 1 and is_number(mask[0]):
        return mask
    if len(mask) == 1:
        return [_fold_shared(mask[0], dims[0], size, batch, 4)]
    if any(dim is not None for dim in dims or ()):
        raise UnsupportedError("vmap does not map over a BlockMask: map over a bool tensor")
    return BlockMask.from_tensors(mask, 0, 0).repeat_batch(size).tensors() if mask else mask


_SAVED = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"
_RESULT, _GRADS = "(Tensor, Tensor, Tensor)", f"({', '.join('Tensor' for _ in DIFFERENTIABLE)})"
_DX = ", ".join(f"Tensor? d{name}" for name in Tangents._fields)
# Autograd and vmap apply to `attention`, `gradients`, `tangents` and `tangent_gradients`; graphs
# record the last two and the other ops.
_LIB.define(f"attention({_ARGUMENTS}, bool precise_delta) -> {_RESULT}")
_LIB.define(f"gradients({_SAVED}, {_ARGUMENTS}) -> {_GRADS}")
_LIB.define(f"tangents({_DX}, {_ARGUMENTS}) -> (Tensor, Tensor)")
_LIB.define(f"tangent_gradients(Tensor dout, Tensor? dlse, {_DX}, {_ARGUMENTS}) -> {_GRADS}")
_LIB.impl("attention", _attention_autograd, "Autograd", with_keyset=True)
_LIB.impl("gradients", _gradients_autograd, "Autograd", with_keyset=True)
_LIB.impl("tangents", _tangents_autograd, "Autograd", with_keyset=True)
_LIB.impl("tangent_gradients", _tangent_gradients_autograd, "Autograd", with_keyset=True)
for _name, _tags in (("", ()), ("_deferred", torch.Tag.cudagraph_unsafe)):
    _LIB.define(f"forward{_name}({_ARGUMENTS}) -> {_RESULT}", tags=_tags)
    _LIB.define(f"backward{_name}({_SAVED}, {_ARGUMENTS}) -> {_GRADS}", tags=_tags)
_LIB.define("mask(Tensor mask, SymInt seqlen_k) -> Tensor", tags=torch.Tag.cudagraph_unsafe)
_LIB.define("split(Tensor out, ScalarType dtype) -> (Tensor, Tensor)")
_KERNELS = {
    "attention": (_attention, _attention_fake),
    "gradients": (_backward, _backward_fake),
    "tangents": (_tangents, _tangents_fake),
    "tangent_gradients": (_tangent_gradients, _tangent_gradients_fake),
    "forward": (_forward, _forward_fake),
    "forward_deferred": (_forward, _forward_fake),
    "backward": (_backward, _backward_fake),
    "backward_deferred": (_backward, _backward_fake),
    "mask": (_copy_mask, _empty_padded),
    "split": (split, _split_fake),
}
for _name, (_kernel, _fake) in _KERNELS.items():
    for _key in _BACKENDS:
        _LIB.impl(_name, _kernel, _key)
    torch.library.register_fake(f"onchip::{_name}", _fake, lib=_LIB)
for _name in ("", "_deferred"):
    torch.library.register_vmap(f"onchip::forward{_name}", _forward_vmap, lib=_LIB)
    torch.library.register_vmap(f"onchip::backward{_name}", _gradients_vmap, lib=_LIB)
torch.library.register_vmap("onchip::attention", _attention_vmap, lib=_LIB)
torch.library.register_vmap("onchip::gradients", _gradients_vmap, lib=_LIB)
_ATTENTION = torch.ops.onchip.attention.default
_GRADIENTS = torch.ops.onchip.gradients.default
_TANGENTS = torch.ops.onchip.tangents.default
_TANGENT_GRADIENTS = torch.ops.onchip.tangent_gradients.default
for _op in (_TANGENTS, _TANGENT_GRADIENTS):
    _rule = partial(_map_entries, _op)
    torch.library.register_vmap(_op, _rule, lib=_LIB)
_FORWARD = torch.ops.onchip.forward.default
_BACKWARD = torch.ops.onchip.backward.default
_FORWARD_DEFERRED = torch.ops.onchip.forward_deferred.default
_BACKWARD_DEFERRED = torch.ops.onchip.backward_deferred.default
_FLOPS = {
    torch.ops.onchip.attention: _forward_flops,
    torch.ops.onchip.forward: _forward_flops,
    torch.ops.onchip.forward_deferred: _forward_flops,
    torch.ops.onchip.gradients: _backward_flops,
    torch.ops.onchip.backward: _backward_flops,
    torch.ops.onchip.backward_deferred: _backward_flops,
    torch.ops.onchip.tangents: _tangents_flops,
    torch.ops.onchip.tangent_gradients: _tangent_gradients_flops,
}
register_flop_formulas(_FLOPS)
