"""A built-in model, so that the first command works without a download."""

from pathlib import Path

import torch

from onchip.models import safetensors
from onchip.models.config import ModelConfig
from onchip.models.decoder import Decoder
from onchip.models.int8_weights import dequantise
from onchip.models.loader import from_tensors, read_json

NAME = "tiny"
FOLDER = Path(__file__).with_name("tiny")  # see its MODEL_CARD.md
WEIGHTS = FOLDER / "model-int8.safetensors"  # made by examples/quantise_lm.py
ABOUT = "the built-in model was trained on the King James Bible alone: it continues texts"


def tiny(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The same weights on every device. Its tokens are bytes; token 256 ends a text. `save` writes
    it to a folder that transformers loads.
    """
    config = ModelConfig.from_hf(read_json(FOLDER / "config.json"))
    return from_tensors(config, dequantise(safetensors.read_all(WEIGHTS)), device, dtype)
