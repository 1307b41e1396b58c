"""flash_attn_with_kvcache appends in place and attends, over every kind of cache."""

import itertools

import pytest
import torch

from onchip import UnsupportedError
from onchip.integrations.flash_attn import flash_attn_with_kvcache
from onchip.integrations.flash_attn.cache import locate_cache
from tests.integrations.flash_attn import plain

HEADS, KV_HEADS, DIM = 4, 2, 24
KINDS = ("rows", "some rows", "left pad", "pages of 16", "pages of 1")


class CacheCase:
    """A cache of some kind that holds `lengths` tokens of each sequence and NaN elsewhere, q, and
    new k and v; can locate position p of sequence b.
    """

    def __init__(self, kind, lengths, seqlen_q, seqlen_new, dtype=torch.float64):
        self.lengths, self.kind, self.capacity = lengths, kind, 48
        self.pad = [0] * len(lengths)
        self.extra, cells = {}, (6, self.capacity)
        if kind == "some rows":
            self.extra["cache_batch_idx"] = torch.tensor([4, 0, 5][: len(lengths)])
        elif kind == "left pad":
            self.pad = [min(b + 1, n) for b, n in enumerate(lengths)]
            self.extra["cache_leftpad"] = torch.tensor(self.pad)
        elif kind.startswith("pages"):
            size = int(kind.split()[-1])
            table = torch.randperm(3 * self.capacity // size).view(3, -1)[: len(lengths)]
            self.extra["block_table"], cells = table, (4 * self.capacity // size, size)
        self.extra = {name: t.int() for name, t in self.extra.items()}
        shape = (*cells, KV_HEADS, DIM)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in "kv")
        for b, length in enumerate(lengths):
            for p in range(self.pad[b], length):
                for cache in (self.k_cache, self.v_cache):
                    cache[self.cell(b, p)] = torch.randn(KV_HEADS, DIM, dtype=dtype)
        batch = len(lengths)
        self.q = torch.randn(batch, seqlen_q, HEADS, DIM, dtype=dtype)
        self.new = torch.randn(2, batch, seqlen_new, KV_HEADS, DIM, dtype=dtype).unbind()

    def cell(self, b, p):
        if "block_table" in self.extra:
            size = self.k_cache.shape[1]
            return int(self.extra["block_table"][b, p // size]), p % size
        row = self.extra.get("cache_batch_idx")
        return (b if row is None else int(row[b])), p

    def seqlens(self):
        return torch.tensor(self.lengths, dtype=torch.int32)

    def wanted(self, append, rotary=None, interleaved=True, slopes=None, **options):
        """(out, lse, the cache afterwards), in fp64."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        rows = []
        for b, length in enumerate(self.lengths):
            q, end = self.q[b], length
            if append:
                k, v = (t[b] for t in self.new)
                at = torch.arange(length, length + len(k))
                if rotary:
                    local = options.get("causal") or options.get("window", (-1, -1)) != (-1, -1)
                    steps = torch.arange(len(q)) * bool(local)
                    q = plain.rotated(q, length + steps, *rotary, interleaved)
                    k = plain.rotated(k, at, *rotary, interleaved)
                for t, p in enumerate(at.tolist()):
                    k_cache[self.cell(b, p)] = k[t].to(k_cache.dtype)
                    v_cache[self.cell(b, p)] = v[t]
                end = length + len(k)
            keys = [self.cell(b, p) for p in range(self.pad[b], end)]
            k, v = (
                torch.stack([c[x] for x in keys]) if keys else c[0, :0] for c in (k_cache, v_cache)
            )
            own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
            rows.append(plain.attention(q, k, v, slopes=own, **options))
        out, lse = (torch.stack(x) for x in zip(*rows, strict=True))
        return out, lse, (k_cache, v_cache)


def same(got, want, atol=1e-12):
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol, equal_nan=True)


def check(scene, append, atol=1e-12, **options):
    """Compare the call with `wanted`; only the new slots of the cache may have changed."""
    theirs = {"window_size": "window", "alibi_slopes": "slopes", "softmax_scale": "scale"}
    rotary = options.pop("rotary", None)
    interleaved = options.get("rotary_interleaved", True)
    named = {theirs.get(n, n): x for n, x in options.items() if n != "rotary_interleaved"}
    out, lse, caches = scene.wanted(append, rotary, interleaved, **named)
    new = dict(zip("kv", scene.new, strict=True)) if append else {}
    tables = dict(zip(("rotary_cos", "rotary_sin"), rotary or (None, None), strict=True))
    seqlens, q = scene.seqlens(), scene.q.clone()
    got, got_lse = flash_attn_with_kvcache(
        scene.q,
        scene.k_cache,
        scene.v_cache,
        **new,
        **tables,
        **options,
        **scene.extra,
        cache_seqlens=seqlens,
        return_softmax_lse=True,
    )
    same(got, out, atol)
    same(got_lse, lse, max(atol, 1e-12))
    for after, want in zip((scene.k_cache, scene.v_cache), caches, strict=True):
        same(after, want, atol)
    assert torch.equal(scene.q, q) and torch.equal(seqlens, scene.seqlens())


def tables(rows, dim, dtype=torch.float64):
    angle = torch.arange(rows)[:, None] / 7.0 ** torch.arange(dim // 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(1, 1), (5, 5), (3, 11), (1, 0), (13, 2)])
def test_append_and_attend(kind, seqlen_q, seqlen_new):
    scene = CacheCase(kind, [29, 0, 31], seqlen_q, seqlen_new)
    check(scene, seqlen_new > 0, causal=True)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (6, 2)},
    "causal window": {"causal": True, "window_size": (6, -1)},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "slopes of each": {"alibi_slopes": torch.rand(2, HEADS), "causal": True},
}


@pytest.mark.parametrize("kind", ["rows", "left pad", "pages of 16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("append", [False, True])
def test_options(kind, options, append):
    check(CacheCase(kind, [23, 17], 4, 4), append, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("interleaved", "dim", "options"),
    [
        (True, DIM, {"causal": True}),
        (False, DIM, {"window_size": (9, 9)}),
        (True, 16, {}),
        (False, 16, {"causal": True}),
    ],
)
def test_rotary_rotates_new_keys_by_position_and_queries_if_causal_or_local(
    kind, interleaved, dim, options
):
    """Otherwise all queries are at the first new position. The cache has rotated keys."""
    scene = CacheCase(kind, [19, 30], 3, 4)
    check(scene, True, rotary=tables(48, dim), rotary_interleaved=interleaved, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    """Rotated in fp32 and rounded once, then attention within two roundings of its values."""
    scene = CacheCase("pages of 16", [19, 30], 1, 1, dtype)
    check(scene, True, 4 * torch.finfo(dtype).eps, rotary=tables(48, 16, dtype), causal=True)


def test_lengths_as_an_int_and_no_lengths_at_all():
    scene = CacheCase("rows", [48, 48], 3, 1)
    caches = scene.k_cache, scene.v_cache
    want = flash_attn_with_kvcache(scene.q, *caches, cache_seqlens=scene.seqlens())
    same(flash_attn_with_kvcache(scene.q, *caches, cache_seqlens=48), want)
    same(flash_attn_with_kvcache(scene.q, *caches), want)
    pages = CacheCase("pages of 16", [48], 3, 1)
    caches, table = (pages.k_cache, pages.v_cache), pages.extra["block_table"]
    want = flash_attn_with_kvcache(pages.q, *caches, cache_seqlens=48, block_table=table)
    same(flash_attn_with_kvcache(pages.q, *caches, block_table=table), want)


@pytest.mark.parametrize("pad", [False, True])
def test_caches_that_are_views(pad):
    """Keys and values in one tensor, heads before tokens, and the beginning of a longer cache."""
    k, v = torch.randn(2, 3, 20, KV_HEADS, DIM, dtype=torch.float64)
    q = torch.randn(3, 2, HEADS, DIM, dtype=torch.float64)
    extra = {"cache_leftpad": torch.tensor([3, 0, 5], dtype=torch.int32)} if pad else {}
    new = torch.randn(2, 3, 2, KV_HEADS, DIM, dtype=torch.float64)
    call = lambda *caches: flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=9, **extra)
    both, long = torch.stack([k, v], 2), torch.randn(2, 3, 33, KV_HEADS, DIM, dtype=torch.float64)
    long[:, :, :20] = torch.stack([k, v])
    views = {
        "one tensor": both.unbind(2),
        "heads first": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)],
        "beginning": [t[:, :20] for t in long],
    }
    want = call(k, v)
    for view in views.values():
        same(call(*view), want)
        assert torch.equal(view[0], k) and torch.equal(view[1], v)


@pytest.mark.parametrize(
    ("shape", "page_size"), [((3, 4096), 256), ((2, 48), 16), ((2, 33), 1), ((1, 0), 1)]
)
def test_rows_become_pages_as_large_as_possible(shape, page_size):
    """So that a kernel for pages of usual sizes can be used."""
    caches = torch.randn(2, *shape, KV_HEADS, DIM)
    cache = locate_cache(torch.randn(1, 1, HEADS, DIM), *caches, None, None, None)
    assert cache.page_size == page_size and cache.capacity == shape[1]


def test_no_new_tokens_rotate_the_queries_alone():
    scene = CacheCase("rows", [19, 30], 3, 0)
    check(scene, True, rotary=tables(48, 16), causal=True)


def test_one_split_does_not_depend_on_the_batch():
    """num_splits=1 gives the same bits for a sequence in any batch."""
    scene = CacheCase("pages of 16", [40, 3, 17], 1, 0)
    scene.q, scene.k_cache, scene.v_cache = (
        t.float() for t in (scene.q, scene.k_cache, scene.v_cache)
    )
    run = lambda at: flash_attn_with_kvcache(
        scene.q[at],
        scene.k_cache,
        scene.v_cache,
        cache_seqlens=scene.seqlens()[at],
        block_table=scene.extra["block_table"][at],
        num_splits=1,
    )
    together = run(slice(None))
    for b in range(3):
        assert torch.equal(run(slice(b, b + 1))[0], together[b])


def test_no_gradient_as_in_flash_attn():
    scene = CacheCase("rows", [3], 1, 1)
    q = scene.q.requires_grad_()
    out = flash_attn_with_kvcache(q, scene.k_cache, scene.v_cache, cache_seqlens=3)
    assert not out.requires_grad


I32 = torch.int32
REFUSED = {
    "k alone": ({"k": 1}, "v is missing"),
    "no lengths": ({"k": 1, "v": 1, "cache_seqlens": None}, "cache_seqlens is missing"),
    "full": ({"k": 1, "v": 1, "cache_seqlens": 20}, "position 20, for which the cache of"),
    "rotary without keys": ({"rotary_cos": 30, "rotary_sin": 30}, "give k and v"),
    "one table": ({"k": 1, "v": 1, "rotary_cos": 30}, "must be given together"),
    "short tables": ({"k": 1, "v": 1, "rotary_cos": 9, "rotary_sin": 9}, "has 9 rows"),
    "wide lengths": ({"cache_seqlens": torch.tensor([3, 3])}, "must be int32"),
    "row": ({"cache_batch_idx": torch.tensor([0, 2], dtype=I32)}, "exceeds the 2 rows"),
    "pages and rows": (
        {"block_table": torch.zeros(2, 1, dtype=I32), "cache_batch_idx": torch.zeros(2, dtype=I32)},
        "cache_batch_idx with block_table",
    ),
    "pages and pad": (
        {"block_table": torch.zeros(2, 1, dtype=I32), "cache_leftpad": torch.zeros(2, dtype=I32)},
        "cache_leftpad with block_table",
    ),
    "table that is none": ({"block_table": [[0], [1]]}, r"int32 \(batch, max_blocks\), got \[\["),
    "wide table": ({"block_table": torch.zeros(2, 1).long()}, "block_table must be int32"),
    "flat table": ({"k": 1, "v": 1, "block_table": torch.zeros(2, dtype=I32)}, "max_blocks"),
    "short table": (
        {"k": 1, "v": 1, "block_table": torch.zeros(1, 1, dtype=I32)},
        "a row for each of 2 sequences",
    ),
    "pad past the end": (
        {"cache_leftpad": torch.tensor([5, 6], dtype=I32)},
        r"cache_leftpad\[1\]=6 exceeds the 5 tokens",
    ),
    "three windows": ({"window_size": (1, 2, 3)}, "must be two ints"),
    "long": ({"cache_seqlens": 21}, "must be between 0 and 20"),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused(options, sentence):
    caches = torch.randn(2, 2, 20, KV_HEADS, DIM)
    before = caches.clone()
    made = {}
    for name, value in options.items():
        if name in ("k", "v"):
            value = torch.randn(2, 1, KV_HEADS, DIM)
        elif name.startswith("rotary"):
            value = torch.randn(value, 8)
        made[name] = value
    with pytest.raises((ValueError, UnsupportedError), match=sentence):
        call = {"cache_seqlens": 5} | made
        flash_attn_with_kvcache(torch.randn(2, 1, HEADS, DIM), *caches, **call)
    assert torch.equal(caches, before)


@pytest.mark.parametrize("appends", [False, True])
def test_lengths_beyond_the_block_table_are_a_runtime_error(appends):
    """As upstream: one key more than the columns of block_table hold. All of them is
    served, and nothing is written by a call that is refused.
    """
    caches = torch.randn(2, 4, 8, KV_HEADS, DIM)
    before = caches.clone()
    q, table = torch.randn(1, 1, HEADS, DIM), torch.zeros(1, 1, dtype=I32)
    new = torch.randn(2, 1, 1, KV_HEADS, DIM) if appends else (None, None)
    seqlens = torch.tensor([8 if appends else 9], dtype=I32)
    with pytest.raises(RuntimeError, match="9 keys exceeds block_table"):
        flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=seqlens, block_table=table)
    assert torch.equal(caches, before)
    full = torch.tensor([8], dtype=I32)
    assert torch.isfinite(
        flash_attn_with_kvcache(q, *caches, cache_seqlens=full, block_table=table)
    ).all()


def test_more_sequences_than_rows_and_rows_with_uneven_strides():
    q = torch.randn(3, 1, HEADS, DIM)
    caches = torch.randn(2, 2, 20, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="batch 3, the cache has 2 rows"):
        flash_attn_with_kvcache(q, *caches)
    odd = torch.randn(2 * 20 * KV_HEADS * DIM + 1).as_strided(
        (2, 20, KV_HEADS, DIM), (20 * KV_HEADS * DIM + 1, KV_HEADS * DIM, DIM, 1)
    )
    with pytest.raises(UnsupportedError, match="make both contiguous"):
        flash_attn_with_kvcache(q[:2], odd, odd)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_gpu_as_on_the_cpu(kind, dtype):
    scene = CacheCase(kind, [29, 0, 31], 3, 3, dtype)
    cos, sin = tables(48, 16, dtype)

    def run(device):
        move = lambda t: t.to(device, copy=True)
        caches = [move(scene.k_cache), move(scene.v_cache)]
        out = flash_attn_with_kvcache(
            move(scene.q),
            *caches,
            *map(move, scene.new),
            move(cos),
            move(sin),
            cache_seqlens=move(scene.seqlens()),
            causal=True,
            **{name: move(t) for name, t in scene.extra.items()},
        )
        return out.cpu(), *(c.cpu() for c in caches)

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        same(got, want, 4 * torch.finfo(dtype).eps)


@pytest.mark.gpu
def test_padding_rows_of_a_batch_write_and_read_nothing():
    """As batches of a fixed size are padded: length -1, pages of -1; and no call synchronises."""
    scene = CacheCase("pages of 16", [29, 7], 1, 1, torch.float16)
    caches = [scene.k_cache.cuda(), scene.v_cache.cuda()]
    before = [c.clone() for c in caches]
    table = scene.extra["block_table"].cuda()
    table[1] = -1
    seqlens = torch.tensor([29, -1], dtype=I32, device="cuda")
    q, new = scene.q.cuda(), [t.cuda() for t in scene.new]
    call = lambda: flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=seqlens, block_table=table, causal=True
    )
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cell = scene.cell(0, 29)
    for cache, old, token in zip(caches, before, new, strict=True):
        old[cell] = token[0, 0]
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())
    assert not out[1].any() and out[0].isfinite().all()


def test_every_kind_of_cache_gives_the_same():
    """One content, five layouts."""
    outs = []
    for kind in KINDS:
        torch.manual_seed(1)
        scene = CacheCase(kind, [21], 2, 2)
        scene.pad = [0]
        scene.extra.pop("cache_leftpad", None)
        torch.manual_seed(2)
        for p, cache in itertools.product(range(21), (scene.k_cache, scene.v_cache)):
            cache[scene.cell(0, p)] = torch.randn(KV_HEADS, DIM, dtype=torch.float64)
        scene.q = torch.randn(1, 2, HEADS, DIM, dtype=torch.float64)
        new = torch.randn(2, 1, 2, KV_HEADS, DIM, dtype=torch.float64)
        outs.append(
            flash_attn_with_kvcache(
                scene.q,
                scene.k_cache,
                scene.v_cache,
                *new,
                cache_seqlens=21,
                causal=True,
                **scene.extra,
            )
        )
    for out in outs[1:]:
        same(out, outs[0])
