"""The data of the page, from real executions: no number in it is written by hand.

Each function returns the data of one figure, ready for JSON. Numbers are computed in full precision
and rounded at the end.
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
from onchip.lab.rounding import round_significant
from onchip.models import Decoder, about, builtin, load, resolve
from onchip.parallel.machines import H200, LINKS, Fabric
from onchip.parallel.simulate import LAYOUTS, LayerShape, RingStep, merge_seconds, rounds, seconds

SENTENCE = "I swam across the river to get to the other bank."
FIGURES = ("bytes", "algebra", "tiles", "length", "pages", "ring", "rows")


def record_figures(model: str | Path = builtin.NAME) -> dict[str, Any]:
    """The data of all figures, and the version that recorded them. model: the source of the
    attention rows, the built-in model or a folder. Runs in one thread: for calls this small,
    several threads would take longer.
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
    return {
        "scores": round_significant(s.round(decimals=1)),
        "values": round_significant(v.round(decimals=1)),
    }


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
    """Durations in a ring attention step: kernels and merges of the three kinds of rounds as
    measured on an H200, messages over links as specified. costs and messages are nested by layout
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
    """[kernel, merge] seconds of a round with the rank's own keys, a lower rank's, a higher's."""
    return [
        [round_significant(cost(step, r)) for cost in (seconds, merge_seconds)]
        for r in rounds(step)
    ]


def _messages(fabric: Fabric, step: RingStep) -> list[list[float]]:
    """[inside a node, between nodes] seconds of K and V, of dK and dV."""
    links = (fabric.inside, fabric.between or fabric.inside)
    over = lambda size: [round_significant(link.latency_s + size / link.bytes_s) for link in links]
    return [over(step.kv_bytes), over(step.dkv_bytes)]


def pages() -> dict[str, Any]:
    """The constants of the playground, for site/pool.js."""
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


class WeightRecorder:
    """Attention that also records the weights of some rows, in every layer."""

    def __init__(self, rows: list[int]):
        self.rows = rows
        self.weights: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        options["causal"] = True
        out, lse = onchip.attention(q, k, v, return_lse=True, **options)
        options.pop("sinks", None)  # lse contains them
        self.weights.append(onchip.attention_weights(q, k, lse, self.rows, **options)[0])
        return out


@torch.no_grad()
def rows(sentence: str = SENTENCE, model: str | Path = builtin.NAME) -> dict[str, Any]:
    """The attention of a model's last tokens: weights[layer][head][word] are the weights of the
    last token of a word over all tokens; owners[token] is the word of a token.
    """
    tokenizer, decoder = _load_model(model)
    tokens = tokenizer.encode(sentence)
    owners = _owners(sentence, [tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))])
    last = [i for i, owner in enumerate(owners) if owner not in owners[i + 1 :]]
    recorder = WeightRecorder(last)
    positions = torch.arange(len(tokens))[None]
    decoder.run(torch.tensor([tokens]), positions, recorder)
    weights = [
        [[round_significant(row, 5) for row in head] for head in layer]
        for layer in recorder.weights
    ]
    words = re.findall(r"\S+", sentence)
    note = about(model) or f"its weights are those of {decoder.config.model_type} in its folder"
    return {
        "model": Path(model).name,
        "about": note,
        "words": words,
        "owners": owners,
        "weights": weights,
    }


def _load_model(model: str | Path) -> tuple[Tokenizer, Decoder]:
    if model in builtin.NAMES:
        return ByteTokenizer(), builtin.load_builtin(str(model), "cpu", torch.float32)
    folder = resolve(model)
    return FileTokenizer(folder), load(folder, dtype=torch.float32)


def _owners(sentence: str, prefixes: list[str]) -> list[int]:
    """The word of each token: the first that does not end before the token does."""
    ends = [word.end() for word in re.finditer(r"\S+", sentence)]
    lengths = [len(prefix) for prefix in prefixes]
    return [next(i for i, end in enumerate(ends) if length <= end) for length in lengths]
