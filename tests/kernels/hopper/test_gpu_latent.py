"""Latent pages on Hopper: keys of 576 columns, the first 512 of which are the values, against the
oracle and against triton's kernel, on the GPU.
"""

from functools import partial

import pytest
import torch

import onchip
from onchip.kernels.tiles import HOPPER_PAGE_SIZES
from onchip.testing import assert_accurate, make_packed, make_pages

pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [5, 1, 2049, 0, 333, 64, 4000, 16, 17]
DIM, DIM_V = 576, 512


def latent_pages(queries, lengths, num_heads, page_size, dtype):
    """Sequences of so many queries and keys: a packed call, and its keys in pages."""
    shape = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": DIM, "head_dim_v": DIM_V}
    packed = make_packed(queries, lengths, dtype=dtype, device="cuda", **shape)
    k, v, table, seqlens = make_pages(packed.k, packed.k, packed.cu_seqlens_k, page_size)
    return packed._replace(v=packed.k[..., :DIM_V]), (k, None, table, seqlens)


def check_accuracy(
    seqlen_q, lengths, num_heads=16, page_size=64, dtype=BF16, packed=False, **options
):
    """The accuracy rule. seqlen_q: of every sequence, or a list if the queries are packed."""
    queries = seqlen_q if packed else [seqlen_q] * len(lengths)
    call, pages = latent_pages(queries, lengths, num_heads, page_size, dtype)
    q = call.q if packed else call.q.unflatten(0, (len(lengths), seqlen_q))

    def attention(*_, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        if packed:
            options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        options = {"return_lse": True, "kernel": "hopper", "latent": DIM_V} | options
        out, lse = onchip.paged_attention(q, *pages, **options)
        return (out, lse) if packed else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))

    assert_accurate(attention, *call[:3], **{"causal": True} | options, **call.options)


@pytest.mark.parametrize("page_size", HOPPER_PAGE_SIZES)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_lengths_and_page_sizes(page_size, num_heads):
    check_accuracy(1, LENGTHS, num_heads, page_size)


@pytest.mark.parametrize("num_heads", [1, 5, 16, 33, 64, 96, 128])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5])
def test_rows_of_a_tile(num_heads, seqlen_q):
    check_accuracy(seqlen_q, [n + seqlen_q for n in LENGTHS], num_heads)


@pytest.mark.parametrize("window", [(100, None), (3, 0), (0, 0), (2000, 1), (None, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_windows(window, seqlen_q):
    check_accuracy(seqlen_q, [n + 4 for n in LENGTHS], window_size=window, causal=False)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_softcap_sinks_and_other_dtypes(dtype, num_heads):
    sinks = torch.randn(num_heads, device="cuda")
    options = {"softcap": 5.0, "sinks": sinks, "out_dtype": FP32}
    check_accuracy(2, [n + 2 for n in LENGTHS], num_heads, dtype=dtype, **options)


@pytest.mark.parametrize("batch", [1, 33, 140, 256, 300])
def test_batches_of_every_bucket(batch):
    check_accuracy(1, [5000] + [1 + 7 * b % 90 for b in range(batch - 1)])


@pytest.mark.parametrize("window", [(None, None), (200, 0)])
def test_packed_queries(window):
    queries = [1, 0, 40, 1, 7, 300]
    check_accuracy(queries, [900, 30, 3000, 1, 7, 300], 8, packed=True, window_size=window)


def test_large_scores_and_uniform_weights():
    check_accuracy(1, LENGTHS, softmax_scale=8.0)
    check_accuracy(1, LENGTHS, softmax_scale=1e-6)


def test_chosen_by_itself_and_equal_in_a_replay():
    """The third call of the same problem is replayed; keys that hold no values go elsewhere."""
    call, (pages, _, table, seqlens) = latent_pages([1] * 3, [700, 64, 3], 16, 64, BF16)
    q = call.q[:, None]
    attend = partial(onchip.paged_attention, page_table=table, cache_seqlens=seqlens)
    apart = pages[..., :DIM_V].clone()
    for _ in range(4):
        out, lse = attend(q, pages, None, latent=DIM_V, causal=True, return_lse=True)
        want = attend(q, pages, apart, causal=True, return_lse=True, kernel="triton")
        torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(out, want[0], rtol=2e-2, atol=2e-2)
        other = attend(q, pages, apart, causal=True)
        torch.testing.assert_close(other, want[0], rtol=2e-2, atol=2e-2)
        pages[:, :, :, :8] *= 0.5  # in place: a replay reads the new numbers
        apart[..., :8] *= 0.5


def test_bad_tables_and_lengths_stay_in_bounds():
    """Ids outside of the pool and lengths beyond the table are clamped: no other result changes."""
    call, (pages, _, table, seqlens) = latent_pages([1] * 2, [300, 200], 16, 64, BF16)
    q = call.q[:, None]
    attend = lambda: onchip.paged_attention(
        q, pages, None, table, seqlens, latent=DIM_V, kernel="hopper"
    )
    want = attend()[0]
    table[1, 0], table[1, 1], seqlens[1] = 10**6, -7, 10**6
    torch.testing.assert_close(attend()[0], want)
