"""The order check: whether a decoder can compute reproducibly here. It looks at its layers and its
device, and compares bits: operations of this machine's libraries must be row by row, in the shapes
that the model uses.

It computes 37 rows at once, then the same rows permuted, some alone, and with gradients recorded.
It takes as long as a step of the first layer of each kind and of the head over some hundred tokens.
On a GPU it also computes products by every tile that a call may choose, and compares decoding over
pages with whole sequences: two forwards of the model and, once, some seconds to compile kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip.core.device import device_info
from onchip.core.functional import attention
from onchip.core.problem import UnsupportedError
from onchip.core.torch_mode import is_autocast, is_eager
from onchip.kvcache import KVCache
from onchip.models.attend import PagedAttend
from onchip.models.reproducible import reproducible_rows
from onchip.models.rotary import cos_sin

if TYPE_CHECKING:
    from onchip.models.decoder import Decoder

_ROWS = 37
_SEQLEN = 150  # tokens: three tiles of keys
# Tokens of one sequence over pages: more than a split of keys (FIXED_ORDER_KEYS), and the steps in
# which they are computed.
_STEPS = (1, 300, 64, 2, 1, 200, 9, 1, 1)
_NEEDS = "reproducible=True needs"

DeviceDtype = tuple[torch.device, torch.dtype]


def check_mode(weight: Tensor) -> None:
    """UnsupportedError where a call would not compute what `check_order` has checked."""
    device = weight.device
    if device.type != "cpu" and (device.type != "cuda" or not _has_kernels(device)):
        raise UnsupportedError(
            f"{_NEEDS} a model on the CPU or on an NVIDIA GPU with Triton, this one is on {device}"
        )
    if device.type == "cuda" and weight.dtype == torch.float64:
        raise UnsupportedError(f"{_NEEDS} a model in fp32, bf16 or fp16 on a GPU, not in float64")
    if not is_eager(weight):
        raise UnsupportedError(f"{_NEEDS} an eager call: a compiler orders operations anew")
    if is_autocast(weight):
        raise UnsupportedError(
            f"{_NEEDS} a call without torch.autocast, which rounds where an engine does not: load"
            " the model with dtype=torch.bfloat16"
        )


def check_unmoved(weight: Tensor, checked_as: DeviceDtype) -> None:
    """UnsupportedError where `check_order` has checked this weight on another device, or in another
    dtype.
    """
    if (weight.device, weight.dtype) != checked_as:
        device, dtype = checked_as
        raise UnsupportedError(
            f"{_NEEDS} a check of each device and dtype: this model was checked on {device} in"
            f" {dtype}, and is on {weight.device} in {weight.dtype}. Call set_reproducible() again"
        )


def _has_kernels(device: torch.device) -> bool:
    info = device_info(device)
    return info.type == "cuda" and info.has_triton


def check_order(model: "Decoder") -> None:
    """UnsupportedError: the model cannot compute reproducibly, and why."""
    config = model.config
    if model.shard.world_size > 1:
        raise UnsupportedError(f"{_NEEDS} all weights on one rank: sums over ranks have an order")
    if config.latent is not None:
        raise UnsupportedError(
            f"{_NEEDS} attention over keys and values: over latent pages decoding and prompts have"
            " two different formulas"
        )
    check_mode(model.embed)
    if model.device.type == "cuda" and any(layer.experts for layer in config.layers):
        raise UnsupportedError(f"{_NEEDS} layers without experts on a GPU")
    generator = torch.Generator().manual_seed(0)
    if model.device.type == "cuda":
        _check_products(model, generator)
    for name, compute in _row_computations(model):
        x = torch.randn(_ROWS, model.width, generator=generator).to(model.embed)
        _check_rows(name, compute, x)
    _check_attention(model, generator)
    if model.device.type == "cuda":
        _check_pages(model, generator)


def _check_products(model: "Decoder", generator: torch.Generator) -> None:
    """Every tile that a product may choose has the bits of every other."""
    from onchip.kernels.llm import fixed_order

    matrices = (p.detach() for p in model.parameters() if p.dim() == 2)
    for shape, weight in {w.shape: w for w in matrices}.items():
        x = torch.randn(_SEQLEN, shape[1], generator=generator).to(weight)
        first, *others = fixed_order.find_tiles(x)
        whole = fixed_order.multiply_by(first, x, weight)
        for tile in others:
            name = f"a product by tiles of {tile.tile_m} x {tile.tile_n}"
            _check_equal(name, fixed_order.multiply_by(tile, x, weight), whole)


def _row_computations(model: "Decoder") -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    kinds: dict[tuple, int] = {}
    for i, block in enumerate(model.layers):
        kinds.setdefault(tuple(p.shape for p in block.parameters()), i)
    for i in kinds.values():
        yield f"layer {i}", lambda x, i=i: _without_keys(model, model.layers[i], x)
    yield "the head", lambda x: _logprobs(model, x)


def _without_keys(model: "Decoder", block: Any, x: Tensor) -> Tensor:
    """A layer with an attention that returns the queries, so that rows are independent. All have
    position 3.
    """
    positions = torch.full((len(x),), 3, device=x.device)
    with reproducible_rows():
        rope = [cos_sin(rotary, positions) for rotary in model.rotaries]
        return torch.cat(block(x, x, rope, lambda layer, q, k, v, **options: q), -1)


def _logprobs(model: "Decoder", x: Tensor) -> Tensor:
    with reproducible_rows():
        logits = model.logits(model.norm(x))
    return logits.log_softmax(-1)  # with all threads, as a trainer computes it


def _check_rows(name: str, compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        whole = compute(x)
    order = torch.arange(_ROWS).flip(0).roll(5)
    for rows in (order, order[:1], order[3:8], order[:16], order[4:36]):
        with torch.no_grad():
            _check_equal(name, compute(x[rows]), whole[rows])
    with torch.enable_grad():
        _check_equal(name, compute(x), whole)


def _check_attention(model: "Decoder", generator: torch.Generator) -> None:
    """One query at a time equals all at once."""
    config = model.config
    shapes = ((heads, config.head_dim) for heads in (config.num_heads, *[config.num_kv_heads] * 2))
    q, k, v = (torch.randn(1, _SEQLEN, *s, generator=generator).to(model.embed) for s in shapes)
    attend = partial(attention, causal=True, reproducible=True, softcap=config.softcap)
    out, lse = attend(q, k, v, return_lse=True)
    for n in (1, 64, 65, _SEQLEN):
        one, one_lse = attend(q[:, n - 1 : n], k[:, :n], v[:, :n], return_lse=True)
        _check_equal("attention", one[:, 0], out[:, n - 1])
        _check_equal("attention", one_lse[..., 0], lse[..., n - 1])


@torch.no_grad()
def _check_pages(model: "Decoder", generator: torch.Generator) -> None:
    """Hidden states of one sequence, step by step over pages and at once. The model is not in its
    mode yet: `reproducible_rows` is.
    """
    tokens = torch.randint(model.config.vocab_size, (sum(_STEPS),), generator=generator)
    tokens = tokens[: model.config.max_seqlen].to(model.device)
    cache = KVCache(model.cache_spec(), -(-len(tokens) // 16) + 1, max_seqs=1, prefix_reuse=False)
    sequences, parts, start = [cache.open()], [], 0
    with reproducible_rows():
        for step in tokens.split(_steps_up_to(len(tokens))):
            stop = start + len(step)
            cache.append_all(sequences, [step.tolist()])
            paged = PagedAttend(cache.view(sequences), cache)
            parts.append(model.run(step, torch.arange(start, stop, device=step.device), paged))
            cache.commit_all(sequences, [stop])
            start = stop
        whole = model.full(tokens[None])[0]
    _check_equal("decoding over pages", torch.cat(parts), whole)


def _steps_up_to(total: int) -> list[int]:
    """The first of _STEPS, which add up to `total`."""
    ends = [min(end, total) for end in accumulate(_STEPS)]
    return [end - start for start, end in pairwise([0, *ends]) if end > start]


def _check_equal(name: str, part: Tensor, whole: Tensor) -> None:
    if not torch.equal(part, whole):
        raise UnsupportedError(
            f"{_NEEDS} operations that compute each row alone, and on this machine {name} does not:"
            f" {int((part != whole).sum())} of {part.numel()} numbers differ"
        )
