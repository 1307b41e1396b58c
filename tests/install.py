"""Installs onchip as users do, into empty environments: python tests/install.py PYTHON ...

    python tests/install.py python3.11 python3.13 --folder /tmp/install

`make dist` writes the wheel and the source distribution to dist/ before. For each Python, one
environment gets torch, which pip fetches. Three more take torch from there, because it has several
GB with its CUDA libraries. pip installs into them the wheel, the source distribution and a clone of
this repository. Each must run the first Python block of the README and `onchip --version`, and pass
`pip check`. With --folder the environments are kept, and those with torch are used again.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
PLACE = "import onchip, sys; assert onchip.__file__.startswith(sys.prefix), onchip.__file__\n"
SYSTEM = "import platform as p, torch; print(p.python_version(), p.machine(), torch.__version__)"


def main(pythons: list[str], folder: Path) -> None:
    (wheel,), (sdist,) = ((ROOT / "dist").glob(form) for form in ("*.whl", "*.tar.gz"))
    for file in (wheel, sdist):
        print(f"{file.name}: {file.stat().st_size:,} bytes")
    clone = folder / "clone"
    if not clone.exists():
        run("git", "clone", "--quiet", ROOT, clone)
    for number, python in enumerate(pythons):
        torch = make_environment(folder / f"torch-{number}", python)
        run(torch, "-m", "pip", "install", "--quiet", "torch>=2.11")
        print(f"\nPython, machine, torch: {run(torch, '-c', SYSTEM)}")
        for form, source in {"wheel": wheel, "sdist": sdist, "clone": clone}.items():
            print(f"  {form}: {try_out(folder / f'{form}-{number}', python, torch, source)}")


def try_out(folder: Path, python: str, torch: str, source: Path) -> str:
    """A line on what was installed into a new environment. Raises if a check fails."""
    installed = make_environment(folder, python)
    add_packages_of(installed, torch)
    start = time.perf_counter()
    run(installed, "-m", "pip", "install", "--quiet", source)
    seconds = time.perf_counter() - start
    checked = run(installed, "-m", "pip", "check")
    return f"installed in {seconds:.1f} s; {check(installed, folder)}; pip check: {checked}"


def make_environment(folder: Path, python: str, *options: str) -> str:
    """Its Python. The environment has pip and nothing else."""
    if not folder.exists():
        run(python, "-m", "venv", *options, folder)
    return str(folder / "bin" / "python")


def add_packages_of(python: str, other: str) -> None:
    """Let the packages of another environment be imported, after those of this one."""
    site = Path(run(python, "-I", "-c", SITE))
    (site / "other.pth").write_text(run(other, "-I", "-c", SITE))


def check(python: str, folder: Path) -> str:
    """Run the README's first block and `onchip --version`, which must be of this environment."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    run(python, "-I", "-c", PLACE + block[1], cwd=folder)
    program = Path(python).with_name("onchip")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        version = run(program, "--version", cwd=folder)
        times.append(time.perf_counter() - start)
    return f"README block passes; {version} after {min(times):.2f} s"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints, without the packages that PYTHONPATH adds. Raises if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--folder", type=Path, help="kept (default: a temporary one)")
    args = parser.parse_args()
    if args.folder:
        main(args.pythons, args.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(args.pythons, Path(folder))
