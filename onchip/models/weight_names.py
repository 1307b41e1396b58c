"""The names of a decoder's parameters in checkpoints, and how fused parameters are split."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.models import mxfp4_weights
from onchip.models.config import ModelConfig
from onchip.models.layer_config import Experts, LatentSizes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One rank of tensor parallelism: it has a share of the heads and of the MLP. Embedding, norms
    and head are on every rank.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} must be in [0, world_size={self.world_size})")

    def of(self, piece: Tensor, cut: int | None) -> Tensor:
        """This rank's share of a slice; cut: as in `Target`."""
        if cut is None:
            return piece
        if cut < 0:
            return piece if self.rank == 0 else torch.zeros_like(piece)
        return piece.chunk(self.world_size, cut)[self.rank]


class WeightSlice(NamedTuple):
    """`rows` rows of a checkpoint tensor (columns, if it is stored transposed), every step-th from
    start on: the next rows of a parameter. matrix: which one of a stacked tensor. is_whole: every
    rank of tensor parallelism has all of it.
    """

    name: str
    start: int
    rows: int
    matrix: int = 0
    step: int = 1
    is_whole: bool = False


class Target(NamedTuple):
    """A parameter of Decoder and its slices in a checkpoint. cut: the dimension that ranks of
    tensor parallelism divide, slice by slice; -1 for a bias that only one rank adds; None: not
    divided. stacked: how many matrices (or biases) the checkpoint tensor holds, (stacked, rows,
    columns); None: it is one. is_mxfp4: it is two tensors, as `mxfp4_weights` describes.
    """

    name: str
    shape: Shape
    pieces: tuple[WeightSlice, ...]
    transposed: bool = False
    cut: int | None = None
    stacked: int | None = None
    is_mxfp4: bool = False

    @property
    def sources(self) -> dict[str, Shape]:
        """The checkpoint tensors of this parameter, and their shapes."""
        ends: dict[str, int] = {}
        for piece in self.pieces:
            end = piece.start + (piece.rows - 1) * piece.step + 1
            ends[piece.name] = max(ends.get(piece.name, 0), end)
        shapes = {name: (rows, *self.shape[1:]) for name, rows in ends.items()}
        if self.transposed:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        if self.stacked is not None:
            shapes = {name: (self.stacked, *shape) for name, shape in shapes.items()}
        if not self.is_mxfp4:
            return shapes
        stored = (mxfp4_weights.stored_shapes(name, shape) for name, shape in shapes.items())
        return {name: shape for pair in stored for name, shape in pair.items()}

    def select(self, source: Tensor, piece: WeightSlice) -> Tensor:
        """The rows of a slice, a view of its checkpoint tensor."""
        source = source if self.stacked is None else source[piece.matrix]
        source = source.T if self.transposed else source
        return source[piece.start :: piece.step][: piece.rows]


class WeightNames(NamedTuple):
    """The names of one family. qkv and up have one name per projection, or one for all of them.
    expert_up and expert_down: of the expert with a number; shared_up, shared_down and shared_gate:
    of the one for all tokens. choice_bias: of the router. interleaved: expert_up and expert_down
    are of all experts of a layer, transposed matrices, and gate and up are the even and the odd
    columns of expert_up.
    """

    prefix: str
    embed: str
    norm: str
    layer: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    positions: str = ""
    head: str = "lm_head.weight"
    transposed: bool = False
    router: str = ""
    expert_up: tuple[str, ...] = ()
    expert_down: str = ""
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""
    choice_bias: str = ""
    interleaved: bool = False
    sinks: str = ""


