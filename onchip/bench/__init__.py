"""Benchmarks: one file each, and the harness that they share. `onchip bench NAME` runs one.

A benchmark is a module with `run(session: harness.Session)`, which fills the session with rows,
and `BARS`, what those rows have to reach. To add one, add its file, then a line here. A benchmark
whose rows need their own tables has a NAME_report beside it: `print_report(console, rows, picture)`
and `SHEETS`, the tables that the documents may ask for.
"""

from importlib import import_module
from types import ModuleType

BENCHES = {
    "cpu": "attention on this CPU against torch SDPA: dense, masked, packed, memory, overhead",
    "forward": "GPU: forward kernels against FlashAttention-3, cuDNN and other peers",
    "backward": "GPU: the whole backward pass against cuDNN and FlashAttention-2",
    "short": "GPU: sequences of at most 512 tokens",
    "host": "GPU: what an eager call costs the thread that makes it",
    "peak": "GPU: the most memory that a call holds, 1k to 1M tokens",
    "versions": "GPU: FlashAttention v1 to v4 as examples/versions writes them, side by side",
    "ablation": "GPU: from v2 to v4 one idea at a time: what each of them buys",
    "paged": "GPU: decoding over pages and in one piece, shared prefixes, swapping, offloading",
    "step": "GPU: where the time of one decoding step of a served model goes",
    "train": "steps of training, tokens a second: GPT-2 medium, 1B Llama, BERT-large; loss curves",
    "serving": "GPU: a workload through the whole engine: tokens a second, waits, preemption",
    "masks": "GPU: windows, block-sparse masks, masks of single bits",
    "ring": "ring attention over two processes of this machine; --simulate: over up to 1,024 GPUs",
    "memory": "simulation: what a key/value cache wastes, by how it is allocated",
    "paper": "published figures about attention's bytes and times: predicted, measured, judged",
    "roofline": "predicted times of our Hopper kernels against the committed measurements",
    "accuracy": "errors against fp64 by type, kernel and family of inputs; 8 bits emulated; exp2",
}
REPORTS = ("memory", "ring", "serving", "paper", "roofline", "train", "accuracy")
SIMULATED = ("ring",)
CACHES = ("paged", "serving")  # of 8 bits, if asked to
QUANTISED = {"forward": "forward8"}  # modules for operands of 8 bits, if asked to


def load(name: str, precision: str | None = None) -> ModuleType:
    """The module of a benchmark; ValueError names those that exist."""
    if name not in BENCHES:
        raise ValueError(f"there is no benchmark {name!r}; choose from: {', '.join(BENCHES)}")
    if precision is not None and name not in QUANTISED:
        raise ValueError(f"{name} has no precisions; --precision is for: {', '.join(QUANTISED)}")
    name = QUANTISED[name] if precision else name
    return import_module(f"onchip.bench.{name}")


def report(name: str) -> ModuleType | None:
    """The module that shows the rows of a benchmark in tables of its own, where there is one."""
    return import_module(f"onchip.bench.{name}_report") if name in REPORTS else None
