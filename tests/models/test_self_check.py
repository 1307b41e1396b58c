"""The self check passes models that give the same logits over pages, and no others."""

import pytest
import torch

from onchip import UnsupportedError
from onchip.models import ModelConfig, random_model
from onchip.models.self_check import run_self_check


@pytest.fixture
def decoder(llama):
    return random_model(ModelConfig.from_hf(llama), seed=1)


def own(decoder):
    return lambda tokens: decoder.logits(decoder.full(tokens[None]))[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_errors_pass(decoder, dtype):
    one = random_model(decoder.config, seed=1, dtype=dtype)
    run_self_check(one, own(one))


def test_another_model_fails(decoder):
    with pytest.raises(UnsupportedError, match=r"differ from its own by 1\.\d of their size"):
        run_self_check(decoder, own(random_model(decoder.config, seed=2)))


def test_unwritten_keys_fail(decoder, monkeypatch):
    """Unwritten pages hold arbitrary values."""
    monkeypatch.setattr("onchip.kvcache.KVCache.write", lambda self, layer, k, v, slots: None)
    with pytest.raises(UnsupportedError, match="in a self check"):
        run_self_check(decoder, own(decoder))


def test_nan_logits_fail(decoder):
    with pytest.raises(UnsupportedError, match="by nan"):
        run_self_check(decoder, lambda tokens: own(decoder)(tokens) * torch.nan)
