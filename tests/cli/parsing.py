"""Parse command lines without running them."""

from types import SimpleNamespace

import click

from onchip.cli import root


def parse(words):
    """The values of a command's options, and `command`, its name. click.UsageError if a word is
    invalid.
    """
    name, *rest = words
    if name in ("--version", "--help"):
        return SimpleNamespace(command="")
    if name not in root.NAMES:
        raise click.UsageError(f"no such command {name}")
    with root.load(name).make_context(name, rest) as context:
        return SimpleNamespace(command=name, **context.params)


def commands():
    """Every command by its name."""
    return {name: root.load(name) for name in root.NAMES}
