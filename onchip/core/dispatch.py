"""The registry of backends, and the choice of the one that runs a call.

    register_backend(name, backend, priority=0)     the registry, ordered by priority
    plan(problem, device, kernel, backward) -> Plan  the chosen backend, and why not each other one

Built-in backends, highest priority first: hopper, triton, pages_cpu, aten_cpu, tiled, reference.
Each is loaded by a function here, at the first plan: `import onchip` loads no kernel.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from onchip.core.backend import Backend, lacks
from onchip.core.call_cache import clear_call_cache
from onchip.core.derivatives import no_forward_mode, no_second_order
from onchip.core.device import DeviceInfo
from onchip.core.problem import UNDECLARED, Problem, UnsupportedError
from onchip.kernels import tuned


class Plan(NamedTuple):
    """The backend that runs a call, its name, and for every other backend why it does not."""

    kernel: str
    reasons: dict[str, str]
    backend: Backend


class _Registration(NamedTuple):
    source: Backend | Callable[[], Backend]
    priority: float


_registry: dict[str, _Registration] = {}  # by descending priority
_loaded: dict[str, Backend] = {}


def register_backend(
    name: str, backend: Backend | Callable[[], Backend], *, priority: float = 0
) -> None:
    """Make `backend` available as kernel=`name`, and to dispatch for calls that name no kernel.

    backend: an instance of a subclass of onchip.Backend, or a function without arguments that
    returns one, e.g. the subclass itself. The function is called once, by the first call that needs
    a plan, so that what it imports is not loaded before.
    priority: dispatch tries backends with a higher priority first, and equal ones in the order of
    registration. The built-in ones have 100 (reference) to 600 (hopper). With the default, 0, a
    backend runs calls that name it and calls that no built-in one supports; above 600 it is tried
    before all others.
    """
    global _registry
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name=} must be an identifier, like 'my_backend'")
    if name in _registry:
        raise ValueError(f"a backend {name!r} is registered already: unregister_backend({name!r})")
    if not isinstance(backend, Backend) and not callable(backend):
        raise TypeError(
            f"backend={backend!r} is neither an onchip.Backend nor a function that returns one"
        )
    registry = _registry | {name: _Registration(backend, priority)}
    _registry = dict(sorted(registry.items(), key=lambda item: -item[1].priority))
    _forget_plans()


def unregister_backend(name: str) -> None:
    """Undo register_backend(name, ...)."""
    global _registry
    _check_registered("name", name)
    _registry = {other: registered for other, registered in _registry.items() if other != name}
    _loaded.pop(name, None)
    _forget_plans()


def backend_names() -> tuple[str, ...]:
    """All registered backends, in the order in which dispatch tries them."""
    return tuple(_registry)


def get_backend(name: str) -> Backend:
    """The registered backend of this name, which is loaded if it was not used before."""
    backend = _loaded.get(name)
    if backend is not None:
        return backend
    _check_registered("kernel", name)
    source = _registry[name].source
    backend = source if isinstance(source, Backend) else source()
    if not isinstance(backend, Backend):
        raise TypeError(f"the function registered as {name!r} returned {backend!r}, not a Backend")
    unknown = backend.options - (Problem._field_defaults.keys() - UNDECLARED)
    if unknown:
        raise ValueError(f"backend {name!r} declares {min(unknown)!r}, no option of Problem")
    return _loaded.setdefault(name, backend)


def plan(
    problem: Problem, device: DeviceInfo, kernel: str | None = None, backward: bool = False
) -> Plan:
    """The plan for a problem, cached on its flags and on its lengths rounded up to powers of two.

    A backend named by `kernel` runs the call or the call is refused: no other replaces it. Without
    a name a backend may defer a forward call to later ones (`Backend.defers`), and the backward may
    be run by another backend than the forward: (out, lse) means the same to all.
    """
    lengths = _bucket(problem.batch), _bucket(problem.seqlen_q), _bucket(problem.seqlen_k)
    return _plan(lengths + problem[3:], device, kernel, backward)


@lru_cache(maxsize=4096)
def _plan(key: tuple, device: DeviceInfo, kernel: str | None, backward: bool) -> Plan:
    problem = Problem(*key)
    if kernel is not None:
        _check_registered("kernel", kernel)
    if device.type in ("cuda", "hip"):
        tuned.load(device)  # before the first launch there
    reasons = {}
    chosen = None
    for name in _registry:
        reason = find_refusal(get_backend(name), problem, device, backward, kernel == name)
        if reason is not None:
            reasons[name] = reason
        elif chosen is None and kernel in (None, name):
            chosen = name
        elif chosen is not None:
            reasons[name] = f"{chosen} has precedence"
        else:
            reasons[name] = f"kernel={kernel!r} was named"
    if chosen is None:
        raise UnsupportedError(_describe_refusal(kernel, reasons))
    return Plan(chosen, reasons, get_backend(chosen))


def find_tangents(problem: Problem, device: DeviceInfo, kernel: str | None = None) -> Backend:
    """The backend that computes the tangents of a call: `kernel`, or the first that can. It may be
    another than that of the forward, as for a backward.
    """
    backend, reasons = _find_differentiable(problem, device, kernel, needs_second_order=False)
    if backend is None:
        raise no_forward_mode(reasons)
    return backend


def find_second_order(problem: Problem, device: DeviceInfo, kernel: str | None = None) -> Backend:
    """The backend that computes the second derivatives of a call: `kernel`, or the first that
    can.
    """
    backend, reasons = _find_differentiable(problem, device, kernel, needs_second_order=True)
    if backend is None:
        raise no_second_order(reasons)
    return backend


def _find_differentiable(
    problem: Problem, device: DeviceInfo, kernel: str | None, *, needs_second_order: bool
) -> tuple[Backend | None, str]:
    """The backend that computes tangents, and their gradients if the call needs them; else None and
    the reasons.
    """
    if kernel is not None:
        _check_registered("kernel", kernel)
    reasons = []
    for name in _registry if kernel is None else (kernel,):
        backend = get_backend(name)
        refusal = find_refusal(backend, problem, device) or backend.supports_tangents(
            problem, device
        )
        if refusal is None and (backend.has_second_order or not needs_second_order):
            return backend, ""
        if kernel is not None or backend.has_tangents:
            reasons.append(f"{name} {refusal or 'has no second derivatives'}")
    return None, "; ".join(reasons)


def resolve_precision(problem: Problem, device: DeviceInfo) -> str | None:
    """What precision="auto" means for a problem: the precision that the first backend proposes
    which supports it, else None.
    """
    for name in _registry:
        backend = get_backend(name)
        precision = backend.resolve_precision(problem)
        if precision is None:
            continue
        narrowed = problem._replace(precision=precision)
        if find_refusal(backend, narrowed, device) is None:
            return precision
    return None


def find_refusal(
    backend: Backend,
    problem: Problem,
    device: DeviceInfo,
    backward: bool = False,
    is_named: bool = True,
) -> str | None:
    """Why the backend does not run the problem, or None if it does. No backend runs a problem with
    an option that it does not declare, whatever its `supports` says.
    """
    precision = problem.precision
    if precision not in backend.precisions:
        low = ", ".join(name for name in backend.precisions if name is not None)
        how = f", or in {low}" if low else ""
        return f"computes with q, k and v as they come{how}, not with {precision=}"
    if backward and not backend.has_backward:
        return "has no backward"
    reason = backend.supports(problem, device)  # first: it may give a reason for its refusal
    reason = reason or lacks(_as_received(backend, problem), backend.options)
    if reason is None and backward:
        return backend.supports_backward(problem, device)
    if reason is None and not is_named:
        return backend.defers(problem)
    return reason


def _as_received(backend: Backend, problem: Problem) -> Problem:
    """The problem with the options that `forward` receives: see paged.gather_and_forward."""
    if not problem.page_size or backend.reads_pages:
        return problem
    has_mask = problem.has_mask or problem.has_tree_mask
    gathered = problem._replace(page_size=0, page_dtype=None, packed=True)
    return gathered._replace(has_tree_mask=False, has_mask=has_mask)


def _describe_refusal(kernel: str | None, reasons: dict[str, str]) -> str:
    if kernel is not None:
        reason = reasons[kernel]
        return (
            f"kernel {kernel!r} cannot serve this call: {reason} (kernel=None picks one that can)"
        )
    return "no kernel serves this call: " + "; ".join(f"{n}: {r}" for n, r in reasons.items())


def _check_registered(argument: str, name: str) -> None:
    if name in _registry:
        return
    papers = isinstance(name, str) and name.startswith("paper_v")
    hint = " (the kernels of the papers are registered by `import onchip.lab`)" if papers else ""
    raise ValueError(f"{argument}={name!r} is not one of {', '.join(_registry)}{hint}")


def _forget_plans() -> None:
    """Drop all plans and cached calls: they were made without the backend that is new, or with the
    one that is gone.
    """
    _plan.cache_clear()
    clear_call_cache()


def _bucket(n: int) -> int:
    return 0 if n == 0 else 1 << (n - 1).bit_length()


def _load_hopper() -> Backend:
    from onchip.kernels.hopper.entry import backend

    return backend


def _load_triton() -> Backend:
    from onchip.kernels.triton.entry import backend

    return backend


def _load_pages_cpu() -> Backend:
    from onchip.kernels.cpu.pages import backend

    return backend


def _load_aten_cpu() -> Backend:
    from onchip.kernels.cpu.aten import backend

    return backend


def _load_tiled() -> Backend:
    from onchip.kernels.cpu.tiled import backend

    return backend


def _load_reference() -> Backend:
    from onchip.kernels.cpu.reference import backend

    return backend


BUILT_IN = {
    "hopper": (_load_hopper, 600),
    "triton": (_load_triton, 500),
    "pages_cpu": (_load_pages_cpu, 400),
    "aten_cpu": (_load_aten_cpu, 300),
    "tiled": (_load_tiled, 200),
    "reference": (_load_reference, 100),
}
for _name, (_load, _priority) in BUILT_IN.items():
    register_backend(_name, _load, priority=_priority)
