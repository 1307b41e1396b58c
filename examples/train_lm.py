"""A byte-level decoder, trained on the King James Bible and served by onchip.

    python examples/train_lm.py --size toy                       # a CPU, about a minute
    python examples/train_lm.py --size full --compile            # a GPU, minutes
    python examples/train_lm.py --size draft --until 3000        # drafts for it: a CPU, 15 minutes
    onchip generate --model runs/toy/model "And the LORD said"

Chapters are documents. A batch is packed: pieces of chapters, one after another, and
`onchip.varlen_attention` lets nobody look into another piece. Run it again and it goes on from
its last checkpoint; a batch depends on the seed and the number of the step alone, so that a run
which was interrupted ends with the same weights, on a CPU bit for bit.

It needs the packages of the command line: `pip install '.[cli]'`.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import restore, save, where
from packing import EOS, Batch, Corpus, cover, read_corpora, training_batch
from rich.progress import Progress, TextColumn
from torch import Tensor

from onchip import LLM, SamplingParams
from onchip.core.machine import has_fast_matmul
from onchip.engine.tokenizer import ByteTokenizer
from onchip.models import Decoder, ModelConfig, random_model
from onchip.models import save as save_folder

CPU_HAS_BF16 = has_fast_matmul(torch.bfloat16)  # elsewhere a step in bf16 takes minutes
TOLD = 10  # steps between two looks at the loss: the host does not wait for every one
PROMPTS = ("In the beginning ", "And the LORD said unto ", "Blessed are the ")


@dataclass(frozen=True)
class Size:
    """A model, and how it is trained: steps of `tokens` tokens, in pieces of at most `context`.
    window: a token sees itself and window - 1 tokens before it, so the model also serves texts that
    are longer than its context.
    """

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    tokens: int
    steps: int
    lr: float
    window: int | None = None

    @property
    def config(self) -> ModelConfig:
        fields = {
            "model_type": "llama",
            "vocab_size": ByteTokenizer.VOCAB_SIZE,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
        }
        if self.window is not None:
            fields |= {"model_type": "mistral", "sliding_window": self.window}
            fields |= {"max_position_embeddings": SIZES["full"].context}
        return ModelConfig.from_hf(fields)


SIZES = {
    "toy": Size(128, 256, 2, 4, 2, 256, 2048, 200, 4e-3),
    "small": Size(256, 704, 4, 4, 1, 2048, 2048, 2500, 2e-3),
    "full": Size(256, 704, 7, 4, 1, 2048, 32768, 900, 3e-3),  # of 2,500, 1,000 were the best
    "draft": Size(96, 272, 2, 3, 1, 256, 2048, 4000, 4e-3, 64),  # drafts for the full size
}


def loss_of(model: Decoder, batch: Batch, context: int, reduction: str = "mean") -> Tensor:
    device = batch.tokens.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu" or CPU_HAS_BF16):
        hidden = model.full(batch.tokens, batch.cu_seqlens, context)
        return F.cross_entropy(model.logits(hidden), batch.targets, reduction=reduction)


@torch.no_grad()
def bits_per_byte(model: Decoder, corpus: Corpus, size: Size) -> float:
    """Of held-out text, ends of chapters included in the bits but not in the bytes."""
    batches = (batch.to(model.device) for batch in cover(corpus, size.context))
    nats = sum(loss_of(model, batch, size.context, "sum").double() for batch in batches)
    return float(nats) / math.log(2) / int((corpus.tokens != EOS).sum())


def fresh_model(size: Size, seed: int, device: torch.device) -> Decoder:
    """Norms at one; what is added to the residual stream starts small."""
    model = random_model(size.config, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            elif name.endswith(("out.weight", "down.weight")):
                weight.mul_((2 * size.layers) ** -0.5)
    return model.to(device)


def optimizer_of(model: Decoder) -> torch.optim.AdamW:
    """Matrices decay, norms do not."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() == 2], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def learning_rate(size: Size, step: int) -> float:
    """Up in a twentieth of the steps, then down along a cosine, to nothing."""
    rise = min(1.0, (step + 1) / max(size.steps // 20, 1))
    return size.lr * rise * (1 + math.cos(math.pi * step / size.steps)) / 2


class Run:
    """A training run and its folder: checkpoint.safetensors, curve.json, curve.svg, model/."""

    def __init__(self, size: Size, folder: Path, seed: int, device: torch.device):
        self.size, self.folder, self.seed, self.device = size, folder, seed, device
        self.model = fresh_model(size, seed, device)
        self.optimizer = optimizer_of(self.model)
        self.losses: list[float] = []  # nats of each step
        self.held_out: list[tuple[int, float]] = []  # bits per byte after so many steps
        folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.is_file():
            self.restore()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @property
    def done(self) -> int:
        return len(self.losses)

    def steps(self, batches: Iterator[Batch], loss_of) -> None:
        """One for each batch."""
        losses = [self.step(batch, self.done + i, loss_of) for i, batch in enumerate(batches)]
        self.losses += torch.stack(losses).tolist()

    def step(self, batch: Batch, number: int, loss_of) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.size, number)
        loss = loss_of(self.model, batch.to(self.device), self.size.context)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self) -> None:
        losses = torch.tensor(self.losses, dtype=torch.float64)
        held_out = torch.tensor(self.held_out, dtype=torch.float64).view(-1, 2)
        save(self.checkpoint, self.model, self.optimizer, losses=losses, held_out=held_out)

    def restore(self) -> None:
        kept = restore(self.checkpoint, self.model, self.optimizer)
        self.losses = kept["losses"].tolist()
        self.held_out = [(int(step), bits) for step, bits in kept["held_out"].tolist()]


