"""DDP and FSDP2 on two ranks with gloo: losses and gradient norms equal SDPA's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

pytestmark = pytest.mark.programs

PROGRAM = Path(__file__).with_name("hf_ranks.py")


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_ranks(way, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [*launch, str(PROGRAM), way, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{way}: " in done.stdout
