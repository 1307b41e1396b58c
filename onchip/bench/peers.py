"""What onchip is compared with, in its own layout (batch, seqlen, heads, head_dim)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as in textbooks: the whole of S = q k^T, then P = softmax(S), then P v."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.mT
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
    s.masked_fill_(hidden, -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """torch's SDPA: transposed views, no copies."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def heads_first(x: Tensor) -> Tensor:
    """The same tensor stored as (batch, heads, seqlen, head_dim), which SDPA likes best."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
