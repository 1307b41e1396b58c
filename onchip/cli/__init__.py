"""The command line: `onchip COMMAND ...`, or `python -m onchip COMMAND ...`.

main          --version; a sentence where click is missing
root.py       the group of commands; errors become sentences and exit codes
command.py    one style of help and of lists for all commands
options.py    types of values, and options that several commands share
commands/     a file for each command: its options, and the order of its work
others        the work itself, which needs torch: demo, doctor, tune, report, bench/
"""

import sys
from collections.abc import Sequence

import onchip
from onchip.cli import exit_codes
from onchip.core.extras import advise

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, command: str = "", program: str = "onchip") -> int:
    """Run the command line and return its exit code. command: run this one alone, which help and
    errors then call `program`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:  # needs no click, nor the time to import it
        print(f"onchip {onchip.__version__}")
        return exit_codes.OK
    try:
        from onchip.cli.root import run
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print(f"onchip: the command line needs click: {advise('cli')}", file=sys.stderr)
        return exit_codes.NOT_SERVED
    return run(words, command, program)
