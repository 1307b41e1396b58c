"""A prefill and single steps give the rows of the whole sequence."""

import pytest
import torch

import onchip
from onchip.nn import MultiheadAttention, StaticKVCache

OPTIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "rotary": 1e4, "qk_norm": 1e-6},
    "window": {"window_size": (5, 0), "sinks": True, "softcap": 5.0},
    "alibi": {"alibi_slopes": torch.rand(4), "batch_first": False},
}


@pytest.mark.parametrize("chunks", [(70, 1, 1, 8), (1,) * 9, (33, 40)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_steps_equal_the_whole_sequence(name, chunks):
    torch.manual_seed(1)
    module = MultiheadAttention(24, 4, causal=True, **OPTIONS[name], dtype=torch.float64)
    x = torch.randn(3, sum(chunks), 24, dtype=torch.float64)
    x = x if module.batch_first else x.transpose(0, 1)
    dim = 1 if module.batch_first else 0
    cache = StaticKVCache(sum(chunks))
    parts = [module(part, cache=cache)[0] for part in x.split(chunks, dim)]
    torch.testing.assert_close(torch.cat(parts, dim), module(x)[0], rtol=1e-10, atol=1e-10)
    assert cache.length == sum(chunks)


@torch.no_grad()
def test_prompts_of_different_lengths():
    """Prompts are padded on the right; truncate drops the padding."""
    module = MultiheadAttention(24, 4, causal=True, rotary=1e4, dtype=torch.float64)
    x, lengths = torch.randn(2, 12, 24, dtype=torch.float64), torch.tensor([4, 9])
    prompts = x[:, :9].clone()
    prompts[0, 4:] = torch.nan
    cache = StaticKVCache(16)
    out = module(prompts, cache=cache)[0]
    cache.truncate(lengths)
    for step in range(3):
        token = x[torch.arange(2), lengths + step][:, None]
        out = module(token, cache=cache)[0]
    for row, length in enumerate((7, 12)):
        expected = module(x[row : row + 1, :length])[0][:, -1]
        torch.testing.assert_close(out[row], expected)


@torch.no_grad()
def test_autocast_determines_the_dtype():
    module, cache = MultiheadAttention(32, 2), StaticKVCache(8)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(torch.randn(1, 3, 32), cache=cache)
    assert out.dtype == cache.k.dtype == torch.bfloat16


def test_what_is_not_served_is_a_sentence():
    module, cache = MultiheadAttention(24, 4), StaticKVCache(5)
    x = torch.randn(1, 3, 24)
    with pytest.raises(onchip.UnsupportedError, match="paged_attention has no derivative|detach"):
        module(x, cache=cache)
    with pytest.raises(ValueError, match="max_seqlen=0 must be at least 1"):
        StaticKVCache(0)
    with pytest.raises(ValueError, match="the cache is empty"):
        StaticKVCache(4).truncate(1)
    with torch.no_grad():
        cache = StaticKVCache(5)
        module(x, cache=cache)
        with pytest.raises(ValueError, match="3 \\+ 3 tokens exceed the cache's max_seqlen=5"):
            module(x, cache=cache)
        with pytest.raises(ValueError, match="the cache has 1 sequences of torch.float32"):
            module(torch.randn(2, 1, 24), cache=cache)
        with pytest.raises(onchip.UnsupportedError, match="a cache is not served with bias"):
            module(x, attn_mask=torch.zeros(3, 3), cache=cache)
        with pytest.raises(onchip.UnsupportedError, match="not served with need_weights"):
            module(x, need_weights=True, cache=cache)
