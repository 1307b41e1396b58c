"""`python -m benchmarks reproducible`: what reproducible=True costs, against the default, bf16.

Attention alone (32 query heads on 8 of 128): whole sequences, a chunk and decoding over pages.
Products of a layer of Llama-3-8B in shape for 1 to 8,192 rows, against torch's. Serving and a
training step of Qwen3-0.6B in shape, random weights. `ratio` is the default's time over that of
the mode, or tokens/s over tokens/s; above 1 the mode is faster.

Attention and products are replayed from CUDA graphs, with inputs of more than the L2. A row is
refused if attention breaks the accuracy rule, or if the RMSE of a product exceeds that of torch's
by more than this rule allows.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import onchip
from benchmarks.products import MOST_ERROR, Shape, shapes
from benchmarks.serving import LLAMA3, least
from benchmarks.step import QUICK_ROUNDS, QWEN3, ROUNDS, replay_us
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold, hold
from onchip.engine import Engine, ExecutionConfig, Limits, SamplingParams
from onchip.kernels.llm import fixed_order
from onchip.models import Decoder, ModelConfig, random_model
from onchip.testing import rmse

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
ROW_COUNTS = (1, 8, 64, 512, 8192)
ROTATED_BYTES = 2**28  # more than twice the L2
MOST_COPIES = 16
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 256, 128, 128
TRAINED_TOKENS, STEPS = (8, 1024), 6


class Call(NamedTuple):
    """An attention call: sequences, new tokens and keys of each, and whether keys are in pages."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    paged: bool = True


CALLS = (
    Call("forward", 1, 8192, 8192, paged=False),
    Call("forward", 8, 1024, 1024, paged=False),
    Call("chunk", 1, 512, 8192),
    Call("decode", 1, 1, 1024),
    Call("decode", 1, 1, 32_768),
    Call("decode", 16, 1, 4096),
    Call("decode", 128, 1, 1024),
)


def _of(name: str) -> Callable[[Row], bool]:
    return lambda row: row["bench"] == f"reproducible {name}"


