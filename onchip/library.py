"""The torch op behind the public functions: schema, fakes, autograd and vmap. Its names are
private.

One flat tuple crosses the op, because torch ops take tensors and scalars, not objects: the tensors
(`Tensors` without its mask), fourteen scalars (`_scalars`), then the tensors of the mask, or the
one that it will be built from. The plan is made inside: a compiled graph never specialises on it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from onchip import paged
from onchip.derivatives import (
    SingleLevel,
    check_unmapped,
    first_order,
    is_recorded,
    refuse_forward_mode,
    refuse_second_order,
)
from onchip.dispatch import kernel_module, plan
from onchip.flops import backward_flops, forward_flops, tell_counters
from onchip.kernels import protocol
from onchip.kernels.protocol import Grads, Result, Stats, accumulator_dtype, empty_result
from onchip.kernels.tapes import MAX_RECORDINGS, replay_or_run
from onchip.masks import later
from onchip.masks.blockmask import BlockMask
from onchip.masks.later import Later, LaterRule, is_number
from onchip.problem import (
    Problem,
    Question,
    Tensors,
    UnsupportedError,
    ask,
    check_extras,
    check_packing,
    check_qkv,
    check_values,
    device_info,
    is_autocast,
    is_eager,
    kept,
    laid_out,
)

_LIB = torch.library.Library("onchip", "DEF")
_BACKENDS = ("CPU", "CUDA", "MPS", "XPU")
_NUM_TENSORS = len(Tensors._fields) - 1
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? alibi_slopes, Tensor? bias, Tensor? sinks, Tensor? dropout_seed, "
    "Tensor? page_table, Tensor? cache_seqlens, Tensor? tree_mask, "
    "Tensor? places_q, Tensor? places_k, Tensor? k_scales, Tensor? v_scales, "
    "SymInt seqlen_q, SymInt seqlen_k, float softmax_scale, bool causal, "
    "SymInt? window_left, SymInt? window_right, float softcap, float dropout_p, "
    "ScalarType out_dtype, bool return_stats, bool deterministic, bool return_lse, str? precision, "
    "str? kernel, Tensor[] mask"
)


_END = _NUM_TENSORS + 14  # where the mask begins
_OUT_DTYPE = _NUM_TENSORS + 8
_SAVED_TENSORS = 4  # dout, dlse, out and lse, before the arguments of a backward


def attend(question: Question, x: Tensors, kernel: str | None) -> Result:
    """The Result of a problem, differentiable in out and lse. The op is there for those who watch,
    and would only cost time otherwise: 15 us, and 30 where gradients are recorded.
    """
    if is_eager(x.q):
        wants_grad = torch.is_grad_enabled() and _wants_grad(x)
        return _attend_eagerly(question, x, kernel) if wants_grad else run(question, x, kernel)
    problem = question.problem
    tell_counters(_FLOPS)
    mask = [] if x.mask is None else _mask_tensors(x.mask)
    scalars = _scalars(problem, kernel)
    out, lse, stats = _ATTENTION(*x[:_NUM_TENSORS], *scalars, mask, problem.precise_delta)
    return Result(out, lse, Stats(*stats.unbind(0)) if problem.return_stats else None)


def _unrounded(question: Question) -> Question:
    """The same with an out that is left to be split, kept beside the question's tapes."""
    known, key = question.known, ("unrounded",)
    found = None if known is None else known.get(key)
    if found is not None:
        return found
    problem = question.problem
    wide = problem._replace(out_dtype=accumulator_dtype(problem.dtype))
    return Question(wide) if known is None else kept(known, key, Question(wide, {}), MAX_RECORDINGS)


