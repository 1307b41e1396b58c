"""Attention over pages of the pool and pages in host memory equals attention over pages alone."""

import pytest
import torch

from onchip.kvcache import KVCache, Spec
from onchip.models import ModelConfig, positions_of, random_model
from onchip.models.attend import PagedAttend

CONFIG = {
    "model_type": "mistral",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.4},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "window": {"window_size": (20, 0)},
    "small_window": {"window_size": (2, 0)},
    "wide_window": {"window_size": (500, 0), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def attend_all(offload, options, dtype):
    """Outputs of three sequences, computed in chunks; two of them may be offloaded."""
    torch.manual_seed(1)
    cache = KVCache(Spec(1, 2, 8, 6, 4, dtype), 60, offload_pages=70)
    sequences = [cache.open(offload_pages=30 if n < 2 else 0) for n in range(3)]
    outs = []
    for step, counts in enumerate([(30, 9, 5), (1, 1, 1), (17, 1, 30), (1, 13, 1), (1, 1, 1)]):
        for sequence, count in zip(sequences, counts, strict=True):
            cache.reserve(sequence, count)
        batch, total = cache.view(sequences), sum(counts)
        q, k = (torch.randn(total, heads, 8, dtype=dtype) for heads in (4, 2))
        v = torch.randn(total, 2, 6, dtype=dtype)
        outs.append(PagedAttend(batch, cache)(0, q, k, v, **options))
        for sequence in sequences:
            cache.commit(sequence)
        if offload:
            cache.offload(sequences[0], 3)
            cache.offload(sequences[1], step)
    assert [s.host_tokens for s in sequences[:2]] == ([48, 24] if offload else [0, 0])
    return torch.cat(outs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_offloaded_pages_change_no_output(options):
    got, want = (attend_all(offload, options, torch.float32) for offload in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_batch_reads_what_was_offloaded_before_it():
    """Pages that are offloaded after `view` are read from the pool: they would count twice."""
    outs = []
    for late in (0, 2):
        torch.manual_seed(1)
        cache = KVCache(Spec(1, 2, 8, 6, 4, torch.float32), 9, offload_pages=9)
        sequence = cache.open(offload_pages=9)
        for count in (22, 3):
            cache.reserve(sequence, count)
            batch = cache.view([sequence])
            cache.offload(sequence, late)
            q, k = (torch.randn(count, heads, 8) for heads in (4, 2))
            outs.append(PagedAttend(batch, cache)(0, q, k, torch.randn(count, 2, 6)))
            cache.commit(sequence)
            cache.offload(sequence, 2 - len(batch.host_prefixes))
        assert sequence.host_tokens == 4 * (3 + late)
    torch.testing.assert_close(outs[3], outs[1], rtol=1e-5, atol=1e-6)


def test_options_without_a_meaning_for_host_memory_are_refused():
    with pytest.raises(TypeError, match="offload_attention.* unexpected .*'alibi_slopes'"):
        attend_all(True, {"alibi_slopes": torch.ones(4)}, torch.float32)


def test_parts_are_rounded_once():
    got, want = (attend_all(offload, {}, torch.bfloat16) for offload in (True, False))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("window", [None, 21])
@torch.no_grad()
def test_a_decoder_over_offloaded_pages_equals_whole_sequences(window):
    model = random_model(ModelConfig.from_hf(CONFIG | {"sliding_window": window}))
    tokens = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(2))
    cache, done, hidden = KVCache(model.cache_spec(4), 12, offload_pages=40), 0, []
    sequence = cache.open(offload_pages=40)
    for count in (30, 7, 1, 1, 33, 40, 1, 2, 20, 15):
        cache.offload(sequence, max(0, -(-(sequence.table.length + count) // 4) - 11))
        assert cache.reserve(sequence, count) is None
        batch = cache.view([sequence])
        assert positions_of(batch).tolist() == list(range(done, done + count))
        hidden.append(model(tokens[done : done + count], positions_of(batch), batch, cache))
        cache.commit(sequence)
        done += count
    torch.testing.assert_close(torch.cat(hidden), model.full(tokens[None])[0], rtol=0, atol=2e-5)
