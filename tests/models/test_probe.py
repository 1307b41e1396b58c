"""Unsupported configs are refused before a model is built."""

from types import SimpleNamespace

import pytest
import torch

from onchip import UnsupportedError
from onchip.models.probe import Heads, _common, check_config


class DynamicLayer:
    pass


class RecurrentLayer:
    pass


def source(layers=(DynamicLayer,), **fields):
    """A config, and a library that makes a cache for it."""
    text = SimpleNamespace(num_hidden_layers=len(layers), rope_parameters=None)
    vars(text).update(fields)
    text.get_text_config = lambda: text
    cache = lambda config: SimpleNamespace(layers=[kind() for kind in layers])
    return text, SimpleNamespace(DynamicCache=cache)


def test_an_ordinary_config_passes():
    check_config(*source())
    check_config(*source(rope_parameters={"rope_type": "yarn", "factor": 4.0}))


@pytest.mark.parametrize(
    ("layers", "fields", "sentence"),
    [
        ((DynamicLayer,), {"is_encoder_decoder": True}, "it has an encoder"),
        ((DynamicLayer, RecurrentLayer), {}, r"more state than keys and values \(RecurrentLayer\)"),
        ((DynamicLayer,), {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        (
            (DynamicLayer,),
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "x": {"a": 1}}},
            "dynamic",
        ),
    ],
)
def test_configs_that_pages_cannot_serve_are_refused(layers, fields, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        check_config(*source(layers, **fields))


@pytest.mark.parametrize("count", [0, 4097, 10**9])
def test_layers_are_counted_before_a_list_is_built(count):
    with pytest.raises(ValueError, match=f"{count} layers"):
        check_config(*source(num_hidden_layers=count))


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        (Heads(4, 1, 577, 512, torch.bfloat16), "too wide: head_dim=577 must be between 1 and 576"),
        (Heads(4, 1, 576, 513, torch.bfloat16), "head_dim_v=513 between 1 and 512"),
        (Heads(4, 1, 64, 64, torch.int8), "is not of torch.float64, torch.float32"),
    ],
)
def test_heads_that_no_kernel_serves_are_refused(heads, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        _common([heads, heads])


def test_heads_of_latent_attention_are_served():
    heads = Heads(16, 1, 576, 512, torch.bfloat16)
    assert _common([heads, heads]) == heads
