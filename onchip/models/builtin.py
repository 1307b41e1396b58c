"""Built-in models, so that the first command works without a download: one that generates text, and
a smaller one that drafts for it (engine/speculation).
"""

from pathlib import Path

import torch

from onchip.models import safetensors
from onchip.models.config import ModelConfig
from onchip.models.decoder import Decoder
from onchip.models.int8_weights import dequantise
from onchip.models.loader import from_tensors, read_json

NAME, DRAFT = NAMES = ("tiny", "tiny-draft")
FOLDER = Path(__file__).with_name("tiny")  # see its MODEL_CARD.md
DRAFT_FOLDER = Path(__file__).with_name("tiny_draft")  # see its MODEL_CARD.md
WEIGHTS = FOLDER / "model-int8.safetensors"  # made by examples/quantise_lm.py
ABOUT = "the built-in model was trained on the King James Bible alone: it continues texts"


def tiny(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The same weights on every device. Its tokens are bytes; token 256 ends a text. `save` writes
    it to a folder that transformers loads.
    """
    return _load(FOLDER, device, dtype)


def tiny_draft(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A draft model for `tiny`: the same tokens, a twentieth of the weights."""
    return _load(DRAFT_FOLDER, device, dtype)


def load_builtin(name: str, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """By one of NAMES."""
    return tiny_draft(device, dtype) if name == DRAFT else tiny(device, dtype)


def read_config(name: str) -> ModelConfig:
    """By one of NAMES."""
    return _config(DRAFT_FOLDER if name == DRAFT else FOLDER)


def _config(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(read_json(folder / "config.json"))


def _load(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    tensors = dequantise(safetensors.read_all(folder / WEIGHTS.name))
    return from_tensors(_config(folder), tensors, device, dtype)
