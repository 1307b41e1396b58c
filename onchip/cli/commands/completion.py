"""`onchip completion`."""

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from onchip.cli import exit_codes
from onchip.cli.command import Command

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(
    cls=Command,
    examples=(
        ('eval "$(onchip completion bash)"', "In ~/.bashrc."),
        ('eval "$(onchip completion zsh)"', "In ~/.zshrc, after compinit."),
        ("onchip completion fish > ~/.config/fish/completions/onchip.fish", "Once."),
    ),
)
@click.argument("shell", type=click.Choice(tuple(SHELLS)))
def command(shell: str) -> int:
    """Print a completion script for bash, zsh or fish.

    It completes commands, options, values, and models of the Hub cache. bash: 4.4 or later.
    """
    from onchip.cli.root import COMPLETE_VARIABLE, root

    # Not the method of BashComplete: it starts a bash to find its version.
    print(ShellComplete.source(SHELLS[shell](root, {}, "onchip", COMPLETE_VARIABLE)))
    return exit_codes.OK
