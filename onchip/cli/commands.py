"""The command line: `onchip demo | bench | tune | explain | generate | doctor | serve | lab`, or
`python -m onchip ...`.

Commands import what they need when they run: versions and help are printed without torch, which
takes seconds to load.
"""

import argparse
import os
import sys
import time
import webbrowser
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import onchip
from onchip.core.extras import advise, require

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
KV_DTYPES = ("fp8", "int8")
PRECISIONS = ("fp8", "int8", "int8_pv16")
PROGRESS_S = 10.0  # between lines of progress where there is no terminal
USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 on success, 1 if a threshold is missed, 2 with a sentence on
    misuse.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:
        print(f"onchip: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("onchip: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onchip", description="Exact attention for PyTorch that knows where its bytes are."
    )
    parser.add_argument("--version", action="version", version=f"onchip {onchip.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_bench(commands)
    _add_tune(commands)
    _add_explain(commands)
    _add_generate(commands)
    _add_doctor(commands)
    _add_serve(commands)
    _add_lab(commands)
    return parser


def _add_demo(commands) -> None:
    p = commands.add_parser(
        "demo", help="standard attention, torch SDPA and onchip side by side here"
    )
    p.add_argument("--quick", action="store_true", help="short lengths only, a few seconds")
    p.add_argument("--report", type=Path, default=Path("onchip-demo.html"), metavar="FILE")
    p.add_argument("--no-open", action="store_true", help="do not open the report in a browser")
    p.set_defaults(run=_demo)


def _add_bench(commands) -> None:
    p = commands.add_parser("bench", help="run a benchmark and check its thresholds")
    p.add_argument("name", metavar="NAME", nargs="?", help="without a name: list the benchmarks")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the rows as a results file")
    p.add_argument("--quick", action="store_true", help="small sizes, no thresholds")
    p.add_argument("--threads", type=_positive, default=2, help="CPU threads (default 2)")
    _add_list(p, "--seqlens", "N", "GPU: these alone")
    _add_list(p, "--head-dims", "D", "GPU: these alone")
    p.add_argument("--only", nargs="+", default=(), metavar="PART", help="these parts of it alone")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw speeds or memory: .svg or .png")
    p.add_argument("--flex", action="store_true", help="GPU: FlexAttention too; compiles for long")
    p.add_argument("--seconds", type=_positive, default=0, help="serving http: of arrivals")
    p.add_argument("--simulate", action="store_true", help="ring: on machines that are not here")
    p.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        nargs="+",
        default=(),
        help="paged: these caches against one of 16 bits; serving: with such a cache",
    )
    p.add_argument("--precision", choices=PRECISIONS, help="forward: operands of 8 bits")
    p.set_defaults(run=_bench)


def _add_list(p: argparse.ArgumentParser, flag: str, metavar: str, what: str) -> None:
    p.add_argument(flag, type=_positive, nargs="+", default=(), metavar=metavar, help=what)


def _add_tune(commands) -> None:
    p = commands.add_parser("tune", help="measure the tile tables anew on this GPU")
    p.add_argument("--kernel", choices=("hopper", "triton"), nargs="+", default=())
    p.add_argument(
        "--pass", dest="ways", choices=("forward", "backward", "decode"), nargs="+", default=()
    )
    _add_list(p, "--head-dims", "D", "these alone")
    p.add_argument("--quick", action="store_true", help="one field at a time, few rounds")
    p.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    p.set_defaults(run=_tune)


