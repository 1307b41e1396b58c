"""The wheel has every file of the package, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    generated = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("onchip", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=generated)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True
    )
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


def test_it_has_every_file_of_the_package(wheel):
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = (path for path in (ROOT / "onchip").rglob("*") if path.is_file())
    wanted = {
        path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"
    }
    assert inside == wanted


def test_it_requires_torch_alone(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    required = message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.11"]
