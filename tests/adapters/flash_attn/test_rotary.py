"""Rotary positions are multiplications of complex numbers."""

import pytest
import torch

from onchip.adapters.flash_attn.rotary import apply_rotary_emb, apply_rotary_emb_func
from tests.adapters.flash_attn import plain


def tables(rows=40, dim=12, dtype=torch.float64):
    angle = torch.arange(rows)[:, None] / 5.0 ** torch.arange(dim // 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 7, torch.tensor([3, 0])])
@pytest.mark.parametrize("dim", [12, 20])
def test_tokens_turn_by_their_positions(interleaved, offsets, dim):
    x, (cos, sin) = torch.randn(2, 9, 3, 20, dtype=torch.float64), tables(dim=dim)
    got = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    for b in range(2):
        start = int(offsets[b]) if isinstance(offsets, torch.Tensor) else offsets
        want = plain.turned(x[b], start + torch.arange(9), cos, sin, interleaved)
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
        want = plain.turned(x[lo:hi], start + torch.arange(hi - lo), cos, sin, interleaved)
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


def test_sixteen_bits_are_rounded_once():
    cos, sin = tables(dtype=torch.bfloat16)
    x = torch.randn(2, 9, 3, 20, dtype=torch.bfloat16)
    got = apply_rotary_emb(x, cos, sin)
    want = plain.turned(x[0], torch.arange(9), cos, sin, False)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got[0].double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seqlen_offsets": 35}, "positions 35 to 43 leave the 40 rows"),
        ({"cos": torch.randn(40, 11), "sin": torch.randn(40, 11)}, "rotary_dim <= head_dim=20"),
        ({"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}, "max_seqlen=None"),
    ],
)
def test_refusals_are_sentences(change, sentence):
    cos, sin = tables()
    with pytest.raises(ValueError, match=sentence):
        apply_rotary_emb(torch.randn(2, 9, 3, 20), **({"cos": cos, "sin": sin} | change))
