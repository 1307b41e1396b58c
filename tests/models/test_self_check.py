"""A rehearsal passes a model that is the same over pages, and no other."""

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
def test_roundings_pass(decoder, dtype):
    one = random_model(decoder.config, seed=1, dtype=dtype)
    run_self_check(one, own(one))


def test_another_model_does_not(decoder):
    with pytest.raises(UnsupportedError, match=r"differ from its own by 1\.\d of their size"):
        run_self_check(decoder, own(random_model(decoder.config, seed=2)))


def test_keys_that_were_not_written_show(decoder, monkeypatch):
    """Pages hold anything until somebody writes to them."""
    monkeypatch.setattr("onchip.kvcache.KVCache.write", lambda self, layer, k, v, slots: None)
    with pytest.raises(UnsupportedError, match="in a rehearsal"):
        run_self_check(decoder, own(decoder))


def test_no_number_is_no_pass(decoder):
    with pytest.raises(UnsupportedError, match="by nan"):
        run_self_check(decoder, lambda tokens: own(decoder)(tokens) * torch.nan)
