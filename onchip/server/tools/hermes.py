"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with line breaks
around the object, anywhere in the text and as often as needed.
"""

from .parser import Dialect

HERMES = Dialect(
    "hermes",
    start="<tool_call>",
    end="</tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
)
