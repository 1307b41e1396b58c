"""A small transformer on five tasks in the manner of the Long Range Arena, dense and block-sparse.

    python examples/long_range.py                      # a CPU: short sequences, minutes
    python examples/long_range.py --seeds 3 --attention dense,sparse,standard --results out.json

The tasks are those of examples/long_range_tasks.py: by default at their published lengths on a GPU,
and at a small size elsewhere. An encoder, the mean over the tokens and a small head are trained on
each task with each attention, and judged on examples that are held out:

    dense      onchip.attention
    sparse     the same with `onchip.masks.longformer`: a window around each token, and the first
               tokens, which see all and are seen by all; each 1 / 16 of the sequence
    standard   softmax(q kᵀ) v in plain torch, with the scores in memory: not trained, because it
               computes what dense computes; steps/s of the others are compared with it

Steps/s are of whole steps on one batch, with the attentions in turns. Ctrl-C ends a run and keeps
the trainings that are complete. It needs the packages of the command line: `pip install '.[cli]'`.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import where
from long_range_tasks import HELD_OUT, TASKS, Examples, Task
from rich.progress import Progress, TextColumn
from torch import Tensor, nn

import onchip
from onchip import masks

DENSE, SPARSE, STANDARD = ATTENTIONS = ("dense", "sparse", "standard")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_DIM = 32
REACH = 16  # the window on each side, and the global tokens, are 1 / REACH of the sequence
WARMUP = 0.1  # of the steps
ROUNDS = 7  # timed steps of each attention; the first is left out
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """A model, and how it is trained: steps of `batch` examples. held_out: examples that judge."""

    width: int
    layers: int
    batch: int
    steps: int
    held_out: int
    lr: float


FULL = Size(width=128, layers=4, batch=32, steps=2000, held_out=2048, lr=1e-3)
SMALL = Size(width=64, layers=2, batch=16, steps=200, held_out=512, lr=2e-3)


def attend_standard(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √head_dim) v; visible: bool, broadcast to (batch, heads, seqlen, seqlen)."""
    scores = torch.einsum("bnhd,bjhd->bhnj", q, k) * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("bhnj,bjhd->bnhd", scores.softmax(-1), v)


