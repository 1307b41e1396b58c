"""Type checkers accept user_program.py, report every line of mistakes.py, and know the types of the
package's public names. basedpyright and mypy are packages of the extra `dev`.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("user_program.py", "mistakes.py")


def run(*command, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def check_reports(reports):
    """reports: (file name, line) of each error."""
    lines = defaultdict(set)
    for name, line in reports:
        lines[name].add(line)
    source = (HERE / "mistakes.py").read_text(encoding="utf-8").splitlines()
    wrong = {number for number, line in enumerate(source, 1) if line.endswith("# wrong")}
    assert len(wrong) == 14 and dict(lines) == {"mistakes.py": wrong}


@pytest.mark.slow
def test_the_program_runs():
    done = run(HERE / "user_program.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_basedpyright_reports_the_mistakes_alone(tmp_path):
    pytest.importorskip("basedpyright")
    config = {"include": [str(HERE / name) for name in FILES], "extraPaths": [str(ROOT)]}
    config["typeCheckingMode"] = "standard"
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    where = ("-p", tmp_path, "--pythonpath", sys.executable)
    done = run("-m", "basedpyright", *where, "--level", "error", "--outputjson")
    errors = json.loads(done.stdout)["generalDiagnostics"]
    starts = [(Path(x["file"]).name, x["range"]["start"]["line"] + 1) for x in errors]
    check_reports(starts)


@pytest.mark.slow  # mypy reads all of torch: 25 s, and 5 s from its cache
def test_mypy_reports_the_mistakes_alone():
    pytest.importorskip("mypy")
    files = (HERE / name for name in FILES)
    done = run("-m", "mypy", "--strict", "--config-file=", *files, MYPYPATH=str(ROOT))
    errors = [line.split(":", 2) for line in done.stdout.splitlines() if ": error:" in line]
    assert errors, done.stderr
    check_reports((Path(name).name, int(line)) for name, line, _ in errors)


@pytest.mark.slow
def test_the_types_of_public_names_are_known():
    """At least 95 % of the names of all modules, as `basedpyright --verifytypes` counts them."""
    pytest.importorskip("basedpyright")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = ("-m", "basedpyright", "--verifytypes", "onchip", "--ignoreexternal", "--outputjson")
    report = json.loads(run(*command, PATH=path).stdout)["typeCompleteness"]
    unknown = [x["name"] for x in report["symbols"] if x["isExported"] and not x["isTypeKnown"]]
    assert report["completenessScore"] >= 0.95, unknown
