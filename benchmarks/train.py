"""`python -m benchmarks train`: training steps, tokens a second, against the same model on torch's
SDPA.

Parts. gpt2: GPT-2 medium in shape, llama: TinyLlama-1.1B in shape, both at 2k to 32k tokens of
context; bert: BERT-large in shape at 512 tokens, lengths uniform in [1, 512], packed against
padded; curves: 500 steps on the King James Bible with each attention, same weights and batches.

A step is forward, backward and AdamW on random tokens, weights and products in bf16. Candidates
share the model and the optimizer and take turns, step by step; only the attention differs. The
learning rate is 0, so that all train the same weights. A model's flops are 6 for each weight of a
product and token, and 12 head_dim for each head, query and visible key; recomputation is not
counted. `mfu` is their share of the device's peak. Without a GPU everything runs at toy size, and
no threshold is checked.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import onchip
from benchmarks.curves import compare
from benchmarks.peak import check_accuracy
from benchmarks.trainer import Attend, Batch, Trainer
from onchip.cli.bench import gpu
from onchip.cli.bench.gpu import Capture, Timing
from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold, worst_cell
from onchip.cli.bench.measure import seconds
from onchip.cli.bench.peers import backend
from onchip.models import ModelConfig, num_parameters

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}
BERT = GPT2 | {"vocab_size": 30522}
TOY_GPT2 = GPT2 | {"vocab_size": 211, "n_embd": 64, "n_layer": 2, "n_head": 2}
TOY_LLAMA = LLAMA | {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PARTS = ("gpt2", "llama", "bert", "curves")
LENGTHS, TOY_LENGTHS = (2048, 4096, 8192, 16384, 32768), (256,)
TOKENS, TOY_TOKENS = 32768, 512
BERT_SEQLEN, TOY_SEQLEN, CHOSEN = 512, 64, 0.15  # the share of tokens that BERT must guess
ROUNDS, QUICK_ROUNDS = 7, 3  # of steps that take up to two seconds, not of 5 ms
PEAK_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12}  # dense bf16, as NVIDIA states


def _cell(mask: str, seqlen: int) -> Callable[[Row], bool]:
    return lambda r: (r["bench"], r["mask"], r["seqlen"]) == ("train", mask, seqlen)


def _threshold(mask: str, seqlen: int, least: float) -> Threshold:
    name = f"step of {mask} at {seqlen:,} tokens, against the best of SDPA"
    return worst_cell(name, _cell(mask, seqlen), least)


THRESHOLDS = (
    _threshold("llama", 2048, 0.99),
    _threshold("llama", 16384, 1.03),
    _threshold("llama", 32768, 1.05),
    Threshold(
        "BERT-large, packed against padded", lambda r: r["bench"] == "train padded", at_least=1.15
    ),
    Threshold(
        "difference of loss curves, ours over another backend's",
        lambda r: r["bench"] == "train curves",
        at_most=1.5,
        measure=lambda rows: max(1 / row["ratio"] for row in rows),
        unit="x",
    ),
)


def run(session: Session) -> None:
    if torch.cuda.is_available():
        return gpu.run(session, lambda: steps(session, toy=False))
    session.note("There is no GPU here: toy sizes, which say nothing about speed.")
    session.quick = True
    session.run(steps(session, toy=True))


def steps(session: Session, toy: bool) -> Iterator[gpu.Step]:
    parts = session.only or PARTS
    shapes = {"gpt2": TOY_GPT2, "llama": TOY_LLAMA} if toy else {"gpt2": GPT2, "llama": LLAMA}
    lengths = session.seqlens or (TOY_LENGTHS if toy or session.quick else LENGTHS)
    for name in ("gpt2", "llama"):
        for n in lengths if name in parts else ():
            yield f"{name}, {n:,} tokens", partial(measure, session, name, shapes[name], n, toy)
    if "bert" in parts:
        yield "bert", partial(measure_bert, session, TOY_GPT2 if toy else BERT, toy)
    if "curves" in parts:
        yield "loss curves", partial(compare, session, toy)


def at_length(shape: dict[str, Any], seqlen: int) -> ModelConfig:
    positions = "n_positions" if shape["model_type"] == "gpt2" else "max_position_embeddings"
    return ModelConfig.from_hf(shape | {positions: seqlen})


def measure(
    session: Session, name: str, shape: dict[str, Any], seqlen: int, toy: bool
) -> list[Row]:
    """A row: dense causal sequences, TOKENS tokens in a step."""
    config, device = at_length(shape, seqlen), session.device
    count = max((TOY_TOKENS if toy else TOKENS) // seqlen, 1)
    case = _case(f"toy {name}" if toy else name, config, seqlen, count)
    ours = dense(partial(onchip.attention, causal=True), count)
    error = check_attention(partial(onchip.attention, causal=True), config, seqlen, device)
    batch = random_batch(config, [seqlen] * count, device)
    entered = {"onchip": Entry(batch, ours)}
    for rival in ("cudnn", "fa2"):
        entered[rival] = Entry(batch, dense(sdpa(rival, config, causal=True), count))
    trainer = Trainer(config, device, compiled=not toy)
    measured, clocks = contest(session, case, trainer, entered)
    tokens, flops = seqlen * count, model_flops(config, [seqlen] * count, causal=True)
    row = _row(session, case, measured, tokens, flops, list(entered)[1:])
    return [row | {"error": error} | clocks]


def measure_bert(session: Session, shape: dict[str, Any], toy: bool) -> list[Row]:
    """Two rows: packed against padded sequences, and against packed ones by FlashAttention-2."""
    seqlen, device = TOY_SEQLEN if toy else BERT_SEQLEN, session.device
    config, count = at_length(shape, seqlen), (TOY_TOKENS if toy else TOKENS) // seqlen
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, seqlen + 1, (count,), generator=generator)
    error = check_attention(onchip.attention, config, seqlen, device, "none")
    packed = random_batch(config, lengths.tolist(), device, CHOSEN)
    padded = pad(packed, lengths, seqlen)
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    entered = {"onchip": Entry(packed, packed_onchip(cu, seqlen))}
    seen = torch.arange(seqlen, device=device) < lengths.to(device)[:, None]
    for rival in ("cudnn", "efficient", "math") if toy else ("cudnn", "efficient"):
        attend = sdpa(rival, config, attn_mask=seen[:, None, None])
        entered[f"{rival} padded"] = Entry(padded, dense(attend, count))
    entered["fa2 packed"] = Entry(packed, packed_fa2(cu, seqlen))
    trainer = Trainer(config, device, compiled=not toy)
    case = _case("toy bert" if toy else "bert", config, seqlen, count)
    measured, clocks = contest(session, case, trainer, entered)
    flops = model_flops(config, lengths.tolist(), causal=False, chosen=len(packed.rows))
    row = partial(_row, session, case, measured, len(packed.tokens), flops)
    rivals = [name for name in measured.times if name.endswith("padded")]
    rows = [
        row(rivals) | {"bench": "train padded"},
        row(["fa2 packed"]) | {"bench": "train packed"},
    ]
    return [one | {"error": error} | clocks for one in rows if one["best_peer"]]


@dataclass(frozen=True)
class Entry:
    """One candidate of a training row: a batch in its layout, and its attention."""

    batch: Batch
    attend: Attend


def random_batch(
    config: ModelConfig, lengths: Sequence[int], device: torch.device, chosen: float = 1.0
) -> Batch:
    """Random tokens in sequences of these lengths, packed; a share of them are targets."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    tokens, targets = torch.randint(config.vocab_size, (2, total), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.randperm(total, generator=generator)[: math.ceil(chosen * total)].sort().values
    return Batch(*(t.to(device) for t in (tokens, positions, rows, targets[rows])))


