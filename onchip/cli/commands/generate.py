"""`onchip generate`."""

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import click

from onchip.cli import exit_codes
from onchip.cli.command import Command
from onchip.cli.options import (
    POSITIVE,
    device_option,
    json_flag,
    kv_dtype_option,
    list_option,
    max_model_len_option,
    model_dtype_option,
    model_option,
    speculative_config_option,
)
from onchip.cli.output import print_json
from onchip.cli.progress import Interruptible


@click.command(
    cls=Command,
    examples=(
        ('onchip generate "Once upon a time"', "The built-in model; nothing to download."),
        ('onchip generate "What is a page?" --model Qwen/Qwen3-0.6B --chat', "Ask a chat model."),
        ("onchip generate --max-tokens 200 < prompt.txt", "A prompt from a file or a pipe."),
        ('onchip generate "And God said" --temperature 0 --json', "One JSON object at the end."),
    ),
)
@click.argument("prompt", required=False)
@model_option()
@click.option("--chat", is_flag=True, help="Send the prompt as a message to an assistant.")
@click.option(
    "--max-tokens",
    type=POSITIVE,
    default=64,
    metavar="N",
    help="Generate at most this many tokens.",
)
@click.option(
    "--temperature", type=float, default=0.7, metavar="T", help="Temperature; 0 is greedy."
)
@click.option(
    "--top-p", type=float, default=1.0, metavar="P", help="Sample from this share of probability."
)
@click.option(
    "--top-k", type=int, default=0, metavar="K", help="Sample from this many tokens; 0: all."
)
@list_option("--stop", "TEXT", "End before any of these texts.", str)
@click.option(
    "--seed", type=int, metavar="N", show_default="random", help="Equal seeds give equal texts."
)
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end.")
@model_dtype_option()
@kv_dtype_option()
@device_option()
@max_model_len_option()
@speculative_config_option()
@json_flag("the result")
def command(**options: Any) -> int:
    """Continue a text, token by token.

    PROMPT is the text. Without PROMPT, or with -, it is read from standard input; a newline at its
    end is removed. The text goes to standard output as it grows, everything else to standard error.
    Ctrl-C ends with the text so far.
    """
    args = SimpleNamespace(**options)
    text = _read_prompt(args.prompt)
    from onchip import models
    from onchip.engine import LLM
    from onchip.engine.speculation.config import SpeculativeConfig

    params = _sampling_params(args)
    speculation = SpeculativeConfig.parse_json(args.speculative_config)
    if note := models.about(args.model):
        print(note, file=sys.stderr)
    settings = {"dtype": args.dtype, "max_model_len": args.max_model_len, "seed": None}
    settings |= {"kv_dtype": args.kv_dtype, "speculative_config": speculation}
    with LLM(args.model, device=args.device, max_num_seqs=1, swap_space=0, **settings) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
        last, work = _print_stream(llm.stream(prompt, params), is_shown=not args.as_json)
        drafts = llm.stats().speculation
    _finish(last, work, args)
    if drafts is not None:
        print(drafts, file=sys.stderr)
    return exit_codes.OK


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError(
            "missing PROMPT: give a text, or pipe one", click.get_current_context()
        )
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise ValueError("the prompt is empty: give a text as PROMPT or on standard input")
    return prompt


def _sampling_params(args: SimpleNamespace) -> Any:
    from onchip.engine import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=args.stop,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )


def _print_stream(outputs: Iterable[Any], is_shown: bool) -> tuple[Any, Interruptible]:
    """Print the text as it grows, on a terminal without control characters. Returns the last
    output, also if Ctrl-C ended the stream.
    """
    shown, output = 0, None
    with Interruptible() as work:
        for output in outputs:
            new = output.outputs[0].text[shown:]
            shown += len(new)
            if sys.stdout.isatty():
                new = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in new)
            if is_shown:
                print(new, end="", flush=True)
    return output, work


def _finish(last: Any, work: Interruptible, args: SimpleNamespace) -> None:
    """Report the end of the stream. An interrupted request has not finished."""
    if last is None:
        work.end("no token was generated yet")
    choice = last.outputs[0]
    if choice.finish_reason == "error":
        raise ValueError(f"the model failed: {choice.stop_reason}")
    reason = "interrupt" if work.was_interrupted else choice.finish_reason
    if args.as_json:
        print_json(_result(last, reason, args.model))
    else:
        print(file=sys.stderr)
    count = len(choice.token_ids)
    work.end(f"{count} tokens after {len(last.prompt_token_ids)} of prompt")
    print(_speed(last), file=sys.stderr)


def _result(output: Any, finish_reason: str, model: str) -> dict[str, Any]:
    choice, metrics = output.outputs[0], output.metrics
    since = lambda s: None if s is None else s - metrics.arrival_s
    return {
        "model": model,
        "prompt": output.prompt,
        "text": choice.text,
        "finish_reason": finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(choice.token_ids),
        "token_ids": list(choice.token_ids),
        "first_token_s": since(metrics.first_token_s),
        "total_s": since(metrics.finished_s),
    }


def _speed(output: Any) -> str:
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    first, total = (s - metrics.arrival_s for s in (metrics.first_token_s, metrics.finished_s))
    return (
        f"{len(output.prompt_token_ids)} tokens of prompt, {count} drawn in {total:.2f} s (first"
        f" after {first:.2f} s); ended by {output.outputs[0].finish_reason}"
    )
