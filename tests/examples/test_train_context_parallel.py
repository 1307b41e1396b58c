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


def check(tmp_path, *options):
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    processes = start(alone), start(ranks, *options, ranks=4)
    expected, _ = losses(alone, processes[0])
    ring_losses, output = losses(ranks, processes[1])
    assert ring_losses == pytest.approx(expected, rel=0, abs=1e-12)
    assert len(ring_losses) == 5 and f"step   4  loss {ring_losses[-1]:.6f}" in output
    assert ring_losses[-1] < ring_losses[0]


def test_four_ranks_train_like_one(tmp_path):
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_four_ranks_share_a_sequence(tmp_path, layout):
    check(tmp_path, "--cp", "4", "--layout", layout)