def pad(packed: Batch, lengths: Tensor, seqlen: int) -> Batch:
    """The same sequences, each in a row of seqlen tokens, with the same targets."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(packed.tokens.device)
    places = owner * seqlen + packed.positions
    every = torch.arange(len(lengths) * seqlen, device=places.device)
    tokens = torch.zeros_like(every).index_copy(0, places, packed.tokens)
    return Batch(tokens, every % seqlen, places[packed.rows], packed.targets)


def dense(attend: Callable[..., Tensor], count: int) -> Attend:
    """attend over (batch, seqlen, heads, head_dim), for packed sequences of one length."""
    rows = lambda x: x.unflatten(0, (count, -1))
    return lambda q, k, v: attend(rows(q), rows(k), rows(v)).flatten(0, 1)


def sdpa(name: str, config: ModelConfig, causal: bool = False, **options: Any) -> Callable:
    """A backend of torch's SDPA; groups of heads its own way, or with keys repeated if it has none.

    Which one it is, the first call finds out.
    """
    group = config.num_heads // config.num_kv_heads
    plain = backend(name, is_causal=causal, **options)
    if group == 1:
        return plain
    grouped = backend(name, is_causal=causal, enable_gqa=True, **options)
    repeat = lambda x: x.repeat_interleave(group, dim=2)
    repeated = lambda q, k, v: plain(q, repeat(k), repeat(v))
    chosen: list[Callable] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not chosen:
            chosen.append(_first_that_runs((grouped, repeated), q, k, v))
        return chosen[0](q, k, v)

    return attend


def _first_that_runs(ways: Sequence[Callable], *inputs: Tensor) -> Callable:
    """Forward and backward."""
    for way in ways[:-1]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        try:
            with torch.enable_grad():
                way(*leaves).sum().backward()
            return way
        except RuntimeError:
            continue
    return ways[-1]


def packed_onchip(cu_seqlens: Tensor, longest: int) -> Attend:
    sizes = (cu_seqlens, cu_seqlens, longest, longest)
    return lambda q, k, v: cast(Tensor, onchip.varlen_attention(q, k, v, *sizes))


def packed_fa2(cu_seqlens: Tensor, longest: int) -> Attend:
    """FlashAttention-2 as torch has it for packed sequences."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        sizes = (cu_seqlens, cu_seqlens, longest, longest)
        return cast(Tensor, varlen_attn(q, k, v, *sizes))

    return attend


