"""The import rules: which package may import which. Every import is seen: at module level, inside
functions, for types only. A new package is added to the tables here.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import onchip

PACKAGE = Path(onchip.__file__).parent

# Package -> packages it may import at any time. A package is a folder directly under onchip/; core/
# and kernels/ are split. Every file of core/ is a package, and each kernel is one, which may import
# the files that kernels share but no other kernel.
_CALL = {"core.state", "core.device", "core.problem", "core.backend", "masks"}
_SHARED = {"kernels.tiles", "kernels.runtime", "kernels.strips", "kernels.unpack"}
_KERNEL = {*_CALL, *_SHARED, "core.machine", "cost", "quant", "score_mods"}
ALLOWED = {
    "core.state": set(),
    "core.machine": set(),
    "core.philox": set(),
    "core.arguments": set(),
    "core.files": set(),
    "core.hub_cache": {"core.files"},
    "core.extras": set(),
    "core.device": set(),
    "core.torch_mode": set(),
    "masks": {"core.arguments", "core.extras"},
    "core.problem": {"masks"},
    "score_mods": {"core.problem"},
    "core.validation": {"core.arguments", "core.problem", "core.torch_mode"},
    "core.values": {"core.arguments", "core.problem"},
    "core.call_cache": {"core.problem", "core.torch_mode"},
    "core.backend": {"core.state", "core.device", "core.problem", "masks"},
    "core.derivatives": {"core.problem"},
    "core.flops": {"core.backend", "core.problem"},
    "kernels.tiles": {"core.call_cache", "core.device", "core.problem"},
    "kernels.tuned": {"core.device", "core.files", "kernels.tiles"},
    "kernels.strips": {"masks"},
    "kernels.unpack": set(),
    "kernels.runtime": {"core.call_cache", "core.problem"},
    "quant": {
        *("core.philox", "core.problem", "core.state", "core.validation", "core.values", "masks"),
    },
    "cost": {"core.device", "core.problem", "core.validation", "kernels.tiles", "masks"},
    "kernels.cpu": {*_KERNEL, "core.philox"},
    "kernels.triton": _KERNEL,
    "kernels.hopper": _KERNEL,
    "kernels.llm": {*_KERNEL, "kernels.triton"},
    "fold": {
        *("core.derivatives", "core.files", "core.problem", "core.state", "core.validation"),
        *("cost", "masks"),
    },
    "core.dispatch": {
        *("core.backend", "core.call_cache", "core.derivatives", "core.device", "core.problem"),
        "kernels.tuned",
    },
    "core.paged": {
        *("core.arguments", "core.backend", "core.problem", "core.torch_mode", "core.validation"),
        *("core.values", "masks", "quant"),
    },
    "core.dtensor": {"core.problem", "masks"},
    "core.signatures": {"core.problem", "fold", "masks", "score_mods"},
    "core.torch_op": {
        *("core.backend", "core.call_cache", "core.derivatives", "core.device", "core.dispatch"),
        *("core.flops", "core.paged", "core.problem", "core.torch_mode", "core.validation"),
        *("core.values", "kernels.runtime", "masks"),
    },
    "core.functional": {
        *(*_CALL, "core.arguments", "core.call_cache", "core.dispatch", "core.paged"),
        *("core.signatures", "core.torch_mode", "core.torch_op", "core.validation"),
        *("cost", "fold", "score_mods"),
    },
    "core.explain": {
        *("core.arguments", "core.backend", "core.device", "core.dispatch", "core.functional"),
        *("core.paged", "core.problem", "cost", "fold", "kernels.tiles", "kernels.tuned", "masks"),
    },
    "testing": {"core.state", "core.problem", "masks"},  # judges kernels, so it imports none
    "kvcache": {"core.device", "core.problem", "core.values", "quant"},
    "models": {
        *("core.device", "core.extras", "core.files", "core.functional", "core.hub_cache"),
        *("core.problem", "core.torch_mode", "core.values", "kvcache", "quant"),
    },
    "parallel": {
        *(*_CALL, "core.call_cache", "core.derivatives", "core.explain", "core.functional"),
        *("core.signatures", "core.torch_op", "core.validation", "cost", "kernels.tiles"),
        *("models",),
    },
    "engine": {
        *("core.device", "core.dispatch", "core.extras", "core.files", "core.functional"),
        "core.machine",
        *("core.problem", "cost", "kvcache", "models", "parallel"),
    },
    "nn": {"core.arguments", "core.functional", "core.problem", "masks", "models"},
    "server": {
        *("core.extras", "core.hub_cache", "core.problem", "engine", "kvcache", "models"),
        "parallel",
    },
    "integrations": {
        *("core.backend", "core.call_cache", "core.device", "core.functional", "core.problem"),
        *("core.signatures", "core.torch_mode", "core.torch_op", "core.validation", "core.values"),
        *("kernels.cpu", "masks", "models", "score_mods"),
    },
    "__init__": {
        "core.backend",
        "core.dispatch",
        "core.explain",
        "core.functional",
        "core.problem",
        "core.validation",
        "core.values",
        *("cost", "engine", "fold", "integrations", "kvcache", "masks", "models", "nn", "parallel"),
        *("quant", "score_mods", "testing"),
    },
}
# Imports that are allowed inside functions only: the first call that runs a kernel loads it, and
# Triton with it.
_BACKENDS = {"kernels.cpu", "kernels.triton", "kernels.hopper"}
LAZY = {
    "core.dispatch": _BACKENDS,
    "core.torch_op": {"core.dtensor", "kernels.triton"},
    "core.functional": {"kernels.cpu", "kernels.triton"},
    "kernels.hopper": {"kernels.triton"},
    "kernels.llm": {"kernels.hopper"},
    "kvcache": {"kernels.llm"},
    "models": {"kernels.llm"},
    "nn": {"core.dtensor"},
    "parallel": {"kernels.triton"},
    "engine": {"kernels.llm"},
    "integrations": {"kernels.llm", "kernels.triton"},
}
# programs, which may import anything
FREE = {"__main__", "cli", "lab"}
ONLY_UNDER = {
    "triton": ("kernels/triton", "kernels/hopper", "kernels/llm", "kernels/runtime/raw_launch.py"),
    "torch.distributed": (
        *("core/dtensor.py", "parallel", "integrations/flash_attn/collectives.py"),
    ),
    "transformers": ("models/interface.py", "integrations"),
    "llguidance": ("engine/structure/automaton.py",),
    "ray": ("server/replicas/cluster.py", "server/replicas/router.py"),
    "click": ("cli",),
    "rich": ("cli", "engine/progress.py"),
    "matplotlib": ("cli", "masks/show.py"),
    **dict.fromkeys(
        ("fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client"),
        ("server",),
    ),
}
# The decisions about pages and requests: tested without tensors, and no step waits for a device.
TORCH_FREE = (
    *("core/extras.py", "core/files.py", "core/hub_cache.py"),
    *("kvcache/pool.py", "kvcache/prefix.py"),
    *(f"engine/{name}.py" for name in ("sampling_params", "request", "request_queue", "step")),
    *(f"engine/{name}.py" for name in ("preemption_costs", "beam_search", "kv_manager")),
    "engine/stream_pacer.py",
    *(f"engine/{name}.py" for name in ("scheduler", "detokenizer", "tokenizer")),
    *(f"engine/{name}.py" for name in ("tokenizer_components", "chat_template")),
    *(f"engine/{name}.py" for name in ("text_worker_main", "text_worker_pool")),
    *(
        f"engine/speculation/{name}.py"
        for name in ("config", "ngram", "speculator", "tree", "verify")
    ),
    *(f"engine/structure/{name}.py" for name in ("grammar", "regex_size", "json_schema")),
    *(f"engine/structure/{name}.py" for name in ("automaton", "compiler")),
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
    """The package of a file or module, as the tables name it."""
    is_split = parts[0] in ("core", "kernels") and len(parts) > 1 and parts[1] != "__init__"
    return ".".join(parts[:2]) if is_split else parts[0]


def file_of(module):
    """The file of a dotted name of onchip, or None if there is none."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    candidates = [p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()]
    return candidates[0] if candidates else None


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
    if mine in FREE or path.stat().st_size == 0:
        return
    for module, when in imports(path):
        parts = module.split(".")
        if parts[0] != "onchip" or len(parts) == 1:
            continue
        theirs = package(parts[1:])
        allowed = ALLOWED[mine] | (LAZY.get(mine, set()) if when == "call" else set())
        assert theirs in {mine} | allowed, f"{relative(path)} imports {module}"


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


def _is_ours(imported):
    return imported.module.split(".")[0] == "onchip"


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
        is_variable = isinstance(first, ast.Name | ast.Attribute) and is_free
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
                assert here.startswith((*places, "cli/doctor.py"))


@pytest.mark.parametrize("path", sorted((PACKAGE / "cost").glob("*.py")), ids=lambda p: p.name)
def test_the_model_of_bytes_imports_no_kernel(path):
    """It predicts what kernels move independently of them: they share tile sizes alone."""
    for name, _ in imports(path):
        assert not name.startswith("onchip.kernels") or name == "onchip.kernels.tiles"


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
    """Functions and classes, and the packages that documents import from."""
    for name in onchip.__all__:
        value = getattr(onchip, name)
        assert callable(value) != isinstance(value, ModuleType), name
    assert {"LLM", "SamplingParams", "masks", "attention"} <= set(onchip.__all__) <= {*dir(onchip)}
    assert onchip.masks and onchip.testing and onchip.kvcache and onchip.models and onchip.cost
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = onchip.flash
