"""The contract between dispatch and the kernels: class `Backend`, its inputs and its outputs.

A backend is one implementation of exact attention: `hopper`, `triton`, `tiled`, or one of a third
party. It is an instance of a subclass of `Backend`. Dispatch (onchip/core/dispatch.py) tries the
registered backends in order of priority, and the first that supports a call runs it:

    onchip.register_backend("mine", MyBackend)      docs/adding_a_backend.md is a complete example

    attention(q, k, v, ...)
      -> Problem (the options and sizes, hashable) and Tensors
      -> dispatch.plan: per backend  options, precisions, supports, has_backward, defers
      -> backend.forward(problem, tensors) -> Result

Every hook is a method or an attribute of `Backend`. A hook that a subclass does not define keeps
the default, which is always the plain way: no pages, no splits, no merge, no deferral. Callers
read the hooks directly. They never probe with hasattr, so a misspelt hook is never called.

A backend declares the options that it computes. Dispatch refuses a call with any other option, so
an option that is added to `Problem` is refused by every backend until one declares it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors, UnsupportedError


class Stats(NamedTuple):
    """Per row (batch, heads, seqlen_q): the largest score, and the entropy of the probabilities (a
    sink is one more outcome).
    """

    max_logit: Tensor
    entropy: Tensor


class Result(NamedTuple):
    """What `Backend.forward` returns. out (batch, seqlen_q, heads, head_dim_v) in
    problem.out_dtype, packed (total_q, heads, head_dim_v); lse (batch, heads, seqlen_q), packed
    (heads, total_q), in fp32 (fp64 for fp64): the natural logarithm of the sum of exponentials. A
    row without keys has out = 0 and lse = -inf. `empty_result` allocates both.
    """

    out: Tensor
    lse: Tensor
    stats: Stats | None = None  # where problem.return_stats


class Grads(NamedTuple):
    """What `Backend.backward` returns, a field for each of problem.DIFFERENTIABLE: the shapes of
    the inputs, dq, dk and dv in `grad_dtype`, those of LEARNED in the dtype of lse. dcaptured is
    None where problem.captured_is_constant.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None
    dcaptured: Tensor | None = None


class Tangents(NamedTuple):
    """The tangents of a call's inputs in forward mode, each with the shape and dtype of its input;
    None for an input without one. The other tensors of a call are constants.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    captured: Tensor | None = None


class KeySplits(NamedTuple):
    """How a backend splits the keys of a sequence over programs (flash-decoding)."""

    counts: tuple[int, ...]  # splits of each sequence
    programs: int  # that have work to do
    tile_n: int  # keys that a program takes at a time
    scratch_bytes: int  # states of splits, written and read back
    why: str
    seconds: float  # predicted
    uncut_s: float  # predicted without splits


class GradAccumulator(Protocol):
    """The gradients of some queries, summed over calls with different keys (the rounds of a ring).
    `get_accumulate_fn` returns the function that makes one.
    """

    def add(
        self, problem: Problem, x: Tensors, sums: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the call with the keys of x. Add its dk and dv to `sums` in place and return
        None; return (dk, dv) if sums is None. dq stays inside until `finish`.
        """
        ...

    def finish(self, dq: Tensor) -> None:
        """Add the dq of all calls so far to this sum, in place."""
        ...


MergeFn = Callable[[Tensor, Tensor], None]  # (out fp32, lse fp64), updated in place
AccumulateFn = Callable[..., GradAccumulator]  # (problem, x, out, lse, dout, dlse or None)