_LLAMA = WeightNames(
    prefix="model.",
    embed="embed_tokens.weight",
    norm="norm",
    layer="layers.{}.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
_GEMMA2 = _LLAMA._replace(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_MIXTRAL = _LLAMA._replace(
    router="block_sparse_moe.gate",
    expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)
_QWEN_MOE = _LLAMA._replace(
    router="mlp.gate",
    expert_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    expert_down="mlp.experts.{}.down_proj",
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
# All experts of a layer in two tensors, as modules of transformers 5 have them.
STACKED_ROUTER, STACKED_UP, STACKED_DOWN = (
    "mlp.gate",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
)
_DEEPSEEK = _QWEN_MOE._replace(
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
    choice_bias="mlp.gate.e_score_correction_bias",
)
_GPT_OSS = _LLAMA._replace(
    router="mlp.router",
    expert_up=(STACKED_UP,),
    expert_down=STACKED_DOWN,
    interleaved=True,
    sinks="self_attn.sinks",
)
_GPT2 = WeightNames(
    prefix="transformer.",
    embed="wte.weight",
    norm="ln_f",
    layer="h.{}.",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    positions="wpe.weight",
    transposed=True,
)
NAMES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "gpt_oss": _GPT_OSS,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi3": _LLAMA._replace(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "gpt2": _GPT2,
}
# Buffers in old checkpoints: masks and frequencies, which the config determines.
DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def targets(
    config: ModelConfig, prefixed: bool = True, stacked: bool = False, is_mxfp4: bool = False
) -> Iterator[Target]:
    """Every parameter of the Decoder of a config. prefixed: as a causal language model is stored; a
    model without a head is stored without the prefix. stacked: the experts of a layer are stored in
    two tensors, else each on its own. is_mxfp4: matrices of interleaved experts are in MXFP4.
    """
    names = NAMES[config.model_type]
    prefix = names.prefix if prefixed else ""
    width = config.hidden_size
    yield _whole("embed", prefix + names.embed, (config.vocab_size, width))
    if config.learned_positions:
        yield _whole("positions", prefix + names.positions, (config.max_seqlen, width))
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layers.{i}.", prefix + names.layer.format(i)
        yield from _layer(config, names, ours, theirs)
        if layer.experts is None:
            yield from _fused(names, _mlp(config, names), ours, theirs)
            continue
        if layer.experts.shared_size is not None:
            yield from _fused(names, _shared_expert(width, layer.experts, names), ours, theirs)
        if layer.experts.has_choice_bias:
            source, count = theirs + names.choice_bias, layer.experts.num_experts
            yield _whole(f"{ours}mlp.choice_bias", source, (count,))
        if names.interleaved:
            yield from _interleaved_experts(width, layer.experts, names, (ours, theirs), is_mxfp4)
        elif stacked:
            yield from _stacked_experts(width, layer.experts, ours, theirs)
        else:
            yield from _experts(width, layer.experts, names, ours, theirs)
    yield from _norm(config, "norm", prefix + names.norm, width)
    if not config.tied:
        yield _whole("head", names.head, (config.vocab_size, width))


def _whole(name: str, source: str, shape: Shape) -> Target:
    return Target(name, shape, (WeightSlice(source, 0, shape[0]),))


def _norm(config: ModelConfig, name: str, source: str, size: int) -> Iterator[Target]:
    for part in ("weight", "bias") if config.norm == "layer" else ("weight",):
        yield _whole(f"{name}.{part}", f"{source}.{part}", (size,))


def _layer(config: ModelConfig, names: WeightNames, ours: str, theirs: str) -> Iterator[Target]:
    for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"):
        if source := getattr(names, name):
            yield from _norm(config, ours + name, theirs + source, config.hidden_size)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            source = f"{theirs}self_attn.{name}"
            yield from _norm(config, f"{ours}attention.{name}", source, config.head_dim)
    if config.sinks:
        sinks = _whole(f"{ours}attention.sinks", theirs + names.sinks, (config.num_heads,))
        yield sinks._replace(cut=0)
    if config.latent is None:
        yield from _fused(names, _attention(config, names), ours, theirs)
    else:
        yield from _latent_attention(config, config.latent, ours, f"{theirs}self_attn.")


def _latent_attention(
    config: ModelConfig, sizes: LatentSizes, ours: str, theirs: str
) -> Iterator[Target]:
    """Ranks of tensor parallelism share the vectors, and have the projections of their heads."""
    width, heads, rank = config.hidden_size, config.num_heads, sizes.q_rank
    q_rows = heads * sizes.head_dim
    q = WeightSlice(f"{theirs}q_proj.weight", 0, q_rows)
    if rank is not None:
        q = WeightSlice(f"{theirs}q_a_proj.weight", 0, rank, is_whole=True)
    kv = WeightSlice(f"{theirs}kv_a_proj_with_mqa.weight", 0, sizes.cached, is_whole=True)
    ours = f"{ours}attention."
    yield Target(f"{ours}qkv.weight", (q.rows + kv.rows, width), (q, kv), cut=0)
    if rank is not None:
        yield from _norm(config, f"{ours}q_norm", f"{theirs}q_a_layernorm", rank)
        q_up = _whole(f"{ours}q_up.weight", f"{theirs}q_b_proj.weight", (q_rows, rank))
        yield q_up._replace(cut=0)
    yield from _norm(config, f"{ours}kv_norm", f"{theirs}kv_a_layernorm", sizes.kv_rank)
    shape = heads * (sizes.plain_dim + sizes.value_dim), sizes.kv_rank
    yield _whole(f"{ours}kv_up.weight", f"{theirs}kv_b_proj.weight", shape)._replace(cut=0)
    shape = width, heads * sizes.value_dim
    yield _whole(f"{ours}out.weight", f"{theirs}o_proj.weight", shape)._replace(cut=1)


class _Projection(NamedTuple):
    """name: of the decoder; sources: of the checkpoint; parts: the rows of each; cut: as in
    `Target`.
    """

    name: str
    sources: tuple[str, ...]
    parts: tuple[int, ...]
    columns: int
    bias: bool
    cut: int | None


def _attention(config: ModelConfig, names: WeightNames) -> Iterator[_Projection]:
    c = config
    q, kv, width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    yield _Projection("attention.qkv", names.qkv, (q, kv, kv), width, c.qkv_bias, 0)
    yield _Projection("attention.out", (names.out,), (width,), q, c.out_bias, 1)


def _mlp(config: ModelConfig, names: WeightNames) -> Iterator[_Projection]:
    inner, width, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
    up = (inner, inner) if config.gated else (inner,)
    yield _Projection("mlp.up", names.up, up, width, bias, 0)
    yield _Projection("mlp.down", (names.down,), (width,), inner, bias, 1)


def _shared_expert(width: int, experts: Experts, names: WeightNames) -> Iterator[_Projection]:
    inner = experts.shared_size or 0
    if experts.has_shared_gate:
        yield _Projection("mlp.shared.gate", (names.shared_gate,), (1,), width, False, None)
    yield _Projection("mlp.shared.up", names.shared_up, (inner, inner), width, False, 0)
    yield _Projection("mlp.shared.down", (names.shared_down,), (width,), inner, False, 1)


def _fused(
    names: WeightNames, projections: Iterable[_Projection], ours: str, theirs: str
) -> Iterator[Target]:
    for name, sources, parts, columns, bias, cut in projections:
        stored = tuple(theirs + source for source in sources)
        fused = FusedProjection(ours + name, stored, parts, names.transposed)
        yield from fused.targets(columns, bias, cut)


def _experts(
    width: int, experts: Experts, names: WeightNames, ours: str, theirs: str
) -> Iterator[Target]:
    """A tensor for each projection of each expert."""
    count, inner = experts.num_experts, experts.intermediate_size
    router = f"{theirs}{names.router}.weight"
    yield _whole(f"{ours}mlp.router.weight", router, (count, width))
    up = tuple(
        WeightSlice(f"{theirs}{name.format(i)}.weight", 0, inner)
        for i in range(count)
        for name in names.expert_up
    )
    down = tuple(
        WeightSlice(f"{theirs}{names.expert_down.format(i)}.weight", 0, width) for i in range(count)
    )
    yield Target(f"{ours}mlp.up.weight", (count * 2 * inner, width), up, cut=0)
    yield Target(f"{ours}mlp.down.weight", (count * width, inner), down, cut=1)


def _stacked_experts(width: int, experts: Experts, ours: str, theirs: str) -> Iterator[Target]:
    """Two tensors of matrices: gate and up of every expert, and down of every expert."""
    count, inner = experts.num_experts, experts.intermediate_size
    router = f"{theirs}{STACKED_ROUTER}.weight"
    yield _whole(f"{ours}mlp.router.weight", router, (count, width))
    up = tuple(
        WeightSlice(theirs + STACKED_UP, start, inner, matrix)
        for matrix in range(count)
        for start in (0, inner)
    )
    down = tuple(WeightSlice(theirs + STACKED_DOWN, 0, width, i) for i in range(count))
    shape = (count * 2 * inner, width)
    yield Target(f"{ours}mlp.up.weight", shape, up, cut=0, stacked=count)
    shape = (count * width, inner)
    yield Target(f"{ours}mlp.down.weight", shape, down, cut=1, stacked=count)


def _interleaved_experts(
    width: int, experts: Experts, names: WeightNames, prefixes: tuple[str, str], is_mxfp4: bool
) -> Iterator[Target]:
    """Two tensors of matrices and two of biases; MXFP4 holds rows of the matrices, not transposed.
    Ranks are summed, so only one of them may add the bias of down.
    """
    (ours, theirs), count = prefixes, experts.num_experts
    inner, router = experts.intermediate_size, f"{theirs}{names.router}"
    yield _whole(f"{ours}mlp.router.weight", f"{router}.weight", (count, width))
    yield _whole(f"{ours}mlp.router.bias", f"{router}.bias", (count,))
    (up_source,), down_source = names.expert_up, names.expert_down
    for name, source, slices, columns, cuts in (
        ("mlp.up", up_source, [(0, inner, 2), (1, inner, 2)], width, (0, 0)),
        ("mlp.down", down_source, [(0, width, 1)], inner, (1, -1)),
    ):
        pieces = tuple(
            WeightSlice(theirs + source, start, rows, i, step)
            for i in range(count)
            for start, rows, step in slices
        )
        shape, cut = (sum(piece.rows for piece in pieces), columns), cuts[0]
        weight = Target(f"{ours}{name}.weight", shape, pieces, not is_mxfp4, cut, count, is_mxfp4)
        pieces = tuple(piece._replace(name=f"{piece.name}_bias") for piece in pieces)
        yield weight
        yield Target(f"{ours}{name}.bias", shape[:1], pieces, cut=cuts[1], stacked=count)


class FusedProjection(NamedTuple):
    """Several projections in one parameter, stored as one tensor or as one for each."""

    name: str
    sources: tuple[str, ...]
    parts: tuple[int, ...]
    transposed: bool

    def targets(self, columns: int, bias: bool, cut: int | None) -> Iterator[Target]:
        shape = (sum(self.parts), columns)
        weight = self.pieces("weight")
        yield Target(f"{self.name}.weight", shape, weight, self.transposed, cut)
        if bias:  # ranks are summed, so only one of them may add the bias
            pieces = self.pieces("bias")
            yield Target(f"{self.name}.bias", shape[:1], pieces, False, -1 if cut else 0)

    def pieces(self, kind: str) -> tuple[WeightSlice, ...]:
        split = len(self.sources) == len(self.parts)
        names = self.sources if split else self.sources * len(self.parts)
        starts = [0] * len(self.parts) if split else accumulate(self.parts, initial=0)
        return tuple(
            WeightSlice(f"{name}.{kind}", start, rows)
            for name, start, rows in zip(names, starts, self.parts, strict=False)
        )


def expected(wanted: Iterable[Target]) -> dict[str, Shape]:
    """The tensors that a checkpoint must have, and their shapes."""
    shapes: dict[str, Shape] = {}
    for target in wanted:
        shapes |= target.sources
    return shapes


def num_parameters(config: ModelConfig) -> int:
    return sum(math.prod(target.shape) for target in targets(config))