def _add_explain(commands) -> None:
    p = commands.add_parser("explain", help="which kernel serves a call, and why not the others")
    p.add_argument("--batch", type=_positive, default=1)
    p.add_argument("--seqlen", type=_positive, default=4096, help="queries (default 4096)")
    p.add_argument("--seqlen-k", type=_positive, help="keys (default: as many as queries)")
    p.add_argument("--heads", type=_positive, default=8)
    p.add_argument("--kv-heads", type=_positive, help="default: as many as heads")
    p.add_argument("--head-dim", type=_positive, default=64)
    p.add_argument("--head-dim-v", type=_positive, help="default: head_dim")
    p.add_argument(
        "--dtype", type=_dtype, default="auto", help="default: bfloat16 on a GPU, float32 on a CPU"
    )
    p.add_argument("--device", help="default: a GPU if there is one")
    p.add_argument("--causal", action="store_true")
    p.add_argument(
        "--window",
        type=_side,
        nargs=2,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help="keys on either side of a query's own; none: unbounded",
    )
    p.add_argument("--softcap", type=float, default=0.0)
    p.add_argument("--dropout", type=float, default=0.0, metavar="P")
    p.add_argument("--stats", action="store_true", help="ask for max logit and entropy per row")
    p.add_argument("--page-size", type=_positive, help="keys in pages of so many slots, causal")
    p.add_argument("--shared", type=int, default=0, help="keys that all sequences share, in pages")
    p.add_argument("--kernel", help="ask for this kernel by name")
    p.add_argument("--on", metavar="GPU", help="what an A100, H100, H200 or B200 would do")
    p.set_defaults(run=_explain)


def _add_generate(commands) -> None:
    p = commands.add_parser("generate", help="continue a text, token by token")
    p.add_argument("prompt", metavar="PROMPT")
    _add_model(p)
    p.add_argument("--chat", action="store_true", help="the prompt is a message to an assistant")
    p.add_argument("--max-tokens", type=_positive, default=64, metavar="N")
    p.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P")
    p.add_argument("--top-k", type=int, default=0, metavar="K")
    p.add_argument("--stop", nargs="+", default=(), metavar="TEXT", help="end before any of these")
    p.add_argument("--seed", type=int, help="the same seed gives the same text")
    p.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end")
    p.add_argument("--dtype", type=_dtype, default="auto", help=_MODEL_DTYPE)
    p.add_argument("--kv-dtype", choices=KV_DTYPES, help="cache of 8 bits (default: as --dtype)")
    p.add_argument("--device", help="default: a GPU if there is one")
    p.add_argument("--max-model-len", type=_positive, metavar="N", help="default: the model's own")
    p.set_defaults(run=_generate)


def _add_doctor(commands) -> None:
    p = commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    _add_model(p, default=None, what="how this model would run")
    p.add_argument(
        "--measure",
        action="store_true",
        help="bandwidth and latency of every memory; GPU: first calls, which compile",
    )
    p.set_defaults(run=_doctor)


def _add_serve(commands) -> None:
    p = commands.add_parser("serve", help="a model behind the OpenAI API, with a live page")
    _add_model(p)
    p.add_argument("--name", help="that clients call the model by (default: its folder's)")
    p.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default: this machine)"
    )
    p.add_argument("--port", type=int, default=8000, help="0: any that is free (default 8000)")
    p.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="one a line; or ONCHIP_API_KEYS"
    )
    p.add_argument("--api-key", metavar="KEY", help="visible in the process list; prefer a file")
    p.add_argument("--device", help="default: cuda if there is one, else cpu")
    p.add_argument("--dtype", type=_dtype, default="auto", help=_MODEL_DTYPE)
    p.add_argument("--kv-dtype", choices=KV_DTYPES, help="cache of 8 bits (default: as --dtype)")
    p.add_argument("--seed", type=int, default=0, help="of requests that bring none (default 0)")
    p.add_argument("--max-model-len", type=_positive, help="prompt and answer, in tokens")
    p.add_argument("--max-num-seqs", type=_positive, default=256, help="that run at a time")
    p.add_argument("--pages", type=_positive, help="of the cache (default: what fits)")
    p.add_argument("--page-size", type=_positive, default=16, help="tokens (default 16)")
    p.add_argument("--swap-gib", type=float, default=4.0, help="of host memory (default 4)")
    p.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE")
    p.add_argument("--no-prefix-caching", action="store_true", help="share no prefixes")
    p.add_argument("--max-queue", type=int, default=4096, help="requests that wait, then 429")
    p.add_argument("--max-request-s", type=float, default=600.0, help="no request takes longer")
    p.add_argument("--max-body-mib", type=float, default=4.0, help="of a request (default 4)")
    p.add_argument("--max-bodies-mib", type=float, default=64.0, help="of all bodies being read")
    p.add_argument("--max-stall-s", type=float, default=30.0, help="a longer step: not ready")
    p.add_argument("--drain-s", type=float, default=30.0, help="to finish after SIGTERM")
    p.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="info: a line for each request",
    )
    p.set_defaults(run=_serve)


