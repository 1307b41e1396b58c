"""Loss curves with one attention and with another, from the same weights over the same batches.

No two kernels round alike, and training amplifies the last bit: curves are never equal. How far two
backends of torch's SDPA come apart in the same steps is the measure of how far ours may.
"""

import lzma
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import onchip
from benchmarks.trainer import Batch, Trainer
from onchip.cli.bench.gpu import sentence
from onchip.cli.bench.harness import Case, Row, RowRefused, Session
from onchip.cli.bench.peers import backend
from onchip.models import ModelConfig

TEXT = Path(__file__).parents[1] / "examples" / "data" / "kjv.txt.xz"
GPT2_SMALL = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 768, "n_layer": 12, "n_head": 12}
TOY = GPT2_SMALL | {"n_embd": 64, "n_layer": 2, "n_head": 2}
BACKENDS = ("fa2", "cudnn", "efficient", "math")  # the first two that run are the measure
SEQLEN, COUNT, STEPS, LR = 1024, 16, 500, 3e-4
TOY_SEQLEN, TOY_COUNT, TOY_STEPS = 64, 4, 30
Curve = list[float]


def compare(session: Session, toy: bool) -> list[Row]:
    """A row: the difference of our curve from SDPA's, with that of another SDPA backend as the
    peer.
    """
    sizes = (TOY_SEQLEN, TOY_COUNT, TOY_STEPS) if toy else (SEQLEN, COUNT, STEPS)
    seqlen, count, num_steps = sizes
    config = ModelConfig.from_hf((TOY if toy else GPT2_SMALL) | {"n_positions": seqlen})
    train = partial(curve, config, session.device, list(batches(session.device, *sizes)))
    curves = {"onchip": train(partial(onchip.attention, causal=True))}
    for name in BACKENDS:
        try:
            curves[name] = train(backend(name, is_causal=True))
        except RuntimeError as error:
            session.note(f"{name} is left out: {sentence(error)}", " (loss curves)")
        if len(curves) == 3:
            break
    if len(curves) < 3:
        raise RowRefused("two backends of SDPA are needed to say how far curves come apart")
    shape = (config.head_dim, seqlen, count, config.num_heads)
    name, way = "toy gpt2" if toy else "gpt2", f"{num_steps} steps"
    case = Case("train curves", name, torch.bfloat16, *shape, way=way)
    return [row(case, curves)]


def row(case: Case, curves: dict[str, Curve]) -> Row:
    """Of our curve and two more, the first of which both others are compared with."""
    (_, ours), (base, yardstick), (other, theirs) = curves.items()
    value, peer = difference(ours, yardstick), difference(theirs, yardstick)
    ratio = peer / value if value else math.inf
    peer_columns = {"peers": {f"{other} to {base}": peer}, "best_peer": f"{other} to {base}"}
    largest = {name: most(curve, yardstick) for name, curve in curves.items() if name != base}
    return case.row("onchip", value, f"RMS to {base}", ratio=ratio, **peer_columns) | {
        "largest": largest,
        "curves": {name: [round(x, 6) for x in curve] for name, curve in curves.items()},
    }


def difference(a: Curve, b: Curve) -> float:
    """The root of the mean square of (a - b) / b over all steps."""
    return math.sqrt(sum(((x - y) / y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


def most(a: Curve, b: Curve) -> float:
    return max(abs(x - y) / y for x, y in zip(a, b, strict=True))


def curve(
    config: ModelConfig, device: torch.device, data: list[Batch], attend: Callable[..., Tensor]
) -> Curve:
    """The loss of every step; weights in fp32, the same at the start for everybody."""
    trainer = Trainer(config, device, torch.float32, lr=LR)
    count = int((data[0].positions == 0).sum())
    rows = lambda x: x.unflatten(0, (count, -1))
    packed = lambda q, k, v: attend(rows(q), rows(k), rows(v)).flatten(0, 1)
    return torch.stack([trainer.step(batch, packed) for batch in data]).tolist()


def batches(device: torch.device, seqlen: int, count: int, num_steps: int) -> Iterator[Batch]:
    """Pieces of the King James Bible, drawn with one seed."""
    if not TEXT.is_file():
        raise RowRefused(f"{TEXT.name} is not here: loss curves need the repository")
    text = torch.frombuffer(bytearray(lzma.decompress(TEXT.read_bytes())), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(seqlen).repeat(count)
    every = torch.arange(seqlen * count)
    for _ in range(num_steps):
        starts = torch.randint(len(text) - seqlen - 1, (count, 1), generator=generator)
        where = (starts + torch.arange(seqlen)).flatten()
        tokens, targets = text[where].long(), text[where + 1].long()
        yield Batch(*(t.to(device) for t in (tokens, positions, every, targets)))
