"""The versions that are required and pinned have no known hole, and every pin has hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# package -> the first version without the hole, and its name. pyproject names those of FLOORS.
FLOORS = {
    "jinja2": ("3.1.6", "CVE-2025-27516, code from a sandboxed template"),
    "h11": ("0.16", "CVE-2025-43859, requests smuggled in chunked bodies"),
    "starlette": ("0.49.1", "CVE-2025-62727, quadratic Range headers"),
    "setuptools": ("78.1.1", "CVE-2025-47273, files written outside of a folder"),
    "torch": ("2.6", "CVE-2025-32434, code from torch.load(weights_only=True)"),
}
PINS = {
    **FLOORS,
    "urllib3": ("2.6.3", "CVE-2026-21441, bombs behind redirects"),
    "requests": ("2.32.4", "CVE-2024-47081, credentials to another host"),
    "idna": ("3.7", "CVE-2024-3651, quadratic names"),
    "pillow": ("12.1.1", "CVE-2026-25990, writes outside of a picture"),
    "filelock": ("3.20.3", "CVE-2026-22701, links followed"),
    "fonttools": ("4.60.2", "CVE-2025-66034, files written outside of a folder"),
    "werkzeug": ("3.1.5", "CVE-2026-21860, names of devices"),
    "transformers": ("4.53", "CVE-2025-6638 and others, slow regular expressions"),
}


def pins(file):
    lines = (ROOT / file).read_text().splitlines()
    return dict(re.match(r"([a-z0-9-]+)==([^ ]+)", line).groups() for line in lines if "==" in line)


def floors():
    requirements = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        requirements += extra
    for requirement in map(Requirement, requirements):
        for specifier in requirement.specifier:
            if specifier.operator == ">=":
                yield requirement.name, Version(specifier.version)


@pytest.mark.parametrize("name", FLOORS)
def test_required_versions_have_no_known_vulnerability(name):
    versions = dict(floors())
    assert versions[name] >= Version(FLOORS[name][0]), FLOORS[name][1]


@pytest.mark.parametrize("name", PINS)
def test_pinned_versions_have_no_known_vulnerability(name):
    assert Version(pins("constraints.txt")[name]) >= Version(PINS[name][0]), PINS[name][1]


def test_pins_satisfy_the_requirements():
    pinned = pins("constraints.txt")
    for name, floor in floors():
        if name in pinned:
            assert Version(pinned[name]) >= floor, name


def test_every_pin_but_torch_has_hashes():
    """`make lock` writes them anew after a pin has changed."""
    wanted = pins("constraints.txt")
    del wanted["torch"]
    assert pins("constraints-hashed.txt") == wanted
    for block in re.split(r"\n(?=[a-z])", (ROOT / "constraints-hashed.txt").read_text()):
        if "==" in block:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}(\s|$)", block), block.split()[0]
