"""The container file and the workflow of hosted CI agree with the repository."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_container_runs_as_a_user_and_checks_its_health():
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    for words in (rest.split() for step, rest in steps if step == "COPY"):
        assert all((ROOT / file).exists() for file in words[:-1])
    order = [step for step, _ in steps]
    assert order.index("RUN") < order.index("USER") < order.index("ENTRYPOINT")
    options = dict(steps)
    assert options["USER"] != "root" and len(steps) <= 10
    check = json.loads(options["HEALTHCHECK"].partition("CMD ")[2])
    ast.parse(check[-1])
    assert f":{options['EXPOSE']}/health" in check[-1]
    assert json.loads(options["ENTRYPOINT"])[:2] == ["onchip", "serve"]


def test_the_workflow_runs_the_same_script_and_may_only_read():
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    workflow = pytest.importorskip("yaml").safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    for step in steps:
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))
        assert "checkout" not in step.get("uses", "") or not step["with"]["persist-credentials"]
