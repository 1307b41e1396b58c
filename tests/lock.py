"""Writes constraints-hashed.txt: python tests/lock.py [https://index/simple]

It has the pins of constraints.txt, each with the SHA-256 of every wheel that the index has for
Python 3.11 to 3.14 on any platform, or of the source if the index has no wheel. torch is left out:
its files differ between indexes (PyPI, the index of CPU builds, a vendor).
"""

import html
import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYTHONS = re.compile(r"^(cp31[1234]|py3|py2\.py3|cp3\d+-abi3)")
LEFT_OUT = {"torch"}
HEAD = """\
# Written by `make lock` from constraints.txt; see docs/dependencies.md for how to install from it.
# torch is not here: install it first, from the index of your choice.
"""


def main(index: str = "https://pypi.org/simple") -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split(" ")[0] for line in lines if line and not line.startswith("#")]
    parts = [locked(index, *pin.split("==")) for pin in pins if pin.split("==")[0] not in LEFT_OUT]
    (ROOT / "constraints-hashed.txt").write_text(HEAD + "".join(parts))


def locked(index: str, name: str, version: str) -> str:
    """One pin with its hashes, sorted, so that a file added to the index changes one line."""
    with urlopen(f"{index}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    links = [
        html.unescape(link) for link in re.findall(r'href="([^"]+#sha256=[0-9a-f]{64})"', page)
    ]
    digests = {Path(unquote(urlsplit(link).path)).name: link[-64:] for link in links}
    wheels = {digest for file, digest in digests.items() if fits(file, version)}
    sources = {digest for file, digest in digests.items() if is_source(file, version)}
    if not (wheels or sources):
        raise SystemExit(f"{index} has no hashes of {name}=={version}")
    marker = " ; sys_platform == 'linux'" if name == "triton" else ""
    hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(wheels or sources))
    return f"{name}=={version}{marker}{hashes}\n"


def fits(file: str, version: str) -> bool:
    try:
        _, wheel_version, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    names = [f"{tag.interpreter}-{tag.abi}" for tag in tags]
    return wheel_version == Version(version) and any(PYTHONS.match(name) for name in names)


def is_source(file: str, version: str) -> bool:
    return file.endswith(f"-{version}.tar.gz")


if __name__ == "__main__":
    main(*sys.argv[1:])
