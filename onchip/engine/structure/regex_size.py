"""The size of a regular expression with its counted repetitions written out.

`(a{1000}){1000}` has 14 characters and a million states; an automaton would build them one by one.
"""

import re

_TOKEN = re.compile(
    r"\\."  # an escaped character
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]?"  # a class; without an end, the rest: else each [ searches it
    r"|\{(?P<low>\d+)(?P<comma>,(?P<high>\d*))?\}"
    r"|(?P<open>\()|(?P<close>\))|[*+?|^$]|.",
    re.DOTALL,
)
_SILENT = frozenset("*+?|^$")


def count_states(pattern: str) -> int:
    """An upper bound on the characters that the expression matches one by one, repetitions counted
    as often as they repeat. A pattern that is no expression gets some number: the compiler refuses
    it.
    """
    groups, last = [0], 0  # sizes of the open groups, and of the piece that a repetition repeats
    for token in _TOKEN.finditer(pattern):
        if token["open"]:
            groups.append(0)
        elif token["close"]:
            if len(groups) > 1:
                last = groups.pop()
                groups[-1] += last
        elif token["low"]:
            times = max(int(token["low"][:9]), int((token["high"] or "0")[:9]), 1)
            groups[-1] += last * (times - 1)
            last *= times
        elif token[0] not in _SILENT:
            last = 1
            groups[-1] += 1
    return sum(groups)
