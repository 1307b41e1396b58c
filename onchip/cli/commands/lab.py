"""`onchip lab`."""

from pathlib import Path

import click

from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.options import FILE, model_option
from onchip.cli.output import open_page


@click.command(
    cls=Command,
    examples=(
        ("onchip lab", "Serve the page on this machine and open it in a browser."),
        ("onchip lab --out FOLDER", "Write FOLDER/index.html, which needs no server."),
    ),
)
@click.option(
    "--out", type=FILE, metavar="FOLDER", help="Write the page there, and start no server."
)
@model_option()
@click.option("--host", default="127.0.0.1", metavar="HOST", help="Address to serve on.")
@click.option("--port", type=int, default=8001, metavar="PORT", help="Port; 0: any free one.")
@click.option("--no-open", is_flag=True, help="Do not open the page in a browser.")
def command(out: Path | None, model: str, host: str, port: int, no_open: bool) -> int:
    """Open figures to play with, as a page.

    Every figure is recorded from real executions first, in a few seconds. Ctrl-C ends the server.
    """
    from onchip import models
    from onchip.lab import page, record, serve

    models.about(model)  # raises if there is no such model
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"cannot write to {out}: it is a file, not a folder")
    data = record.record_figures(model)
    if out is not None:
        print(page.write(out, data))
        return exit_codes.OK
    with serve.LabServer(host, port, data) as server:
        print(f"onchip lab is at {server.url} (Ctrl+C ends it)", flush=True)
        if not no_open:
            open_page(server.url)
        server.serve_forever()
    return exit_codes.OK
