"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`; from its tokenizer 11 on
`[TOOL_CALLS]f{...}` or `[TOOL_CALLS]f[ARGS]{...}`. The mark is a special token. Its templates take
ids of 9 letters and digits.
"""

from .parser import Dialect

MISTRAL = Dialect(
    "mistral",
    start="[TOOL_CALLS]",
    between="[],",
    has_names=True,
    shows_special=True,
    opening="[",
    closing="]",
    id_length=9,
)