def _add_lab(commands) -> None:
    p = commands.add_parser("lab", help="the figures to play with, as a page")
    p.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write it there, to open without a server"
    )
    _add_model(p)
    p.add_argument("--host", default="127.0.0.1", help="address to serve on (default: loopback)")
    p.add_argument("--port", type=int, default=8001, help="0: any that is free (default 8001)")
    p.add_argument("--no-open", action="store_true", help="do not open it in a browser")
    p.set_defaults(run=_lab)


_MODEL_DTYPE = "bfloat16 (bf16), float16, float32; default: the checkpoint's own"


def _add_model(p: argparse.ArgumentParser, default: str | None = "tiny", what: str = "") -> None:
    """--model, the same for every command."""
    what = what or "config.json, safetensors and tokenizer.json; default: the built-in tiny model"
    p.add_argument("--model", default=default, metavar="FOLDER", help=what)


def _dtype(text: str) -> str:
    """torch's name of a dtype, of which the short one is accepted as well."""
    name = DTYPES.get(text, text)
    if name != "auto" and name not in DTYPES.values():
        names = ", ".join(f"{long} ({short})" for short, long in DTYPES.items())
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {names}")
    return name


def _side(text: str) -> int | None:
    """One side of a window, as in window_size: none is no bound."""
    if text.lower() == "none":
        return None
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must be none (unbounded) or at least 0 keys")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _demo(args: argparse.Namespace) -> int:
    require("onchip demo", "cli", "rich", "matplotlib")
    from rich.console import Console

    from onchip.cli import demo, report

    _check_writable(args.report)
    console = Console()
    with _progress(console) as report_progress:
        results = demo.run(args.quick, report_progress)
    report.print_results(console, results)
    report.write_html(results, args.report)
    console.print(f"\nReport: [bold]{args.report}[/bold] ({results.elapsed_s:.0f} s in all)")
    if not args.no_open and _has_screen():
        webbrowser.open(args.report.resolve().as_uri())
    return 0


def _bench(args: argparse.Namespace) -> int:
    from onchip.cli import bench

    if args.name is None:
        for name, benchmark in bench.BENCHES.items():
            print(f"{name:<10} {benchmark.summary}")
        return 0
    require("onchip bench", "cli", "rich", *(["matplotlib"] if args.plot else []))
    from rich.console import Console

    from onchip.cli.bench import harness

    module = bench.load(args.name, args.precision)
    _check_bench(args, getattr(module, "PARTS", ()))
    console = Console()
    session = _session(args, console)
    with _progress(console) as session.report_progress:
        module.run(session)
    _keep_results(args, console, session)
    optional = bool(args.only)
    thresholds = (t._replace(optional=t.optional or optional) for t in module.THRESHOLDS)
    verdicts = [] if session.quick else harness.check_thresholds(session.rows, thresholds)
    harness.print_session(console, session, verdicts)
    return 0 if all(v.ok for v in verdicts) and not session.refused else 1


def _check_bench(args: argparse.Namespace, parts: Sequence[str]) -> None:
    from onchip.cli import bench

    benches = bench.BENCHES
    if args.simulate and not benches[args.name].simulates:
        known = ", ".join(name for name, b in benches.items() if b.simulates)
        known = known or "`python -m benchmarks ring`"
        raise ValueError(f"{args.name} simulates no machines; --simulate is for: {known}")
    if args.kv_dtype and not benches[args.name].has_cache:
        known = ", ".join(name for name, b in benches.items() if b.has_cache)
        raise ValueError(f"{args.name} has no cache to choose; --kv-dtype is for: {known}")
    drawn = [name for name, b in benches.items() if b.report or b.plots]
    if args.plot and args.name not in drawn:
        raise ValueError(f"{args.name} draws nothing; --plot is for: {', '.join(drawn)}")
    for part in args.only:
        if part not in parts:
            known = f"choose from: {', '.join(parts)}" if parts else "it has none"
            raise ValueError(f"{args.name} has no part {part!r}; {known}")
    for path in filter(None, (args.json, args.plot)):
        _check_writable(path)


