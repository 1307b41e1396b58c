"""`onchip version`."""

import click

import onchip
from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.options import json_flag
from onchip.cli.output import print_json

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "fastapi", "click", "rich")


@click.command(
    cls=Command,
    examples=(("onchip version --json", "The same for a program; nothing is imported."),),
)
@json_flag("the versions")
def command(as_json: bool) -> int:
    """Print the versions of onchip, Python and further packages."""
    import platform

    versions = {"onchip": onchip.__version__, "python": platform.python_version()}
    versions |= {name: _installed(name) for name in PACKAGES}
    if as_json:
        print_json(versions | {"platform": platform.platform()})
    else:
        for name, installed in versions.items():
            print(f"{name:<12} {installed or 'not installed'}")
    return exit_codes.OK


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
