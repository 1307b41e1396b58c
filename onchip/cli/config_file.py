"""A TOML file with options of a command: `onchip serve --config FILE`.

A key is the name of an option without its dashes (`max-model-len = 4096`). Options of the command
line override the file. Values are checked strictly: an unknown key or a value of another type is an
error, because a server must not start with other settings than the file states. Imports are inside
functions: help needs none of them.
"""

from pathlib import Path
from typing import Any

import click

MAX_BYTES = 1 << 20
NOT_IN_FILE = ("config", "print_config", "help")  # options that a file cannot have


def read_options(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """A callback of --config: the values of the file become the defaults of the command."""
    if path is not None:
        ctx.default_map = parse_options(ctx.command, path)
    return path


def parse_options(command: click.Command, path: Path) -> dict[str, Any]:
    """Values by name of parameter. ValueError names the file and the key that is wrong."""
    import json
    import tomllib

    from onchip.core.files import read_regular

    try:
        table = tomllib.loads(read_regular(path, MAX_BYTES).decode())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    options = file_options(command)
    for key, value in table.items():
        if key not in options:
            raise ValueError(f"{path}: {_describe_unknown(key, options)}")
        if not _has_type(options[key], value):
            kind = _toml_type(options[key])
            raise ValueError(f"{path}: {key} = {json.dumps(value, default=str)} must be {kind}")
    return {options[key].name or key: value for key, value in table.items()}


def file_options(command: click.Command) -> dict[str, click.Option]:
    """The options that a file may have, by key."""
    options = (p for p in command.params if isinstance(p, click.Option))
    return {o.opts[-1].removeprefix("--"): o for o in options if o.name not in NOT_IN_FILE}


def format_options(command: click.Command, values: dict[str, Any]) -> str:
    """A file with these values, and every option explained. Secrets are left out."""
    lines = [f"# onchip {command.name} --config FILE; options of the command line override it"]
    for key, option in file_options(command).items():
        value = values[option.name or key]
        lines += ["", f"# {option.help}"]
        if key == "api-key" and value is not None:
            lines.append("# api-key is set, and not printed: use api-key-file")
        elif value is None:
            default = option.show_default
            lines.append(f"# {key} = ...  (default: {default})" if default else f"# {key} = ...")
        else:
            lines.append(f"{key} = {_format_value(value)}")
    return "\n".join(lines)


def _format_value(value: Any) -> str:
    """JSON's numbers, booleans and strings are TOML's."""
    import json

    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _describe_unknown(key: str, options: dict[str, click.Option]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key.replace("_", "-"), options, 1)
    advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(options)}"
    return f"unknown key {key}; {advice}"


def _toml_type(option: click.Option) -> str:
    if option.is_flag:
        return "true or false"
    return {"integer": "an integer", "float": "a number"}.get(option.type.name, "a string")


def _has_type(option: click.Option, value: Any) -> bool:
    if option.is_flag or isinstance(value, bool):
        return option.is_flag and isinstance(value, bool)
    types = {"integer": (int,), "float": (int, float)}
    return isinstance(value, types.get(option.type.name, (str,)))