def check_attention(
    attend: Callable, config: ModelConfig, seqlen: int, device: torch.device, mask: str = "causal"
) -> float:
    """The RMSE of our attention at this shape; Inaccurate if it, or a gradient, breaks the rule."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (config.num_heads, *[config.num_kv_heads] * 2, config.num_heads)
    draw = lambda h: torch.randn(
        1, seqlen, h, config.head_dim, generator=generator, device=device
    ).bfloat16()
    return check_accuracy(attend, tuple(map(draw, heads)), True, mask)


def contest(
    session: Session, case: Case, trainer: Trainer, entered: dict[str, Entry]
) -> tuple[Timing, dict[str, Any]]:
    """Time the steps in turns and read the clocks. A rival that fails, or has another loss, is left
    out and named.
    """
    captures = dict(_captures(session, case, trainer, entered))
    start = time.monotonic()
    rounds = QUICK_ROUNDS if session.quick else ROUNDS
    measured = gpu.time_captures(captures, captures["onchip"], rounds, gpu.sampler(session.device))
    return measured, session.watch(start)


def _captures(
    session: Session, case: Case, trainer: Trainer, entered: dict[str, Entry]
) -> Iterator[tuple[str, Capture]]:
    ours = None
    for name, entry in entered.items():
        try:
            found = trainer(entry.batch, entry.attend).item()
            ours = found if ours is None else ours
            if not abs(found - ours) <= 0.01 * abs(ours):
                raise RowRefused(f"its loss is {found:.4f}, ours {ours:.4f}")
            step = partial(trainer.step, entry.batch, entry.attend)
            ms = seconds(step, session.device) * 1e3
        except Exception as error:
            if name == "onchip":
                raise
            session.note(f"{name} is left out: {gpu.sentence(error)}", f" ({case})")
            trainer.optimizer.zero_grad()
            continue
        yield name, Capture(step, 1, ms)


def model_flops(
    config: ModelConfig, lengths: Sequence[int], causal: bool, chosen: int | None = None
) -> float:
    """Of a step over sequences of these lengths, `chosen` tokens of which have logits (all)."""
    head = config.vocab_size * config.hidden_size
    learned = config.max_seqlen * config.hidden_size if config.learned_positions else 0
    inner = num_parameters(config) - (1 if config.tied else 2) * head - learned
    pairs = sum(n * n for n in lengths) * (0.5 if causal else 1.0)
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * pairs
    tokens = sum(lengths)
    return 6 * inner * tokens + 6 * head * (tokens if chosen is None else chosen) + attention


def _case(name: str, config: ModelConfig, seqlen: int, count: int) -> Case:
    sizes = (config.head_dim, seqlen, count, config.num_heads)
    kv_heads = config.num_kv_heads
    return Case("train", name, torch.bfloat16, *sizes, way="step", num_kv_heads=kv_heads)


def _row(
    session: Session, case: Case, measured: Timing, tokens: int, flops: float, rivals: Sequence[str]
) -> Row:
    """Tokens a second of everybody, ratios to the rivals, and what share of the device it is."""
    rate = lambda name: tokens / measured.ms(name) * 1e3
    there = [name for name in rivals if name in measured.times]
    ratios = {name: measured.against("onchip", name) for name in there}
    best = min(ratios, key=lambda name: ratios[name].ratio) if ratios else None
    row = case.row("onchip", rate("onchip"), "tokens/s", peers={n: rate(n) for n in there})
    row |= {"step_ms": measured.ms("onchip"), "control": measured.control, "tries": measured.tries}
    if best is not None:
        row |= {"best_peer": best, "ratio": ratios[best].ratio, "band": list(ratios[best][1:])}
    off = abs(measured.control - 1)
    row["doubts"] = [f"its A/A control is off by {off:.1%}"] if off > gpu.CONTROL_LIMIT else []
    return row | {"mfu": _mfu(session.device, flops, measured)}


def _mfu(device: torch.device, flops: float, measured: Timing) -> dict[str, float] | None:
    """By candidate; None where the device's peak is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)
    if peak is None:
        return None
    share = lambda times: flops / statistics.median(times) * 1e3 / peak
    return {name: share(times) for name, times in measured.times.items()}
