"""The model that is always there."""

import torch

from onchip.models import builtin


def test_it_is_the_same_everywhere_and_says_what_it_is():
    one, other = builtin.tiny(), builtin.tiny(dtype=torch.bfloat16)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    assert "random weights" in builtin.ABOUT
    assert one.config.vocab_size == 257 and one.config.eos_token_ids == (256,)