def split(out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """protocol.split, in one launch on a GPU. out is contiguous. What is compiled calls the op:
    Inductor would see that something is rounded and widened again, take the rounding back, and find
    no residual.
    """
    return _residuals(out).split(out, dtype)


def with_residual(dlse: Tensor | None, residual: Tensor, dout: Tensor) -> Tensor:
    """protocol.with_residual, likewise."""
    return _residuals(dout).with_residual(dlse, residual, dout)


def _residuals(t: Tensor) -> ModuleType:
    """What compilers see of with_residual are operations of torch, which they fuse themselves."""
    fused = t.is_cuda and is_eager(t) and device_info(t.device).has_triton
    return kernel_module("triton") if fused else protocol


def _forward_op(mask: Sequence[Tensor]) -> Callable[..., Any]:
    """A CUDA graph must not record a mask that is built from values: it would replay it."""
    return _FORWARD_LATER if len(mask) == 1 else _FORWARD


def _backward_op(mask: Sequence[Tensor]) -> Callable[..., Any]:
    return _BACKWARD_LATER if len(mask) == 1 else _BACKWARD


def _attend_eagerly(question: Question, x: Tensors, kernel: str | None) -> Result:
    if question.problem.precise_delta:
        question = _unrounded(question)
    out, lse, *stats = _EagerAttention.apply(question, x, kernel, *_differentiable(x))
    return Result(out, lse, Stats(*stats) if stats else None)


class _EagerAttention(torch.autograd.Function):
    """Objects pass through as they are. The differentiable tensors of x come once more, for
    autograd to see.
    """

    @staticmethod
    def forward(ctx, question, x, kernel, *_):
        (out, lse, stats), residual = run(question, x, kernel), None
        if question.problem.precise_delta:
            out, residual = split(out, question.problem.dtype)
        ctx.call = question, x.mask, kernel
        ctx.save_for_backward(*x[:_NUM_TENSORS], out, lse, residual)
        ctx.set_materialize_grads(False)
        if stats is None:
            return out, lse
        ctx.mark_non_differentiable(*stats)
        return out, lse, *stats

    @staticmethod
    @first_order
    def backward(ctx, dout, dlse, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        question, mask, kernel = ctx.call
        *tensors, out, lse, residual = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (3 + len(_DIFFERENTIABLE))
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = dlse if residual is None else with_residual(dlse, residual, dout)
        x = Tensors(*tensors, mask=mask)
        grads = _gradients(question, x, kernel, (out, lse, dout, dlse))
        return None, None, None, *grads

    jvp = staticmethod(refuse_forward_mode)


class _Attention(SingleLevel):
    """The gradient of the op `attention`. `below` computes it one level below autograd."""

    @staticmethod
    def forward(ctx, below, precise_delta, *args):
        mask, residual = list(args[_END:]), None
        out, lse, stats = below(*args)
        if precise_delta:
            out, residual = torch.ops.onchip.split(out, args[0].dtype)
        ctx.scalars = args[_NUM_TENSORS:_END]
        ctx.save_for_backward(*args[:_NUM_TENSORS], *mask, out, lse, residual)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats)
        return out, lse, stats

    @staticmethod
    def backward(ctx, dout, dlse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        check_unmapped(dout, dlse)
        *given, out, lse, residual = ctx.saved_tensors
        tensors, mask = given[:_NUM_TENSORS], given[_NUM_TENSORS:]
        grads: list[Tensor | None] = [None] * (_END + len(mask))
        if dout is None and dlse is None:
            return None, None, *grads
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = dlse if residual is None else with_residual(dlse, residual, dout)
        found = _GRADIENTS(dout, dlse, out, lse, *tensors, *ctx.scalars, mask)
        for place, grad in zip(_DIFFERENTIABLE, found, strict=True):
            if tensors[place] is not None:
                grads[place] = grad
        return None, None, *grads

    jvp = staticmethod(refuse_forward_mode)


class _Gradients(SingleLevel):
    """The op `gradients`, which has no derivative."""

    @staticmethod
    def forward(ctx, below, *args):
        return below(*args)

    backward = staticmethod(refuse_second_order)
    jvp = staticmethod(refuse_forward_mode)


def _attention_autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`attention` at the level of autograd."""
    *inputs, mask, precise_delta = args
    has_transform = _has_transform()
    if not is_recorded([inputs[i] for i in _DIFFERENTIABLE]):
        precise_delta = False  # there is no backward to keep a residual for
        apply = lambda below, _, *args: below(*args)
    else:
        _check_differentiable(inputs, has_transform and precise_delta)
        apply = _Attention.record
    if precise_delta:
        inputs[_OUT_DTYPE] = accumulator_dtype(inputs[0].dtype)

    def below(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        args, mask = args[:_END], list(args[_END:])
        if has_transform:
            return _redispatch(_ATTENTION, keyset, *args, mask, False)
        return _forward_op(mask)(*args, mask)

    return apply(below, precise_delta, *inputs, *mask)


def _gradients_autograd(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    """`gradients` at the level of autograd."""
    below = _backward_op(args[-1])
    if _has_transform():
        below = partial(_redispatch, _GRADIENTS, keyset)
    given = (*args[:2], *(args[_SAVED_TENSORS + i] for i in _DIFFERENTIABLE))
    return _Gradients.record(below, *args) if is_recorded(given) else below(*args)


def _has_transform() -> bool:
    """Whether a level of torch.func is active. Then the level below sees the same op again, because
    it may differentiate as well. Otherwise it is the op that graphs record, `forward` or
    `backward`: when such a graph runs, no call passes through Python's part of autograd.
    """
    return _functorch.peek_interpreter_stack() is not None


def _redispatch(op: Any, keyset: Any, *args: Any) -> Any:
    """The op one level below, which records what it is asked to record: the forward of an
    autograd.Function has switched that off.
    """
    below = torch._C._AutoDispatchBelowAutograd()
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below:
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _check_differentiable(args: Sequence[Any], keeps_residual: bool) -> None:
    if args[Tensors._fields.index("page_table")] is not None:
        raise UnsupportedError(
            "paged_attention has no derivative, and one of its tensors asks for one: detach it"
        )
    if keeps_residual:
        raise UnsupportedError("precise_delta is not served under transforms of torch.func")


def _gradients(question: Question, x: Tensors, kernel: str | None, saved: tuple) -> Sequence:
    """What `_differentiable` gave receives; saved is (out, lse, dout, dlse)."""
    if is_eager(x.q):
        return run_backward(question, x, kernel, *saved)
    tell_counters(_FLOPS)
    out, lse, dout, dlse = saved  # a forward nobody watched, but its backward is being compiled
    args = (*x[:_NUM_TENSORS], *_scalars(question.problem, kernel))
    mask = [] if x.mask is None else _mask_tensors(x.mask)
    found = _backward_op(mask)(dout, dlse, out, lse, *args, mask)
    return [None if t is None else g for t, g in zip(_differentiable(x), found, strict=True)]


_DIFFERENTIABLE = [Tensors._fields.index(name) for name in ("q", "k", "v", "bias", "sinks")]


def _differentiable(x: Tensors) -> tuple[Tensor | None, ...]:
    return x.q, x.k, x.v, x.bias, x.sinks


def _wants_grad(x: Tensors) -> bool:
    if x.q.requires_grad or x.k.requires_grad or x.v.requires_grad:
        return True
    return any(t is not None and t.requires_grad for t in (x.bias, x.sinks))


def _scalars(problem: Problem, kernel: str | None) -> tuple:
    return (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.softmax_scale,
        problem.causal,
        *problem.window_size,
        problem.softcap,
        problem.dropout_p,
        problem.out_dtype,
        problem.return_stats,
        problem.deterministic,
        problem.return_lse,
        problem.precision,
        kernel,
    )


def _unflatten(args: tuple) -> tuple[Problem, Tensors, str | None]:
    x = Tensors(*args[:_NUM_TENSORS])
    seqlen_q, seqlen_k, softmax_scale, causal, left, right, softcap, dropout_p, *rest = args[
        _NUM_TENSORS:_END
    ]
    out_dtype, return_stats, deterministic, return_lse, precision, kernel = rest
    q, k, v, cu_seqlens_q = x[:4]
    packed, mask = cu_seqlens_q is not None, args[_END]
    if len(mask) > 1:  # built for the lengths that the graph was traced with
        x = x._replace(mask=_mask_object(mask, seqlen_q, seqlen_k))
    if not packed:  # a graph that was traced with other lengths may still hold those
        seqlen_q = q.shape[1]
    if x.page_table is not None:
        seqlen_k = x.page_table.shape[1] * k.shape[1]
    elif not packed:
        seqlen_k = k.shape[1]
    if len(mask) == 1 and is_number(mask[0]):
        grid = q.shape[0], q.shape[2], seqlen_q, seqlen_k
        x = x._replace(mask=LaterRule(mask[0], grid, q.device))
    elif mask and x.mask is None:
        x = x._replace(mask=Later(mask[0], seqlen_q, seqlen_k))
    problem = Problem(
        cu_seqlens_q.shape[0] - 1 if packed else q.shape[0],
        seqlen_q,
        seqlen_k,
        q.shape[-2],
        k.shape[-2],
        q.shape[-1],
        v.shape[-1],
        q.dtype,
        out_dtype,
        softmax_scale,
        causal,
        (left, right),
        softcap,
        dropout_p,
        packed,
        x.mask is not None,
        x.alibi_slopes is not None,
        x.bias is not None,
        x.sinks is not None,
        return_stats,
        deterministic,
        page_size=0 if x.page_table is None else k.shape[1],
        has_tree_mask=x.tree_mask is not None,
        has_places=x.places_q is not None,
        return_lse=return_lse,
        page_dtype=None if x.k_scales is None else k.dtype,
        precision=precision,
    )
    return problem, x, kernel


# The op hands back the tensors it was given, so the mask they came from, and whatever it has
# cached for the host, is found again by their identity.
_MASKS: WeakValueDictionary[int, BlockMask] = WeakValueDictionary()


def _mask_tensors(mask: BlockMask | Later) -> list[Tensor]:
    if isinstance(mask, Later):
        return mask.tensors()
    if not torch.compiler.is_compiling():
        _MASKS[id(mask.tiles)] = mask
    return mask.tensors()


def _mask_object(tensors: Sequence[Tensor], seqlen_q: int, seqlen_k: int) -> BlockMask:
    known = _MASKS.get(id(tensors[-1]))
    if known is not None and known.tiles is tensors[-1] and known.rows[0] is tensors[0]:
        return known  # and not another part of its heads, which has the same tiles
    return BlockMask.from_tensors(list(tensors), seqlen_q, seqlen_k)


def _described(x: Tensors, problem: Problem, _: Any) -> Problem:
    """Checked when the graph was traced, and now again: the graphs of torch.jit.trace and make_fx
    may be called with tensors of other shapes.
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
            f"a graph that was traced for {problem.out_dtype} is given {problem.dtype}"
        )
    return problem


def built_once(mask: Tensor, seqlen_k: int) -> Tensor:
    """A dense mask or the bounds of spans, over seqlen_k keys, for several calls of a graph that is
    being compiled: built when the graph runs, once for all of them.
    """
    return torch.ops.onchip.mask(mask, seqlen_k)


def _keep_mask(mask: Tensor, seqlen_k: int) -> Tensor:
    """A tensor of its own, whose meaning is kept for as long as the object lives."""
    kept = _spaced(mask)
    kept.copy_(mask)
    later.keep(kept, Later(kept, mask.shape[-2], seqlen_k).built())
    return kept


def _spaced(mask: Tensor, _: Any = None) -> Tensor:
    """Room for a mask, of strides that no graph gives to what it computes. Inductor computes into
    memory that it does not need any more, and if strides are the same, into the same object: what
    is kept of a mask would be taken for the meaning of a tensor that was computed from it.
    """
    return mask.new_empty((*mask.shape[:-1], mask.shape[-1] + 1))[..., :-1]


def _settled(x: Tensors) -> Tensors:
    return x._replace(mask=x.mask.built()) if isinstance(x.mask, Later) else x


def _attention(*args):
    """Where there is no autograd: in inference mode."""
    return _forward(*args[:-1])


def _forward(*args):
    problem, x, kernel = _unflatten(args)
    _check_unrecorded(x)
    x = _settled(x)
    out, lse, stats = run(posed(x, problem), x, kernel)
    return out, lse, _nothing(lse) if stats is None else torch.stack(stats)


def _check_unrecorded(x: Tensors) -> None:
    """A graph of make_fx holds the forward alone: it must not be differentiated."""
    tensors = [t for t in _differentiable(x) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(
            "this graph was traced without its gradient, and a tensor that it is given requires"
            " one: trace with tensors that do, or pass them detached"
        )
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        refuse_forward_mode(None)  # below autograd a tangent cannot be seen: there may be one


def posed(x: Tensors, problem: Problem) -> Question:
    """The Question of a problem that was checked before."""
    return ask(_described, x, problem, ())


def run(question: Question, x: Tensors, kernel: str | None) -> Result:
    """The Result of a problem, without gradient and without the op: for those who have a gradient
    of their own.
    """
    check_values(question.problem, x)
    paged.check_values(question.problem, x)
    return replay_or_run(_compute, question, x, kernel)


def merging(
    question: Question, x: Tensors, kernel: str | None
) -> Callable[[Tensor, Tensor], None] | None:
    """What merges the Result of a problem into (out fp32, lse fp64), a state of the same queries
    over other keys, in place; None if the kernel of this problem has no such way.
    """
    module = _module(question.problem, x, kernel)
    if not hasattr(module, "merges") or not module.merges(question.problem):
        return None
    return partial(module.forward_into, question.problem, x)


def _compute(problem: Problem, x: Tensors, kernel: str | None) -> Result:
    parts = [] if kernel else paged.parts(problem, x)
    if not parts:
        return _serve(problem, x, kernel)
    found = [(part, _serve(part.problem, part.x, kernel)) for part in parts]
    return paged.joined(problem, x, found)


def _serve(problem: Problem, x: Tensors, kernel: str | None) -> Result:
    forward = _forward_of(_module(problem, x, kernel), problem)
    if not is_autocast(x.q):
        return forward(problem, x)
    with _no_autocast(x.q):
        return forward(problem, x)


def _forward_of(module: ModuleType, problem: Problem) -> paged.Forward:
    if problem.page_size and not getattr(module, "READS_PAGES", False):
        return partial(paged.through_gather, module.forward)
    return module.forward


def _backward(dout, dlse, out, lse, *args):
    problem, x, kernel = _unflatten(args)
    x = _settled(x)
    question = posed(x, problem)
    grads = run_backward(question, x, kernel, out, lse, dout, dlse)
    return tuple(_nothing(lse) if g is None else g for g in grads)


def run_backward(
    question: Question,
    x: Tensors,
    kernel: str | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Grads:
    """Its gradients; out and lse as kernels/protocol.py has them."""
    return replay_or_run(_compute_backward, question, x, kernel, out, lse, dout.contiguous(), dlse)


def _compute_backward(
    problem: Problem,
    x: Tensors,
    kernel: str | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Grads:
    if problem.precision is not None:  # straight through: the gradient of q, k and v as they come
        problem, kernel = problem._replace(precision=None), None
    backward = _module(problem, x, kernel, backward=True).backward
    if not is_autocast(x.q):
        return backward(problem, x, out, lse, dout, dlse)
    with _no_autocast(x.q):
        return backward(problem, x, out, lse, dout, dlse)


def adding(question: Question, x: Tensors, kernel: str | None) -> Callable[..., Any] | None:
    """`begin` of the kernel of this problem's backward: of the problem, x and (out, lse, dout, dlse
    or None) it makes what adds gradients to sums, of these queries over any keys (see
    kernels/hopper/launch_backward.Queries). None if the kernel has no such way.
    """
    module = _module(question.problem, x, kernel, backward=True)
    if not hasattr(module, "adds") or not module.adds(question.problem):
        return None
    return module.begin


def _module(problem: Problem, x: Tensors, kernel: str | None, backward: bool = False) -> ModuleType:
    found = plan(laid_out(problem, x), device_info(x.q.device), kernel, backward)
    return kernel_module(found.kernel)


def _attention_fake(*args):
    return _forward_fake(*args[:-1])


def _forward_fake(*args):
    problem, x, _ = _unflatten(args)
    out, lse = empty_result(problem, x)
    return out, lse, lse.new_empty(2, *lse.shape) if problem.return_stats else _nothing(lse)


def _backward_fake(dout, dlse, out, lse, *args):
    _, x, _ = _unflatten(args)
    dq, dk, dv = (t.new_empty(t.shape) for t in x[:3])
    extras = (
        _nothing(lse) if t is None else t.new_empty(t.shape, dtype=lse.dtype)
        for t in (x.bias, x.sinks)
    )
    return dq, dk, dv, *extras


def _forward_flops(*args, **_: Any) -> int:
    return forward_flops(*_unflatten(args)[:2])


def _backward_flops(*args, **_: Any) -> int:
    return backward_flops(*_unflatten(args[_SAVED_TENSORS:])[:2])


def _split_fake(out, dtype):
    return torch.empty_like(out, dtype=dtype), torch.empty_like(out, dtype=dtype)


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)  # an op returns tensors, so an absent one is empty


def _no_autocast(q: Tensor) -> torch.autocast:
    """Inside a kernel fp32 means fp32: autocast must not lower its products."""
    return torch.autocast(q.device.type, enabled=False)


def _attention_vmap(info, in_dims, *args):
    """vmap of a dense forward: the mapped dimension joins the batch."""
    size = info.batch_size
    *given, precise_delta = args
    out, lse, stats = _ATTENTION(*_folded(size, in_dims, given), precise_delta)
    out, lse = (t.unflatten(0, (size, -1)) for t in (out, lse))
    if not stats.numel():
        return (out, lse, stats), (0, 0, None)
    return (out, lse, stats.unflatten(1, (size, -1))), (0, 0, 1)


def _forward_vmap(info, in_dims, *args):
    """A graph that is mapped when it runs."""
    return _attention_vmap(info, (*in_dims, None), *args, False)


def _gradients_vmap(info, in_dims, *args):
    """The same of its gradients: each entry of the mapped dimension gets its own."""
    size, n = info.batch_size, _SAVED_TENSORS
    x = Tensors(*args[n : n + _NUM_TENSORS])
    if x.bias is not None or x.sinks is not None:
        raise UnsupportedError("vmap does not serve the gradients of bias and sinks")
    saved = [_fold(t, dim, size) for t, dim in zip(args[:n], in_dims, strict=False)]
    found = _GRADIENTS(*saved, *_folded(size, in_dims[n:], args[n:]))
    grads = [t.unflatten(0, (size, -1)) for t in found[:3]]
    return (*grads, *found[3:]), (0, 0, 0, None, None)


def _folded(size: int, in_dims: Sequence, args: Sequence) -> list[Any]:
    """The arguments of a dense call, a mapped dimension of `size` entries being part of the batch.
    What has no batch (sinks, a seed) must be the same for all entries, and dropout counts sequences
    by their place in the batch, which would change.
    """
    dims = dict(zip(Tensors._fields, in_dims, strict=False))
    x = Tensors(*args[:_NUM_TENSORS])
    mapped = {name for name in Tensors._fields[:_NUM_TENSORS] if dims[name] is not None}
    foreign = (x.cu_seqlens_q, x.dropout_seed, x.page_table, x.places_q)
    if mapped - {"q", "k", "v", "bias", "alibi_slopes"} or any(t is not None for t in foreign):
        raise UnsupportedError(
            "vmap serves dense calls mapped over q, k, v, bias, alibi_slopes and tensors as masks,"
            " without dropout"
        )
    batch = x.q.shape[1 if dims["q"] == 0 else 0]
    folded = [*args]
    folded[:3] = (_fold(t, dim, size) for t, dim in zip(x[:3], in_dims, strict=False))
    for name, rank in (("bias", 4), ("alibi_slopes", 2)):
        shared = _fold_shared(getattr(x, name), dims[name], size, batch, rank)
        folded[Tensors._fields.index(name)] = shared
    folded[_END] = _fold_mask(args[_END], in_dims[_END], size, batch)
    return folded


def _fold(t: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """t with the mapped dimension as part of its first, the batch."""
    if t is None:
        return None
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.flatten(0, 1)


def _fold_shared(t: Tensor | None, dim: int | None, size: int, batch: int, rank: int) -> Any:
    """The same for a tensor of at most `rank` dimensions that entries of the batch may share, as
    they go on to do if it is not mapped.
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
        raise UnsupportedError("vmap does not map over a mask that is built: map over a tensor")
    return BlockMask.from_tensors(mask, 0, 0).repeat_batch(size).tensors() if mask else mask


_SAVED = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"
_RESULT, _GRADS = "(Tensor, Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor, Tensor)"
# `attention` and its `gradients` are differentiated and mapped; graphs record the others.
_LIB.define(f"attention({_ARGUMENTS}, bool precise_delta) -> {_RESULT}")
_LIB.define(f"gradients({_SAVED}, {_ARGUMENTS}) -> {_GRADS}")
_LIB.impl("attention", _attention_autograd, "Autograd", with_keyset=True)
_LIB.impl("gradients", _gradients_autograd, "Autograd", with_keyset=True)
for _name, _tags in (("", ()), ("_later", torch.Tag.cudagraph_unsafe)):
    _LIB.define(f"forward{_name}({_ARGUMENTS}) -> {_RESULT}", tags=_tags)
    _LIB.define(f"backward{_name}({_SAVED}, {_ARGUMENTS}) -> {_GRADS}", tags=_tags)
_LIB.define("mask(Tensor mask, SymInt seqlen_k) -> Tensor", tags=torch.Tag.cudagraph_unsafe)
_LIB.define("split(Tensor out, ScalarType dtype) -> (Tensor, Tensor)")
_KERNELS = {
    "attention": (_attention, _attention_fake),
    "gradients": (_backward, _backward_fake),
    "forward": (_forward, _forward_fake),
    "forward_later": (_forward, _forward_fake),
    "backward": (_backward, _backward_fake),
    "backward_later": (_backward, _backward_fake),
    "mask": (_keep_mask, _spaced),
    "split": (split, _split_fake),
}
for _name, (_kernel, _fake) in _KERNELS.items():
    for _key in _BACKENDS:
        _LIB.impl(_name, _kernel, _key)
    torch.library.register_fake(f"onchip::{_name}", _fake, lib=_LIB)
for _name in ("", "_later"):
    torch.library.register_vmap(f"onchip::forward{_name}", _forward_vmap, lib=_LIB)
    torch.library.register_vmap(f"onchip::backward{_name}", _gradients_vmap, lib=_LIB)
torch.library.register_vmap("onchip::attention", _attention_vmap, lib=_LIB)
torch.library.register_vmap("onchip::gradients", _gradients_vmap, lib=_LIB)
_ATTENTION = torch.ops.onchip.attention.default
_GRADIENTS = torch.ops.onchip.gradients.default
_FORWARD = torch.ops.onchip.forward.default
_BACKWARD = torch.ops.onchip.backward.default
_FORWARD_LATER = torch.ops.onchip.forward_later.default
_BACKWARD_LATER = torch.ops.onchip.backward_later.default
_FLOPS = {
    torch.ops.onchip.attention: _forward_flops,
    torch.ops.onchip.forward: _forward_flops,
    torch.ops.onchip.forward_later: _forward_flops,
    torch.ops.onchip.backward: _backward_flops,
    torch.ops.onchip.backward_later: _backward_flops,
}
