"""The model that `python -m benchmarks train` trains: a `Decoder` driven layer by layer, so that
attention is the candidate's and everything else is everybody's.

What a layer does before its attention and what it does after are two functions of the layer, which
torch compiles on a GPU, once for all layers and candidates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.machine import has_fast_matmul
from onchip.models import Decoder, ModelConfig, random_model
from onchip.models.decoder import Block, Rope, embed
from onchip.models.norm import add_norm, optional
from onchip.models.rotary import cos_sin, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (tokens, heads, head_dim) -> out


class Batch(NamedTuple):
    """tokens and positions (tokens,); targets of the chosen rows of them."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor


def before(block: Block, x: Tensor, y: Tensor | None, rope: Rope) -> tuple[Tensor, ...]:
    """The residual stream, and q, k, v."""
    x, normed = add_norm(x, y, block.attention_norm)
    layer = block.attention
    q, k, v = layer.qkv(normed).unflatten(-1, (-1, layer.head_dim)).split(layer.heads, dim=-2)
    q, k = optional(layer.q_norm, q), optional(layer.k_norm, k)
    if layer.rope_index is not None:
        q, k = rotate(q, *rope[layer.rope_index]), rotate(k, *rope[layer.rope_index])
    return x, q, k, v


def after(block: Block, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    x, normed = add_norm(x, block.attention.out(out.flatten(-2)), block.mlp_norm)
    return x, block.mlp(normed)


def loss(model: Decoder, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    hidden = add_norm(x, y, model.norm)[1].index_select(0, batch.rows)
    return F.cross_entropy(model.logits(hidden), batch.targets)


def _compile(function: Callable) -> Callable:
    """One function for all shapes of a benchmark. Torch stops compiling after eight shapes,
    silently unless configured otherwise, and would time the unfused program. Every shape is
    compiled separately: otherwise the second shape would run a program for any number of tokens.
    """
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)


class Trainer:
    """A model, its optimizer and the functions of a layer. Weights are kept in `dtype`; products
    are bf16 either way. With lr 0 a step costs what it costs and leaves the weights as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
        lr: float = 0.0,
    ):
        self.model = random_model(config, device=device, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        compile: Callable[[Any], Any] = _compile if compiled else lambda function: function
        self.before, self.after, self.loss = map(compile, (before, after, loss))

    def __call__(self, batch: Batch, attend: Attend) -> Tensor:
        """The loss of a batch."""
        model = self.model
        kind = model.device.type
        fast = kind != "cpu" or has_fast_matmul(torch.bfloat16)
        with torch.autocast(kind, torch.bfloat16, enabled=fast):
            x = embed(batch.tokens, model.embed, model.config.embedding_scale)
            if model.positions is not None:
                x = x + F.embedding(batch.positions, model.positions)
            rope = [cos_sin(rotary, batch.positions) for rotary in model.rotaries]
            y = None
            for block in model.layers:
                x, q, k, v = self.before(block, x, y, rope)
                x, y = self.after(block, x, attend(q, k, v))
            return self.loss(model, x, y, batch)

    def step(self, batch: Batch, attend: Attend) -> Tensor:
        """One step of training; its loss, left on the device."""
        loss = self(batch, attend)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
