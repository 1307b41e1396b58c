"""One style for all commands: options with a sentence and a default, then examples; options that
take a list of values.
"""

from typing import Any

import click

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 120,
}


class ListOption(click.Option):
    """An option that takes one value or more: `--seqlens 1024 4096`, or the option repeated."""

    def __init__(self, *names: Any, metavar: str, **settings: Any):
        super().__init__(*names, metavar=f"{metavar}...", multiple=True, **settings)


class Command(click.Command):
    """examples: (command, what it does), printed after the options."""

    def __init__(self, *args: Any, examples: tuple[tuple[str, str], ...] = (), **settings: Any):
        super().__init__(*args, context_settings=SETTINGS, **settings)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._repeat_lists(args))

    def _repeat_lists(self, words: list[str]) -> list[str]:
        """`--only a b` as `--only a --only b`, which click parses."""
        lists = {flag for p in self.params if isinstance(p, ListOption) for flag in p.opts}
        repeated: list[str] = []
        flag, count = "", 0
        for i, word in enumerate(words):
            if word == "--":
                return repeated + words[i:]
            if word.startswith("-"):
                flag, count = word if word in lists else "", 0
            elif flag:
                repeated += [flag] if count else []
                count += 1
            repeated.append(word)
        return repeated

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for command, what in self.examples:
                    formatter.write(f"  {command}\n      {what}\n")
