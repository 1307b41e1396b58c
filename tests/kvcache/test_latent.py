"""Pages of which the keys hold the values, as multi-head latent attention has them."""

import pytest
import torch

import onchip
from onchip import UnsupportedError
from onchip.kvcache import HostTier, KVCache, Spec
from onchip.quant.kv8 import dequantise, quantise

HEADS, DIM, LATENT, LAYERS = 4, 12, 8, 2
KV_DTYPES = [None, "fp8"]


def make(kv_dtype=None, page_size=4, num_pages=40, **options):
    spec = Spec(LAYERS, 1, DIM, page_size=page_size, dtype=torch.float64, latent=LATENT)
    return KVCache(spec.stored_as(kv_dtype), num_pages, **options)


def keys(tokens, layer, kv_dtype):
    """One head, determined by token, position and layer, as the cache stores it."""
    position = torch.arange(len(tokens), dtype=torch.float64)[:, None]
    column = torch.arange(DIM, dtype=torch.float64)
    k = ((torch.tensor(tokens)[:, None] + 1.7 * position) * (column + layer + 1)).sin()[:, None]
    return k if kv_dtype is None else dequantise(*quantise(k, kv_dtype), torch.float64)


def compute(cache, sequence):
    """Write the keys of the tokens that are not computed yet."""
    slots = cache.view([sequence]).slot_mapping
    for layer in range(LAYERS):
        new = keys(sequence.tokens, layer, None)[sequence.computed :]
        cache.write(layer, new, None, slots)
    cache.commit(sequence)


def start(cache, tokens, **options):
    sequence = cache.open(tokens, **options)
    assert cache.append(sequence, tokens[sequence.length :]) is None
    compute(cache, sequence)
    return sequence


def check(cache, sequence):
    """Decoding over the pages equals attention over the keys of its tokens and their columns."""
    table = torch.tensor([sequence.table.pages], dtype=torch.int32)
    seqlens = torch.tensor([sequence.length], dtype=torch.int32)
    q = torch.randn(1, 1, HEADS, DIM, dtype=torch.float64)
    for layer in range(LAYERS):
        k_pages, v_pages = cache.layer(layer)
        assert v_pages.data_ptr() == k_pages.data_ptr()
        out = onchip.paged_attention(q, k_pages, v_pages, table, seqlens, **cache.scales(layer))
        k = keys(sequence.tokens, layer, cache.spec.kv_dtype)[None]
        want = onchip.attention(q, k, k[..., :LATENT], causal=True)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_forks_hits_and_moved_tokens(kv_dtype, page_size):
    cache = make(kv_dtype, page_size)
    a = start(cache, list(range(10)))
    fork = cache.fork(a)
    for sequence, token in ((a, 90), (fork, 91)):
        assert cache.append(sequence, [token]) is None
        compute(cache, sequence)
    hit = start(cache, [*range(9), 33, 34])
    assert hit.hit_tokens == 9
    for sequence in (a, fork, hit):
        check(cache, sequence)
    cache.truncate(hit, 9)
    assert cache.append(hit, torch.tensor([], dtype=torch.long)) is None
    check(cache, hit)
    cache.check()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_moved_tokens(kv_dtype):
    cache = make(kv_dtype)
    sequence = start(cache, list(range(6)))
    assert cache.reserve(sequence, 3) is None
    slots = cache.view([sequence]).slot_mapping
    for layer in range(LAYERS):
        cache.write(layer, torch.randn(3, 1, DIM, dtype=torch.float64), None, slots)
    accepted = key(cache, sequence, 7)
    cache.move_tokens(sequence, [7], 6)
    torch.testing.assert_close(key(cache, sequence, 6), accepted, rtol=0, atol=0)


def key(cache, sequence, position):
    """The key of a position in all layers."""
    page, offset = sequence.table.pages[position // 4], position % 4
    parts = []
    for layer in range(LAYERS):
        pages, scales = cache.layer(layer)[0], cache.scales(layer).get("k_scales")
        row = pages[page, offset].double()
        parts.append(row if scales is None else row * scales[page, offset, :, None])
    return torch.stack(parts)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_swapped_sequence_returns(kv_dtype):
    cache = make(kv_dtype, max_seqs=4)
    tier = HostTier(cache, 12, chunk_pages=3, waits=True)
    sequence = start(cache, list(range(10)))
    cache.prefix.clear()
    group = tier.swap_out([sequence])
    for t in cache.pages.tensors:
        t.copy_(torch.full(t.shape, 77.0).to(t.dtype))
    assert tier.swap_in(group) is None
    check(cache, sequence)


def test_offloaded_pages_keep_keys_and_values():
    cache = make(num_pages=6, offload_pages=8)
    sequence = start(cache, list(range(18)), offload_pages=8)
    assert cache.offload(sequence, 4) == 4
    for layer in range(LAYERS):
        k, v = cache.offloaded.layer(layer, sequence.host_range, 16)
        torch.testing.assert_close(k[0], keys(sequence.tokens[:16], layer, None))
        torch.testing.assert_close(v, k[..., :LATENT], rtol=0, atol=0)
        assert v.data_ptr() == k.data_ptr()


def test_bytes_of_latent_pages():
    """A layer of DeepSeek-V3: 512 columns of the latent and 64 that are rotated."""
    spec = Spec(1, 1, 576, page_size=64, latent=512)
    assert spec.head_dim_v == 512 and spec.page_bytes == 64 * 576 * 2
    assert spec.stored_as("fp8").page_bytes == 64 * (576 + 4)
    cache = KVCache(spec, 3)
    assert sum(t.nbytes for t in cache.pages.tensors) == 3 * spec.page_bytes
    assert Spec(1, 1, 576, 512, page_size=64).page_bytes == 64 * (576 + 512) * 2


@pytest.mark.parametrize(
    "change",
    [{"latent": 13}, {"latent": 8, "head_dim_v": 7}, {"latent": -1, "head_dim_v": 7}],
)
def test_specs_are_checked(change):
    with pytest.raises(ValueError, match="latent="):
        Spec(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 12, **change})


def test_values_are_written_where_pages_hold_them():
    cache, other = make(), KVCache(Spec(1, 1, DIM, LATENT, 4, torch.float64), 8)
    for made, v, match in (
        (cache, torch.zeros(3, 1, LATENT).double(), "v must be None"),
        (other, None, "v is None"),
    ):
        sequence = made.open([1, 2, 3])
        made.append(sequence, [1, 2, 3])
        slots = made.view([sequence]).slot_mapping
        with pytest.raises(ValueError, match=match):
            made.write(0, torch.zeros(3, 1, DIM).double(), v, slots)


def test_latents_in_int8_are_refused_beside_other_columns():
    """A key has one scale: large columns behind its latent would leave the latent few levels."""
    with pytest.raises(UnsupportedError, match="last 64 columns are larger than its latent"):
        Spec(1, 1, 576, latent=512).stored_as("int8")
    assert Spec(1, 1, 512, latent=512).stored_as("int8").kv_dtype == torch.int8
