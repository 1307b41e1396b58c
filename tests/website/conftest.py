"""The site, built once, and the browser of the lab's tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.conftest import chromium  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, below another one: it works from a sub-path. SITE= names one that is
    built already. Any warning fails, and no request leaves this machine.
    """
    if "SITE" in os.environ:
        return Path(os.environ["SITE"]).resolve()
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site") / "docs" / "latest"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    env = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder
