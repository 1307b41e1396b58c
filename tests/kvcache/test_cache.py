"""KVCache: attention through the cache equals dense attention, whatever is shared or copied."""

import pytest
import torch

import onchip
from onchip.kvcache import BatchShape, KVCache, NoRoom, Spec
from onchip.kvcache import paged_batch as batches
from onchip.quant.kv8 import dequantise, quantise

HEADS, KV_HEADS, DIM, DIM_V, LAYERS, VOCAB = 4, 2, 8, 6, 2, 50
KV_DTYPES = [None, "fp8", "int8"]


def make(num_pages=40, page_size=4, kv_dtype=None, **options):
    spec = Spec(LAYERS, KV_HEADS, DIM, DIM_V, page_size, torch.float64).stored_as(kv_dtype)
    cache = KVCache(spec, num_pages, **options)
    for t in cache.pages.tensors:  # a slot that was never written must not be read
        t.copy_(torch.full(t.shape, float("nan")) if t.is_floating_point() else torch.tensor(127))
    return cache


class Toy:
    """Attention over embeddings of (token, position, layer), so a prefix determines its keys."""

    def __init__(self, cache):
        self.cache = cache
        self.embed = torch.randn(LAYERS, 3, VOCAB, HEADS, 8, dtype=torch.float64)

    def project(self, layer, tokens, start):
        position = torch.arange(start, start + len(tokens), dtype=torch.float64)[:, None, None]
        q, k, v = (
            self.embed[layer][:, torch.tensor(tokens, dtype=torch.long)] * (position + 1).cos()
        )
        return q, k[:, :KV_HEADS], v[:, :KV_HEADS, :DIM_V].contiguous()

    def step(self, sequences):
        """The outputs of the tokens not computed yet, layer by layer, through the cache."""
        batch = self.cache.view(sequences)
        outs = []
        for layer in range(LAYERS):
            parts = [self.project(layer, s.tokens[s.computed :], s.computed) for s in sequences]
            q, k, v = (torch.cat(p) for p in zip(*parts, strict=True))
            self.cache.write(layer, k, v, batch.slot_mapping)
            out = onchip.paged_attention(
                q,
                *self.cache.layer(layer),
                batch.page_table,
                batch.cache_seqlens,
                cu_seqlens_q=batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
                **self.cache.scales(layer),
            )
            outs.append(out)
        for sequence in sequences:
            self.cache.commit(sequence)
        return torch.stack(outs).split(batch.cu_seqlens_q.diff().tolist(), dim=1)

    def dense(self, tokens, count):
        """The outputs of the last `count` tokens, from scratch."""
        outs = []
        for layer in range(LAYERS):
            q, k, v = self.project(layer, tokens, 0)
            k, v = self.stored(k), self.stored(v)
            out = onchip.attention(q[None, -count:], k[None], v[None], causal=True)
            outs.append(out[0])
        return torch.stack(outs)

    def stored(self, x):
        """x as the cache stores it."""
        form = self.cache.spec.kv_dtype
        return x if form is None else dequantise(*quantise(x, form), x.dtype)

    def check(self, sequences):
        counts = [s.length - s.computed for s in sequences]
        for sequence, count, out in zip(sequences, counts, self.step(sequences), strict=True):
            torch.testing.assert_close(out, self.dense(sequence.tokens, count), rtol=0, atol=1e-12)


def start(cache, prompt, **options):
    sequence = cache.open(prompt, **options)
    assert cache.append(sequence, prompt[sequence.length :]) is None
    return sequence


def tokens(count, seed=0):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_prefill_forks_decode_and_rollback_equal_dense_attention(page_size, kv_dtype):
    cache = make(200, page_size, kv_dtype)
    toy = Toy(cache)
    a, b = start(cache, tokens(13)), start(cache, tokens(7, seed=1))
    toy.check([a, b])
    forks = [cache.fork(a) for _ in range(3)]
    everyone = [a, b, *forks]
    for i in range(6):
        assert cache.append_all(everyone, [[i + j] for j in range(len(everyone))]) is None
        toy.check(everyone)
    cache.truncate(forks[0], 14)
    assert cache.append_all([forks[0], b], [tokens(5, seed=2), [3]]) is None
    toy.check([b, forks[0]])  # a chunk and a decode step in one call, in any order
    cache.check()
    for sequence in everyone:
        cache.free(sequence)
    cache.check()
    assert cache.pool.num_free == cache.pool.capacity


@pytest.mark.parametrize("length", [1, 4, 5, 8, 15])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_prefix_hit_is_attended_to(length, kv_dtype):
    """MinivLLM #98: a hit was accepted, then prefill ignored the cached keys. nano-vllm #144: a
    prompt of whole pages.
    """
    cache = make(kv_dtype=kv_dtype)
    toy = Toy(cache)
    first = start(cache, tokens(length))
    toy.check([first])
    second = start(cache, tokens(length))
    assert second.hit_tokens == length - 1
    toy.check([second])
    third = start(cache, tokens(length) + [1, 2, 3])
    assert third.hit_tokens == length
    toy.check([third])
    cache.check()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_copied_partial_page_belongs_to_the_new_sequence(kv_dtype):
    cache = make(kv_dtype=kv_dtype)
    toy = Toy(cache)
    first = start(cache, tokens(10))
    toy.check([first])
    second = start(cache, tokens(10)[:6] + [1, 2])
    assert (second.hit_tokens, second.copied_tokens) == (6, 2)
    assert second.table[0] == first.table[0] and second.table[1] != first.table[1]
    toy.check([second])
    cache.append_all([first, second], [[1], [2]])
    toy.check([first, second])


def test_a_preempted_sequence_hits_its_own_prefix():
    """nano-vllm #211, #233: lengths taken before the hit gave slots that did not exist."""
    cache = make(12)
    toy = Toy(cache)
    prompt = tokens(14)
    sequence = start(cache, prompt)
    toy.check([sequence])
    cache.append(sequence, [1, 2, 3])
    toy.check([sequence])
    cache.free(sequence)
    again = start(cache, [*prompt, 1, 2, 3, 4])
    assert again.hit_tokens == 17
    assert cache.view([again]).slot_mapping.tolist() == [again.table[4] * 4 + 1]
    toy.check([again])


def test_a_sequence_cancelled_before_commit_publishes_nothing():
    """ROCm/ATOM #902: reserved slots are not written slots."""
    cache = make()
    sequence = start(cache, tokens(11))
    cache.free(sequence)
    assert cache.open(tokens(11)).hit_tokens == 0
    assert cache.pool.num_cached == 0


def test_salts_share_nothing_and_one_salt_does():
    cache = make()
    first = start(cache, tokens(9), salt="alice")
    Toy(cache).check([first])
    assert cache.open(tokens(9), salt="alice").hit_tokens == 8
    assert cache.open(tokens(9), salt="bob").hit_tokens == 0
    assert cache.open(tokens(9)).hit_tokens == 0


def test_prefix_reuse_can_be_off():
    cache = make(prefix_reuse=False)
    first = start(cache, tokens(9))
    Toy(cache).check([first])
    cache.free(first)
    assert cache.open(tokens(9)).hit_tokens == 0 and cache.pool.num_cached == 0


def test_cached_pages_count_as_free_until_they_are_hit():
    """vllm's test_prefill_not_enough_free_blocks_with_computed_blocks: a hit uses free pages up."""
    cache = make(6)
    first = start(cache, tokens(12))
    Toy(cache).check([first])
    cache.free(first)
    assert cache.pool.num_free == 5
    second = cache.open(tokens(12) + [1] * 8)
    assert second.hit_tokens == 12 and cache.pool.num_free == 2
    third = cache.open()
    assert cache.reserve(third, 5) is None
    assert cache.append(second, [1] * 8) == NoRoom(2, 0)
    cache.free(third)
    assert cache.append(second, [1] * 8) is None
    cache.check()


def test_a_partial_page_is_not_copied_without_a_free_page():
    cache = make(4)
    first = start(cache, tokens(12))
    Toy(cache).check([first])
    second = cache.open(tokens(12)[:6] + [1, 2])
    assert (second.hit_tokens, second.copied_tokens) == (4, 0)
    cache.check()


def test_tokens_without_ids_are_never_published():
    cache = make()
    sequence = start(cache, tokens(6))
    Toy(cache).check([sequence])
    assert cache.reserve(sequence, 3) is None
    assert cache.append(sequence, [1, 2]) is None
    cache.commit(sequence)
    assert sequence.length == 11 and len(sequence.tokens) == 6
    cache.free(sequence)
    assert cache.open(tokens(6) + [1, 2]).hit_tokens == 6


def test_empty_prompts_and_batches_are_served():
    """vllm #7632: an empty prompt stopped the engine."""
    cache = make()
    empty = cache.open([])
    batch = cache.view([empty])
    assert batch.cache_seqlens.tolist() == [0] and batch.slot_mapping.numel() == 0
    assert batch.cu_seqlens_q.tolist() == [0, 0] and batch.max_seqlen_q == 0
    assert cache.view([]).page_table.shape == (0, 1)
    assert cache.append(empty, [1]) is None
    Toy(cache).check([empty])


def test_no_free_row_returns_no_room():
    cache = make(max_seqs=2)
    a, _ = start(cache, tokens(3)), cache.open()
    Toy(cache).check([a])
    assert cache.open() == NoRoom(1, 0, "sequences")
    assert cache.fork(a) == NoRoom(1, 0, "sequences")
    cache.free(a)
    assert not isinstance(cache.open(), NoRoom)


def test_the_view_is_int32_aligned_and_never_reads_behind_the_pages():
    cache = make(40, 4, max_seqlen=100)
    a, b = start(cache, tokens(9)), start(cache, tokens(2, seed=1))
    batch = cache.view([b, a])
    assert {t.dtype for t in batch[:4]} == {torch.int32}
    assert all(t.data_ptr() % 128 == batch.buffer.data_ptr() % 128 for t in batch[:4])
    assert batch.page_table.shape == (2, 3) and batch.page_table[1].tolist() == list(a.table.pages)
    assert batch.slot_mapping.tolist()[:2] == [b.table[0] * 4, b.table[0] * 4 + 1]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 11] and batch.max_seqlen_q == 9


def test_a_static_batch_is_refilled_in_place():
    cache = make()
    toy = Toy(cache)
    a, b = start(cache, tokens(9)), start(cache, tokens(2, seed=1))
    static = cache.static_batch(BatchShape(num_seqs=3, num_tokens=12, max_pages=5, max_seqlen_q=9))
    where = static.buffer.data_ptr()
    assert cache.view([a, b], out=static) is static and static.buffer.data_ptr() == where
    exact = cache.view([a, b])
    assert static.cache_seqlens.tolist() == [9, 2, 0]
    assert static.cu_seqlens_q.tolist() == [0, 9, 11, 11]
    assert static.slot_mapping.tolist() == [*exact.slot_mapping.tolist(), -1]
    toy.check([a, b])
    cache.append(b, [5])
    cache.view([b], out=static)
    assert static.cache_seqlens.tolist() == [3, 0, 0] and static.max_seqlen_q == 9
    assert static.slot_mapping.tolist() == [b.table[0] * 4 + 2] + [-1] * 11
    cache.append(a, tokens(12))
    with pytest.raises(ValueError, match="the batch has num_tokens=12, these sequences need 13"):
        cache.view([a, b], out=static)


@pytest.mark.parametrize("full_copy_pages", [1, 2, 256])
def test_static_batches_share_a_table_and_copy_the_columns_in_use(monkeypatch, full_copy_pages):
    """A narrow table is copied in one piece, of a wide one only the columns in use. Entries behind
    the pages of a sequence are arbitrary.
    """
    monkeypatch.setattr(batches, "FULL_COPY_PAGES", full_copy_pages)
    cache = make()
    toy = Toy(cache)
    a, b = start(cache, tokens(9)), start(cache, tokens(2, seed=1))
    table = cache.static_table()
    assert table.shape == cache.host_table.pages.shape
    table.fill_(-7)
    shapes = [BatchShape(3, 12, table.shape[1], 9), BatchShape(2, 11, table.shape[1], 9, 2)]
    for static in [cache.static_batch(shape, table) for shape in shapes]:
        assert static.shape in shapes and static.page_table.data_ptr() == table.data_ptr()
        cache.view([a, b], out=static)
        for row, sequence in enumerate((a, b)):
            pages = sequence.table.pages
            assert static.page_table[row, : len(pages)].tolist() == list(pages)
        assert static.cache_seqlens[:2].tolist() == [9, 2]
        assert static.cu_seqlens_q[:3].tolist() == [0, 9, 11]
        untouched = static.page_table[:2, max(3, full_copy_pages) :]
        assert (untouched == -7).all()
    assert (table[2:] == -7).all()
    toy.check([a, b])


def test_a_transposed_key_is_written_correctly():
    cache = make()
    sequence = start(cache, tokens(5))
    k, v = torch.randn(KV_HEADS, DIM, 5).double(), torch.randn(KV_HEADS, DIM_V, 5).double()
    k, v = k.permute(2, 0, 1), v.permute(2, 0, 1)
    cache.write(0, k, v, cache.view([sequence]).slot_mapping)
    slots = cache.view([sequence]).slot_mapping.long()
    assert torch.equal(cache.layer(0)[0].flatten(0, 1)[slots], k)


def test_bytes_of_pages():
    """A key of 128 in 8 bits takes 132 bytes with its scale, in 16 bits 256."""
    spec = Spec(3, 2, 128, page_size=16, dtype=torch.bfloat16)
    assert spec.page_bytes == 3 * 16 * 2 * 2 * 256
    for name in KV_DTYPES[1:]:
        small = spec.stored_as(name)
        assert small.page_bytes == 3 * 16 * 2 * 2 * 132 and small.stored_as(None) == spec
        assert small.pages_in(10**9) == 10**9 // small.page_bytes > 1.93 * spec.pages_in(10**9)
        held = KVCache(small, 7).pages
        assert sum(t.nbytes for t in held.tensors) == 7 * small.page_bytes
    with pytest.raises(ValueError, match="kv_dtype torch.float16 is not one of"):
        Spec(3, 2, 128, kv_dtype=torch.float16)


def test_a_quantised_cache_takes_the_dtype_of_the_model():
    cache = make(kv_dtype="int8")
    slots = cache.view([start(cache, tokens(2))]).slot_mapping
    small = torch.zeros(2, KV_HEADS, DIM, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"k must be \(2, 2, 8\) torch.float64"):
        cache.write(0, small, small[..., :DIM_V], slots)
    assert not make().scales(0)


def test_slots_of_minus_one_write_nothing():
    cache = make()
    sequence = start(cache, tokens(2))
    k, v = torch.ones(3, KV_HEADS, DIM).double(), torch.ones(3, KV_HEADS, DIM_V).double()
    slots = torch.tensor([sequence.table[0] * 4, -1, sequence.table[0] * 4 + 1], dtype=torch.int32)
    cache.write(1, k, v, slots)
    written = ~cache.pages.k.isnan().all(-1).all(-1)
    assert written[:, 1:].nonzero().tolist() == [[1, 0, 0], [1, 0, 1]], "of all pages but the null"


def refused(cache, match, call, *args, **options):
    """The call raises one clear error and changes nothing."""
    pool = cache.pool
    before = [list(a) for a in (pool._refs, pool._blank, cache.host_table.free_rows)]
    with pytest.raises(ValueError, match=match):
        call(*args, **options)
    assert before == [list(a) for a in (pool._refs, pool._blank, cache.host_table.free_rows)]
    cache.check()


def test_misuse_is_refused_and_changes_nothing():
    cache, other = make(max_seqlen=20), make()
    sequence, foreign = start(cache, tokens(6)), start(other, tokens(3))
    freed = cache.open()
    cache.free(freed)
    refused(cache, "freed already", cache.free, freed)
    refused(cache, "freed already", cache.append, freed, [1])
    refused(cache, "freed already", cache.view, [sequence, freed])
    refused(cache, "another cache", cache.view, [foreign])
    refused(cache, "6 tokens are not computed yet", cache.fork, sequence)
    refused(cache, "cannot commit length=7", cache.commit, sequence, 7)
    refused(cache, "between 0 and the table's 6", cache.truncate, sequence, 7)
    refused(cache, "no table twice", cache.append_all, [sequence, sequence], [[1], [1]])
    refused(cache, "must be as many", cache.append_all, [sequence], [[1], [1]])
    refused(cache, "cannot be -2", cache.reserve, sequence, -2)
    refused(cache, "token ids must be integers", cache.open, ["a"])
    refused(cache, "token ids must be integers", cache.append, sequence, ["a"])


def test_a_request_that_can_never_fit_is_refused_at_once():
    """vllm #39734, #40302: an admitted one waited for ever or stopped the engine."""
    cache = make(max_seqlen=20)
    sequence = start(cache, tokens(6))
    refused(cache, "21 tokens exceed the cache's max_seqlen=20", cache.open, tokens(21))
    refused(cache, "21 tokens exceed", cache.append, sequence, tokens(15))
    assert make(num_pages=3).max_seqlen == 8


def test_writes_are_checked():
    cache = make()
    a = start(cache, tokens(6))
    slots = cache.view([a]).slot_mapping
    k, v = torch.zeros(6, KV_HEADS, DIM).double(), torch.zeros(6, KV_HEADS, DIM_V).double()
    refused(cache, "layer=2 must lie in", cache.write, 2, k, v, slots)
    refused(cache, r"k must be \(6, 2, 8\)", cache.write, 0, k[:5], v, slots)
    refused(cache, "v must be .* torch.float64", cache.write, 0, k, v.float(), slots)
    refused(cache, "slot_mapping must be torch.int32", cache.write, 0, k, v, slots.long())
    refused(cache, "on meta", cache.write, 0, k, v.to("meta"), slots)
    refused(cache, "points to page 0", cache.write, 0, k, v, slots * 0)
    refused(cache, "points to page 40", cache.write, 0, k, v, slots * 0 + 160)
    refused(cache, "points to page -1", cache.write, 0, k, v, slots * 0 - 2)
    refused(cache, "which 0 tables hold", cache.write, 0, k, v, slots + 40)
    cache.commit(a)
    cache.fork(a)
    refused(cache, "which 2 tables hold", cache.write, 0, k, v, slots)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"head_dim": 577}, "head_dim=577 must be between 1 and 576"),
        ({"head_dim": 513}, "head_dim_v=513 between 1 and 512"),
        ({"head_dim": 0, "head_dim_v": 8}, "head_dim=0 must be"),
        ({"page_size": 12}, "^page_size=12 must be a power of two"),
        ({"page_size": 512}, "power of two"),
        ({"dtype": torch.int8}, "torch.int8 is not one of"),
    ],
)
def test_specs_are_checked(change, match):
    with pytest.raises(ValueError, match=match):
        Spec(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 8} | change)


def test_bytes_of_a_page():
    """GQA 8 heads, D 128, bf16, 32 layers, page 16: 2 MiB."""
    spec = Spec(32, 8, 128)
    assert spec.page_bytes == 2 * 2**20 and spec.pages_in(2**30) == 512
    with pytest.raises(ValueError, match="do not fit into int32"):
        KVCache(Spec(1, 1, 1, page_size=256), 2**23)


def test_ids_may_be_appended_after_their_slots():
    """A token that is still being sampled has its slot; the page is found when the id is known."""
    cache = make()
    one = cache.open()
    cache.append(one, [1, 2, 3])
    cache.commit(one)
    for token in (4, 5, 6):
        assert cache.reserve_each([one]) is None
        cache.commit(one)  # written by the step that sampled the token
        assert cache.open([1, 2, 3, 4, 5, 6, 9]).hit_tokens == min(one.length, 6) - 1
        cache.append_tokens(one, [token])
    cache.free(one)
    assert cache.open([1, 2, 3, 4, 5, 6, 9]).hit_tokens == 6
    cache.check()


def test_ids_cannot_exceed_the_reserved_slots():
    cache = make()
    one = cache.open()
    cache.append(one, [1, 2])
    cache.reserve(one, 2)
    refused(cache, "3 ids for 2 reserved tokens", cache.append_tokens, one, [3, 4, 5])
    cache.append_tokens(one, [3])
    assert one.tokens == [1, 2, 3] and one.length == 4


def test_numbers_of_the_caller_are_copied_with_a_batch():
    cache = make()
    sequences = [cache.open(), cache.open()]
    cache.append_all(sequences, [[1, 2, 3], [4]])
    words = torch.tensor([7, -8, 9], dtype=torch.int32)
    assert cache.view(sequences, extra=words).extra.tolist() == [7, -8, 9]
    assert cache.view(sequences).extra.tolist() == []
    static = cache.static_batch(BatchShape(4, 6, 10, 3, 5))
    assert cache.view(sequences, out=static, extra=words).extra.tolist() == [7, -8, 9, 0, 0]
    with pytest.raises(ValueError, match="num_extra=2, these sequences need 3"):
        cache.view(sequences, out=cache.static_batch(BatchShape(4, 6, 10, 3, 2)), extra=words)
