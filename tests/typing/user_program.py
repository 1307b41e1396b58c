"""A program as a user writes it. test_user_program.py runs it and checks its types by basedpyright
and mypy: every assert_type is a promise of the package's annotations.
"""

from typing import Unpack, assert_type

import torch
from torch import Tensor, nn

import onchip
from onchip import LLM, RequestOutput, SamplingParams, masks
from onchip.core.backend import Stats
from onchip.core.explain import Explanation
from onchip.core.signatures import AttentionOptions
from onchip.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from onchip.kvcache import KVCache, NoRoom, PagedBatch, Spec


class Layer(nn.Module):
    """A layer that passes options on."""

    def __init__(self, **options: Unpack[AttentionOptions]):
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return onchip.attention(q, k, v, **self.options)


def dense(q: Tensor, k: Tensor, v: Tensor, wants_lse: bool) -> None:
    assert_type(onchip.attention(q, k, v).sum(), Tensor)
    assert_type(onchip.attention(q, k, v, return_lse=False, softcap=20.0), Tensor)
    assert_type(onchip.attention(q, k, v, return_stats=True), tuple[Tensor, Stats])
    assert_type(onchip.attention(q, k, v, return_lse=wants_lse), Tensor | tuple[Tensor, Tensor])
    out, lse = onchip.attention(q, k, v, causal=True, return_lse=True)
    _, _, stats = onchip.attention(q, k, v, return_lse=True, return_stats=True)
    assert_type(stats.entropy, Tensor)
    assert_type(onchip.merge_states([out, out], [lse, lse]), tuple[Tensor, Tensor])
    assert_type(onchip.attention_weights(q, k, lse, rows=[0], causal=True), Tensor)
    assert_type(onchip.explain(q, k, v, causal=True, on="H200"), Explanation)
    Layer(window_size=(64, 0))(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor) -> None:
    rule = masks.causal() & masks.window(32) | ~masks.document([0, 40, q.shape[1]])
    assert_type(rule, masks.Mask)
    assert_type(rule.build(1, 1, q.shape[1], k.shape[1]), masks.BlockMask)
    onchip.attention(q, k, v, mask=rule)
    onchip.attention(q, k, v, mask=lambda b, h, i, j: (i - j) % 2 == 0, precision=None)


def packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    cu = torch.tensor([0, 20, len(q)], dtype=torch.int32)
    out, lse = onchip.varlen_attention(q, k, v, cu, cu, 60, 60, causal=True, return_lse=True)
    assert_type(onchip.varlen_attention(q, k, v, cu, cu, 60, 60), Tensor)
    assert_type((out, lse), tuple[Tensor, Tensor])


def paged(q: Tensor, k: Tensor, v: Tensor) -> None:
    spec = Spec(num_layers=1, num_kv_heads=2, head_dim=32, dtype=q.dtype, kv_dtype=torch.int8)
    cache = KVCache(spec, num_pages=8)
    sequence = cache.open()
    if isinstance(sequence, NoRoom):
        raise RuntimeError("the cache is full")
    cache.append(sequence, list(range(len(q))))
    batch = cache.view([sequence])
    assert_type(batch, PagedBatch)
    cache.write(0, k, v, batch.slot_mapping)
    where = batch.page_table, batch.cache_seqlens
    out = onchip.paged_attention(q[None], *cache.layer(0), *where, **cache.scales(0))
    assert_type(out, Tensor)
    assert_type(onchip.offload_attention(q[None], (k[None], v[None])), Tensor)


def drop_in(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert_type(flash_attn_func(q, k, v, 0.0, None, True), Tensor)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    cached, cached_lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    assert_type((out, lse), tuple[Tensor, Tensor])
    assert_type((cached, cached_lse), tuple[Tensor, Tensor])


def low_precision(q: Tensor, k: Tensor, v: Tensor) -> None:
    out, _ = onchip.quant.attend(onchip.quant.recipes.INT8, q, k, v)
    assert_type(onchip.quant.cast(out, onchip.quant.formats.INT8), Tensor)


def generate() -> str:
    with LLM("tiny", max_model_len=64, num_pages=16) as llm:
        outputs = llm.generate("Attention", SamplingParams(max_tokens=2, temperature=0.0))
    assert_type(outputs, list[RequestOutput])
    return outputs[0].outputs[0].text


if __name__ == "__main__":
    q, k, v = (torch.randn(1, 80, heads, 32) for heads in (4, 2, 2))
    dense(q, k, v, wants_lse=False)
    masked(q, k, v)
    packed(q[0], k[0], v[0])
    paged(q[0], k[0], v[0])
    drop_in(q, k, v)
    low_precision(q, k, v)
    print(generate())
