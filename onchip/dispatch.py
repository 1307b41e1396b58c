"""Which kernel serves a problem, and why each other one does not."""

from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from onchip.problem import DeviceInfo, Problem, UnsupportedError

# In order of preference: the first that supports a problem serves it.
KERNELS = {
    "hopper": "onchip.kernels.hopper.entry",
    "triton": "onchip.kernels.triton.entry",
    "pages_cpu": "onchip.kernels.pages",
    "aten_cpu": "onchip.kernels.aten",
    "tiled": "onchip.kernels.tiled",
    "reference": "onchip.kernels.reference",
    "paper_v0": "onchip.kernels.papers.v0",
    "paper_v1": "onchip.kernels.papers.v1",
    "paper_v2": "onchip.kernels.papers.v2",
    "paper_v4": "onchip.kernels.papers.v4",
}


class Plan(NamedTuple):
    """`kernel` serves; `reasons` says for every other kernel why it does not."""

    kernel: str
    reasons: dict[str, str]


@cache
def kernel_module(name: str) -> ModuleType:
    return import_module(KERNELS[name])


def plan(
    problem: Problem, device: DeviceInfo, kernel: str | None = None, backward: bool = False
) -> Plan:
    """The plan for a problem, cached on its flags and on its lengths rounded up to powers of two.

    A kernel asked for by name serves or the call is refused: it is never replaced by another. One
    that is not may defer to those after it, forward: then it has a function `defers(problem)`, None
    or the reason.
    Otherwise the backward pass may be another kernel's than the forward: (out, lse) means the same
    to all.
    """
    lengths = _bucket(problem.batch), _bucket(problem.seqlen_q), _bucket(problem.seqlen_k)
    return _plan(lengths + problem[3:], device, kernel, backward)


@lru_cache(maxsize=4096)
def _plan(key: tuple, device: DeviceInfo, kernel: str | None, backward: bool) -> Plan:
    problem = Problem(*key)
    if kernel is not None and kernel not in KERNELS:
        raise ValueError(f"{kernel=} is not one of {', '.join(KERNELS)}")
    reasons = {}
    chosen = None
    for name in KERNELS:
        refusal = _ask(name, problem, device, backward, kernel == name)
        if refusal is not None:
            reasons[name] = refusal
        elif chosen is None and kernel in (None, name):
            chosen = name
        elif chosen is not None:
            reasons[name] = f"{chosen} comes first"
        else:
            reasons[name] = f"kernel={kernel!r} was asked for"
    if chosen is None:
        raise UnsupportedError(_refusal(kernel, reasons))
    return Plan(chosen, reasons)


def resolve_precision(problem: Problem, device: DeviceInfo) -> str | None:
    """What precision="auto" means here: "fp8" where the Hopper kernel serves it and gains by it,
    else None.
    """
    refusal = _ask("hopper", problem._replace(precision="fp8"), device, False, True)
    return "fp8" if refusal is None and kernel_module("hopper").narrow_pays(problem) else None


def _ask(
    name: str, problem: Problem, device: DeviceInfo, backward: bool, named: bool
) -> str | None:
    module = kernel_module(name)
    if problem.precision not in getattr(module, "PRECISIONS", (None,)):
        return f"computes with q, k and v as they come, not with precision={problem.precision!r}"
    refusal = module.supports(problem, device)
    if refusal is None and not backward and not named and hasattr(module, "defers"):
        return module.defers(problem)
    return refusal


def _refusal(kernel: str | None, reasons: dict[str, str]) -> str:
    if kernel is not None:
        reason = reasons[kernel]
        return (
            f"kernel {kernel!r} cannot serve this call: {reason} (kernel=None picks one that can)"
        )
    return "no kernel serves this call: " + "; ".join(f"{n}: {r}" for n, r in reasons.items())


def _bucket(n: int) -> int:
    return 0 if n == 0 else 1 << (n - 1).bit_length()