def _session(args: argparse.Namespace, console):
    """A session that prints each row and writes it to the results file at once."""
    from onchip.cli import bench
    from onchip.cli.bench import harness

    shown = bench.report(args.name) is None

    def keep(row: harness.Row) -> None:
        if shown:
            harness.print_row(console, row)
        if args.json:
            harness.write_results(session.rows, args.json, session.where)

    session = harness.Session(
        args.quick,
        args.threads,
        keep=keep,
        say=partial(console.print, markup=False, highlight=False, soft_wrap=True),
        seqlens=args.seqlens,
        head_dims=args.head_dims,
        only=args.only,
        flex=args.flex,
        seconds=args.seconds,
        simulate=args.simulate,
        kv_dtypes=args.kv_dtype,
        precision=args.precision,
    )
    return session


def _keep_results(args: argparse.Namespace, console, session) -> None:
    from onchip.cli import bench
    from onchip.cli.bench import harness

    if args.json:
        harness.write_results(session.rows, args.json, session.where)
    report = bench.report(args.name)
    if report is not None:
        report.print_report(console, session.rows, args.plot)
    elif args.plot:
        plots = import_module(bench.BENCHES[args.name].plots)
        plots.draw(harness.document(session.rows, session.where), args.plot)


def _tune(args: argparse.Namespace) -> int:
    require("onchip tune", "cli", "rich")
    from rich.console import Console

    from onchip.cli import tune
    from onchip.cli.bench import harness

    if args.json:
        _check_writable(args.json)
    console = Console()
    session = harness.Session(args.quick)
    with _progress(console) as session.report_progress:
        searches = tune.run(
            session,
            lambda capability: tune.knobs(capability, args.kernel, args.ways, args.head_dims),
        )
    if args.json:
        harness.write_results(session.rows, args.json, session.where)
    harness.print_session(console, session, [])
    tune.print_searches(console, searches)
    return 1 if session.refused else 0


def _explain(args: argparse.Namespace) -> int:
    import torch

    from onchip.core.device import find_device

    device = find_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = args.on is not None or device.type == "cuda"
    usual = "bfloat16" if on_gpu else "float32"
    dtype = getattr(torch, usual if args.dtype == "auto" else args.dtype)

    def tensor(*shape: int) -> torch.Tensor:
        # One row expanded by strides of zero: a tensor of any size takes no memory.
        return torch.empty(shape[-1], dtype=dtype, device=device).expand(shape)

    seqlen_k, kv_heads = args.seqlen_k or args.seqlen, args.kv_heads or args.heads
    q = tensor(args.batch, args.seqlen, args.heads, args.head_dim)
    options = {"causal": args.causal, "window_size": tuple(args.window), "softcap": args.softcap}
    options |= {"return_stats": args.stats, "kernel": args.kernel, "on": args.on}
    if args.page_size:
        tables = _page_tables(args.batch, seqlen_k, args.page_size, args.shared)
        keys, options["causal"] = (int(tables[0].max()) + 1, args.page_size), True
        tables = tuple(t.to(device) for t in tables)
    else:
        keys, tables = (args.batch, seqlen_k), ()
        options["dropout_p"] = args.dropout
    k = tensor(*keys, kv_heads, args.head_dim)
    v = tensor(*keys, kv_heads, args.head_dim_v or args.head_dim)
    print(onchip.explain(q, k, v, *tables, **options))
    return 0


