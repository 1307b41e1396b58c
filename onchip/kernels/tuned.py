"""A user's own tile rows: one JSON file per device, which precedes the tables of tiles.py there.

    onchip tune --write  ->  ~/.config/onchip/tuned/nvidia-h200.json  ->  the first plan on an H200

    {"schema": 1, "device": "NVIDIA H200", "capability": [9, 0],
     "onchip": "0.1.0", "torch": "2.13.0", "triton": "3.9.0",
     "rows": [{"table": "TRITON_SM90", "key": ["forward", 64],
               "config": {"tile_m": 128, "tile_n": 32, "num_warps": 4, "num_stages": 3},
               "speedup": 1.04, "cells": 4, "triton": "3.9.0", "date": "2026-11-18"}]}

ONCHIP_TUNED names another folder; ONCHIP_TUNED=off ignores all files. A row is found by its table
and key, whichever version wrote it. A row that this version cannot use (its table or a field is
gone, a value is out of range, its tiles cannot fit the device) is left out with one warning. A file
never makes a call fail.
"""

import json
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from onchip.core.device import DeviceInfo
from onchip.core.files import read_regular
from onchip.kernels import tiles

SCHEMA = 1
VARIABLE, OFF = "ONCHIP_TUNED", "off"
MAX_BYTES, MAX_ROWS, MAX_TEXT, MAX_NUMBER = 1 << 20, 1000, 200, 1e9
HEADER = ("schema", "device", "capability", "onchip", "torch", "triton", "rows")
MEASURED = {"speedup": float, "cells": int, "triton": str, "date": str}  # optional
ROW = ("table", "key", "config", *MEASURED)
# The tables with rows that `onchip tune` searches.
TUNABLE = (
    *("HOPPER_FORWARD", "HOPPER_FORWARD_DENSE", "HOPPER_FORWARD_SHORT", "HOPPER_FORWARD_MASK"),
    *("HOPPER_BACKWARD", "HOPPER_SPLIT", "HOPPER_FP8", "HOPPER_INT8", "HOPPER_INT8_PV16"),
    *("TRITON_SM90", "TRITON_SM90_MASK", "TRITON_SM80", "TRITON_SM120", "TRITON_AMD"),
    *("TRITON_AMD_MODIFIED", "TRITON_MODIFIED", "TRITON_FP32", "TRITON_DECODE", "TRITON_SHORT"),
)
# The values that `onchip tune` tries. Fields of the Hopper kernels depend on one another: a row
# differs from the package's in these fields alone, and has one of these values.
VARIED: dict[str, dict[str, tuple]] = {
    "HopperConfig": {
        "tile_n": (64, 128),
        "num_stages": (2, 3, 4),
        "q_stages": (1, 2),
        "pingpong": (False, True),
        "rescale": ("always", "moved", "stale"),
        "rescale_under_qk": (False, True),
        "delay_pv_wait": (0, 2, 4, 8, 16, 24, 32, 64),
        "overlap": (True, False),
        "q_in_registers": (False, True),
        "named_barriers": (False, True),
        "emulated_exp2": (0, 8),
        "dynamic": (False, True),
    },
    "HopperBackwardConfig": {"q_stages": (2, 3), "dout_stages": (2, 3)},
    "HopperSplitConfig": {
        "b0_stages": (2, 3, 4),
        "b1_stages": (1, 2, 3),
        "own_in_registers": (False, True),
    },
    "TritonConfig": {
        "tile_m": (32, 64, 128),
        "tile_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5),
        "max_registers": (0, 128),
    },
}
# The number of consumers decides how many registers each may have.
TEAMS = (
    {"consumers": 2, "consumer_regs": 240, "producer_regs": 24, "entry_regs": 168},
    {"consumers": 3, "consumer_regs": 160, "producer_regs": 32, "entry_regs": 128},
)
# What any row of the portable kernels may have. Tiles divide a mask's blocks of 128.
TRITON_VALUES: dict[str, Sequence[int]] = {
    "tile_m": (16, 32, 64, 128),
    "tile_n": (16, 32, 64, 128),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": range(1, 7),
    "max_registers": (0, *range(24, 256)),
}
Key = tuple[str, Any]  # table, and key of a row in it


class TunedTable(NamedTuple):
    """The rows of a file that this version uses, and a sentence about each of the others."""

    path: Path
    rows: tiles.Measured
    triton: str = ""
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = "1 row" if len(self.rows) == 1 else f"{len(self.rows)} rows"
        with_triton = f" (Triton {self.triton})" if self.triton else ""
        return f"{count} measured here, of {self.path}{with_triton}"


def path_of(device: DeviceInfo) -> Path | None:
    """The file of a device; None if files are turned off or the device has no name."""
    folder, stem = find_folder(), re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return folder / f"{stem}.json" if folder and stem else None


