"""Small calls for tests of validation, and the check that one is refused with a sentence."""

import pytest
import torch

import onchip


def qkv(dtype=torch.float32, batch=2, seqlen=8, heads=4, kv_heads=2, dim=16):
    make = lambda n: torch.randn(batch, seqlen, n, dim).to(dtype)
    return make(heads), make(kv_heads), make(kv_heads)


def refused(match, *args, error=ValueError, fn=None, **options):
    with pytest.raises(error, match=match) as caught:
        (fn or onchip.attention)(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, f"one sentence, not: {message}"
