"""examples/train_context_parallel.py: the loss curve is that of one process, fp64 within 1e-12."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "5", "--seqlen", "203", "--dtype", "float64"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(path, *options, ranks=1):
    runner = [] if ranks == 1 else [*TORCHRUN, str(ranks)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    program = ROOT / "examples" / "train_context_parallel.py"
    return subprocess.Popen(
        [sys.executable, *runner, program, *SMALL, *options, "--json", path],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(path, process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return json.loads(path.read_text()), output


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of one process."""
    path = tmp_path_factory.mktemp("alone") / "losses"
    return losses(path, start(path))[0]


def check(tmp_path, expected, *options):
    path = tmp_path / "losses"
    ring_losses, output = losses(path, start(path, *options, ranks=4))
    assert ring_losses == pytest.approx(expected, rel=0, abs=1e-12)
    assert len(ring_losses) == 5 and f"step   4  loss {ring_losses[-1]:.6f}" in output
    assert ring_losses[-1] < ring_losses[0]


def test_four_ranks_train_like_one(tmp_path, expected):
    check(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_four_ranks_share_a_sequence(tmp_path, expected, layout):
    check(tmp_path, expected, "--cp", "4", "--layout", layout)
