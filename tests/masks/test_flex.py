"""FlexAttention BlockMasks of any block size become the same cells."""

import types

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from onchip import masks


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k):
    return (q // (200 + 100 * b)) == (k // (200 + 100 * b))


def per_head(b, h, q, k):
    return (q - k).abs() <= 64 * h


def dense_of(fn, batch, heads, seqlen_q, seqlen_k):
    at = [torch.arange(n) for n in (batch, heads, seqlen_q, seqlen_k)]
    b, h, q, k = (x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(at))
    return fn(b, h, q, k).expand(batch, heads, seqlen_q, seqlen_k)


@pytest.mark.parametrize("block_size", [64, 128, 256, (64, 256)])
@pytest.mark.parametrize("seqlens", [(512, 512), (300, 799)])
@pytest.mark.parametrize(
    ("fn", "planes"),
    [
        (causal, (None, None)),
        (documents, (2, None)),
        (per_head, (None, 3)),
        (flex.and_masks(documents, per_head), (2, 3)),
        (flex.or_masks(causal, per_head), (2, 3)),
    ],
)
def test_a_flex_block_mask_equals_its_mask_mod(fn, planes, seqlens, block_size):
    given = flex.create_block_mask(fn, *planes, *seqlens, device="cpu", BLOCK_SIZE=block_size)
    built = masks.as_mask(given).build(2, 3, *seqlens)
    assert torch.equal(built.to_dense().expand(2, 3, -1, -1), dense_of(fn, 2, 3, *seqlens))


def test_a_conjunction_of_intervals_stays_an_interval():
    fn = flex.and_masks(causal, lambda b, h, q, k: q - k < 100)
    assert masks.mod(fn).build(4, 4, 300, 300).shape == (1, 1, 300, 300)


def test_flex_masks_without_full_lists_or_with_custom_blocks():
    """Blocks decide first: a cell outside of the listed blocks is hidden, whatever mask_mod is."""
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    given = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, mask_mod=causal)
    built = masks.as_mask(given).build(1, 1, 256, 256)
    expected = torch.ones(256, 256, dtype=torch.bool).tril()
    expected[:128, :128] = False
    assert given.full_kv_num_blocks is None
    assert torch.equal(built.to_dense()[0, 0], expected)


def test_lengths_that_do_not_fit_are_refused():
    given = flex.create_block_mask(causal, 2, None, 256, 256, device="cpu")
    for shape in [(2, 1, 256, 255), (3, 1, 256, 256)]:
        with pytest.raises(ValueError, match="does not fit"):
            masks.as_mask(given).build(*shape)


def test_the_package_does_not_need_flex_attention():
    given = flex.create_block_mask(causal, None, None, 256, 256, device="cpu")
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "mask_mod")
    plain = types.SimpleNamespace(**{name: getattr(given, name) for name in names})
    plain.BLOCK_SIZE, plain.seq_lengths = given.BLOCK_SIZE, given.seq_lengths
    built = masks.as_mask(plain).build(1, 1, 256, 256)
    assert torch.equal(built.to_dense(), masks.causal().build(1, 1, 256, 256).to_dense())
