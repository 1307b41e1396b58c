"""The import law: who may import whom. A new room is added here on purpose or not at all."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onchip

PACKAGE = Path(onchip.__file__).parent

# room -> rooms it may import. A room is a file or folder directly under onchip/; "kernels" is
# split, because kernels may import their shared leaves but never one another.
LAW = {
    "state": set(),
    "machine": set(),
    "arguments": set(),
    "files": set(),
    "eightbit": set(),
    "extras": set(),
    "masks": set(),
    "problem": {"masks", "arguments"},
    "derivatives": {"problem"},
    "flops": {"problem"},
    "kernels.leaf": {"state", "masks", "problem"},
    "kernels": {
        *("state", "masks", "problem", "kernels.leaf"),
        *("eightbit", "iomodel", "quant", "machine"),
    },
    "fold": {"state", "files", "masks", "problem", "iomodel"},
    "dispatch": {"problem", "masks"},
    "paged": {"problem", "masks", "kernels.leaf", "eightbit", "arguments"},
    "library": {
        *("problem", "masks", "derivatives", "flops", "dispatch", "kernels.leaf", "paged"),
    },
    "ops": {
        *("state", "masks", "problem", "kernels.leaf", "iomodel", "fold"),
        *("dispatch", "library", "paged", "arguments"),
    },
    "explain": {
        *("problem", "kernels.leaf", "iomodel", "dispatch", "fold", "paged", "ops", "arguments"),
    },
    "testing": {"state", "masks", "problem"},
    "iomodel": {"masks", "problem", "kernels.leaf"},  # of the leaves configs alone: see below
    "quant": {"state", "masks", "problem"},
    "kvcache": {"problem", "eightbit"},
    "pointwise": {"problem"},
    "models": {"files", "problem", "ops", "kvcache", "pointwise"},
    "parallel": {
        "state",
        "masks",
        "problem",
        "derivatives",
        "kernels.leaf",
        "iomodel",
        "dispatch",
        "library",
        "ops",
        "explain",
        "models",
    },
    "engine": {"kvcache", "models", "ops", "parallel", "problem", "machine", "extras", "files"},
    "adapters": {"masks", "problem", "kernels.leaf", "library", "ops", "models", "dispatch"},
    "__init__": {"ops", "explain", "problem", "masks", "testing", "kvcache", "models", "engine"},
}
# the programs on top
FREE = {"cli", "__main__", "demo", "doctor", "report", "bench", "tune", "lab"}
LEAVES = {
    "__init__",
    "counters",
    "handles",
    "flat",
    "unpack",
    "tapes",
    "protocol",
    "planes",
    "scores",
    "philox",
    "configs",
    "strips",
}
ONLY_UNDER = {
    "triton": ("kernels/triton", "kernels/hopper", "kernels/flat.py"),
    "torch.distributed": ("parallel", "adapters/flash_attn/collectives.py"),
    "transformers": ("models/interface.py", "adapters", "bench"),
    **dict.fromkeys(
        ("fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client"),
        ("engine/server",),
    ),
}
# What decides about pages and requests: testable without tensors, and no step waits for a device.
TORCH_FREE = (
    "extras.py",
    *("kvcache/pool.py", "kvcache/prefix.py"),
    *(f"engine/{name}.py" for name in ("params", "request", "costs", "line", "beams")),
    *(f"engine/{name}.py" for name in ("step", "residence", "scheduler", "text", "tokenizer")),
    *(f"engine/{name}.py" for name in ("components", "chat", "worker", "workers")),
)


def files():
    return sorted(PACKAGE.rglob("*.py"))


def room(parts):
    if parts[0] != "kernels":
        return parts[0]
    return "kernels.leaf" if len(parts) < 2 or parts[1] in LEAVES else "kernels"


def imports(path):
    """(dotted name, at module level) of every import, relative ones resolved."""
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "onchip":
                yield from (f"onchip.{alias.name}" for alias in node.names)
            else:
                yield module


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_law(path):
    here = path.relative_to(PACKAGE).with_suffix("").parts
    mine = room(here)
    if mine in FREE:
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "onchip" or len(parts) == 1:
            continue
        theirs = room(parts[1:])
        same_kernel = mine == "kernels" and parts[1:3] == list(here[:2])
        if theirs == mine and (mine != "kernels" or same_kernel):
            continue
        assert theirs in LAW[mine] or theirs == "kernels" and same_kernel, f"{mine} imports {name}"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_some_packages_live_in_one_place(path):
    here = path.relative_to(PACKAGE).as_posix()
    for name in imports(path):
        for package, rooms in ONLY_UNDER.items():
            if name == package or name.startswith(package + "."):
                assert here.startswith(rooms) or room(path.relative_to(PACKAGE).parts) == "doctor"


@pytest.mark.parametrize("path", sorted((PACKAGE / "iomodel").glob("*.py")), ids=lambda p: p.name)
def test_the_model_of_bytes_knows_no_kernel(path):
    """It predicts what kernels move, and must not ask them: tile sizes are all they share."""
    for name in imports(path):
        assert not name.startswith("onchip.kernels") or name == "onchip.kernels.configs"


@pytest.mark.parametrize("path", TORCH_FREE)
def test_who_decides_knows_no_tensors(path):
    """Neither the file nor any file of ours that it imports."""
    for name in imports(PACKAGE / path):
        assert name.split(".")[0] != "torch"
        if name.startswith("onchip."):
            file = name.removeprefix("onchip.").replace(".", "/") + ".py"
            assert file in TORCH_FREE or name == "onchip.engine", name


def test_import_needs_torch_alone_and_wakes_nothing():
    """`import onchip` pulls in no plotting, no Triton, no numpy of its own, and starts no GPU."""
    code = (
        "import sys, torch; before = set(sys.modules); import onchip; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "assert new <= {'onchip'} | set(sys.stdlib_module_names) | {'torch'}, sorted(new); "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_all_is_the_api():
    for name in onchip.__all__:
        assert callable(getattr(onchip, name)), name
    assert onchip.masks and onchip.testing and onchip.kvcache and onchip.models and onchip.iomodel
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = onchip.flash