def find_folder() -> Path | None:
    """The folder of all files; None if files are turned off."""
    folder = os.environ.get(VARIABLE, "")
    if folder.lower() == OFF:
        return None
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder or Path(config) / "onchip" / "tuned")


def make_folder() -> None:
    """Create the folder, or raise ValueError or OSError: before hours of measuring, not after."""
    folder = find_folder()
    if folder is None:
        raise ValueError(f"{VARIABLE}={OFF} turns tuned tables off: unset it to write one")
    folder.mkdir(parents=True, exist_ok=True)


@cache
def load(device: DeviceInfo) -> TunedTable | None:
    """Read the file of a device and let its rows precede the package's, once in a process. None
    without a file. Whatever is wrong with the file is said in one warning.
    """
    path = path_of(device)
    if path is None:
        return None
    try:
        table = parse(read_regular(path, MAX_BYTES), path, device)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} is ignored: {error}", stacklevel=2)
        return None
    if table.ignored:
        advice = "`onchip tune --write` measures rows anew"
        said = f"rows of {path} are ignored ({'; '.join(table.ignored)}); {advice}"
        warnings.warn(said, stacklevel=2)
    tiles.use_measured(device.name, table.rows)
    return table


def parse(content: bytes, path: Path, device: DeviceInfo) -> TunedTable:
    """The usable rows; ValueError if the whole file is not for this device and version."""
    document = _read_document(content)
    capability = list(device.capability) if device.capability else None
    if (document["device"], document["capability"]) != (device.name, capability):
        raise ValueError(f"it is for {document['device']!r}, not for {device.name!r}")
    rows, ignored = {}, []
    for entry in document["rows"]:
        try:
            key, row = _read_row(entry, device)
            rows[key] = row
        except ValueError as error:
            ignored.append(str(error))
    return TunedTable(path, rows, str(document["triton"]), tuple(ignored))


def _read_document(content: bytes) -> dict[str, Any]:
    document = json.loads(content)
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError("it is not a table of tile rows")
    if document["schema"] != SCHEMA:
        raise ValueError(f"its schema is {document['schema']!r}, and this version reads {SCHEMA}")
    if set(document) != set(HEADER):
        odd = min(set(document) ^ set(HEADER))
        raise ValueError(f"it {'has an unknown' if odd in document else 'lacks the'} field {odd!r}")
    rows = document["rows"]
    if not isinstance(rows, list) or len(rows) > MAX_ROWS:
        raise ValueError(f"its rows are not a list of at most {MAX_ROWS}")
    return document


def _read_row(entry: Any, device: DeviceInfo) -> tuple[Key, Any]:
    """((table, key), row), or ValueError with the reason why this version cannot use the row."""
    if not isinstance(entry, dict) or not {"table", "key", "config"} <= set(entry) <= set(ROW):
        raise ValueError(f"a row has other fields than {', '.join(ROW)}")
    table, key = _key_of(entry)
    name = f"{table}[{tiles.show_key(key)}]"
    if table not in TUNABLE:
        raise ValueError(f"{name}: this version has no such table to tune")
    if key not in getattr(tiles, table):
        raise ValueError(f"{name}: the table has no such row")
    for field, kind in MEASURED.items():
        if not _is_of(entry.get(field, kind()), kind):
            raise ValueError(f"{name}: {field} is {entry[field]!r}")
    package_row = getattr(tiles, table)[key]
    row = _checked(name, package_row, entry["config"])
    needed = least_shared_bytes(table, key, row)
    if needed > device.shared_bytes:
        raise ValueError(
            f"{name}: its tiles take {needed} bytes of shared memory, and the device has"
            f" {device.shared_bytes}"
        )
    return (table, key), row


def _key_of(entry: dict[str, Any]) -> Key:
    table, parts = entry["table"], entry["key"]
    parts = parts if isinstance(parts, list) else [parts]
    is_plain = all(isinstance(x, str | int) and len(str(x)) <= MAX_TEXT for x in parts)
    if not isinstance(table, str) or len(table) > MAX_TEXT or not parts or not is_plain:
        raise ValueError("a row has neither the name of a table nor a key")
    return table, parts[0] if len(parts) == 1 else tuple(parts)


def _is_of(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str) and len(value) <= MAX_TEXT
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    return is_number and 0 <= value < MAX_NUMBER


