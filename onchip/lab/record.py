"""The data of the page, from real executions: nothing in it is typed in.

Each function gives the data of one figure, as JSON takes it. Numbers are rounded to what a page can
show after everything was computed.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onchip
from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from onchip.lab import papers, playground
from onchip.lab.numbers import shown
from onchip.models import Decoder, about, builtin, load
from onchip.parallel.machines import H200, LINKS, Fabric
from onchip.parallel.simulate import LAYOUTS, LayerShape, RingStep, merge_seconds, rounds, seconds

SENTENCE = "I swam across the river to get to the other bank."
FIGURES = ("bytes", "algebra", "tiles", "length", "pages", "ring", "rows")


def everything(model: str | Path = builtin.NAME) -> dict[str, Any]:
    """The data of all figures, and the version that recorded them. model: the source of the
    attention rows, the built-in model or a folder. Runs in one thread: the calls are so small that
    several threads would only wait for one another.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = papers.race, algebra, papers.loops, papers.lengths, pages, ring
        figures += (partial(rows, model=model),)
        data = {name: record() for name, record in zip(FIGURES, figures, strict=True)}
    finally:
        torch.set_num_threads(threads)
    return {"version": onchip.__version__, **data}


def algebra() -> dict[str, Any]:
    """Scores of one query over eight keys, and their values, of two numbers each."""
    q, k, v = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(21), dtype=torch.float64)
    s = 3 * q[0] @ k.mT
    return {"scores": shown(s.round(decimals=1)), "values": shown(v.round(decimals=1))}


FABRICS = (
    Fabric(LINKS["NVLink 4"]),
    Fabric(LINKS["PCIe 5 x16"]),
    Fabric(LINKS["InfiniBand NDR"]),
    Fabric(LINKS["100 GbE"]),
    Fabric(LINKS["NVLink 4"], LINKS["InfiniBand NDR"], node=4),
)
DEVICES = (4, 8, 16)
LENGTHS = tuple(2**n for n in range(13, 21))


def ring() -> dict[str, Any]:
    """What events of a ring attention step last: kernels and merges of the three kinds of rounds on
    an H200 as it was measured, messages over stated links. costs and messages are listed by layout
    or fabric, then pass, number of devices, length.
    """
    step = lambda layout, backward, n, tokens: RingStep(tokens, n, layout, backward=backward)
    return {
        "machine": H200.name,
        "shape": LayerShape()._asdict(),
        "layouts": LAYOUTS,
        "fabrics": [{"name": f.name, "node": f.node if f.between else 0} for f in FABRICS],
        "devices": DEVICES,
        "lengths": LENGTHS,
        "costs": _grid(LAYOUTS, lambda layout, *rest: _costs(step(layout, *rest))),
        "messages": _grid(FABRICS, lambda fabric, *rest: _messages(fabric, step("zigzag", *rest))),
    }


def _grid(first, cell) -> list[Any]:
    return [
        [
            [[cell(f, way, n, tokens) for tokens in LENGTHS] for n in DEVICES]
            for way in (False, True)
        ]
        for f in first
    ]


def _costs(step: RingStep) -> list[list[float]]:
    """[kernel, merge] seconds of a round with one's own keys, with a lower rank's, a higher's."""
    return [[shown(cost(step, r)) for cost in (seconds, merge_seconds)] for r in rounds(step)]


def _messages(fabric: Fabric, step: RingStep) -> list[list[float]]:
    """[inside a node, between nodes] seconds of K and V, of dK and dV."""
    links = (fabric.inside, fabric.between or fabric.inside)
    over = lambda size: [shown(link.latency_s + size / link.bytes_s) for link in links]
    return [over(step.kv_bytes), over(step.dkv_bytes)]


def pages() -> dict[str, Any]:
    """The rules of the playground, for the twin that has no Python behind it."""
    names = (
        "num_pages",
        "page_size",
        "max_sequences",
        "max_words",
        "max_letters",
        "max_vocabulary",
    )
    names += ("beam_width", "proposals", "drawn", "stride", "costs", "prompts", "opening", "story")
    return {name: getattr(playground, name.upper()) for name in names}


class Watched:
    """Attention that keeps the weights of chosen rows in every layer it serves."""

    def __init__(self, rows: list[int]):
        self.rows = rows
        self.weights: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        options["causal"] = True
        out, lse = onchip.attention(q, k, v, return_lse=True, **options)
        self.weights.append(onchip.attention_weights(q, k, lse, self.rows, **options)[0])
        return out


@torch.no_grad()
def rows(sentence: str = SENTENCE, model: str | Path = builtin.NAME) -> dict[str, Any]:
    """The attention of a model's last tokens: weights[layer][head][word] are the weights of the
    last token of a word over all tokens; owners[token] is the word of a token.
    """
    tokenizer, decoder = _speaker(model)
    tokens = tokenizer.encode(sentence)
    owners = _owners(sentence, [tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))])
    last = [i for i, owner in enumerate(owners) if owner not in owners[i + 1 :]]
    watched = Watched(last)
    positions = torch.arange(len(tokens))[None]
    decoder.run(torch.tensor([tokens]), positions, watched)
    weights = [[[shown(row, 5) for row in head] for head in layer] for layer in watched.weights]
    words = re.findall(r"\S+", sentence)
    note = about(model) or f"its weights are those of {decoder.config.model_type} in its folder"
    return {
        "model": Path(model).name,
        "about": note,
        "words": words,
        "owners": owners,
        "weights": weights,
    }


def _speaker(model: str | Path) -> tuple[Tokenizer, Decoder]:
    if model == builtin.NAME:
        return ByteTokenizer(), builtin.tiny()
    return FileTokenizer(model), load(model, dtype=torch.float32)


def _owners(sentence: str, prefixes: list[str]) -> list[int]:
    """The word of each token: the first that does not end before the token does."""
    ends = [word.end() for word in re.finditer(r"\S+", sentence)]
    lengths = [len(prefix) for prefix in prefixes]
    return [next(i for i, end in enumerate(ends) if length <= end) for length in lengths]
