"""Algorithms of attention by name, as functions (q, k, v) -> out without a mask: what
`python -m benchmarks hbm` times, and what counters.py counts in a process of its own.

  standard        S and P in memory, in the dtype of the inputs
  compiled        the same program through torch.compile
  v1, v1/64       examples/versions/v1.py; /64: with tiles of 64 keys
  v2, v3          examples/versions
  fa2             FlashAttention-2 as torch has it
  onchip, onchip/20%   a plain call; with a mask of 20 % of the blocks
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import onchip
from benchmarks import versions
from onchip.cli.bench import patterns, peers
from onchip.cli.bench.peers import Attend


def find(name: str, seqlen: int, device: torch.device) -> Attend:
    """The algorithm for sequences of this length; KeyError for an unknown name."""
    base, _, option = name.partition("/")
    if base == "onchip":
        density = float(option.removesuffix("%") or 100) / 100
        options = patterns.blocks(seqlen, density, device).options if density < 1 else {}
        return partial(onchip.attention, **options)
    if base == "v1" and option:
        return versions.version("v1", False, tile_n=int(option))
    makers = {
        "standard": lambda: standard,
        "compiled": compiled,
        "fa2": lambda: peers.fa2(False),
        **{x: partial(versions.version, x, False) for x in ("v1", "v2", "v3")},
    }
    return makers[name]()


def layout_of(name: str) -> Callable[[Tensor], Tensor]:
    """How inputs are stored: heads first for products of torch, which would copy them otherwise."""
    return peers.heads_first if name in ("standard", "compiled") else lambda x: x


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as in textbooks. The queries are scaled, not the scores: one pass over S less."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, dim=-1)
    return (p @ v).transpose(1, 2)


def compiled() -> Attend:
    """`standard`, compiled. Earlier programs are forgotten: beyond eight shapes of one function,
    torch would run it uncompiled without a word. Buffers are not donated, because a timed backward
    pass runs more than once.
    """
    from torch._functorch import config

    torch._dynamo.reset()
    config.donated_buffer = False
    return torch.compile(standard, dynamic=False)
