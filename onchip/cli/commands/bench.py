"""`onchip bench`, and `python -m benchmarks` with the further suites of the repository."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import click
from click.shell_completion import CompletionItem

from onchip.cli import bench, exit_codes
from onchip.cli.command import Command
from onchip.cli.options import FILE, KV_DTYPES, POSITIVE, PRECISIONS, json_file, list_option
from onchip.cli.output import STANDARD_OUTPUT, check_writable, make_console, print_json
from onchip.cli.progress import Interruptible, ProgressDisplay
from onchip.core.extras import require


def _complete_name(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
    names = bench.BENCHES.items()
    return [CompletionItem(n, help=b.summary) for n, b in names if n.startswith(incomplete)]


@click.command(
    cls=Command,
    examples=(
        ("onchip bench", "List the benchmarks."),
        ("onchip bench cpu --quick", "Small sizes, in a minute; no thresholds."),
        ("onchip bench cpu --json cpu.json", "In full, with a results file."),
        ("onchip bench forward --seqlens 4096 16384 --plot forward.svg", "Two lengths on a GPU."),
    ),
)
@click.argument("name", required=False, shell_complete=_complete_name)
@click.option("--quick", is_flag=True, help="Use small sizes, and check no thresholds.")
@json_file("the rows")
@click.option(
    "--plot", type=FILE, metavar="FILE", help="Draw speeds or memory to a .svg or .png file."
)
@list_option("--only", "PART", "Run these parts of the benchmark.", str)
@click.option(
    "--threads", type=POSITIVE, default=2, metavar="N", help="Number of threads on a CPU."
)
@list_option("--seqlens", "N", "GPU: measure these sequence lengths.")
@list_option("--head-dims", "D", "GPU: measure these head dimensions.")
@list_option(
    "--groups", "G", "forward, backward: measure these numbers of query heads per key head."
)
@click.option("--flex", is_flag=True, help="GPU: measure FlexAttention too, which compiles long.")
@list_option(
    "--kv-dtype",
    "DTYPE",
    "Use caches of fp8 or int8 (paged: against 16 bits; serving: with such a cache).",
    click.Choice(KV_DTYPES),
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    show_default="16 bits",
    help="forward: multiply operands of 8 bits.",
)
@click.option(
    "--seconds",
    type=POSITIVE,
    metavar="N",
    show_default="the benchmark's own",
    help="serving: duration of the load over HTTP.",
)
@click.option("--simulate", is_flag=True, help="ring: simulate machines that are not here.")
def command(**options: Any) -> int:
    """Run a benchmark and check its thresholds.

    NAME is a benchmark; without NAME they are listed. Rows are printed and written as they are
    measured, so Ctrl-C loses none. The exit code is 1 if a threshold is missed or a row is refused.
    """
    args = SimpleNamespace(**options)
    if args.name is None:
        return _list(args)
    require("onchip bench", "cli", "rich", *(["matplotlib"] if args.plot else []))
    module = bench.load(args.name, args.precision)
    _check_options(args, getattr(module, "PARTS", ()))
    console = make_console(args.json)
    session = _session(args, console)
    with Interruptible() as work, ProgressDisplay(console) as session.report_progress:
        module.run(session)
    if work.was_interrupted:
        _keep_partial(args, console, session)
    _keep_results(args, console, session)
    return _check_thresholds(args, console, session, module.THRESHOLDS)


def _list(args: SimpleNamespace) -> int:
    if args.json not in (None, STANDARD_OUTPUT):
        context = click.get_current_context()
        raise click.UsageError(f"--json {args.json} is a file, and NAME is missing", context)
    if args.json:
        print_json({name: benchmark.summary for name, benchmark in bench.BENCHES.items()})
        return exit_codes.OK
    for name, benchmark in bench.BENCHES.items():
        print(f"{name:<10} {benchmark.summary}")
    return exit_codes.OK


def _check_options(args: SimpleNamespace, parts: Sequence[str]) -> None:
    benches = bench.BENCHES
    if args.simulate and not benches[args.name].simulates:
        known = ", ".join(name for name, b in benches.items() if b.simulates)
        known = known or "`python -m benchmarks ring`"
        raise ValueError(f"{args.name} simulates no machines; --simulate is for: {known}")
    if args.kv_dtype and not benches[args.name].has_cache:
        known = ", ".join(name for name, b in benches.items() if b.has_cache)
        raise ValueError(f"{args.name} has no cache to choose; --kv-dtype is for: {known}")
    if args.groups and (args.precision or not benches[args.name].has_groups):
        known = ", ".join(name for name, b in benches.items() if b.has_groups)
        raise ValueError(f"--groups is for operands of 16 bits, in: {known}")
    drawn = [name for name, b in benches.items() if b.report or b.plots]
    if args.plot and args.name not in drawn:
        raise ValueError(f"{args.name} draws nothing; --plot is for: {', '.join(drawn)}")
    for part in args.only:
        if part not in parts:
            known = f"choose from: {', '.join(parts)}" if parts else "it has none"
            raise ValueError(f"{args.name} has no part {part!r}; {known}")
    for path in filter(None, (args.json, args.plot)):
        check_writable(path)


def _session(args: SimpleNamespace, console: Any) -> Any:
    """A session that prints each row and writes it to the results file at once."""
    from onchip.cli.bench import harness

    has_own_tables = bench.report(args.name) is not None
    is_file = args.json not in (None, STANDARD_OUTPUT)

    def keep(row: harness.Row) -> None:
        if not has_own_tables:
            harness.print_row(console, row)
        if is_file:
            harness.write_results(session.rows, args.json, session.where)

    session = harness.Session(
        args.quick,
        args.threads,
        keep=keep,
        say=partial(console.print, markup=False, highlight=False, soft_wrap=True),
        seqlens=args.seqlens,
        head_dims=args.head_dims,
        groups=args.groups,
        only=args.only,
        flex=args.flex,
        seconds=args.seconds or 0,
        simulate=args.simulate,
        kv_dtypes=args.kv_dtype,
        precision=args.precision,
    )
    return session


def _keep_partial(args: SimpleNamespace, console: Any, session: Any) -> None:
    """After Ctrl-C: the rows so far. Tables of its own need all rows of a benchmark."""
    from onchip.cli.bench import harness

    if bench.report(args.name) is not None:
        for row in session.rows:
            harness.print_row(console, row)
    if args.json:
        harness.write_results(session.rows, args.json, session.where)
    harness.print_session(console, session, [])
    raise KeyboardInterrupt(harness.describe_rows(session, args.json))


def _keep_results(args: SimpleNamespace, console: Any, session: Any) -> None:
    from onchip.cli.bench import harness

    if args.json:
        harness.write_results(session.rows, args.json, session.where)
    report = bench.report(args.name)
    if report is not None:
        report.print_report(console, session.rows, args.plot)
    elif args.plot:
        plots = import_module(bench.BENCHES[args.name].plots)
        plots.draw(harness.document(session.rows, session.where), args.plot)


def _check_thresholds(
    args: SimpleNamespace, console: Any, session: Any, thresholds: Sequence[Any]
) -> int:
    from onchip.cli.bench import harness

    optional = bool(args.only)
    chosen = (t._replace(optional=t.optional or optional) for t in thresholds)
    verdicts = [] if session.quick else harness.check_thresholds(session.rows, chosen)
    harness.print_session(console, session, verdicts)
    is_ok = all(v.ok for v in verdicts) and not session.refused
    return exit_codes.OK if is_ok else exit_codes.FAILED
