"""One computation on several ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onchip.parallel.attention import context_parallel_attention
    from onchip.parallel.comm import Comm, CountingComm, GroupComm, ParallelError, run_ranks
    from onchip.parallel.explanation import explain
    from onchip.parallel.mesh2d import Mesh2D
    from onchip.parallel.sharding import Layout, balanced, contiguous, striped, zigzag
    from onchip.parallel.tree import tree_attention, tree_paged_attention

__all__ = [
    "Comm",
    "CountingComm",
    "GroupComm",
    "Layout",
    "Mesh2D",
    "ParallelError",
    "balanced",
    "context_parallel_attention",
    "contiguous",
    "explain",
    "run_ranks",
    "striped",
    "tree_attention",
    "tree_paged_attention",
    "zigzag",
]
_HOMES = {
    "attention": ("context_parallel_attention",),
    "explanation": ("explain",),
    "comm": ("Comm", "CountingComm", "GroupComm", "ParallelError", "run_ranks"),
    "mesh2d": ("Mesh2D",),
    "sharding": ("Layout", "balanced", "contiguous", "striped", "zigzag"),
    "tree": ("tree_attention", "tree_paged_attention"),
}

if not TYPE_CHECKING:  # with a __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f".{home}", __name__), name)
        raise AttributeError(f"module 'onchip.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
