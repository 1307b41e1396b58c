"""`onchip explain`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.options import POSITIVE, WINDOW_SIDE, DType, device_option, json_flag
from onchip.cli.output import print_json

if TYPE_CHECKING:
    from onchip.core.explain import Explanation


def _size(name: str, default: int | None, help: str, show_default: str | bool = True) -> Callable:
    return click.option(
        name, type=POSITIVE, default=default, metavar="N", help=help, show_default=show_default
    )


@click.command(
    cls=Command,
    examples=(
        ("onchip explain --seqlen 8192 --causal", "The kernel on this machine."),
        ("onchip explain --head-dim 128 --on H200", "What an H200 would do, and how fast."),
        ("onchip explain --seqlen 1 --seqlen-k 8192 --page-size 16", "Decoding over pages."),
        ("onchip explain --causal --json", "The same facts for a program."),
    ),
)
@_size("--batch", 1, "Number of sequences.")
@_size("--seqlen", 4096, "Number of queries of a sequence.")
@_size("--seqlen-k", None, "Number of keys of a sequence.", "as many as queries")
@_size("--heads", 8, "Number of query heads.")
@_size("--kv-heads", None, "Number of key/value heads.", "as many as query heads")
@_size("--head-dim", 64, "Dimension of a head of q and k.")
@_size("--head-dim-v", None, "Dimension of a head of v.", "as --head-dim")
@click.option(
    "--dtype",
    type=DType(),
    default="auto",
    metavar="[bf16|fp16|fp32|fp64]",
    show_default="bf16 on a GPU, fp32 on a CPU",
    help="Type of the tensors.",
)
@device_option()
@click.option("--on", metavar="GPU", help="Explain the call on an A100, H100, H200 or B200.")
@click.option("--causal", is_flag=True, help="Hide the keys after each query.")
@click.option(
    "--window",
    type=(WINDOW_SIDE, WINDOW_SIDE),
    default=(None, None),
    metavar="LEFT RIGHT",
    show_default="none none",
    help="Keys left and right of a query's own that it sees; none: all.",
)
@click.option(
    "--softcap", type=float, default=0.0, metavar="CAP", help="Cap scores by this; 0: no cap."
)
@click.option("--dropout", type=float, default=0.0, metavar="P", help="Dropout probability.")
@click.option("--stats", is_flag=True, help="Return the max logit and the entropy of each row.")
@click.option(
    "--page-size",
    type=POSITIVE,
    metavar="N",
    show_default="no pages",
    help="Store keys and values in pages of this many tokens; the call is causal.",
)
@click.option(
    "--shared",
    type=int,
    default=0,
    metavar="N",
    help="Number of keys that all sequences share, in pages.",
)
@click.option("--kernel", metavar="NAME", help="Use this kernel of `onchip doctor`, or refuse.")
@json_flag("the explanation")
def command(**options: Any) -> int:
    """Explain which kernel serves a call, and why not the others.

    Nothing is computed, and tensors of any size take no memory.
    """
    explanation = _explain(SimpleNamespace(**options))
    if options["as_json"]:
        print_json(_facts(explanation))
    else:
        print(explanation)
    return exit_codes.OK


def _explain(args: SimpleNamespace) -> "Explanation":
    import torch

    import onchip
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
    return onchip.explain(q, k, v, *tables, **options)


def _page_tables(batch: int, seqlen_k: int, page_size: int, shared: int) -> tuple[Any, Any]:
    """(page_table, cache_seqlens); sequences share the pages of their first `shared` keys."""
    import torch

    if not 0 <= shared <= seqlen_k:
        raise ValueError(f"--shared {shared} must lie between 0 and the {seqlen_k} keys")
    width = -(-seqlen_k // page_size)
    table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
    table[:, : shared // page_size] = table[0, : shared // page_size]
    return table, torch.full((batch,), seqlen_k, dtype=torch.int32)


def _facts(explanation: "Explanation") -> dict[str, Any]:
    """The explanation as names and numbers; text: the lines that are printed otherwise."""
    times = {"forward": explanation.roofline, "backward": explanation.backward_roofline}
    return {
        "kernel": explanation.plan.kernel,
        "not_by": explanation.plan.reasons,
        "parts": explanation.parts,
        "device": explanation.device,
        "problem": explanation.problem,
        "flops": explanation.flops,
        "min_bytes": explanation.min_bytes,
        "scores_bytes": explanation.scores_bytes,
        "predicted_s": {name: time.seconds for name, time in times.items() if time is not None},
        "text": str(explanation),
    }
