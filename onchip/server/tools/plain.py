"""Plain JSON, for models without a form of their own: the whole text is `{"name": "f", "arguments":
{...}}` or a list of such objects.
"""

from .parser import Dialect

PLAIN = Dialect("plain", between="[],", opening="[", closing="]")