THRESHOLDS = (
    Threshold("attention, least", _of("attention"), at_least=0.95, measure=least("ratio")),
    Threshold("products, least", _of("products"), at_least=0.90, measure=least("ratio")),
    Threshold("serving, tokens/s", _of("serving"), at_least=0.90, measure=least("ratio")),
    Threshold("a training step", _of("training"), at_least=0.92, measure=least("ratio")),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    for call in CALLS[1:4:2] if session.quick else CALLS:
        yield f"attention {call}", partial(measure_attention, session, call)
    products = shapes(ModelConfig.from_hf(LLAMA3))
    for name in ("out",) if session.quick else products:
        yield f"products {name}", partial(measure_products, session, name, products[name])
    config = QWEN3 | ({"num_hidden_layers": 2} if session.quick else {})
    yield "serving", partial(measure_serving, session, config)
    yield "training", partial(measure_training, session, config)


def measure_attention(session: Session, call: Call) -> list[Row]:
    inputs = [draw(call, session.device) for _ in range(_copies(call))]
    attend = onchip.paged_attention if call.paged else partial(onchip.attention, causal=True)
    if not call.paged:
        q, k, v = (t[:1, -512:] for t in inputs[0])
        hold(partial(attend, reproducible=True), q, k, v, causal=True)

    def run_all(reproducible: bool) -> None:
        for each in inputs:
            attend(*each, reproducible=reproducible)

    with torch.inference_mode():
        ours, theirs = (_replay_us(session, partial(run_all, on)) for on in (True, False))
    sizes = {"batch": call.batch, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "way": call.name}
    case = Case(
        "reproducible attention", "causal", torch.bfloat16, DIM, call.seqlen_q, **sizes,
        seqlen_k=call.seqlen_k,
    )  # fmt: skip
    return [_row(session, case, "triton", "us", ours / len(inputs), theirs / len(inputs))]


def draw(call: Call, device: torch.device) -> tuple[Tensor, ...]:
    """q, k and v, or q, pages, a table of shuffled pages and the lengths."""
    heads = (call.batch, call.seqlen_q, HEADS, DIM)
    q = torch.randn(heads, dtype=torch.bfloat16, device=device)
    if not call.paged:
        k, v = torch.randn(2, call.batch, call.seqlen_k, KV_HEADS, DIM, device=device).to(q)
        return q, k, v
    pages = call.batch * call.seqlen_k // PAGE
    k, v = torch.randn(2, pages, PAGE, KV_HEADS, DIM, device=device).to(q)
    table = torch.randperm(pages, device=device).int().view(call.batch, -1)
    return q, k, v, table, torch.full((call.batch,), call.seqlen_k, device=device).int()


def _copies(call: Call) -> int:
    each = 2 * call.batch * call.seqlen_k * KV_HEADS * DIM * 2
    return max(1, min(MOST_COPIES, ROTATED_BYTES // each))


def measure_products(session: Session, name: str, shape: Shape) -> list[Row]:
    """A row for each number of rows."""
    each = shape.columns * shape.width * 2
    count = max(1, min(MOST_COPIES, ROTATED_BYTES // each))
    like = {"dtype": torch.bfloat16, "device": session.device}
    weight = torch.randn(shape.columns, shape.width, **like) * shape.width**-0.5
    weights = [weight.clone() for _ in range(count)]
    with torch.inference_mode():
        return [_measure_product(session, name, weights, rows) for rows in ROW_COUNTS]


def _measure_product(session: Session, name: str, weights: list[Tensor], num_rows: int) -> Row:
    x = torch.randn(num_rows, weights[0].shape[1], dtype=torch.bfloat16, device=session.device)
    _check_product(x, weights[0])

    def run_all(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        for weight in weights:
            multiply(x, weight)

    ours, theirs = (
        _replay_us(session, partial(run_all, multiply)) / len(weights)
        for multiply in (fixed_order.multiply, F.linear)
    )
    case = Case("reproducible products", f"llama-3-8b {name}", torch.bfloat16, DIM, 1, num_rows)
    row = _row(session, case, "triton", "us", ours, theirs)
    return row | {"tile": list(fixed_order.choose_tile(x, weights[0]))}


def _check_product(x: Tensor, weight: Tensor) -> None:
    """RowRefused if the errors of up to 512 rows and 1,024 columns are larger than torch's by more
    than the rule's 5 %, or if the last row differs from that of a call of its own.
    """
    x, weight = x[-512:], weight[:1024]
    exact = F.linear(x.double(), weight.double()).float()
    whole = fixed_order.multiply(x, weight)
    errors = [rmse(out.float(), exact) for out in (whole, F.linear(x, weight))]
    if not errors[0] <= MOST_ERROR * errors[1]:
        raise RowRefused(f"{len(x)} rows: an RMSE of {errors[0]:.3g}, of torch {errors[1]:.3g}")
    if not torch.equal(fixed_order.multiply(x[-1:], weight), whole[-1:]):
        raise RowRefused(f"the last of {len(x)} rows has other bits alone")


def measure_serving(session: Session, fields: dict[str, Any]) -> list[Row]:
    """Tokens/s of requests that arrive at once, the best of two runs each."""
    config = ModelConfig.from_hf(fields)
    rates = []
    for reproducible in (True, False):
        model = random_model(config, device=session.device, dtype=torch.bfloat16)
        rates.append(_serve(model, reproducible))
        session.note(f"serving, reproducible={reproducible}: {rates[-1]:.0f} tokens/s")
    case = Case("reproducible serving", "qwen3-0.6b", torch.bfloat16, config.head_dim, NEW_TOKENS)
    row = case.row("onchip", rates[0], "tokens/s", peers={"default": rates[1]})
    return [row | {"best_peer": "default", "ratio": rates[0] / rates[1]}]


def _serve(model: Decoder, reproducible: bool) -> float:
    length = PROMPT_TOKENS + NEW_TOKENS
    limits = Limits(length + 1, 8192, REQUESTS)
    execution = ExecutionConfig(reproducible=reproducible)
    pages = REQUESTS * (-(-length // PAGE) + 1)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=1, ignore_eos=True)
    best = 0.0
    with Engine(model, None, limits=limits, num_pages=pages, execution=execution) as engine:
        for i in range(3):  # the first run records graphs
            for prompt in range(REQUESTS):
                engine.add([i, prompt % 251, *range(PROMPT_TOKENS - 2)], params)
            torch.cuda.synchronize()
            start = time.perf_counter()
            while engine.has_work:
                engine.step()
            rate = REQUESTS * NEW_TOKENS / (time.perf_counter() - start)
            best = max(best, rate if i else 0.0)
    return best


def measure_training(session: Session, fields: dict[str, Any]) -> list[Row]:
    """Milliseconds of a forward and a backward, the median of some."""
    config = ModelConfig.from_hf(fields)
    model = random_model(config, device=session.device, dtype=torch.bfloat16)
    tokens = torch.randint(config.vocab_size, TRAINED_TOKENS, device=session.device)
    times = []
    for reproducible in (True, False):
        model.set_reproducible(reproducible)
        times.append(_train_ms(model, tokens))
    case = Case(
        "reproducible training", "qwen3-0.6b", torch.bfloat16, config.head_dim, TRAINED_TOKENS[1],
        TRAINED_TOKENS[0], config.num_heads, backward=True, num_kv_heads=config.num_kv_heads,
    )  # fmt: skip
    return [_row(session, case, "onchip", "ms", *times)]


def _train_ms(model: Decoder, tokens: Tensor) -> float:
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits = model.logits(model.full(tokens))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.zero_grad(set_to_none=True)
        del logits
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[STEPS // 2]


def _replay_us(session: Session, job: Callable[[], object]) -> float:
    return replay_us(job, QUICK_ROUNDS if session.quick else ROUNDS, session.device)


def _row(session: Session, case: Case, kernel: str, unit: str, ours: float, theirs: float) -> Row:
    ratio = theirs / ours
    session.say(f"{case}, batch {case.batch}: {ours:.1f} {unit}, default {theirs:.1f}, {ratio:.2f}")
    row = case.row(kernel, ours, unit, peers={"default": theirs})
    return row | {"best_peer": "default", "ratio": ratio}