def _checked(name: str, package_row: Any, config: Any) -> Any:
    """The row of a config. Fields that the config lacks, because they are newer than the file, are
    the package's.
    """
    if not isinstance(config, dict) or not config:
        raise ValueError(f"{name}: its config is no object of fields")
    gone = sorted(set(config) - set(package_row._fields))
    if gone:
        raise ValueError(f"{name}: tiles have no field {gone[0]!r} any more")
    row = package_row._replace(**config)
    for field, value, usual in zip(row._fields, row, package_row, strict=True):
        if type(value) is not type(usual) or not _is_allowed(row, field, value, usual):
            raise ValueError(f"{name}: {field}={value!r} is not possible")
    if not is_consistent(row):
        raise ValueError(f"{name}: its stages do not fit together")
    return row


def _is_allowed(row: Any, field: str, value: Any, usual: Any) -> bool:
    """usual: the package's value. A tile of 0 follows the call."""
    if value == usual:
        return True
    if isinstance(row, tiles.TritonConfig):
        follows_call = field.startswith("tile") and usual == 0
        return not follows_call and value in TRITON_VALUES[field]
    in_team = any(field in team and team.items() <= row._asdict().items() for team in TEAMS)
    return in_team or value in VARIED[type(row).__name__].get(field, ())


def is_consistent(row: Any) -> bool:
    """The backward has barriers for five stages of q and dout. If the output is staged in the
    memory of q, a second q stage is not possible. A product of values that is complete before
    scores are started is not waited for, and nothing is rescaled beside it.
    """
    ahead = getattr(row, "q_stages", 0)
    if ahead + getattr(row, "dout_stages", 0) > 5 or (
        ahead > 1 and getattr(row, "out_in_q", False)
    ):
        return False
    return getattr(row, "overlap", True) or not (row.rescale_under_qk or row.delay_pv_wait)


def least_shared_bytes(table: str, key: Any, row: Any) -> int:
    """The buffers of tiles that are loaded ahead. A kernel takes more; how much more depends on its
    options and on the version of Triton.
    """
    parts = key if isinstance(key, tuple) else (key,)
    dim = parts[-1]
    if isinstance(row, tiles.TritonConfig):
        itemsize = 4 if table == "TRITON_FP32" or parts[0] == 4 else 2
        streamed = row.tile_m if parts[0] == "dkdv" else row.tile_n
        return 2 * (row.num_stages - 1) * streamed * dim * itemsize
    if isinstance(row, tiles.HopperConfig):
        itemsize = 1 if table in ("HOPPER_FP8", "HOPPER_INT8", "HOPPER_INT8_PV16") else 2
        tokens = 64 * row.consumers * row.q_stages + 2 * row.num_stages * row.tile_n
        return tokens * dim * itemsize
    if isinstance(row, tiles.HopperBackwardConfig):
        tokens = row.tile_m * (row.q_stages + row.dout_stages) + 2 * row.tile_n
        return 2 * dim * tokens + 6 * row.tile_m * row.tile_n  # three stages of ds
    return 2 * dim * (row.tile * (row.b0_stages + row.b1_stages) + 128)


class Measurement(NamedTuple):
    """A searched row. row is None if none was faster than the package's by more than the noise."""

    table: str
    key: Any
    row: Any = None
    speedup: float = 1.0
    cells: int = 0


def write(device: DeviceInfo, measurements: Iterable[Measurement]) -> Path:
    """Write the rows to the file of the device. Rows of the file that were searched again are
    replaced, or removed if the package's is as fast; all others stay as they are, also those of
    other versions. A file that this version cannot read is renamed to *.old.
    """
    make_folder()
    path = path_of(device)
    if path is None:
        raise ValueError("a device without a name has no table")
    measurements = list(measurements)
    searched = {(m.table, m.key) for m in measurements}
    kept = [entry for entry in _old_rows(path, device) if _key_of(entry) not in searched]
    rows = kept + [_entry(m) for m in measurements if m.row is not None]
    header = {"schema": SCHEMA, "device": device.name, "capability": device.capability}
    header |= {name: _version(name) for name in ("onchip", "torch", "triton")}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def _old_rows(path: Path, device: DeviceInfo) -> list[dict[str, Any]]:
    """The entries of an earlier file."""
    try:
        content = read_regular(path, MAX_BYTES)
        parse(content, path, device)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        path.replace(path.with_name(f"{path.name}.old"))
        return []
    return [entry for entry in json.loads(content)["rows"] if _has_key(entry)]


def _has_key(entry: Any) -> bool:
    try:
        return isinstance(entry, dict) and bool(_key_of(entry))
    except (ValueError, KeyError):
        return False


def _entry(m: Measurement) -> dict[str, Any]:
    key = list(m.key) if isinstance(m.key, tuple) else [m.key]
    measured = {"speedup": round(m.speedup, 4), "cells": m.cells}
    measured |= {"triton": _version("triton"), "date": date.today().isoformat()}
    return {"table": m.table, "key": key, "config": m.row._asdict()} | measured


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
