"""The site, built once a run, and the browser of the lab's tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock  # torch needs it too

from tests.lab.conftest import chromium  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, below another one: it works from a sub-path. SITE= names one that is
    built already. The workers of a run share it: the first one builds it.
    """
    if "SITE" in os.environ:
        return Path(os.environ["SITE"]).resolve()
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "site" / "docs" / "latest"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            build(folder)
    return folder


def build(folder):
    """Any warning fails, and no request leaves this machine."""
    unfinished = folder.with_name("unfinished")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(unfinished)]
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    env = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unfinished.rename(folder)
