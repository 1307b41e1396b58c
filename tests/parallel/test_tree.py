"""Decoding over a cache on several ranks equals decoding over the whole cache."""

import platform

import pytest
import torch

import onchip
from onchip import UnsupportedError
from onchip.parallel import tree
from onchip.parallel.comm import CountingComm, ParallelError, run_ranks
from onchip.parallel.tree import tree_attention, tree_paged_attention
from onchip.testing import compare, make_packed, make_pages, make_qkv
from tests.kv8 import FORMS, on_grid, quantise_pages

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
CASES = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window_size": (11, None)},
    "narrow": {"window_size": (2, None)},
    "band": {"causal": False, "window_size": (9, 2)},
    "alibi": {"alibi_slopes": SLOPES},
    "slopes of each entry": {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES])},
    "window and alibi": {"alibi_slopes": SLOPES, "window_size": (13, None)},
    "sinks, softcap": {"sinks": SINKS, "softcap": 3.0, "softmax_scale": 0.4},
}
SIZES = [(1, 0, 20, 9, 11), (41,), (0, 41, 0), (1,) * 8 + (33,)]


def cut(lengths):
    """(start, stop) of each rank."""
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return list(zip(edges, edges[1:], strict=False))


def close(got, want, tolerance=1e-12):
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("lengths", SIZES, ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_ranks_equal_one_device(options, lengths, seqlen_q):
    """fp64, GQA, uneven parts, ranks without keys, windows over several ranks."""
    q, k, v = make_qkv(2, seqlen_q, 41, num_heads=4, num_kv_heads=2, head_dim=7, head_dim_v=5)
    q, k, v = (t.double() for t in (q, k, v))
    if "alibi_slopes" in options and not options.get("causal", True):
        pytest.skip("refused")
    want, want_lse = onchip.attention(q, k, v, return_lse=True, **{"causal": True, **options})
    spans = cut(lengths)

    def decode(comm):
        start, stop = spans[comm.rank]
        mine = k[:, start:stop], v[:, start:stop]
        return tree_attention(q, *mine, comm, place=(start, 41), return_lse=True, **options)

    for out, lse in run_ranks(len(lengths), decode):
        close(out, want)
        close(lse, want_lse)


@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("options", [o for n, o in CASES.items()], ids=CASES)
def test_pages_on_ranks_equal_one_device(options, seqlen_q):
    """Sequences of different lengths, each spread over three ranks in its own way."""
    lengths = [41, 17]
    x = make_packed([seqlen_q] * 2, lengths, num_heads=4, num_kv_heads=2, head_dim=8)
    whole = make_pages(x.k, x.v, x.cu_seqlens_k, 4)
    q = x.q.view(2, seqlen_q, 4, 8)
    want, want_lse = onchip.paged_attention(q, *whole, return_lse=True, **options)
    edges = [[0, 13, 13, 41], [0, 2, 16, 17]]

    def decode(comm):
        cuts = [(e[comm.rank], e[comm.rank + 1]) for e in edges]
        rows = [slice(b + lo, b + hi) for b, (lo, hi) in zip((0, 41), cuts, strict=True)]
        sizes = torch.tensor([0] + [hi - lo for lo, hi in cuts]).cumsum(0).int()
        pages = make_pages(*(torch.cat([t[r] for r in rows]) for t in (x.k, x.v)), sizes, 4)
        places = [(lo, n) for (lo, _), n in zip(cuts, lengths, strict=True)]
        return tree_paged_attention(q, *pages, comm, places=places, return_lse=True, **options)

    for out, lse in run_ranks(3, decode):
        close(out, want, 1e-5)
        close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_8_bit_pages_have_scales(form):
    """One rank has 8-bit pages, the other fp32 pages with the same values."""
    x = make_packed([1], [41], num_heads=4, num_kv_heads=2, head_dim=8)
    q, k, v = x.q[None], on_grid(x.k, form), on_grid(x.v, form)
    want = onchip.attention(q, k[None], v[None], causal=True)

    def decode(comm):
        mine = k[comm.rank :: 2], v[comm.rank :: 2]
        cu = torch.tensor([0, len(mine[0])], dtype=torch.int32)
        *pages, table, seqlens = make_pages(*mine, cu, 4)
        pages, scales = quantise_pages(*pages, form) if comm.rank else (pages, {})
        return tree_paged_attention(q, *pages, table, seqlens, comm, **scales)

    for out in run_ranks(2, decode):
        close(out, want, 1e-5)


@pytest.mark.parametrize("seqlen_q, causal", [(1, True), (5, False)])
def test_positions_do_not_matter_if_all_keys_are_visible(seqlen_q, causal):
    """Every third token on each rank, and no place: dense and over pages."""
    x = make_packed([seqlen_q], [41], num_heads=4, num_kv_heads=2, head_dim=8)
    q, k, v = x.q[None], x.k[None], x.v[None]
    want = onchip.attention(q, k, v, causal=causal)

    def decode(comm):
        mine = k[:, comm.rank :: 3], v[:, comm.rank :: 3]
        cu = torch.tensor([0, mine[0].shape[1]], dtype=torch.int32)
        pages = make_pages(mine[0][0], mine[1][0], cu, 4)
        paged = tree_paged_attention(q, *pages, comm, causal=causal)
        return tree_attention(q, *mine, comm, causal=causal), paged

    for dense, paged in run_ranks(3, decode):
        close(dense, want, 1e-5)
        close(paged, want, 1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_one_message_or_two_give_the_same_bits(size, monkeypatch):
    """n bytes of state: gathered, (P - 1) n in P - 1 messages; reduced, 2 (P - 1) / P n in twice as
    many. All ranks have the same bits. Both ways have the same bits on x86; on ARM torch computes
    the last elements of a tensor one by one, with other roundings.
    """
    batch, heads, head_dim_v = 3, 8, 5
    q, k, v = make_qkv(batch, 1, 64, num_heads=heads, head_dim=7, head_dim_v=head_dim_v)
    n = batch * heads * (head_dim_v + 1) * 4

    def decode(comm):
        comm = CountingComm(comm)
        out = tree_attention(q, k[:, comm.rank :: size], v[:, comm.rank :: size], comm)
        return out, comm.messages, comm.bytes

    small = run_ranks(size, decode)
    monkeypatch.setattr(tree, "SECOND_MESSAGE_BYTES", 0)
    large = run_ranks(size, decode)
    for way in (small, large):
        assert all(torch.equal(out, way[0][0]) for out, _, _ in way)
    tolerance = 0.0 if platform.machine() == "x86_64" else 1e-6
    torch.testing.assert_close(large[0][0], small[0][0], rtol=0, atol=tolerance)
    for _, messages, sent in small:
        assert sum(messages.values()) == messages["all_gather"] == size - 1
        assert sum(sent.values()) == (size - 1) * n
    if size > 2:
        for _, messages, sent in large:
            assert messages == {"all_to_all": size - 1, "all_gather": size - 1}
            assert sum(sent.values()) == 2 * (size - 1) * n // size


def test_rows_that_see_no_key_on_any_rank():
    q, k, v = make_qkv(1, 3, 0, num_heads=2)
    decode = lambda comm: tree_attention(q, k, v, comm, place=(0, 0), return_lse=True)
    for out, lse in run_ranks(2, decode):
        assert not out.any() and (lse == -torch.inf).all()


def test_partial_results_are_not_rounded():
    """bf16: as accurate as one call, on 64 ranks."""
    q, k, v = make_qkv(4, 1, 1024, num_heads=16, dtype=torch.bfloat16)
    exact = onchip.attention(*(t.double() for t in (q, k, v)))

    def decode(comm):
        return tree_attention(q, k[:, comm.rank :: 64], v[:, comm.rank :: 64], comm)

    assert compare(run_ranks(64, decode)[0], onchip.attention(q, k, v), exact) <= 1.02


@pytest.mark.parametrize(
    "options, seqlen_q, sentence",
    [
        ({"window_size": (3, None)}, 1, "give their place"),
        ({"alibi_slopes": SLOPES}, 1, "give their place"),
        ({}, 2, "give their place"),
        ({"alibi_slopes": SLOPES, "causal": False, "place": (0, 9)}, 2, "need causal=True"),
        ({"dropout_p": 0.5}, 1, "does not take dropout_p"),
        ({"place": (3, 9)}, 1, "9 keys from start=3 on are not within seqlen_k=9"),
    ],
)
def test_wrong_arguments_are_refused(options, seqlen_q, sentence):
    q, k, v = make_qkv(1, seqlen_q, 9, num_heads=4)
    with pytest.raises(ValueError, match=sentence):
        run_ranks(1, lambda comm: tree_attention(q, k, v, comm, **options))


def test_every_sequence_has_a_place():
    x = make_packed([1, 1], [5, 9], num_heads=2)
    pages = make_pages(x.k, x.v, x.cu_seqlens_k, 4)
    with pytest.raises(ValueError, match="1 places for 2 sequences"):
        run_ranks(1, lambda comm: tree_paged_attention(x.q[:, None], *pages, comm, places=[(0, 9)]))


def test_gradients_are_refused():
    q, k, v = make_qkv(1, 1, 9)
    with pytest.raises(UnsupportedError, match="no gradient"):
        run_ranks(1, lambda comm: tree_attention(q.requires_grad_(), k, v, comm))


def test_ranks_with_different_calls_are_named():
    q, k, v = make_qkv(1, 1, 9)
    with pytest.raises(ParallelError, match="softcap is"):
        run_ranks(2, lambda comm: tree_attention(q, k, v, comm, softcap=float(comm.rank)))


def decode_on(comm, lengths):
    """Decode on a rank of the pool."""
    q, k, v = make_qkv(2, 3, sum(lengths), num_heads=4, num_kv_heads=2, head_dim=9)
    start, stop = cut(lengths)[comm.rank]
    place = (start, sum(lengths))
    out = tree_attention(q, k[:, start:stop], v[:, start:stop], comm, place=place)
    close(out, onchip.attention(q, k, v, causal=True), 1e-5)
    return out


@pytest.mark.parametrize("lengths", [(20, 3), (7, 0, 11, 1), (5,) * 8], ids=str)
def test_ranks_on_gloo(pool, lengths):
    outs = pool.run(len(lengths), decode_on, lengths)
    assert all(torch.equal(out, outs[0]) for out in outs)
