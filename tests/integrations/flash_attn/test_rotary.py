"""Rotary positions are multiplications of complex numbers."""

import pytest
import torch

from onchip.integrations.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from tests.integrations.flash_attn import plain


def tables(rows=40, dim=12, dtype=torch.float64):
    angle = torch.arange(rows)[:, None] / 5.0 ** torch.arange(dim // 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 7, torch.tensor([3, 0])])
@pytest.mark.parametrize("dim", [12, 20])
def test_tokens_are_rotated_by_their_positions(interleaved, offsets, dim):
    x, (cos, sin) = torch.randn(2, 9, 3, 20, dtype=torch.float64), tables(dim=dim)
    got = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    for b in range(2):
        start = int(offsets[b]) if isinstance(offsets, torch.Tensor) else offsets
        want = plain.rotated(x[b], start + torch.arange(9), cos, sin, interleaved)
        torch.testing.assert_close(got[b], want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [2, torch.tensor([1, 5, 0])])
def test_packed_positions_begin_anew_with_each_sequence(interleaved, offsets):
    cos, sin = tables()
    x = torch.randn(16, 3, 20, dtype=torch.float64)
    cu = torch.tensor([0, 7, 7, 16], dtype=torch.int32)
    got = apply_rotary_emb(
        x, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=9
    )
    for b, (lo, hi) in enumerate([(0, 7), (7, 7), (7, 16)]):
        start = int(offsets[b]) if isinstance(offsets, torch.Tensor) else offsets
        want = plain.rotated(x[lo:hi], start + torch.arange(hi - lo), cos, sin, interleaved)
        torch.testing.assert_close(got[lo:hi], want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients(interleaved, inplace):
    cos, sin = tables()
    fn = lambda x: apply_rotary_emb(x * 1.0, cos, sin, interleaved, inplace, 3)
    torch.autograd.gradcheck(fn, torch.randn(2, 5, 1, 16, dtype=torch.float64, requires_grad=True))


def test_in_place_is_the_same_tensor():
    cos, sin = tables()
    x = torch.randn(2, 9, 3, 20, dtype=torch.float64)
    want = apply_rotary_emb(x, cos, sin)
    got = apply_rotary_emb_func(x, cos, sin, False, True)
    assert got is x and torch.equal(x, want)


@pytest.mark.parametrize("grouped", [False, True])
def test_q_and_k_of_one_tensor_are_rotated_in_place(grouped):
    cos, sin = tables()
    tables_k = tables(dim=8)
    parts = [
        torch.randn(2, 9, n, 16, dtype=torch.float64) for n in ((4, 2, 2) if grouped else (3, 3, 3))
    ]
    want = [
        apply_rotary_emb(parts[0], cos, sin, True, seqlen_offsets=2),
        apply_rotary_emb(parts[1], *tables_k, True, seqlen_offsets=2),
        parts[2],
    ]
    join = (lambda x: torch.cat(x, 2)) if grouped else (lambda x: torch.stack(x, 2))
    qkv = join(parts)
    got = apply_rotary_emb_qkv_(qkv, cos, sin, *tables_k, True, 2, 4 if grouped else None)
    assert got is qkv and torch.equal(qkv, join(want))
    kv = torch.stack(parts[1:], 2)
    assert apply_rotary_emb_kv_(kv, *tables_k, True, 2) is kv
    assert torch.equal(kv, torch.stack(want[1:], 2))


@pytest.mark.parametrize("scale_base", [None, 16])
def test_the_module_rotates_by_frequencies(scale_base):
    """Scores depend on the distance of a key from a query, not on their positions."""
    module = RotaryEmbedding(12, base=50.0, scale_base=scale_base)
    token = torch.randn(1, 1, 1, 16, dtype=torch.float64).expand(1, 30, 1, 16)
    q, kv = module(token.clone(), torch.stack([token, token], 2))
    k, v = kv.unbind(2)
    assert torch.equal(v, token)
    s = q[0, :, 0] @ k[0, :, 0].T
    for shift in (-5, 0, 3):
        line = s.diagonal(shift)
        torch.testing.assert_close(line, line[:1].expand_as(line), rtol=1e-4, atol=1e-4)
    angle = torch.arange(30)[:, None] * 50.0 ** -(torch.arange(0, 12, 2) / 12)
    if scale_base is None:
        want = apply_rotary_emb(token, angle.cos().double(), angle.sin().double())
        torch.testing.assert_close(q, want, rtol=0, atol=1e-5)


def test_tables_of_the_module_grow_and_follow_the_type():
    module = RotaryEmbedding(16)
    whole = module(torch.ones(1, 40, 3, 2, 16))
    for offset, options in ((7, {}), (torch.tensor([7]), {"max_seqlen": 40})):
        late = module(torch.ones(1, 3, 3, 2, 16), seqlen_offset=offset, **options)
        torch.testing.assert_close(late, whole[:, 7:10])
    assert module(torch.ones(1, 50, 3, 2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="needs max_seqlen"):
        RotaryEmbedding(16)(torch.ones(1, 3, 3, 2, 16), seqlen_offset=torch.tensor([7]))
    with pytest.raises(ValueError, match="num_heads_q=None"):
        module(torch.ones(1, 3, 8, 16))


@pytest.mark.parametrize("num_heads_q", [None, 2])
def test_gradients_of_the_module(num_heads_q):
    module, shape = RotaryEmbedding(8, interleaved=True), (1, 4, 3, 1, 8)
    shape = shape if num_heads_q is None else (1, 4, 4, 8)
    fn = lambda x: module(x * 1.0, num_heads_q=num_heads_q)
    torch.autograd.gradcheck(fn, torch.randn(shape, dtype=torch.float64, requires_grad=True))


def test_sixteen_bits_are_rounded_once():
    cos, sin = tables(dtype=torch.bfloat16)
    x = torch.randn(2, 9, 3, 20, dtype=torch.bfloat16)
    got = apply_rotary_emb(x, cos, sin)
    want = plain.rotated(x[0], torch.arange(9), cos, sin, False)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got[0].double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seqlen_offsets": 35}, "positions 35 to 43 exceed the 40 rows"),
        ({"cos": torch.randn(40, 11), "sin": torch.randn(40, 11)}, "rotary_dim <= head_dim=20"),
        ({"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}, "max_seqlen=None"),
    ],
)
def test_wrong_arguments_are_refused(change, sentence):
    cos, sin = tables()
    with pytest.raises(ValueError, match=sentence):
        apply_rotary_emb(torch.randn(2, 9, 3, 20), **({"cos": cos, "sin": sin} | change))
