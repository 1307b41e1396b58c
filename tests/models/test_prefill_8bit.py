"""Chunks of long prompts in 8 bits, against the recipe over all keys of their sequences."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from onchip import quant
from onchip.kvcache import KVCache, PagedBatch, Spec
from onchip.kvcache.prefill_chunks import PrefillChunk, PrefillChunks
from onchip.models.attend import PagedAttend
from onchip.quant import kv8
from onchip.quant.recipes import RECIPES

HEADS, KV_HEADS, DIM = 4, 2, 32
DONE, NEW = [150, 0, 40, 9], [20, 30, 1, 200]  # of four sequences


class Step(NamedTuple):
    """A batch over earlier keys, the queries of its new tokens, and all keys of each sequence."""

    cache: KVCache
    batch: PagedBatch
    q: Tensor
    keys: list[tuple[Tensor, Tensor]]
    starts: list[int]

    def attend(self, prefill=True, **options):
        batch = self.batch if prefill else self.batch._replace(prefill=None)
        return PagedAttend(batch, self.cache).read(0, self.q, **options)


def make_step(chosen, kv_dtype=None):
    torch.manual_seed(0)
    spec = Spec(1, KV_HEADS, DIM, page_size=16, dtype=torch.float32).stored_as(kv_dtype)
    cache = KVCache(spec, 60)
    sequences = [cache.open() for _ in DONE]
    lengths = [a + b for a, b in zip(DONE, NEW, strict=True)]
    keys = [tuple(torch.randn(2, n, KV_HEADS, DIM)) for n in lengths]
    write(cache, sequences, keys, [slice(0, n) for n in DONE])
    cache.commit_all(sequences, DONE)
    batch = write(cache, sequences, keys, [slice(n, None) for n in DONE])
    starts = [0, *torch.tensor(NEW).cumsum(0).tolist()]
    parts = tuple(PrefillChunk(i, starts[i], starts[i + 1], lengths[i]) for i in chosen)
    rest = [s for i, s in enumerate(sequences) if i not in chosen]
    prefill = PrefillChunks("fp8", "reference", parts, cache.view(rest) if rest else None)
    q = torch.randn(sum(NEW), HEADS, DIM)
    return Step(cache, batch._replace(prefill=prefill), q, keys, starts)


def write(cache, sequences, keys, spans):
    """Write these tokens of each sequence; return their batch."""
    parts = [(k[span], v[span]) for (k, v), span in zip(keys, spans, strict=True)]
    cache.append_all(sequences, [[1] * len(k) for k, _ in parts])
    batch = cache.view(sequences)
    cache.write(0, *(torch.cat(t) for t in zip(*parts, strict=True)), batch.slot_mapping)
    return batch


@pytest.mark.parametrize("kv_dtype", [None, "fp8", "int8"])
@pytest.mark.parametrize("chosen", [[0], [3], [0, 3], [1, 3], [0, 1, 2, 3]], ids=str)
def test_chunks_equal_the_recipe_and_others_the_plain_call(chosen, kv_dtype):
    step = make_step(chosen, kv_dtype)
    options = {"softmax_scale": 0.2, "softcap": 0.0}
    got, plain = step.attend(**options), step.attend(prefill=False, **options)
    for i, keys in enumerate(step.keys):
        rows = slice(step.starts[i], step.starts[i + 1])
        if i not in chosen:
            torch.testing.assert_close(got[rows], plain[rows], rtol=1e-5, atol=1e-6)
            continue
        if kv_dtype is not None:
            stored = (kv8.quantise(t, kv8.parse_kv_dtype(kv_dtype)) for t in keys)
            keys = [kv8.dequantise(*t, torch.float32) for t in stored]
        q, k, v = (t[None] for t in (step.q[rows], *keys))
        exact, _ = quant.attend(RECIPES["fp8"], q, k, v, causal=True, softmax_scale=0.2)
        assert torch.equal(got[rows], exact[0])
        assert not torch.equal(got[rows], plain[rows])


def test_layers_with_a_window_compute_in_16_bits():
    step = make_step([0, 3])
    window = {"window_size": (30, 0)}
    assert torch.equal(step.attend(**window), step.attend(prefill=False, **window))
