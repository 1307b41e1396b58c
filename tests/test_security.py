"""What SECURITY.md states of the source: no data of a file or a request is executed."""

import ast
from pathlib import Path

import pytest

import onchip

PACKAGE = Path(onchip.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Compile constructors from the fields of the package's own classes, and device functions from the
# operations of a traced score_mod: names of a table, and numbers.
MAKE_CODE = {"kernels/hopper/aggregate.py", "kernels/triton/score_mod.py"}


def name(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.fixture(scope="module")
def nodes():
    return {
        name(path): [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))] for path in SOURCES
    }


def found(nodes, kind, matches):
    return {
        f"{file}:{node.lineno}"
        for file, inside in nodes.items()
        for node in inside
        if isinstance(node, kind) and matches(node)
    }


def called(node):
    return ast.unparse(node.func)


def test_no_pickle_is_imported(nodes):
    names = lambda node: [alias.name for alias in node.names] + [getattr(node, "module", None)]
    uses = lambda node: any(str(module).split(".")[0] in PICKLES for module in names(node))
    assert not found(nodes, (ast.Import, ast.ImportFrom), uses)


def test_nothing_is_evaluated(nodes):
    outside = {file: inside for file, inside in nodes.items() if file not in MAKE_CODE}
    assert not found(outside, ast.Call, lambda node: called(node) in ("eval", "exec", "compile"))
    assert not found(nodes, ast.Call, lambda node: called(node) in ("eval", "torch.load"))


def test_no_shell_runs(nodes):
    assert not found(nodes, ast.keyword, lambda node: node.arg == "shell")
    assert not found(nodes, ast.Call, lambda node: called(node) in ("os.system", "os.popen"))


def test_code_of_checkpoints_is_never_trusted(nodes):
    trusts = lambda node: node.arg == "trust_remote_code"
    assert len(found(nodes, ast.keyword, trusts)) >= 3
    is_false = lambda node: isinstance(node.value, ast.Constant) and node.value.value is False
    assert not found(nodes, ast.keyword, lambda node: trusts(node) and not is_false(node))
