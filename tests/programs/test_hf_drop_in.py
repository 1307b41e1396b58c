"""Falcon, GPT-J and GPT-Neo refuse the implementation "onchip", and run "flash_attention_2" through
the drop-in, as the error message suggests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.programs

PROGRAM = Path(__file__).with_name("hf_drop_in.py")


def test_models_with_a_table_of_their_own():
    paths = [str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("is as eager") == 3
