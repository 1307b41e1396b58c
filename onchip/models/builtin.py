"""A model that is always there, so that the first command works with no download."""

from pathlib import Path

import torch

from onchip.models.decoder import Decoder
from onchip.models.loader import load

NAME = "tiny"
FOLDER = Path(__file__).with_name("tiny")  # examples/train_lm.py made it; MODEL_CARD.md says how
ABOUT = "the built-in model has read the King James Bible and nothing else: it continues texts"


def tiny(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The same weights on every device; its tokens are bytes, and 256 ends a text."""
    return load(FOLDER, device, dtype)
