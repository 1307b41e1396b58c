"""A built-in model, so that the first command works without a download."""

from pathlib import Path

import torch

from onchip.models.decoder import Decoder
from onchip.models.loader import load

NAME = "tiny"
FOLDER = Path(__file__).with_name("tiny")  # made by examples/train_lm.py, see MODEL_CARD.md
ABOUT = "the built-in model was trained on the King James Bible alone: it continues texts"


def tiny(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The same weights on every device. Its tokens are bytes; token 256 ends a text."""
    return load(FOLDER, device, dtype)
