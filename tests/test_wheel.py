"""The wheel has every file of the package and nothing else, is small, and can be installed."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests import install

ROOT = Path(__file__).parents[1]
MAX_BYTES = 6_250_000  # 4.9 MB are the two built-in models
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
    return file


@pytest.fixture(scope="module")
def content(wheel):
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def test_it_is_small(wheel):
    size = wheel.stat().st_size
    assert size < MAX_BYTES, f"{size:,} bytes"


def test_it_has_every_file_of_the_package(content):
    inside = {name for name in content.namelist() if ".dist-info/" not in name}
    files = (path for path in (ROOT / "onchip").rglob("*") if path.is_file())
    wanted = {
        path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"
    }
    assert inside == wanted


def test_it_requires_torch_alone(content):
    (name,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
    required = message_from_bytes(content.read(name)).get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.11"]


@pytest.mark.slow
def test_it_is_installed_and_computes(wheel, tmp_path):
    """In an environment of its own, which takes torch from this one. `make dist-check` installs
    into empty ones. As in the Makefile, pip is that of the Python outside of the environment.
    """
    python = install.make_environment(tmp_path / "environment", sys.executable, "--without-pip")
    install.add_packages_of(python, sys.executable)
    pip = (sys._base_executable, "-m", "pip", "--python", python)
    install.run(*pip, "install", "--no-deps", "--no-index", wheel)
    assert "onchip 0" in install.check(python, tmp_path)
