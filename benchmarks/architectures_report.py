"""What `python -m benchmarks architectures` prints and puts into the documents."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.memory_report import Sheet, Sheets
from onchip.cli.bench.harness import Row

KB = 1024


def fit_sheet(rows: list[Row]) -> Sheet:
    """Architectures down: how much of each is used, and which kernels spill."""
    heads = [
        "architecture",
        "kernels",
        "shared memory, kB",
        "most used",
        "by",
        "kernels that spill",
    ]
    body = []
    for arch, group in _by_architecture(rows).items():
        most = max(group, key=lambda row: row["value"])
        spilling = [row for row in group if row["spills"]]
        limit, used = (f"{x / KB:.4g}" for x in (most["limit_bytes"], most["value"]))
        body.append([arch, str(len(group)), limit, used, _name(most), str(len(spilling))])
    return heads, body


def registers_sheet(rows: list[Row]) -> Sheet:
    """Registers of a thread, in brackets spills."""
    spills = lambda row: f" ({row['spills']})" if row["spills"] else ""
    return _grid(rows, lambda row: f"{row['registers']}{spills(row)}")


def shared_sheet(rows: list[Row]) -> Sheet:
    """Shared memory of a program in kB."""
    return _grid(rows, lambda row: f"{row['value'] / KB:.3g}")


def tiles_sheet(rows: list[Row]) -> Sheet:
    """Queries x keys of a tile, and threads of a program."""

    def cell(row: Row) -> str:
        tile = "x".join(str(row[side]) for side in ("tile_m", "tile_n") if row[side])
        return f"{tile} {row['threads']}".strip()

    return _grid(rows, cell)


def _grid(rows: list[Row], cell: Callable[[Row], str]) -> Sheet:
    """Kernels down, architectures across."""
    archs = list(_by_architecture(rows))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(_name(row), {})[row["bench"]] = cell(row)
    body = [[name, *(cells.get(arch, "") for arch in archs)] for name, cells in lines.items()]
    return ["kernel", *archs], body


def _by_architecture(rows: list[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["bench"], []).append(row)
    return groups


def _name(row: Row) -> str:
    dim = f" {row['head_dim']}" if row["head_dim"] else ""
    return f"{row['mask']}{dim}: {row['pass']}"


SHEETS: Sheets = {
    "fit": fit_sheet,
    "registers": registers_sheet,
    "shared": shared_sheet,
    "tiles": tiles_sheet,
}


def print_report(console, rows: list[Row], plot: Path | None = None) -> None:
    from rich.table import Table

    for name, sheet in SHEETS.items():
        heads, body = sheet(rows)
        table = Table(*heads, title=name, title_justify="left")
        for line in body:
            table.add_row(*line)
        console.print(table)
