"""examples/train_context_parallel.py: the loss curve is that of one process, fp64 within 1e-12."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from examples import train_context_parallel as program
from tests.parallel.pool import Pool

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "5", "--seqlen", "203", "--dtype", "float64"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(path, *options, ranks=1):
    runner = [] if ranks == 1 else [*TORCHRUN, str(ranks)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    file = ROOT / "examples" / "train_context_parallel.py"
    return subprocess.Popen(
        [sys.executable, *runner, file, *SMALL, *options, "--json", path],
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


@pytest.fixture
def pool():
    ranks = Pool(4)
    yield ranks
    ranks.close()


def train_with_each_layout(comm):
    mesh = init_device_mesh("cpu", (1, comm.size), mesh_dim_names=("dp", "cp"))
    args = Namespace(steps=5, batch=4, dtype="float64")
    layouts = {name: make(comm.size) for name, make in program.LAYOUTS.items()}
    parts = {name: program.BatchPart(mesh, layout, 203) for name, layout in layouts.items()}
    return {name: program.train(part, args) for name, part in parts.items()}


@pytest.mark.slow
def test_four_ranks_share_a_sequence(pool, expected):
    """As `--cp 4 --layout NAME`, in ranks that are started once."""
    for losses_of in pool.run(4, train_with_each_layout, timeout_s=120):
        assert [*losses_of] == ["contiguous", "zigzag", "striped"]
        for ring_losses in losses_of.values():
            assert ring_losses == pytest.approx(expected, rel=0, abs=1e-12)


def test_the_command_takes_a_layout(tmp_path, expected):
    path = tmp_path / "losses"
    one, _ = losses(path, start(path, "--cp", "1", "--layout", "striped"))
    assert one == pytest.approx(expected, rel=0, abs=1e-12)
