"""`onchip serve`."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.config_file import format_options, read_options
from onchip.cli.options import (
    FILE,
    POSITIVE,
    device_option,
    kv_dtype_option,
    max_model_len_option,
    model_dtype_option,
    model_option,
    speculative_config_option,
)
from onchip.core.extras import MissingPackageError, advise
from onchip.server.tools import DIALECTS


def _limit(name: str, default: float, metavar: str, help: str) -> Callable:
    return click.option(name, type=type(default), default=default, metavar=metavar, help=help)


@click.command(
    cls=Command,
    name="serve",
    examples=(
        ("onchip serve", "The built-in model on port 8000."),
        ("onchip serve --model Qwen/Qwen3-0.6B --api-key-file keys.txt", "A model, with keys."),
        ("onchip serve --replicas 3", "Three servers behind one address, on Ray Serve."),
        (
            "onchip serve --model models/Qwen3-8B --tensor-parallel-size 2",
            "One model, divided among two processes.",
        ),
        ("onchip serve --port 9000 --print-config > serve.toml", "Write a file of options."),
        ("onchip serve --config serve.toml", "Serve with these options."),
    ),
)
@click.option(
    "--config",
    type=FILE,
    metavar="FILE",
    is_eager=True,
    callback=read_options,
    help="Read options from a TOML file; those of the command line override them.",
)
@click.option(
    "--print-config", is_flag=True, help="Print all options as such a file, and serve nothing."
)
@model_option()
@click.option(
    "--name",
    metavar="NAME",
    show_default="the folder's name, or the Hub id",
    help="Name of the model for clients.",
)
@click.option("--host", default="127.0.0.1", metavar="HOST", help="Address to serve on.")
@click.option("--port", type=int, default=8000, metavar="PORT", help="Port; 0: any free one.")
@click.option(
    "--api-key-file",
    type=FILE,
    metavar="FILE",
    help="Read API keys, one a line; the variable ONCHIP_API_KEYS has more.",
)
@click.option(
    "--api-key", metavar="KEY", help="Accept this API key; it is visible in the process list."
)
@click.option(
    "--replicas",
    type=POSITIVE,
    default=1,
    metavar="N",
    help="Number of servers behind this address, on Ray Serve; 1: in this process.",
)
@click.option(
    "--tensor-parallel-size",
    type=POSITIVE,
    default=1,
    metavar="N",
    help="Number of processes of this machine that divide the model; on GPUs, one each.",
)
@device_option()
@model_dtype_option()
@kv_dtype_option()
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of requests that bring none.")
@max_model_len_option()
@click.option(
    "--max-num-seqs",
    type=POSITIVE,
    default=256,
    metavar="N",
    help="Number of samples that run at a time.",
)
@click.option(
    "--pages",
    type=POSITIVE,
    metavar="N",
    show_default="as many as fit",
    help="Number of pages of the key/value cache.",
)
@click.option(
    "--page-size", type=POSITIVE, default=16, metavar="N", help="Number of tokens of a page."
)
@_limit("--swap-gib", 4.0, "GIB", "Host memory for preempted requests.")
@_limit("--kv-offloading-size", 0.0, "GIB", "Host memory for requests longer than the cache.")
@_limit("--gpu-memory-utilization", 0.9, "SHARE", "Share of the GPU's memory, with weights.")
@click.option("--no-prefix-caching", is_flag=True, help="Share no prefixes between requests.")
@click.option(
    "--disable-cascade-attn/--no-disable-cascade-attn",
    default=True,
    help="Read the pages that requests share once for each of them, or once for all.",
)
@click.option(
    "--prefill-precision",
    type=click.Choice(("fp8", "auto")),
    help="Attention of long prompts in 8 bits, approximately; auto: where it is faster.",
)
@click.option(
    "--fused-decode/--no-fused-decode",
    default=True,
    help="Steps of few tokens: norms and gates in one launch with matrix products, or apart.",
)
@click.option(
    "--fused-experts/--no-fused-experts",
    default=True,
    help="Layers of experts: three launches after their sorting, or the products of torch.",
)
@speculative_config_option()
@click.option(
    "--reproducible",
    is_flag=True,
    help="Log probabilities have the bits of the model's forward, whatever runs beside a request.",
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(("auto", *DIALECTS)),
    default="auto",
    help="How the model writes calls of tools; auto: as its chat template, or its family.",
)
@_limit("--max-queue", 4096, "N", "Number of requests that wait; more get status 429.")
@_limit("--max-request-s", 600.0, "S", "Time that a request may take.")
@_limit("--max-body-mib", 4.0, "MIB", "Size of the body of a request.")
@_limit("--max-bodies-mib", 64.0, "MIB", "Size of all bodies that are being read.")
@_limit("--max-stall-s", 30.0, "S", "Time of a step after which the server is not ready.")
@_limit("--drain-s", 30.0, "S", "Time to finish requests after SIGTERM or Ctrl-C.")
@click.option(
    "--log-level",
    type=click.Choice(("debug", "info", "warning", "error")),
    default="info",
    help="Least level to log; info has a line for each request.",
)
@click.pass_context
def command(ctx: click.Context, config: Path | None, print_config: bool, **options: Any) -> int:
    """Serve a model behind the OpenAI API, with a live page.

    SIGTERM and Ctrl-C finish the open requests first; a second one ends at once.
    """
    if print_config:
        print(format_options(ctx.command, options))
        return exit_codes.OK
    try:
        from onchip.server import command as server
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"onchip serve needs {error.name}: {advise('serve')}") from None
    return server.serve(SimpleNamespace(**options))
