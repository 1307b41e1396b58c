"""One computation on several ranks."""

from importlib import import_module

_HOMES = {
    "attention": ("context_parallel_attention",),
    "explanation": ("explain",),
    "comm": ("Comm", "CountingComm", "GroupComm", "ParallelError", "run_ranks"),
    "mesh2d": ("Mesh2D",),
    "sharding": ("Layout", "balanced", "contiguous", "striped", "zigzag"),
    "tree": ("tree_attention", "tree_paged_attention"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # pyright: ignore


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module 'onchip.parallel' has no attribute {name!r}")
