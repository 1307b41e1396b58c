"""Types of option values, and the options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from onchip.cli.command import ListOption
from onchip.core import hub_cache

# Copies of names in the package, whose modules import torch; a test compares them.
DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
KV_DTYPES = ("fp8", "int8")
PRECISIONS = ("fp8", "int8", "int8_pv16")
BUILTIN = "tiny"

FILE = click.Path(path_type=Path)


class DType(click.ParamType):
    """torch's name of a dtype; the short name is accepted as well, and shown."""

    name = "dtype"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        long_name = str(DTYPES.get(value, value))
        if long_name != "auto" and long_name not in DTYPES.values():
            names = ", ".join(f"{long} ({short})" for short, long in DTYPES.items())
            self.fail(f"{value!r} is not one of {names}", param, ctx)
        return long_name

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in DTYPES if name.startswith(incomplete)]


class Positive(click.ParamType):
    name = "integer"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        number = click.INT.convert(value, param, ctx)
        if number < 1:
            self.fail(f"{number} must be at least 1", param, ctx)
        return number


class WindowSide(click.ParamType):
    """One side of a window, as in window_size: none is no bound."""

    name = "keys"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | None:
        if value is None or str(value).lower() == "none":
            return None
        if not str(value).isdecimal():
            self.fail(f"{value} must be none (unbounded) or at least 0 keys", param, ctx)
        return int(value)


class ModelName(click.ParamType):
    """A folder, a Hub id of the local cache, or the built-in model; resolved when it is loaded."""

    name = "model"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        names = (BUILTIN, *hub_cache.list_models())
        known = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return [*known, CompletionItem(incomplete, type="dir")]


POSITIVE, WINDOW_SIDE = Positive(), WindowSide()
MODEL_HELP = "Folder of a checkpoint, id of a downloaded Hub model, or the built-in model tiny."


def model_option(default: str | None = BUILTIN, help: str = MODEL_HELP) -> Callable:
    """--model, the same for every command."""
    return click.option("--model", type=ModelName(), default=default, metavar="MODEL", help=help)


def speculative_config_option() -> Callable:
    return click.option(
        "--speculative-config",
        metavar="JSON",
        show_default="no drafts",
        help="Options of speculative decoding, by vLLM's names.",
    )


def model_dtype_option() -> Callable:
    return click.option(
        "--dtype",
        type=DType(),
        default="auto",
        metavar="[bf16|fp16|fp32]",
        show_default="the checkpoint's own",
        help="Type of weights and activations.",
    )


def kv_dtype_option() -> Callable:
    return click.option(
        "--kv-dtype",
        type=click.Choice(KV_DTYPES),
        show_default="as --dtype",
        help="Store keys and values in 8 bits.",
    )


def device_option() -> Callable:
    return click.option(
        "--device",
        metavar="DEVICE",
        show_default="cuda if there is one, else cpu",
        help="Device, by torch's name.",
    )


def max_model_len_option() -> Callable:
    return click.option(
        "--max-model-len",
        type=POSITIVE,
        metavar="N",
        show_default="the model's own",
        help="Tokens of prompt and answer together.",
    )


def list_option(name: str, metavar: str, help: str, type: Any = POSITIVE) -> Callable:
    """An option with one value or more; none means no choice."""
    return click.option(name, cls=ListOption, type=type, metavar=metavar, help=help)


def json_flag(what: str) -> Callable:
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


def json_file(what: str) -> Callable:
    """--json FILE writes a file; --json alone, or -, writes to standard output."""
    return click.option(
        "--json",
        type=FILE,
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        help=f"Write {what} as JSON to FILE, or to standard output without FILE.",
    )
