"""The source distribution has every file of the repository, and nothing that tools leave there."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
GENERATED = ("onchip/__pycache__/testing.pyc", "tests/x.pyc", "runs/toy/model.safetensors")
METADATA = ("PKG-INFO", "setup.cfg", "onchip.egg-info/")


@pytest.fixture(scope="module")
def files():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [file for file in printed.split("\0") if (ROOT / file).is_file()]


@pytest.fixture(scope="module")
def sdist(files, tmp_path_factory):
    """The names in the archive of a copy of the repository, in which tools have left files."""
    source = tmp_path_factory.mktemp("sdist")
    for file in (*files, *GENERATED):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        if file in GENERATED:
            (source / file).touch()
        else:
            (source / file).hardlink_to(ROOT / file)
    command = [sys.executable, "-c", BUILD, str(source / "dist")]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        return [member.name.partition("/")[2] for member in opened if member.isfile()]


def test_it_has_every_file_of_the_repository(files, sdist):
    assert sorted(name for name in sdist if not name.startswith(METADATA)) == sorted(files)