def sparse_pattern(seqlen: int) -> masks.Mask:
    return masks.longformer(seqlen // REACH, seqlen // REACH)


@cache
def build_sparse(seqlen: int, device: torch.device) -> masks.BlockMask:
    return masks.build(sparse_pattern(seqlen), 1, 1, seqlen, seqlen, device)


def choose_attend(
    attention: str, lengths: Tensor, seqlen: int, device: torch.device, has_padding: bool
) -> Attend:
    """The attention of a batch of sequences: keys from a sequence's length on are hidden."""
    if not has_padding:
        if attention == STANDARD:
            return attend_standard
        mask = build_sparse(seqlen, device) if attention == SPARSE else None
        return partial(onchip.attention, mask=mask)
    if attention == STANDARD:
        visible = torch.arange(seqlen, device=device) < lengths[:, None, None, None]
        return partial(attend_standard, visible=visible)
    pattern = masks.padding(lengths)
    if attention == SPARSE:
        pattern = pattern & sparse_pattern(seqlen)
    mask = masks.build(pattern, len(lengths), 1, seqlen, seqlen, device)
    return partial(onchip.attention, mask=mask)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).chunk(3, dim=-2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Encoder(nn.Module):
    """Tokens (count, documents, seqlen) to logits (count, num_classes).

    Each document is encoded alone. The head of two documents has both, their product and their
    difference, as the published model for retrieval.
    """

    def __init__(self, task: Task, seqlen: int, size: Size):
        super().__init__()
        self.embed = nn.Embedding(task.vocab_size, size.width)
        self.positions = nn.Embedding(seqlen, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        width = size.width if task.documents == 1 else 4 * size.width
        self.head = nn.Sequential(
            nn.Linear(width, size.width), nn.GELU(), nn.Linear(size.width, task.num_classes)
        )

    def forward(self, tokens: Tensor, lengths: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens.flatten(0, 1)) + self.positions.weight
        for block in self.blocks:
            x = block(x, attend)
        is_token = torch.arange(x.shape[1], device=x.device) < lengths.flatten()[:, None]
        mean = (x * is_token[..., None]).sum(1) / lengths.flatten()[:, None]
        pooled = self.norm(mean).unflatten(0, tokens.shape[:2])
        if pooled.shape[1] == 1:
            return self.head(pooled[:, 0])
        a, b = pooled.unbind(1)
        return self.head(torch.cat([a, b, a * b, a - b], -1))


@dataclass(frozen=True)
class Training:
    """One task with one attention at one size, on one device."""

    task: str
    attention: str
    seqlen: int
    size: Size
    device: torch.device
    dtype: torch.dtype

    def examples(self, count: int, seed: int) -> Examples:
        return TASKS[self.task].draw(count, self.seqlen, seed)

    def logits(self, model: Encoder, examples: Examples) -> Tensor:
        has_padding = bool((examples.lengths < self.seqlen).any())  # known on the host
        tokens, lengths = examples.tokens.to(self.device), examples.lengths.to(self.device)
        attend = choose_attend(
            self.attention, lengths.flatten(), self.seqlen, self.device, has_padding
        )
        is_16_bit = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=is_16_bit):
            return model(tokens, lengths, attend).float()

    def start(self, seed: int) -> tuple[Encoder, torch.optim.Optimizer]:
        """A model whose weights depend on the seed alone: the attentions start from the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Encoder(TASKS[self.task], self.seqlen, self.size)
        model = model.to(self.device)
        return model, torch.optim.AdamW(model.parameters(), self.size.lr, weight_decay=0.01)

    def step(self, model: Encoder, optimizer: torch.optim.Optimizer, examples: Examples) -> Tensor:
        labels = examples.labels.to(self.device)
        loss = F.cross_entropy(self.logits(model, examples), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, model: Encoder, examples: Examples) -> float:
        correct = 0
        for start in range(0, len(examples.labels), self.size.batch):
            part = Examples(*(tensor[start : start + self.size.batch] for tensor in examples))
            correct += int((self.logits(model, part).argmax(-1).cpu() == part.labels).sum())
        return correct / len(examples.labels)


def training_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) % HELD_OUT


def learning_rate(size: Size, step: int) -> float:
    """Up in a tenth of the steps, then down along a cosine, to nothing."""
    rise = min(1.0, (step + 1) / max(WARMUP * size.steps, 1))
    return size.lr * rise * (1 + math.cos(math.pi * step / size.steps)) / 2


def train(training: Training, seed: int, advance: Callable[[str], None]) -> Encoder:
    """advance(text) is called after every step."""
    model, optimizer = training.start(seed)
    for step in range(training.size.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training.size, step)
        examples = training.examples(training.size.batch, training_seed(seed, step))
        loss = training.step(model, optimizer, examples)
        # The host reads every tenth loss only: each one would wait for the device.
        advance(f"loss {loss.item():.3f}" if step % 10 == 0 else "")
    return model


def steps_per_second(trainings: list[Training]) -> dict[str, float]:
    """By attention: of steps on one batch, in turns, 1 / the median of their times."""
    first = trainings[0]
    examples = first.examples(first.size.batch, HELD_OUT)
    models = {training.attention: training.start(0) for training in trainings}
    times: dict[str, list[float]] = {attention: [] for attention in models}
    for _ in range(ROUNDS):
        for training in trainings:
            synchronize(training.device)
            began = time.perf_counter()
            training.step(*models[training.attention], examples)
            synchronize(training.device)
            times[training.attention].append(time.perf_counter() - began)
    return {attention: 1 / statistics.median(each[1:]) for attention, each in times.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Result:
    """constant: the held-out accuracy of the best answer that is always the same. accuracies: of
    each seed that was trained, after all steps. over_standard: steps/s over those of standard.
    """

    task: str
    attention: str
    seqlen: int
    constant: float
    accuracies: list[float]
    steps_per_second: float
    over_standard: float | None

    def as_row(self) -> dict[str, object]:
        found, row = self.accuracies, asdict(self)
        if found:  # standard has none, and neither has a training that Ctrl-C ended
            row |= {"mean": statistics.mean(found), "min": min(found), "max": max(found)}
        return row


def constant_accuracy(labels: Tensor) -> float:
    return labels.bincount().max().item() / len(labels)


def measure(trainings: list[Training], seeds: int, bar: Progress) -> Iterator[list[Result]]:
    """The results of one task, again after every seed that was trained."""
    first = trainings[0]
    held_out = first.examples(first.size.held_out, HELD_OUT)
    rates = steps_per_second(trainings)
    standard = rates.get(STANDARD)
    constant = constant_accuracy(held_out.labels)
    results = {
        name: Result(
            first.task, name, first.seqlen, constant, [], rate, standard and rate / standard
        )
        for name, rate in rates.items()
    }
    yield list(results.values())
    for training in trainings:
        for seed in range(seeds if training.attention != STANDARD else 0):
            title = f"{training.task}, {training.attention}, seed {seed}"
            job = bar.add_task(title, total=training.size.steps, said="")
            advance = partial(show_step, bar, job)
            model = train(training, seed, advance)
            found = training.accuracy(model, held_out)
            results[training.attention].accuracies.append(found)
            bar.remove_task(job)
            bar.console.print(f"{title}: {found:.1%} of held-out examples, {constant:.1%} constant")
            yield list(results.values())


def show_step(bar: Progress, job, text: str) -> None:
    bar.update(job, advance=1, **({"said": text} if text else {}))


def write(file: Path, settings: dict[str, object], results: list[Result]) -> None:
    """Under a new name that replaces the old: a complete file exists at any time."""
    new = file.with_name(f"{file.name}.new")
    rows = [result.as_row() for result in results]
    new.write_text(json.dumps(settings | {"rows": rows}, indent=1) + "\n")
    new.replace(file)


def print_table(results: list[Result]) -> None:
    heads = ("task", "attention", "tokens", "constant", "accuracy (min to max)", "steps/s")
    print("{:12}{:11}{:>7}{:>10}{:>24}{:>10}".format(*heads) + "  over standard")
    for r in results:
        row = r.as_row()
        accuracy = "{mean:.1%} ({min:.1%} to {max:.1%})".format(**row) if r.accuracies else ""
        cells = f"{r.task:12}{r.attention:11}{r.seqlen:7,}{r.constant:10.1%}{accuracy:>24}"
        ratio = "" if r.over_standard is None else f"{r.over_standard:15.2f}"
        print(f"{cells}{r.steps_per_second:10.2f}{ratio}")


def names_of(choices: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A parser of names with commas between them, in the order of `choices`."""

    def parse(text: str) -> tuple[str, ...]:
        names = text.split(",")
        for name in names:
            if name not in choices:
                message = f"{name!r} is not one of {', '.join(choices)}"
                raise argparse.ArgumentTypeError(message)
        return tuple(choice for choice in choices if choice in names)

    return parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    tasks = tuple(TASKS)
    parser.add_argument("--tasks", type=names_of(tasks), default=tasks, help=", ".join(tasks))
    parser.add_argument(
        "--attention",
        type=names_of(ATTENTIONS),
        default=(DENSE, SPARSE),
        help=f"of {', '.join(ATTENTIONS)} (default: dense,sparse)",
    )
    parser.add_argument("--seqlen", type=positive, help="of every task (default: its own)")
    parser.add_argument("--small", action="store_true", help="the sizes of a CPU, on a GPU too")
    parser.add_argument("--steps", type=positive, help="of a training (default: the size's own)")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N - 1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(arguments)
    args.device = torch.device(args.device)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if args.results and not args.results.parent.is_dir():
        parser.error(f"--results: there is no folder {args.results.parent}")
    is_gpu = args.device.type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if is_gpu else "float32")
    args.small = args.small or not is_gpu
    try:  # a length that a task does not have is refused now, not after the tasks before it
        for name in args.tasks:
            for seed in (0, HELD_OUT):
                TASKS[name].draw(1, length_of(name, args), seed)
    except ValueError as error:
        parser.error(str(error))
    return args


def length_of(name: str, args: argparse.Namespace) -> int:
    task = TASKS[name]
    return args.seqlen or (task.small_seqlen if args.small else task.seqlen)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    size = SMALL if args.small else FULL
    size = replace(size, steps=args.steps or size.steps)
    settings = {"dtype": args.dtype, "seeds": args.seeds} | asdict(size) | where(args.device)
    done: list[Result] = []
    results, status = done, 0
    columns = *Progress.get_default_columns(), TextColumn("{task.fields[said]}")
    try:
        with Progress(*columns) as bar:
            for name in args.tasks:
                seqlen, dtype = length_of(name, args), DTYPES[args.dtype]
                trainings = [
                    Training(name, attention, seqlen, size, args.device, dtype)
                    for attention in args.attention
                ]
                for found in measure(trainings, args.seeds, bar):
                    results = done + found
                    if args.results:
                        write(args.results, settings, results)
                done = results
    except KeyboardInterrupt:
        print("interrupted: the trainings above are complete", file=sys.stderr)
        status = INTERRUPTED
    print_table(results)
    return status


if __name__ == "__main__":
    sys.exit(main())
