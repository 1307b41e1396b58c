"""`python -m benchmarks step`: the parts of one decode step of a served model, in microseconds.

Qwen3-0.6B in shape, random weights, bf16: 256 sequences of 600 tokens, one new token each, sampled
at temperature 0.6. A part is all work of one kind in a step, over all layers, replayed from a CUDA
graph; so is the whole step. "eager" is the step without a graph, from its first launch until the
GPU is done. "all but attention" is the whole step less its attention: the engine's budget of 2 ms a
step is for this.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold
from onchip.cli.bench.measure import seconds, synchronize
from onchip.engine.sampler import LogitEdits, SamplerOutput, SamplingMetadata, sample
from onchip.kvcache import KVCache, PagedBatch
from onchip.models import Decoder, ModelConfig, positions_of, random_model
from onchip.models.attend import PagedAttend
from onchip.models.decoder import embed
from onchip.models.norm import add_norm
from onchip.models.pointwise import gated_activation
from onchip.models.rotary import cos_sin

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
BATCH, LENGTH, TEMPERATURE = 256, 600, 0.6
ROUNDS, QUICK_ROUNDS = 30, 6
PARTS = ("begin", "norms", "products", "place", "attention", "gates", "head", "draw")
Job = Callable[[], object]


def _named(name: str) -> Callable[[Row], bool]:
    return lambda row: row["bench"] == "step" and row["kernel"] == name


THRESHOLDS = (
    Threshold("all but attention, us", _named("all but attention"), at_most=2000),
    Threshold("draw, us", _named("draw"), at_most=150),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    yield "decode step", partial(measure, session, QWEN3, BATCH, LENGTH)


def measure(session: Session, shape: dict[str, Any], batch: int, length: int) -> list[Row]:
    """A row for each part, and for the whole step."""
    with torch.inference_mode():
        setup = Setup.of(shape, batch, length, session.device)
        check(setup)
        jobs = {name: getattr(setup, name) for name in (*PARTS, "step")}
        rounds = QUICK_ROUNDS if session.quick else ROUNDS
        spent = {name: replay_us(job, rounds, session.device) for name, job in jobs.items()}
        spent["eager"] = eager_us(setup.step, rounds, session.device)
    spent["all but attention"] = spent["step"] - spent["attention"]
    config = setup.model.config
    sizes = (config.head_dim, length, batch, config.num_heads)
    case = Case("step", "causal", torch.bfloat16, *sizes, num_kv_heads=config.num_kv_heads)
    return [case.row(name, us, "us") for name, us in spent.items()]


@dataclass
class Setup:
    """A model, sequences in its cache with one token to compute, and what the parts work on."""

    model: Decoder
    cache: KVCache
    batch: PagedBatch
    tokens: Tensor
    rows: SamplingMetadata

    @classmethod
    def of(cls, shape: dict[str, Any], count: int, length: int, device: torch.device) -> "Setup":
        model = random_model(ModelConfig.from_hf(shape), device=device, dtype=torch.bfloat16)
        spec = model.cache_spec()
        pages = count * -(-length // spec.page_size) + 1
        cache = KVCache(spec, pages, max_seqs=count, max_seqlen=length, prefix_reuse=False)
        for kept in (cache.pages.k, cache.pages.v):
            kept.normal_()
        sequences = [cache.open() for _ in range(count)]
        cache.append_all(sequences, [[1] * length] * count)
        for sequence in sequences:
            cache.commit(sequence, length - 1)
        tokens = torch.arange(count, device=device) % model.config.vocab_size
        every = torch.arange(count, device=device)
        uniform = torch.rand(count, dtype=torch.float64, device=device)
        temperature = torch.full((count,), TEMPERATURE, device=device)
        rows = SamplingMetadata(LogitEdits(None, None), every, temperature, uniform)
        return cls(model, cache, cache.view(sequences), tokens, rows)

    def step(self) -> SamplerOutput:
        hidden = self.model(self.tokens, positions_of(self.batch), self.batch, self.cache)
        return sample(self.model.logits(hidden, wide=False), self.rows)

    def begin(self) -> object:
        """Positions, rotations and embeddings, once for all layers."""
        positions = positions_of(self.batch)
        embed(self.tokens, self.model.embed, self.model.config.embedding_scale)
        return [cos_sin(rotary, positions) for rotary in self.model.rotaries]

    def norms(self) -> None:
        x = y = self._wide("hidden")
        for block in self._blocks:
            x, _ = add_norm(x, y, block.attention_norm)
            x, _ = add_norm(x, y, block.mlp_norm)
        add_norm(x, y, self.model.norm)

    def products(self) -> None:
        hidden, heads, inner = (self._wide(name) for name in ("hidden", "heads", "inner"))
        for block in self._blocks:
            block.attention.qkv(hidden)
            block.attention.out(heads)
            block.mlp.up(hidden)
            block.mlp.down(inner)

    def place(self) -> None:
        """Norms of the heads, rotations and page writes."""
        for block in self._blocks:
            block.attention.write(self._wide("qkv"), self._rope, self._paged)

    def attention(self) -> None:
        q = self._wide("heads").unflatten(-1, (self.model.config.num_heads, -1))
        for i, block in enumerate(self._blocks):
            self._paged.read(i, q, **block.attention.options)

    def gates(self) -> None:
        for block in self._blocks:
            gated_activation(self._wide("gates"), block.mlp.activation)

    def head(self) -> Tensor:
        return self.model.logits(self._wide("hidden"), wide=False)

    def draw(self) -> SamplerOutput:
        return sample(self._logits, self.rows)

    @property
    def _blocks(self) -> list[Any]:
        return list(self.model.layers)

    @property
    def _paged(self) -> PagedAttend:
        return PagedAttend(self.batch, self.cache)

    @cached_property
    def _rope(self) -> list[tuple[Tensor, Tensor]]:
        return [cos_sin(rotary, positions_of(self.batch)) for rotary in self.model.rotaries]

    @cached_property
    def _logits(self) -> Tensor:
        return self.head().clone()

    @cached_property
    def _inputs(self) -> dict[str, Tensor]:
        c = self.model.config
        qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        inner = {"inner": c.intermediate_size, "gates": 2 * c.intermediate_size}
        widths = {"hidden": c.hidden_size, "heads": c.num_heads * c.head_dim, "qkv": qkv, **inner}
        like = self.model.embed
        return {
            name: torch.randn(len(self.tokens), width, dtype=like.dtype, device=like.device)
            for name, width in widths.items()
        }

    def _wide(self, name: str) -> Tensor:
        return self._inputs[name]


def check(setup: Setup) -> None:
    """RowRefused unless a step gives finite log probabilities, twice the same."""
    first, second = setup.step(), setup.step()
    if not first.logprob.isfinite().all() or not torch.equal(first.token, second.token):
        raise RowRefused("two steps over the same pages differ, or are not finite")


def replay_us(job: Job, rounds: int, device: torch.device) -> float:
    """The median over rounds of one replay. What a part leaves to compute once is not captured."""
    job()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    graph.replay()
    return statistics.median(_replay(graph) for _ in range(rounds)) * 1e3


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds; the GPU is kept busy before, so that no launch is timed."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def eager_us(job: Job, rounds: int, device: torch.device) -> float:
    return statistics.median(seconds(job, device) for _ in range(rounds)) * 1e6
