"""The group of all commands. Errors become one sentence on standard error and an exit code.

A command is imported when it runs or when its help is printed, and imports torch only when it runs:
help, versions and completion are printed without torch, which takes seconds to load.
"""

import os
import sys
from importlib import import_module

import click
from click.shell_completion import shell_complete

import onchip
from onchip.cli import exit_codes
from onchip.cli.command import SETTINGS, Command
from onchip.core.extras import MissingPackageError

NAMES = (
    *("demo", "doctor", "explain", "generate", "serve", "lab"),
    *("bench", "tune", "version", "completion"),
)
COMPLETE_VARIABLE = "_ONCHIP_COMPLETE"


class Root(click.Group):
    """Commands by name, each the `command` of its module in onchip.cli.commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(cmd_name) if cmd_name in NAMES else None


def load(name: str) -> Command:
    return import_module(f".commands.{name}", "onchip.cli").command


@click.group(
    cls=Root,
    name="onchip",
    context_settings=SETTINGS,
    epilog="Exit codes: 0 success, 1 a missed threshold or a failed check, 2 wrong usage, 3 not "
    "served or a missing package, 130 Ctrl-C.",
)
@click.version_option(onchip.__version__, message="%(prog)s %(version)s", prog_name="onchip")
def root() -> None:
    """Exact attention for PyTorch that knows where its bytes are."""


def run(words: list[str], name: str, program: str) -> int:
    """The exit code of a command line; name: of a single command in place of the group."""
    command = load(name) if name else root
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return shell_complete(command, {}, program, COMPLETE_VARIABLE, instruction)
    try:
        with command.make_context(program, words) as context:
            code = command.invoke(context) or exit_codes.OK
        sys.stdout.flush()  # here, where a broken pipe is caught
        return code
    except click.exceptions.Exit as end:  # after --help and --version
        return end.exit_code
    except BrokenPipeError:
        return _end_broken_pipe()
    except (click.ClickException, ValueError, OSError, KeyboardInterrupt) as error:
        return _report(error)


def _report(error: BaseException) -> int:
    """Print the sentence of an error; its exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        print(error.format_message(), file=sys.stderr)
        return exit_codes.USAGE
    if isinstance(error, KeyboardInterrupt):
        sentence = f"stopped: {error}" if str(error) else "stopped"
    elif isinstance(error, click.ClickException):
        sentence = _describe_misuse(error)
    else:
        sentence = str(error)
    print(f"onchip: {sentence}", file=sys.stderr)
    return _exit_code(error)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    if isinstance(error, MissingPackageError) or _is_unsupported(error):
        return exit_codes.NOT_SERVED
    return exit_codes.USAGE


def _is_unsupported(error: BaseException) -> bool:
    """Whether it is an UnsupportedError. If its module is not loaded, nothing has raised one, and
    loading it here would load torch.
    """
    problem = sys.modules.get("onchip.core.problem")
    return problem is not None and isinstance(error, problem.UnsupportedError)


def _describe_misuse(error: click.ClickException) -> str:
    """click's message as one of our sentences, and where to read on."""
    message = error.format_message().rstrip(".").replace(". (", " (")
    sentence = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    return sentence if context is None else f"{sentence}; see `{context.command_path} --help`"


def _end_broken_pipe() -> int:
    """Python flushes standard output at exit, which would fail again: let it write to nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_codes.BROKEN_PIPE