def train(run: Run, corpora: tuple[Corpus, Corpus], compiled: bool, every: int, until: int) -> None:
    """To step `until`; a checkpoint and the held-out loss after every so many."""
    trained_on, held_out = corpora
    size = run.size
    batch = partial(training_batch, trained_on, size.context, size.tokens, run.seed)
    loss = torch.compile(loss_of) if compiled else loss_of
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[said]}")) as bar:
        task = bar.add_task("training", total=until, completed=run.done, said="")
        while run.done < until:
            began, first = time.perf_counter(), run.done
            last = min(first + TOLD, first - first % every + every, until)
            run.steps(map(batch, range(first, last)), loss)
            rate = size.tokens * (last - first) / (time.perf_counter() - began)
            said = f"loss {run.losses[-1]:.3f}, {rate:,.0f} tokens/s"
            if run.done % every == 0 or run.done == until:
                bits = bits_per_byte(run.model, held_out, size)
                run.held_out.append((run.done, bits))
                run.save()
                bar.console.print(f"step {run.done}: {said}, held out {bits:.4f} bits per byte")
            bar.update(task, completed=run.done, said=said)


def export(run: Run) -> Path:
    """A folder that onchip and transformers load: bf16, token i is byte i."""
    folder = run.folder / "model"
    model = Decoder(run.size.config, dtype=torch.bfloat16)
    model.load_state_dict(run.model.state_dict())
    save_folder(model, folder)
    ByteTokenizer().save(folder)
    return folder


def draw(run: Run, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    bits = [loss / math.log(2) for loss in run.losses]
    axes.plot(range(1, len(bits) + 1), bits, linewidth=0.6, alpha=0.6, label="training, each step")
    axes.plot(*zip(*run.held_out, strict=True), "o-", markersize=3, label="held out")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(min(bits) - 0.2, 5.0))
    axes.legend()
    figure.savefig(file)


def samples(folder: Path) -> Iterator[str]:
    """What the exported model makes of a few beginnings, through the engine that serves it; on the
    CPU, which is soon done with three of them.
    """
    llm = LLM(folder, tokenizer=ByteTokenizer(), dtype="float32", device="cpu")
    drawn = [SamplingParams(temperature=0.7, max_tokens=160, seed=i) for i in range(len(PROMPTS))]
    for output in llm.generate(list(PROMPTS), drawn):
        yield output.prompt + output.outputs[0].text


def finish(run: Run) -> None:
    """The model, its curve, a picture of it, and samples."""
    folder = export(run)
    facts = {"size": asdict(run.size), "seed": run.seed} | where(run.device)
    curve = facts | {"losses_nats": run.losses, "held_out_bits_per_byte": run.held_out}
    (run.folder / "curve.json").write_text(json.dumps(curve))
    draw(run, run.folder / "curve.svg")
    for text in samples(folder):
        print(f"\n{text}")
    print(f"\n{folder}: {sum(w.numel() for w in run.model.parameters()):,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="toy", choices=SIZES)
    parser.add_argument("--steps", type=int, help="of the schedule (default: the size's own)")
    parser.add_argument("--until", type=int, help="stop there, to go on later (default: the last)")
    parser.add_argument("--context", type=int, help="tokens of a piece, at most (default: its own)")
    parser.add_argument(
        "--folder", type=Path, help="default: runs/SIZE; goes on with what is there"
    )
    parser.add_argument("--every", type=int, help="steps between checkpoints (default: a fifth)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="the step, by torch.compile")
    args = parser.parse_args()
    size = SIZES[args.size]
    size = replace(size, steps=args.steps or size.steps, context=args.context or size.context)
    folder = args.folder or Path("runs") / args.size
    run = Run(size, folder, args.seed, torch.device(args.device))
    every, until = args.every or max(size.steps // 5, 1), args.until or size.steps
    if until > size.steps:
        parser.error(f"--until {until}: the schedule ends at step {size.steps}, see --steps")
    train(run, read_corpora(), args.compile, every, until)
    finish(run)


if __name__ == "__main__":
    main()
