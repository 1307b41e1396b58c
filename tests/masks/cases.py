"""Every preset of `onchip.masks`: its rule, calls of it and the least values of its sizes, read by
the tests of rules, graphs, pickling, errors, submasks and ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from onchip import masks


class Preset(NamedTuple):
    """rule(p, k, **call): the rule of the docstring on cells, for positions p (rows, 1) and keys k
    (cols,) = 0, 1, ...

    calls: keyword arguments; those of the first have no random numbers and suit few tokens. least:
    the least value of every parameter.
    """

    rule: Callable[..., torch.Tensor]
    calls: list[dict[str, int]]
    least: dict[str, int]


def is_in_near_block(p, k, reach, block=128):
    return (p >= 0) & ((p // block - k // block).abs() <= reach)


def is_global(p, k, tokens):
    return ((p >= 0) & (p < tokens)) | (k < tokens)


def is_drawn(p, k, count, seed):
    """Each of `count` draws for all rows of blocks at once takes one of the blocks that are left in
    each row.
    """
    blocks = int(k[-1]) // 128 + 1
    generator = torch.Generator().manual_seed(seed)
    left = [list(range(blocks)) for _ in range(blocks)]
    table = torch.zeros(blocks, blocks, dtype=torch.bool)
    for already in range(min(count, blocks)):
        picks = torch.randint(blocks - already, (blocks,), generator=generator).tolist()
        for row, pick in enumerate(picks):
            table[row, left[row].pop(pick)] = True
    return (p >= 0) & table[(p // 128).clamp(min=0), k // 128]


def bigbird(p, k, window_blocks=1, random_blocks=3, global_blocks=1, seed=0):
    fixed = is_in_near_block(p, k, window_blocks) | is_global(p, k, global_blocks * 128)
    return fixed | is_drawn(p, k, random_blocks, seed)


def butterfly(p, k):
    digits = (p // 128) ^ (k // 128)
    return (p >= 0) & ((digits & (digits - 1)) == 0)


def dilated(p, k, window_size, dilation):
    distance = p - k
    return (distance.abs() <= window_size * dilation) & (distance % dilation == 0)


def longformer(p, k, window_size, global_tokens=0):
    return ((p - k).abs() <= window_size) | is_global(p, k, global_tokens)


def strided(p, k, stride):
    distance = p // 128 - k // 128
    return (k <= p) & ((distance < stride) | (distance % stride == 0))


def list_calls(names, *rows):
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


PRESETS = {
    "bigbird": Preset(
        bigbird,
        [
            {"window_blocks": 1, "random_blocks": 0, "global_blocks": 2},
            {"window_blocks": 0, "random_blocks": 1, "global_blocks": 1, "seed": 3},
            {},
        ],
        {"window_blocks": 0, "random_blocks": 0, "global_blocks": 0, "seed": -(2**63)},
    ),
    "block_local": Preset(
        lambda p, k, block=128: is_in_near_block(p, k, 0, block),
        [{"block": 100}, {}],
        {"block": 1},
    ),
    "butterfly": Preset(butterfly, [{}], {}),
    "dilated": Preset(
        dilated,
        list_calls(
            "window_size dilation",
            *((9, 3), (0, 9), (70, 1), (3, 128), (2, 300), (9000, 7), (3, 9000)),
        ),
        {"window_size": 0, "dilation": 1},
    ),
    "longformer": Preset(
        longformer,
        [*list_calls("window_size global_tokens", (9, 3), (70, 5)), {"window_size": 20}],
        {"window_size": 0, "global_tokens": 0},
    ),
    "strided": Preset(strided, [{"stride": 3}], {"stride": 1}),
}
CALLS = [(name, call) for name, preset in PRESETS.items() for call in preset.calls]


def make(name, call=None):
    """The mask of a call, by default of the first."""
    return getattr(masks, name)(**PRESETS[name].calls[0] if call is None else call)
