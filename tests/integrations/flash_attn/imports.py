"""The names that public repositories import from flash_attn, and whether the alias has them.

    python -m tests.integrations.flash_attn.imports     write the table into docs/integrations.md

imports.tsv has a row for each module that a repository imports: the module, and the names that it
takes from it, over all Python files of the repository's newest commit (November 2026). Rows of
`absent` list names that flash_attn itself does not have: programs try them for other versions.
"""

import importlib
import textwrap
from collections import defaultdict
from pathlib import Path

from onchip.integrations import flash_attn as fa

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "integrations.md"
WIDTH = 120  # of a line of a document
BEGIN, END = "<!-- imports:begin -->", "<!-- imports:end -->"


def rows() -> dict[str, dict[str, list[str]]]:
    """repository -> module -> names"""
    found = defaultdict(dict)
    for line in (HERE / "imports.tsv").read_text().splitlines()[1:]:
        repository, module, names = line.split("\t")
        found[repository][module] = names.split()
    return dict(found)


def resolves(module: str, name: str | None = None) -> bool:
    """Whether `from module import name` works, or `import module`."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return name is None or hasattr(found, name)


def missing(modules: dict[str, list[str]], absent: dict[str, list[str]]) -> list[str]:
    """The modules and names of flash_attn that the alias, while installed, does not have."""
    lost = []
    for module, names in modules.items():
        gone = absent.get(module, [])
        lost += [f"{module}.{n}" for n in names if n not in gone and not resolves(module, n)]
        if not names and not resolves(module):
            lost.append(module)
    return lost


def results() -> dict[str, tuple[int, list[str]]]:
    """repository -> (how many modules and names it imports, the missing ones)"""
    table = rows()
    absent = table.pop("absent")
    with fa.installed(flash_attn_3=True):
        return {
            repository: (sum(max(len(n), 1) for n in modules.values()), missing(modules, absent))
            for repository, modules in table.items()
        }


def table() -> str:
    found = results()
    whole = sum(not lost for _, lost in found.values())
    lines = [f"{whole} of {len(found)} repositories find every name.", ""]
    lines += ["| repository | names | not supported |", "|---|---|---|"]
    lines += [f"| {name} | {count} | {len(lost) or ''} |" for name, (count, lost) in found.items()]
    lines += ["", "The modules of the names that are not supported:", ""]
    return "\n".join([*lines, *(_item(name, lost) for name, (_, lost) in found.items() if lost)])


def _item(repository: str, lost: list[str]) -> str:
    modules = sorted({name.rpartition(".")[0] for name in lost})
    text = f"- {repository}: {', '.join(f'`{module}`' for module in modules)}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def main() -> None:
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
