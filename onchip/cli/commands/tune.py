"""`onchip tune`."""

from types import SimpleNamespace
from typing import Any

import click

from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.options import json_file, list_option
from onchip.cli.output import check_writable, make_console
from onchip.cli.progress import ProgressDisplay
from onchip.core.extras import require


@click.command(
    cls=Command,
    examples=(
        ("onchip tune --quick", "One field at a time; some minutes."),
        ("onchip tune --kernel hopper --pass forward --head-dims 64 128", "A few rows in full."),
        ("onchip tune --json rows.json", "Every measurement as a results file."),
        ("onchip tune --write", "Keep the faster rows: later calls on this GPU use them."),
    ),
)
@list_option(
    "--kernel", "NAME", "Search rows of hopper or triton.", click.Choice(("hopper", "triton"))
)
@list_option(
    "--pass",
    "PASS",
    "Search rows of forward, backward or decode.",
    click.Choice(("forward", "backward", "decode")),
)
@list_option("--head-dims", "D", "Search rows of these head dimensions.")
@click.option("--quick", is_flag=True, help="Change one field at a time, in few rounds.")
@click.option("--write", is_flag=True, help="Keep the faster rows for later calls on this GPU.")
@json_file("every measurement")
def command(**options: Any) -> int:
    """Measure the tile tables of the GPU kernels anew on this GPU.

    Prints the rows that are faster than the current ones. Ctrl-C ends with the searches that were
    completed.
    """
    require("onchip tune", "cli", "rich")
    args = SimpleNamespace(**options)
    from onchip.cli import tune
    from onchip.cli.bench import harness
    from onchip.kernels import tuned

    if args.json:
        check_writable(args.json)
    if args.write:
        tuned.make_folder()
    console = make_console(args.json)
    session = harness.Session(args.quick)
    choose = lambda capability: tune.knobs(capability, args.kernel, options["pass"], args.head_dims)
    with ProgressDisplay(console) as session.report_progress:
        searches = tune.run(session, choose)
    if args.json:
        harness.write_results(session.rows, args.json, session.where)
    harness.print_session(console, session, [])
    tune.print_searches(console, searches)
    if args.write and searches:
        path = tune.write(searches, tune.this_gpu())
        console.print(f"Written: {path}", markup=False, highlight=False, soft_wrap=True)
    if session.was_interrupted:
        raise KeyboardInterrupt(harness.describe_rows(session, args.json))
    return exit_codes.FAILED if session.refused else exit_codes.OK
