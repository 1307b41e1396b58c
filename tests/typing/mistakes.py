"""Mistakes that a type checker must report: each on a line that ends with `# wrong`."""

import torch

import onchip
from onchip import SamplingParams, masks
from onchip.integrations.flash_attn import flash_attn_func

q = k = v = torch.randn(1, 8, 2, 16)
page_table = cache_seqlens = cu = torch.zeros(2, dtype=torch.int32)

onchip.attention(q, k, v, is_causal=True)  # wrong
onchip.attention(q, k, v, causal="yes")  # wrong
onchip.attention(q, k, v, return_lse=True).sum()  # wrong
onchip.attention(q, k, v, mask="causal")  # wrong
onchip.varlen_attention(q, k, v, cu, cu, 8, 8, bias=q)  # wrong
onchip.paged_attention(q, k, v, page_table, cache_seqlens, dropout_p=0.1)  # wrong
onchip.attention(q, k, v, return_stats=True)[1].max_logits.sum()  # wrong
onchip.atention(q, k, v)  # wrong
onchip.parallel.ring(q, k, v)  # wrong
masks.window("left")  # wrong
masks.build(masks.causal(), 1, 1, 8)  # wrong
flash_attn_func(q, k, v, causal=True).keys()  # wrong
SamplingParams(max_token=2)  # wrong
out: int = onchip.attention(q, k, v)  # wrong
