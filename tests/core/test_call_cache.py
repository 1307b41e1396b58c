"""The cache of calls: equal calls are validated once."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import onchip
from onchip import masks
from onchip.core import call_cache
from onchip.core.call_cache import prepare
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from tests.core.calls import qkv, refused

q, k, v = qkv()


class TestCachedCalls:
    """Equal calls are validated once. Any difference visible to validation makes another call."""

    def prepare(self, x, **options):
        x = Tensors(*x)
        return prepare(describe, x, Options(**options), ())

    def test_equal_calls_share_one(self):
        assert self.prepare(qkv()) is self.prepare(qkv())
        assert self.prepare(qkv()).problem == describe(Tensors(*qkv()), Options())

    @pytest.mark.parametrize(
        "other",
        [
            qkv(torch.float64),
            qkv(seqlen=9),
            (q, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
            (q.clone().requires_grad_(), k, v),
            tuple(t.to("meta") for t in (q, k, v)),
        ],
        ids=["dtype", "length", "strides", "gradient", "device"],
    )
    def test_other_tensors_are_another_call(self, other):
        assert self.prepare((q, k, v)) is not self.prepare(other)

    @pytest.mark.parametrize(
        "match, good, bad",
        [
            ("softcap", {"softcap": 1.0}, {"softcap": True}),
            ("dropout_p", {"dropout_p": 0.0}, {"dropout_p": False}),
            ("left=True", {"window_size": (1, None)}, {"window_size": (True, None)}),
            ("left=1.0", {"window_size": (1, None)}, {"window_size": (1.0, None)}),
        ],
    )
    def test_equal_numbers_of_another_type_are_still_refused(self, match, good, bad):
        for _ in range(2):
            onchip.attention(q, k, v, **good)
        refused(match, q, k, v, **bad)

    def test_equal_lengths_of_another_type_are_still_refused(self):
        cu = torch.tensor([0, 1], dtype=torch.int32)
        x = (*(t[0, :1] for t in (q, k, v)), cu, cu)
        onchip.varlen_attention(*x, 1, 1)
        refused("max_seqlen_q", *x, True, 1, fn=onchip.varlen_attention)
        refused("max_seqlen_k", *x, 1, 1.0, fn=onchip.varlen_attention)

    def test_unhashable_options_are_not_cached(self):
        window = self.prepare((q, k, v), window_size=[3, 0])
        assert window.cache is None and window.problem.window_size == (3, 0)
        refused("softcap", q, k, v, softcap=[1.0])

    def test_a_mask_is_checked_every_time(self):
        mask = masks.build(masks.causal(), 2, 4, 8, 8)
        x = Tensors(q, k, v, mask=mask)
        assert prepare(describe, x, Options(), ()).cache is None

    def test_values_are_checked_every_time(self):
        x = [t[0] for t in (q, k, v)]
        cu, bad = (torch.tensor([0, n], dtype=torch.int32) for n in (8, 7))
        for _ in range(3):
            onchip.varlen_attention(*x, cu, cu, 8, 8)
        refused("run from 0 to total_q=8", *x, bad, cu, 8, 8, fn=onchip.varlen_attention)

    def test_the_cache_holds_no_tensor(self):
        x = qkv(seqlen=13)
        gone = [weakref.ref(t) for t in x]
        assert self.prepare(x).cache == {}
        del x
        gc.collect()
        assert not any(each() for each in gone)

    def test_the_oldest_is_evicted_first(self, monkeypatch):
        call_cache.clear_call_cache()
        monkeypatch.setattr(call_cache, "MAX_CACHED_CALLS", 3)
        first = self.prepare(qkv(seqlen=1))
        kept = [self.prepare(qkv(seqlen=n)) for n in (2, 3, 4)]
        assert [self.prepare(qkv(seqlen=n)) for n in (2, 3, 4)] == kept
        assert all(
            self.prepare(qkv(seqlen=n)) is each for n, each in zip((2, 3, 4), kept, strict=True)
        )
        assert self.prepare(qkv(seqlen=1)) is not first

    def test_threads_share_the_cache(self, monkeypatch):
        monkeypatch.setattr(call_cache, "MAX_CACHED_CALLS", 5)  # some are evicted all the time
        length = lambda n: self.prepare(qkv(seqlen=1 + n % 9)).problem.seqlen_q
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(length, range(900))) == [1 + n % 9 for n in range(900)]
