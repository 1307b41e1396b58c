"""The import rules: which package may import which. Every import is seen: at module level, inside
functions, for types only. A new package is added to the tables here.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import onchip

PACKAGE = Path(onchip.__file__).parent

# Package -> packages it may import. A package is a file or folder directly under onchip/. kernels/
# is split: each kernel is a package, which may import the shared leaves but no other kernel.
_KERNEL = {"state", "masks", "problem", "kernels.leaf", "eightbit", "iomodel", "quant", "machine"}
ALLOWED = {
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
    "kernels.aten": _KERNEL,
    "kernels.hopper": _KERNEL,
    "kernels.pages": _KERNEL,
    "kernels.papers": {*_KERNEL, "dispatch"},  # a plug-in: it registers itself
    "kernels.reference": _KERNEL,
    "kernels.tiled": _KERNEL,
    "kernels.triton": _KERNEL,
    "fold": {"state", "files", "masks", "problem", "iomodel"},
    "dispatch": {"problem", "kernels.leaf"},
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
        "library",
        "ops",
        "explain",
        "models",
    },
    "engine": {"kvcache", "models", "ops", "parallel", "problem", "machine", "extras", "files"},
    "adapters": {"masks", "problem", "kernels.leaf", "kernels.aten", "library", "ops", "models"},
    "__init__": {"dispatch", "explain", "kernels.leaf", "ops", "problem"},
}
# What a package may also import inside functions: the first call that runs a kernel loads it, and
# Triton with it.
ALLOWED_IN_FUNCTIONS = {
    "dispatch": {
        *("kernels.hopper", "kernels.triton", "kernels.pages", "kernels.aten"),
        *("kernels.tiled", "kernels.reference"),
    },
    "kernels.hopper": {"kernels.triton"},
    "library": {"kernels.triton"},
    "ops": {"kernels.triton", "kernels.reference"},
    "kvcache": {"kernels.triton"},
    "pointwise": {"kernels.triton"},
    "parallel": {"kernels.triton"},
    "engine": {"kernels.triton"},
    "adapters": {"kernels.triton"},
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
# The decisions about pages and requests: tested without tensors, and no step waits for a device.
TORCH_FREE = (
    "extras.py",
    *("kvcache/pool.py", "kvcache/prefix.py"),
    *(f"engine/{name}.py" for name in ("params", "request", "costs", "line", "beams")),
    *(f"engine/{name}.py" for name in ("step", "residence", "scheduler", "text", "tokenizer")),
    *(f"engine/{name}.py" for name in ("components", "chat", "worker", "workers")),
)


class Import(NamedTuple):
    module: str  # dotted; of `from package import module` the module
    when: str  # "load", "call" (inside a function), "types" (under TYPE_CHECKING)


def files():
    return sorted(PACKAGE.rglob("*.py"))


@cache
def parse(path):
    return ast.parse(path.read_text())


def relative(path):
    return str(path.relative_to(PACKAGE))


def package(parts):
    if parts[0] != "kernels":
        return parts[0]
    leaf = len(parts) < 2 or parts[1] in LEAVES
    return "kernels.leaf" if leaf else f"kernels.{parts[1]}"


def file_of(module):
    """The file of a dotted name of onchip, or None if there is none."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    found = [p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()]
    return found[0] if found else None


@cache
def imports(path):
    """Every Import of a file, relative ones resolved."""
    return list(_imports(parse(path), path, "load"))


def _imports(node, path, when):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(name, when) for name in _from(child, path))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, path, "call")
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from _imports(child, path, "types")
        else:
            yield from _imports(child, path, when)


def _from(node, path):
    """The modules of `from base import names`: base itself, or files in it."""
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    base = ".".join((*here[: -node.level], *filter(None, [node.module])))
    base = base if node.level else node.module
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        is_module = base.split(".")[0] == "onchip" and file_of(inner) is not None
        yield inner if is_module else base


@pytest.mark.parametrize("path", files(), ids=relative)
def test_imports_follow_the_rules(path):
    mine = package(path.relative_to(PACKAGE).with_suffix("").parts)
    if mine in FREE:
        return
    for module, when in imports(path):
        parts = module.split(".")
        if parts[0] != "onchip" or len(parts) == 1:
            continue
        theirs = package(parts[1:])
        allowed = {mine} | ALLOWED[mine]
        if when == "call":
            allowed |= ALLOWED_IN_FUNCTIONS.get(mine, set())
        assert theirs in allowed, f"{relative(path)} imports {module}"


def test_no_file_imports_itself_through_others():
    """Imports at module level have no cycle of files."""
    graph = {}
    for path in files():
        loaded = [file_of(x.module) for x in imports(path) if x.when == "load" and _is_ours(x)]
        graph[path] = [p for p in loaded if p is not None and p != path]
    done, trail = set(), []

    def visit(path):
        assert path not in trail, " -> ".join(map(relative, [*trail, path]))
        if path not in done:
            trail.append(path)
            for other in graph[path]:
                visit(other)
            done.add(trail.pop())

    for path in graph:
        visit(path)


def _is_ours(found):
    return found.module.split(".")[0] == "onchip"


@pytest.mark.parametrize("path", files(), ids=relative)
def test_no_import_is_hidden_in_a_string(path):
    """import_module is for names of other packages, and for files of the package itself: then with
    that package as its second argument.
    """
    is_free = package(path.relative_to(PACKAGE).with_suffix("").parts) in FREE
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).split(".")[-1]
        if name not in ("import_module", "__import__"):
            continue
        first = node.args[0]
        is_foreign = isinstance(first, ast.Constant) and not first.value.startswith("onchip")
        is_variable = isinstance(first, ast.Name) and is_free
        assert len(node.args) == 2 or is_foreign or is_variable, ast.unparse(node)


@pytest.mark.parametrize("path", files(), ids=relative)
def test_hooks_of_backends_are_not_probed(path):
    """Every hook has a default in Backend: hasattr and getattr would hide a misspelt one."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            assert "backend" not in ast.unparse(node.args[0]), ast.unparse(node)


@pytest.mark.parametrize("path", files(), ids=relative)
def test_some_packages_are_imported_in_one_place(path):
    here = path.relative_to(PACKAGE).as_posix()
    for name, _ in imports(path):
        for external, places in ONLY_UNDER.items():
            if name == external or name.startswith(external + "."):
                is_doctor = package(path.relative_to(PACKAGE).parts) == "doctor"
                assert here.startswith(places) or is_doctor


@pytest.mark.parametrize("path", sorted((PACKAGE / "iomodel").glob("*.py")), ids=lambda p: p.name)
def test_the_model_of_bytes_imports_no_kernel(path):
    """It predicts what kernels move independently of them: they share tile sizes alone."""
    for name, _ in imports(path):
        assert not name.startswith("onchip.kernels") or name == "onchip.kernels.configs"


@pytest.mark.parametrize("path", TORCH_FREE)
def test_pages_and_requests_are_decided_without_torch(path):
    """Neither the file nor a file of onchip that it imports uses torch."""
    for name, _ in imports(PACKAGE / path):
        assert name.split(".")[0] != "torch"
        if name.startswith("onchip."):
            file = name.removeprefix("onchip.").replace(".", "/") + ".py"
            assert file in TORCH_FREE or name == "onchip.engine", name


def test_import_needs_torch_alone_and_starts_no_gpu():
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
