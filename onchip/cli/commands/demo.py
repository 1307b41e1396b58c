"""`onchip demo`."""

from pathlib import Path

import click

from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.options import FILE
from onchip.cli.output import check_writable, make_console, open_page
from onchip.cli.progress import ProgressDisplay
from onchip.core.extras import require


@click.command(
    cls=Command,
    examples=(
        ("onchip demo", "About a minute; opens the report in a browser."),
        ("onchip demo --quick --no-open", "A few seconds, and no browser."),
    ),
)
@click.option("--quick", is_flag=True, help="Measure short lengths only, in a few seconds.")
@click.option(
    "--report",
    type=FILE,
    default=Path("onchip-demo.html"),
    metavar="FILE",
    help="Write the report to this HTML file.",
)
@click.option("--no-open", is_flag=True, help="Do not open the report in a browser.")
def command(quick: bool, report: Path, no_open: bool) -> int:
    """Compare standard attention, torch SDPA and onchip here.

    Every result is compared with fp64 before its time and memory are shown. Ctrl-C ends with a
    report of what was measured so far.
    """
    require("onchip demo", "cli", "rich", "matplotlib")
    from onchip.cli import demo
    from onchip.cli import report as pages

    check_writable(report)
    console = make_console()
    with ProgressDisplay(console) as report_progress:
        results = demo.run(quick, report_progress)
    if results.interrupted_at and not results.lengths:
        raise KeyboardInterrupt("nothing was measured yet")
    pages.print_results(console, results)
    pages.write_html(results, report)
    if results.interrupted_at:
        raise KeyboardInterrupt(f"{report} has what was measured before {results.interrupted_at}")
    console.print(f"\nReport: [bold]{report}[/bold] ({results.elapsed_s:.0f} s in all)")
    if not no_open:
        open_page(report.resolve().as_uri())
    return exit_codes.OK
