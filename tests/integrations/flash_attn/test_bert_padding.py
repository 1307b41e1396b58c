"""Removing padding and adding it again is the identity, with gradients."""

import pytest
import torch

from onchip.integrations.flash_attn import bert_padding

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_unpad_and_pad(dtype):
    x = torch.randn(4, 5, 3, 7, dtype=torch.float64, requires_grad=True)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, MASK.to(dtype))
    assert torch.equal(tokens, x[MASK.bool()])
    assert cu.tolist() == [0, 3, 8, 8, 10] and cu.dtype == torch.int32
    assert (longest, used.tolist()) == (5, [3, 5, 0, 2]) and type(longest) is int
    back = bert_padding.pad_input(tokens, indices, 4, 5)
    assert torch.equal(back, x * MASK[..., None, None])
    assert torch.equal(bert_padding.pad_input(tokens, indices.int(), 4, 5), back)
    (dx,) = torch.autograd.grad((back * back).sum(), x)
    torch.testing.assert_close(dx, 2 * x * MASK[..., None, None])


def test_tokens_that_are_allocated_but_not_used_are_packed_and_not_counted():
    x = torch.randn(4, 5, 2)
    unused = torch.zeros_like(MASK)
    unused[3, 2:4] = 1
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert torch.equal(tokens, x[(MASK + unused).bool()])
    assert cu.tolist() == [0, 3, 8, 8, 12] and used.tolist() == [3, 5, 0, 2]
    assert len(indices) == 12 and longest == 5


def test_rows_of_several_sequences():
    """The example of flash_attn's documentation: rows of lengths 2 + 3, 3 + 2 and 6."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 4)
    tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert torch.equal(x.flatten(0, 1)[indices], tokens)


def test_rows_by_index():
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([4, 0])
    picked, rest = bert_padding.index_first_axis_residual(x, at)
    assert torch.equal(picked, bert_padding.index_first_axis(x, at)) and torch.equal(rest, x)
    (dx,) = torch.autograd.grad(picked.sum() + 2 * rest.sum(), x)
    assert dx[:, 0].tolist() == [3, 2, 2, 2, 3, 2]
    put = bert_padding.index_put_first_axis(picked, at, 5)
    assert torch.equal(put[at], picked) and not put[[1, 2, 3]].any()
