"""`onchip doctor`."""

import click

from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.options import json_flag, model_option
from onchip.cli.output import STANDARD_OUTPUT, make_console, print_json
from onchip.cli.progress import Interruptible, ProgressDisplay
from onchip.core.extras import require


@click.command(
    cls=Command,
    examples=(
        ("onchip doctor", "Versions, devices, and the kernels that they can run."),
        ("onchip doctor --model Qwen/Qwen3-0.6B", "How this model would be served."),
        ("onchip doctor --measure --json > machine.json", "All of it for a program."),
    ),
)
@model_option(default=None, help="Report how this model would be served, and nothing else.")
@click.option(
    "--measure",
    is_flag=True,
    help="Measure every memory as well, and on a GPU how long first calls compile.",
)
@json_flag("the report")
def command(model: str | None, measure: bool, as_json: bool) -> int:
    """Report what this machine can run, and why not the rest.

    With --model the exit code is 1 if the model is not served.
    """
    require("onchip doctor", "cli", "rich")
    if model is not None:
        return _report_model(model, as_json)
    from onchip.cli import doctor

    console = make_console(STANDARD_OUTPUT if as_json else None)
    if not as_json:
        doctor.print_report(console)
    memories, first_calls = [], []
    with Interruptible() as work:
        if measure:
            with ProgressDisplay(console) as report_progress:
                for memory in doctor.measure_levels(report_progress):
                    memories.append(memory)
            first_calls = doctor.first_calls()
    if as_json:
        measured = {"memories": memories, "first_calls": first_calls} if measure else {}
        print_json(doctor.report() | measured)
    elif measure:
        doctor.print_levels(console, memories)
        doctor.print_first_calls(console, first_calls)
    work.end("the measurements are not complete")
    return exit_codes.OK


def _report_model(model: str, as_json: bool) -> int:
    from onchip import models
    from onchip.cli import doctor

    models.resolve(model)  # raises if there is no such model
    served, finding = doctor.model_finding(model)
    if as_json:
        print_json({"served": served, **finding._asdict()})
    else:
        doctor.print_model(make_console(), finding)
    return exit_codes.OK if served else exit_codes.FAILED