def _page_tables(batch: int, seqlen_k: int, page_size: int, shared: int) -> tuple[Any, Any]:
    """(page_table, cache_seqlens); sequences share the pages of their first `shared` keys."""
    import torch

    if not 0 <= shared <= seqlen_k:
        raise ValueError(f"--shared {shared} must lie between 0 and the {seqlen_k} keys")
    width = -(-seqlen_k // page_size)
    table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
    table[:, : shared // page_size] = table[0, : shared // page_size]
    return table, torch.full((batch,), seqlen_k, dtype=torch.int32)


def _generate(args: argparse.Namespace) -> int:
    from onchip import models
    from onchip.engine import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=args.stop,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    if note := models.about(args.model):
        print(note, file=sys.stderr)
    options = {"dtype": args.dtype, "max_model_len": args.max_model_len, "seed": None}
    options["kv_dtype"] = args.kv_dtype
    with LLM(args.model, device=args.device, max_num_seqs=1, swap_space=0, **options) as llm:
        prompt = args.prompt
        if args.chat:
            prompt = llm.chat_prompt([{"role": "user", "content": args.prompt}])
        last = _print_stream(llm.stream(prompt, params))
    if last.outputs[0].finish_reason == "error":
        raise ValueError(f"the model failed: {last.outputs[0].stop_reason}")
    print(f"\n{_speed(last)}", file=sys.stderr)
    return 0


def _print_stream(outputs: Iterable[Any]) -> Any:
    """Print the text as it grows, on a terminal without control characters."""
    shown, output = 0, None
    for output in outputs:
        new = output.outputs[0].text[shown:]
        shown += len(new)
        if sys.stdout.isatty():
            new = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in new)
        print(new, end="", flush=True)
    return output


def _speed(output: Any) -> str:
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    first, total = (s - metrics.arrival_s for s in (metrics.first_token_s, metrics.finished_s))
    return (
        f"{len(output.prompt_token_ids)} tokens of prompt, {count} drawn in {total:.2f} s (first"
        f" after {first:.2f} s); ended by {output.outputs[0].finish_reason}"
    )


def _doctor(args: argparse.Namespace) -> int:
    require("onchip doctor", "cli", "rich")
    from rich.console import Console

    from onchip import models
    from onchip.cli import doctor

    console = Console()
    if args.model is not None:
        models.check_exists(args.model)
        return doctor.print_model(console, args.model)
    doctor.print_report(console)
    if args.measure:
        with _progress(console) as report_progress:
            timings = doctor.measure_levels(report_progress)
        doctor.print_levels(console, timings)
        doctor.print_first_calls(console)
    return 0


def _serve(args: argparse.Namespace) -> int:
    try:
        from onchip.server import command
    except ModuleNotFoundError as error:
        raise ValueError(f"onchip serve needs {error.name}: {advise('serve')}") from None
    return command.serve(args)


def _lab(args: argparse.Namespace) -> int:
    from onchip import models
    from onchip.lab import page, record, serve

    models.about(args.model)  # raises if there is no such model
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"cannot write to {args.out}: it is a file, not a folder")
    data = record.record_figures(args.model)
    if args.out is not None:
        print(page.write(args.out, data))
        return 0
    with serve.LabServer(args.host, args.port, data) as server:
        print(f"onchip lab is at {server.url} (Ctrl+C ends it)", flush=True)
        if not args.no_open and _has_screen():
            webbrowser.open(server.url)
        server.serve_forever()
    return 0


def _check_writable(path: Path) -> None:
    """Raise before the minutes of work, not after."""
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(
            f"cannot write {path}: it is a folder, or its folder is missing or not writable"
        )


def _has_screen() -> bool:
    """Whether a browser can open in a window, not in the terminal."""
    shown = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY")
    return sys.stdout.isatty() and bool(shown or os.environ.get("WAYLAND_DISPLAY"))


class _progress:
    """Progress as a context manager. It returns `report_progress(title, done)` with done in [0, 1].
    On a terminal it draws a bar, elsewhere it prints a line to stderr every PROGRESS_S, so that a
    log shows progress.
    """

    def __init__(self, console):
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TimeElapsedColumn,
        )

        title = "[progress.description]{task.description}"
        columns = (SpinnerColumn(), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn(), title)
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task("starting", total=1.0)
        self.is_shown = console.is_terminal
        self.began_s = self.printed_s = time.monotonic()

    def __enter__(self):
        self.bar.start()
        return self._tell

    def _tell(self, title: str, done: float) -> None:
        self.bar.update(self.task, description=title, completed=done)
        now = time.monotonic()
        if not self.is_shown and now - self.printed_s >= PROGRESS_S:
            self.printed_s = now
            line = f"onchip: {done:4.0%} after {now - self.began_s:.0f} s: {title}"
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()
