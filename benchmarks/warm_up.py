"""Compile the kernels of a benchmark in parallel processes, so that its own process finds them in
the caches of Triton and Inductor on disk.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from onchip.cli.bench import gpu
from onchip.cli.bench.gpu import RowSpec
from onchip.cli.bench.harness import Session

LIMIT_S = 100.0  # of one process; what it has not compiled is compiled when it is measured


def run_all(
    job: Callable[..., None], arguments: Sequence[tuple], say: Callable[[str], None]
) -> None:
    """job(*arguments) for all arguments, each in a process of its own, as many at once as there
    are CPUs. A process that fails loses only time, and is a sentence of `say`.
    """
    with _shared_caches(), ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, code in zip(arguments, pool.map(partial(_run, job), arguments), strict=True):
            if code != 0:
                say(f"{name[0]} was not compiled ahead: its process ended with {code}")


def _run(job: Callable[..., None], arguments: tuple) -> int | None:
    """The exit code of job(*arguments) in a process."""
    process = multiprocessing.get_context("spawn").Process(target=job, args=arguments, daemon=True)
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


@contextmanager
def _shared_caches() -> Iterator[None]:
    """One folder for all kernels of Triton, which Inductor would change otherwise, and no pools of
    compilers below the processes.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    before = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        if before is not None:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = before


def run_once(session: Session, specs: Sequence[RowSpec], backward: bool) -> None:
    """One call of each candidate; one that fails will be refused later."""
    for candidate in gpu.all_candidates(specs):
        try:
            candidate.jobs(backward)[0]()
        except Exception as error:
            session.note(f"{candidate.label}: {gpu.sentence(error)}")
        gpu.still_there(session.device)
