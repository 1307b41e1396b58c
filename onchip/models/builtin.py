"""A model that is always there, so that the first command works with no download."""

import torch

from onchip.models.config import ModelConfig
from onchip.models.decoder import Decoder
from onchip.models.loader import random_model

NAME = "tiny"
ABOUT = "the built-in model has random weights: it shows how text is served, it says nothing"
_FIELDS = {
    "model_type": "llama",
    "vocab_size": 257,  # bytes, and the end of a text
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 256,
}


def tiny(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The same weights on every device, drawn in fp32 on the CPU."""
    return random_model(ModelConfig.from_hf(_FIELDS), seed=0).to(device, dtype)
