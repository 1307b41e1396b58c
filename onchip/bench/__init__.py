"""Benchmarks: one file each, and the harness that they share. `onchip bench NAME` runs one.

A benchmark is a module with `run(session: harness.Session)`, which fills the session with rows,
and `BARS`, what those rows have to reach. To add one, add its file, then a line here.
"""

from importlib import import_module
from types import ModuleType

BENCHES = {
    "cpu": "attention on this CPU against torch SDPA: dense, masked, packed, memory, overhead",
    "forward": "GPU: forward kernels against FlashAttention-3, cuDNN and other peers",
    "backward": "GPU: the whole backward pass against cuDNN and FlashAttention-2",
    "short": "GPU: sequences of at most 512 tokens, and what a call costs the host",
    "paged": "GPU: decoding over a cache in pages and in one piece, page sizes, skewed batches",
    "masks": "GPU: windows, block-sparse masks, masks of single bits",
}


def load(name: str) -> ModuleType:
    """The module of a benchmark; ValueError names those that exist."""
    if name not in BENCHES:
        raise ValueError(f"there is no benchmark {name!r}; choose from: {', '.join(BENCHES)}")
    return import_module(f"onchip.bench.{name}")
