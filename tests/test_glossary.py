"""ARCHITECTURE.md agrees with the code: its glossary, its table of packages, the path of a call. No
retired word is a name in the package, and no class name occurs more than twice.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.test_layers import _CALL, _KERNEL, ALLOWED, FREE, LAZY

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "onchip"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

# Private words of earlier versions, by area. Readers knew none of them, and each has a successor
# that the field uses: the glossary has it.
RETIRED = {
    "a call": "Question Beside Later LaterRule places_q places_k merge_at_rest kernel_module "
    "posed merging adding",
    "host kernels": "Plane Rectangle bend Handle Tape tapes flat",
    "Hopper": "Ring Rider Boxes Lookups Baton Tickets filling steady_slot numbered Seen Share Job "
    "Place",
    "cache": "graft Family unseat seat stranger",
    "engine": "Line Residence Run Drawn Flight land solo rooted torn mend Pace",
    "server": "replies tickets",
    "ranks": "Total Patient Parcel Nest Lookout lookout Whole agree",
    "models": "turned rehearsal",
    "packages": "iomodel adapters eightbit room rooms door doors law LAW anything",
    "benchmarks": "Judge Contender Bar Lane Race",
}
RETIRED_NAMES = {word for words in RETIRED.values() for word in words.split()}
RETIRED_MODULES = RETIRED_NAMES | {"question", "configs", "handles", "library", "planes"}


def rows():
    """(term, file) of every row of the glossary."""
    glossary = TEXT.split("## Glossary")[1]
    return re.findall(r"^\| ([^|]+) \| .* \| `([\w./]+\.py)` \|$", glossary, re.MULTILINE)


def text_blocks():
    return re.findall(r"^```text\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def defined(path):
    """The names of a file's classes, functions and parameters."""
    for node in nodes(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def names(path):
    """All identifiers of a file: what it defines, assigns and reads."""
    yield from defined(path)
    for node in nodes(path):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


@pytest.mark.parametrize("term, file", rows())
def test_glossary_terms_are_in_their_files(term, file):
    """A term in backticks is an identifier, any other a word of the text."""
    path = PACKAGE / file
    if term.startswith("`"):
        assert term.strip("`") in set(names(path))
    else:
        text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
        for word in term.split(", "):
            assert re.search(rf"\b{word}(s|es)?\b", text, re.IGNORECASE), word


def test_the_glossary_has_each_term_once():
    terms = [term for term, _ in rows()]
    assert len(terms) > 100 and len(terms) == len(set(terms))


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix()
)
def test_glossary_retired_words_are_not_names(path):
    assert not RETIRED_NAMES & set(defined(path))
    assert not RETIRED_MODULES & set(path.relative_to(PACKAGE).with_suffix("").parts)


def test_no_class_name_of_the_package_occurs_more_than_twice():
    classes = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    assert {name: n for name, n in classes.items() if n > 2} == {}


def test_the_table_of_packages_is_the_rules_of_imports():
    """The last column of each package has ALLOWED and, after ~, LAZY of tests/test_layers.py. All
    its packages are above it.
    """
    groups = {"CALL": _CALL, "KERNEL": _KERNEL, "-": set()}
    allowed, lazy, package = {}, {}, ""
    for line in text_blocks()[0].splitlines()[1:]:
        first, *_, last = re.split(r"\s{2,}", line)
        package = first or package
        for name in last.split():
            target = lazy if name.startswith("~") else allowed
            target.setdefault(package, set()).update(groups.get(name, {name.removeprefix("~")}))
    programs = {package for package, packages in allowed.items() if packages == {"everything"}}
    assert programs == FREE - {"__main__"}
    assert {package: allowed[package] for package in allowed.keys() - programs} == ALLOWED
    assert lazy == LAZY
    order = list(allowed)
    for package, packages in (*allowed.items(), *lazy.items()):
        above = set(order[: order.index(package)])
        assert packages <= above | {"everything"}, f"{package} imports a package below it"


def test_the_path_of_a_call_in_architecture_names_functions_of_the_package():
    """Every name after an arrow is in the file of its line, or of the last line that names one."""
    count, file = 0, ""
    for line in text_blocks()[1].splitlines():
        first, _, rest = line.strip().partition(" ")
        file = first if first.endswith(".py") else file
        for name in re.findall(r"-> ([A-Za-z_.]+)", rest):
            count += 1
            assert name.split(".")[-1] in set(names(PACKAGE / file)), (file, name)
    assert count > 18
