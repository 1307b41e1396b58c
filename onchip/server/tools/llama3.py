"""Llama 3.1 and later: the whole text is `{"name": "f", "parameters": {...}}`; several calls are
separated by semicolons. `<|python_tag|>` before it is a special token, which texts leave out.
"""

from .parser import Dialect

LLAMA3 = Dialect("llama3_json", between=";", separator="; ", key="parameters")
