"""ring-flash-attention's own test scripts, unmodified, with onchip in the place of flash_attn.

    python tests/programs/ring_flash_attention.py CHECKOUT [--ranks 2] [--scripts NAME ...]

CHECKOUT is a clone of its repository. Each script runs once in every rank, with gloo in the place
of nccl and the CPU in the place of cuda. An empty module replaces its adapter to transformers,
which needs an older version of that package; nothing else changes. A script prints the
differences between the results of the ring and of one process. It passes if every rank exits with
0, every difference of out and of the gradients is within two units in the last place of bf16 at the
largest value of the tensor, and every difference of lse is within 1e-4.

This is a program. pytest does not collect it.
"""

import argparse
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from flash_on_cpu import OnCpu

TWO_ULPS = 2.0**-6  # of bf16, relative to the largest value
LSE = 1e-4
SCRIPTS = (
    "test_llama3_flash_attn_varlen_func.py",
    "test_llama3_prepare_cu_seqlens.py",
    "test_ring_flash_attn_func.py",
    "test_ring_flash_attn_varlen_func.py",
    "test_stripe_flash_attn_func.py",
    "test_zigzag_ring_flash_attn_func.py",
    "test_zigzag_ring_flash_attn_varlen_func.py",
)  # not test_triton_kernels.py: kernels of its own, for a GPU, without flash_attn
TIMEOUT_S = 900


def run_rank(checkout: Path, script: str) -> None:
    """Run one rank of one script. RANK and WORLD_SIZE are in the environment."""
    import onchip.integrations.flash_attn

    onchip.integrations.flash_attn.install()
    init = dist.init_process_group
    dist.init_process_group = lambda backend=None, **rest: init("gloo", **rest)
    sys.path[:0] = [str(checkout), str(checkout / "test")]
    sys.argv = [script]
    adapter = ModuleType("ring_flash_attn.adapters")
    adapter.substitute_hf_flash_attn = adapter.update_ring_flash_attn_params = None
    sys.modules[adapter.__name__] = adapter
    with OnCpu():
        runpy.run_path(str(checkout / "test" / script), run_name="__main__")


def run_script(checkout: Path, script: str, ranks: int) -> tuple[bool, str]:
    """(whether the script passes, its output)"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).resolve()), str(checkout), "--rank-of", script]
    started = [
        subprocess.Popen(
            command,
            env=world | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    except subprocess.TimeoutExpired:
        return False, f"no end after {TIMEOUT_S} s"
    finally:
        for process in started:
            process.kill()
    ended = all(process.returncode == 0 for process in started)
    wrong = find_excesses(printed)
    return ended and not wrong, "\n".join([*printed, *wrong])


def find_excesses(printed: list[str]) -> list[str]:
    """The differences beyond their bounds.

    Rank 0 prints `name: max A, mean B` for all ranks, or `name:` and then `[0] max A, mean B`. The
    other ranks print only their `[rank] ...` lines, in the same order. A name that contains `diff`
    is a difference from the tensor of the name before it.
    """
    own = [iter(re.findall(r"^\[\d+\] max (\S+), mean", text, re.M)) for text in printed]
    largest, wrong = [0.0] * len(printed), []
    lines = re.findall(r"^([^#\[\]\n]+?):(?: max (\S+), mean .*)?$", printed[0], re.M)
    for name, shared in lines:
        for rank, values in enumerate(own):
            number = float(shared or next(values, "nan"))
            bound = LSE if "lse" in name else TWO_ULPS * largest[rank]
            if "diff" in name and not number <= bound:
                wrong.append(f"rank {rank}, {name}: {number} is beyond the bound {bound:.3g}")
            if "diff" not in name and "lse" not in name:
                largest[rank] = number
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    if args.rank_of:
        run_rank(checkout, args.rank_of)
        return 0
    failed = 0
    for script in args.scripts:
        began = time.monotonic()
        passed, printed = run_script(checkout, script, args.ranks)
        failed += not passed
        took = time.monotonic() - began
        print(f"{'passed' if passed else 'FAILED'} {script} ({took:.0f} s)", flush=True)
        if not passed:
            print(printed, flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
