"""Language models: one decoder for the families of `FAMILIES`, loaded from safetensors."""

from . import builtin
from .config import FAMILIES, Layer, ModelConfig
from .decoder import Decoder, positions_of
from .loader import Checkpoint, inspect, load, random_model, save
from .names import Part, num_parameters
from .rotary import Rotary

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "Decoder",
    "Layer",
    "ModelConfig",
    "Part",
    "Rotary",
    "builtin",
    "inspect",
    "load",
    "num_parameters",
    "positions_of",
    "random_model",
    "save",
]