class Backend(ABC):
    """One implementation of exact attention.

    A subclass must define `supports` and `forward`, and `backward` if it has one. One instance
    serves all devices, and hooks are called from any thread: they keep no state between calls.

    Rules of the contract:

    - `supports` decides from the Problem and the DeviceInfo alone, which are all that plans are
      cached on. Lengths in the Problem are rounded up to powers of two there. An exact length must
      not decide: otherwise a cached plan would serve a call that the backend refuses.
    - `forward` and `backward` never check their inputs again. Shapes, dtypes and values were
      validated before. They do not write to their inputs.
    - `forward` runs on the current CUDA stream and does not wait for the device. Repeated calls
      may be replayed (onchip/kernels/runtime/replay.py): the allocations and launches of the second
      call are recorded, and later calls run them without calling `forward`. The recording sees
      launches by onchip's launcher (kernels/runtime/launcher.py) and torch operations, and keeps a
      call only if it has launches and no torch operation but allocations and views. So a backend
      launches either everything through that launcher or nothing: otherwise a replay would miss a
      launch.
    - In `backward`, out and lse may belong to the same queries over more keys than the call has
      (a ring, a split of the keys). The gradients are then the share of these keys. So a backward
      takes p = exp(s - lse) and delta from the given tensors, and never recomputes lse or out.
    - `options` names every option that `forward` and `backward` compute; dispatch refuses the
      others. `supports` refuses devices, dtypes, sizes and options that do not go together. `lacks`
      writes such a sentence, which continues "kernel 'x' cannot serve this call: ...".
    """

    options: Set[str] = frozenset()
    """The options that `forward` and `backward` compute: fields of Problem with a default, except
    those in problem.UNDECLARED. Dispatch refuses calls that use any other option. The fields
    without a default (sizes, dtypes, softmax_scale) belong to every call.

    With "page_size", `forward` reads k and v through x.page_table. Otherwise the keys of a paged
    call are gathered first, and `forward` receives packed sequences, or dense ones with a mask if
    the call has a tree mask. Then the backend needs "packed" and "has_mask" instead."""

    precisions: tuple[str | None, ...] = (None,)
    """The values of problem.precision that `forward` computes with. None: products in the dtype of
    q, k and v. Dispatch refuses all others before it calls `supports`."""

    @property
    def reads_pages(self) -> bool:
        """Whether `forward` reads k and v through x.page_table. If not, they are gathered first."""
        return "page_size" in self.options

    @property
    def has_backward(self) -> bool:
        """Whether the subclass defines `backward`. Without one, another backend that supports the
        problem computes the gradients: (out, lse) means the same to all.
        """
        return type(self).backward is not Backend.backward

    @property
    def has_tangents(self) -> bool:
        """Whether the subclass defines `tangents`. Without them, another backend that supports the
        problem computes them, as for a backward.
        """
        return type(self).tangents is not Backend.tangents

    @property
    def has_second_order(self) -> bool:
        """Whether the subclass defines `tangent_gradients`, and with them second derivatives."""
        return type(self).tangent_gradients is not Backend.tangent_gradients

    @abstractmethod
    def supports(self, problem: Problem, device: DeviceInfo) -> str | None:
        """None if this backend computes the problem on the device, else the reason as a sentence.
        It must not import Triton or start a GPU: `onchip doctor` calls it for devices that the
        machine does not have.
        """

    def defers(self, problem: Problem) -> str | None:
        """None, or the reason to leave a supported forward call to the backends after this one,
        because they are faster. Not called for a backward, nor if the user names this backend.
        """
        return None

    @abstractmethod
    def forward(self, problem: Problem, x: Tensors) -> Result:
        """Compute out and lse (and stats, if problem.return_stats)."""

    def backward(
        self,
        problem: Problem,
        x: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> Grads:
        """Compute the gradients of the inputs from dout (contiguous) and dlse (None if nothing
        depends on lse).
        """
        raise UnsupportedError(f"{type(self).__name__} has no backward")

    def supports_backward(self, problem: Problem, device: DeviceInfo) -> str | None:
        """None if `backward` computes the problem, which `forward` supports, else the reason. Then
        another backend computes the gradients. Lengths are rounded up, as for `supports`.
        """
        return None

    def supports_tangents(self, problem: Problem, device: DeviceInfo) -> str | None:
        """None if `tangents` computes the problem, which `forward` supports, else the reason. It
        must refuse every option that it does not know: otherwise a tangent would lack its terms.
        """
        return "has no forward mode"

    def tangents(self, problem: Problem, x: Tensors, dx: Tangents) -> tuple[Tensor, Tensor]:
        """Compute the tangents of out and lse from dx, the tangents of the inputs, with the shapes
        and dtypes of out and lse. A row without keys has zeros.
        """
        raise UnsupportedError(f"{type(self).__name__} has no forward mode")

    def tangent_gradients(
        self, problem: Problem, x: Tensors, dx: Tangents, dout: Tensor, dlse: Tensor | None
    ) -> Grads:
        """Compute the gradients, with respect to x, of the tangents of out and lse in the direction
        dx, from dout and dlse, the gradients of these tangents (dlse: None for zero). Called for
        problems that `supports_tangents` does not refuse. All second derivatives follow from it.
        """
        raise UnsupportedError(f"{type(self).__name__} has no second derivatives")

    def resolve_precision(self, problem: Problem) -> str | None:
        """What precision="auto" means for this problem: one of `precisions` that saves time here,
        or None for the dtype of q, k and v.
        """
        return None

    def get_merge_fn(self, problem: Problem, x: Tensors) -> MergeFn | None:
        """A function that computes the call and merges the result into (out fp32, lse fp64), a
        state of the same queries over other keys, in place; None if this backend cannot.
        """
        return None

    def get_accumulate_fn(self, problem: Problem) -> AccumulateFn | None:
        """A function of (problem, x, out, lse, dout, dlse) that makes a GradAccumulator for the
        queries of x; None if this backend cannot add gradients to sums itself.
        """
        return None

    def can_partition_sms(self, first: Problem, second: Problem) -> bool:
        """Whether `forward` of these two problems, one after the other, runs them at the same time
        on the two parts of the device that problem.sm_partition gives them.
        """
        return False

    def describe_launch(self, problem: Problem, hardware: Any) -> str | None:
        """The programs and tiles of `forward` on an onchip.cost Hardware, for `onchip.explain`;
        None if this backend does not say.
        """
        return None

    def plan_splits(
        self,
        problem: Problem,
        x: Tensors,
        lengths: Sequence[tuple[int, int]],
        hardware: Any = None,
    ) -> KeySplits | None:
        """How `forward` would split the keys, for `onchip.explain`; None if it would not. lengths:
        (seqlen_q, seqlen_k) of each sequence. hardware: an onchip.cost Hardware to plan for;
        None: the device of x.
        """
        return None


def make_backend(
    supports: Callable[[Problem, DeviceInfo], str | None],
    forward: Callable[[Problem, Tensors], Result],
    backward: Callable[..., Grads] | None = None,
    *,
    options: Set[str] = frozenset(),
    precisions: tuple[str | None, ...] = (None,),
    **hooks: Callable[..., Any],
) -> Backend:
    """A Backend from the functions of a module, which take no self. They become static methods: a
    call passes through no further layer. hooks: other methods of Backend, by name.
    """
    functions = {"supports": supports, "forward": forward, "backward": backward, **hooks}
    members: dict[str, Any] = {n: staticmethod(f) for n, f in functions.items() if f is not None}
    members |= {"options": options, "precisions": precisions}
    return type("FunctionBackend", (Backend,), members)()


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and sums run in fp32, for fp64 inputs in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grad_dtype(problem: Problem) -> torch.dtype:
    """The dtype of dq, dk and dv."""
    return accumulator_dtype(problem.dtype) if problem.wide_grads else problem.dtype


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """delta = rowsum(out * dout) - dlse, shaped like lse: the one number per row that a backward
    needs beyond lse.

    d loss / d score_j = p_j * (dout . v_j - rowsum(out * dout) + dlse), because d lse / d score_j =
    p_j.
    """
    wide = accumulator_dtype(out.dtype)
    delta = (out.to(wide) * dout.to(wide)).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse


def split(out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out rounded to dtype, the residual of the rounding, also in dtype)"""
    rounded = out.to(dtype, copy=True)  # an op returns no tensor that it was given
    return rounded, (out - rounded).to(dtype)


def with_residual(dlse: Tensor | None, residual: Tensor, dout: Tensor) -> Tensor:
    """The dlse with which a backward that receives `out` computes the delta of out + residual. Only
    delta = rowsum(out * dout) - dlse depends on either.
    """
    return -row_delta(residual, dout, dlse).contiguous()


def scale_strides(scales: Tensor | None) -> tuple[int, ...]:
    """(page, slot, head) strides of the scales of 8-bit pages."""
    return (0, 0, 0) if scales is None else scales.stride()


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsinks (heads): a sink is a key with probability exp(sink - lse) and value zero, so its
    score's gradient is -p * delta. Where lse is -inf, the sink is, too, and p = 0.
    """
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    per_row = -torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta
    return per_row.sum(-1) if per_row.dim() == 2 else per_row.sum((0, 2))


def empty_result(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Uninitialised (out, lse) in the layout of the call."""
    q = tensors.q
    *entries, seqlen, heads, _ = q.shape  # a packed tensor has no entries
    out = q.new_empty(*entries, seqlen, heads, problem.head_dim_v, dtype=problem.out_dtype)
    wide = accumulator_dtype(problem.dtype)
    return out, q.new_empty(*entries, heads, seqlen, dtype=wide)


# Names of options in sentences, where the field of Problem would not be understood.
_LABELS = {
    "deterministic": "deterministic mode",
    "reproducible": "reproducible mode",
    "packed": "packed sequences",
    "has_alibi": "alibi_slopes",
    "page_size": "pages",
    "page_dtype": "8-bit pages",
}


def lacks(problem: Problem, served: Set[str]) -> str | None:
    """'has no a and no b', of the options that a call uses and that are not among `served`; None if
    there are none.
    """
    missing = [name for name in problem.used_options if name not in served]
    names = [_LABELS.get(name, name.removeprefix("has_")) for name in missing]
    return f"has no {' and no '.join(names)}" if names else None
