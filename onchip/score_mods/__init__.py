"""Score functions as expressions: score_mod(score, b, h, q, k) of `onchip.attention`.

    tracing.py      call the function once with symbols, and record what it computes
    functions.py    the functions of torch that may be in it
    expression.py   the record: operations in order, as text for the torch op and for kernels
    derivative.py   the derivatives of an expression, as further operations
    evaluate.py     the operations on tiles of scores, in torch

A function that is traced in advance, `trace(f)`, saves the tracing of every call, and is what
`torch.compile` takes.
"""

from onchip.score_mods.tracing import ScoreMod, trace

__all__ = ["ScoreMod", "trace"]
